"""The JSON of steps as this version and as earlier versions stored it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.store.steps import (
    CompletionsRequest,
    CompletionsResult,
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    NoteRequest,
    NoteResult,
    StepRequest,
    StepResult,
    UpdateRequest,
    UpdateResult,
    read_step,
    step_document,
    step_of,
)
from tests.service.tune.harness import new_study

POSITIONS = {"math": (0, 3), "text": (1,)}

EXAMPLES: list[tuple[StepRequest, StepResult]] = [
    (
        LossesRequest(label="trial 4", point=(0.5, 1.0), positions=POSITIONS, completions=("text",)),
        LossesResult(losses={"math": 0.25, "text": 0.5}, recipe="r", bank="b"),
    ),
    (
        GradientRequest(
            label="descent 2",
            descent=2,
            point=(0.5, 1.0),
            positions=POSITIONS,
            weights={"math": 1.0},
            preference={"math": 0.75, "text": 0.25},
        ),
        GradientResult(losses={"math": 0.25}, gradient=(0.1, -0.2), seconds=1.5, recipe="r", bank="b"),
    ),
    (
        GradientRequest(label="descent 0", descent=0, point=(0.5,), positions=POSITIONS, weights={"math": 1.0}),
        GradientResult(failure="the loss is nan"),
    ),
    (
        CompletionsRequest(label="completions", completions=("math", "text")),
        CompletionsResult(completions={"math": ((0, 1), (2, 0)), "text": ()}),
    ),
    (NoteRequest(label="gradients are used", decision="gradient"), NoteResult()),
    (
        UpdateRequest(label="iteration 3", iteration=3, preference={"math": 1.0, "text": 0.0}),
        UpdateResult(statistics={"outcome": 0.5}, checkpoint="abc"),
    ),
]

# A step of each kind in a database of version 0.1 has these keys.
REQUEST_KEYS = {"kind", "label", "point", "positions", "weights", "decision", "preference", "completions", "iteration"}
RESULT_KEYS = {
    "losses",
    "gradient",
    "seconds",
    "recipe",
    "bank",
    "failure",
    "completions",
    "statistics",
    "checkpoint",
}


@pytest.mark.parametrize(("request_", "result"), EXAMPLES)
def test_a_step_is_read_as_it_was_stored(request_: StepRequest, result: StepResult) -> None:
    step = step_of(7, 9, request_, result)
    document = json.loads(json.dumps(step_document(step)))
    assert read_step(7, 9, document) == step
    assert document["request"].keys() >= REQUEST_KEYS
    assert document["result"].keys() == RESULT_KEYS
    assert document["request"].keys() - REQUEST_KEYS == (
        {"descent"} if document["request"]["kind"] == "gradient" else set()
    )


def test_a_step_is_charged_by_its_samples() -> None:
    assert [request.num_charged for request, _ in EXAMPLES] == [3, 9, 9, 0, 0, 0]


def test_charges_are_summed_in_the_store(tmp_path: Path) -> None:
    """The samples that a study's steps are charged as are those of its own steps."""
    store, study = new_study(tmp_path)
    assert store.num_charged(study) == 0
    writer = store.open_attempt(study)
    for number, (request, result) in enumerate(EXAMPLES):
        writer.add_step(step_of(number, 9, request, result))
    other = store.create_job(kind="search", name="other", document={}, accepted={}).id
    assert (store.num_charged(study), store.num_charged(other)) == (21, 0)
    store.close()


def stored_gradient() -> dict[str, Any]:
    """A gradient as the first version with searchers by gradients stored it."""
    return {
        "request": {
            "kind": "gradient",
            "label": "descent 12",
            "point": [0.5, 1],
            "positions": {"math": [9, 13]},
            "weights": {"math": 2.0},
            "decision": "",
        },
        "result": {
            "losses": {"math": 0.25},
            "gradient": [0.1, -0.2],
            "seconds": 0.5,
            "recipe": "r",
            "bank": "b",
            "failure": None,
        },
    }


def test_descent_of_old_gradients() -> None:
    """The descent of an earlier version's gradient is read from its label."""
    expected = GradientRequest(
        label="descent 12", descent=12, point=(0.5, 1.0), positions={"math": (9, 13)}, weights={"math": 2.0}
    )
    result = GradientResult(losses={"math": 0.25}, gradient=(0.1, -0.2), seconds=0.5, recipe="r", bank="b")
    assert read_step(3, 7, stored_gradient()) == GradientStep(3, 7, expected, result)
