"""The refinement after a search: its paths, its limits, and the same steps and trials after any kill."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.spaces.base import Coefficients, RefinableSpace, SearchSpace
from search_spaces.study.search import RefinementOptions
from service.results.selection import best_of_front, pareto_front
from service.store import Store
from service.store.steering import SteeringStore
from service.store.steps import (
    ChargedRequest,
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    LossesStep,
    NoteStep,
    Step,
)
from service.tune.coordinator import Coordinator
from service.tune.plan import RefinementPlan
from service.types import EventKind, Origin, Steering, TrialRecord, TrialState
from tests.search_spaces.spaces.families import models, space
from tests.service.tune.harness import (
    FINGERPRINTS,
    Killed,
    coordinator_of,
    drive,
    killer,
    make_plan,
    new_study,
    trial_list,
)
from workers.serving.fake import FakeScorer

NAMES = ("math", "text")
SIZE = 6  # samples of each objective of a trial
FULL = 2 * SIZE
STEPS, BATCH = 3, 4
TRIALS = 8
# Samples of one path: a batch of losses and of each gradient, and the trial.
OF_PATH = BATCH * (1 + 3 * STEPS) + FULL


def hm3() -> SearchSpace:
    family = replace(models(("math", "text"), 4, max_layers=5), fingerprints=FINGERPRINTS)
    built: SearchSpace = space("hm3", family)
    return built


SPACE = hm3()


def refinement(*, paths: int = 2, vectors: tuple[tuple[float, ...], ...] = ((0.5, 0.5),)) -> RefinementPlan:
    options = RefinementOptions(paths=paths, steps=STEPS, batch=BATCH)
    return RefinementPlan(options, dict.fromkeys(NAMES, 36), vectors)


class Quadratic:
    """`refinement_stage.Gradients` of losses that are smallest where all coefficients are 0.6.

    `log` receives every request that is computed. Losses along the paths with an index in `failing` are not finite.
    """

    def __init__(self, log: list[ChargedRequest] | None = None, failing: tuple[int, ...] = ()) -> None:
        self._log = [] if log is None else log
        self._failing = failing
        self._request: ChargedRequest | None = None

    def begin(self, request: ChargedRequest, coefficients: Coefficients | None = None) -> None:
        assert coefficients is not None
        assert len(request.point) == len(coefficients.parameters)
        self._request = request

    def result(self, *, timeout_s: float) -> LossesResult | GradientResult:
        request = self._request
        assert request is not None
        self._log.append(request)
        slope = 2 * (np.array(request.point) - 0.6)
        losses = {name: float((slope**2).sum()) for name in request.positions}
        if isinstance(request, LossesRequest):
            return LossesResult(losses=losses)
        if request.descent in self._failing:
            return GradientResult(failure="the loss is nan")
        return GradientResult(losses=losses, gradient=tuple(slope.tolist()), seconds=1.0)


def run(store: Store, study: str, *, observer: Callable[[str], None] = lambda _: None, **changes: Any) -> Coordinator:
    given: dict[str, Any] = {
        "gradients": Quadratic(),
        "refinement": refinement(),
        "scheduler": "none",
        "max_trials": TRIALS,
        "rung_samples": (dict.fromkeys(NAMES, SIZE),),
        "holdout_samples": dict.fromkeys(NAMES, 2),
        "baselines": (),
    }
    coordinator = coordinator_of(store, study, space=SPACE, observer=observer, **{**given, **changes})
    drive(coordinator, FakeScorer())
    return coordinator


def study_in(directory: Path) -> tuple[Store, str]:
    directory.mkdir(exist_ok=True)
    return new_study(directory)


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, str]:
    """A study that ran undisturbed. Its tests do not change it."""
    found = new_study(tmp_path_factory.mktemp("calm"))
    run(*found)
    return found


def by_origin(store: Store, study: str, origin: Origin) -> list[TrialRecord]:
    return [trial for trial in store.trials(study) if trial.origin is origin]


def gradients_of(steps: tuple[Step, ...]) -> list[GradientStep]:
    return [step for step in steps if isinstance(step, GradientStep)]


def test_the_front_of_the_search_is_refined(tmp_path: Path) -> None:
    """Each of the best paths of the front is refined, scored like a trial, and counted; the front is of all trials."""
    store, study = new_study(tmp_path)
    ended = run(store, study, refinement=refinement(paths=100))
    objectives = make_plan(study).objectives
    searched, refined = (by_origin(store, study, origin) for origin in (Origin.SEARCH, Origin.REFINED))
    front = best_of_front(searched, objectives, most=100)
    assert len(searched) == TRIALS
    assert len(refined) == len(front) > 1
    assert [trial.label for trial in refined] == [
        f"trial {trial.number}, refined from trial {path.number}" for trial, path in zip(refined, front, strict=True)
    ]
    assert all(trial.state is TrialState.COMPLETE and trial.samples_scored == FULL for trial in refined)
    assert {trial.number for trial in pareto_front(store.trials(study), objectives)} & {t.number for t in refined}
    held_out = [event.payload["trial"] for event in store.events(study, kinds=[EventKind.HOLDOUT_SCORED])]
    assert set(held_out) & {trial.number for trial in refined}
    steps = store.steps(study)
    assert len(gradients_of(steps)) == ended.num_steps == STEPS * len(front)
    assert sum(isinstance(step, LossesStep) for step in steps) == len(front)
    scored = sum(trial.samples_scored for trial in store.trials(study))
    assert ended.num_samples_used == scored + len(front) * (OF_PATH - FULL)
    assert ended.end_of_search is None


def test_a_refined_path_keeps_its_layers(calm: tuple[Store, str]) -> None:
    """The refined merge has the path's layers; its coefficients are those that the descent reached."""
    store, study = calm
    assert isinstance(SPACE, RefinableSpace)
    for index, trial in enumerate(by_origin(store, study, Origin.REFINED)):
        path = store.trials(study)[int(trial.label.rpartition(" ")[2])].read_recipe()
        coefficients = SPACE.coefficients_of(path)
        steps = [step for step in gradients_of(store.steps(study)) if step.request.descent == index]
        names = coefficients.parameters.names
        start = dict(zip(names, steps[0].request.point, strict=True))
        assert coefficients.to_recipe(start).digest == path.digest, "the descent begins at the path itself"
        found = trial.read_recipe()
        assert found.digest != path.digest
        assert [{source.layer for source in layer.mlp.sources} for layer in found.layers] == [
            {layer.mlp.sources[0].layer} for layer in path.layers
        ]
        # Every step goes towards 0.6, where the losses are smallest.
        distances = [np.abs(np.array(step.request.point) - 0.6).sum() for step in steps]
        assert distances == sorted(distances, reverse=True)
        # Samples are drawn again only when all were drawn.
        drawn = [p for step in steps for p in step.request.positions["math"]]
        assert len(set(drawn)) == len(drawn) == STEPS * BATCH // 2


def test_kill_at_any_step_repeats_no_gradient(calm: tuple[Store, str], tmp_path: Path) -> None:
    """A study that is killed at any step ends with the same trials, and computes no stored gradient again."""
    steps = calm[0].steps(calm[1])
    store, study = new_study(tmp_path)
    log: list[ChargedRequest] = []
    num_kills = 0
    while True:
        try:
            run(store, study, observer=killer(4 + num_kills % 3), gradients=Quadratic(log))
        except Killed:
            num_kills += 1
            continue
        break
    assert num_kills > len(steps) / 2
    assert store.steps(study) == steps
    assert trial_list(store, study) == trial_list(*calm)
    # Stored results are read; one that was computed and not yet stored is computed again.
    assert len(log) <= len([step for step in steps if not isinstance(step, NoteStep)]) + num_kills
    assert [request for index, request in enumerate(log) if index == 0 or log[index - 1] != request] == [
        step.request for step in steps if not isinstance(step, NoteStep)
    ]


def test_a_requested_trial_ends_no_descent(calm: tuple[Store, str], tmp_path: Path) -> None:
    """A trial that a user requests during a descent takes the next number; the descent continues and adds its own."""
    store, study = new_study(tmp_path)
    seen: list[str] = []

    def kill_at_the_second_step(what: str) -> None:
        seen.append(what)
        if seen.count("refined") == 2:
            raise Killed

    with pytest.raises(Killed):
        run(store, study, observer=kill_at_the_second_step)
    request = Steering("reevaluate", None, None)
    SteeringStore(store).request_evaluation(store.job(study), 0, steering=request)
    run(store, study)
    refined, calmly = (by_origin(*each, Origin.REFINED) for each in ((store, study), calm))
    assert [trial.number for trial in refined] == [trial.number + 1 for trial in calmly]
    assert [trial.recipe for trial in refined] == [trial.recipe for trial in calmly]
    assert [step.request for step in store.steps(study)] == [step.request for step in calm[0].steps(calm[1])]


def test_a_choice_is_made_once(calm: tuple[Store, str]) -> None:
    """Once paths are chosen, the search is over, also with a larger number of trials."""
    store, study = calm
    before = trial_list(store, study)
    assert run(store, study, max_trials=30).is_finished
    assert trial_list(store, study) == before
    (note,) = store.events(study, kinds=[EventKind.SEARCH_NOTE])
    assert note.payload["text"].startswith("coefficients are refined along the paths of the front (trials ")


def test_each_path_has_the_vector_it_is_best_for(tmp_path: Path) -> None:
    """A path is refined for the preference vector for which it is least behind the best path."""
    vectors = ((0.9, 0.1), (0.1, 0.9))
    store, study = new_study(tmp_path)
    run(store, study, refinement=refinement(paths=100, vectors=vectors))
    trials = store.trials(study)
    refined = by_origin(store, study, Origin.REFINED)
    paths = [trials[int(trial.label.rpartition(" ")[2])] for trial in refined]
    firsts = {step.request.descent: step for step in reversed(gradients_of(store.steps(study)))}
    for index, path in enumerate(paths):
        behind = [
            max(m * p.values["math"] + t * p.values["text"] for p in paths)
            - (m * path.values["math"] + t * path.values["text"])
            for m, t in vectors
        ]
        request = firsts[index].request
        assert request.preference == dict(zip(("math", "text"), vectors[int(np.argmin(behind))], strict=True))
        # In units of the losses at the path itself.
        losses = firsts[index].result.losses
        assert request.weights["math"] * losses["math"] == pytest.approx(request.preference["math"])
    assert {tuple(firsts[index].request.preference.values()) for index in range(len(paths))} == set(vectors)


def test_search_leaves_the_samples_of_the_refinement(tmp_path: Path) -> None:
    """With a limit of samples the search ends early enough for the refinement, and the limit holds."""
    limit = FULL * 5 + OF_PATH
    store, study = new_study(tmp_path)
    ended = run(store, study, max_samples=limit, refinement=refinement(paths=1))
    assert len(by_origin(store, study, Origin.SEARCH)) == 5
    assert len(by_origin(store, study, Origin.REFINED)) == 1
    assert ended.num_samples_used == limit
    assert ended.end_of_search is not None
    assert f"{OF_PATH:,} are kept for the refinement" in ended.end_of_search


def test_refinement_ends_at_a_limit(calm: tuple[Store, str], tmp_path: Path) -> None:
    """At a limit the next path is not begun; with a larger limit the study continues with this path."""
    store, study = new_study(tmp_path)

    def used_up() -> str | None:
        return "60 s are used up" if by_origin(store, study, Origin.REFINED) else None

    assert run(store, study, is_out_of_budget=used_up).is_finished
    assert len(by_origin(store, study, Origin.REFINED)) == 1
    *_, note = store.events(study, kinds=[EventKind.SEARCH_NOTE])
    assert note.payload["text"].endswith(": 60 s are used up")
    run(store, study)
    assert trial_list(store, study) == trial_list(*calm)


def test_a_path_beyond_the_limit_is_not_begun(tmp_path: Path) -> None:
    """A path whose refinement may exceed the limit of samples is left out, and no step of it is computed."""
    store, study = new_study(tmp_path)
    limit = FULL * TRIALS + 2 * OF_PATH - 1
    run(store, study, max_samples=FULL * TRIALS, refinement=None)
    ended = run(store, study, max_samples=limit)
    assert len(by_origin(store, study, Origin.REFINED)) == 1
    assert ended.num_samples_used == FULL * TRIALS + OF_PATH
    *_, note = store.events(study, kinds=[EventKind.SEARCH_NOTE])
    assert note.payload["text"].endswith(f"limits.max_samples leaves fewer than the {OF_PATH} samples of the next path")


def test_a_path_whose_loss_is_not_finite_is_left_out(tmp_path: Path) -> None:
    """A descent that fails gives no trial, and the next path is refined."""
    store, study = new_study(tmp_path)
    assert run(store, study, gradients=Quadratic(failing=(0,))).is_finished
    (trial,) = by_origin(store, study, Origin.REFINED)
    steps = gradients_of(store.steps(study))
    assert [step.request.descent for step in steps] == [0] + [1] * STEPS
    assert all(step.proposal == trial.number for step in steps)
    log: list[ChargedRequest] = []
    run(store, study, gradients=Quadratic(log))
    assert log == [], "a failed descent is not repeated"


def test_gradients_count_as_three_samples() -> None:
    """The most samples of a refinement are those of its steps and trials."""
    assert refinement().most_samples(FULL) == 2 * OF_PATH
    assert GradientRequest.charge == 3
