"""A resolved study (digests of models and tasks, objectives, rungs) for tests that examine no study."""

from __future__ import annotations

from typing import Any

from search_spaces.objectives import Objective
from search_spaces.study.file import parse_study
from service.resolved_study import ResolvedStudy

__all__ = ["resolved_study", "study_document"]


def resolved_study(**changes: Any) -> ResolvedStudy:
    """A resolved study with two objectives and one rung, with `changes` of its fields."""
    names = ("math", "text")
    arguments: dict[str, Any] = {
        "fingerprints": {"base": "b0", "math": "m1", "text": "t2"},
        "num_layers": 2,
        "tasks": {name: f"task-{name}" for name in names},
        "holdout_tasks": {},
        "rung_samples": (dict.fromkeys(names, 4),),
        "max_staleness": 5,
        "objectives": tuple(Objective(name, "exact_match", "maximize", None) for name in names),
        "version": "0",
    }
    return ResolvedStudy(**{**arguments, **changes})


def study_document() -> dict[str, Any]:
    """The study file of `resolved_study`, in canonical form; its models and data do not exist."""
    objectives = [{"name": name, "task": f"task-{name}", "metric": "exact_match"} for name in ("math", "text")]
    models = {"base": "/models/base", "experts": {name: f"/models/{name}" for name in ("math", "text")}}
    fidelity = {"scheduler": "none"}
    return parse_study({"name": "test", "models": models, "objectives": objectives, "fidelity": fidelity}).canonical()
