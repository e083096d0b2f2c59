"""What the names of a study stand for, for tests that examine none."""

from __future__ import annotations

from typing import Any

from search_spaces.objectives import Objective
from service.resolved_study import ResolvedStudy

__all__ = ["resolved_study"]


def resolved_study(**changes: Any) -> ResolvedStudy:
    """Two objectives and one rung."""
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
