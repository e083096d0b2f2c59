"""Coefficient gradients of image classifiers: cross-entropy of labels, and entropy of predictions."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.func import functional_call

from search_spaces.methods import METHODS
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.study.engine import EngineOptions
from tests.vision import image_folder, tiny_clip, vit_family
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.recipes import num_layers
from workers.engines.images.classifiers import new_encoder
from workers.errors import InvalidTask, TrialFailed
from workers.evaluation.image_tasks import prepared_task
from workers.evaluation.references import lack_of_entropy, lack_of_references
from workers.merging.materialize import operands_of
from workers.merging.methods.plain import PLAIN
from workers.merging.plan import plan_as_stated
from workers.models.modalities.image import IMAGE
from workers.models.task_heads import logits_of
from workers.serving.image_worker import ImageWorker
from workers.training.gradients import CoefficientGradients
from workers.training.memory import activation_bytes
from workers.types import Family, GradientResult, ScoreRequest, Span, TaskSpec

OPTIONS = EngineOptions(dtype="float32")
BATCH = {"shapes": (0, 1, 5, 8), "lines": (2, 3, 4)}
WEIGHTS = {"shapes": 0.7, "lines": 0.3}
KINDS = ("vit", "clip")


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    place = tmp_path_factory.mktemp("families")
    clip = vit_family(place / "clip", make=lambda directory, seed, classes=None, **options: tiny_clip(directory, seed))
    return {"vit": vit_family(place / "vit"), "clip": clip}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, TaskSpec]]:
    """Two tasks for each family, each with the head of another model."""
    folder = image_folder(tmp_path_factory.mktemp("images") / "shapes")
    heads = {"vit": ("left", "right"), "clip": ("base", "right")}
    return {
        kind: {
            name: TaskSpec({"images": str(folder), "head": head}, "acc", permutation_seed=seed)
            for seed, (name, head) in enumerate(zip(BATCH, of_kind, strict=True))
        }
        for kind, of_kind in heads.items()
    }


@pytest.fixture(scope="module")
def trained(
    families: Mapping[str, Family], tasks: Mapping[str, Mapping[str, TaskSpec]]
) -> dict[tuple[str, bool], CoefficientGradients]:
    """Gradients of each family, of cross-entropies and with the entropy for one of the objectives."""
    return {
        (kind, with_entropy): CoefficientGradients(
            families[kind], OPTIONS, tasks[kind], entropies=("lines",) if with_entropy else ()
        )
        for kind in KINDS
        for with_entropy in (False, True)
    }


def recipe_by(family: Family, method: str, coefficients: Mapping[str, float | tuple[float, ...]]) -> Recipe:
    """A merge by one method of all tensors."""

    def merge(layer: int | None) -> Merge:
        seed = 1 if METHODS[method].takes_seed else None
        return Merge(method, tuple(Source(expert.alias, layer) for expert in family.experts), coefficients, seed)

    layers = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(num_layers(family)))
    return Recipe(family.fingerprints, "base", layers, merge(None), merge(None))


def arithmetic(family: Family, *lambdas: float) -> Recipe:
    return recipe_by(family, "task_arithmetic", {"lambda": lambdas})


def examples(method: str, count: int) -> dict[str, float | tuple[float, ...]]:
    numbers: dict[str, float | tuple[float, ...]] = {
        c.name: EXAMPLES[c.name] for c in METHODS[method].coefficients if c.name in EXAMPLES
    }
    return numbers | {c.name: (0.4, 0.7)[:count] for c in METHODS[method].gradients_by if c.per_model}


def by_autograd(
    trained: CoefficientGradients, tasks: Mapping[str, TaskSpec], recipe: Recipe, *, with_entropy: bool
) -> tuple[float, dict[str, list[float]]]:
    """Loss and derivatives by a single autograd graph from the coefficients to the loss."""
    bank = trained.bank
    plan = plan_as_stated(recipe, bank)
    leaves: dict[str, list[torch.Tensor]] = {}
    merged = {}
    for tensor in plan.tensors:
        merge, given = tensor.merge, {}
        for c in METHODS[merge.method].gradients_by:
            if c.name in merge.coefficients:
                numbers = merge.per_source(c.name) if c.per_model else [merge.number(c.name)]
                each = [torch.tensor(number, dtype=torch.float64, requires_grad=True) for number in numbers]
                leaves[f"{tensor.name} {c.name}"] = each
                given[c.name] = each if c.per_model else each[0]
        operands = operands_of(tensor, plan, bank).in_float32()
        merged[tensor.name] = PLAIN[merge.method].merge(operands, merge, given=given)
    encoder = new_encoder(
        bank.base.config, layers=num_layers(bank.family), dtype=torch.float32, device=torch.device("cpu")
    )
    names = {id(parameter): name for name, parameter in encoder.module.named_parameters()}
    written = {names[id(parameter)]: merged[name] for name, parameter in encoder.parameters.items()}
    losses: Any = trained._task_losses
    loss = torch.zeros(())
    for name, positions in BATCH.items():
        prepared = prepared_task(tasks[name], bank.sources)
        head = logits_of(prepared.head, bank.sources.checkpoints[prepared.head.alias], dtype="float32")
        for position in positions:
            pixels = losses._pixels.of(prepared.task, [position])
            output = functional_call(encoder.module, written, kwargs={"pixel_values": pixels})
            features = output.logits if hasattr(output, "logits") else output.pooler_output
            scores = head(features)[0].log_softmax(-1)
            is_entropy = with_entropy and name == "lines"
            one = -(scores.exp() @ scores) if is_entropy else -scores[prepared.outputs[position]]
            loss = loss + WEIGHTS[name] * one / len(positions) / math.log(len(scores))
    every = [leaf for each in leaves.values() for leaf in each]
    slopes = iter(torch.autograd.grad(loss, every, materialize_grads=True))
    return loss.item(), {name: [next(slopes).item() for _ in each] for name, each in leaves.items()}


def total(result: GradientResult) -> float:
    return sum(WEIGHTS[name] * loss for name, loss in result.losses.items())


@pytest.mark.parametrize("with_entropy", [False, True], ids=["labels", "entropy"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["task_arithmetic", pytest.param("linear", marks=pytest.mark.slow), "dare_linear"])
def test_derivatives_are_of_one_graph(
    method: str,
    kind: str,
    with_entropy: bool,
    trained: Mapping[tuple[str, bool], CoefficientGradients],
    tasks: Mapping[str, Mapping[str, TaskSpec]],
) -> None:
    """Derivatives are those of one graph from coefficients to loss, through merge, encoder and head."""
    of = trained[kind, with_entropy]
    recipe = recipe_by(of.bank.family, method, examples(method, 2))
    found = of.loss_and_gradient(recipe, BATCH, WEIGHTS)
    loss, expected = by_autograd(of, tasks[kind], recipe, with_entropy=with_entropy)
    assert total(found) == pytest.approx(loss, rel=1e-5)
    assert found.num_samples == 7
    coefficient = next(c.name for c in METHODS[method].gradients_by if c.per_model)
    slopes = {f"{name} {coefficient}": list(each.values()) for name, each in found.by_source.items()}
    scale = max(abs(slope) for each in expected.values() for slope in each)
    assert scale > 1e-4
    assert slopes.keys() <= expected.keys()
    for name, each in slopes.items():
        assert each == pytest.approx(expected[name], rel=1e-3, abs=1e-5 * scale), name


@pytest.mark.parametrize("with_entropy", [False, True], ids=["labels", "entropy"])
def test_derivatives_are_those_of_differences(
    with_entropy: bool, trained: Mapping[tuple[str, bool], CoefficientGradients]
) -> None:
    """The derivative along a coefficient that all tensors share equals the central difference of the losses."""
    of, step = trained["vit", with_entropy], 1e-3
    family = of.bank.family
    found = of.loss_and_gradient(arithmetic(family, 0.3, 0.5), BATCH, WEIGHTS)

    def loss(first: float) -> float:
        each = of.losses(arithmetic(family, first, 0.5), BATCH)
        return sum(WEIGHTS[name] * sum(values) / len(values) for name, values in each.items())

    slope = sum(of_models["left"] for of_models in found.by_source.values())
    assert abs(slope) > 1e-3
    assert slope == pytest.approx((loss(0.3 + step) - loss(0.3 - step)) / (2 * step), rel=0.02)


def test_losses_are_of_the_merge_that_engines_score(
    trained: Mapping[tuple[str, bool], CoefficientGradients], tasks: Mapping[str, Mapping[str, TaskSpec]]
) -> None:
    """A cross-entropy is that of the class with the log-probability that the engine stores for the same merge."""
    of = trained["vit", False]
    recipe = arithmetic(of.bank.family, 0.4, 0.2)
    (losses,) = of.losses(recipe, {"shapes": range(18)}).values()
    spec = tasks["vit"]["shapes"]
    worker = ImageWorker(of.bank.family, OPTIONS, device="cpu")
    scored = worker.score(ScoreRequest("s", recipe, (Span("shapes", spec, 0, 18),))).samples
    names = prepared_task(spec, of.bank.sources)
    for sample, loss in zip(scored, losses, strict=True):
        logprobs = dict(json.loads(sample.response)["top"])
        right = names.names[names.outputs[sample.position]]
        assert loss * math.log(3) == pytest.approx(-logprobs[right], abs=1e-5)


def test_a_step_along_the_derivatives_lowers_the_entropy(
    trained: Mapping[tuple[str, bool], CoefficientGradients],
) -> None:
    of = trained["vit", True]
    family, batch = of.bank.family, {"lines": tuple(range(18))}
    before = of.loss_and_gradient(arithmetic(family, 0.3, 0.3), batch, {"lines": 1.0})
    slopes = [sum(each[alias] for each in before.by_source.values()) for alias in ("left", "right")]
    moved = [0.3 - 0.02 * slope / max(map(abs, slopes)) for slope in slopes]
    after = of.loss_and_gradient(arithmetic(family, *moved), batch, {"lines": 1.0})
    assert 0 < after.losses["lines"] < before.losses["lines"] <= 1


def test_equal_calls_give_equal_bits(trained: Mapping[tuple[str, bool], CoefficientGradients]) -> None:
    of = trained["vit", False]
    family = of.bank.family
    first = of.loss_and_gradient(arithmetic(family, 0.4, 0.2), BATCH, WEIGHTS)
    of.losses(arithmetic(family, 0.9, 0.1), {"lines": range(10)})
    again = of.loss_and_gradient(arithmetic(family, 0.4, 0.2), BATCH, WEIGHTS)
    assert replace(again, seconds=0.0) == replace(first, seconds=0.0)
    assert all(leaf.grad is None for leaf, _ in of.model.leaves)


@pytest.mark.parametrize("settings", [{"max_tokens": 40}, {"recomputes": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_saved_without_changing_the_result(
    kind: str,
    settings: Mapping[str, int],
    trained: Mapping[tuple[str, bool], CoefficientGradients],
    tasks: Mapping[str, Mapping[str, TaskSpec]],
) -> None:
    """Passes of two images, and recomputed activations, give the derivatives of whole passes but for rounding."""
    of = trained[kind, False]
    recipe = arithmetic(of.bank.family, 0.3, 0.6)
    expected = of.loss_and_gradient(recipe, BATCH, WEIGHTS)
    saving = CoefficientGradients(of.bank.family, OPTIONS, tasks[kind], **settings)  # type: ignore[arg-type]
    if "recomputes" in settings:
        assert saving.model.module.is_gradient_checkpointing
    found = saving.loss_and_gradient(recipe, BATCH, WEIGHTS)
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    scale = max(abs(slope) for each in expected.by_source.values() for slope in each.values())
    for name, each in expected.by_source.items():
        assert found.by_source[name] == pytest.approx(each, rel=1e-3, abs=1e-5 * scale)


@pytest.mark.parametrize("kind", KINDS)
def test_passes_on_the_cpu_have_a_limit_of_memory(
    kind: str,
    trained: Mapping[tuple[str, bool], CoefficientGradients],
    tasks: Mapping[str, Mapping[str, TaskSpec]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing catches a lack of host memory, so activations are limited; a small model's images are in one pass."""
    of = trained[kind, False]
    settings, recipe = dict(of.bank.base.settings), arithmetic(of.bank.family, 0.3, 0.6)
    tokens = (settings["image_size"] // settings["patch_size"]) ** 2 + 1

    def passes(losses: CoefficientGradients) -> list[int]:
        """The number of images in each pass."""
        sizes: list[int] = []
        model: Any = losses.model
        compute = model.features

        def features(pixels: torch.Tensor) -> torch.Tensor:
            sizes.append(len(pixels))
            return compute(pixels)  # type: ignore[no-any-return]

        with monkeypatch.context() as patched:
            patched.setattr(model, "features", features)
            losses.losses(recipe, BATCH)
        return sizes

    assert passes(of) == [7]
    for num_images, wanted in ((3, [3, 3, 1]), (0, [1] * 7)):
        room = activation_bytes(settings, num_images * tokens + 1, 4, recomputes=False)
        monkeypatch.setitem(vars(IMAGE), "pass_bytes", room)
        assert passes(CoefficientGradients(of.bank.family, OPTIONS, tasks[kind])) == wanted


def test_merges_with_fewer_layers_have_a_model_of_their_own(
    trained: Mapping[tuple[str, bool], CoefficientGradients],
) -> None:
    """A merge of another depth replaces the model; scales of layers have derivatives, as those of language models."""
    of = trained["vit", False]
    recipe = arithmetic(of.bank.family, 0.3, 0.5)
    whole = of.losses(recipe, BATCH)
    short = replace(recipe, layers=recipe.layers[1:])
    assert of.losses(short, BATCH) != whole
    assert of.model.module.config.num_hidden_layers == 1
    assert of.losses(recipe, BATCH) == whole
    scaled = replace(recipe, layers=(replace(recipe.layers[0], scale=1.2), recipe.layers[1]))

    def loss(scale: float) -> float:
        layers = (replace(scaled.layers[0], scale=scale), scaled.layers[1])
        each = of.losses(replace(scaled, layers=layers), BATCH)
        return sum(WEIGHTS[name] * sum(values) / len(values) for name, values in each.items())

    found = of.loss_and_gradient(scaled, BATCH, WEIGHTS, by_scales=True)
    assert found.layer_scales[0] == pytest.approx((loss(1.21) - loss(1.19)) / 0.02, rel=0.02)


def test_layers_are_divided_over_devices(
    trained: Mapping[tuple[str, bool], CoefficientGradients], tasks: Mapping[str, Mapping[str, TaskSpec]]
) -> None:
    of = trained["vit", False]
    divided = CoefficientGradients(of.bank.family, OPTIONS, tasks["vit"], more_devices=("cpu:0",))
    assert sum(divided.model.num_layers_on) == 2
    recipe = arithmetic(of.bank.family, 0.3, 0.6)
    found, expected = (each.loss_and_gradient(recipe, BATCH, WEIGHTS) for each in (divided, of))
    assert replace(found, seconds=0.0) == replace(expected, seconds=0.0)


def test_what_has_no_loss_is_named(
    trained: Mapping[tuple[str, bool], CoefficientGradients],
    tasks: Mapping[str, Mapping[str, TaskSpec]],
    sums: TaskSpec,
    tied_family: Family,
) -> None:
    """Completions are no targets of images, and texts have no entropy."""
    of = trained["vit", False]
    with pytest.raises(InvalidTask, match="its answers are classes, not completions"):
        of.set_completions({"shapes": {0: (1,)}})
    assert lack_of_references(tasks["vit"]["shapes"]) is None
    assert lack_of_entropy(tasks["vit"]["shapes"]) is None
    assert "is one over the classes of a task of images" in str(lack_of_entropy(sums))
    with pytest.raises(InvalidTask, match="has no entropy: its answers are texts"):
        CoefficientGradients(tied_family, replace_length(OPTIONS), {"sums": sums}, entropies=("sums",))


def replace_length(options: EngineOptions) -> EngineOptions:
    return options.model_copy(update={"max_model_len": 256})


def test_overflowing_merge_fails_alone(trained: Mapping[tuple[str, bool], CoefficientGradients]) -> None:
    of = trained["vit", False]
    with pytest.raises(TrialFailed, match="the loss on a reference of objective"):
        of.losses(arithmetic(of.bank.family, 1e30, 1e30), BATCH)
    assert of.losses(arithmetic(of.bank.family, 0.3, 0.3), BATCH)


def test_bfloat16_is_near_float32(
    trained: Mapping[tuple[str, bool], CoefficientGradients], tasks: Mapping[str, Mapping[str, TaskSpec]]
) -> None:
    of = trained["vit", False]
    coarse = CoefficientGradients(of.bank.family, EngineOptions(dtype="bfloat16"), tasks["vit"])
    recipe = arithmetic(of.bank.family, 0.3, 0.5)
    expected, found = (each.loss_and_gradient(recipe, BATCH, WEIGHTS) for each in (of, coarse))
    assert found.losses == pytest.approx(expected.losses, rel=0.05)
    pairs = [
        (slope, found.by_source[name][alias])
        for name, each in expected.by_source.items()
        for alias, slope in each.items()
    ]
    fine, rough = (torch.tensor(each) for each in zip(*pairs, strict=True))
    assert torch.nn.functional.cosine_similarity(fine, rough, dim=0) > 0.95


def test_arguments_can_be_pickled(
    families: Mapping[str, Family], tasks: Mapping[str, Mapping[str, TaskSpec]], tmp_path: Path
) -> None:
    arguments = pickle.loads(pickle.dumps((families["vit"], OPTIONS, tasks["vit"])))
    assert CoefficientGradients(*arguments, cache=tmp_path).losses(arithmetic(families["vit"], 0.3, 0.3), BATCH)
