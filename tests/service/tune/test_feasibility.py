"""Constraints during a search: promotions, searchers' knowledge, and independence from timing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from search_spaces.constraints import parse_constraint
from search_spaces.fidelity import Scheduler
from search_spaces.objectives import Objective
from service.errors import StudyFailed
from service.results.feasibility import violations
from service.store import Store
from service.tune.coordinator import Coordinator
from service.tune.schedulers import SCHEDULERS
from service.tune.searchers.base import Observation
from service.types import Origin, TrialState
from tests.service.stored_values import stored_values
from tests.service.tune.harness import (
    InlineProposer,
    Killed,
    coordinator_of,
    drive,
    killer,
    lfs_space,
    make_plan,
    new_study,
    score,
    trial_list,
)
from workers.serving.fake import FakeScorer
from workers.types import Split

pytestmark = pytest.mark.slow  # whole searches

RELATIVE = ("text >= base + 0.1", "math >= best expert - 0.15")


def objectives(*constraints: str) -> tuple[Objective, ...]:
    parsed = [parse_constraint(text) for text in constraints]
    return tuple(
        Objective(name, "exact_match", "maximize", None, tuple(c for c in parsed if c.objective == name))
        for name in ("math", "text")
    )


class Recorder(InlineProposer):
    """A random search that records, for each proposal, the results told to it."""

    def __init__(self) -> None:
        super().__init__(lfs_space(), seed=0)
        self.told: dict[int, tuple[Observation, ...]] = {}

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        self.told[number] = tuple(observations)
        super().submit(number=number, observations=observations, pending=pending)


def finished(
    directory: Path, *constraints: str, scheduler: Scheduler = "hyperband", **drive_options: Any
) -> tuple[Store, str, Recorder, Coordinator]:
    directory.mkdir(exist_ok=True)
    store, study = new_study(directory)
    proposer = Recorder()
    coordinator = coordinator_of(
        store, study, proposer=proposer, scheduler=scheduler, objectives=objectives(*constraints), max_trials=14
    )
    drive(coordinator, FakeScorer(), **drive_options)
    return store, study, proposer, coordinator


def values_at(store: Store, study: str, digest: str, rung: int) -> dict[str, float]:
    stored = stored_values(store, study, Split.SEARCH)[digest]
    size = (4, 12, 36)[rung]
    return {name: sum(stored[name][i] for i in range(size)) / size for name in stored}


def test_searchers_receive_slack(tmp_path: Path) -> None:
    """Searchers receive the slack of constraints on the same samples."""
    store, study, proposer, _ = finished(tmp_path, *RELATIVE)
    trials = {trial.number: trial for trial in store.trials(study)}
    base = next(trial for trial in trials.values() if trial.label == "base")
    experts = [trial for trial in trials.values() if trial.label.startswith("expert:")]
    expert = max(experts, key=lambda trial: trial.values["math"])
    rungs = set()
    for observation in (o for told in proposer.told.values() for o in told):
        rung = observation.rung
        own, low, high = (
            values_at(store, study, trial.recipe.digest, rung) for trial in (trials[observation.number], base, expert)
        )
        expected = (high["math"] - 0.15 - own["math"], low["text"] + 0.1 - own["text"])
        assert observation.constraints == pytest.approx(expected)
        rungs.add(rung)
    assert {0, 2} <= rungs


def test_those_that_keep_to_constraints_are_promoted_first(tmp_path: Path) -> None:
    """Hyperband, so each rung of a bracket promotes from all its members."""
    store, study, _, coordinator = finished(tmp_path, "math <= 0.4")
    searched = [trial for trial in store.trials(study) if trial.origin is Origin.SEARCH and trial.bracket == 0]
    promoted = [trial for trial in searched if len(trial.rungs) > 1]
    others = [trial for trial in searched if len(trial.rungs) == 1]
    at_first = {trial.number: max(0.0, trial.rungs[0].values["math"] - 0.4) for trial in searched}
    assert promoted
    assert others
    assert max(at_first[t.number] for t in promoted) <= min(at_first[t.number] for t in others)
    without, other, _, _ = finished(tmp_path / "without")
    assert trial_list(without, other) != trial_list(store, study), "the constraint makes no difference here"
    assert coordinator.is_finished


@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name != "none"])
def test_trials_ignore_the_order_of_results(tmp_path: Path, scheduler: Scheduler) -> None:
    """The trials do not depend on the order in which results arrive.

    Bounds that are relative to source models may not be known later than what is compared with them.
    """
    first, one, _, _ = finished(tmp_path / "a", *RELATIVE, scheduler=scheduler, concurrency=1)
    second, two, _, _ = finished(tmp_path / "b", *RELATIVE, scheduler=scheduler, concurrency=5, order_seed=3)
    assert trial_list(first, one) == trial_list(second, two)


def test_relative_bounds_wait_for_sources(tmp_path: Path) -> None:
    """No trial is proposed before the models of relative bounds are scored."""
    store, study = new_study(tmp_path)
    proposer = Recorder()
    coordinator = coordinator_of(
        store, study, proposer=proposer, objectives=objectives(*RELATIVE), max_trials=14, max_staleness=20
    )
    while not proposer.told:
        evaluation = coordinator.next_evaluation()
        assert evaluation is not None
        for chunk in range(len(evaluation.chunks)):
            coordinator.on_outcome(evaluation, score(FakeScorer(), evaluation, chunk))
    labels = {trial.label for trial in coordinator.trials if trial.state is TrialState.COMPLETE}
    assert {"base", "expert:math", "expert:text"} <= labels


@pytest.mark.parametrize("scheduler", ["hyperband", "racing"])
def test_a_killed_search_ends_as_an_undisturbed_one(tmp_path: Path, scheduler: Scheduler) -> None:
    reference, expected, _, _ = finished(tmp_path / "reference", *RELATIVE, scheduler=scheduler)
    (tmp_path / "killed").mkdir()
    store, study = new_study(tmp_path / "killed")
    plan: dict[str, Any] = {"scheduler": scheduler, "objectives": objectives(*RELATIVE), "max_trials": 14}
    for at in (7, 23, 41, 60):
        try:
            coordinator = coordinator_of(store, study, proposer=Recorder(), observer=killer(at), **plan)
            drive(coordinator, FakeScorer())
        except Killed:
            continue
    drive(coordinator_of(store, study, proposer=Recorder(), **plan), FakeScorer())
    assert trial_list(store, study) == trial_list(reference, expected)


def test_an_expert_that_failed_is_no_bound(tmp_path: Path) -> None:
    store, study = new_study(tmp_path)
    digest = {label: recipe.digest for _, label, recipe in make_plan(study).baselines}["expert:math"]
    scorer = FakeScorer(failing=frozenset({digest}))
    constrained = coordinator_of(store, study, objectives=objectives("math >= expert:math - 0.1"))
    with pytest.raises(StudyFailed, match=r"math - 0.1: expert:math has no score: fake: this recipe fails"):
        drive(constrained, scorer)
    (tmp_path / "any").mkdir()
    store, study = new_study(tmp_path / "any")
    drive(coordinator_of(store, study, objectives=objectives("math >= best expert - 0.1")), scorer)  # the other one is


def test_the_finalists_keep_to_the_constraints(tmp_path: Path) -> None:
    store, study, _, coordinator = finished(tmp_path, *RELATIVE)
    scored = set(stored_values(store, study, Split.HOLDOUT))
    found = [t for t in coordinator.trials if t.recipe.digest in scored and t.origin is Origin.SEARCH]
    assert found
    for trial in found:
        assert violations(trial.values, objectives(*RELATIVE), coordinator.trials) == {}
