"""DIS: orders of candidates, paths within the limit, draws near the sources, and what is refused."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidConfiguration, InvalidStudy
from search_spaces.parameters import Categorical, Float, Integer
from search_spaces.recipe import Recipe
from search_spaces.spaces.base import SearchedModels, SearchSpace
from search_spaces.spaces.dis import DisSection
from search_spaces.spaces.dis_paths import MAX_ORDERS, SCALES, first_order, num_orders, order_at, place_of
from search_spaces.spaces.layers import path_of_recipe
from tests.search_spaces.spaces.families import models, space

ORDERS = [(1, 1), (1, 3), (3, 1), (2, 2), (3, 2), (4, 1), (2, 3)]


def dis(family: SearchedModels | None = None, **options: Any) -> Any:
    return space("dis", family, **options)


def path(recipe: Recipe) -> list[tuple[Any, ...]]:
    """The model, layer and scale of each layer."""
    return [(*layer.mlp.sources[0].__dict__.values(), layer.scale) for layer in recipe.layers]


def mlp_path(recipe: Recipe) -> list[tuple[Any, ...]]:
    """The model and layer of each layer, and the scale of its MLP; no layer scales the stream."""
    assert {layer.scale for layer in recipe.layers} == {1.0}
    return [(*layer.mlp.sources[0].__dict__.values(), layer.mlp_scale) for layer in recipe.layers]


def uniform(space: SearchSpace, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return space.parameters.build(lambda parameter: parameter.sample(rng))


# Orders.


@pytest.mark.parametrize(("num_candidates", "repeats"), ORDERS)
def test_orders_are_multiset_permutations(num_candidates: int, repeats: int) -> None:
    """Orders are the permutations of a multiset in lexicographic order."""
    copies = [c for c in range(num_candidates) for _ in range(repeats)]
    expected = sorted(set(itertools.permutations(copies)))
    assert num_orders(num_candidates, repeats) == len(expected)  # P = (D M R)! / (R!)^(M D), section 3.2.2
    assert [order_at(place, num_candidates, repeats) for place in range(len(expected))] == expected
    assert [place_of(order, num_candidates, repeats) for order in expected] == list(range(len(expected)))


@pytest.mark.parametrize(("num_candidates", "repeats"), [(1, 2), (3, 1), (2, 2), (3, 2)])
def test_a_path_is_spelled_by_the_first_of_its_orders(num_candidates: int, repeats: int) -> None:
    spellings: dict[Any, Any] = {}
    for place in range(num_orders(num_candidates, repeats)):
        order = order_at(place, num_candidates, repeats)
        for bits in itertools.product((False, True), repeat=num_candidates * repeats):
            seen: Counter[Any] = Counter()
            used = []
            for candidate in order:
                if bits[candidate * repeats + seen[candidate]]:
                    used.append(candidate)
                seen[candidate] += 1
            spellings.setdefault(tuple(used), []).append((order, bits))
    for used, found in spellings.items():
        bits, order = first_order(used, num_candidates, repeats)
        assert (order, bits) in found
        assert bits == max(bits for _, bits in found)  # the first copies
        assert order == min(order for order, own in found if own == bits)


def test_a_path_with_more_than_r_copies_is_refused() -> None:
    with pytest.raises(ValueError, match="more than 2 times"):
        first_order((0, 0, 0), 1, 2)


# Configurations.


def test_a_block_hands_on_its_last_layer_times_its_scale() -> None:
    own = dis(models(num_layers=2, max_layers=3))
    chosen = dict.fromkeys(own.parameters.names, False) | {"b1.order": 0, "b2.order": 0, "b1.scale": 1.25}
    chosen |= {"b1.use.0.math": True, "b1.use.0.text": True, "b2.use.1.code": True}
    assert path(own.to_recipe(chosen)) == [("math", 0, 1.0), ("text", 0, 1.25), ("code", 1, 1.0)]
    assert "b2.scale" not in own.parameters  # the final norm takes it off again


def test_parameters_of_a_block_are_bits_an_order_and_a_scale() -> None:
    own = dis(models(num_layers=6), depth_granularity=2, models=("math", "base"))
    found = {p.name: p for p in own.parameters if p.name[:2] == "b2"}
    bits = [f"b2.use.{layer}.{model}" for layer in (2, 3) for model in ("math", "base")]
    assert list(found) == [*bits, "b2.order", "b2.scale"]
    assert found[bits[0]] == Categorical(bits[0], (False, True))
    assert found["b2.order"] == Integer("b2.order", 0, math.factorial(4) - 1, default=0)
    assert found["b2.scale"] == Float("b2.scale", 0.5, 1.5, default=1.0)


def test_single_order_has_no_parameter() -> None:
    """One model without repeats has one order, and no parameter for it."""
    assert [p.name for p in dis(models=("math",)).parameters][:2] == ["b1.use.0.math", "b1.scale"]


def test_more_orders_than_a_million_are_keys() -> None:
    few, many = dis(depth_granularity=4, models=("math", "code")), dis(depth_granularity=4)
    assert few.paths.num_orders == math.factorial(8) <= MAX_ORDERS < many.paths.num_orders
    assert "b1.order" in few.parameters
    keys = [p for p in many.parameters if ".key." in p.name]
    assert len(keys) == 12
    assert {(key.low, key.high) for key in keys} == {(0.0, 1.0)}


def test_configuration_is_a_path() -> None:
    """A configuration is a path of the chosen layers in their order."""
    own = dis(models(num_layers=2))
    chosen = dict.fromkeys(own.parameters.names, False) | {"b1.order": 0, "b1.scale": 0.75}
    chosen |= {"b2.use.1.math": True, "b2.use.1.text": True, "b2.order": 5}  # text, code, math
    recipe = own.to_recipe(chosen)
    # The first block uses none, so it keeps the base's layer.
    assert path(recipe) == [("base", 0, 0.75), ("text", 1, 1.0), ("math", 1, 1.0)]
    assert recipe.embedding.sources[0].model == "base"
    assert recipe.head.sources[0].model == "math"


def test_blocks_of_several_layers_reorder_and_repeat_them() -> None:
    options = {"depth_granularity": 2, "repeats": 2, "models": ("math",)}
    own, roomy = dis(models(num_layers=2), **options), dis(models(num_layers=2, max_layers=4), **options)
    chosen: dict[str, Any] = {f"b1.use.{layer}.{copy}.math": True for layer in (0, 1) for copy in (1, 2)}
    chosen["b1.order"] = place_of((1, 0, 0, 1), 2, 2)
    found = [(layer, scale) for _, layer, scale in path(roomy.to_recipe(chosen))]
    assert found == [(1, 1.0), (0, 1.0), (0, 1.0), (1, 1.0)]
    assert len(own.to_recipe(chosen).layers) == own.max_layers == 3


def test_empty_block_is_left_out() -> None:
    """A block without layers is left out where layers are not retained."""
    own = dis(models(num_layers=3), layer_retention=False)
    none: dict[str, Any] = dict.fromkeys(own.parameters.names, False) | {f"b{b}.order": 0 for b in (1, 2, 3)}
    none |= {f"b{b}.scale": 1.5 for b in (1, 2)}
    some = none | {"b1.use.0.code": True, "b2.use.1.code": True}
    assert path(own.to_recipe(some)) == [("code", 0, 1.5), ("code", 1, 1.0)]
    # The scales of a block that is left out, and of the last one, have no influence.
    assert own.parameters.repair(some)["b2.scale"] == 1.0
    assert own.parameters.repair(none | {"b2.use.1.code": True})["b1.scale"] == 1.0
    assert path(own.to_recipe(none)) == [("math", 0, 1.0)]  # at least one layer is left


@pytest.mark.parametrize("options", [{}, {"depth_granularity": 2, "repeats": 2}])
def test_without_permutations_layers_keep_their_order(options: dict[str, Any]) -> None:
    """Without permutations the layers of a block follow each other as in their models; other paths are not found."""
    family = models(num_layers=8, max_layers=16)
    ordered, free = dis(family, permutations=False, **options), dis(family, **options)
    assert not any(".order" in name or ".key" in name for name in ordered.parameters.names)
    found = [free.to_recipe(free.parameters.sample(np.random.default_rng(seed))) for seed in range(60)]
    kept = [recipe for recipe in found if ordered.from_recipe(recipe) is not None]
    assert 0 < len(kept) < len(found)
    for seed in range(60):
        recipe = ordered.to_recipe(ordered.parameters.sample(np.random.default_rng(seed)))
        layers = [layer for _, layer, _ in path(recipe)]
        assert layers == sorted(layers)
        assert free.from_recipe(recipe) is not None


@pytest.mark.parametrize("options", [{}, {"layer_retention": False}, {"depth_granularity": 2, "repeats": 2}])
def test_deep_path_is_shortened(options: dict[str, Any]) -> None:
    """The repair of a path that is too deep leaves out layers."""
    own = dis(models(num_layers=8, max_layers=9), **options)
    for seed in range(50):
        drawn = uniform(own, seed)
        limited = path(own.to_recipe(drawn))
        whole = path(dis(models(num_layers=8, max_layers=1000), **options).to_recipe(drawn))
        assert 1 <= len(limited) <= 9
        steps = iter([step[:2] for step in whole])
        assert all(step[:2] in steps for step in limited)  # the same layers in the same order, without some
        assert len(limited) == min(9, len(whole))


def test_equal_paths_have_one_configuration() -> None:
    own = dis(models(num_layers=2, max_layers=4))
    rest = {name: False for name in own.parameters.names if name.startswith("b2.use")} | {"b2.order": 0}
    found: dict[Any, Any] = {}
    bits = ("b1.use.0.math", "b1.use.0.code", "b1.use.0.text")
    for used in itertools.product((False, True), repeat=3):
        for order in range(6):
            spelled = dict(zip(bits, used, strict=True)) | {"b1.order": order, "b1.scale": 0.9} | rest
            repaired = own.parameters.repair(spelled)
            found.setdefault(own.to_recipe(spelled).digest, set()).add(tuple(repaired.values()))
    assert len(found) == 1 + 3 + 6 + 6
    assert {len(spellings) for spellings in found.values()} == {1}


# Sources and draws.


@pytest.mark.parametrize("options", [{}, {"depth_granularity": 2}, {"depth_granularity": 4, "repeats": 2}])
def test_sources_are_configurations(options: dict[str, Any]) -> None:
    """Every source is a configuration of the space, and no published merge is."""
    family = models()
    own = dis(family, **options)
    for origin, label, recipe in all_baselines(
        base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=4
    ):
        found = own.from_recipe(recipe)
        assert (found is not None) == (origin == "source"), label
        if found is not None:
            assert {value for name, value in found.items() if name.endswith("scale")} <= {1.0}
            assert {value for name, value in found.items() if name.endswith("order")} <= {0}


def test_a_source_whose_layers_no_block_may_use_is_not_contained() -> None:
    family = models()
    own = dis(family, models=("math",))
    sources = all_baselines(base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=4)
    assert [label for _, label, recipe in sources if own.from_recipe(recipe)] == ["base", "expert:math"]
    bare = dis(family, layer_retention=False)
    assert bare.from_recipe(sources[0].recipe) is None


def test_draws_are_near_one_source_in_its_own_order() -> None:
    own = dis(models(num_layers=40))
    depths, distances, scales = [], [], []
    for seed in range(200):
        drawn = path(own.to_recipe(own.parameters.sample(np.random.default_rng(seed))))
        depths.append(len(drawn))
        nearest = max(Counter(model for model, _, _ in drawn).values())
        distances.append(1 - nearest / len(drawn))
        scales += [scale for _, _, scale in drawn]
    assert min(depths) >= 40
    assert max(depths) <= own.max_layers == 50
    assert np.median(distances) < 0.2
    assert max(distances) > 0.5
    assert np.mean(np.array(scales) == 1) > 0.8
    assert min(scales) >= SCALES[0]
    assert max(scales) <= SCALES[1]
    assert len(set(depths)) == 11  # every depth is drawn


@settings(max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), num_layers=st.sampled_from((1, 2, 6)), room=st.integers(0, 4))
def test_no_draw_is_too_deep(seed: int, num_layers: int, room: int) -> None:
    own = dis(models(num_layers=num_layers, max_layers=num_layers + room))
    recipe = own.to_recipe(own.parameters.sample(np.random.default_rng(seed)))
    assert num_layers <= len(recipe.layers) <= num_layers + room


def test_without_scales_none_is_searched() -> None:
    own = dis(scales=False)
    assert not [p for p in own.parameters if p.name.endswith("scale")]
    assert {layer.scale for layer in own.to_recipe(uniform(own, 0)).layers} == {1.0}
    assert own.from_recipe(dis().to_recipe(uniform(dis(), 0))) is None


# Scales of MLPs, and the range of scales.


def test_the_scale_of_an_mlp_is_that_of_the_last_layer() -> None:
    """The scale of an mlp is that of the last layer of each block."""
    own = dis(models(num_layers=2, max_layers=3), scale_of="mlp")
    chosen = dict.fromkeys(own.parameters.names, False) | {"b1.order": 0, "b2.order": 0, "b1.scale": 1.25}
    chosen |= {"b1.use.0.math": True, "b1.use.0.text": True, "b2.use.1.code": True, "b2.scale": 0.5}
    recipe = own.to_recipe(chosen)
    # The final norm does not cancel the last one.
    assert mlp_path(recipe) == [("math", 0, 1.0), ("text", 0, 1.25), ("code", 1, 0.5)]
    assert own.from_recipe(recipe) == own.parameters.repair(chosen)
    assert own.parameters.repair(chosen)["b2.scale"] == 0.5
    scaled = [layer.get("mlp_scale") for layer in recipe.to_json()["layers"]]
    assert scaled == [None, 1.25, 0.5]


def test_a_block_without_layers_has_no_scale_of_an_mlp() -> None:
    own = dis(models(num_layers=3), layer_retention=False, scale_of="mlp")
    chosen: dict[str, Any] = dict.fromkeys(own.parameters.names, False) | {f"b{b}.order": 0 for b in (1, 2, 3)}
    chosen |= {f"b{b}.scale": 0.75 for b in (1, 2, 3)} | {"b2.use.1.code": True}
    assert mlp_path(own.to_recipe(chosen)) == [("code", 1, 0.75)]
    assert [own.parameters.repair(chosen)[f"b{b}.scale"] for b in (1, 2, 3)] == [1.0, 0.75, 1.0]


def test_a_merge_with_scales_of_the_other_kind_is_not_contained() -> None:
    stream, mlp = dis(), dis(scale_of="mlp")
    chosen = uniform(stream, 0)
    assert stream.from_recipe(stream.to_recipe(chosen)) is not None
    assert mlp.from_recipe(stream.to_recipe(chosen)) is None
    chosen = uniform(mlp, 0)
    assert mlp.from_recipe(mlp.to_recipe(chosen)) is not None
    assert stream.from_recipe(mlp.to_recipe(chosen)) is None
    recipe = stream.to_recipe(uniform(stream, 0))
    assert path_of_recipe(recipe, scale_of="stream") == path(recipe)
    assert path_of_recipe(recipe, scale_of="mlp") is None
    ones = {name: 1.0 if name.endswith("scale") else value for name, value in uniform(mlp, 1).items()}
    of_stream = {name: value for name, value in ones.items() if name != "b4.scale"}
    assert mlp.to_recipe(ones) == stream.to_recipe(of_stream), "without scales there is no difference"


@pytest.mark.parametrize("scale_of", ["stream", "mlp"])
def test_the_range_of_scales_is_an_option(scale_of: str) -> None:
    own = dis(models(num_layers=40), scale_of=scale_of, scale_range=(0.95, 1.02))
    assert own.parameters["b1.scale"] == Float("b1.scale", 0.95, 1.02, default=1.0)
    drawn = [own.parameters.sample(np.random.default_rng(seed)) for seed in range(50)]
    scales = {value for each in drawn for name, value in each.items() if name.endswith(".scale")}
    assert (min(scales), max(scales)) == (0.95, 1.02)
    wide = dis(scale_of=scale_of)
    assert own.paths.scale_range != wide.paths.scale_range == SCALES
    assert dis(scale_of=scale_of, scale_range=(0.9, 1.1)).from_recipe(wide.to_recipe(uniform(wide, 0))) is None


def test_an_end_of_the_range_is_not_rounded_out_of_it() -> None:
    own = dis(scale_range=(1 / 3, 1.25))
    found = own.parameters.repair(uniform(own, 0) | {"b1.scale": 1 / 3, "b2.scale": 0.12345678 + 1})
    own.parameters.check(found)
    assert (found["b1.scale"], found["b2.scale"]) == (1 / 3, 1.123457)


# Uniform draws.


@settings(max_examples=50)
@given(seed=st.integers(0, 2**32 - 1), num_layers=st.sampled_from((1, 2, 6)), room=st.integers(0, 4))
@pytest.mark.parametrize(
    "options", [{}, {"layer_retention": False}, {"scale_of": "mlp", "scale_range": (0.0, 2.0)}, {"scales": False}]
)
def test_a_uniform_draw_is_the_repaired_one(options: dict[str, Any], seed: int, num_layers: int, room: int) -> None:
    """A uniform draw is the repaired one of each parameter by itself."""
    family = models(num_layers=num_layers, max_layers=num_layers + room)
    own = dis(family, sampling="uniform", **options)
    drawn = own.parameters.sample(np.random.default_rng(seed))
    assert drawn == own.parameters.repair(uniform(own, seed)) == own.parameters.repair(drawn)
    recipe = own.to_recipe(drawn)
    assert 1 <= len(recipe.layers) <= num_layers + room
    assert own.from_recipe(recipe) == drawn


def test_uniform_draws_have_every_path() -> None:
    """The paths of a block of three models have the shares that uniform bits and orders give them.

    A set of layers has the probability 1/8, and each of its orders an equal share of that.
    """
    own = dis(models(num_layers=400, max_layers=1200), sampling="uniform", scale_range=(0.5, 2.0))
    blocks = [
        block
        for seed in range(10)
        for block in own.paths.blocks(own.parameters.sample(np.random.default_rng(seed)))[:-1]
    ]
    counts = Counter(block.path for block in blocks)
    assert len(counts) == 1 + 3 + 6 + 6
    for used, count in counts.items():
        expected = len(blocks) / 8 / math.factorial(len(used))
        assert abs(count - expected) < 5 * math.sqrt(expected), used
    scales = np.sort([block.scale for block in blocks])
    quantiles = (np.arange(len(scales)) + 0.5) / len(scales)
    distance = np.abs((scales - 0.5) / 1.5 - quantiles).max()
    assert distance < 2 / math.sqrt(len(scales))  # Kolmogorov and Smirnov: exceeded with probability 0.0007


def test_uniform_draws_of_a_deep_model_end_at_the_limit() -> None:
    own = dis(models(num_layers=40), preset="d1m3r1", sampling="uniform")
    depths = [own.paths.depth(own.paths.blocks(own.parameters.sample(np.random.default_rng(s)))) for s in range(50)]
    assert set(depths) == {own.max_layers} == {50}


@pytest.mark.parametrize(("preset", "names", "share"), [("d1m3r1", None, 1.0), ("d1m1r2", ("math",), 0.44)])
def test_share_of_uniform_draws_that_are_too_deep(preset: str, names: tuple[str, ...] | None, share: float) -> None:
    """The shares that docs/reference/spaces.md states, of draws in 40 layers that have more than 50."""
    own = dis(models(num_layers=40, max_layers=400), preset=preset, models=names, sampling="uniform")
    depths = [own.paths.depth(own.paths.blocks(own.parameters.sample(np.random.default_rng(s)))) for s in range(1000)]
    assert np.mean(np.array(depths) > 50) == pytest.approx(share, abs=0.005)


def test_an_order_that_does_not_exist_is_refused() -> None:
    own = dis()
    with pytest.raises(InvalidConfiguration, match=r"b1.order=6 is not accepted; give a whole number in \[0, 5\]"):
        own.to_recipe({**uniform(own, 0), "b1.order": 6})


# Presets and bad input.


def test_presets_are_the_published_configurations() -> None:
    first, second = dis(preset="d1m3r1"), dis(preset="d1m1r2", models=("math",))
    assert (first.paths.num_blocks, first.paths.num_copies, first.paths.num_orders) == (4, 3, 6)
    assert (second.paths.num_blocks, second.paths.num_copies, second.paths.num_orders) == (4, 2, 1)
    assert dis(models(num_layers=40), preset="d1m3r1").max_layers == 50  # section B.2: limits.max_layers of the paper


@pytest.mark.parametrize(
    ("options", "family", "message"),
    [
        (
            {"depth_granularity": 5},
            models(num_layers=32),
            "5 does not divide the 32 layers .* use 1, 2, 4, 8, 16 or 32",
        ),
        ({"depth_granularity": 2}, models(num_layers=1), "2 does not divide the 1 layers of the models; use 1"),
        ({"models": ("math", "other")}, None, "'other' is not a model of the study; give .* math, code, text, base"),
        ({}, models(max_layers=3), "3 is below the 4 layers of the sources, .* give at least 4"),
        ({"preset": "d1m1r2"}, None, "preset: d1m1r2 takes 1 models; name 1 of them"),
        ({"preset": "d1m3r1"}, models(("a", "b")), "preset: d1m3r1 takes 3 models; the study has only 2 experts"),
    ],
)
def test_what_does_not_fit_the_models_is_refused(options: dict[str, Any], family: SearchedModels, message: str) -> None:
    with pytest.raises(InvalidStudy) as refused:
        dis(family, **options)
    (problem,) = refused.value.problems
    assert re.fullmatch(message, problem.message)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"models": ("math", "math")}, "search_space.models.1", "math is given twice"),
        ({"preset": "d1m3r1", "repeats": 2}, "search_space.repeats", "preset: d1m3r1 means repeats=1, but 2 is given"),
        ({"preset": "d1m1r2", "depth_granularity": 2}, "search_space.depth_granularity", "but 2 is given"),
        ({"preset": "d1m3r1", "models": ("a",)}, "search_space.models", "means 3 models, but 1 is given"),
        ({"preset": "d1m3r1", "layer_retention": False}, "search_space.layer_retention", "means layer_retention: true"),
        ({"preset": "d1m3r1", "permutations": False}, "search_space.permutations", "means permutations: true"),
        ({"preset": "d1m3r1", "scales": False}, "search_space.scales", "means scales: true, but false is given"),
        (
            {"scale_range": (0, 2)},
            "search_space.scale_range",
            "[0.0, 2.0] contains 0, which as a scale of the residual stream cannot be folded into the weights of an "
            "ordinary checkpoint; give a lowest scale above 0, or write scale_of: mlp",
        ),
        ({"scale_range": (-1, 2)}, "search_space.scale_range", "[-1.0, 2.0] is not accepted; give a lowest scale of"),
        ({"scale_range": (1.1, 2)}, "search_space.scale_range", "[1.1, 2.0] is not accepted; give [lowest, highest]"),
        ({"scale_range": (1, 1)}, "search_space.scale_range", "[1.0, 1.0] is not accepted; give [lowest, highest]"),
        ({"scale_range": (1.5, 0.5)}, "search_space.scale_range", "with 1, the scale of the sources, between them"),
        ({"scales": False, "scale_of": "mlp"}, "search_space.scale_of", "has no effect with scales: false"),
        ({"scales": False, "scale_range": (0.9, 1.1)}, "search_space.scale_range", "has no effect with scales: false"),
    ],
)
def test_contradictions_are_told(options: dict[str, Any], field: str, message: str) -> None:
    (problem,) = DisSection(kind="dis", **options).contradictions()
    assert problem.field == field
    assert message in problem.message


def test_options_as_released_do_not_contradict_each_other() -> None:
    section = DisSection(kind="dis", preset="d1m3r1", scale_of="mlp", scale_range=(0, 2), sampling="uniform")
    assert list(section.contradictions()) == []
    assert DisSection(kind="dis").scaled_by == "scales"
    assert section.scaled_by is None, "MLPs can be scaled in all models whose layers paths may reorder"
