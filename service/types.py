"""Records and enums shared by all of `service`: plain data, no SQL, no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from search_spaces.constraints import parse_constraint
from search_spaces.objectives import Objective
from search_spaces.recipe import Recipe
from workers.file_access import FileAccess

__all__ = [
    "HEARTBEAT_S",
    "RESUMED_BY_REQUEST",
    "ArtifactRecord",
    "ChainedSource",
    "Comparison",
    "Estimate",
    "EventKind",
    "ExportRecord",
    "ExportState",
    "JobKind",
    "JobRecord",
    "JobState",
    "Origin",
    "ResolvedStudy",
    "RungRecord",
    "TrialRecord",
    "TrialState",
]

# The interval of a driver's heartbeats; a driver without one for several intervals is considered dead.
HEARTBEAT_S = 5.0

# The reason of a study that is STOPPED because it is to go on.
RESUMED_BY_REQUEST = "resumed by request"


class TrialState(StrEnum):
    """As in Optuna. PRUNED: scored, but not promoted to the full budget."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    PRUNED = "PRUNED"
    FAIL = "FAIL"

    @property
    def is_finished(self) -> bool:
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)


class Origin(StrEnum):
    """Where a trial comes from: `source` (base, expert), `published` (a recipe from the literature), `search`
    (the searcher), `user`."""

    SOURCE = "source"
    PUBLISHED = "published"
    SEARCH = "search"
    USER = "user"


class JobKind(StrEnum):
    """What the drivers of a stored study do (`service.jobs.driver`): `search` for merges, `finetune` an expert."""

    SEARCH = "search"
    FINETUNE = "finetune"

    @property
    def noun(self) -> str:
        """What messages call a stored study of this kind."""
        return {JobKind.SEARCH: "study", JobKind.FINETUNE: "fine-tuning"}[self]


class JobState(StrEnum):
    """CREATED -> RUNNING -> COMPLETE | FAILED | CANCELLED. A server continues a STOPPED study automatically, a FAILED
    one on request."""

    CREATED = "CREATED"
    RUNNING = "RUNNING"
    STOPPED = "STOPPED"
    COMPLETE = "COMPLETE"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"

    @property
    def is_finished(self) -> bool:
        return self in (JobState.COMPLETE, JobState.FAILED, JobState.CANCELLED)


class ExportState(StrEnum):
    """WAITING -> RUNNING -> COMPLETE | FAIL."""

    WAITING = "WAITING"
    RUNNING = "RUNNING"
    COMPLETE = "COMPLETE"
    FAIL = "FAIL"


class EventKind(StrEnum):
    """The kinds of a study's events, as stored and as clients read them. Later versions may store further kinds."""

    CREATED = "created"
    ATTEMPT = "attempt"
    STATE = "state"
    WAITING = "waiting"
    RESUMED = "resumed"
    JOB_REFUSED = "job_refused"
    TRIAL = "trial"
    RUNG = "rung"
    TRIAL_STATE = "trial_state"
    REPLICA = "replica"
    CRASH = "crash"
    ACTORS = "actors"
    SEARCH_NOTE = "search_note"
    SEARCH_ENDED = "search_ended"
    HOLDOUT_STARTED = "holdout_started"
    HOLDOUT_SCORED = "holdout_scored"
    HOLDOUT_FAILED = "holdout_failed"
    OUT_OF_RANGE = "out_of_range"
    VERIFICATION = "verification"
    ENGINE_FAULT = "engine_fault"
    SCORED_AGAIN = "scored_again"
    CANARIES = "canaries"
    TRAINING = "training"
    STUDY = "study"
    ANALYSIS = "analysis"


@dataclass(frozen=True)
class Estimate:
    """A mean over `samples` scored samples, its standard error and 95 % interval, in the metric's own unit."""

    value: float
    standard_error: float
    samples: int
    ci95: tuple[float, float]


@dataclass(frozen=True)
class RungRecord:
    """One finished rung of a trial: per objective, the mean over the rung's samples and its standard error, which is
    None where a single sample shows no spread."""

    rung: int
    num_samples: Mapping[str, int]
    values: Mapping[str, float]
    standard_errors: Mapping[str, float | None]


@dataclass(frozen=True)
class TrialRecord:
    """One trial. `number` is unique in its study and never reused; `bracket` is None outside brackets (sources,
    published). `rungs` holds finished rungs in order, `values` those at full budget, empty if it was not reached."""

    number: int
    origin: Origin
    label: str
    state: TrialState
    recipe: Recipe
    configuration: Mapping[str, Any] | None = None
    bracket: int | None = None
    reason: str | None = None
    rungs: tuple[RungRecord, ...] = ()
    samples_scored: int = 0
    samples_reused: int = 0
    timings_s: Mapping[str, float] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    standard_errors: Mapping[str, float | None] = field(default_factory=dict)

    def after_chunk(self, timings_s: Mapping[str, float], num_scored: int | None) -> Self:
        """Once a chunk is stored: its timings are added, and the number of samples that were new; None where they are
        not the search's."""
        timings = {name: self.timings_s.get(name, 0.0) + seconds for name, seconds in timings_s.items()}
        found = replace(self, timings_s={**self.timings_s, **timings})
        if num_scored is None:
            return found
        state = TrialState.RUNNING if self.state is TrialState.WAITING else self.state
        return replace(found, samples_scored=self.samples_scored + num_scored, state=state)


@dataclass(frozen=True)
class ChainedSource:
    """A source that is a merge of another study: the study's id and name, the trial, its recipe's digest, and where it
    was exported to."""

    study: str
    name: str
    trial: int
    recipe_digest: str
    directory: str


@dataclass(frozen=True)
class ResolvedStudy:
    """What the names in a study file resolved to when the study was created. A resumed study must resolve to the same.

    `fingerprints` are of the models by alias, `commits` those of hub models by the name in the study file, `tasks` and
    `holdout_tasks` the digests of the tasks by objective. `rung_samples[r]` are the samples of each objective at rung
    r; proposals may run `max_staleness` trials ahead of evaluations; `version` is the program's. `access` says which
    files the study may read, as the server allowed when it accepted the study; None: all. `algorithm` is the searcher,
    also where the study file says auto, and `algorithm_reason` why it was chosen; early studies have neither. `chained`
    are the sources that are merges of other studies. `artifact_bytes` is about what the artifacts of a fine-tuning will
    take; early ones have 0.
    """

    fingerprints: Mapping[str, str]
    num_layers: int
    tasks: Mapping[str, str]
    holdout_tasks: Mapping[str, str]
    rung_samples: tuple[Mapping[str, int], ...]
    max_staleness: int
    objectives: tuple[Objective, ...]
    version: str
    commits: Mapping[str, str] = field(default_factory=dict)
    access: FileAccess | None = field(default=None, compare=False)
    algorithm: str | None = field(default=None, compare=False)
    algorithm_reason: str | None = field(default=None, compare=False)
    chained: Mapping[str, ChainedSource] = field(default_factory=dict, compare=False)
    artifact_bytes: int = field(default=0, compare=False)

    def to_json(self) -> dict[str, Any]:
        """The stored document. Its key for `max_staleness` is `lag`."""
        return {
            "fingerprints": dict(self.fingerprints),
            "commits": dict(self.commits),
            "num_layers": self.num_layers,
            "tasks": dict(self.tasks),
            "holdout_tasks": dict(self.holdout_tasks),
            "rung_samples": [dict(samples) for samples in self.rung_samples],
            "lag": self.max_staleness,
            "objectives": [
                {**asdict(objective), "constraints": [constraint.text for constraint in objective.constraints]}
                for objective in self.objectives
            ],
            "version": self.version,
            "algorithm": self.algorithm,
            "algorithm_reason": self.algorithm_reason,
            **({} if self.access is None else {"access": asdict(self.access)}),
            **({"chained": {alias: asdict(own) for alias, own in self.chained.items()}} if self.chained else {}),
            **({"artifact_bytes": self.artifact_bytes} if self.artifact_bytes else {}),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """From `to_json`'s document; early ones have no `commits`, `access`, `algorithm` and constraints."""
        access = document.get("access")
        return cls(
            fingerprints=document["fingerprints"],
            commits=document.get("commits", {}),
            num_layers=document["num_layers"],
            tasks=document["tasks"],
            holdout_tasks=document["holdout_tasks"],
            rung_samples=tuple(document["rung_samples"]),
            max_staleness=document["lag"],
            objectives=tuple(
                Objective(
                    o["name"],
                    o["metric"],
                    o["direction"],
                    o["range"] and tuple(o["range"]),
                    tuple(parse_constraint(text) for text in o.get("constraints", ())),
                    o.get("cost_of_recipe"),
                )
                for o in document["objectives"]
            ),
            version=document["version"],
            access=access and FileAccess(tuple(access["readable"]), tuple(access["trusted"])),
            algorithm=document.get("algorithm"),
            algorithm_reason=document.get("algorithm_reason"),
            chained={alias: ChainedSource(**own) for alias, own in document.get("chained", {}).items()},
            artifact_bytes=document.get("artifact_bytes", 0),
        )


@dataclass(frozen=True)
class JobRecord:
    """A study as stored.

    `document` is the canonical study file, `resolved` what its names resolved to at creation. `attempt` counts
    the drivers that took it over, `submissions` the drivers sent to a cluster; `submitted_after` is the number of
    attempts at the last submission. At `progressed_at` the driver last got on with the study; it is taken for hung when
    it has not for `patience_s` seconds; `waiting_for` is what it waits for. Times are seconds since the epoch; 0 or
    None: never."""

    id: str
    name: str
    state: JobState
    document: Mapping[str, Any]
    resolved: ResolvedStudy
    created_at: float
    reason: str | None = None
    wall_clock_s: float = 0.0
    attempt: int = 0
    heartbeat_at: float | None = None
    progress: Mapping[str, Any] | None = None
    submissions: int = 0
    submitted_at: float = 0.0
    submitted_after: int = 0
    request_digest: str | None = None
    progressed_at: float | None = None
    patience_s: float | None = None
    waiting_for: str | None = None
    kind: JobKind = JobKind.SEARCH


@dataclass(frozen=True)
class ArtifactRecord:
    """A file or directory that a study made, by its content: `digest` is the sha256 of its manifest, `num_bytes` the
    size of its files, `facts` what its maker says of it."""

    study: str
    name: str
    digest: str
    num_bytes: int
    created_at: float
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ExportRecord:
    """A merged model that was requested for download; `reason` says why writing it failed."""

    id: str
    study: str
    trial: int
    dtype: str
    state: ExportState
    created_at: float
    reason: str | None = None


@dataclass(frozen=True)
class Comparison:
    """A finalist, source or published recipe on the holdout data. `mean` is over the accuracy objectives. `differences`
    are paired, this row minus the best finalist, per objective and of the mean under the key "mean"."""

    label: str
    trial: int
    values: Mapping[str, Estimate]
    differences: Mapping[str, Estimate] = field(default_factory=dict)
    mean: Estimate | None = None
