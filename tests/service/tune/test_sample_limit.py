"""The limit of samples: trials that may start, the end of the search, and its continuation with a larger limit."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.fidelity import Scheduler, bracket_cycle
from service.store import Store
from service.store.steps import GradientStep
from service.tune.coordinator import Coordinator
from service.tune.schedulers import SCHEDULERS
from service.types import EventKind, Origin, TrialState
from tests.search_spaces.spaces.families import models
from tests.service.tune.harness import (
    FINGERPRINTS,
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
    trial_list,
)
from tests.service.tune.proposing.test_ray_proposer import NAMES, Stepper, differentiable
from tests.service.tune.test_hm3_searcher import Search
from workers.serving.fake import FakeScorer

FULL = 2 * 36
BASELINES = make_plan("").baselines
BASELINE_SAMPLES = FULL * len(BASELINES)
# Schedulers that promote trials when the search ends.
OF_ONE_BRACKET: tuple[Scheduler, ...] = ("asha", "successive_halving")
# The first trials of a search without a limit of samples, all baselines among them, take about half of these.
LIMIT = FULL * (len(BASELINES) + 7)
# With the first limit, Hyperband's second bracket does not fit, with the other one not all of the third, of one rung.
LIMITS = (FULL * (len(BASELINES) + 3), LIMIT)


def study_in(directory: Path) -> tuple[Store, str]:
    directory.mkdir(exist_ok=True)
    return new_study(directory)


def run(
    store: Store, study: str, *, concurrency: int = 3, order_seed: int = 0, observer: Any = lambda _: None, **plan: Any
) -> Coordinator:
    coordinator = coordinator_of(store, study, observer=observer, **{"max_trials": 30, **plan})
    drive(coordinator, FakeScorer(), concurrency=concurrency, order_seed=order_seed)
    return coordinator


@pytest.fixture(params=SCHEDULERS)
def scheduler(request: pytest.FixtureRequest) -> Scheduler:
    name: Scheduler = request.param
    return name


@dataclass(frozen=True)
class Ended:
    """A search that ran to its end undisturbed: its database, its trials, and what its driver said at the end."""

    closed: tuple[Path, str]
    trials: list[tuple[Any, ...]]
    num_samples_used: int
    end_of_search: str | None


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Scheduler, int | None], Ended]:
    """The search of a scheduler within a limit of samples, run once for all tests of this module."""

    @cache
    def once(scheduler: Scheduler, limit: int | None) -> Ended:
        store, study = study_in(tmp_path_factory.mktemp("undisturbed"))
        ended = run(store, study, scheduler=scheduler, max_samples=limit)
        trials = trial_list(store, study)
        return Ended(closed_study(store, study), trials, ended.num_samples_used, ended.end_of_search)

    return once


Undisturbed = Callable[[Scheduler, int | None], Ended]


@pytest.mark.parametrize("limit", LIMITS)
def test_search_ends_within_the_limit(
    tmp_path: Path, undisturbed: Undisturbed, scheduler: Scheduler, limit: int
) -> None:
    """A search uses most samples of its limit and no more, and every trial ends."""
    ended = undisturbed(scheduler, limit)
    store, study = copied_study(ended.closed, tmp_path)
    used = sum(trial.samples_scored for trial in store.trials(study))
    assert used == ended.num_samples_used <= limit
    # What would start next: a trial at the full budget, or a bracket of Hyperband.
    cycle = bracket_cycle(scheduler, num_rungs=3, eta=3, max_trials=30)
    needed = max(bracket.samples((8, 24, 72)) for bracket in cycle) if scheduler == "hyperband" else FULL
    assert used > limit - needed
    searched = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH]
    assert 0 < len(searched) < 30
    assert all(trial.state.is_finished for trial in store.trials(study))
    assert any(trial.state is TrialState.COMPLETE for trial in searched)
    assert ended.end_of_search is not None
    said = re.match(r"limits.max_samples: ([\d,]+) of ([\d,]+) samples are used, and what would", ended.end_of_search)
    assert said is not None
    numbers = [int(number.replace(",", "")) for number in said.groups()]
    # Successive halving promotes trials after the search has ended.
    assert numbers[0] < used if scheduler == "successive_halving" else numbers[0] == used
    assert numbers[1] == limit
    (event,) = store.events(study, kinds=[EventKind.SEARCH_ENDED])
    assert event.payload == {"reason": ended.end_of_search}


@pytest.mark.slow
def test_promotions_of_the_last_trials_fit(tmp_path: Path) -> None:
    """Successive halving leaves over the samples of all promotions, whichever trial is the last that fits."""
    begun = study_in(tmp_path / "begun")
    with pytest.raises(Killed):  # some steps before the first that another limit changes
        run(*begun, scheduler="successive_halving", max_samples=LIMIT, observer=killer(160))
    closed = closed_study(*begun)
    for more in range(0, FULL, 8):
        ended = run(
            *copied_study(closed, tmp_path / str(more)), scheduler="successive_halving", max_samples=LIMIT + more
        )
        assert LIMIT + more - FULL < ended.num_samples_used <= LIMIT + more


def test_several_objectives_stay_within_the_limit(tmp_path: Path) -> None:
    """Under ASHA, one result may bring several trials among the best of a rung; see `version` for earlier studies."""
    exceeded = {version: [seed for seed in range(40) if _excess(seed, version=version) > 0] for version in (1, None)}
    assert exceeded[1]
    assert exceeded[None] == []


def _excess(seed: int, *, version: int | None) -> int:
    """Samples that a search by ASHA with three objectives uses above its limit; results are random."""
    draw, totals, limit = random.Random(seed), (30, 90, 270), 3000 + 37 * seed
    cycle = bracket_cycle("asha", num_rungs=3, eta=3, max_trials=1000)
    settings: dict[str, Any] = {"num_rungs": 3, "eta": 3, "cycle": cycle, "num_baselines": 0, "max_trials": 1000}
    table = SCHEDULERS["asha"](**settings, max_staleness=4, version=version)
    used: dict[int, int] = {}
    while not table.is_finished:
        while (proposal := table.proposal()) is not None:
            needed = table.most_samples_left(totals) + table.most_samples_of(proposal, totals)
            if sum(used.values()) + needed > limit:
                break
            if proposal.opens is not None:
                table.open_bracket(proposal.bracket, first_rung=0, size=proposal.opens.num_configurations)
            table.add_trial(proposal.number, proposal.bracket)
        ready = list(table.ready())
        if not ready:
            for bracket in table.end_search():
                table.decide(bracket)
            continue
        number, rung = draw.choice(ready)
        used[number] = totals[rung]
        table.record(number, rung, tuple(draw.random() for _ in range(3)))
    return sum(used.values()) - limit


@pytest.mark.slow
@pytest.mark.parametrize(("concurrency", "order_seed"), [(1, 0), (7, 2)])
def test_trials_depend_on_no_order(
    tmp_path: Path, undisturbed: Undisturbed, scheduler: Scheduler, concurrency: int, order_seed: int
) -> None:
    """With a limit of samples, the trials are the same with any number of evaluations in flight and any order."""
    store, study = study_in(tmp_path)
    run(store, study, scheduler=scheduler, max_samples=LIMIT, concurrency=concurrency, order_seed=order_seed)
    assert trial_list(store, study) == undisturbed(scheduler, LIMIT).trials


@pytest.mark.slow
def test_killed_search_ends_at_the_same_trial(tmp_path: Path, undisturbed: Undisturbed, scheduler: Scheduler) -> None:
    killed = study_in(tmp_path)
    for at in (40, 3, 25, 11, 2, 60):
        with pytest.raises(Killed):
            run(*killed, scheduler=scheduler, max_samples=LIMIT, observer=killer(at), order_seed=at)
    run(*killed, scheduler=scheduler, max_samples=LIMIT)
    assert trial_list(*killed) == undisturbed(scheduler, LIMIT).trials


@pytest.mark.slow
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name not in OF_ONE_BRACKET])
def test_larger_limit_gives_undisturbed_trials(
    tmp_path: Path, undisturbed: Undisturbed, scheduler: Scheduler, limit: int
) -> None:
    """A search that continues with a larger limit has the trials of one that had it from the start."""
    stopped = copied_study(undisturbed(scheduler, limit).closed, tmp_path)
    assert run(*stopped, scheduler=scheduler, max_samples=10**6).end_of_search is None
    whole = undisturbed(scheduler, None).trials
    assert trial_list(*stopped) == whole
    assert len(whole) == len(BASELINES) + 30


@pytest.mark.parametrize("scheduler", OF_ONE_BRACKET)
def test_a_larger_limit_opens_another_ladder(tmp_path: Path, undisturbed: Undisturbed, scheduler: Scheduler) -> None:
    """Trials after a larger limit are those of a search that had ended for another reason, if one bracket has all."""
    store, study = copied_study(undisturbed(scheduler, LIMIT).closed, tmp_path)
    before = trial_list(store, study)
    run(store, study, scheduler=scheduler, max_samples=10**6)
    after = store.trials(study)
    assert trial_list(store, study)[: len(before)] == before
    assert {trial.bracket for trial in after[len(before) :]} == {1}
    assert len(after) == len(BASELINES) + 30
    assert all(trial.state.is_finished for trial in after)


def test_repeated_recipes_use_nothing(tmp_path: Path) -> None:
    class OfTwo(InlineProposer):
        def submit(self, *, number: int, **known: Any) -> None:
            super().submit(number=number % 2, observations=(), pending=())

    store, study = study_in(tmp_path)
    space = lfs_space()
    limit = FULL * (len(BASELINES) + 3)
    proposer = OfTwo(space, seed=1)
    plan: dict[str, Any] = {"scheduler": "none", "max_trials": 9, "max_samples": limit, "space": space}
    ended = run(store, study, proposer=proposer, **plan)
    assert ended.end_of_search is None
    assert ended.num_samples_used <= FULL * (len(BASELINES) + 2)


def test_limit_below_the_baselines_scores_only_these(tmp_path: Path) -> None:
    """Baselines are always scored: preflight refuses a limit below them, and a later version may add one."""
    store, study = study_in(tmp_path)
    run(store, study, scheduler="racing", max_samples=1)
    assert {trial.origin for trial in store.trials(study)} == {Origin.SOURCE, Origin.PUBLISHED}


# Searchers with steps.


def gradient_attempt(store: Store, study: str, *, observer: Callable[[str], None] = lambda _: None, **plan: Any) -> Any:
    space = differentiable(replace(models(experts=NAMES, num_layers=4), fingerprints=FINGERPRINTS))
    known = make_plan(study, max_trials=5, scheduler="none", waits_for_baselines=True, **plan)
    vectors = ((1.0, 0.0), (0.5, 0.5), (0.3, 0.7))
    proposer = Stepper(space, store.steps(study), len(known.baselines), [], observer, vectors)
    writer = store.open_attempt(study)
    coordinator = Coordinator(known, space=space, store=store, writer=writer, proposer=proposer)
    drive(coordinator, FakeScorer())
    return coordinator


def charged(store: Store, study: str) -> list[int]:
    return [step.request.num_charged for step in store.steps(study)]


def test_steps_count_and_the_last_one_fits(tmp_path: Path) -> None:
    """Every gradient counts; none starts that would leave less than its trial may take."""
    whole = study_in(tmp_path / "whole")
    every = gradient_attempt(*whole)
    assert every.num_steps == sum(isinstance(step, GradientStep) for step in whole[0].steps(whole[1])) > 0
    assert gradient_attempt(*whole).num_steps == every.num_steps, "steps of earlier attempts count"
    costs = np.cumsum(charged(*whole))
    scored = sum(trial.samples_scored for trial in whole[0].trials(whole[1]) if trial.origin is not Origin.SEARCH)
    gradients = [step.number for step in whole[0].steps(whole[1]) if isinstance(step, GradientStep)]
    first = whole[0].steps(whole[1])[gradients[0]].proposal
    in_first = [n for n in gradients if whole[0].steps(whole[1])[n].proposal == first]
    assert len(in_first) > 1
    enough = int(scored + costs[in_first[0]] + FULL)  # for the first gradient of a descent and a trial
    for limit, num_steps in ((enough, in_first[0] + 1), (enough - 1, in_first[0])):
        store, study = study_in(tmp_path / str(limit))
        ended = gradient_attempt(store, study, max_samples=limit)
        assert charged(store, study) == charged(*whole)[:num_steps]
        assert ended.num_samples_used == scored + sum(charged(store, study)) <= limit - FULL
        assert "limits.max_samples" in str(ended.end_of_search)
        assert all(trial.origin is not Origin.SEARCH for trial in store.trials(study))


@pytest.mark.slow
def test_descents_continue_with_a_larger_limit(tmp_path: Path) -> None:
    """Several descents, stopped within the second one, continue as undisturbed ones; no step is computed twice."""
    whole, stopped = study_in(tmp_path / "whole"), study_in(tmp_path / "stopped")
    everything = gradient_attempt(*whole).num_samples_used
    steps = whole[0].steps(whole[1])
    assert {step.request.descent for step in steps if isinstance(step, GradientStep)} == {0, 1, 2}
    ends = []
    for share in (0.3, 0.4, 0.5):
        limit = BASELINE_SAMPLES + round((everything - BASELINE_SAMPLES) * share)
        ended = gradient_attempt(*stopped, max_samples=limit)
        assert ended.num_samples_used <= limit
        assert ended.end_of_search is not None
        ends.append(len(stopped[0].steps(stopped[1])))
    assert 0 < ends[0] < len(steps)
    with pytest.raises(Killed):
        gradient_attempt(*stopped, observer=killer(1))
    gradient_attempt(*stopped, max_samples=everything)
    assert stopped[0].steps(stopped[1]) == steps
    assert trial_list(*stopped) == trial_list(*whole)


@pytest.mark.slow
def test_policies_continue_with_a_larger_limit(tmp_path: Path) -> None:
    whole, stopped = Search(tmp_path / "whole").run(), Search(tmp_path / "stopped")
    everything = sum(trial.samples_scored for trial in whole.store.trials(whole.study))
    for share in (0.4, 0.7):
        limit = BASELINE_SAMPLES + round((everything - BASELINE_SAMPLES) * share)
        stopped.run(max_samples=limit)
        assert sum(trial.samples_scored for trial in stopped.store.trials(stopped.study)) <= limit
        assert len(BASELINES) < len(stopped.trials) < len(whole.trials)
    stopped.run(max_samples=everything + FULL)
    assert stopped.trials == whole.trials
    assert [step.result.checkpoint for step in stopped.steps] == [step.result.checkpoint for step in whole.steps]
