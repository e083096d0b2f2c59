"""The records from which result files are written, read from a store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.results.holdout import HeldOut, held_out_results
from service.results.load import RunReader, run_record
from service.results.ranges import OutOfRange
from service.results.record import SearchFigures
from service.results.selection import held_out
from service.results.series.directions import directions
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
from service.types import EventKind, JobState, TrialRecord, TrialState
from tests.service.api.harness import stored_study, write_holdout, write_trial
from tests.service.resolved import resolved_study, study_document
from tests.service.synthetic_run import run_record as made_up
from workers.types import Split


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


def test_a_reader_finds_all_that_has_changed(tmp_path: Path) -> None:
    """A record that is kept up to date equals one that is read anew, after every kind of write."""
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    made = made_up(num_trials=6)
    study = stored_study(store)
    reader, writer = RunReader(store, study.id), store.open_attempt(study.id)

    def check() -> None:
        assert reader.read() == RunReader(store, study.id).read()

    check()
    for trial in made.whole_trials:
        writer.add_trial(replace(trial, state=TrialState.WAITING, rungs=(), reason=None, values={}, standard_errors={}))
        check()
        for rung in trial.rungs:
            writer.finish_rung(trial.number, rung, samples_reused=1)
        check()
        writer.finish_trials([trial.number], trial.state, trial.reason)
        check()
    for trial in held_out(made.whole_trials, made.objectives):
        write_holdout(writer, trial)
        check()
    assert len(reader.read().holdout) > 3
    writer.add_event(EventKind.SEARCH_NOTE, {"trial": 9, "text": "a note"})
    writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": 5, "reason": "NaN"})
    warning = OutOfRange(3, "math", Split.SEARCH, "beyond").to_json()
    writer.add_event(EventKind.OUT_OF_RANGE, warning)
    check()
    writer.record_engine_fault("replica-1", 0, "another canary")
    writer = store.open_attempt(study.id)
    check()
    before = reader.read().stored_bytes
    writer.delete_texts(keep=[trial.recipe.digest for trial in made.trials[:2]])
    check()
    after = reader.read().stored_bytes
    assert (after.values, 0 < after.texts < before.texts) == (before.values, True)
    writer.set_state(JobState.COMPLETE)
    check()
    store.close()


def test_merges_with_directions_have_their_recipes(tmp_path: Path) -> None:
    """In the space m3, a reader has the recipes of all trials at full budget, with their present values."""
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    made = made_up(num_trials=9)
    for kind in ("lfs", "m3"):
        plain = stored_study(store, name=kind)
        document = {**plain.document, "search_space": {"kind": kind}}
        study = store.create_job(kind="search", name=f"{kind} 2", document=document, accepted=plain.accepted)
        writer, reader = store.open_attempt(study.id), RunReader(store, study.id)
        for trial in made.whole_trials:
            write_trial(writer, trial)
        found = reader.read()
        complete = [trial for trial in found.trials if trial.values]
        read = [trial for trial in complete if isinstance(trial, TrialRecord)]
        assert (len(read) == len(complete)) == (kind == "m3")
        assert bool(directions(found).points) == (kind == "m3")
        assert [trial.recipe.digest for trial in read] == [made.trials[trial.number].recipe.digest for trial in read]
        assert all(trial.values == made.trials[trial.number].values for trial in reader.read().trials)
    store.close()


def test_an_unchanged_held_out_stage_is_not_computed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One more result that is not compared costs no computation of the held-out table; everything in it does."""
    computed: list[HeldOut] = []

    def counted(*given: Any, **named: Any) -> HeldOut:
        computed.append(held_out_results(*given, **named))
        return computed[-1]

    monkeypatch.setattr("service.results.load.held_out_results", counted)
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    made = made_up(num_trials=6)
    study = stored_study(store)
    reader, writer = RunReader(store, study.id), store.open_attempt(study.id)
    for trial in made.whole_trials:
        writer.add_trial(replace(trial, state=TrialState.WAITING, rungs=(), reason=None, values={}, standard_errors={}))
        for rung in trial.rungs:
            writer.finish_rung(trial.number, rung, samples_reused=1)
        writer.finish_trials([trial.number], trial.state, trial.reason)
    first, *others = held_out(made.whole_trials, made.objectives)
    for trial in others:
        write_holdout(writer, trial)
    reader.read()
    more = made.whole_trials[-1]
    writer.add_trial(replace(more, number=99, state=TrialState.WAITING, rungs=(), values={}, standard_errors={}))
    writer.finish_rung(99, more.rungs[0], samples_reused=0, state=TrialState.PRUNED)
    record = reader.read()
    assert 99 in {trial.number for trial in record.trials}
    assert len(computed) == 1
    write_holdout(writer, first)  # its samples
    assert len(reader.read().holdout) == len(record.holdout) + 1
    writer.add_event(EventKind.HOLDOUT_FAILED, {"trial": 5, "reason": "NaN"})
    reader.read()
    assert len(computed) == 3
    store.close()
