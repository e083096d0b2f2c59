"""Requirements of every search space, tested on each of them; a new space is complete when it passes."""

from __future__ import annotations

import hashlib
import itertools
import json
import pickle
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.errors import InvalidConfiguration, InvalidStudy
from search_spaces.parameters import Float, Integer
from search_spaces.recipe import COMPONENTS, Merge, Recipe, Source
from search_spaces.spaces import SPACES
from search_spaces.spaces.base import SearchedModels, SearchSpace, SpaceSection
from search_spaces.spaces.hm3 import MergedOptions
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS
from tests.search_spaces.spaces.families import IN_LAYERS, models, space

# The methods that LFS had when the hashes of these examples were stored; later ones have an example of their own.
LATER = ("m3_ties_majority", "m3_dare_ties")
ALL = tuple(name for name in SEARCHED_METHODS if name not in LATER)
VECTORS = ({"math": 1.0, "code": 0.0, "text": 0.0}, {"math": 0.2, "code": 0.3, "text": 0.5})


def described(kind: str, family: SearchedModels | None = None, **options: Any) -> tuple[SpaceSection, SearchedModels]:
    """A section of a study file, and the models that a space is built over."""
    return SPACES[kind](kind=kind, **options), family or models()


EXAMPLES = {
    "lfs, paper": described("lfs", models(num_layers=12), preset="paper"),
    "lfs, one expert": described("lfs", models(("math",), 7), layer_groups=3),
    "lfs, two experts, whole layers": described("lfs", models(("math", "code"), 5), layer_groups=2, component_groups=1),
    "lfs, method per component": described("lfs", models(tuple("abcde"), 6), layer_groups=2, method_per="component"),
    "lfs, whole layers": described("lfs", models(tuple("abc")), component_groups=1, method_per="component"),
    "lfs, all experts": described("lfs", selection="all"),
    "lfs, all experts and methods": described("lfs", selection="all", method_per="component", methods=ALL),
    "lfs, lambda per model": described("lfs", lambdas="per_model"),
    "lfs, lambda per model and component": described(
        "lfs", models(tuple("abcd")), lambdas="per_model", method_per="component", layer_groups=2, methods=ALL
    ),
    "lfs, lambda per model, one expert": described("lfs", models(("a",)), lambdas="per_model"),
    "lfs, linear": described("lfs", methods=("linear",)),
    "lfs, all methods": described("lfs", layer_groups=2, methods=ALL),
    "lfs, all methods, one expert": described("lfs", models(("math",), 3), layer_groups=1, methods=ALL),
    "lfs, methods of M3": described("lfs", methods=("m3_ties", *LATER), layer_groups=2),
    "lfs, whole models": described("lfs", methods=("ties", "linear", "breadcrumbs"), trim="model"),
    "lfs, slerp": described("lfs", methods=("slerp",), method_per="component"),
    "lfs, one layer, expert, method": described("lfs", models(("math",), 1), layer_groups=1, methods=("ties",)),
    "layerwise": described("layerwise"),
    "layerwise, one expert": described("layerwise", models(("math",), 2, is_tied=True)),
    "layerwise, no norms in layers": described("layerwise", models(in_layers=IN_LAYERS[:-1]), granularity="component"),
    "layerwise, component": described("layerwise", models(tokenizer="union"), granularity="component"),
    "layerwise, layer": described("layerwise", granularity="layer", range=(0, 1)),
    "layerwise, layer_group": described("layerwise", models(num_layers=7), granularity="layer_group", layer_groups=3),
    "layerwise, scales": described("layerwise", models(is_tied=True), granularity="layer", layer_scales=True),
    "layerwise, TIES of whole models": described("layerwise", method="ties_peft", trim="model"),
    "layerwise, TIES": described("layerwise", method="ties_peft", granularity="layer"),
    "m3": described("m3"),
    "m3, two experts": described("m3", models(("math", "code"))),
    "m3, one expert": described("m3", models(("math",), is_tied=True)),
    "m3, many experts": described("m3", models(tuple("abcdef"))),
    "m3, task arithmetic over orders": described("m3", methods=("task_arithmetic",), directions=("p_series",)),
    "m3, one of everything": described(
        "m3", methods=("m3_dare",), directions=("dirichlet",), alphas=(0.4,), exponents=(0.0,), scale=(1.0, 1.5)
    ),
    "m3, average": described("m3", models(tuple("abcde")), methods=("linear",)),
    "m3, one exponent": described("m3", methods=("m3_ties",), directions=("p_series",), exponents=(2.0,)),
    "m3, direction alone": described("m3", scale=(1.0, 1.0)),
    "m3, one order": described("m3", directions=("p_series",), orders=("text>math>code",)),
    "m3, orders of many experts": described("m3", models(tuple("abcdef")), orders=("a>b>c>d>e>f", "f>e>d>c>b>a")),
    "m3, shares": described("m3", k=0.6, density=(0.2, 0.8)),
    "m3, as its authors": described(
        "m3", methods=("m3_dare", "m3_ties_majority", "m3_dare_ties"), trim="model", density=(0.5, 0.8)
    ),
    "dis": described("dis", preset="d1m3r1"),
    "dis, one model twice": described("dis", models(num_layers=8), preset="d1m1r2", models=("math",)),
    "dis, blocks": described("dis", models(tuple("ab"), 6, is_tied=True), depth_granularity=3),
    "dis, keys": described("dis", models(max_layers=7), depth_granularity=2, repeats=2),
    "dis, of the base and one expert": described(
        "dis", models(num_layers=6, tokenizer="union"), models=("base", "text")
    ),
    "dis, layers in their own order": described("dis", models(num_layers=6, max_layers=8), permutations=False),
    "dis, layers left out": described("dis", models(num_layers=6, max_layers=6), layer_retention=False),
    "dis, scales of MLPs": described("dis", scale_of="mlp", scale_range=(0.0, 2.0)),
    "dis, scales of MLPs of the layers that are left": described(
        "dis", models(num_layers=6, max_layers=6), layer_retention=False, scale_of="mlp"
    ),
    "dis, drawn uniformly": described("dis", models(num_layers=6), scale_range=(1 / 3, 1.25), sampling="uniform"),
    "dis, as released": described("dis", preset="d1m3r1", scale_of="mlp", scale_range=(0.0, 2.0), sampling="uniform"),
    "dis, keys drawn uniformly": described(
        "dis", models(max_layers=7), depth_granularity=2, repeats=2, layer_retention=False, sampling="uniform"
    ),
    "hm3": described("hm3"),
    "hm3, of the base and one expert": described(
        "hm3", models(num_layers=6, tokenizer="union", is_tied=True), models=("base", "text"), max_jump=2
    ),
    "hm3, merged by vectors": described(
        "hm3",
        replace(models(), preferences=VECTORS),
        merged=MergedOptions(method="ties_weighted"),
    ),
    "hm3, merged": described("hm3", models(num_layers=6), merged=MergedOptions(), models=("math",)),
    "hm3, any order": described("hm3", models(num_layers=3), max_jump=None, min_path_length=4, max_path_length=4),
    "hm3, own order": described("hm3", models(num_layers=5), max_jump=0),
    "sfs": described("sfs", model="math"),
    "sfs, one expert": described("sfs", models(("math",), 7, is_tied=True)),
    "sfs, base": described("sfs", models(tokenizer="union"), model="base"),
    "layerwise, DARE": described("layerwise", method="dare_linear", density=0.3, mask_seed=5),
}
BUILT = {name: section.build(family) for name, (section, family) in EXAMPLES.items()}
spaces = pytest.mark.parametrize("space", BUILT.values(), ids=BUILT)
seeds = given(seed=st.integers(0, 2**32 - 1))
few = settings(max_examples=12)


def test_every_kind_of_space_is_an_example_here() -> None:
    assert {space.kind for space in BUILT.values()} == set(SPACES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_recipe_hashes(name: str) -> None:
    """Recipes and digests do not change between releases.

    Stored studies are resumed by their recipes' JSON and digests. The hashes are stored.

    A new example is added to `recipe_hashes.json`; a hash in that file never changes.
    """
    hashed = hashlib.sha256()
    for seed in range(10):
        recipe = BUILT[name].to_recipe(draw(BUILT[name], seed))
        hashed.update(json.dumps([recipe.digest, recipe.to_json()], sort_keys=True).encode())
    known = json.loads(Path(__file__).with_name("recipe_hashes.json").read_text())
    assert hashed.hexdigest() == known[name]


@pytest.mark.parametrize("kind", SPACES)
def test_a_kind_of_space_is_declared_by_a_section_of_that_kind(kind: str) -> None:
    section = SPACES[kind]
    assert issubclass(section, SpaceSection)
    assert get_args(section.model_fields["kind"].annotation) == (kind,)
    assert space(kind).kind == space(kind).describe().kind == kind
    plain = section(kind=kind, **({"model": "math"} if kind == "sfs" else {}))
    assert list(plain.contradictions()) == []
    assert section.model_validate(plain.model_dump()) == plain
    with pytest.raises(InvalidStudy, match="there are no experts; name at least one"):
        plain.build(models(()))


@pytest.mark.parametrize("name", EXAMPLES)
def test_recipes_use_the_methods_that_the_section_announces(name: str) -> None:
    section, _ = EXAMPLES[name]
    recipes = [BUILT[name].to_recipe(draw(BUILT[name], seed)) for seed in range(10)]
    used = {merge.method for recipe in recipes for merge in recipe.merges()}
    assert used - {"passthrough"} <= set(section.merge_methods)


def draw(space: SearchSpace, seed: int) -> dict[str, Any]:
    return space.parameters.sample(np.random.default_rng(seed))


# A component without tensors has the merge of another one.
PLACED = [name for name in EXAMPLES if name.startswith(("lfs", "layerwise", "sfs")) and "no norms" not in name]


@pytest.mark.parametrize("name", PLACED)
def test_parameters_change_what_their_place_says(name: str) -> None:
    """If one parameter changes, so do only the layers, the part and the expert that its place names."""
    (section, family), space = EXAMPLES[name], BUILT[name]
    checked: set[str] = set()
    for seed in range(3):  # not every parameter exists in every configuration
        rng = np.random.default_rng(seed)
        configuration = space.parameters.sample(rng)
        before = space.to_recipe(configuration)
        for parameter in configuration.keys() - checked:
            changed = {**configuration, parameter: space.parameters[parameter].sample(rng)}
            if space.parameters.active(changed) != tuple(configuration):  # others begin or cease to exist
                continue
            place = section.place_of(parameter, experts=family.experts, num_layers=family.num_layers)
            for layer, part, merges in differences(before, space.to_recipe(changed)):
                checked.add(parameter)
                if place.layers is not None:
                    assert place.layers.start <= layer < place.layers.stop, parameter
                if place.part in COMPONENTS:
                    assert part == place.part, parameter
                if place.expert is not None:
                    assert any(source.model == place.expert for merge in merges for source in merge.sources), parameter
    assert checked


def differences(one: Recipe, other: Recipe) -> Iterator[tuple[int, str, tuple[Merge, ...]]]:
    """Layer, part and both merges of each difference in layers; merges of single tensors are left out."""
    for index, (before, after) in enumerate(zip(one.layers, other.layers, strict=True)):
        for part in COMPONENTS:
            if before.component(part) != after.component(part):
                yield index, part, (before.component(part), after.component(part))


@pytest.mark.parametrize(
    ("kind", "options", "parameter", "place"),
    [
        ("lfs", {"layer_groups": 3}, "g2.mlp.ties.lambda", (3, 5, "mlp", None)),
        ("lfs", {"layer_groups": 3}, "g3.use.math", (5, 7, None, "math")),
        ("lfs", {}, "g1.norm.linear.weight.text", (0, 2, "norm", "text")),
        ("lfs", {"component_groups": 1}, "g1.layer.ties.k", (0, 2, None, None)),
        ("lfs", {}, "g1.mlp.ties.lambda", (0, 2, "mlp", None)),
        ("layerwise", {}, "model.layers.4.self_attn.k_proj.weight.math", (4, 5, "self_attn.k_proj", "math")),
        ("layerwise", {}, "model.norm.weight.a.b", (None, None, "model.norm", "a.b")),
        ("layerwise", {"granularity": "component"}, "layers.4.mlp.text", (4, 5, "mlp", "text")),
        ("layerwise", {"granularity": "layer"}, "layers.4.text", (4, 5, None, "text")),
        ("layerwise", {"granularity": "layer_group", "layer_groups": 7}, "g7.text", (6, 7, None, "text")),
        ("layerwise", {"granularity": "layer"}, "embedding.text", (None, None, "embedding", "text")),
        ("layerwise", {"layer_scales": True}, "scale:3", (3, 4, None, None)),
        ("sfs", {"model": "math"}, "layers.5.output", (5, 6, None, None)),
        ("dis", {}, "b2.use.1.text", (1, 2, None, "text")),
        ("dis", {}, "b2.key.1.2.text", (1, 2, None, "text")),
        ("dis", {}, "b2.order", (None, None, None, None)),
        ("m3", {}, "quantile.math", (None, None, None, None)),
        ("hm3", {}, "step3.layer", (None, None, None, None)),
    ],
)
def test_place_of_a_parameter(
    kind: str, options: dict[str, Any], parameter: str, place: tuple[int | None, int | None, str | None, str | None]
) -> None:
    """The place is read from the name that the space gives; an expert may be called as a coefficient or have dots."""
    experts = ("math", "text", "lambda", "b", "a.b")
    found = SPACES[kind](kind=kind, **options).place_of(parameter, experts=experts, num_layers=7)
    layers = (None, None) if found.layers is None else (found.layers.start, found.layers.stop)
    assert (*layers, found.part, found.expert) == place


@spaces
@few
@seeds
def test_decoded_recipe_is_canonical(space: SearchSpace, seed: int) -> None:
    """Every configuration decodes to a canonical recipe that survives JSON."""
    recipe = space.to_recipe(draw(space, seed))
    again = Recipe.from_json(json.loads(json.dumps(recipe.to_json())))
    assert again == recipe
    assert again.canonical() == recipe


@spaces
@few
@seeds
def test_recipe_is_read_back(space: SearchSpace, seed: int) -> None:
    """A recipe is read back as a configuration of the same merge."""
    recipe = space.to_recipe(draw(space, seed))
    found = space.from_recipe(recipe)
    assert found is not None
    space.parameters.check(found)
    assert space.to_recipe(found).digest == recipe.digest


@spaces
@few
@seeds
def test_a_repaired_configuration_is_the_one_of_its_merge(space: SearchSpace, seed: int) -> None:
    rng = np.random.default_rng(seed)
    drawn = space.parameters.build(lambda parameter: parameter.sample(rng))
    repaired = space.parameters.repair(drawn)
    space.parameters.check(repaired)
    assert space.parameters.repair(repaired) == repaired
    assert space.to_recipe(repaired) == space.to_recipe(drawn)
    if space.parameters.structure is not None:
        assert space.from_recipe(space.to_recipe(drawn)) == repaired
        assert space.parameters.repair(draw(space, seed)) == draw(space, seed)


@spaces
def test_seed_decides_the_recipe(space: SearchSpace) -> None:
    """The same seed gives the same recipe, another seed another one."""
    assert space.to_recipe(draw(space, 3)) == space.to_recipe(draw(space, 3))
    assert len({space.to_recipe(draw(space, seed)).digest for seed in range(20)}) > 10


@spaces
def test_what_its_parameters_refuse_is_refused(space: SearchSpace) -> None:
    drawn = (draw(space, seed) for seed in range(20))  # some methods take no numbers
    kind = Float if any(isinstance(parameter, Float) for parameter in space.parameters) else Integer
    numbers = {parameter.name for parameter in space.parameters if isinstance(parameter, kind)}
    configuration = next(found for found in drawn if numbers & found.keys())
    name = min(numbers & configuration.keys())
    value, parameter = configuration[name], space.parameters[name]
    assert isinstance(parameter, kind)
    for wrong in (parameter.high + 0.5, parameter.low - 0.5, "high", float("nan")):
        with pytest.raises(InvalidConfiguration, match=rf"{name}={wrong!r} is not accepted; give a (whole )?number in"):
            space.to_recipe({**configuration, name: wrong})
    with pytest.raises(InvalidConfiguration, match=rf"'{name}' is missing"):
        space.to_recipe({key: v for key, v in configuration.items() if key != name})
    assert value == configuration[name]


@pytest.mark.parametrize("name", EXAMPLES)
@few
@seeds
def test_layer_is_merged_from_its_own(name: str, seed: int) -> None:
    """Every layer is merged from the same layer of known models."""
    (section, _), space = EXAMPLES[name], BUILT[name]
    recipe = space.to_recipe(draw(space, seed))
    description = space.describe()
    assert {source.model for merge in recipe.merges() for source in merge.sources} <= set(recipe.models)
    if section.changes_layers:
        return
    assert len(recipe.layers) == description.layer_groups[-1].stop
    for index, layer in enumerate(recipe.layers):
        assert {s.layer for merge in (layer.attention, layer.mlp, layer.norm) for s in merge.sources} == {index}
    assert {s.layer for merge in (recipe.embedding, recipe.head) for s in merge.sources} == {None}


@spaces
def test_a_recipe_of_other_models_or_depth_is_not_contained(space: SearchSpace) -> None:
    recipe = space.to_recipe(draw(space, 0))
    assert space.from_recipe(replace(recipe, models=dict.fromkeys(recipe.models, "other"))) is None
    assert space.from_recipe(replace(recipe, layers=(*recipe.layers, recipe.layers[0]))) is None


@spaces
def test_a_recipe_with_its_models_under_other_names_is_contained(space: SearchSpace) -> None:
    recipe = space.to_recipe(draw(space, 0))
    names = {alias: f"my {alias}" for alias in recipe.models}
    models = {**recipe.models, **{names[alias]: fingerprint for alias, fingerprint in recipe.models.items()}}

    def rename(merge: Merge) -> Merge:
        return replace(merge, sources=tuple(Source(names[source.model], source.layer) for source in merge.sources))

    renamed = replace(recipe, models=models, base=names[recipe.base]).rewritten(rename)
    renamed = replace(renamed, models={names[a]: fingerprint for a, fingerprint in recipe.models.items()}).canonical()
    assert set(renamed.models) == set(names.values())
    found = space.from_recipe(renamed)
    assert found is not None
    assert space.to_recipe(found).digest == renamed.digest


@spaces
def test_a_space_can_be_sent_to_another_process(space: SearchSpace) -> None:
    again = pickle.loads(pickle.dumps(space))
    assert again.to_recipe(draw(again, 5)) == space.to_recipe(draw(space, 5))


@spaces
def test_layer_groups_cover_the_model_in_order(space: SearchSpace) -> None:
    groups = space.describe().layer_groups
    assert groups[0].start == 0
    assert all(before.stop == after.start for before, after in itertools.pairwise(groups))
    assert all(group.start < group.stop for group in groups)
