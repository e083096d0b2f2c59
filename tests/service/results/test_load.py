"""What result files are made of, read from a store."""

from __future__ import annotations

from pathlib import Path

from service.results.files import SearchFigures
from service.results.load import run_record
from service.store import StepRecord, Store
from service.types import EventKind
from tests.service.resolved import resolved_study


def test_the_searcher_its_notes_and_the_cost_of_its_steps_are_those_stored(tmp_path: Path) -> None:
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    resolved = resolved_study(algorithm="gradient", algorithm_reason="all objectives have references")
    document = {"engine": {"replicas": 1}}
    writer = store.open_attempt(store.create_study(name="test", document=document, resolved=resolved).id)
    for number, charged in enumerate((48, 0, 144)):  # losses, a note, a gradient
        writer.add_step(StepRecord(number, 9, charged, {}))
    writer.add_event(EventKind.SEARCH_NOTE, {"trial": 9, "text": "gradients are used"})
    expected = SearchFigures(
        "gradient", "all objectives have references", ("gradients are used",), steps=2, step_samples=192
    )
    assert run_record(store, writer.study_id).search == expected
    store.close()
