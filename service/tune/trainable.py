"""The trial actor: it sends chunks of samples to the scorer, and reports the results, one chunk per `step`.

It owns no weights and no engine. Each result is stored before the next chunk is requested.
"""

from __future__ import annotations

import time
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
from workers.types import Scorer, ScoreRequest, ScoreResult

__all__ = ["CPUS", "EvaluationTrainable"]

# CPUs that Ray reserves for a trial actor, which only waits for replicas.
CPUS = 0.05

# Seconds to wait after an engine failed a check. Serve replaces its replica only after the next health check.
FAULT_PAUSE_S = 1.0


class EvaluationTrainable(tune.Trainable):
    """The trial actor: it sends the samples of one evaluation to the scorer, one chunk per step.

    Each step reports {"outcome": ScoreResult | ChunkFailed}. Only the first step of an actor reports {"outcome": None},
    which means that the actor runs.
    """

    @classmethod
    def default_resource_request(cls, config: dict[str, Any]) -> tune.PlacementGroupFactory:
        return tune.PlacementGroupFactory([{"CPU": CPUS}])

    def setup(self, config: dict[str, Any], scorer: Scorer) -> None:
        self._scorer = scorer
        self._is_new = True
        self.reset_config(config)

    def reset_config(self, new_config: dict[str, Any]) -> bool:
        self._evaluation: Evaluation = new_config["evaluation"]
        self._next_chunk = 0
        self._crashes = self._evaluation.crashes
        return True

    def step(self) -> dict[str, Any]:
        if self._is_new:
            self._is_new = False
            return {"outcome": None}
        evaluation = self._evaluation
        chunk = evaluation.chunks[self._next_chunk]
        request = ScoreRequest(evaluation.study, evaluation.recipe, chunk, crashes=self._crashes)
        self._next_chunk += 1
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
            crash = Crash(chunk, error.replica, error.scored_others, error.kind)
            outcome = ChunkFailed(FailureKind.CRASH, str(error), crash=crash)
        except EngineUnavailable as error:
            outcome = ChunkFailed(FailureKind.ENGINE, str(error))
        return {"outcome": outcome}

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing, because scored samples are in SQL."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing, because a restarted evaluation scores only samples that are not in SQL yet."""
