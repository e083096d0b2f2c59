"""What every search space must do, run on each of them; a new space is done when it passes."""

import itertools
import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.errors import InvalidConfiguration
from search_spaces.recipe import Recipe, Source
from search_spaces.spaces.lfs import LfsSpace
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS

METHODS = ("task_arithmetic", "ties", "slerp", "linear")


def lfs(experts, num_layers, **arguments):
    # Fingerprints in another order than aliases, so that canonical order shows.
    fingerprints = {alias: f"{9 - i}{alias}" for i, alias in enumerate(("base", *experts))}
    return LfsSpace(base="base", experts=experts, fingerprints=fingerprints, num_layers=num_layers, **arguments)


SPACES = {
    "paper": lfs(("math", "code", "text"), 12, preset="paper"),
    "one expert": lfs(("math",), 7, layer_groups=3),
    "two experts, whole layers": lfs(("math", "code"), 5, layer_groups=2, component_groups=1),
    "five experts, method per component": lfs(tuple("abcde"), 6, layer_groups=2, method_per="component"),
    "whole layers, method per component": lfs(tuple("abc"), 4, component_groups=1, method_per="component"),
    "linear only": lfs(("math", "code", "text"), 4, methods=("linear",)),
    "all methods": lfs(("math", "code", "text"), 4, layer_groups=2, methods=tuple(SEARCHED_METHODS)),
    "all methods, one expert": lfs(("math",), 3, layer_groups=1, methods=tuple(SEARCHED_METHODS)),
    "slerp only": lfs(("math", "code", "text"), 4, methods=("slerp",), method_per="component"),
    "one layer, one expert, one method": lfs(("math",), 1, layer_groups=1, methods=("ties",)),
}
spaces = pytest.mark.parametrize("space", SPACES.values(), ids=SPACES)
seeds = given(seed=st.integers(0, 2**32 - 1))
few = settings(max_examples=20)


def draw(space, seed):
    return space.parameters.sample(np.random.default_rng(seed))


@spaces
@few
@seeds
def test_every_configuration_decodes_to_a_canonical_recipe_that_survives_json(space, seed):
    recipe = space.to_recipe(draw(space, seed))
    assert recipe == recipe.canonical()
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


@spaces
@few
@seeds
def test_a_recipe_is_read_back_as_a_configuration_of_the_same_merge(space, seed):
    recipe = space.to_recipe(draw(space, seed))
    found = space.from_recipe(recipe)
    assert found is not None
    space.parameters.check(found)
    assert space.to_recipe(found).digest == recipe.digest


@spaces
def test_same_seed_gives_the_same_recipe_and_another_seed_another(space):
    assert space.to_recipe(draw(space, 3)) == space.to_recipe(draw(space, 3))
    assert len({space.to_recipe(draw(space, seed)).digest for seed in range(20)}) > 10


@spaces
def test_what_its_parameters_refuse_is_refused(space):
    drawn = (draw(space, seed) for seed in range(20))  # some methods take no numbers
    configuration = next(found for found in drawn if any(isinstance(value, float) for value in found.values()))
    name, value = next((name, value) for name, value in configuration.items() if isinstance(value, float))
    above = space.parameters[name].high + 0.5
    with pytest.raises(InvalidConfiguration, match=rf"{name}={above} is not accepted"):
        space.to_recipe({**configuration, name: above})
    with pytest.raises(InvalidConfiguration, match=rf"'{name}' is missing"):
        space.to_recipe({key: v for key, v in configuration.items() if key != name})
    assert value == configuration[name]


@spaces
@few
@seeds
def test_every_layer_is_merged_from_its_own_layer_of_known_models(space, seed):
    recipe = space.to_recipe(draw(space, seed))
    description = space.describe()
    assert len(recipe.layers) == description.layer_groups[-1].stop
    for index, layer in enumerate(recipe.layers):
        assert {s.layer for merge in (layer.attention, layer.mlp, layer.norm) for s in merge.sources} == {index}
    assert {s.layer for merge in (recipe.embedding, recipe.head) for s in merge.sources} == {None}


@spaces
def test_a_recipe_of_other_models_or_depth_is_not_contained(space):
    recipe = space.to_recipe(draw(space, 0))
    assert space.from_recipe(replace(recipe, models=dict.fromkeys(recipe.models, "other"))) is None
    assert space.from_recipe(replace(recipe, layers=(*recipe.layers, recipe.layers[0]))) is None


@spaces
def test_a_recipe_with_its_models_under_other_names_is_contained(space):
    recipe = space.to_recipe(draw(space, 0))
    names = {alias: f"my {alias}" for alias in recipe.models}
    models = recipe.models | {names[alias]: fingerprint for alias, fingerprint in recipe.models.items()}

    def rename(merge):
        return replace(merge, sources=tuple(Source(names[source.model], source.layer) for source in merge.sources))

    renamed = replace(recipe, models=models, base=names[recipe.base]).rewritten(rename).canonical()
    assert set(renamed.models) == set(names.values())
    found = space.from_recipe(renamed)
    assert found is not None
    assert space.to_recipe(found).digest == renamed.digest


@spaces
def test_a_space_can_be_sent_to_another_process(space):
    again = pickle.loads(pickle.dumps(space))
    assert again.to_recipe(draw(again, 5)) == space.to_recipe(draw(space, 5))


@spaces
def test_layer_groups_cover_the_model_in_order(space):
    groups = space.describe().layer_groups
    assert groups[0].start == 0
    assert all(before.stop == after.start for before, after in itertools.pairwise(groups))
    assert all(group.start < group.stop for group in groups)
