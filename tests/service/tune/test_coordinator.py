"""Coordinator, rung table and store together: evaluations, promotions, and the state after a crash."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from search_spaces.fidelity import Scheduler
from service.errors import StaleAttempt, StudyFailed
from service.store import JobWriter, Store
from service.store.steering import SteeringStore
from service.tune.coordinator import MAX_LOST_ACTORS
from service.tune.evaluation import Evaluation
from service.tune.schedulers import SCHEDULERS
from service.types import EventKind, Origin, Steering, TrialRecord, TrialState
from tests.postgresql import PostgreSQL
from tests.service.stored_values import stored_values
from tests.service.tune.harness import (
    SPACES,
    InlineProposer,
    Killed,
    closed_study,
    coordinator_of,
    copied_study,
    drive,
    killer,
    lfs_space,
    make_plan,
    new_study,
    score,
    space_of,
    trial_list,
)
from workers.errors import EngineUnavailable, EvidenceMismatch, MetricFailed
from workers.serving.fake import FakeScorer
from workers.types import ScoreRequest, Split

# Every scheduler in one space, every space under one scheduler, and paths, whose proposals are repaired, under more.
SEARCHES: tuple[tuple[Scheduler, str], ...] = (
    ("none", "lfs"),
    ("hyperband", "layerwise"),
    *((scheduler, "dis") for scheduler in SCHEDULERS if scheduler != "none"),
    ("hyperband", "sfs"),
)


def finished_study(directory: Path, **changes: Any) -> tuple[Any, str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    store, study = new_study(directory)
    coordinator = coordinator_of(store, study, **changes)
    drive(coordinator, FakeScorer())
    assert all(trial.state.is_finished for trial in store.trials(study))
    return store, study, coordinator


@dataclass(frozen=True)
class Undisturbed:
    """Results that a study must have at its end, whatever happens to it."""

    trials: list[tuple[Any, ...]]
    holdout: Any


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheduler, str], Undisturbed]:
    """The study of a scheduler and a kind of space, run once for all tests of this module."""

    @cache
    def run(scheduler: Scheduler, kind: str) -> Undisturbed:
        directory = tmp_path_factory.mktemp("undisturbed")
        store, study, _ = finished_study(directory, scheduler=scheduler, space=space_of(kind))
        return Undisturbed(trial_list(store, study), stored_values(store, study, Split.HOLDOUT))

    return run


@dataclass(frozen=True)
class Finished:
    """A finished study, for tests that only read it or continue with a copy of its database (`closed`)."""

    closed: tuple[Path, str]
    trials: tuple[TrialRecord, ...]
    holdout: Any


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheduler], Finished]:
    """The study of a scheduler, run once for all tests of this module."""

    @cache
    def run(scheduler: Scheduler) -> Finished:
        store, study, _ = finished_study(tmp_path_factory.mktemp("finished"), scheduler=scheduler)
        trials, holdout = tuple(store.trials(study)), stored_values(store, study, Split.HOLDOUT)
        return Finished(closed_study(store, study), trials, holdout)

    return run


def test_brackets_have_hyperband_sizes_and_only_the_best_climb(finished: Callable[[Scheduler], Finished]) -> None:
    trials = [trial for trial in finished("hyperband").trials if trial.origin is Origin.SEARCH]
    assert len(trials) == 14
    by_bracket = {b: [t for t in trials if t.bracket == b] for b in (0, 1)}
    assert [len(by_bracket[0]), len(by_bracket[1])] == [9, 5]
    at_rung = Counter(rung.rung for trial in by_bracket[0] for rung in trial.rungs)
    assert at_rung == {0: 9, 1: 3, 2: 1}
    assert Counter(rung.rung for trial in by_bracket[1] for rung in trial.rungs) == {1: 5, 2: 1}
    complete = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert [trial.values for trial in complete] == [trial.rungs[-1].values for trial in complete]
    assert all(trial.state is TrialState.PRUNED and not trial.values for trial in trials if trial not in complete)


def test_sources_and_published_come_first_at_full_budget(finished: Callable[[Scheduler], Finished]) -> None:
    baselines = [trial for trial in finished("hyperband").trials if trial.origin is not Origin.SEARCH]
    assert [trial.number for trial in baselines] == list(range(len(baselines)))
    assert {"base", "expert:math", "expert:text", "uniform average"} <= {trial.label for trial in baselines}
    assert {trial.rungs[0].rung for trial in baselines} == {2}


def test_a_promoted_trial_pays_only_for_new_samples(finished: Callable[[Scheduler], Finished]) -> None:
    climber = next(t for t in finished("hyperband").trials if [rung.rung for rung in t.rungs] == [0, 1, 2])
    assert climber.samples_scored == 2 * 36
    assert climber.samples_reused == 2 * (4 + 12)


def test_asha_promotes_from_rungs_without_waiting_for_a_bracket(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, scheduler="asha", max_trials=40)
    climbed_at: list[int] = []
    while not climbed_at:
        evaluation = coordinator.next_evaluation()
        assert evaluation is not None
        for chunk in range(len(evaluation.chunks)):
            coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, chunk))
        climbed_at = [trial.number for trial in coordinator.trials if len(trial.rungs) == 2]
    searched = [trial for trial in coordinator.trials if trial.origin is Origin.SEARCH]
    assert sum(len(trial.rungs) > 0 for trial in searched) == 3


def test_asha_prunes_or_scores_in_full(tmp_path: Path) -> None:
    """ASHA ends trials without a promotion as pruned and scores the others in full."""
    store, study, _ = finished_study(tmp_path, scheduler="asha", max_trials=30)
    trials = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    assert len(trials) == 30
    at_rung = Counter(rung.rung for trial in trials for rung in trial.rungs)
    assert at_rung[0] == 30
    assert at_rung[1] >= 10
    assert at_rung[2] >= at_rung[1] // 3
    full = [trial for trial in trials if trial.state is TrialState.COMPLETE]
    assert all([rung.rung for rung in trial.rungs] == [0, 1, 2] for trial in full)
    assert len(full) == at_rung[2]
    assert all(t.state is TrialState.PRUNED and t.reason for t in trials if t not in full)


def test_without_a_scheduler_every_trial_is_scored_in_full(finished: Callable[[Scheduler], Finished]) -> None:
    trials = finished("none").trials
    assert {trial.state for trial in trials} == {TrialState.COMPLETE}
    assert {tuple(rung.rung for rung in trial.rungs) for trial in trials} == {(0,)}


@pytest.mark.parametrize("scheduler", ["hyperband", "asha", "racing", "successive_halving"])
@pytest.mark.parametrize("own", [(10, 11, 20), (10, 20, 20), (20, 20, 20)])
def test_own_rungs_decide_what_is_scored(tmp_path: Path, scheduler: Scheduler, own: tuple[int, ...]) -> None:
    """An objective's own rungs decide how many of its samples are scored; they may stop growing."""
    ladders = {"math": (4, 12, 36), "text": own}
    samples = tuple({name: counts[rung] for name, counts in ladders.items()} for rung in range(3))
    store, study, _ = finished_study(tmp_path, scheduler=scheduler, rung_samples=samples)
    climber = next(t for t in store.trials(study) if [rung.rung for rung in t.rungs] == [0, 1, 2])
    assert [dict(rung.num_samples) for rung in climber.rungs] == [dict(counts) for counts in samples]
    assert climber.samples_scored == 36 + 20
    stored = stored_values(store, study, Split.SEARCH)[climber.recipe.digest]
    assert {name: len(values) for name, values in stored.items()} == {"math": 36, "text": 20}


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "order_seed", "asks_ahead"), [(1, 0, False), (5, 2, True)])
@pytest.mark.parametrize(("scheduler", "kind"), SEARCHES)
def test_trials_ignore_the_order_of_results(
    tmp_path: Path,
    undisturbed: Callable[[Scheduler, str], Undisturbed],
    scheduler: Scheduler,
    kind: str,
    concurrency: int,
    order_seed: int,
    asks_ahead: bool,
) -> None:
    """The trial list does not depend on the order in which results arrive."""
    search: dict[str, Any] = {"scheduler": scheduler, "space": space_of(kind)}
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study, **search)
    drive(coordinator, FakeScorer(), concurrency=concurrency, order_seed=order_seed, asks_ahead=asks_ahead)
    assert trial_list(store, study) == undisturbed(scheduler, kind).trials


class InTheOrderOf(InlineProposer):
    """A proposer whose proposal i is draw `order[i]`."""

    def __init__(self, order: tuple[int, ...], *, first: int) -> None:
        super().__init__(lfs_space(), seed=1)
        self._order = order
        self._first = first

    def result(self, *, timeout_s: float) -> Any:
        draw = self._order[self._call["number"] - self._first]
        self._call = {"number": draw, "observations": (), "pending": ()}
        return super().result(timeout_s=timeout_s)


def test_two_proposed_trials_wait(tmp_path: Path) -> None:
    """While an engine works, two proposed trials wait for it, and repeated ones end."""
    store, study = new_study(tmp_path)
    first = len(make_plan(study).baselines)
    proposer = InTheOrderOf((0, 1, 0, 0, 2, 3, 4), first=first)
    search: dict[str, Any] = {"scheduler": "none", "max_trials": 7, "max_staleness": 5}
    coordinator = coordinator_of(store, study, proposer=proposer, **search)
    while (evaluation := coordinator.next_evaluation()) is not None and evaluation.trial != first + 1:
        for chunk in range(len(evaluation.chunks)):
            coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, chunk))
    coordinator.ask_ahead()
    states = [trial.state for trial in store.trials(study)[first:]]
    repeated = [TrialState.COMPLETE] * 2
    assert states == [TrialState.COMPLETE, TrialState.WAITING, *repeated, TrialState.WAITING, TrialState.WAITING]
    assert coordinator.num_in_flight == 1


@pytest.mark.parametrize(("max_staleness", "num_waiting"), [(5, 2), (12, 6), (20, 10)])
def test_half_of_the_staleness_waits(tmp_path: Path, max_staleness: int, num_waiting: int) -> None:
    """Half of the trials that may be proposed ahead of results are proposed while replicas work."""
    store, study = new_study(tmp_path)
    first = len(make_plan(study).baselines)
    proposer = InTheOrderOf(tuple(range(40)), first=first)
    search: dict[str, Any] = {"scheduler": "none", "max_trials": 40, "max_staleness": max_staleness}
    coordinator = coordinator_of(store, study, proposer=proposer, **search)
    while (evaluation := coordinator.next_evaluation()) is not None and evaluation.trial != first:
        for chunk in range(len(evaluation.chunks)):
            coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, chunk))
    coordinator.ask_ahead()
    assert len(store.trials(study)[first:]) == 1 + num_waiting


@pytest.mark.slow
@pytest.mark.parametrize(("scheduler", "kind"), SEARCHES)
def test_kill_at_any_step_changes_no_trial(
    tmp_path: Path, undisturbed: Callable[[Scheduler, str], Undisturbed], scheduler: Scheduler, kind: str
) -> None:
    """A study killed at any step and run again has the undisturbed trial list.

    Every step: each ask, each chunk before and after its commit, each rung, each promotion, the holdout stage.
    """
    kill_over_and_over(*new_study(tmp_path), scheduler, kind, undisturbed(scheduler, kind))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", ["hyperband", "successive_halving"])
def test_ends_of_many_trials_are_stored_in_parts(
    tmp_path: Path,
    undisturbed: Callable[[Scheduler, str], Undisturbed],
    scheduler: Scheduler,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A study that is killed between two parts of a rung's prunings stores the other ones when it is resumed."""
    expected = undisturbed(scheduler, "dis").trials
    sizes = list[int]()
    finish_trials = JobWriter.finish_trials

    def finish(self: JobWriter, numbers: Sequence[int], *arguments: Any, **options: Any) -> None:
        if sizes and sizes[-1] == 2:
            sizes.append(0)
            raise Killed
        finish_trials(self, numbers, *arguments, **options)
        sizes.append(len(numbers))

    monkeypatch.setattr("service.tune.trials.ENDED_AT_ONCE", 2)
    monkeypatch.setattr(JobWriter, "finish_trials", finish)
    store, study = new_study(tmp_path)
    for _ in range(20):
        with suppress(Killed):
            drive(coordinator_of(store, study, scheduler=scheduler, space=space_of("dis")), FakeScorer())
            break
    assert sizes.count(0) > 2
    assert max(sizes) == 2
    assert trial_list(store, study) == expected


@pytest.mark.slow
def test_kill_at_any_step_on_postgresql(
    tmp_path: Path, undisturbed: Callable[[Scheduler, str], Undisturbed], postgresql: PostgreSQL
) -> None:
    """A study on PostgreSQL that is killed at any step has the trial list of an undisturbed one on SQLite."""
    scheduler, kind = SEARCHES[0]
    url = postgresql.migrated()
    store, study = new_study(tmp_path, url)
    kill_over_and_over(store, study, scheduler, kind, undisturbed(scheduler, kind))
    store.close()
    postgresql.drop(url)


def kill_over_and_over(store: Store, study: str, scheduler: Scheduler, kind: str, expected: Undisturbed) -> None:
    search: dict[str, Any] = {"scheduler": scheduler, "space": space_of(kind)}
    kill_at, num_kills = 0, 0
    while True:
        # The same study is killed over and over, each time a few steps further than it has come.
        try:
            coordinator = coordinator_of(store, study, observer=killer(kill_at % 7), **search)
            drive(coordinator, FakeScorer(), order_seed=kill_at)
        except Killed:
            num_kills += 1
            kill_at += 1
            assert num_kills < 2000
            continue
        break
    assert num_kills > 50
    assert trial_list(store, study) == expected.trials
    assert stored_values(store, study, Split.HOLDOUT) == expected.holdout


@pytest.mark.slow
def test_race_by_the_bound_is_resumed(tmp_path: Path) -> None:
    """A race by the bound resumes unchanged and says why trials were stopped."""
    names = ("math", "text")
    race: dict[str, Any] = {
        "scheduler": "racing",
        "rung_samples": tuple(dict.fromkeys(names, size) for size in (40, 120, 360)),
        "error_rate": 0.5,
        "chunk_samples": 200,
        "holdout_samples": {},
        "max_trials": 10,
    }
    store, study, _ = finished_study(tmp_path / "undisturbed", **race)
    expected = trial_list(store, study)
    searched = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    reasons = {trial.reason for trial in searched if trial.state is TrialState.PRUNED}
    assert {f"behind at rung {rung}, by the bound for an error rate of 0.5" for rung in (0, 1)} >= reasons > set()
    assert any(trial.state is TrialState.COMPLETE for trial in searched)
    assert all((trial.rival is None) == (trial.state is not TrialState.PRUNED) for trial in searched)
    (tmp_path / "one").mkdir()
    store, study = new_study(tmp_path / "one")
    for kill_at in range(1000):
        try:
            coordinator = coordinator_of(store, study, observer=killer(7 + kill_at % 5), **race)
            drive(coordinator, FakeScorer(), order_seed=kill_at)
        except Killed:
            continue
        break
    assert kill_at > 5
    assert trial_list(store, study) == expected


@pytest.mark.slow
def test_no_stored_sample_is_scored_twice_whatever_was_killed(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    log = tmp_path / "scored.jsonl"
    for kill_at in range(0, 200, 3):
        stored = {
            (digest, split, objective, position)
            for split in Split
            for digest, by_objective in stored_values(store, study, split).items()
            for objective, values in by_objective.items()
            for position in values
        }
        log.unlink(missing_ok=True)
        splits: dict[str, Split] = {}
        try:
            coordinator = coordinator_of(store, study, observer=killer(kill_at))
            drive(coordinator, _Recording(FakeScorer(log_file=str(log)), splits))
        except Killed:
            pass
        for line in log.read_text().splitlines() if log.exists() else ():
            call = json.loads(line)
            for objective, start, stop in call["spans"]:
                for position in range(start, stop):
                    assert (call["recipe"], splits[str(call["call"])], objective, position) not in stored


class _Recording:
    """A scorer that notes the split of each call, which the fake's log does not contain."""

    def __init__(self, scorer: FakeScorer, splits: dict[str, Split]) -> None:
        self._scorer, self._splits = scorer, splits

    def score(self, request: ScoreRequest) -> Any:
        split = Split.HOLDOUT if request.spans[0].task.split == "test" else Split.SEARCH
        self._splits[str(len(self._splits) + 1)] = split
        return self._scorer.score(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


@pytest.mark.parametrize("kind", SPACES)
def test_equal_recipes_are_scored_once_and_count_as_trials(tmp_path: Path, kind: str) -> None:
    store, study = new_study(tmp_path)
    space = space_of(kind)
    configuration = InlineProposer(space)
    configuration.submit(number=0, observations=(), pending=())
    always = configuration.result(timeout_s=0)

    class Stubborn(InlineProposer):
        def result(self, *, timeout_s: float) -> Any:
            return always

    drive(coordinator_of(store, study, space=space, max_trials=6, proposer=Stubborn(space)), FakeScorer())
    trials = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    assert len(trials) == 6
    assert len({trial.recipe.digest for trial in trials}) == 1
    # The first draw may be one of the sources.
    alike = [trial for trial in store.trials(study) if trial.recipe.digest == trials[0].recipe.digest]
    assert sum(trial.samples_scored for trial in alike) == 2 * 36
    assert trials[-1].rungs != ()


def test_a_searcher_that_repeats_itself_ends_the_search(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    space = lfs_space()
    first = InlineProposer(space)
    first.submit(number=0, observations=(), pending=())
    always = first.result(timeout_s=0)

    class Stubborn(InlineProposer):
        def result(self, *, timeout_s: float) -> Any:
            return always

    coordinator = coordinator_of(store, study, scheduler="none", max_trials=500, proposer=Stubborn(space))
    drive(coordinator, FakeScorer())
    assert "scored already" in str(coordinator.end_of_search)
    assert sum(trial.origin is Origin.SEARCH for trial in store.trials(study)) == 17


def test_a_failed_candidate_has_a_reason_and_the_study_goes_on(
    tmp_path: Path, finished: Callable[[Scheduler], Finished]
) -> None:
    victim = next(t for t in finished("hyperband").trials if [rung.rung for rung in t.rungs] == [0, 1, 2])
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study), FakeScorer(failing=frozenset({victim.recipe.digest})))
    trials = store.trials(study)
    failed = [trial for trial in trials if trial.state is TrialState.FAIL]
    assert [trial.number for trial in failed] == [victim.number]
    assert failed[0].reason
    assert failed[0].rungs == ()
    assert any(t.state is TrialState.COMPLETE and t.bracket == victim.bracket for t in trials)


class Unjudged:
    """A scorer of tasks whose metric raises on one recipe's answers to the data of one split."""

    def __init__(self, digest: str, *, split: str | None = None) -> None:
        self._scorer, self._digest, self._split = FakeScorer(), digest, split

    def score(self, request: ScoreRequest) -> Any:
        if (request.recipe.digest, request.spans[0].task.split) == (self._digest, self._split):
            raise MetricFailed("task math, document 3: metric 'exact_match' raised ValueError: no number")
        return self._scorer.score(request)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


def test_failing_metric_fails_its_trial(tmp_path: Path, finished: Callable[[Scheduler], Finished]) -> None:
    """A metric that fails on a candidate fails its trial only."""
    trials = finished("hyperband").trials
    victim = next(t for t in trials if t.origin is Origin.SEARCH and t.state is TrialState.COMPLETE)
    store, study = new_study(tmp_path)
    drive(coordinator_of(store, study), Unjudged(victim.recipe.digest))
    (failed,) = [trial for trial in store.trials(study) if trial.state is TrialState.FAIL]
    assert failed.number == victim.number
    assert failed.reason == "task math, document 3: metric 'exact_match' raised ValueError: no number"


def test_a_metric_that_fails_on_the_base_model_fails_the_study(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    base = store.trials(study)[0]
    reason = "the answers of the base model itself cannot be scored: task math, document 3: metric 'exact_match' raised"
    with pytest.raises(StudyFailed, match=reason):
        drive(coordinator, Unjudged(base.recipe.digest))


def test_failing_holdout_keeps_the_search(tmp_path: Path) -> None:
    """A metric that fails on the base model's held-out data costs no search."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    drive(coordinator, Unjudged(store.trials(study)[0].recipe.digest, split="test"))
    assert all(trial.state is not TrialState.FAIL for trial in store.trials(study))
    assert [event.payload["trial"] for event in store.events(study) if event.kind == EventKind.HOLDOUT_FAILED] == [0]


def test_a_lost_trial_actor_costs_at_most_its_chunk(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    assert len(evaluation.chunks) == 3
    assert not coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, 0))
    coordinator.on_lost(evaluation, "killed")
    again = coordinator.next_evaluation()
    assert isinstance(again, Evaluation)
    assert (again.trial, again.chunks) == (evaluation.trial, evaluation.chunks[1:])


def test_a_trial_whose_actor_dies_six_times_fails(tmp_path: Path) -> None:
    """A trial fails when its actor died six times with the same chunk; deaths before a stored chunk do not count."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)

    def lose(times: int) -> None:
        for _ in range(times):
            evaluation = coordinator.next_evaluation()
            assert evaluation is not None
            assert evaluation.trial == 0
            coordinator.on_lost(evaluation, "killed")

    lose(MAX_LOST_ACTORS - 1)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    assert not coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, 0))
    coordinator.on_lost(evaluation, "killed")
    lose(MAX_LOST_ACTORS - 2)
    assert not coordinator.trials[0].state.is_finished
    lose(1)
    assert coordinator.trials[0].state is TrialState.FAIL
    assert "6 times with the same samples" in str(coordinator.trials[0].reason)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"recipe_digest": "foreign"}, "held recipe foreign"),
        ({"bank_fingerprint": "other"}, "model directory has changed"),
    ],
)
def test_foreign_evidence_stops_the_study(tmp_path: Path, change: dict[str, str], message: str) -> None:
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    result = score(FakeScorer(), evaluation, 0)
    with pytest.raises(EvidenceMismatch, match=message):
        coordinator.on_outcome(evaluation, replace(result, evidence=replace(result.evidence, **change)))
    assert store.evidence(study) == ()


def test_changed_evidence_stops_the_study(tmp_path: Path) -> None:
    """Weights or prompts that change under the same digest stop the study."""
    store, study = new_study(tmp_path)
    coordinator = coordinator_of(store, study)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, 0))
    second = score(FakeScorer(), evaluation, 1)
    with pytest.raises(EvidenceMismatch, match="weights of checksum"):
        coordinator.on_outcome(evaluation, replace(second, evidence=replace(second.evidence, weights_checksum="0")))
    other = coordinator.next_evaluation()
    assert other is not None
    result = score(FakeScorer(), other, 0)
    prompts = dict.fromkeys(result.evidence.prompts, "0")
    with pytest.raises(EvidenceMismatch, match="prompts of search"):
        coordinator.on_outcome(other, replace(result, evidence=replace(result.evidence, prompts=prompts)))


def test_missing_engine_ends_the_attempt(tmp_path: Path) -> None:
    """A missing engine ends the attempt with the reason, and not the study."""
    store, study = new_study(tmp_path)
    with pytest.raises(EngineUnavailable, match="no engine"):
        drive(coordinator_of(store, study), FakeScorer(unavailable_calls=1))


def test_a_driver_that_was_replaced_cannot_write(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    old = coordinator_of(store, study)
    evaluation = old.next_evaluation()
    assert evaluation is not None
    coordinator_of(store, study)
    with pytest.raises(StaleAttempt, match="has taken over"):
        old.on_outcome(evaluation, score(FakeScorer(), evaluation, 0))


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_finished_search_goes_on_with_more_trials(
    tmp_path: Path, finished: Callable[[Scheduler], Finished], scheduler: Scheduler
) -> None:
    store, study = copied_study(finished(scheduler).closed, tmp_path)
    before = trial_list(store, study)
    drive(coordinator_of(store, study, scheduler=scheduler, max_trials=20), FakeScorer())
    after = trial_list(store, study)
    assert after[: len(before)] == before
    assert len(after) == len(before) + 6


@pytest.mark.slow
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_larger_limit_resumes_the_search(tmp_path: Path, scheduler: Scheduler) -> None:
    """A limit ends the search, and a larger one resumes it."""
    store, study = new_study(tmp_path)
    num_asked = 0

    def is_out_of_budget() -> str | None:
        nonlocal num_asked
        num_asked += 1
        return "limits.max_wall_clock_s: used up" if num_asked > 6 else None

    coordinator = coordinator_of(store, study, scheduler=scheduler, is_out_of_budget=is_out_of_budget)
    drive(coordinator, FakeScorer())
    assert coordinator.end_of_search == "limits.max_wall_clock_s: used up"
    assert all(trial.state.is_finished for trial in store.trials(study))
    num_before = len(store.trials(study))
    drive(coordinator_of(store, study, scheduler=scheduler), FakeScorer())
    trials = store.trials(study)
    assert sum(trial.origin is Origin.SEARCH for trial in trials) == 14
    assert len(trials) > num_before
    assert all(trial.state.is_finished for trial in trials)


class OfThree(InlineProposer):
    """A proposer for a space of three configurations, whose search is soon exhausted."""

    def result(self, *, timeout_s: float) -> Any:
        self._call = {"number": self._call["number"] % 3, "observations": (), "pending": ()}
        return super().result(timeout_s=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("step", ["holdout", "rung", "ask"])
def test_exhausted_search_stays_ended(tmp_path: Path, step: str) -> None:
    """A study killed after an exhausted search proposes no further trial."""

    def run(name: str, observer: Callable[[str], None] = lambda _: None) -> Store:
        proposer = OfThree(lfs_space(), seed=1)
        drive(
            coordinator_of(*studies[name], proposer=proposer, max_trials=60, observer=observer),
            FakeScorer(),
            concurrency=1,
        )
        return studies[name][0]

    studies = {}
    for name in ("calm", "killed"):
        (tmp_path / name).mkdir()
        studies[name] = new_study(tmp_path / name)
    steps: list[str] = []
    run("calm", steps.append)
    last = max(index for index, name in enumerate(steps) if name == step)
    with pytest.raises(Killed):
        run("killed", killer(last))
    run("killed")
    calm, killed = (trial_list(*studies[name]) for name in ("calm", "killed"))
    assert len(calm) < 60
    assert killed == calm


@pytest.mark.parametrize("scheduler", ["hyperband", "racing"])
def test_a_requested_trial_resumes_no_exhausted_search(tmp_path: Path, scheduler: Scheduler) -> None:
    store, study = new_study(tmp_path)

    def num_trials() -> dict[Origin, int]:
        """The number of trials of each origin, after another attempt."""
        proposer = OfThree(lfs_space(), seed=1)
        drive(coordinator_of(store, study, proposer=proposer, max_trials=60, scheduler=scheduler), FakeScorer())
        return Counter(trial.origin for trial in store.trials(study))

    ended = num_trials()
    assert ended[Origin.SEARCH] < 60
    asked = max(trial.number for trial in store.trials(study) if trial.origin is Origin.SEARCH)
    SteeringStore(store).request_evaluation(store.job(study), asked, steering=Steering("evaluate"))
    assert num_trials() == num_trials() == {**ended, Origin.USER: 1}
    assert len(store.events(study, kinds=[EventKind.SEARCH_ENDED])) == 1, "the event is stored once"
    last = store.trials(study)[-1]
    number, label = last.number + 1, "trial 1, refined from trial 0"
    refined = TrialRecord(number, Origin.REFINED, label, TrialState.FAIL, last.recipe, reason="the loss is NaN")
    store.open_attempt(study).add_trial(refined)
    assert num_trials() == {**ended, Origin.USER: 1, Origin.REFINED: 1}


class OddScorer:
    """The fake scorer with another value for one sample of one recipe, or of every recipe (None)."""

    def __init__(self, digest: str | None, value: float, *, position: int = 7) -> None:
        self._scorer, self._digest, self._value, self._position = FakeScorer(), digest, value, position

    def score(self, request: ScoreRequest) -> Any:
        result = self._scorer.score(request)
        if self._digest not in (None, request.recipe.digest):
            return result
        samples = tuple(
            replace(s, value=self._value) if (s.objective, s.position) == ("math", self._position) else s
            for s in result.samples
        )
        return replace(result, samples=samples)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scorer, name)


def test_a_sample_outside_the_range_is_told_where_it_was_scored(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    plan = make_plan(study)
    objectives = (replace(plan.objectives[0], range=(0.0, 1.0)), plan.objectives[1])
    odd = plan.baselines[1][2].digest
    drive(coordinator_of(store, study, objectives=objectives), OddScorer(odd, 3.0))
    events = [event.payload for event in store.events(study) if event.kind == "out_of_range"]
    told = {(payload["trial"], payload["split"]): payload for payload in events}
    assert set(told) == {(1, "search"), (1, "holdout")}
    assert told[1, "search"]["message"].startswith(
        "objective 'math': exact_match of sample 7 of the search data is 3, outside its range [0, 1]; "
    )
    assert store.trial(study, 1).state is TrialState.COMPLETE


def test_mean_outside_the_range_fails(tmp_path: Path) -> None:
    """A mean outside the default range fails its trial with the reason."""
    store, study = new_study(tmp_path)
    odd = make_plan(study).baselines[1][2].digest
    drive(coordinator_of(store, study), OddScorer(odd, 400.0))
    trial = store.trial(study, 1)
    assert trial.state is TrialState.FAIL
    assert str(trial.reason).startswith("objective 'math': exact_match=11.")
    assert "is outside [0, 1]; state where its values lie" in str(trial.reason)
    assert all(other.state.is_finished for other in store.trials(study))


@pytest.mark.slow
@pytest.mark.parametrize(("value", "error"), [(0.3, None), (1.0, 0.5)])
def test_standard_error_of_one_sample(tmp_path: Path, value: float, error: float | None) -> None:
    """A rung of one sample has a standard error only if the metric is binary."""
    store, study = new_study(tmp_path)
    sizes = tuple(dict.fromkeys(("math", "text"), size) for size in (1, 12, 36))
    drive(coordinator_of(store, study, rung_samples=sizes), OddScorer(None, value, position=0))
    of_one = [rung for trial in store.trials(study) for rung in trial.rungs if rung.num_samples["math"] == 1]
    assert len(of_one) > 1
    assert {(rung.values["math"], rung.standard_errors["math"]) for rung in of_one} == {(value, error)}


def test_holdout_covers_finalists(finished: Callable[[Scheduler], Finished]) -> None:
    """Finalists and baselines are scored on all samples of the held-out data."""
    values = finished("hyperband").holdout
    baselines = {trial.recipe.digest for trial in finished("hyperband").trials if trial.origin is not Origin.SEARCH}
    assert baselines <= set(values)
    assert {len(by_position) for by in values.values() for by_position in by.values()} == {50}
