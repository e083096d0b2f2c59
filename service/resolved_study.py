"""Resolved study: the models, tasks, rungs and objectives that a study file meant when it was accepted."""

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
    """Source model of a study that another job made: an exported merge of a study, or an expert of a fine-tuning.

    `study` and `name` are the id and the name of the other job. `directory` is the directory of the model, or its URL
    in an object store.

    For a merge, `trial` is the number of its trial in the other study, `recipe_digest` is the hash of its recipe, and
    `expert` is None. For an expert, `trial` is 0, `recipe_digest` is the hash of the expert's files, and `expert` is
    its name in the fine-tuning.
    """

    study: str
    name: str
    trial: int
    recipe_digest: str
    directory: str
    expert: str | None = None


@dataclass(frozen=True)
class ResolvedStudy:
    """Models, tasks, rungs and objectives that a study file meant when the study was created.

    A study that is resumed must resolve to the same models, tasks, rungs and objectives. This record is stored as JSON
    in the field `accepted` of the study's job. A rung is a number of samples at which trials are compared; a bracket is
    a ladder of rungs, as in Hyperband.

    - `fingerprints`: hashes of the models' files, keyed by alias (the model's name in the study file).
    - `commits`: commits of models on the Hugging Face hub, keyed by alias.
    - `tasks`, `holdout_tasks`: digests of the tasks for search and holdout data, keyed by objective.
    - `rung_samples`: for each rung, the numbers of samples, keyed by objective.
    - `max_staleness`: the number of trials by which proposals may run ahead of evaluations: trial n is proposed once
      the trials up to n - `max_staleness` have been evaluated.
    - `open_brackets`: the number of brackets in which trials may run at the same time.
    - `batch`: the number of consecutive proposals that are made from the same results.
    - `version`: version of the program that created the study.
    - `access`: files that the study may read, as the server allowed when the study was created; None for all files.
    - `algorithm`, `algorithm_reason`: name of the searcher, and why it was chosen; None in studies of early versions.
    - `searcher_version`: version of the searcher when the study was created. A searcher gets a new version when a
      change of its code makes other proposals for the same results.
    - `scheduler_version`: version of the scheduler when the study was created. A scheduler gets a new version when a
      change of its code makes other decisions for the same results.
    - `descent_points`: how many points of the gradient descents become trials, by the limits on trials and gradients
      when the study was created; None if the searcher is another one, and in studies of earlier versions, which use
      `search.gradient.points` of the study file.
    - `chained`: sources that are merges of other studies or experts of fine-tunings, keyed by alias.
    - `recipes`: digests of the recipes that the study file lists, keyed by name.
    - `dtype`: dtype in which engines compute on the machines for which the study was checked, such as "bfloat16"; None
      in studies of earlier versions.
    - `gpu_share_left`: share of their GPUs' memory that the study's engines leave to gradients and verification.
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
    searcher_version: int = field(default=1, compare=False)
    scheduler_version: int = field(default=1, compare=False)
    descent_points: int | None = field(default=None, compare=False)
    chained: Mapping[str, ChainedSource] = field(default_factory=dict, compare=False)
    open_brackets: int = OPEN_BRACKETS
    batch: int = 1
    recipes: Mapping[str, str] = field(default_factory=dict)
    dtype: str | None = field(default=None, compare=False)
    gpu_share_left: float = field(default=0.0, compare=False)

    @property
    def task_digests(self) -> frozenset[str]:
        """Digests of all tasks, for search and holdout data."""
        return frozenset((*self.tasks.values(), *self.holdout_tasks.values()))

    def to_json(self) -> dict[str, Any]:
        """Convert the resolved study to the JSON document that is stored with the study.

        Keys are the names of the fields, except that `max_staleness` is stored under its earlier name `lag`.
        """
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
            "searcher_version": self.searcher_version,
            "scheduler_version": self.scheduler_version,
            **({} if self.descent_points is None else {"descent_points": self.descent_points}),
            **({"recipes": dict(self.recipes)} if self.recipes else {}),
            **({} if self.dtype is None else {"dtype": self.dtype}),
            **({"gpu_share_left": self.gpu_share_left} if self.gpu_share_left else {}),
            **({} if self.access is None else {"access": asdict(self.access)}),
            **({"chained": {alias: asdict(own) for alias, own in self.chained.items()}} if self.chained else {}),
        }

    @classmethod
    def of(cls, study: JobRecord) -> Self:
        """Read the models, tasks, rungs and objectives that a study file meant when the study was created."""
        return cls.from_json(study.accepted)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read a resolved study from the JSON document that `to_json` of this or an earlier version returned.

        Fields that an earlier version did not store get the values by which that version ran its studies. For example,
        a study without `batch` gets batches (consecutive proposals that are made from the same results) of one
        proposal.
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
            access=access and FileAccess.of(access),
            algorithm=document.get("algorithm"),
            algorithm_reason=document.get("algorithm_reason"),
            searcher_version=document.get("searcher_version", 1),
            scheduler_version=document.get("scheduler_version", 1),
            descent_points=document.get("descent_points"),
            open_brackets=document.get("open_brackets", OPEN_BRACKETS),
            batch=document.get("batch", 1),
            recipes=document.get("recipes", {}),
            dtype=document.get("dtype"),
            gpu_share_left=document.get("gpu_share_left", 0.0),
            chained={alias: ChainedSource(**own) for alias, own in document.get("chained", {}).items()},
        )
