"""The gradient searcher as a function: its requests, its proposals, and its switch away from gradients."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from search_spaces.parameters import Float, Parameters
from search_spaces.searchers import SEARCHERS as DECLARED
from search_spaces.study.search import GradientOptions, Search
from service.store.steps import (
    CompletionsRequest,
    CompletionsResult,
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    NoteRequest,
    NoteResult,
    StepRequest,
    StepResult,
    read_step,
    step_document,
    step_of,
)
from service.tune.searchers import get_searcher, gradient
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.loss_comparison import most_compared_samples, rank_correlation

PARAMETERS = Parameters([Float(f"w{i}", -0.5, 1.5, default=0.5) for i in range(6)])
TARGET = np.array([1.2, -0.2, 0.4, 0.9, 0.0, 1.5])
NUM_BASELINES = 5
OPTIONS = GradientOptions(steps=12, batch=4, learning_rate=0.2, points=3)
SETTING = SearchSetting(
    objectives=("math", "text"),
    num_samples={"math": 10, "text": 7},
    num_baselines=NUM_BASELINES,
    options=Search(gradient=OPTIONS),
)


def baselines(*, sign: float = 1.0) -> list[Observation]:
    """Baselines whose costs grow with the loss (with `sign` -1, fall with it)."""
    found = []
    for number in range(NUM_BASELINES):
        point = np.full(6, number / 4)
        cost = sign * loss_at(point)
        found.append(
            Observation(
                dict(zip(PARAMETERS.names, point.tolist(), strict=True)),
                1.0,
                (cost, cost),
                number=number,
                rung=0,
                is_proposed=False,
            )
        )
    return found


def loss_at(point: Any) -> float:
    return float(((np.array(point) - TARGET) ** 2).sum())


def computed(request: StepRequest) -> StepResult:
    """Result of a request: losses of a quadratic, twice as large for text, and the gradient of their weighted sum."""
    if isinstance(request, CompletionsRequest):
        return CompletionsResult(completions=dict.fromkeys(request.completions, ()))
    assert isinstance(request, (LossesRequest, GradientRequest))
    loss = loss_at(request.point)
    losses = {"math": loss, "text": 2 * loss}
    if isinstance(request, LossesRequest):
        return LossesResult(losses=losses, recipe="r", bank="b")
    slope = 2 * (np.array(request.point) - TARGET)
    factor = request.weights.get("math", 0.0) + 2 * request.weights.get("text", 0.0)
    return GradientResult(losses=losses, gradient=tuple((factor * slope).tolist()), recipe="r", bank="b")


def propose(
    number: int,
    steps: list[Any],
    *,
    known: Sequence[Observation],
    compute: Callable[[StepRequest], StepResult] = computed,
    seed: int = 0,
    setting: SearchSetting = SETTING,
) -> dict[str, Any]:
    """The configuration of a proposal; adds the steps that it needs to `steps`."""
    context = ProposalContext(PARAMETERS, number=number, seed=seed, observations=known, steps=steps, setting=setting)
    while True:
        answer = get_searcher("gradient").advance(context)
        if isinstance(answer, dict):
            return answer
        result = NoteResult() if isinstance(answer, NoteRequest) else compute(answer)
        step = step_of(len(steps), number, answer, result)
        steps.append(read_step(step.number, step.proposal, json.loads(json.dumps(step_document(step)))))


def kinds(steps: Sequence[Any]) -> list[str]:
    return [step.request.kind for step in steps]


def test_descent_points_improve() -> None:
    """Points of the descent are proposed evenly and improve."""
    steps: list[Any] = []
    losses = [loss_at(list(propose(NUM_BASELINES + i, steps, known=baselines()).values())) for i in range(3)]
    assert kinds(steps) == ["losses"] * 5 + ["note"] + ["gradient"] * 12
    assert [step.proposal for step in steps if isinstance(step, GradientStep)] == [5] * 4 + [6] * 4 + [7] * 4
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.3 * loss_at([0.5] * 6)


def test_descent_without_baselines() -> None:
    """Without baselines gradients are used without a comparison, and losses count as they are."""
    steps: list[Any] = []
    propose(0, steps, known=(), setting=replace(SETTING, num_baselines=0))
    note, *gradients = [step.request for step in steps]
    assert note.label == "gradients are used: 0 baselines are too few to compare losses with scores"
    assert [request.weights for request in gradients] == [{"math": 0.5, "text": 0.5}] * 4


def test_steps_are_those_of_adam_within_the_ranges() -> None:
    steps: list[Any] = []
    propose(NUM_BASELINES + 2, steps, known=baselines())
    descent = [step for step in steps if isinstance(step, GradientStep)]
    point = torch.full((6,), 0.5, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([point], lr=0.2)
    for number, step in enumerate(descent):
        np.testing.assert_allclose(step.request.point, point.detach().numpy(), atol=1e-9)
        adam.param_groups[0]["lr"] = 0.2 * (1 - number / 12 + 5e-4)
        point.grad = torch.tensor(step.result.gradient, dtype=torch.float64)
        adam.step()
        with torch.no_grad():
            point.clamp_(-0.5, 1.5)


def test_adamerging_steps_at_a_constant_rate_from_its_start() -> None:
    """With the defaults of entropies, coefficients of experts start at 0.3, scales at 1, and the rate does not fall."""
    roles = {f"w{i}": "left" for i in range(5)}
    parameters = Parameters(
        [*(Float(name, 0.0, 1.0, default=0.5) for name in roles), Float("s", 0.5, 1.5, default=1.0)],
        roles={**roles, "s": "scale:"},
    )
    options = Search(gradient=GradientOptions.model_validate({"loss": "entropy", "points": 1, "steps": 9}))
    setting = replace(SETTING, num_baselines=0, options=options, experts=("left",))
    steps: list[Any] = []
    while True:
        context = ProposalContext(parameters, number=0, seed=0, observations=(), steps=steps, setting=setting)
        answer = get_searcher("gradient").advance(context)
        if isinstance(answer, dict):
            break
        result = NoteResult() if isinstance(answer, NoteRequest) else computed(answer)
        steps.append(step_of(len(steps), 0, answer, result))
    descent = [step for step in steps if isinstance(step, GradientStep)]
    assert len(descent) == 9
    assert descent[0].request.point == (0.3,) * 5 + (1.0,)
    point = torch.tensor(descent[0].request.point, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([point], lr=1e-3)
    for step in descent:
        np.testing.assert_allclose(step.request.point, point.detach().numpy(), atol=1e-9)
        point.grad = torch.tensor(step.result.gradient, dtype=torch.float64)
        adam.step()
    np.testing.assert_allclose(list(answer.values()), point.detach().numpy(), atol=1e-9)
    outside = replace(setting, options=Search(gradient=GradientOptions(start=2.0)))
    context = ProposalContext(parameters, number=0, seed=0, observations=(), steps=steps[:1], setting=outside)
    request = get_searcher("gradient").advance(context)
    assert isinstance(request, GradientRequest)
    assert request.point == (1.0,) * 6, "a start is moved into the range"


def test_classifiers_have_no_completions() -> None:
    """SMAC proposes at once if losses mislead and the models do not complete prompts."""
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines(sign=-1.0), setting=replace(SETTING, has_completions=False))
    assert kinds(steps) == ["losses"] * 5 + ["note"]
    assert steps[-1].request.label == (
        "gradients are not used, smac proposes: lower losses do not mean better scores "
        "(rank correlation over 5 baselines: "
        "math -1.00, text -1.00; 0.3 is needed)"
    )


def test_objectives_count_alike() -> None:
    """Objectives count alike, whatever the size of their losses."""
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines())
    weights = steps[-1].request.weights
    assert weights["math"] == pytest.approx(2 * weights["text"])
    mean = np.mean([step.result.losses["math"] for step in steps[:5]])
    assert weights["math"] * mean == pytest.approx(0.5)


def test_minibatch_shares() -> None:
    """A minibatch has equal shares, and every sample is drawn before one is drawn again."""
    steps: list[Any] = []
    propose(NUM_BASELINES + 2, steps, known=baselines())
    batches = [step.request.positions for step in steps if isinstance(step, GradientStep)]
    assert all(len(batch["math"]) == len(batch["text"]) == 2 for batch in batches)
    assert sorted(p for batch in batches[:5] for p in batch["math"]) == list(range(10))
    drawn = [p for batch in batches for p in batch["text"]]
    assert all(drawn.count(position) >= len(drawn) // 7 for position in range(7))
    other: list[Any] = []
    propose(NUM_BASELINES, other, known=baselines(), seed=1)
    assert other[6].request.positions != steps[6].request.positions


def test_charged_samples() -> None:
    """A gradient is charged three times its samples, a comparison once."""
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines())
    assert [step.request.num_charged for step in steps] == [17] * 5 + [0] + [12] * 4
    assert most_compared_samples(SETTING) == 2 * 5 * 17


def test_later_proposals_are_mutants_of_the_best_trial() -> None:
    steps: list[Any] = []
    best = propose(NUM_BASELINES + 2, steps, known=baselines())
    num_steps = len(steps)
    trial = Observation(best, 1.0, (-9.0, -9.0), number=NUM_BASELINES + 2, rung=0)
    mutant = propose(NUM_BASELINES + 3, steps, known=[*baselines(), trial])
    assert len(steps) == num_steps
    moved = [name for name in best if best[name] != mutant[name]]
    assert 0 < len(moved) < len(best)


def test_mutants_are_of_the_best_feasible() -> None:
    """Mutants are of the best trial that satisfies the constraints."""
    steps: list[Any] = []
    points = [propose(NUM_BASELINES + i, steps, known=baselines()) for i in range(3)]
    known = [replace(observation, constraints=(0.1,)) for observation in baselines()]
    for i, (cost, constraint) in enumerate(((-7.0, -0.1), (-8.0, 0.0), (-9.0, 0.2))):
        trial = Observation(points[i], 1.0, (cost, cost), number=NUM_BASELINES + i, rung=0, constraints=(constraint,))
        known.append(trial)
    mutant = propose(NUM_BASELINES + 3, steps, known=known)
    kept = [sum(mutant[name] == point[name] for name in point) for point in points]
    assert kept[1] > 0
    assert max(kept[0], kept[2]) < kept[1]


def test_smac_replaces_misleading_losses() -> None:
    """SMAC proposes where a lower loss does not correlate with a better score."""
    steps: list[Any] = []
    known = baselines(sign=-1.0)
    found = propose(NUM_BASELINES, steps, known=known)
    assert kinds(steps) == ["losses"] * 5 + ["completions", "note"]
    assert steps[-1].request.label.startswith(
        "gradients are not used, smac proposes: lower losses do not mean better scores"
    )
    assert "math -1.00, text -1.00" in steps[-1].request.label
    assert "too few correct completions (math 0, text 0; 8 are needed)" in steps[-1].request.label
    smac: Any = get_searcher("smac")
    assert found == smac.advance(ProposalContext(PARAMETERS, number=NUM_BASELINES, seed=0, observations=known))
    assert propose(NUM_BASELINES + 1, steps, known=known) != found
    assert len(steps) == 7, "it is decided once"


@pytest.mark.parametrize(("version", "expected"), [(1, 1), (2, 4), (None, 4)])
def test_smac_has_the_version_of_new_studies(
    version: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A study that was created with version 1 of this searcher keeps the first version of SMAC."""
    asked: list[int | None] = []

    class Asked:
        def advance(self, context: ProposalContext) -> dict[str, Any]:
            asked.append(context.setting.version)
            return {}

    monkeypatch.setattr(gradient, "WITHOUT_GRADIENTS", Asked())
    propose(NUM_BASELINES, [], known=baselines(sign=-1.0), setting=replace(SETTING, version=version))
    assert asked == [expected]


def test_other_searchers_are_the_newest_in_new_studies() -> None:
    newest = gradient.OTHERS[DECLARED["gradient"].version]
    assert newest == {name: DECLARED[name].version for name in ("smac", "es")}


def test_few_recipes_allow_the_descent() -> None:
    """Too few baselines decide nothing, and the descent is tried."""
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines(sign=-1.0)[:3])
    assert kinds(steps) == ["losses"] * 3 + ["note"] + ["gradient"] * 4
    assert "3 baselines are too few" in steps[3].request.label


def test_infinite_loss_ends_the_descent() -> None:
    """A loss that is not finite ends the descent, and the local search continues."""

    def broken(request: StepRequest) -> StepResult:
        is_third = isinstance(request, GradientRequest) and len(steps) == 8
        return GradientResult(failure="the loss is nan") if is_third else computed(request)

    steps: list[Any] = []
    found = [propose(NUM_BASELINES + i, steps, known=baselines(), compute=broken) for i in range(2)]
    assert kinds(steps) == ["losses"] * 5 + ["note"] + ["gradient"] * 3
    assert found[0] != found[1]
    assert all(PARAMETERS[name].contains(value) for each in found for name, value in each.items())


def test_rank_correlation_is_spearmans() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 3, 2, 4]) == pytest.approx(0.9486833)
    assert rank_correlation([1, 2], [5, 5]) == 0.0
    assert rank_correlation([], []) == 0.0


# Several preference vectors.


PREFERENCES = ((1.0, 0.0), (0.75, 0.25), (0.5, 0.5), (0.0, 1.0))
SEVERAL = replace(SETTING, preferences=PREFERENCES)
TARGETS = {"math": TARGET, "text": -TARGET / 3 + 0.5}


FACTORS = {"math": 1.0, "text": 2.0}


def losses_of_each(point: Sequence[float]) -> dict[str, float]:
    """Losses that have their minima at different points; the losses of text are twice as large."""
    return {name: FACTORS[name] * float(((np.array(point) - TARGETS[name]) ** 2).sum()) for name in FACTORS}


def of_each(request: StepRequest) -> StepResult:
    assert isinstance(request, (LossesRequest, GradientRequest))
    losses = losses_of_each(request.point)
    if isinstance(request, LossesRequest):
        return LossesResult(losses=losses, recipe="r")
    slopes = {name: FACTORS[name] * 2 * (np.array(request.point) - TARGETS[name]) for name in FACTORS}
    gradient = sum((weight * slopes[name] for name, weight in request.weights.items()), np.zeros(6))
    return GradientResult(losses=losses, gradient=tuple(gradient.tolist()), recipe="r")


def points_of(steps: list[Any], num_points: int = 4, **changes: Any) -> list[dict[str, Any]]:
    def scored(o: Observation) -> Observation:
        losses = losses_of_each(tuple(o.configuration.values()))
        return replace(o, costs=(losses["math"], losses["text"]))

    known = [scored(observation) for observation in baselines()]
    call: dict[str, Any] = {"known": known, "compute": of_each, "setting": SEVERAL, **changes}
    return [propose(NUM_BASELINES + index, steps, **call) for index in range(num_points)]


def gradients(steps: Sequence[Any], descent: int) -> list[Any]:
    return [step for step in steps if isinstance(step, GradientStep) and step.request.descent == descent]


def test_descent_starts_at_a_neighbours_end() -> None:
    """Every preference vector has a descent from the end of its nearest neighbour's."""
    steps: list[Any] = []
    ends = [np.array(list(point.values())) for point in points_of(steps)]
    assert [len(gradients(steps, number)) for number in range(5)] == [12, 3, 3, 3, 0]
    preferences = [tuple(gradients(steps, number)[0].request.preference.values()) for number in range(4)]
    assert preferences == [(0.5, 0.5), (0.75, 0.25), (1.0, 0.0), (0.0, 1.0)]
    starts = [gradients(steps, number)[0].request.point for number in range(4)]
    np.testing.assert_array_equal(starts[0], [0.5] * 6)
    np.testing.assert_array_equal(starts[1:], [ends[0], ends[1], ends[0]])
    for number, name in ((2, "math"), (3, "text")):
        at = [losses_of_each(tuple(ends[i]))[name] for i in (0, number)]
        assert at[1] < at[0], "a descent for one objective alone makes it better"


def test_zero_weight_takes_no_samples() -> None:
    """An objective of weight zero takes no samples, and the others take all."""
    steps: list[Any] = []
    points_of(steps)
    for step in gradients(steps, 2):
        assert step.request.positions.keys() == step.request.weights.keys() == {"math"}
        assert len(step.request.positions["math"]) == OPTIONS.batch
    drawn = [
        position
        for step in steps
        if isinstance(step, GradientStep)
        for position in step.request.positions.get("math", ())
    ]
    counts = [drawn.count(position) for position in range(10)]
    assert max(counts) - min(counts) <= 1, "over all descents, every sample is drawn before one is drawn again"


def test_preferences_weigh_losses_in_units_of_their_means() -> None:
    steps: list[Any] = []
    points_of(steps)
    scales = {name: np.mean([step.result.losses[name] for step in steps[:5]]) for name in ("math", "text")}
    weights = gradients(steps, 1)[0].request.weights
    assert {name: weights[name] * scales[name] for name in weights} == pytest.approx({"math": 0.75, "text": 0.25})


def test_short_descents_begin_at_their_own_learning_rate() -> None:
    steps: list[Any] = []
    points_of(steps)
    first, second = gradients(steps, 1)[:2]
    moved = np.abs(np.array(second.request.point) - np.array(first.request.point))
    # Adam's first step moves by the learning rate, wherever the range allows it.
    rate = 0.2 * 0.6 * (1 + 5e-4)
    assert moved.max() == pytest.approx(rate, rel=1e-5)


def test_points_are_shared_by_descents_and_each_has_its_end() -> None:
    setting = replace(SEVERAL, options=Search(gradient=OPTIONS.model_copy(update={"points": 9, "warm_steps": 4})))
    steps: list[Any] = []
    points = points_of(steps, 9, setting=setting)
    proposals = [[step.proposal - NUM_BASELINES for step in gradients(steps, number)] for number in range(4)]
    assert proposals == [[0] * 4 + [1] * 4 + [2] * 4, [3] * 2 + [4] * 2, [5] * 2 + [6] * 2, [7] * 2 + [8] * 2]
    assert len({tuple(point.values()) for point in points}) == 9


def test_several_descents_go_on_from_any_step_as_if_undisturbed() -> None:
    steps: list[Any] = []
    expected = points_of(steps, 6)
    for cut in range(len(steps)):
        again = steps[:cut]
        assert points_of(again, 6) == expected
        assert again == steps


def test_failed_descent_is_skipped_as_start() -> None:
    """After a failed descent, others start at the next nearest one."""

    def broken(request: StepRequest) -> StepResult:
        return GradientResult(failure="the loss is nan") if request.label == "descent 1" else of_each(request)

    steps: list[Any] = []
    ends = points_of(steps, compute=broken)
    assert [len(gradients(steps, number)) for number in range(4)] == [12, 1, 3, 3]
    assert gradients(steps, 2)[0].request.point == tuple(ends[0].values()), "not at the end of descent 1"

    def all_broken(request: StepRequest) -> StepResult:
        return GradientResult(failure="nan") if request.label == "descent 0" else of_each(request)

    steps = []
    points_of(steps, compute=all_broken)
    assert gradients(steps, 1)[0].request.point == (0.5,) * 6


def test_after_the_descents_come_midpoints_of_the_front() -> None:
    steps: list[Any] = []
    ends = points_of(steps)
    costs = [(0.3, 0.3), (0.2, 0.5), (0.1, 0.7), (0.9, 0.1)]
    trials = [
        Observation(point, 1.0, cost, number=NUM_BASELINES + index, rung=0)
        for index, (point, cost) in enumerate(zip(ends, costs, strict=True))
    ]
    known = [replace(o, costs=(1.0, 1.0)) for o in baselines()]
    found = propose(NUM_BASELINES + 4, steps, known=[*known, *trials], setting=SEVERAL)
    between = [(ends[0][name] + ends[3][name]) / 2 for name in found]
    np.testing.assert_allclose(list(found.values()), between, err_msg="across the widest gap")
    assert propose(NUM_BASELINES + 4, steps, known=[*known, *trials], setting=SETTING) != found


def test_local_search_cycles_preferences() -> None:
    """Where no midpoint adds volume, the local search cycles through preference vectors."""
    steps: list[Any] = []
    ends = points_of(steps)
    costs = [(2.5, 2.5), (2.2, 2.9), (2.1, 3.3), (3.3, 2.1)]  # beyond the reference point of hypervolumes
    trials = [
        Observation(point, 1.0, cost, number=NUM_BASELINES + index, rung=0)
        for index, (point, cost) in enumerate(zip(ends, costs, strict=True))
    ]
    known = [replace(o, costs=(4.0, 4.0)) for o in baselines()]
    for turn in range(4):
        mutant = propose(NUM_BASELINES + 4 + turn, steps, known=[*known, *trials], setting=SEVERAL)
        kept = [sum(mutant[name] == pytest.approx(end[name]) for name in mutant) for end in ends]
        assert kept.index(max(kept)) == turn, "a mutant of the best trial for that preference vector"


def test_step_size_is_per_preference() -> None:
    """Trials for other preference vectors do not change the size of steps."""
    steps: list[Any] = []
    (point, *_) = points_of(steps)
    first = NUM_BASELINES + 4
    best = Observation(point, 1.0, (0.1, 0.1), number=first, rung=0)

    def mutant(failures: Sequence[int]) -> dict[str, Any]:
        worse = [replace(best, costs=(1.0, 1.0), number=first + turn) for turn in failures]
        known = [replace(o, costs=(2.0, 2.0)) for o in baselines()]
        return propose(first + 8, steps, known=[*known, best, *worse], setting=SEVERAL)

    assert mutant([]) == mutant([1, 2, 3])
    assert mutant([]) != mutant([4])


def test_without_preference_vectors_steps_have_none() -> None:
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines())
    assert steps[-1].request.preference == {}


def test_smac_note_mentions_preferences() -> None:
    """Where SMAC takes over, the note says that preference vectors are not used."""
    steps: list[Any] = []
    propose(NUM_BASELINES, steps, known=baselines(sign=-1.0), setting=SEVERAL)
    assert steps[-1].request.label.endswith("it does not use the preference vectors")


# The sources' own correct completions as references.

# The sources answer text right at these positions.
COMPLETED = {"text": ((0, 0), (2, 0), (3, 1), (4, 1), (5, 0), (6, 2), (8, 2), (9, 1))}
LARGER = replace(SETTING, num_samples={"math": 10, "text": 12})


def of_completions(sign: float, completed: Any = None) -> Callable[[StepRequest], StepResult]:
    """A function with losses of text: on references they fall as costs grow; on completions `sign` decides."""

    def compute(request: StepRequest) -> StepResult:
        if isinstance(request, CompletionsRequest):
            assert request.completions == ("text",), "those whose references do not predict scores"
            return CompletionsResult(completions=COMPLETED if completed is None else completed)
        result = computed(request)
        if isinstance(request, LossesRequest):
            assert isinstance(result, LossesResult)
            loss = sign * result.losses["text"] * 5 if request.completions else -result.losses["text"]
            losses = {name: loss if name == "text" else result.losses[name] for name in request.positions}
            return replace(result, losses=losses)
        return result

    return compute


def with_completions(num_points: int = 3, **changes: Any) -> tuple[list[Any], list[dict[str, Any]]]:
    steps: list[Any] = []
    call: dict[str, Any] = {"known": baselines(), "compute": of_completions(1.0), "setting": LARGER, **changes}
    return steps, [propose(NUM_BASELINES + i, steps, **call) for i in range(num_points)]


def test_correct_completions_are_tried() -> None:
    """Where references decide nothing, the sources' own correct completions are tried."""
    steps, _ = with_completions()
    assert kinds(steps) == ["losses"] * 5 + ["completions"] + ["losses"] * 5 + ["note"] + ["gradient"] * 12
    assert most_compared_samples(LARGER) >= 22 * 5 + 8 * 5
    assert [step.request.num_charged for step in steps][:12] == [22] * 5 + [0] + [8] * 5 + [0]
    assert steps[6].request.positions == {"text": (0, 2, 3, 4, 5, 6, 8, 9)}
    assert steps[11].request.decision == "gradient"
    assert steps[11].request.label == (
        "gradients are used, with the sources' own correct completions as references of text on 8 samples: losses on "
        "them go with scores (text 1.00), those on the tasks' reference answers do not (rank correlation over 5 "
        "baselines: math 1.00, text -1.00; 0.3 is needed)"
    )


def test_descents_draw_completed_samples() -> None:
    """Descents on completions draw from the samples that have a correct one."""
    steps, _ = with_completions()
    batches = [step.request for step in steps if isinstance(step, GradientStep)]
    assert all(batch.completions == ("text",) for batch in batches)
    drawn = [position for batch in batches for position in batch.positions["text"]]
    assert sorted(drawn[:8]) == [position for position, _ in COMPLETED["text"]]
    assert sorted(set(drawn)) == sorted(drawn[:8])
    assert {p for batch in batches for p in batch.positions["math"]} == set(range(10))
    # In units of the losses that are made smaller.
    scales = {"math": np.mean([step.result.losses["math"] for step in steps[:5]])}
    scales["text"] = np.mean([step.result.losses["text"] for step in steps[6:11]])
    assert {name: weight * scales[name] for name, weight in batches[0].weights.items()} == pytest.approx(
        {"math": 0.5, "text": 0.5}
    )


def test_where_completions_say_nothing_either_smac_proposes() -> None:
    steps, (found, *_) = with_completions(compute=of_completions(-1.0))
    assert kinds(steps) == ["losses"] * 5 + ["completions"] + ["losses"] * 5 + ["note"]
    assert steps[-1].request.label.startswith(
        "gradients are not used, smac proposes: lower losses do not mean better scores ("
    )
    assert steps[-1].request.label.endswith("nor do those on the sources' own correct completions (text -1.00)")
    smac: Any = get_searcher("smac")
    assert found == smac.advance(ProposalContext(PARAMETERS, number=NUM_BASELINES, seed=0, observations=baselines()))


def test_smac_replaces_few_completions() -> None:
    """SMAC proposes where the sources have too few correct completions."""
    steps, _ = with_completions(1, compute=of_completions(1.0, {"text": COMPLETED["text"][:7]}))
    assert kinds(steps) == ["losses"] * 5 + ["completions", "note"]
    message = "the sources have too few correct completions (text 7; 8 are needed)"
    assert steps[-1].request.label.endswith(message)
    assert steps[-1].request.decision == "smac"


def test_completions_survive_kills() -> None:
    """A search with completions continues from any step as if undisturbed."""
    steps, expected = with_completions()

    def again(request: StepRequest) -> StepResult:
        """The result of a step, but an empty one for completions, because the store would now give others."""
        return of_completions(1.0)(request) if not isinstance(request, CompletionsRequest) else LossesResult()

    for cut in range(6, len(steps)):
        left = steps[:cut]
        call: dict[str, Any] = {"known": baselines(), "compute": again, "setting": LARGER}
        assert [propose(NUM_BASELINES + i, left, **call) for i in range(3)] == expected
        assert left == steps


# A share of the samples to fit.


def test_losses_and_gradients_are_of_the_samples_to_fit_alone() -> None:
    setting = replace(SETTING, first_fitted={"math": 6, "text": 4})
    steps: list[Any] = []
    propose(NUM_BASELINES + 2, steps, known=baselines(), setting=setting)
    assert steps[0].request.positions == {"math": (6, 7, 8, 9), "text": (4, 5, 6)}
    batches = [step.request.positions for step in steps if isinstance(step, GradientStep)]
    assert sorted(p for batch in batches[:2] for p in batch["math"]) == [6, 7, 8, 9]
    assert {p for batch in batches for p in batch["text"]} == {4, 5, 6}


def test_unscored_sources_ask_no_completions() -> None:
    """No completions are requested where no source is scored on the samples to fit."""
    steps: list[Any] = []
    setting = replace(SETTING, first_fitted={"math": 6, "text": 4})
    propose(NUM_BASELINES, steps, known=baselines(sign=-1.0), setting=setting)
    assert kinds(steps) == ["losses"] * 5 + ["note"]
    assert steps[-1].request.label.endswith("and no source is scored on the samples that are fitted")
    assert steps[-1].request.decision == "smac"
