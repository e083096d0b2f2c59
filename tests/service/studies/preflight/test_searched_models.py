"""A search space's facts about models, from preflight: its coefficients are those of the merged tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from search_spaces.recipe import COMPONENTS
from search_spaces.spaces import SPACES
from search_spaces.spaces.base import DifferentiableSpace, SearchedModels, SearchSpace
from service.studies.preflight.models import searched_models
from tests.builders import tiny_family, tiny_qwen2
from tests.layouts import LAYOUTS, layout_family
from workers.merging.bank import Bank
from workers.merging.materialize import merged_tensors
from workers.merging.plan import merged_names
from workers.models.family import open_sources
from workers.types import Family

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def told(family: Family) -> SearchedModels:
    sources = open_sources(family)
    return searched_models(sources, sources.fingerprints)


def space_of(family: Family, kind: str = "layerwise", **options: Any) -> SearchSpace:
    return SPACES[kind](kind=kind, **options).build(told(family))


def assert_slots_are_the_coefficients(space: SearchSpace, family: Family, *, seed: int) -> None:
    """Check that each merged tensor is the base plus task vectors times the parameters that the space's slots name."""
    assert isinstance(space, DifferentiableSpace)
    configuration = space.parameters.sample(np.random.default_rng(seed))
    bank = Bank(family)
    for name, merged in merged_tensors(space.to_recipe(configuration), bank, torch.float32):
        base = bank.get("base", name).float()
        expected = base + sum(
            configuration[parameter] * (bank.get(alias, name).float() - base) for alias, parameter in space.slots(name)
        )
        torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5, msg=(name + ": {}").format)


@pytest.mark.parametrize("granularity", ["tensor", "component", "layer", "layer_group"])
def test_a_searched_coefficient_is_that_of_the_merged_tensors(tmp_path: Path, granularity: str) -> None:
    family = tiny_family(tmp_path, experts=("math", "text"), layers=2)
    options: dict[str, Any] = {
        "granularity": granularity,
        **({"layer_groups": 2} if granularity == "layer_group" else {}),
    }
    assert_slots_are_the_coefficients(space_of(family, **options), family, seed=1)


def test_tensors_are_told_in_the_order_in_which_they_are_merged(tmp_path: Path) -> None:
    family = tiny_family(tmp_path, experts=("math", "text"), layers=2)
    models = told(family)
    assert (models.base, models.experts, models.num_layers) == ("base", ("math", "text"), 2)
    recipe = space_of(family).to_recipe(dict.fromkeys(space_of(family).parameters.names, 0.5))
    assert list(models.tensors) == list(merged_names(recipe, Bank(family)))
    places = list(dict.fromkeys((place.layer, place.part) for place in models.tensors.values()))
    in_layers = [(layer, component) for layer in (0, 1) for component in COMPONENTS]
    assert places == [(None, "embedding"), *in_layers, (None, "head")]


def test_tied_head_counts_as_embedding(tmp_path: Path) -> None:
    """A tied head that the files hold counts as the embedding."""
    family = tiny_family(tmp_path, build=tiny_qwen2, experts=("math", "text"), tied=True)
    assert told(family).tied == {}
    file = Path(family.base.directory, "model.safetensors")
    tensors = load_file(file)
    save_file({**tensors, HEAD: tensors[EMBEDDING].clone()}, file, metadata={"format": "pt"})
    models = told(family)
    assert HEAD not in models.tensors
    assert models.tied == {HEAD: EMBEDDING}
    space = space_of(family)
    assert isinstance(space, DifferentiableSpace)
    assert space.slots(HEAD) == space.slots(EMBEDDING)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", LAYOUTS)
def test_layouts_have_all_coefficients(tmp_path: Path, model_type: str) -> None:
    """Every layout has a coefficient for each tensor and expert."""
    family = layout_family(tmp_path, model_type)
    space = space_of(family)
    assert len(space.parameters) == 2 * len(told(family).tensors)
    assert_slots_are_the_coefficients(space, family, seed=2)
