"""The unit of work that the coordinator gives to Ray Tune: a trial, a rung, and the samples to score at the rung."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Self

from search_spaces.recipe import Recipe
from service.errors import StudyUnusable
from workers.errors import CrashKind, EngineFault, EngineUnavailable, EvidenceMismatch
from workers.types import ScoreResult, Span, Split

__all__ = ["ChunkFailed", "Crash", "Evaluation", "FailureKind"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """A unit of work: the samples that one trial still needs for a rung of the search, the holdout data or a benchmark.

    - `study`, `trial`, `recipe`: the study's id, the number of the trial, and the trial's recipe
    - `split`: the kind of data: search data, holdout data or benchmarks
    - `rung`: on search data, the index of the rung (a number of samples at which trials are compared); on holdout data
      0; on benchmarks the position in `Plan.benchmarks`
    - `chunks`: the samples in groups; each chunk is one request to an engine, and is stored before the next chunk
    - `crashes`: the largest number of engines that have crashed with the same chunk
    - `is_again`: whether the samples are scored again, because the engine that scored them failed a check; the trial's
      rungs then do not change
    """

    study: str
    trial: int
    rung: int
    split: Split
    recipe: Recipe
    chunks: tuple[tuple[Span, ...], ...]
    crashes: int = 0
    is_again: bool = False

    def ends_with(self, result: ScoreResult) -> bool:
        """Whether `result` is the result of the evaluation's last chunk (group of samples)."""
        last = self.chunks[-1][-1]
        return any((s.objective, s.position) == (last.objective, last.stop - 1) for s in result.samples)

    def __repr__(self) -> str:  # Tune uses it in tags and folder names
        return f"trial-{self.trial}-{self.split}-{'again' if self.is_again else self.rung}"

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:  # immutable, and Tune copies every configuration
        return self


class FailureKind(StrEnum):
    """The reason why a chunk (the samples of one request) was not scored.

    - TRIAL: the trial's recipe cannot be merged or scored
    - METRIC: a task's metric failed on the answers of the trial's merge
    - CRASH: the engine crashed with the chunk
    - ENGINE: no engine is available
    - STUDY: an engine cannot use the study's models or a task
    - EVIDENCE: the hashes that the engine reports show that it held another merge than the requested one
    - FAULT: an engine failed a check, such as the comparison of its log-probabilities with the log-probabilities of
      transformers
    """

    TRIAL = "trial"
    METRIC = "metric"
    CRASH = "crash"
    ENGINE = "engine"
    STUDY = "study"
    EVIDENCE = "evidence"
    FAULT = "fault"


@dataclass(frozen=True)
class Crash:
    """A crash of an engine while it scored the samples `chunk` of one request.

    `replica` is the id of the engine's Ray Serve replica. `scored_others` says whether the engine had scored another
    recipe before; if it had, the engine itself worked, and the recipe is the likely cause. `kind` says how the engine
    ended: by an error, without progress, or with the death of its process.
    """

    chunk: tuple[Span, ...]
    replica: str
    scored_others: bool
    kind: CrashKind


@dataclass(frozen=True)
class ChunkFailed:
    """A failure to score a chunk, which is the samples of one request to an engine.

    `kind` is the kind of failure, and `reason` is its description. `crash` describes the engine's crash if the engine
    crashed with the chunk. `fault` describes the failed check if the engine failed a check.
    """

    kind: FailureKind
    reason: str
    crash: Crash | None = None
    fault: EngineFault | None = None

    def raise_if_final(self) -> None:
        """Raise an error if this failure prevents the driver from continuing the study.

        Raises:
            EvidenceMismatch: The hashes that the engine reported do not belong to the requested merge (kind EVIDENCE).
            StudyUnusable: An engine cannot use the study's models or a task (kind STUDY).
            EngineUnavailable: No engine is available (kind ENGINE).
        """
        match self.kind:
            case FailureKind.EVIDENCE:
                raise EvidenceMismatch(self.reason)
            case FailureKind.STUDY:
                raise StudyUnusable(self.reason)
            case FailureKind.ENGINE:
                raise EngineUnavailable(f"no engine to score with: {self.reason}")
