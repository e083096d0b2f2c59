from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.methods import METHODS
from search_spaces.parameters import Categorical
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.layers import split_layers
from search_spaces.spaces.lfs import LfsMethod, LfsSpace
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS, SEED
from tests.search_spaces.spaces import families

EXPERTS = ("math", "code", "text")
FINGERPRINTS = {"base": "0", "math": "1", "code": "2", "text": "3"}


def space(
    experts: tuple[str, ...] = EXPERTS,
    num_layers: int = 2,
    layer_groups: int = 1,
    component_groups: int = 1,
    **arguments: Any,
) -> LfsSpace:
    return LfsSpace(
        base="base",
        experts=experts,
        fingerprints=FINGERPRINTS,
        num_layers=num_layers,
        layer_groups=layer_groups,
        component_groups=component_groups,
        **arguments,
    )


def use(*experts: str) -> dict[str, bool]:
    return {f"g1.use.{expert}": expert in experts for expert in EXPERTS}


def head(lfs: LfsSpace, configuration: Mapping[str, Any]) -> Merge:
    return lfs.to_recipe(configuration).head


@pytest.mark.parametrize(
    ("num_layers", "num_groups", "sizes"),
    [(40, 4, [10, 10, 10, 10]), (7, 3, [3, 2, 2]), (6, 4, [2, 2, 1, 1]), (3, 3, [1, 1, 1]), (5, 1, [5])],
)
def test_groups_are_as_even_as_possible(num_layers: int, num_groups: int, sizes: list[int]) -> None:
    groups = split_layers(num_layers, num_groups)
    assert [group.stop - group.start for group in groups] == sizes
    assert groups[-1].stop == num_layers


def test_groups_are_labelled_as_people_count_layers() -> None:
    assert [group.label for group in split_layers(4, 3)] == ["layers 1-2", "layer 3", "layer 4"]


def test_paper_preset_is_the_published_space() -> None:
    lfs = space(num_layers=40, layer_groups=4, component_groups=3, preset="paper")
    ranges = {(p.name.split(".", 2)[-1], p.low, p.high) for p in lfs.parameters if not isinstance(p, Categorical)}
    assert ranges == {
        ("task_arithmetic.lambda", 0.0, 1.0),
        ("ties.lambda", 0.0, 1.0),
        ("ties.k", 0.1, 0.99),
        ("slerp.t", 0.0, 1.0),
        *((f"linear.weight.{expert}", 0.0, 1.0) for expert in EXPERTS),
    }
    description = lfs.describe()
    assert [group.label for group in description.layer_groups] == [
        "layers 1-10",
        "layers 11-20",
        "layers 21-30",
        "layers 31-40",
    ]
    assert list(description.component_groups) == ["mlp", "attention", "norm"]
    # Per group: a method, a bit for each expert, a pair; 3 components of 1 + 2 + 1 + 3 numbers.
    assert len(lfs.parameters) == 4 * (1 + 3 + 1 + 3 * 7)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_groups": 2, "component_groups": 3}, "preset: paper means layer_groups=4, but 2 is given"),
        ({"layer_groups": 4, "component_groups": 1}, "preset: paper means component_groups=3, but 1 is given"),
        ({"layer_groups": 4, "component_groups": 3, "methods": ("ties",)}, r"methods=\[.*\], but \[ties\] is given"),
    ],
)
def test_what_contradicts_the_paper_preset_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy, match=message):
        space(num_layers=8, preset="paper", **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"layer_groups": 9, "num_layers": 6}, "^search_space.layer_groups: 9 for a model of 6 layers; use 1 to 6"),
        ({"layer_groups": 0}, "layer_groups: 0 for a model of 2 layers"),
        ({"component_groups": 2}, "component_groups: 2 is not accepted; use 1 or 3"),
        ({"methods": ("ties", "dare")}, r"unknown methods \['dare'\]; available: task_arithmetic, ties, slerp, linear"),
        ({"methods": ()}, "there are no methods"),
        ({"experts": ()}, "models.experts: there are no experts"),
        (
            {"experts": ("math",), "selection": "all"},
            r"search_space.selection: all needs two experts for methods of two models \(slerp\)",
        ),
    ],
)
def test_a_space_that_cannot_be_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidStudy, match=message):
        space(**arguments)


def test_task_arithmetic_has_one_lambda() -> None:
    """Task arithmetic has one lambda for the experts that take part."""
    configuration = {"g1.method": "task_arithmetic", **use("math", "text"), "g1.layer.task_arithmetic.lambda": 0.25}
    assert head(space(), configuration) == Merge("task_arithmetic", (Source("math"), Source("text")), {"lambda": 0.25})


def test_ties_has_a_lambda_and_a_share_to_keep() -> None:
    configuration = {"g1.method": "ties", **use("code"), "g1.layer.ties.lambda": 0.5, "g1.layer.ties.k": 0.3}
    assert head(space(), configuration) == Merge("ties", (Source("code"),), {"lambda": 0.5, "k": 0.3})


def test_linear_weights_are_stored_on_the_simplex() -> None:
    weights = {"g1.layer.linear.weight.math": 0.3, "g1.layer.linear.weight.code": 0.9}
    merge = head(space(), {"g1.method": "linear", **use("math", "code"), **weights})
    assert merge == Merge("linear", (Source("math"), Source("code")), {"weight": (0.25, 0.75)})


def test_linear_weights_that_are_all_zero_mean_equal_weights() -> None:
    weights = {"g1.layer.linear.weight.math": 0.0, "g1.layer.linear.weight.code": 0.0}
    merge = head(space(), {"g1.method": "linear", **use("math", "code"), **weights})
    assert merge.per_source("weight") == (0.5, 0.5)


def test_a_single_expert_is_averaged_with_the_base() -> None:
    configuration = {"g1.method": "linear", **use("code"), "g1.layer.linear.weight.code": 0.7}
    merge = head(space(), configuration)
    assert merge == Merge("linear", (Source("base"), Source("code")), {"weight": (0.3, 0.7)})


@pytest.mark.parametrize(("pair", "sources"), [("math+text", ("math", "text")), ("base+code", ("base", "code"))])
def test_slerp_merges_its_pair_or_one_expert_with_the_base(pair: str, sources: tuple[str, ...]) -> None:
    merge = head(space(), {"g1.method": "slerp", "g1.slerp.pair": pair, "g1.layer.slerp.t": 0.4})
    assert merge == Merge("slerp", tuple(map(Source, sources)), {"t": 0.4})


def test_slerp_pairs() -> None:
    """SLERP pairs are all pairs of experts and each expert with the base."""
    pair = space().parameters["g1.slerp.pair"]
    assert isinstance(pair, Categorical)
    assert pair.choices == (
        *("math+code", "math+text", "code+text"),
        *("base+math", "base+code", "base+text"),
    )


def test_no_bit_set_means_all_experts_take_part() -> None:
    lambda_ = {"g1.layer.task_arithmetic.lambda": 0.25}
    nobody = space().to_recipe({"g1.method": "task_arithmetic", **use(), **lambda_})
    everybody = space().to_recipe({"g1.method": "task_arithmetic", **use(*EXPERTS), **lambda_})
    assert nobody == everybody
    uniform = head(space(), {"g1.method": "linear", **use()})
    assert uniform == Merge("linear", tuple(map(Source, EXPERTS)), {"weight": 1 / 3})


def test_every_non_empty_set_of_experts_is_drawn() -> None:
    lfs, rng = space(methods=("ties",)), np.random.default_rng(0)
    drawn = Counter(tuple(source.model for source in head(lfs, lfs.parameters.sample(rng)).sources) for _ in range(400))
    assert len(drawn) == 7
    assert drawn.most_common(1)[0][0] == EXPERTS


def test_with_one_expert_there_is_nothing_to_choose_from() -> None:
    lfs = space(experts=("math",))
    assert lfs.parameters.names == (
        "g1.method",
        "g1.layer.task_arithmetic.lambda",
        "g1.layer.ties.lambda",
        "g1.layer.ties.k",
        "g1.layer.slerp.t",
        "g1.layer.linear.weight.math",
    )
    assert head(lfs, {"g1.method": "slerp", "g1.layer.slerp.t": 0.5}).sources == (Source("base"), Source("math"))


def test_embedding_and_head_follow_groups() -> None:
    """The embedding follows the first group and the head the last, with the norms' numbers."""
    lfs = space(num_layers=3, layer_groups=2, component_groups=3, methods=("task_arithmetic",))
    numbers = {
        f"g{g}.{c}.task_arithmetic.lambda": 0.1 * g + w
        for g in (1, 2)
        for c, w in zip(("mlp", "attention", "norm"), (0.01, 0.02, 0.03), strict=True)
    }
    bits = {f"g{g}.use.{expert}": True for g in (1, 2) for expert in EXPERTS}
    recipe = lfs.to_recipe({**bits, **numbers})
    assert recipe.embedding.number("lambda") == 0.13
    assert recipe.head.number("lambda") == 0.23
    assert [layer.mlp.number("lambda") for layer in recipe.layers] == [0.11, 0.11, 0.21]
    assert [layer.attention.number("lambda") for layer in recipe.layers] == [0.12, 0.12, 0.22]


def test_method_per_component() -> None:
    """With a method per component, each component has its own method."""
    lfs = space(component_groups=3, method_per="component")
    configuration = {
        **use("math", "code"),
        "g1.mlp.method": "ties",
        "g1.mlp.ties.lambda": 1.0,
        "g1.mlp.ties.k": 0.2,
        "g1.attention.method": "slerp",
        "g1.attention.slerp.pair": "code+text",
        "g1.attention.slerp.t": 0.5,
        "g1.norm.method": "task_arithmetic",
        "g1.norm.task_arithmetic.lambda": 0.3,
    }
    layer = lfs.to_recipe(configuration).layers[0]
    assert [merge.method for merge in (layer.mlp, layer.attention, layer.norm)] == ["ties", "slerp", "task_arithmetic"]


def merges_of(lfs: LfsSpace, number: int) -> list[Merge]:
    """The MLP merges of all layers in `number` random draws."""
    configurations = (lfs.parameters.sample(np.random.default_rng(seed)) for seed in range(number))
    return [layer.mlp for configuration in configurations for layer in lfs.to_recipe(configuration).layers]


@pytest.mark.parametrize("method_per", ["layer_group", "component"])
def test_all_experts_are_selected(method_per: str) -> None:
    """With `selection: all` every group merges all experts, and SLERP two of them: the base is never merged."""
    lfs = space(num_layers=4, component_groups=3, layer_groups=4, method_per=method_per, selection="all")
    used = {method: Counter[frozenset[str]]() for method in ("task_arithmetic", "ties", "slerp", "linear")}
    for merge in merges_of(lfs, 100):
        used[merge.method][frozenset(source.model for source in merge.sources)] += 1
    pairs = {frozenset(pair) for pair in (("math", "code"), ("math", "text"), ("code", "text"))}
    assert set(used.pop("slerp")) == pairs
    assert [set(found) for found in used.values()] == [{frozenset(EXPERTS)}] * 3
    assert not any(".use." in parameter.name for parameter in lfs.parameters)


def test_default_selection_is_of_subsets() -> None:
    """By default a group may merge one expert, or SLERP one with the base; the published code does neither."""
    merges = merges_of(space(num_layers=4, component_groups=3, layer_groups=4), 100)
    assert any(len(merge.sources) == 1 for merge in merges)
    assert any("base" in {source.model for source in merge.sources} for merge in merges if merge.method == "slerp")


@pytest.mark.parametrize("options", [{"selection": "all"}, {"method_per": "component"}])
def test_paper_preset_leaves_open_what_paper_and_code_differ_in(options: dict[str, str]) -> None:
    """The selection of experts and the unit that chooses a method can be given with `preset: paper`."""
    lfs = families.space("lfs", families.models(num_layers=8), preset="paper", **options)
    assert lfs.parameters.names != families.space("lfs", families.models(num_layers=8), preset="paper").parameters.names


def everywhere(merge: Merge, num_layers: int = 2) -> Recipe:
    def at(layer: int) -> Merge:
        return Merge(merge.method, tuple(Source(s.model, layer) for s in merge.sources), merge.coefficients)

    layers = tuple(LayerRecipe(at(layer), at(layer), at(layer)) for layer in range(num_layers))
    return Recipe(FINGERPRINTS, "base", layers, merge, merge)


@pytest.mark.parametrize(
    "merge",
    [
        Merge("passthrough", (Source("base"),)),
        Merge("passthrough", (Source("text"),)),
        Merge("slerp", (Source("text"), Source("math")), {"t": 0.123456}),
        Merge("linear", (Source("text"), Source("math")), {"weight": (0.1, 0.9)}),
        Merge("linear", (Source("text"), Source("base")), {"weight": (0.1, 0.9)}),
        Merge("task_arithmetic", (Source("text"), Source("math")), {"lambda": (0.5, 0.5)}),
        Merge("ties", (Source("math"), Source("text")), {"lambda": 0.0, "k": 0.5}),
    ],
)
@pytest.mark.parametrize("method_per", ["layer_group", "component"])
def test_a_recipe_the_space_contains_is_found(merge: Merge, method_per: str) -> None:
    lfs, recipe = space(component_groups=3, method_per=method_per), everywhere(merge)
    configuration = lfs.from_recipe(recipe)
    assert configuration is not None
    assert lfs.to_recipe(configuration).digest == recipe.digest


@pytest.mark.parametrize(
    ("merge", "is_found"),
    [
        (Merge("passthrough", (Source("base"),)), True),
        (Merge("passthrough", (Source("text"),)), True),
        (Merge("task_arithmetic", tuple(map(Source, EXPERTS)), {"lambda": (0.4,) * 3}), True),
        (Merge("linear", (Source("text"), Source("math")), {"weight": (0.1, 0.9)}), True),
        (Merge("slerp", (Source("text"), Source("math")), {"t": 0.123456}), True),
        (Merge("slerp", (Source("text"), Source("base")), {"t": 0.123456}), False),
        (Merge("task_arithmetic", (Source("text"), Source("math")), {"lambda": (0.5, 0.5)}), False),
    ],
)
def test_recipes_of_all_experts_are_found(merge: Merge, is_found: bool) -> None:
    """With `selection: all` the sources and merges of all experts are configurations, merges of some are not."""
    lfs, recipe = space(component_groups=3, selection="all"), everywhere(merge)
    configuration = lfs.from_recipe(recipe)
    assert (configuration is not None) == is_found
    assert configuration is None or lfs.to_recipe(configuration).digest == recipe.digest


@pytest.mark.parametrize(
    "merge",
    [
        Merge("task_arithmetic", (Source("text"), Source("math")), {"lambda": (0.5, 0.4)}),
        Merge("task_arithmetic", (Source("text"), Source("math")), {"lambda": 1.5}),
        Merge("ties", (Source("math"),), {"lambda": 1.0, "k": 0.05}),
        Merge("linear", (Source("text"), Source("math")), {"weight": (0.5, 0.4)}),
        Merge("linear", (Source("text"), Source("math"), Source("base")), {"weight": (0.5, 0.4, 0.1)}),
        Merge("nuslerp", (Source("text"), Source("math")), {"weight": 0.5}),
    ],
)
def test_a_recipe_outside_the_space_is_not_found(merge: Merge) -> None:
    assert space().from_recipe(everywhere(merge)) is None


def test_differing_group_is_not_found() -> None:
    """A recipe whose layers differ within a group is not found."""
    recipe = everywhere(Merge("passthrough", (Source("text"),)))
    swapped = Recipe(FINGERPRINTS, "base", recipe.layers[::-1], recipe.embedding, recipe.head)
    assert space().from_recipe(swapped) is None
    assert space(layer_groups=2).from_recipe(recipe) is not None


def test_a_method_left_out_of_the_space_is_not_found() -> None:
    recipe = everywhere(Merge("ties", (Source("math"),), {"lambda": 1.0, "k": 0.5}))
    assert space().from_recipe(recipe) is not None
    assert space(methods=("linear", "slerp")).from_recipe(recipe) is None


def test_parameters_of_one_role_differ_in_their_groups_only() -> None:
    space = LfsSpace(
        base="base",
        experts=("math", "text"),
        fingerprints={"base": "b", "math": "m", "text": "t"},
        num_layers=4,
        layer_groups=2,
    )
    by_role: dict[str, list[str]] = {}
    for name, role in space.parameters.roles.items():
        by_role.setdefault(role, []).append(name)
    assert len(by_role["method"]) == len(by_role["use.math"]) == 2
    assert len(by_role["ties.k"]) == 2 * 3
    assert set(space.parameters.roles) == set(space.parameters.names)


def test_every_method_can_be_searched() -> None:
    """Every merge method can be searched and written in a study."""
    assert set(SEARCHED_METHODS) == set(METHODS)
    assert get_args(LfsMethod) == tuple(SEARCHED_METHODS)


@pytest.mark.parametrize("method", SEARCHED_METHODS)
@pytest.mark.parametrize("experts", [EXPERTS, EXPERTS[:2], EXPERTS[:1]], ids=len)
def test_method_reads_its_merges_back(method: str, experts: tuple[str, ...]) -> None:
    """Every method decodes to merges that it accepts and reads them back."""
    lfs = space(experts, component_groups=3, methods=(method,))
    rng = np.random.default_rng(0)
    for _ in range(8):
        configuration = lfs.parameters.sample(rng) if len(lfs.parameters) else {}
        recipe = lfs.to_recipe(configuration)
        assert {merge.method for merge in recipe.merges()} <= {method, "passthrough"}
        assert all(merge.seed == (SEED if METHODS[merge.method].takes_seed else None) for merge in recipe.merges())
        found = lfs.from_recipe(recipe)
        assert found is not None
        assert lfs.to_recipe(found).digest == recipe.digest


@pytest.mark.parametrize("method", SEARCHED_METHODS)
def test_the_ends_of_every_range_are_accepted(method: str) -> None:
    lfs = space(methods=(method,))
    for end in ("low", "high"):
        configuration = {p.name: getattr(p, end, p.default_value) for p in lfs.parameters}
        recipe = lfs.to_recipe(configuration)
        found = lfs.from_recipe(recipe)
        assert found is not None
        assert lfs.to_recipe(found).digest == recipe.digest


def test_methods_of_an_ordered_pair_have_both_orders() -> None:
    pair = space(("math", "code"), methods=("nearswap",)).parameters["g1.nearswap.pair"]
    assert isinstance(pair, Categorical)
    assert pair.choices == (
        *("math+code", "code+math"),
        *("base+math", "base+code"),
    )


def test_methods_of_a_single_model_choose_among_all() -> None:
    configuration = {"g1.passthrough.model": "base", "g1.layer.passthrough.scale": 0.5}
    merge = head(space(methods=("passthrough",)), configuration)
    assert merge == Merge("passthrough", (Source("base"),), {"scale": 0.5})


def test_numbers_per_expert_are_equal_where_nobody_was_selected() -> None:
    numbers = {"g1.layer.ties_weighted.density": 0.5}
    merge = head(space(methods=("ties_weighted",)), {**use(), **numbers})
    assert merge == Merge("ties_weighted", tuple(map(Source, EXPERTS)), {"weight": 1.0, "density": 0.5})


def test_consensus_needs_no_more_models_than_take_part() -> None:
    numbers = {"g1.layer.consensus_ta.lambda": 0.5, "g1.layer.consensus_ta.mask_lambda": 0.4}
    lfs = space(methods=("consensus_ta",))
    assert head(lfs, {**use("math"), **numbers}).number("agreement") == 1
    assert head(lfs, {**use("math", "text"), **numbers}).number("agreement") == 2


def test_model_stock_of_one_expert_is_that_expert() -> None:
    assert head(space(methods=("model_stock",)), use("code")) == Merge("passthrough", (Source("code"),))


def test_lambda_per_model() -> None:
    """With a lambda per model, each expert has its share of a scale."""
    lfs = space(methods=("task_arithmetic",), lambdas="per_model")
    bits = {f"g1.use.{expert}": True for expert in EXPERTS}
    key = "g1.layer.task_arithmetic"
    assert set(lfs.parameters.names) - set(bits) == {f"{key}.lambda", *(f"{key}.weight.{e}" for e in EXPERTS)}
    weights = dict(zip(EXPERTS, (0.2, 0.0, 0.6, 0.0), strict=False))
    configuration = bits | {f"{key}.lambda": 0.5} | {f"{key}.weight.{e}": weights[e] for e in EXPERTS}
    merge = lfs.to_recipe(configuration).embedding
    found = dict(zip((source.model for source in merge.sources), merge.per_source("lambda"), strict=True))
    # The mean lambda times the number of experts is the scale; the shares are 1/4 and 3/4.
    total = 0.5 * len(EXPERTS)
    assert found == pytest.approx({EXPERTS[0]: total / 4, EXPERTS[2]: total * 3 / 4})


def test_equal_weights_are_the_one_lambda_that_is_published() -> None:
    shared, per_model = space(methods=("task_arithmetic",)), space(methods=("task_arithmetic",), lambdas="per_model")
    published = shared.to_recipe({f"g1.use.{e}": True for e in EXPERTS} | {"g1.layer.task_arithmetic.lambda": 0.7})
    configuration = per_model.from_recipe(published)
    assert configuration is not None
    assert configuration["g1.layer.task_arithmetic.lambda"] == pytest.approx(0.7)
    assert per_model.to_recipe(configuration) == published


def test_the_published_space_has_one_lambda() -> None:
    with pytest.raises(InvalidStudy, match="preset: paper means lambdas=shared, but per_model is given"):
        space(num_layers=40, layer_groups=4, component_groups=3, preset="paper", lambdas="per_model")


@pytest.mark.parametrize(
    ("options", "digest"),
    [
        ({}, "d1096ddacd3d4897b7c26bffb681eb2784208f4dbd3c10431c16afe7508ce4e6"),
        ({"preset": "paper"}, "d1096ddacd3d4897b7c26bffb681eb2784208f4dbd3c10431c16afe7508ce4e6"),
        (
            {"method_per": "component", "layer_groups": 2},
            "19ec425bb7f2b5febb1f822fad8f0b7d1741fb5f7739637e99aa585986706706",
        ),
    ],
)
def test_a_seed_gives_the_recipes_that_it_always_gave(options: dict[str, Any], digest: str) -> None:
    """A seed gives the same recipes in all versions, as stored studies are resumed with them.

    A change of parameters or of their order would change them. The digests are those of format 1, which recipes that
    cut at a rank had before.
    """
    lfs = families.space("lfs", families.models(num_layers=8), **options)
    recipes = [lfs.to_recipe(lfs.parameters.sample(np.random.default_rng(seed))) for seed in range(50)]
    drawn = (replace(recipe, keeps_equal=True).digest for recipe in recipes)
    assert hashlib.sha256("".join(drawn).encode()).hexdigest() == digest
