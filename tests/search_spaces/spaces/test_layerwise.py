"""The layerwise space: its coefficients, and their recipes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.parameters import Parameters
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces import layerwise
from search_spaces.spaces.base import DifferentiableSpace, SearchedModels
from tests.search_spaces.spaces.families import EMBEDDING, HEAD, IN_LAYERS, NORM, models, space

EXPERTS = ("math", "code", "text")


def everywhere(parameters: Parameters, value: float) -> dict[str, float]:
    return dict.fromkeys(parameters.names, value)


def tensor(layer: int, suffix: str) -> str:
    return f"model.layers.{layer}.{suffix}"


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        (
            {"granularity": "tensor"},
            [EMBEDDING, *(tensor(layer, name) for layer in range(3) for _, name in IN_LAYERS), HEAD, NORM],
        ),
        (
            {"granularity": "component"},
            ["embedding", *(f"layers.{i}.{part}" for i in range(3) for part in ("attention", "mlp", "norm")), "head"],
        ),
        ({"granularity": "layer"}, ["embedding", "layers.0", "layers.1", "layers.2", "head"]),
        ({"granularity": "layer_group", "layer_groups": 2}, ["embedding", "g1", "g2", "head"]),
    ],
)
def test_each_piece_has_a_coefficient_per_expert(options: dict[str, Any], pieces: list[str]) -> None:
    parameters = space("layerwise", models(num_layers=3), **options).parameters
    assert parameters.names == tuple(f"{piece}.{expert}" for piece in pieces for expert in EXPERTS)
    assert {(parameter.low, parameter.high, parameter.default_value) for parameter in parameters} == {
        (-0.5, 1.5, 1 / 3)
    }
    assert {name: name.rpartition(".")[2] for name in parameters.names} == parameters.roles


def test_tensor_is_base_and_task_vectors() -> None:
    """Every tensor is the base plus the experts' task vectors times the tensor's own coefficients."""
    searched = space("layerwise", models(num_layers=2))
    configuration = searched.parameters.sample(np.random.default_rng(0))
    recipe = searched.to_recipe(configuration)
    # In the order of fingerprints: 8math, 7code, 6text.
    order = ("text", "code", "math")
    for layer in (0, 1):
        for part, suffix in IN_LAYERS:
            name = tensor(layer, suffix)
            merge = recipe.tensors.get(name, recipe.layers[layer].component(part))
            assert merge == Merge(
                "task_arithmetic",
                tuple(Source(expert, layer) for expert in order),
                {"lambda": tuple(configuration[f"{name}.{expert}"] for expert in order)},
            )
    # The component has the coefficients of its first tensor, which needs no entry of its own.
    assert tensor(0, "self_attn.o_proj.weight") not in recipe.tensors
    assert set(recipe.tensors) == {NORM} | {
        tensor(layer, name) for layer in (0, 1) for name in ("self_attn.qkv_proj.weight", "mlp.up_proj.weight")
    }


def test_sources_are_contained() -> None:
    """The space contains sources and task arithmetic with equal digests."""
    family = models()
    known = all_baselines(base="base", experts=EXPERTS, fingerprints=family.fingerprints, num_layers=family.num_layers)
    for granularity in ("tensor", "component", "layer", "layer_group"):
        searched = space("layerwise", granularity=granularity)
        found = {label: searched.from_recipe(recipe) for _, label, recipe in known}
        assert {label for label, configuration in found.items() if configuration is None} == {
            "uniform average",  # the same merge as task arithmetic 1/n up to rounding, by another method
            "TIES k 0.2 lambda 1.0",
        }
        assert found["base"] == everywhere(searched.parameters, 0.0)
        assert found["task arithmetic 0.3"] == everywhere(searched.parameters, 0.3)
        assert {value for name, value in found["expert:code"].items() if name.endswith(".code")} == {1.0}
        assert {value for name, value in found["expert:code"].items() if not name.endswith(".code")} == {0.0}
        assert not searched.to_recipe(found["task arithmetic 1/n"]).tensors


def test_foreign_recipe_is_not_contained() -> None:
    """The space contains no recipe that is beyond its range or finer than its groups."""
    recipe = space("layerwise", range=(-1, 2)).to_recipe(
        everywhere(space("layerwise").parameters, 0.5) | {f"{tensor(1, 'mlp.up_proj.weight')}.math": 1.75}
    )
    assert space("layerwise").from_recipe(recipe) is None
    assert space("layerwise", range=(-1, 2), granularity="component").from_recipe(recipe) is None
    assert space("layerwise", range=(-1, 2)).from_recipe(recipe)[f"{tensor(1, 'mlp.up_proj.weight')}.math"] == 1.75


def test_ties_and_dare_keep_the_same_elements_in_every_recipe() -> None:
    for options, fixed, seed in (
        ({"method": "ties_peft"}, {"density": 0.2}, None),
        ({"method": "ties_peft", "density": 0.5}, {"density": 0.5}, None),
        ({"method": "dare_linear"}, {"density": 0.5}, 0),
        ({"method": "dare_linear_l1", "density": 0.25, "mask_seed": 7}, {"density": 0.25}, 7),
    ):
        searched = space("layerwise", **options)
        assert (searched.fixed, searched.seed) == (fixed, seed)
        for number in range(5):
            recipe = searched.to_recipe(searched.parameters.sample(np.random.default_rng(number)))
            merges = [merge for merge in recipe.merges() if merge.method != "passthrough"]
            assert {(merge.number("density"), merge.seed) for merge in merges} == {(fixed["density"], seed)}
        assert searched.to_recipe(everywhere(searched.parameters, 0.0)).embedding.method == "passthrough"


def test_parts_without_tensors() -> None:
    """Parts without tensors are merged as the rest of their layer.

    So that equal coefficients everywhere give the published recipes, whatever the models lack.
    """
    searched = space("layerwise", models(in_layers=IN_LAYERS[:-1]), granularity="component")
    assert not any(".norm." in name for name in searched.parameters.names)
    recipe = searched.to_recipe(everywhere(searched.parameters, 0.25))
    assert set(recipe.merges()) == {
        Merge("task_arithmetic", tuple(Source(e, layer) for e in ("text", "code", "math")), {"lambda": 0.25})
        for layer in (None, 0, 1, 2, 3)
    }


def test_slot_is_a_parameter() -> None:
    """A slot is the parameter of an expert's task vector in a tensor."""
    for options in ({}, {"granularity": "component"}, {"granularity": "layer"}, {"granularity": "layer_group"}):
        family = models()
        searched = space("layerwise", family, **options)
        assert isinstance(searched, DifferentiableSpace)
        before = everywhere(searched.parameters, 0.25)
        merges = of_tensors(searched.to_recipe(before), family)
        for name in searched.parameters.names[:: len(EXPERTS) + 1]:
            after = of_tensors(searched.to_recipe(before | {name: 0.75}), family)
            changed = {tensor for tensor in family.tensors if after[tensor] != merges[tensor]}
            assert changed == {tensor for tensor in family.tensors if name in dict(searched.slots(tensor)).values()}
            expert = next(alias for alias, parameter in searched.slots(min(changed)) if parameter == name)
            for tensor_name in changed:
                sources = [source.model for source in after[tensor_name].sources]
                numbers = dict(zip(sources, after[tensor_name].per_source(searched.coefficient), strict=True))
                assert numbers == dict.fromkeys(EXPERTS, 0.25) | {expert: 0.75}


def of_tensors(recipe: Recipe, family: SearchedModels) -> dict[str, Merge]:
    """The merge of each tensor."""
    found = {}
    for name, place in family.tensors.items():
        if place.part == "embedding" or place.part == "head":
            part = recipe.embedding if place.part == "embedding" else recipe.head
        else:
            assert place.layer is not None
            part = recipe.layers[place.layer].component(place.part)
        found[name] = recipe.tensors.get(name, part)
    return found


def test_a_tied_head_has_the_parameters_of_the_embedding() -> None:
    searched = space("layerwise", models(is_tied=True))
    assert searched.slots(HEAD) == searched.slots(EMBEDDING) == tuple((e, f"{EMBEDDING}.{e}") for e in EXPERTS)
    with pytest.raises(KeyError, match=r"model\.layers\.9"):
        searched.slots(tensor(9, "mlp.up_proj.weight"))


def test_auto_is_by_tensor_unless_there_are_very_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(space("layerwise").parameters) == len(models().tensors) * len(EXPERTS)
    monkeypatch.setattr(layerwise, "MAX_TENSOR_COEFFICIENTS", 60)
    assert space("layerwise").parameters.names == space("layerwise", granularity="component").parameters.names
    assert len(space("layerwise", granularity="tensor").parameters) == len(models().tensors) * len(EXPERTS)


def test_the_description_says_what_has_coefficients_of_its_own() -> None:
    described = space("layerwise", models(num_layers=3)).describe()
    assert [group.label for group in described.layer_groups] == ["layer 1", "layer 2", "layer 3"]
    assert described.component_groups == {name: (part,) for part, name in IN_LAYERS}
    assert described.text == "task_arithmetic, one coefficient per expert and tensor"
    described = space("layerwise", models(num_layers=3), granularity="layer_group", layer_groups=2).describe()
    assert [group.label for group in described.layer_groups] == ["layers 1-2", "layer 3"]
    assert described.component_groups == {"layer": ("attention", "mlp", "norm")}


def test_more_layer_groups_than_layers_are_refused() -> None:
    with pytest.raises(InvalidStudy, match=r"^search_space.layer_groups: 5 for a model of 4 layers; use 1 to 4"):
        space("layerwise", granularity="layer_group", layer_groups=5)
    with pytest.raises(InvalidStudy, match="layer_groups: 4 for a model of 2 layers; use 1 to 2"):
        space("layerwise", models(num_layers=2), granularity="layer_group")


def test_a_merge_of_other_layers_is_not_contained() -> None:
    family = models(num_layers=2)
    crossed = Merge("task_arithmetic", (Source("math", 1),), {"lambda": 0.5})
    outside = Merge("task_arithmetic", (Source("math"),), {"lambda": 0.5})
    layers = (LayerRecipe(crossed, crossed, crossed),) * 2
    recipe = Recipe(family.fingerprints, "base", layers, embedding=outside, head=outside)
    assert space("layerwise", family).from_recipe(recipe) is None


def test_a_scale_per_layer_is_searched_besides_where_asked_for() -> None:
    own = space("layerwise", granularity="layer", layer_scales=True)
    plain = space("layerwise", granularity="layer")
    assert own.parameters.names == (*plain.parameters.names, "scale:0", "scale:1", "scale:2")
    assert own.layer_scales == {layer: f"scale:{layer}" for layer in range(3)}
    assert plain.layer_scales == {}
    point = dict.fromkeys(plain.parameters.names, 0.25)
    recipe = own.to_recipe(point | {"scale:0": 0.75, "scale:1": 1.0, "scale:2": 1.25})
    assert [layer.scale for layer in recipe.layers] == [0.75, 1.0, 1.25, 1.0]
    assert plain.from_recipe(recipe) is None
    assert own.from_recipe(plain.to_recipe(point))["scale:1"] == 1.0
