"""Scales of layers folded into weights: the folded model computes the same as the scaled model.

For scales of the stream by the scale invariance of RMSNorm, for those of MLPs up to rounding.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe, Recipe
from tests.benchmarks.family_training import Item, exact_match
from tests.builders import tiny_family, tiny_llama, tiny_qwen2
from tests.layouts import LAYOUTS, layout_family
from tests.workers.recipes import arithmetic, copied, path, whole_model
from workers.engines.transformers.backend import logprobs
from workers.engines.transformers.merged_models import merged_model
from workers.engines.vllm.paths.geometry import PATH_TYPES
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.plan import check_recipe, computations, merged_names
from workers.merging.residual_scales import MLP_SCALABLE, SCALABLE, UNSCALED, branch_factors, ends_a_branch
from workers.models.family import open_family
from workers.models.modalities import IMAGE
from workers.types import Family

SCALES = (0.5, 1.5, 0.8, 1.3, 0.6, 1.4)
MLP_SCALES = (1.7, 0.0, 0.4, 1.3)
ROUNDING = 1e-5  # of log-probabilities of some 5, in float32
MLP = re.compile(r"(?:layers|h)\.\d+\.(?:mlp|block_sparse_moe)$")
SHIPPED = Path(__file__).parents[3] / "workers" / "tiny_family"


def unscaled(recipe: Recipe) -> Recipe:
    return replace(recipe, layers=tuple(replace(layer, scale=1.0, mlp_scale=1.0) for layer in recipe.layers))


def scaled_model(recipe: Recipe, bank: Bank) -> Any:
    """The model that the recipe describes.

    Every layer's output, the stream, is multiplied by the layer's scale, and the output of its MLP by the MLP's scale.
    """
    model = merged_model(unscaled(recipe), bank, dtype="float32")

    def scale(by: float) -> Any:
        def hook(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            assert isinstance(output, torch.Tensor)
            return output * by

        return hook

    mlps = [module for name, module in model.named_modules() if MLP.search(name)]
    for module, layer in zip(mlps, recipe.layers, strict=True):
        module.register_forward_hook(scale(layer.mlp_scale))
    if any(layer.scale != 1 for layer in recipe.layers):
        for module, layer in zip(model.model.layers, recipe.layers, strict=True):
            module.register_forward_hook(scale(layer.scale))
    return model


def apart(recipe: Recipe, bank: Bank) -> float:
    """Largest difference in log-probability between the scaled model and the model with folded scales."""
    return difference(merged_model(recipe, bank, dtype="float32"), recipe, bank)


def difference(folded: Any, recipe: Recipe, bank: Bank) -> float:
    """Largest difference in log-probability between the model that the recipe describes and `folded`."""
    tokens = [7919 * i % int(bank.base.config["vocab_size"]) for i in range(40)]
    theirs = logprobs(scaled_model(recipe, bank), tokens)
    plain = logprobs(merged_model(unscaled(recipe), bank, dtype="float32"), tokens)
    assert max(abs(a - b) for a, b in zip(theirs, plain, strict=True)) > 0.01, "the scales matter"
    return max(abs(a - b) for a, b in zip(logprobs(folded, tokens), theirs, strict=True))


# Their scales are compared with those of the stream in tests/workers/engines/images.
IMAGES = IMAGE.model_types
STEPS = [("math", 0), ("base", 2), ("math", 1), ("math", 1), ("text", 0), ("base", 1), ("text", 2), ("math", 2)]
LLAMA: dict[str, Any] = {"hidden": 64, "layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("build", "settings"),
    [(tiny_llama, {**LLAMA, "attention_bias": True, "mlp_bias": True}), (tiny_qwen2, {"layers": 3})],
)
def test_without_eps_folded_scales_are_scales_of_the_stream(
    build: Any, settings: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    family = tiny_family(
        tmp_path, build=build, experts=("math", "text"), tied=tied, noise=0.05, rms_norm_eps=1e-12, **settings
    )
    bank = Bank(family, cache=tmp_path)
    assert apart(path(family, STEPS, SCALES), bank) < 2e-5
    assert apart(path(family, STEPS, scales=(0.5,)), bank) < 2e-5, "the stream ends at 1/256 of its size"


@pytest.mark.slow
def test_eps_separates_the_two_forms(tmp_path: Path) -> None:
    """The two forms differ through eps where the residual stream is small.

    Embeddings of 0.02 have a mean square of 4e-4, which is not far above an eps of 1e-5.
    """
    family = tiny_family(
        tmp_path, experts=("math", "text"), tied=False, noise=0.0, initializer_range=0.02, rms_norm_eps=1e-5, **LLAMA
    )
    found = apart(path(family, STEPS, scales=(0.5,)), Bank(family, cache=tmp_path))
    assert 1e-3 < found < 0.5, found


@pytest.mark.slow
def test_on_the_shipped_family_the_two_forms_agree(tmp_path: Path) -> None:
    family = open_family(
        SHIPPED / "base", {name: SHIPPED / "experts" / name for name in ("math", "text")}, cache=tmp_path
    )
    steps = [("math", 0), ("math", 1), ("text", 1), ("base", 2), ("math", 3), ("math", 4), ("text", 5), ("math", 6)]
    assert apart(path(family, steps, SCALES), Bank(family, cache=tmp_path)) < 1e-4


def test_only_the_ends_of_later_branches_are_divided(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    plain = arithmetic(untied_family, 0.3, 0.4)
    scaled = replace(plain, layers=(plain.layers[0], replace(plain.layers[1], scale=0.8), *plain.layers[2:]))
    before = dict(merged_tensors(plain, bank, torch.float32))
    for name, tensor in merged_tensors(scaled, bank, torch.float32):
        is_later = any(f"layers.{i}." in name for i in (2, 3, 4)) and ("o_proj" in name or "down_proj" in name)
        assert torch.equal(tensor, before[name] * (1 / 0.8) if is_later else before[name]), name
    keys = computations(plain, bank), computations(scaled, bank)
    changed = {name for name in keys[0] if keys[0][name] != keys[1][name]}
    assert changed == {f"model.layers.{i}.{m}.weight" for i in (2, 3, 4) for m in ("self_attn.o_proj", "mlp.down_proj")}
    memory = {name: torch.empty(shape, dtype=torch.bfloat16) for name, shape in merged_names(scaled, bank).items()}
    merge_into(scaled, bank, memory)
    assert all(torch.equal(memory[name], tensor) for name, tensor in merged_tensors(scaled, bank, torch.bfloat16))


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales_that_cannot_be_folded_are_refused(untied_family: Family, tmp_path: Path, scale: float) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    recipe = path(untied_family, [("math", 0), ("text", 1)], scales=(1.0, scale))
    with pytest.raises(InvalidRecipe, match=r"layer 1: scale (0|-1|nan|inf); expected a number above 0"):
        check_recipe(recipe, bank)


def test_products_beyond_all_numbers_and_alignments_are_refused() -> None:
    layer = LayerRecipe(*(copied("base", 0),) * 3, scale=1e200)
    with pytest.raises(InvalidRecipe, match=r"layer 1: the product of the scales up to here is inf"):
        branch_factors([layer, layer], model_type="llama")
    with pytest.raises(InvalidRecipe, match=r"layer 0: the product of the scales up to here is 9.99989e-321"):
        branch_factors([replace(layer, scale=1e-320)], model_type="llama")
    with pytest.raises(InvalidRecipe, match=r"layer 0: alignment 'coral': a module between layers cannot be folded"):
        branch_factors([replace(layer, scale=1.0, alignment="coral")], model_type="llama")


@pytest.mark.parametrize("model_type", ["gemma2", "gpt2", "qwen2_moe"])
def test_models_whose_scales_cannot_be_folded_are_named(model_type: str) -> None:
    layers = [LayerRecipe(*(copied("base", 0),) * 3, scale=1.5)]
    with pytest.raises(InvalidRecipe, match=rf"in a model of type '{model_type}' scales cannot be folded .* llama"):
        branch_factors(layers, model_type=model_type)
    assert branch_factors([replace(layers[0], scale=1.0)], model_type=model_type) == (UNSCALED,)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in SCALABLE if each not in IMAGES])
def test_every_type_that_is_folded_is_exact(model_type: str, tmp_path: Path) -> None:
    assert model_type in LAYOUTS
    family = layout_family(tmp_path, model_type, rms_norm_eps=1e-12)
    bank = Bank(family, cache=tmp_path)
    suffixes = {place.suffix for place in bank.layout.places.values() if place.layer is not None}
    assert len({suffix.split(".")[1] for suffix in suffixes if ends_a_branch(suffix)}) == 2
    assert apart(path(family, STEPS, SCALES), bank) < 2e-5


# Scales of what MLPs add.


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [each for each in MLP_SCALABLE if each not in IMAGES])
def test_scales_of_mlps_are_exact_for_every_type(model_type: str, tmp_path: Path) -> None:
    family = layout_family(tmp_path, model_type)
    bank = Bank(family, cache=tmp_path)
    steps = [("math", 0), ("text", 1), ("math", 2)]
    assert apart(path(family, steps, mlp_scales=MLP_SCALES), bank) < ROUNDING
    last = path(family, steps, mlp_scales=(1.0, 1.0, 0.5))
    assert apart(last, bank) < ROUNDING, "no norm cancels the scale of the last layer's MLP"


@pytest.mark.slow
def test_both_kinds_of_scales_are_folded_together(tmp_path: Path) -> None:
    settings = {**LLAMA, "attention_bias": True, "mlp_bias": True}
    family = tiny_family(tmp_path, experts=("math", "text"), tied=False, noise=0.05, rms_norm_eps=1e-12, **settings)
    assert apart(path(family, STEPS, SCALES, MLP_SCALES), Bank(family, cache=tmp_path)) < 2e-5


@pytest.mark.parametrize("stored", ["tied_family", "untied_family"])
def test_an_export_with_scales_of_mlps_is_read_by_transformers(
    stored: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    from transformers import AutoModelForCausalLM

    bank = Bank(request.getfixturevalue(stored), cache=tmp_path)
    recipe = path(bank.family, [("math", 1), ("base", 0), ("text", 2), ("text", 2)], mlp_scales=MLP_SCALES)
    out = export(recipe, bank, tmp_path / "out", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    assert difference(model, recipe, bank) < ROUNDING


def test_only_the_end_of_the_own_mlp_is_multiplied(untied_family: Family, tmp_path: Path) -> None:
    bank = Bank(untied_family, cache=tmp_path)
    for plain in (arithmetic(untied_family, 0.3, 0.4), whole_model(untied_family, "math")):
        layers = [replace(layer, mlp_scale=0.7) if i == 1 else layer for i, layer in enumerate(plain.layers)]
        scaled = replace(plain, layers=tuple(layers))
        name = "model.layers.1.mlp.down_proj.weight"
        before = dict(merged_tensors(plain, bank, torch.float32))
        for each, tensor in merged_tensors(scaled, bank, torch.float32):
            assert torch.equal(tensor, before[each] * 0.7 if each == name else before[each]), each
        keys = computations(plain, bank), computations(scaled, bank)
        assert {each for each in keys[0] if keys[0][each] != keys[1][each]} == {name}
        # The compiled kernels, the memory of an engine and plain torch have the same bits.
        memory = {each: torch.empty(shape, dtype=torch.bfloat16) for each, shape in merged_names(scaled, bank).items()}
        merge_into(scaled, bank, memory)
        for compiles in (True, False):
            found = merged_tensors(scaled, bank, torch.bfloat16, compiles=compiles)
            assert all(torch.equal(memory[each], tensor) for each, tensor in found)
        assert torch.equal(memory[name], (before[name] * 0.7).to(torch.bfloat16))


def test_experts_of_a_mixture_are_multiplied_as_stacks_too(tmp_path: Path) -> None:
    family = layout_family(tmp_path, "qwen2_moe")
    bank = Bank(family, cache=tmp_path)
    recipe = path(family, [("math", 0), ("text", 1), ("math", 2)], mlp_scales=(0.7,))
    each = dict(merged_tensors(recipe, bank, torch.float32))
    plain = dict(merged_tensors(unscaled(recipe), bank, torch.float32))
    changed = {name for name in each if not torch.equal(each[name], plain[name])}
    assert changed == {name for name in each if "down_proj" in name}
    assert len(changed) == 3 * (6 + 1)
    stacked = merged_tensors(replace(recipe, stacks_experts=True), bank, torch.float32)
    assert all(torch.equal(each[name], tensor) for name, tensor in stacked)


@pytest.mark.parametrize("scale", [float("nan"), float("inf")])
def test_scales_of_mlps_that_are_no_numbers_are_refused(scale: float) -> None:
    layer = LayerRecipe(*(copied("base", 0),) * 3, mlp_scale=scale)
    with pytest.raises(InvalidRecipe, match=r"layer 0: mlp_scale (nan|inf); expected a finite number"):
        branch_factors([layer], model_type="llama")


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "granitemoehybrid"])
def test_models_whose_mlps_cannot_be_scaled_are_named(model_type: str) -> None:
    layers = [LayerRecipe(*(copied("base", 0),) * 3, mlp_scale=0.5)]
    message = rf"layer 0: mlp_scale 0.5: in a model of type '{model_type}' it cannot be folded .* llama"
    with pytest.raises(InvalidRecipe, match=message):
        branch_factors(layers, model_type=model_type)
    assert branch_factors([replace(layers[0], mlp_scale=1.0)], model_type=model_type) == (UNSCALED,)


def test_paths_are_of_types_whose_layers_and_mlps_can_be_scaled() -> None:
    assert set(PATH_TYPES) <= set(SCALABLE) <= set(MLP_SCALABLE) <= set(LAYOUTS) | IMAGES


@pytest.mark.slow
def test_a_scale_of_an_mlp_costs_the_shipped(tmp_path: Path) -> None:
    """A scale of an mlp costs the shipped expert less than one of the stream."""
    family = open_family(SHIPPED / "base", {"math": SHIPPED / "experts" / "math"}, cache=tmp_path)
    bank = Bank(family, cache=tmp_path)
    lines = (SHIPPED / "tasks" / "math_search.jsonl").read_text().splitlines()[:200]
    items = [Item(each["prompt"], each["answer"]) for each in map(json.loads, lines)]

    def accuracy(*, scale: float = 1.0, mlp_scale: float = 1.0) -> float:
        plain = whole_model(family, "math")
        layers = list(plain.layers)
        layers[3] = replace(layers[3], scale=scale, mlp_scale=mlp_scale)
        model = merged_model(replace(plain, layers=tuple(layers)), bank, dtype="float32")
        return sum(exact_match(model, items)) / len(items)

    assert accuracy(scale=1.2) == pytest.approx(0.905, abs=0.01)
    assert accuracy(mlp_scale=1.2) == pytest.approx(0.940, abs=0.01)
