"""Finished studies in a store, scored by the fake scorer: of layer paths with costs, and of other spaces.

They have two scored objectives and a held-out stage.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_spaces.constraints import parse_constraint
from search_spaces.costs import ModelSize
from search_spaces.objectives import Objective
from search_spaces.study.file import parse_study
from service.store import Store
from tests.service.resolved import resolved_study
from tests.service.tune.harness import FINGERPRINTS, SPACES, InlineProposer, coordinator_of, drive, space_of
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


def paths_study(directory: Path, **plan: Any) -> tuple[Store, str]:
    """A finished study of layer paths: its store and its id. `plan` as for `harness.make_plan`."""
    store = Store(f"sqlite:///{directory / 'study.db'}")
    return store, add_study(store, "dis", objectives=OBJECTIVES, document=DOCUMENT, size=SIZE, **plan)


def plain_study(store: Store, kind: str) -> str:
    """Id of a finished study without costs, in a space of `harness.SPACES`."""
    document = {
        **DOCUMENT,
        "search_space": {"kind": kind, **SPACES[kind]},
        "search": {"algorithm": "random"},
        "objectives": [spec for spec in DOCUMENT["objectives"] if "task" in spec],
        "limits": {},
    }
    return add_study(store, kind, objectives=OBJECTIVES[::2], document=document)


def add_study(
    store: Store, kind: str, *, objectives: tuple[Objective, ...], document: dict[str, Any], **plan: Any
) -> str:
    sizes = tuple(dict.fromkeys(("math", "text"), size) for size in (4, 12, 36))
    resolved = resolved_study(
        objectives=objectives, fingerprints=FINGERPRINTS, num_layers=NUM_LAYERS, rung_samples=sizes
    )
    study = store.create_job(
        kind="search", name="paths", document=parse_study(document).canonical(), accepted=resolved.to_json()
    ).id
    own = space_of(kind)
    given = {"objectives": objectives, "max_trials": 20, **plan}
    drive(coordinator_of(store, study, space=own, proposer=InlineProposer(own, seed=3), **given), FakeScorer())
    return study
