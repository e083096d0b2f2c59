"""A finished study of layer paths in a store: two scored objectives, two costs, a held-out stage; the fake scorer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.constraints import parse_constraint
from search_spaces.costs import ModelSize
from search_spaces.objectives import Objective
from search_spaces.spaces.base import SearchSpace
from search_spaces.study.file import parse_study
from service.store import Store
from tests.search_spaces.spaces.families import models, space
from tests.service.resolved import resolved_study
from tests.service.tune.harness import FINGERPRINTS, InlineProposer, coordinator_of, drive
from workers.serving.fake import FakeScorer

NUM_LAYERS, MAX_LAYERS = 4, 5
# 100 parameters outside the layers, 10 in each.
SIZE = ModelSize(100, {"attention": (5,) * 4, "mlp": (4,) * 4, "norm": (1,) * 4}, MAX_LAYERS)
DOCUMENT: dict[str, Any] = {
    "name": "paths",
    "models": {"base": "/b", "experts": {"math": "/m", "text": "/t"}},
    "search_space": {"kind": "dis"},
    "search": {"algorithm": "random", "constraints": ["depth <= base + 1"]},
    "fidelity": {"rungs": [4, 12, 36]},
    "objectives": [
        {"name": "math", "task": {"file": "/math.jsonl"}, "metric": "exact_match"},
        {"name": "depth", "cost": "layers"},
        {"name": "text", "task": {"file": "/text.jsonl"}, "metric": "exact_match"},
        {"name": "size", "cost": "parameters"},
    ],
    "holdout": [
        {"name": "math", "task": {"file": "/math_holdout.jsonl"}, "metric": "exact_match"},
        {"name": "text", "task": {"file": "/text_holdout.jsonl"}, "metric": "exact_match"},
    ],
    "limits": {"max_layers": MAX_LAYERS},
}
OBJECTIVES = (
    Objective("math", "exact_match", "maximize"),
    Objective(
        "depth", "layers", "minimize", (0.0, SIZE.most("layers")), (parse_constraint("depth <= base + 1"),), "layers"
    ),
    Objective("text", "exact_match", "maximize"),
    Objective("size", "parameters", "minimize", (0.0, SIZE.most("parameters")), (), "parameters"),
)


def paths_space(**options: Any) -> SearchSpace:
    family = models(("math", "text"), NUM_LAYERS, max_layers=MAX_LAYERS)
    return space("dis", replace(family, fingerprints=FINGERPRINTS), **options)


def paths_study(directory: Path, **plan: Any) -> tuple[Store, str]:
    """The store and the study's id; `plan` as for `harness.make_plan`."""
    store = Store(f"sqlite:///{directory / 'study.db'}")
    sizes = tuple(dict.fromkeys(("math", "text"), size) for size in (4, 12, 36))
    resolved = resolved_study(
        objectives=OBJECTIVES, fingerprints=FINGERPRINTS, num_layers=NUM_LAYERS, rung_samples=sizes
    )
    study = store.create_study(name="paths", document=parse_study(DOCUMENT).canonical(), resolved=resolved).id
    own = paths_space()
    given = {"objectives": OBJECTIVES, "size": SIZE, "max_trials": 20, **plan}
    coordinator = coordinator_of(store, study, space=own, proposer=InlineProposer(own, seed=3), **given)
    drive(coordinator, FakeScorer())
    return store, study
