"""All experts of a layer merged as one stacked tensor, and then written as separate matrices again."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from service.merges.merge import check_merge, merge_file
from tests.layouts import layout_family
from tests.workers.recipes import arithmetic, slerp
from workers.export.checkpoint import export
from workers.merging.bank import Bank
from workers.merging.devices import peak_bytes
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods.task_vectors import ties
from workers.merging.plan import merged_names, plan_tensors
from workers.types import Family

NUM_LAYERS = 3


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return layout_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")


@pytest.fixture(scope="module")
def bank(family: Family) -> Bank:
    return Bank(family)


def by_ties(family: Family, *, stacks_experts: bool) -> Recipe:
    def merge(layer: int | None) -> Merge:
        return Merge("ties", (Source("math", layer), Source("text", layer)), {"k": 0.2, "lambda": 0.7})

    layers = tuple(LayerRecipe(*(merge(layer),) * 3) for layer in range(NUM_LAYERS))
    base = family.base.alias
    return Recipe(family.fingerprints, base, layers, merge(None), merge(None), stacks_experts=stacks_experts)


def stacked(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the experts of each layer stacked, as in transformers' models."""
    parts: dict[str, dict[int, dict[str, torch.Tensor]]] = {}
    found = dict[str, torch.Tensor]()
    for name, tensor in tensors.items():
        if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)_proj\.weight", name):
            parts.setdefault(match[1], {}).setdefault(int(match[2]), {})[match[3]] = tensor
        else:
            found[name] = tensor
    for place, experts in parts.items():
        each = [experts[number] for number in sorted(experts)]
        found[f"{place}.gate_up_proj"] = torch.stack([torch.cat([of["gate"], of["up"]]) for of in each])
        found[f"{place}.down_proj"] = torch.stack([of["down"] for of in each])
    return found


def test_the_stack_is_merged_and_its_matrices_are_written(family: Family, bank: Bank, tmp_path: Path) -> None:
    recipe = by_ties(family, stacks_experts=True)
    merged = dict(merged_tensors(recipe, bank, torch.float32))
    assert {name: tuple(tensor.shape) for name, tensor in merged.items()} == merged_names(recipe, bank)
    each = dict(merged_tensors(replace(recipe, stacks_experts=False), bank, torch.float32))
    assert merged.keys() == each.keys()
    differing = {name for name in merged if not torch.equal(merged[name], each[name])}
    assert differing == {name for name in merged if ".experts." in name}
    sources = [stacked({name: bank.get(alias, name) for name in merged}) for alias in ("base", "math", "text")]
    # Layer 1 has no experts.
    stacks = [name for name in stacked(merged) if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(stacks) == 4
    for name in stacks:
        base, *tensors = (source[name] for source in sources)
        expected = ties(tensors, base, lambda_=0.7, k=0.2)
        assert torch.equal(stacked(merged)[name], expected), name
    plain = dict(merged_tensors(recipe, bank, torch.float32, compiles=False))
    places = {name: torch.empty(shape) for name, shape in merged_names(recipe, bank).items()}
    merge_into(recipe, bank, places)
    for name, tensor in merged.items():
        assert torch.equal(plain[name], tensor)
        assert torch.equal(places[name], tensor)
    some = {name for name in merged if ".experts.1.up_proj" in name}
    assert dict(merged_tensors(recipe, bank, torch.float32, names=some)).keys() == some
    out = export(recipe, bank, tmp_path / "out", max_shard_bytes=50_000)  # a stack is in several files
    found = {name: tensor for file in out.glob("*.safetensors") for name, tensor in load_file(file).items()}
    assert all(torch.equal(found[name], tensor) for name, tensor in merged.items())
    assert "All experts of a layer are merged as one tensor." in (out / "README.md").read_text()


def test_a_mergekit_configuration_says_how_experts_are_merged(family: Family, bank: Bank, tmp_path: Path) -> None:
    stacked_sum = replace(arithmetic(family, 0.3, 0.4), stacks_experts=True)
    out = export(stacked_sum, bank, tmp_path / "stacked")
    assert yaml.safe_load((out / "mergekit_config.yml").read_text())["experts"] == "stacked"
    out = export(slerp(family, 0.3), bank, tmp_path / "each")
    assert not (out / "mergekit_config.yml").exists()
    assert "experts are merged one by one, by slerp, and mergekit merges a layer" in (out / "README.md").read_text()


def test_stacks_are_trimmed_with_the_whole_model(family: Family, bank: Bank) -> None:
    """Of the whole model the same number of elements is kept, whether the experts are stacked or not."""

    def alone(layer: int | None) -> Merge:
        return Merge("ties", (Source("math", layer),), {"k": 0.2, "lambda": 1.0})

    recipe = by_ties(family, stacks_experts=True)
    layers = tuple(LayerRecipe(*(alone(layer),) * 3) for layer in range(NUM_LAYERS))
    whole = replace(recipe, layers=layers, embedding=alone(None), head=alone(None), trim="model")
    each = replace(whole, stacks_experts=False)
    counts = []
    for of in (whole, each):
        merged = dict(merged_tensors(of, bank, torch.float32))
        taus = [merged[name] - bank.get("base", name).float() for name in merged]
        counts.append(sum(int(tau.count_nonzero()) for tau in taus))
        size = sum(tau.numel() for tau in taus)
    assert counts[0] == counts[1] == int(0.2 * size)
    assert bank.num_elements() == bank.num_elements(stacks_experts=True) == size


def test_it_is_part_of_a_recipe(family: Family) -> None:
    recipe = by_ties(family, stacks_experts=True)
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert recipe.digest != by_ties(family, stacks_experts=False).digest


@pytest.mark.slow
def test_mergekit_merges_mixtures_alike(tmp_path: Path) -> None:
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    family = layout_family(tmp_path / "models", "qwen2_moe")  # mergekit merges no mixtures with dense layers
    models = [{"model": family.base.directory}] + [
        {"model": expert.directory, "parameters": {"weight": 0.5, "density": 0.4}} for expert in family.experts[:2]
    ]
    document: dict[str, Any] = {
        "models": models,
        "merge_method": "ties",
        "base_model": family.base.directory,
        "dtype": "float32",
    }
    options = MergeOptions(device="cpu", write_model_card=False, quiet=True)
    run_merge(MergeConfiguration.model_validate(document), str(tmp_path / "theirs"), options)
    theirs = stacked(load_file(tmp_path / "theirs" / "model.safetensors"))
    file = tmp_path / "merge.yml"
    file.write_text(yaml.safe_dump(document | {"experts": "stacked"}))
    mine = stacked(load_file(merge_file(file, {}, tmp_path / "ours") / "model.safetensors"))
    assert mine.keys() <= theirs.keys()
    for name, tensor in mine.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=2e-6)


def test_without_experts_it_is_warned_of(tied_family: Family, tmp_path: Path) -> None:
    file = tmp_path / "merge.yml"
    models = [{"model": model.directory, "parameters": {"weight": 1}} for model in tied_family.models]
    file.write_text(yaml.safe_dump({"models": models, "merge_method": "linear", "experts": "stacked"}))
    plan = check_merge(file, {}, tmp_path / "out")
    reason = "experts: 'stacked' has no effect: the models have no experts in tensors of their own"
    assert plan.warnings == (f"{file}: {reason}",)


def test_memory_of_stacked_tensors_is_planned(family: Family, bank: Bank) -> None:
    """A stack of experts, which no file has as one tensor, is counted by the plan that GPU engines ask for."""
    recipe = by_ties(family, stacks_experts=True)
    plan = plan_tensors(recipe, bank)
    (stack, *_) = [tensor for tensor in plan.tensors if "experts" in tensor.name]
    assert peak_bytes(stack, plan, bank, torch.bfloat16) > 4 * math.prod(stack.shape)
