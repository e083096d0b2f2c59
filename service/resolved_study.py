"""Models, tasks, rungs and objectives that a study file resolved to when its study was accepted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from search_spaces.constraints import parse_constraint
from search_spaces.fidelity import OPEN_BRACKETS
from search_spaces.objectives import Objective
from service.types import JobRecord
from workers.file_access import FileAccess

__all__ = ["ChainedSource", "ResolvedStudy"]


@dataclass(frozen=True)
class ChainedSource:
    """A source that is an exported merge of another study.

    `study` and `name` are the other study's id and name, `trial` and `recipe_digest` those of the merge; `directory`
    is where it was exported to.
    """

    study: str
    name: str
    trial: int
    recipe_digest: str
    directory: str


@dataclass(frozen=True)
class ResolvedStudy:
    """The models, tasks and rungs that a study file resolved to when the study was created.

    A resumed study must resolve to the same. As JSON it is the `accepted` of a study's job.

    `fingerprints` are of the models by alias, `commits` those of hub models by the name in the study file, `tasks` and
    `holdout_tasks` the digests of the tasks by objective. `rung_samples[r]` are the samples by objective at rung r.
    Proposals may run `max_staleness` trials ahead of evaluations; `open_brackets` and `batch` are those of
    `service.tune.plan.Plan`. `version` is the program's. `access` says which files
    the study may read, as the server allowed when it accepted the study; None: all. `algorithm` is the searcher, also
    if the study file says auto, and `algorithm_reason` why it was chosen; both are None for studies of early versions.
    `chained` are the sources that are merges of other studies.
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
    open_brackets: int = OPEN_BRACKETS
    batch: int = 1

    def to_json(self) -> dict[str, Any]:
        """This object as the JSON document that is stored; its key for `max_staleness` is `lag`."""
        return {
            "fingerprints": dict(self.fingerprints),
            "commits": dict(self.commits),
            "num_layers": self.num_layers,
            "tasks": dict(self.tasks),
            "holdout_tasks": dict(self.holdout_tasks),
            "rung_samples": [dict(samples) for samples in self.rung_samples],
            "lag": self.max_staleness,
            "open_brackets": self.open_brackets,
            "batch": self.batch,
            "objectives": [
                {**asdict(objective), "constraints": [constraint.text for constraint in objective.constraints]}
                for objective in self.objectives
            ],
            "version": self.version,
            "algorithm": self.algorithm,
            "algorithm_reason": self.algorithm_reason,
            **({} if self.access is None else {"access": asdict(self.access)}),
            **({"chained": {alias: asdict(own) for alias, own in self.chained.items()}} if self.chained else {}),
        }

    @classmethod
    def of(cls, study: JobRecord) -> Self:
        """Read what a stored study resolved to."""
        return cls.from_json(study.accepted)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read the document of `to_json`.

        Early versions wrote no `commits`, `access`, `algorithm` and constraints. Studies without `open_brackets` and
        `batch` keep the rules that they began with: two open brackets, and proposals one by one.
        """
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
            open_brackets=document.get("open_brackets", OPEN_BRACKETS),
            batch=document.get("batch", 1),
            chained={alias: ChainedSource(**own) for alias, own in document.get("chained", {}).items()},
        )
