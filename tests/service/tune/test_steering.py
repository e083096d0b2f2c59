"""Searches that users steer: stopped early, edited, with invalidated trials, or with trials evaluated again."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.fidelity import Scheduler
from service.results.selection import best_trial, finalists, held_out
from service.store import Store
from service.store.documents import STOPPING
from service.store.steering import SteeringStore
from service.tune.coordinator import Coordinator
from service.tune.evaluation import Evaluation
from service.tune.schedulers import SCHEDULERS
from service.types import EventKind, Origin, Steering, TrialRecord, TrialState
from tests.service.tune.harness import (
    Killed,
    closed_study,
    coordinator_of,
    copied_study,
    drive,
    killer,
    lfs_space,
    new_study,
    score,
    trial_list,
)
from workers.serving.fake import FakeScorer

REASON = "stopped by ann: good enough"
EVERY_SCHEDULER = sorted(SCHEDULERS)


# A function from a directory, a scheduler, a number of stored chunks and `max_trials` to a store and a study in it.
Begun = Callable[[Path, Scheduler, int, int], tuple[Store, str]]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """Studies whose driver was killed after a number of chunks; equal ones are copies of one database."""

    @cache
    def once(scheduler: Scheduler, num_chunks: int, max_trials: int) -> tuple[Path, str]:
        store, study = new_study(tmp_path_factory.mktemp("begun"))
        run_until(coordinator_of(store, study, scheduler=scheduler, max_trials=max_trials), num_chunks)
        return closed_study(store, study)

    def copied(directory: Path, scheduler: Scheduler, num_chunks: int, max_trials: int) -> tuple[Store, str]:
        store, study = copied_study(once(scheduler, num_chunks, max_trials), directory)
        assert 0 < num_searched(store, study) < max_trials, "the search still runs"
        return store, study

    return copied


def num_searched(store: Store, study: str) -> int:
    return sum(trial.origin.is_searched for trial in store.trials(study))


def run_until(coordinator: Coordinator, num_chunks: int, *, concurrency: int = 3) -> list[tuple[Evaluation, int]]:
    """Score chunks until `num_chunks` are stored; return the evaluations in flight with their next chunk."""
    draw, scorer = random.Random(0), FakeScorer()
    in_flight: list[tuple[Evaluation, int]] = []
    for _ in range(num_chunks):
        while len(in_flight) < concurrency and (evaluation := coordinator.next_evaluation()) is not None:
            in_flight.append((evaluation, 0))
        evaluation, chunk = in_flight.pop(draw.randrange(len(in_flight)))
        if not coordinator.on_outcome(evaluation, score(scorer, evaluation, chunk)):
            in_flight.append((evaluation, chunk + 1))
    while len(in_flight) < concurrency and (evaluation := coordinator.next_evaluation()) is not None:
        in_flight.append((evaluation, 0))
    return in_flight


def finish(coordinator: Coordinator, in_flight: list[tuple[Evaluation, int]]) -> list[tuple[int, str]]:
    """Score evaluations in flight, then all others; returns (trial, split) of the evaluations that started later."""
    scorer = FakeScorer()
    later: list[tuple[int, str]] = []
    for evaluation, first in in_flight:
        for chunk in itertools.count(first):
            if coordinator.on_outcome(evaluation, score(scorer, evaluation, chunk)):
                break
    start: Callable[..., Evaluation | None] = coordinator.next_evaluation

    def recorded(**options: Any) -> Evaluation | None:
        evaluation = start(**options)
        if evaluation is not None:
            later.append((evaluation.trial, evaluation.split.value))
        return evaluation

    coordinator.next_evaluation = recorded  # type: ignore[method-assign]
    drive(coordinator, scorer)
    return later


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER)
@pytest.mark.parametrize("num_chunks", [6, 34, 44])
def test_running_evaluations_finish_and_no_other_starts(tmp_path: Path, scheduler: Scheduler, num_chunks: int) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, scheduler=scheduler)
    in_flight = run_until(coordinator, num_chunks)
    running = {(evaluation.trial, evaluation.rung) for evaluation, _ in in_flight}
    assert running, "something must run when the search is stopped"
    before = {trial.number: trial for trial in coordinator.trials}
    for _ in range(2):  # a second request changes nothing
        coordinator.stop(REASON)
    later = finish(coordinator, in_flight)
    assert {split for _, split in later} <= {"holdout"}
    assert coordinator.end_of_search == REASON
    trials = {trial.number: trial for trial in store.trials(study)}
    assert trials.keys() == before.keys(), "nothing is proposed any more"
    for number, rung in running:
        assert rung in [record.rung for record in trials[number].rungs], "what ran is finished"
        assert trials[number].state in (TrialState.COMPLETE, TrialState.PRUNED)
    others = trials.keys() - {number for number, _ in running}
    for trial in (trials[number] for number in others):
        assert trial.rungs == before[trial.number].rungs
        assert trial.state.is_finished
    stopped = {trial.number for trial in trials.values() if trial.reason == REASON}
    unfinished = {number for number, trial in before.items() if not trial.state.is_finished}
    assert stopped == {number for number in unfinished if trials[number].state is not TrialState.COMPLETE}
    assert best_trial(coordinator.trials, coordinator.plan.objectives) is not None
    assert {number for number, _ in later}, "finalists are scored on held-out data"


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER)
def test_a_kill_at_any_moment_of_a_stop_loses_nothing(tmp_path: Path, scheduler: Scheduler) -> None:
    """The evaluations that ran are finished by the next driver; the trials are those without the kill."""

    def stopped(directory: Path) -> tuple[Store, str, Coordinator, list[tuple[Evaluation, int]]]:
        directory.mkdir()
        store, study = new_study(directory)
        coordinator = coordinator_of(store, study, scheduler=scheduler)
        return store, study, coordinator, run_until(coordinator, 36)

    store, study, coordinator, in_flight = stopped(tmp_path / "whole")
    coordinator.stop(REASON)
    finish(coordinator, in_flight)
    expected = trial_list(store, study)
    # The driver that was asked to stop is killed at a moment, the next one after more steps, and the third one ends.
    for at, later in ((1, 4), (9, 20)):
        store, study, coordinator, in_flight = stopped(tmp_path / str(at))
        coordinator.stop(REASON)
        dies = killer(at)
        coordinator._observer = coordinator._ask_and_tell._observer = coordinator._chunks._observer = dies
        with pytest.raises(Killed):
            finish(coordinator, in_flight)
        again = coordinator_of(store, study, scheduler=scheduler, observer=killer(later))
        again.stop(REASON)
        with pytest.raises(Killed):
            drive(again, FakeScorer())
        last = coordinator_of(store, study, scheduler=scheduler)
        last.stop(REASON)
        drive(last, FakeScorer())
        assert trial_list(store, study) == expected, at


def test_a_kill_before_the_trials_were_pruned(tmp_path: Path) -> None:
    """The stored evaluations decide what still runs, not what ran when the next driver started."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    in_flight = run_until(coordinator, 14)
    running = sorted((evaluation.trial, evaluation.rung) for evaluation, _ in in_flight)
    coordinator._ask_and_tell.stop = _dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        coordinator.stop(REASON)
    assert [tuple(each) for each in store.document(study, STOPPING)] == running  # type: ignore[union-attr]
    again = coordinator_of(store, study)
    again.stop(REASON)
    assert sorted(again._ask_and_tell.ready()) == running
    drive(again, FakeScorer())
    assert again.end_of_search == REASON


def _dies(*_: Any, **__: Any) -> None:
    raise Killed


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_stop_after_the_search_changes_nothing(tmp_path: Path, is_resumed: bool) -> None:
    """It changes nothing for a later driver either, which has not begun with held-out data."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    drive(coordinator, FakeScorer())
    before = trial_list(store, study)
    if is_resumed:
        coordinator = coordinator_of(store, study)
    coordinator.stop(REASON)
    assert (trial_list(store, study), coordinator.end_of_search) == (before, None)
    assert store.document(study, STOPPING) is None
    assert EventKind.SEARCH_ENDED not in [event.kind for event in store.events(study)]


def test_a_stop_before_anything_was_scored(tmp_path: Path) -> None:
    """There is no result; the caller fails the study with the reason."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    coordinator.stop(REASON)
    assert coordinator.next_evaluation() is None
    assert coordinator.is_finished
    assert {trial.state for trial in coordinator.trials} == {TrialState.PRUNED}
    assert best_trial(coordinator.trials, coordinator.plan.objectives) is None


# Edits of `max_trials`.


@pytest.mark.parametrize("scheduler", EVERY_SCHEDULER)
@pytest.mark.parametrize("change", [-14, -4, 5])
def test_max_trials_may_change_while_a_search_runs(
    tmp_path: Path, begun: Begun, scheduler: Scheduler, change: int
) -> None:
    """The search reaches the new number, whatever was open; a second driver makes the same of it."""
    store, study = begun(tmp_path, scheduler, 36, 14)
    max_trials = max(14 + change, num_searched(store, study))
    for _ in range(2):  # the second one finds all done
        again = coordinator_of(store, study, scheduler=scheduler, max_trials=max_trials)
        drive(again, FakeScorer())
        assert again.is_finished
        assert sum(trial.origin.is_searched for trial in again.trials) == max_trials
        assert {trial.state.is_finished for trial in again.trials} == {True}


@pytest.mark.parametrize("scheduler", ["hyperband", "racing"])
@pytest.mark.parametrize(("max_trials", "max_samples"), [(22, None), (14, 900)])
def test_an_edited_search_survives_kills(
    tmp_path: Path, begun: Begun, scheduler: Scheduler, max_trials: int, max_samples: int | None
) -> None:
    """A study whose drivers are killed after an edit has the trials of one that is not killed."""

    def searched(directory: Path, kills: tuple[int, ...]) -> list[tuple[Any, ...]]:
        store, study = begun(directory, scheduler, 36, 14)
        driven(store, study, kills, scheduler=scheduler, max_trials=max_trials, max_samples=max_samples)
        return trial_list(store, study)

    whole = searched(tmp_path / "whole", ())
    assert len(whole) != 24, "the edit has changed the search"  # 14 proposals and 10 baselines without it
    assert whole == searched(tmp_path / "killed", (0, 5))


def test_trials_that_are_proposed_are_kept(tmp_path: Path, begun: Begun) -> None:
    """A bracket that is open has at least the trials that it has."""
    store, study = begun(tmp_path, "hyperband", 36, 14)
    proposed = num_searched(store, study)
    again = coordinator_of(store, study, max_trials=max(proposed - 2, 1))
    drive(again, FakeScorer())
    assert again.is_finished
    assert sum(trial.origin.is_searched for trial in again.trials) == proposed


# Invalid trials.


def test_another_finalist_takes_the_place_of_an_invalid_trial(tmp_path: Path) -> None:
    """The next driver scores it on held-out data, and nothing else."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, max_trials=14)
    drive(coordinator, FakeScorer())
    objectives = coordinator.plan.objectives
    scored = {trial.number for trial in held_out(coordinator.trials, objectives)}
    best = best_trial(coordinator.trials, objectives)
    assert best is not None
    SteeringStore(store).set_invalid(store.job(study), best.number, invalid="why", steering=Steering("invalidate"))
    again = coordinator_of(store, study, max_trials=14)
    chosen = {trial.number for trial in finalists(again.trials, objectives)}
    assert best.number not in chosen
    assert chosen - scored, "others were dominated by it alone"
    assert sorted(finish(again, [])) == sorted((number, "holdout") for number in chosen - scored)


# Trials at the full budget, by request.


def pruned(trials: Iterable[TrialRecord]) -> list[int]:
    return [trial.number for trial in trials if trial.state is TrialState.PRUNED]


def request(store: Store, study: str, trial: int) -> None:
    SteeringStore(store).request_evaluation(store.job(study), trial, steering=Steering("evaluate"))


@pytest.mark.parametrize("scheduler", ["asha", "hyperband", "racing", "successive_halving"])
def test_a_pruned_trial_is_evaluated_at_the_full_budget(tmp_path: Path, scheduler: Scheduler) -> None:
    """It is a new trial, which uses the stored samples; nothing else is scored, and a second request adds nothing."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, scheduler=scheduler)
    drive(coordinator, FakeScorer())
    before, number = trial_list(store, study), pruned(coordinator.trials)[0]
    source = store.trial(study, number)
    for _ in range(2):
        request(store, study, number)
        again = coordinator_of(store, study, scheduler=scheduler)
        drive(again, FakeScorer())
        assert again.is_finished
        assert trial_list(store, study)[:-1] == before
    added = store.trials(study)[-1]
    assert (added.origin, added.state, added.bracket) == (Origin.USER, TrialState.COMPLETE, None)
    assert (added.recipe.digest, added.configuration) == (source.recipe.digest, source.configuration)
    known = sum(source.rungs[-1].num_samples.values())
    assert (added.samples_reused, added.samples_scored) == (known, sum(added.rungs[-1].num_samples.values()) - known)
    assert [own.added for own in SteeringStore(store).evaluation_requests(study)] == [added.number]


@pytest.mark.parametrize("scheduler", ["hyperband", "racing"])  # ASHA prunes at the end of the search
def test_a_request_while_a_search_runs_survives_kills(tmp_path: Path, begun: Begun, scheduler: Scheduler) -> None:
    """The search proposes as many trials as before, whatever was killed after the request."""

    def searched(directory: Path, kills: tuple[int, ...]) -> list[tuple[Any, ...]]:
        store, study = begun(directory, scheduler, 58, 20)
        request(store, study, pruned(store.trials(study))[0])
        last = driven(store, study, kills, scheduler=scheduler, max_trials=20)
        assert sum(trial.origin is Origin.SEARCH for trial in last.trials) == 20
        assert sum(trial.origin is Origin.USER for trial in last.trials) == 1
        return trial_list(store, study)

    assert searched(tmp_path / "killed", KILLS) == searched(tmp_path / "whole", ())


# Steps after which one driver after another is killed: at its first step, soon, and later.
KILLS = (0, 5, 23)


def driven(store: Store, study: str, kills: tuple[int, ...], **plan: Any) -> Coordinator:
    """Run a study to its end; drivers before the last one are killed at the given steps."""
    for at in kills:
        with pytest.raises(Killed):
            drive(coordinator_of(store, study, observer=killer(at), **plan), FakeScorer())
    last = coordinator_of(store, study, **plan)
    drive(last, FakeScorer())
    assert last.is_finished
    return last


@pytest.mark.parametrize("form", ["recipe", "configuration"])
@pytest.mark.parametrize("scheduler", ["hyperband", "racing"])
def test_an_enqueued_trial_survives_kills(tmp_path: Path, begun: Begun, scheduler: Scheduler, form: str) -> None:
    """It is evaluated at the full budget, and the search proposes as many trials as before."""

    def searched(directory: Path, kills: tuple[int, ...]) -> list[tuple[Any, ...]]:
        store, study = begun(directory, scheduler, 40, 20)
        space = lfs_space()
        configuration = space.parameters.sample(np.random.default_rng(12345))
        recipe = space.to_recipe(configuration)
        assert recipe.digest not in {trial.recipe.digest for trial in store.trials(study)}
        given = recipe.to_json() if form == "recipe" else configuration
        for _ in range(2):
            SteeringStore(store).enqueue_trial(
                store.job(study), "by hand", **{form: given}, steering=Steering("enqueue")
            )
        last = driven(store, study, kills, scheduler=scheduler, max_trials=20)
        assert sum(trial.origin is Origin.SEARCH for trial in last.trials) == 20
        (added,) = [trial for trial in last.trials if trial.origin is Origin.USER]
        assert (added.label, added.state, added.bracket) == ("by hand", TrialState.COMPLETE, None)
        assert added.recipe.digest == recipe.digest
        assert added.configuration == (None if form == "recipe" else configuration)
        assert [own.added for own in SteeringStore(store).evaluation_requests(study)] == [added.number]
        return trial_list(store, study)

    assert searched(tmp_path / "killed", KILLS) == searched(tmp_path / "whole", ())


def test_a_request_of_a_stopped_study_is_answered(tmp_path: Path) -> None:
    """The stop prunes what was proposed, not what is asked for later."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    in_flight = run_until(coordinator, 44)
    coordinator.stop(REASON)
    finish(coordinator, in_flight)
    request(store, study, pruned(coordinator.trials)[0])
    again = coordinator_of(store, study)
    again.stop(REASON)
    drive(again, FakeScorer())
    assert (again.trials[-1].origin, again.trials[-1].state) == (Origin.USER, TrialState.COMPLETE)
