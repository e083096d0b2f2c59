"""What result files are made of, read from a store."""

from __future__ import annotations

from pathlib import Path

from service.results.load import run_record
from service.results.record import SearchFigures
from service.store import Store
from service.store.steps import (
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    LossesStep,
    NoteRequest,
    NoteResult,
    NoteStep,
    UpdateRequest,
    UpdateResult,
    UpdateStep,
)
from service.types import EventKind
from tests.service.resolved import resolved_study, study_document


def test_searcher_record_is_the_stored_one(tmp_path: Path) -> None:
    """The searcher, its notes and the cost of its steps are those stored."""
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    resolved = resolved_study(algorithm="gradient", algorithm_reason="all objectives have references")
    writer = store.open_attempt(
        store.create_job(kind="search", name="test", document=study_document(), accepted=resolved.to_json()).id
    )
    positions = {"math": tuple(range(48))}
    losses = LossesRequest(label="trial 0", point=(0.5,), positions=positions)
    gradient = GradientRequest(label="", descent=0, point=(0.5,), positions=positions, weights={"math": 1.0})
    writer.add_step(LossesStep(0, 9, losses, LossesResult()))
    writer.add_step(NoteStep(1, 9, NoteRequest(label="gradients are used", decision="gradient"), NoteResult()))
    writer.add_step(GradientStep(2, 10, gradient, GradientResult()))
    writer.add_event(EventKind.SEARCH_NOTE, {"trial": 9, "text": "gradients are used"})
    expected = SearchFigures(
        "gradient", "all objectives have references", ("gradients are used",), steps=2, charges={9: 48, 10: 144}
    )
    assert run_record(store, writer.job_id).search == expected
    store.close()


def test_gradients_and_updates_are_those_stored(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    study = store.create_job(kind="search", name="test", document=study_document(), accepted=resolved_study().to_json())
    writer = store.open_attempt(study.id)
    request = GradientRequest(label="descent 1", descent=1, point=(0.5,), positions={}, weights={"math": 2.0})
    steps = (
        LossesStep(
            0, 9, LossesRequest(label="trial 0", point=(0.5,), positions={}), LossesResult(losses={"math": 1.0})
        ),
        GradientStep(1, 9, request, GradientResult(losses={"math": 0.25}, gradient=(0.1,))),
        GradientStep(2, 9, request, GradientResult(failure="the loss is nan")),
        UpdateStep(3, 9, UpdateRequest(label="iteration 0", iteration=0), UpdateResult(statistics={"length": 5.0})),
    )
    for step in steps:
        writer.add_step(step)
    found = run_record(store, study.id)
    assert found.gradients == steps[1:3]
    assert found.updates == steps[3:]
    store.close()
