"""Steps in a study: stored before use, computed once, and the same after any kill."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
import torch

from search_spaces.parameters import Parameters
from search_spaces.spaces import SPACES
from search_spaces.spaces.base import DifferentiableSpace, RefinableSpace, SearchedModels
from search_spaces.spaces.layerwise import LayerwiseSection
from search_spaces.study.search import GradientOptions, PolicyOptions, Search
from service.engine_machines import VARIABLE
from service.errors import StudyFailed
from service.store import JobWriter, Store
from service.store.artifacts import ArtifactStore
from service.store.steps import (
    ChargedRequest,
    CompletionsRequest,
    CompletionsResult,
    CompletionsStep,
    GradientRequest,
    GradientResult,
    GradientStep,
    LossesRequest,
    LossesResult,
    LossesStep,
    NoteRequest,
    NoteResult,
    Step,
    StepRequest,
    StepResult,
    UpdateStep,
    step_of,
)
from service.studies.preflight.models import searched_models
from service.tune.coordinator import Coordinator
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.proposing.gradient_actor import GradientActor, GradientInputs
from service.tune.proposing.ray_gradients import RayGradients
from service.tune.proposing.ray_proposer import RayProposer
from service.tune.searchers.adam import numbers_of
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.gradient import SEARCHER
from service.tune.searchers.hm3 import SEARCHER as HM3
from service.types import EventKind
from tests.conftest import OPTIONS
from tests.search_spaces.spaces.families import models
from tests.service.tune.harness import FINGERPRINTS, Killed, drive, killer, make_plan, new_study, trial_list
from tests.vision import image_folder, vit_family
from workers.errors import EngineUnavailable, InvalidTask
from workers.merging import node
from workers.merging.bank import Bank
from workers.models.family import open_sources
from workers.serving.fake import FakeScorer
from workers.types import Family, Placement, TaskSpec

NAMES = ("math", "text")
GRADIENT = GradientOptions(steps=6, batch=4, points=3)

# Losses of image classifiers: the cross-entropy of labels, and the entropy of predictions.
IMAGES = ("image", "entropy")
every_loss = pytest.mark.parametrize("inputs", ["text", *IMAGES], indirect=True)


def differentiable(known: SearchedModels) -> DifferentiableSpace:
    space = LayerwiseSection(kind="layerwise", granularity="component").build(known)
    assert isinstance(space, DifferentiableSpace)
    return space


class Stepper:
    """`proposals.Proposer` for the gradient searcher, in the caller's thread.

    Its losses are quadratic, and smallest where the fake scores are best. `observer` is called before each step is
    computed and after it was stored.
    """

    def __init__(
        self,
        space: Any,
        steps: Sequence[Step],
        num_baselines: int,
        log: list[int],
        observer: Any,
        preferences: tuple[tuple[float, ...], ...],
    ) -> None:
        self._parameters = space.parameters
        self._steps = list(steps)
        self._setting = SearchSetting(
            NAMES, dict.fromkeys(NAMES, 36), num_baselines, Search(gradient=GRADIENT), preferences
        )
        self._log = log
        self._observer = observer
        self._call: Mapping[str, Any] = {}
        self._admitted: ChargedRequest | None = None

    def submit(self, **call: Any) -> None:
        self._call = call

    def compute(self, request: ChargedRequest) -> None:
        self._admitted = request

    def result(self, *, timeout_s: float) -> Step | ChargedRequest | dict[str, Any] | None:
        context = ProposalContext(self._parameters, seed=0, steps=self._steps, setting=self._setting, **self._call)
        answer = SEARCHER.advance(context)
        if isinstance(answer, dict):
            return answer
        if isinstance(answer, (LossesRequest, GradientRequest)) and answer != self._admitted:
            return answer
        self._observer("step")
        self._log.append(len(self._steps))
        return step_of(len(self._steps), self._call["number"], answer, self._computed(answer))

    def stored(self, step: Step) -> None:
        self._observer("stored")
        self._steps.append(step)

    def _computed(self, request: StepRequest) -> StepResult:
        if isinstance(request, NoteRequest):
            return NoteResult()
        assert isinstance(request, (LossesRequest, GradientRequest))
        preference = request.preference if isinstance(request, GradientRequest) else {}
        slope = 2 * (np.array(request.point) - 0.6 * preference.get("math", 1.0))
        losses = dict.fromkeys(NAMES, float((slope**2).sum()))
        if isinstance(request, LossesRequest):
            return LossesResult(losses=losses)
        return GradientResult(losses=losses, gradient=tuple(slope.tolist()))


@pytest.mark.parametrize(
    ("preferences", "num_steps"), [((), 6), (((1.0, 0.0), (0.5, 0.5), (0.3, 0.7)), 8)], ids=["one", "several"]
)
def test_kill_at_any_step_repeats_no_step(
    preferences: tuple[tuple[float, ...], ...], num_steps: int, tmp_path: Path
) -> None:
    """A study killed at any step ends as if undisturbed and computes no stored step again."""
    space = differentiable(replace(models(experts=NAMES, num_layers=4), fingerprints=FINGERPRINTS))

    def attempt(store: Store, study: str, log: list[int], observer: Any = lambda _: None) -> None:
        plan = make_plan(study, max_trials=5, waits_for_baselines=True)
        proposer = Stepper(space, store.steps(study), len(plan.baselines), log, observer, preferences)
        writer: JobWriter = store.open_attempt(study)
        drive(Coordinator(plan, space=space, store=store, writer=writer, proposer=proposer), FakeScorer())

    (tmp_path / "undisturbed").mkdir()
    expected_store, expected = new_study(tmp_path / "undisturbed")
    attempt(expected_store, expected, [])
    steps = expected_store.steps(expected)
    compared = [step for step in steps if isinstance(step, LossesStep)]
    known = [recipe for _, _, recipe in make_plan(expected).baselines if space.from_recipe(recipe) is not None]
    assert len(compared) == len(known) > 4, "it is compared on all baselines that the space contains"
    assert sum(isinstance(step, GradientStep) for step in steps) == num_steps
    (note,) = expected_store.events(expected, kinds=[EventKind.SEARCH_NOTE])
    assert note.payload["text"].startswith("gradients are")

    store, study = new_study(tmp_path)
    num_kills, log = 0, list[int]()
    while True:
        try:
            attempt(store, study, log, killer(num_kills % 3))
        except Killed:
            num_kills += 1
            # Stored ones are not computed again; one that was computed and not stored is.
            assert log == sorted(log)
            continue
        break
    assert num_kills > len(steps)
    assert store.steps(study) == steps
    assert trial_list(store, study) == trial_list(expected_store, expected)


def parameters_of(inputs: GradientInputs) -> Parameters:
    assert inputs.space is not None
    return inputs.space.parameters


@pytest.fixture
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> GradientInputs:
    """Inputs of a gradient actor: of language models or, by the parameter, of image classifiers, by either loss."""
    kind = getattr(request, "param", "text")
    return (
        _image_inputs(tmp_path, kind)
        if kind in IMAGES
        else _text_inputs(request.getfixturevalue("untied_family"), tmp_path)
    )


def _image_inputs(tmp_path: Path, kind: str) -> GradientInputs:
    folder = image_folder(tmp_path / "images", per_class=14)
    tasks = {
        name: TaskSpec({"images": str(folder), "head": name}, "acc", permutation_seed=seed)
        for seed, name in enumerate(NAMES)
    }
    family = vit_family(tmp_path, experts=NAMES)
    sources = open_sources(family)
    space = differentiable(searched_models(sources, sources.fingerprints))
    return GradientInputs(family, OPTIONS, tasks, space, entropies=NAMES if kind == "entropy" else ())


def _text_inputs(untied_family: Family, tmp_path: Path) -> GradientInputs:
    file = tmp_path / "sums.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{i}+{i}=", "answer": str(2 * i)}) + "\n" for i in range(40)))
    tasks = {
        name: TaskSpec({"file": str(file), "max_tokens": 6}, "exact_match", permutation_seed=seed)
        for seed, name in enumerate(NAMES)
    }
    sources = open_sources(untied_family)
    return GradientInputs(untied_family, OPTIONS, tasks, differentiable(searched_models(sources, sources.fingerprints)))


def steps_and_proposals(
    inputs: GradientInputs, *, kill_after: int | None = None, before: Sequence[Step] = (), completions: Any = None
) -> tuple[list[Any], list[dict[str, Any]]]:
    """Steps and two proposals of a study that has the steps `before`. The actor is killed after `kill_after` steps."""
    proposer = RayProposer(
        algorithm="gradient",
        parameters=parameters_of(inputs),
        seed=3,
        setting=SearchSetting(NAMES, dict.fromkeys(NAMES, 40), 0, Search(gradient=GRADIENT)),
        steps=before,
        gradient_inputs=inputs,
        completions=completions,
    )
    steps: list[Any] = []
    proposals = []
    for number in range(2):
        proposer.submit(number=number, observations=(), pending=())
        while not isinstance(answer := proposer.result(timeout_s=120.0), dict):
            assert answer is not None
            if isinstance(answer, (LossesRequest, GradientRequest)):
                proposer.compute(answer)
                continue
            steps.append(answer)
            if len(steps) == kill_after:
                assert proposer._gradients is not None
                ray.kill(proposer._gradients.actor)
            proposer.stored(answer)
        proposals.append(answer)
    return steps, proposals


class KnownCompletions:
    """`SourceCompletions` of a study whose sources answer "9" to the first samples of math."""

    def find(self, request: CompletionsRequest) -> CompletionsResult:
        raise AssertionError("they were found before")

    def read(self, chosen: Mapping[str, Sequence[tuple[int, int]]]) -> dict[str, dict[int, tuple[int, ...]]]:
        return {name: {position: (57 + source,) for position, source in pairs} for name, pairs in chosen.items()}


def without_seconds(step: Step) -> Step:
    if isinstance(step, GradientStep):
        return replace(step, result=replace(step.result, seconds=0.0))
    return replace(step, result=replace(step.result, seconds=0.0)) if isinstance(step, UpdateStep) else step


def test_ray_gradients_survive_the_actor(ray_cluster: None, inputs: GradientInputs) -> None:
    """Gradients on Ray are the same again and after the actor's death.

    With completions that the study had found before it went on.
    """
    found = CompletionsResult(completions={"math": tuple((position, position % 2) for position in range(10))})
    before = [CompletionsStep(0, 0, CompletionsRequest(label="", completions=("math",)), found)]
    steps, proposals = steps_and_proposals(inputs, before=before, completions=KnownCompletions())
    assert [step.request.kind for step in steps] == ["note"] + ["gradient"] * 4
    assert [step.number for step in steps] == [1, 2, 3, 4, 5]
    assert all(step.request.completions == ("math",) for step in steps[1:])
    assert all(max(step.request.positions["math"]) < 10 for step in steps[1:])
    again, same = steps_and_proposals(inputs, before=before, completions=KnownCompletions(), kill_after=3)
    assert list(map(without_seconds, again)) == list(map(without_seconds, steps))
    assert same == proposals
    gradients = [step.result for step in steps if isinstance(step, GradientStep)]
    assert all(any(result.gradient) and result.bank == inputs.family.fingerprint for result in gradients)
    assert len({result.recipe for result in gradients}) == len(gradients)


@pytest.mark.parametrize("inputs", IMAGES, indirect=True)
def test_image_gradients_survive_the_actor(ray_cluster: None, inputs: GradientInputs) -> None:
    """Descents of image classifiers are the same from stored steps, by new actors, and after an actor's death."""
    steps, proposals = steps_and_proposals(inputs)
    assert [step.request.kind for step in steps] == ["note"] + ["gradient"] * 4
    # The first of two new actors repeats the second gradient, and the other one the last two.
    rest, same = steps_and_proposals(inputs, before=steps[:2], kill_after=1)
    assert (list(map(without_seconds, rest)), same) == (list(map(without_seconds, steps[2:])), proposals)
    gradients = [step.result for step in steps if isinstance(step, GradientStep)]
    assert all(any(result.gradient) and result.bank == inputs.family.fingerprint for result in gradients)


@every_loss
def test_coefficients_survive_the_actor(
    ray_cluster: None, inputs: GradientInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient along a path is the same from an actor that replaces a dead one."""
    from service.tune.proposing import ray_gradients

    sources = open_sources(inputs.family)
    space = SPACES["hm3"](kind="hm3").build(searched_models(sources, sources.fingerprints))
    assert isinstance(space, RefinableSpace)
    recipe = space.to_recipe(space.parameters.sample(np.random.default_rng(3)))
    coefficients = space.coefficients_of(recipe)
    point = tuple(parameter.default_value for parameter in numbers_of(coefficients.parameters))
    request = GradientRequest(label="", descent=0, point=point, positions={"math": (0, 1)}, weights={"math": 1.0})
    gradients = RayGradients(replace(inputs, space=None))

    def result() -> tuple[float, ...]:
        gradients.begin(request, coefficients)
        while (found := gradients.result(timeout_s=120.0)) is None:
            pass
        assert isinstance(found, GradientResult)
        return found.gradient

    first = result()
    assert len(first) == len(point)
    assert any(first)
    ray.kill(gradients.actor)
    assert result() == first
    # An actor that was released does not count as a death, and a later request starts another one.
    released = gradients.actor
    gradients.release()
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(released.run.remote(request), timeout=60.0)
    monkeypatch.setattr(ray_gradients, "MAX_DEATHS", 1)
    assert result() == first


def test_released_actor_leaves_no_shared_memory(
    ray_cluster: None, inputs: GradientInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sources of a gradient actor are gone from shared memory once it is released, although it is killed."""
    from service.tune.proposing import ray_gradients

    class SharesSources(GradientActor):
        def __init__(self, inputs: GradientInputs) -> None:
            super().__init__(inputs)
            node.SHARED_MEMORY = tmp_path
            bank = Bank(inputs.family, Placement.HOST, is_shared=True)
            self._opened = SimpleNamespace(bank=bank)  # type: ignore[assignment]

    monkeypatch.setattr(ray_gradients, "GradientActor", SharesSources)
    gradients = RayGradients(inputs)
    gradients._start()
    ray.get(gradients._start_call)
    (sources,) = tmp_path.glob("mergesearch-*/*/sources")
    gradients.release()
    assert not sources.exists()


def test_actor_has_the_planned_device_if_it_is_free(inputs: GradientInputs) -> None:
    """An actor planned for a GPU gets one that is free, else the CPU; one planned for the CPU gets no GPU."""
    from service.tune.proposing.ray_gradients import on_free_device

    def given(asked: GradientInputs, *free: float) -> GradientInputs:
        return on_free_device(asked, {str(node): {"CPU": 8.0, "GPU": gpus} for node, gpus in enumerate(free)})

    on_gpu = replace(inputs, device="cuda")
    assert given(on_gpu, 0.0, 1.0) is on_gpu
    assert given(on_gpu, 0.5, 0.5) == inputs
    assert given(on_gpu) == inputs
    assert given(inputs, 8.0) is inputs
    on_two = replace(on_gpu, num_gpus=2)
    assert given(on_two, 1.0, 2.0) is on_two
    assert (on_gpu.devices, on_two.devices, inputs.devices) == (("cuda",), ("cuda:0", "cuda:1"), ("cpu",))
    shares = replace(on_gpu, options=on_gpu.options.model_copy(update={"gpu_share_left": 0.4}))
    assert given(shares, 0.1) is shares
    assert given(shares, 0.05) == replace(shares, device="cpu")
    assert given(on_gpu, 0.1) == inputs, "it needs a whole GPU"
    with pytest.raises(EngineUnavailable, match="planned on 2 GPUs of one machine, and at most 1 are free on one"):
        given(on_two, 1.0, 1.0)


def test_a_sharing_actor_needs_the_memory_that_was_planned(
    inputs: GradientInputs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Beside an engine that left less, as one of another study may, the CPU computes, and the log says so."""
    from service.tune.proposing.ray_gradients import SharingActor

    free = 40 * 2**30
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 80 * 2**30))
    devices: list[str] = []
    monkeypatch.setattr(GradientActor, "run", lambda actor, request: devices.append(actor._inputs.device))
    shares = replace(inputs, device="cuda", options=inputs.options.model_copy(update={"gpu_share_left": 0.5}))
    request = LossesRequest(label="", point=(), positions={})
    SharingActor(shares).run(request)
    free = 38 * 2**30
    SharingActor(shares).run(request)
    assert devices == ["cuda", "cpu"]
    assert "an engine leaves less than 50 % of its GPU, so the CPU computes gradients" in caplog.text


def test_actor_that_gets_no_resources_does_not_wait_forever(
    inputs: GradientInputs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process may take the GPU between the look at free ones and the start."""
    from service.tune.proposing import ray_gradients

    killed: list[Any] = []
    actor = SimpleNamespace(
        __ray_ready__=SimpleNamespace(remote=lambda: "start"), run=SimpleNamespace(remote=lambda request: "run")
    )
    kind = SimpleNamespace(options=lambda **_: SimpleNamespace(remote=lambda _: actor))
    monkeypatch.setattr(ray_gradients, "available_resources_per_node", dict)
    monkeypatch.setattr(ray, "remote", lambda _: kind)
    monkeypatch.setattr(ray, "kill", killed.append)
    ended: list[str] = []

    def wait(calls: list[str], *, timeout: float) -> tuple[list[str], list[str]]:
        return [call for call in calls if call in ended], []

    monkeypatch.setattr(ray, "wait", wait)
    request = LossesRequest(label="", point=(), positions={"math": (0,)})
    gradients = RayGradients(inputs)
    gradients.begin(request)
    assert gradients.result(timeout_s=0.0) is None
    monkeypatch.setattr(ray_gradients, "START_S", -1.0)
    gradients = RayGradients(inputs)
    gradients.begin(request)
    with pytest.raises(EngineUnavailable, match="the gradient actor did not start in"):
        gradients.result(timeout_s=0.0)
    assert killed == [actor]
    # Once the actor runs, its computations may take as long as they need.
    gradients.begin(request)
    ended.append("start")
    assert gradients.result(timeout_s=0.0) is None
    ended.clear()
    assert gradients.result(timeout_s=0.0) is None


def test_an_actor_waits_for_a_machine_that_may_come(inputs: GradientInputs, monkeypatch: pytest.MonkeyPatch) -> None:
    """While stated machines with GPUs are away, the actor asks Ray for its GPUs instead of computing on the CPU."""
    from service.tune.proposing import ray_gradients

    started: list[tuple[float, str]] = []
    nodes: list[dict[str, Any]] = [{"Alive": True, "Resources": {"CPU": 4.0}}]
    actor = SimpleNamespace(
        __ray_ready__=SimpleNamespace(remote=lambda: "start"), run=SimpleNamespace(remote=lambda request: "run")
    )

    def options(*, num_gpus: float, **_: Any) -> Any:
        return SimpleNamespace(remote=lambda given: started.append((num_gpus, given.device)) or actor)

    monkeypatch.setattr(ray_gradients, "available_resources_per_node", lambda: {"head": {"CPU": 4.0}})
    monkeypatch.setattr(ray, "remote", lambda _: SimpleNamespace(options=options))
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "kill", lambda _: None)
    monkeypatch.setattr(ray, "wait", lambda *_, **__: ([], []))
    monkeypatch.setattr(ray_gradients, "START_S", -1.0)
    monkeypatch.setenv(VARIABLE, "gpus=2,nodes=2 memory=64GiB")
    request = LossesRequest(label="", point=(), positions={"math": (0,)})
    on_gpu = replace(inputs, device="cuda")
    for count in (1, 2):
        gradients = RayGradients(replace(on_gpu, num_gpus=count))
        assert not gradients.is_waiting
        gradients.begin(request)
        assert gradients.result(timeout_s=0.0) is None
        assert gradients.is_waiting
    monkeypatch.setattr(ray_gradients, "COME_S", -1.0)
    gradients = RayGradients(on_gpu)
    gradients.begin(request)
    with pytest.raises(EngineUnavailable, match="the gradient actor did not start in -1 s"):
        gradients.result(timeout_s=0.0)
    assert not gradients.is_waiting
    assert started == [(1, "cuda"), (2, "cuda"), (1, "cuda")]
    # Machines with fewer GPUs than are needed, and an actor that shares the GPU of an engine.
    with pytest.raises(EngineUnavailable, match="planned on 4 GPUs of one machine"):
        RayGradients(replace(on_gpu, num_gpus=4)).begin(request)
    shares = replace(on_gpu, options=on_gpu.options.model_copy(update={"gpu_share_left": 0.4}))
    assert not ray_gradients.may_come(shares)
    nodes += [{"Alive": True, "Resources": {"GPU": 2.0}}] * 2
    RayGradients(on_gpu).begin(request)
    assert started[-1] == (0, "cpu"), "all stated machines are there, and their GPUs are in use"
    nodes[-1] = {"Alive": False, "Resources": {"GPU": 2.0}}
    assert ray_gradients.may_come(on_gpu)
    monkeypatch.delenv(VARIABLE)
    assert not ray_gradients.may_come(on_gpu)


def test_actor_reads_requested_completions(inputs: GradientInputs) -> None:
    """An actor reads completions only where a step asks for them."""
    from service.tune.proposing.gradient_actor import GradientActor

    actor = GradientActor(inputs)
    point = (0.5,) * len(parameters_of(inputs))
    request = LossesRequest(label="", point=point, positions={"math": (0, 3), "text": (1,)})
    expected = actor.run(request).losses
    actor.use_completions({"math": {0: (57,), 3: (60, 61)}})
    assert actor.run(request).losses == expected
    found = actor.run(replace(request, completions=("math",))).losses
    assert found["text"] == expected["text"]
    assert found["math"] != expected["math"]


def test_unusable_models_are_named(ray_cluster: None, inputs: GradientInputs, tmp_path: Path) -> None:
    """Models and tasks that the actor cannot use are named and not tried again."""
    (tmp_path / "sums.jsonl").write_text("{}\n")
    with pytest.raises(InvalidTask, match=r"sums\.jsonl"):
        steps_and_proposals(inputs)


def gradient(actor: Any, point: tuple[float, ...], positions: Any, weights: Any) -> tuple[float, ...]:
    found = actor.run(GradientRequest(label="", descent=0, point=point, positions=positions, weights=weights))
    assert isinstance(found, GradientResult)
    return found.gradient


@every_loss
@pytest.mark.parametrize("value", [0.0, 1.0])
def test_coefficients_of_zero_have_derivatives(inputs: GradientInputs, value: float) -> None:
    """A range that ends at 0 would keep them there; one expert at 1 and the others at 0 is that expert as it is."""
    from service.tune.proposing.gradient_actor import GradientActor

    point = tuple(value if name.endswith("math") else 0.0 for name in parameters_of(inputs).names)
    found = gradient(GradientActor(inputs), point, {"math": (0, 3)}, {"math": 1.0})
    assert all(found)


@every_loss
def test_the_gradient_is_that_of_finite_differences(inputs: GradientInputs) -> None:
    """By a whole parameter: over the tensors of a component, at the positions that are asked for."""
    from service.tune.proposing.gradient_actor import GradientActor

    actor = GradientActor(inputs)
    point = [0.5] * len(parameters_of(inputs))
    positions = {"math": (0, 3, 5), "text": (1, 2)}
    weights = {"math": 0.7, "text": 0.3}
    found = gradient(actor, tuple(point), positions, weights)
    place = max(range(len(point)), key=lambda i: abs(found[i]))

    def loss(value: float) -> float:
        there = tuple(value if i == place else number for i, number in enumerate(point))
        losses = actor.run(LossesRequest(label="", point=there, positions=positions)).losses
        return sum(weights[name] * losses[name] for name in NAMES)

    step = 0.02
    assert found[place] == pytest.approx((loss(0.5 + step) - loss(0.5 - step)) / (2 * step), rel=0.05)


def policy_proposals(
    directory: Path, *, kill_after: int | None = None, learning_rate: float = 3e-3
) -> tuple[list[Any], list[dict[str, Any]]]:
    """The first proposals of a policy's search; its process is killed after `kill_after` steps."""
    family = replace(models(experts=NAMES, num_layers=4), fingerprints=FINGERPRINTS)
    parameters = SPACES["hm3"](kind="hm3").build(family).parameters
    options = PolicyOptions(episodes=3, mini_batches=1, epochs=1, learning_rate=learning_rate)
    setting = SearchSetting(NAMES, dict.fromkeys(NAMES, 40), 0, Search(hm3=options))
    directory.mkdir()
    store, study = new_study(directory)
    checkpoints = PolicyCheckpoints(ArtifactStore(store, directory), study, HM3, setting)
    proposer = RayProposer(algorithm="hm3", parameters=parameters, seed=3, setting=setting, checkpoints=checkpoints)
    steps: list[Any] = []
    found: list[Observation] = []
    for number in range(13):
        proposer.submit(number=number, observations=tuple(found[: number - 2]), pending=())
        while not isinstance(answer := proposer.result(timeout_s=120.0), dict):
            assert answer is not None
            if isinstance(answer, (LossesRequest, GradientRequest)):
                proposer.compute(answer)
                continue
            steps.append(answer)
            if len(steps) == kill_after:
                ray.kill(proposer._searcher)
            proposer.stored(answer)
        found.append(Observation(answer, 1.0, (1 / len(answer), 0.5), number=number, rung=0))
    store.close()
    return steps, [dict(observation.configuration) for observation in found]


def test_a_policy_on_ray_goes_on_after_its_process_has_died(ray_cluster: None, tmp_path: Path) -> None:
    steps, proposals = policy_proposals(tmp_path / "whole")
    assert [step.request.iteration for step in steps] == [0, 1, 2]
    again, same = policy_proposals(tmp_path / "killed", kill_after=2)
    assert (list(map(without_seconds, again)), same) == (list(map(without_seconds, steps)), proposals)


def test_a_policy_that_is_not_finite_fails_the_study(ray_cluster: None, tmp_path: Path) -> None:
    with pytest.raises(StudyFailed, match=r"hm3: .*the policy cannot learn further; start a new study"):
        policy_proposals(tmp_path / "broken", learning_rate=1e30)
