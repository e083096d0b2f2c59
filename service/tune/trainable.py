"""The trial actor: it sends chunks of samples to the scorer, and reports the results, one chunk for each `step`.

The actor owns no weights and no engine. Each result is stored before the next chunk is requested.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from ray import tune

from service.tune.evaluation import ChunkFailed, Crash, Evaluation, FailureKind
from workers.errors import (
    EngineCrashed,
    EngineFault,
    EngineUnavailable,
    EvidenceMismatch,
    InvalidModel,
    InvalidTask,
    MetricFailed,
    TrialFailed,
)
from workers.telemetry import logs, tracing
from workers.types import Scorer, ScoreRequest, ScoreResult, Span

__all__ = ["CPUS", "EvaluationTrainable"]

# CPUs that Ray reserves for a trial actor, which only waits for replicas.
CPUS = 0.05

# Seconds to wait after an engine failed a check. Serve replaces its replica only after the next health check.
FAULT_PAUSE_S = 1.0


class EvaluationTrainable(tune.Trainable):
    """The trial actor: it sends the samples of one evaluation to the scorer, one chunk (group of samples) per step.

    Each step reports {"outcome": ScoreResult | ChunkFailed} to Tune. The first step of a new actor is an exception: it
    sends nothing, and reports {"outcome": None}, which tells the scheduler that the actor has started.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": CPUS}])

    def setup(self, config: dict[str, Any], scorer: Scorer) -> None:
        logs.log_in_worker()
        tracing.start_tracing("trial actor")
        self._scorer = scorer
        self._is_new = True
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._evaluation: Evaluation = new_config["evaluation"]
        self._traceparent: str | None = new_config.get("traceparent")
        self._next_chunk = 0
        self._crashes = self._evaluation.crashes
        return True

    def step(self) -> dict[str, Any]:
        if self._is_new:
            self._is_new = False
            return {"outcome": None}
        evaluation = self._evaluation
        chunk = evaluation.chunks[self._next_chunk]
        self._next_chunk += 1
        with logs.fields(job=evaluation.study, trial=evaluation.trial), self._span_of(chunk) as span:
            request = ScoreRequest(
                evaluation.study,
                evaluation.recipe,
                chunk,
                crashes=self._crashes,
                trial=evaluation.trial,
                traceparent=span.traceparent,
            )
            outcome = self._outcome(request)
            if isinstance(outcome, ChunkFailed):
                span.fail(outcome.kind.value)
        return {"outcome": outcome}

    def _span_of(self, chunk: tuple[Span, ...]) -> AbstractContextManager[tracing.Span]:
        """Context manager of the trace span of a chunk of samples; it does nothing if the trial is not traced."""
        if self._traceparent is None:
            return nullcontext(tracing.NOTHING)
        attributes: tracing.Attributes = {
            "mergesearch.job": self._evaluation.study,
            "mergesearch.trial": self._evaluation.trial,
            "mergesearch.objective": ", ".join(dict.fromkeys(span.objective for span in chunk)),
            "mergesearch.samples": sum(span.stop - span.start for span in chunk),
        }
        return tracing.span("chunk", attributes, parent=self._traceparent, kind="client")

    def _outcome(self, request: ScoreRequest) -> ScoreResult | ChunkFailed:
        """The engine's result for `request`, which asks for scores of samples, or the failure if there is no result."""
        outcome: ScoreResult | ChunkFailed
        try:
            outcome = self._scorer.score(request)
        except MetricFailed as error:
            outcome = ChunkFailed(FailureKind.METRIC, str(error))
        except TrialFailed as error:
            outcome = ChunkFailed(FailureKind.TRIAL, str(error))
        except (InvalidModel, InvalidTask) as error:
            outcome = ChunkFailed(FailureKind.STUDY, str(error))
        except EngineFault as error:
            time.sleep(FAULT_PAUSE_S)
            outcome = ChunkFailed(FailureKind.FAULT, str(error), fault=error)
        except EvidenceMismatch as error:
            outcome = ChunkFailed(FailureKind.EVIDENCE, str(error))
        except EngineCrashed as error:  # unless the coordinator stops the evaluation, the same chunk is sent again
            self._next_chunk -= 1
            self._crashes += 1
            crash = Crash(request.spans, error.replica, error.scored_others, error.kind)
            outcome = ChunkFailed(FailureKind.CRASH, str(error), crash=crash)
        except EngineUnavailable as error:
            outcome = ChunkFailed(FailureKind.ENGINE, str(error))
        return outcome

    def cleanup(self) -> None:
        tracing.stop_tracing()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing when Tune asks for a checkpoint, because all scored samples are in the database."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing when Tune restores a checkpoint, because a restarted evaluation leaves out all stored samples."""
