"""What result files are made of, read from a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from service.results.load import run_record
from service.results.record import GradientRecord, SearchFigures
from service.store import StepRecord, Store
from service.tune.steps import Step, StepKind, StepRequest, StepResult
from service.types import EventKind
from tests.service.resolved import resolved_study


def test_the_searcher_its_notes_and_the_cost_of_its_steps_are_those_stored(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    resolved = resolved_study(algorithm="gradient", algorithm_reason="all objectives have references")
    document = {"engine": {"replicas": 1}}
    writer = store.open_attempt(store.create_job(name="test", document=document, resolved=resolved).id)
    for number, charged in enumerate((48, 0, 144)):  # losses, a note, a gradient
        writer.add_step(StepRecord(number, 9 + number // 2, charged, {}))
    writer.add_event(EventKind.SEARCH_NOTE, {"trial": 9, "text": "gradients are used"})
    expected = SearchFigures(
        "gradient", "all objectives have references", ("gradients are used",), steps=2, charges={9: 48, 10: 144}
    )
    assert run_record(store, writer.job_id).search == expected
    store.close()


def test_the_gradients_of_descents_are_read_from_the_steps(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    study = store.create_job(name="test", document={"engine": {"replicas": 1}}, resolved=resolved_study())
    writer = store.open_attempt(study.id)
    losses = StepRequest(StepKind.LOSSES, "trial 0", (0.5,), {"math": (0, 1)})
    gradient = replace(losses, kind=StepKind.GRADIENT, label="descent 0", weights={"math": 2.0})
    weighted = replace(gradient, label="descent 1", preference={"math": 1.0, "text": 0.0})
    results = (StepResult({"math": 0.5}), StepResult({"math": 0.25}, (0.1,)), StepResult(failure="the loss is nan"))
    for number, (request, result) in enumerate(zip((losses, gradient, weighted), results, strict=True)):
        document = Step(number, 9, request, result).to_json()
        if number == 1:
            del document["request"]["preference"]  # as earlier versions stored it
        writer.add_step(StepRecord(number, 9, request.num_charged, document))
    assert run_record(store, study.id).gradients == (
        GradientRecord("descent 0", 9, {"math": 0.25}, {"math": 2.0}),
        GradientRecord("descent 1", 9, {}, {"math": 2.0}, {"math": 1.0, "text": 0.0}, "the loss is nan"),
    )
    store.close()
