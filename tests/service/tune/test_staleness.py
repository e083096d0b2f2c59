"""Proposals far ahead of results, as with many replicas: the same trials for any number of them, and after kills."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from search_spaces.fidelity import OPEN_BRACKETS, Scheduler
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.types import Origin
from tests.service.tune.harness import Killed, coordinator_of, drive, killer, new_study, score, trial_list
from workers.serving.fake import FakeScorer
from workers.types import CHUNKS_IN_FLIGHT_PER_REPLICA

SIXTEEN_REPLICAS = Path(__file__).parents[2] / "fixtures" / "sixteen_replicas"
SCHEDULERS: tuple[Scheduler, ...] = ("hyperband", "asha", "racing", "successive_halving")

# The staleness of three replicas, as a study with as many has it by default.
AHEAD: dict[str, Any] = {"max_staleness": 17, "open_brackets": 3, "batch": 2, "max_trials": 34}


def searched(directory: Path, *, concurrency: int = 3, order_seed: int = 0, **plan: Any) -> list[tuple[Any, ...]]:
    """The trials of a search in which each proposal depends on all results that it knows."""
    directory.mkdir(exist_ok=True)
    store, study = new_study(directory)
    coordinator = coordinator_of(store, study, **plan)
    drive(coordinator, FakeScorer(), concurrency=concurrency, order_seed=order_seed)
    found = trial_list(store, study)
    store.close()
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheduler], list[tuple[Any, ...]]]:
    @cache
    def run(scheduler: Scheduler) -> list[tuple[Any, ...]]:
        return searched(tmp_path_factory.mktemp("undisturbed"), scheduler=scheduler, **AHEAD)

    return run


@pytest.mark.slow
@pytest.mark.parametrize(("replicas", "order_seed"), [(1, 1), (16, 3)])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_trials_ignore_replicas(
    tmp_path: Path,
    undisturbed: Callable[[Scheduler], list[tuple[Any, ...]]],
    scheduler: Scheduler,
    replicas: int,
    order_seed: int,
) -> None:
    """One replica and sixteen, whose chunks take random times, give the same trials."""
    concurrency = CHUNKS_IN_FLIGHT_PER_REPLICA * replicas
    found = searched(tmp_path, scheduler=scheduler, concurrency=concurrency, order_seed=order_seed, **AHEAD)
    assert found == undisturbed(scheduler)


@pytest.mark.slow
@pytest.mark.parametrize("change", [{"max_staleness": 5}, {"open_brackets": 2}, {"batch": 1}], ids=str)
def test_staleness_alone_changes_trials(
    tmp_path: Path, undisturbed: Callable[[Scheduler], list[tuple[Any, ...]]], change: dict[str, int]
) -> None:
    """Each number by which proposals run ahead changes trials: the searcher sees other results."""
    assert searched(tmp_path, scheduler="hyperband", **{**AHEAD, **change}) != undisturbed("hyperband")


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_kills_with_open_brackets(
    tmp_path: Path, undisturbed: Callable[[Scheduler], list[tuple[Any, ...]]], scheduler: Scheduler
) -> None:
    """A study killed again and again, while brackets overlap, has the undisturbed trials."""
    store, study = new_study(tmp_path)
    num_kills = most_open = 0
    while True:
        try:
            coordinator = coordinator_of(
                store, study, scheduler=scheduler, observer=killer(30 + num_kills * 7 % 60), **AHEAD
            )
            drive(coordinator, FakeScorer(), concurrency=9, order_seed=num_kills)
        except Killed:
            num_kills += 1
            assert num_kills < 500
            running = [trial for trial in store.trials(study) if not trial.state.is_finished]
            most_open = max(most_open, len({trial.bracket for trial in running if trial.origin is Origin.SEARCH}))
            continue
        break
    assert num_kills > 5
    assert most_open >= (1 if scheduler in ("asha", "successive_halving") else 3)
    assert trial_list(store, study) == undisturbed(scheduler)
    store.close()


def test_earlier_study_of_sixteen_replicas(tmp_path: Path) -> None:
    """A study that the version before overlapping brackets left in the middle of two resumes by its own rules.

    The fixture has its database, and the trials that version ended with when nothing disturbed it.
    """
    connection = sqlite3.connect(tmp_path / "study.db")
    connection.executescript((SIXTEEN_REPLICAS / "study.sql").read_text())
    connection.close()
    store = Store(f"sqlite:///{tmp_path / 'study.db'}")
    (record,) = store.jobs()
    resolved = ResolvedStudy.of(record)
    assert (resolved.max_staleness, resolved.open_brackets, resolved.batch) == (50, OPEN_BRACKETS, 1)
    running = {trial.bracket for trial in store.trials(record.id) if not trial.state.is_finished}
    assert len(running) == 2
    coordinator = coordinator_of(
        store,
        record.id,
        max_trials=40,
        holdout_samples={},
        rung_samples=tuple(dict.fromkeys(("math", "text"), size) for size in (2, 6, 18)),
        max_staleness=resolved.max_staleness,
        open_brackets=resolved.open_brackets,
        batch=resolved.batch,
    )
    drive(coordinator, FakeScorer(), concurrency=7, order_seed=1)
    expected = [json.loads(line) for line in (SIXTEEN_REPLICAS / "trials.jsonl").read_text().splitlines()]
    assert [
        {
            "number": trial.number,
            "state": str(trial.state),
            "bracket": trial.bracket,
            "configuration": trial.configuration,
            "rungs": [{"rung": rung.rung, "values": dict(rung.values)} for rung in trial.rungs],
        }
        for trial in store.trials(record.id)
    ] == expected
    store.close()


def test_a_bracket_opens_before_older_ones_close(tmp_path: Path) -> None:
    """With three open brackets, the fourth waits for the first one; with two, the third does."""
    for open_brackets, last_size in ((2, 5), (3, 3), (4, 9)):
        directory = tmp_path / str(open_brackets)
        directory.mkdir()
        store, study = new_study(directory)
        coordinator = coordinator_of(store, study, max_trials=34, max_staleness=33, open_brackets=open_brackets)
        # Evaluate first rungs only: nothing climbs, so no bracket closes but those that begin at the last rung.
        while (evaluation := coordinator.next_evaluation()) is not None:
            trial = coordinator.trials[evaluation.trial]
            if trial.origin is Origin.SEARCH and trial.rungs:
                continue
            for chunk in range(len(evaluation.chunks)):
                coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, chunk))
        sizes = [record.size for record in store.brackets(study)]
        assert (len(sizes), sizes[-1]) == (open_brackets, last_size)
        store.close()
