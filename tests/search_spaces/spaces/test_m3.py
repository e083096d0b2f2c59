"""The M3 space: its directions have the paper's distributions, its merges the paper's coefficients."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from scipy import stats

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.recipe import Merge, Source
from search_spaces.spaces.m3 import M3Section, dirichlet_quantiles, dirichlet_shares
from tests.search_spaces.spaces.families import models, space

ALPHAS = (0.2, 0.4, 0.5, 1.0, 2.0, 3.0, 5.0)
TWO = models(("math", "code"))


def in_order(merge: Merge, name: str, experts: Sequence[str] = ("math", "code", "text")) -> tuple[float, ...]:
    """Coefficient `name` of each expert."""
    own = dict(zip((source.model for source in merge.sources), merge.per_source(name), strict=True))
    return tuple(own.get(expert, 0.0) for expert in experts)


def test_two_experts_have_a_beta_direction_and_a_scale() -> None:
    searched = space("m3", TWO)
    parameters = searched.parameters
    assert parameters.names == ("method", "alpha", "quantile.math", "scale", "k")
    assert parameters["alpha"].choices == ALPHAS
    assert parameters["method"].choices == ("linear", "task_arithmetic", "m3_ties", "m3_dare")
    assert (parameters["scale"].low, parameters["scale"].high) == (0.5, 2.0)
    assert parameters["k"].choices == (0.5, 0.7, 0.9)
    for alpha in ALPHAS:
        chosen = {"method": "task_arithmetic", "alpha": alpha, "quantile.math": 0.2, "scale": 1.5}
        share = stats.beta.ppf(0.2, alpha, alpha)
        merge = searched.to_recipe(chosen).embedding
        assert in_order(merge, "lambda", ("math", "code")) == pytest.approx((1.5 * share, 1.5 * (1 - share)), abs=1e-6)


def test_the_merges_are_the_papers() -> None:
    searched = space("m3", TWO)
    direction = {"alpha": 1.0, "quantile.math": 0.25}
    sources = (Source("code"), Source("math"))  # in the order of fingerprints
    for method, numbers, merge in (
        ("linear", {}, Merge("linear", sources, {"weight": (0.75, 0.25)})),
        ("task_arithmetic", {"scale": 2.0}, Merge("task_arithmetic", sources, {"lambda": (1.5, 0.5)})),
        (
            "m3_ties",
            {"scale": 0.5, "k": 0.7},
            Merge("m3_ties", sources, {"weight": (0.75, 0.25), "lambda": 0.5, "k": 0.7}),
        ),
        (
            "m3_dare",
            {"scale": 1.25},
            Merge("m3_dare", sources, {"weight": (0.75, 0.25), "lambda": 1.25, "density": 0.8}, 0),
        ),
    ):
        recipe = searched.to_recipe({"method": method, **direction, **numbers})
        assert recipe.embedding == recipe.head == merge
        assert {layer.mlp.coefficients == merge.coefficients for layer in recipe.layers} == {True}


@pytest.mark.parametrize("num_experts", [2, 3, 5])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_uniform_draws_give_the_symmetric_dirichlet_distribution(num_experts: int, alpha: float) -> None:
    rng = np.random.default_rng(0)
    drawn = np.array([dirichlet_shares(rng.uniform(size=num_experts - 1).tolist(), alpha) for _ in range(800)])
    assert np.allclose(drawn.sum(axis=1), 1)
    for share in drawn.T:  # each share alone has a Beta distribution
        marginal = stats.beta(alpha, (num_experts - 1) * alpha)
        assert stats.kstest(share, marginal.cdf).pvalue > 1e-4
    if num_experts > 2:
        expected = -1 / (num_experts**2 * (num_experts * alpha + 1))
        covariances = np.cov(drawn.T)[np.triu_indices(num_experts, 1)]
        assert covariances == pytest.approx(expected, abs=0.02)


def test_the_parameters_of_the_space_are_those_quantiles() -> None:
    searched = space("m3", directions=("dirichlet",), methods=("linear",))
    for seed in range(20):
        configuration = searched.parameters.sample(np.random.default_rng(seed))
        quantiles = [configuration["quantile.math"], configuration["quantile.code"]]
        merge = searched.to_recipe(configuration).embedding
        assert in_order(merge, "weight") == pytest.approx(dirichlet_shares(quantiles, configuration["alpha"]), abs=1e-6)


@pytest.mark.parametrize("shares", [(0.2, 0.3, 0.5), (1.0, 0.0, 0.0), (0.0, 0.0, 1.0), (0.5, 0.5), (0.0, 1.0)])
def test_quantiles_are_the_inverse_of_shares(shares: tuple[float, ...]) -> None:
    for alpha in ALPHAS:
        assert dirichlet_shares(dirichlet_quantiles(shares, alpha), alpha) == pytest.approx(shares, abs=1e-9)


def test_a_p_series_favours_the_first_of_an_order() -> None:
    searched = space("m3", methods=("task_arithmetic",), directions=("p_series",))
    assert searched.parameters.names == ("p", "order", "scale")
    assert searched.parameters["p"].choices == (0.0, 1.0, 2.0, 3.0)
    orders = [">".join(order) for order in itertools.permutations(("math", "code", "text"))]
    assert list(searched.parameters["order"].choices) == orders
    # Section 4.3: the first of three has 0.861 at p = 3; the best found was p = 1 with scale 1.7.
    steep = searched.to_recipe({"p": 3.0, "order": "text>math>code", "scale": 1.0}).embedding
    total = 1 + 1 / 8 + 1 / 27
    assert in_order(steep, "lambda") == pytest.approx((1 / 8 / total, 1 / 27 / total, 1 / total), abs=1e-6)
    assert in_order(steep, "lambda")[2] == pytest.approx(0.861, abs=1e-3)
    best = searched.to_recipe({"p": 1.0, "order": "math>text>code", "scale": 1.7}).embedding
    shares = [falling * 1.7 / (1 + 1 / 2 + 1 / 3) for falling in (1, 1 / 3, 1 / 2)]
    assert in_order(best, "lambda") == pytest.approx(shares, abs=1e-6)
    # All orders are the same merge at p = 0, so there is none to choose.
    even = searched.to_recipe({"p": 0.0, "scale": 1.2}).embedding
    assert even == Merge("task_arithmetic", even.sources, {"lambda": 0.4})


def test_directions_follow_from_the_number_of_experts() -> None:
    def directions(number: int, **options: Any) -> list[str]:
        names = space("m3", models(tuple("abcdef"[:number])), **options).parameters.names
        return ["dirichlet"] * ("alpha" in names) + ["p_series"] * ("p" in names)

    assert [directions(number) for number in (1, 2, 3, 5, 6)] == [
        [],
        ["dirichlet"],
        ["dirichlet", "p_series"],
        ["dirichlet", "p_series"],
        ["dirichlet"],
    ]
    assert directions(2, directions=("p_series",)) == ["p_series"]
    with pytest.raises(InvalidStudy, match="p_series has an order for each way to rank 6 experts; it takes up to 5"):
        directions(6, directions=("p_series",))


def test_listed_orders_take_the_place_of_all_orders() -> None:
    six = models(tuple("abcdef"))
    orders = ("f>e>d>c>b>a", "a>b>c>d>e>f")
    searched = space("m3", six, methods=("task_arithmetic",), directions=("p_series",), orders=orders)
    assert searched.parameters["order"].choices == orders
    merge = searched.to_recipe({"p": 1.0, "order": orders[0], "scale": 1.0}).embedding
    total = sum(1 / rank for rank in range(1, 7))
    shares = [1 / rank / total for rank in (6, 5, 4, 3, 2, 1)]
    assert in_order(merge, "lambda", tuple("abcdef")) == pytest.approx(shares, abs=1e-6)
    assert space("m3", six, orders=orders).parameters["direction"].choices == ("dirichlet", "p_series")
    one = space("m3", methods=("linear",), directions=("p_series",), orders=("text>math>code",), exponents=(1.0,))
    assert one.parameters.names == ()
    assert in_order(one.to_recipe({}).embedding, "weight") == pytest.approx((3 / 11, 2 / 11, 6 / 11), abs=1e-6)
    for wrong in ("math>text", "math>text>code>code", "math>text>law"):
        with pytest.raises(InvalidStudy, match='does not have each expert once; write for example "math>code>text"'):
            space("m3", orders=(wrong,))


def test_equal_bounds_fix_the_scale() -> None:
    searched = space("m3", TWO, scale=(1.5, 1.5))
    assert searched.parameters.names == ("method", "alpha", "quantile.math", "k")
    direction = {"alpha": 1.0, "quantile.math": 0.25}
    recipe = searched.to_recipe({"method": "task_arithmetic", **direction})
    assert recipe.embedding.coefficients == {"lambda": (1.125, 0.375)}
    ties = searched.to_recipe({"method": "m3_ties", "k": 0.5, **direction})
    assert ties.embedding.number("lambda") == 1.5
    for known in (recipe, ties):
        assert searched.to_recipe(searched.from_recipe(known)).digest == known.digest
    assert (
        searched.from_recipe(space("m3", TWO).to_recipe({"method": "m3_ties", "k": 0.5, "scale": 1.0, **direction}))
        is None
    )
    assert "its direction, scale 1.5" in searched.describe().text


def test_shares_that_ties_and_dare_keep_are_options() -> None:
    searched = space("m3", TWO, methods=("m3_dare", "m3_dare_ties"), density=(0.2, 0.5), k=0.6)
    assert searched.parameters["density"].choices == (0.2, 0.5)
    assert "k" not in searched.parameters.names
    chosen = {"alpha": 1.0, "quantile.math": 0.25, "scale": 1.0, "density": 0.2}
    merge = searched.to_recipe({"method": "m3_dare_ties", **chosen}).embedding
    assert merge == Merge(
        "m3_dare_ties", merge.sources, {"weight": (0.75, 0.25), "lambda": 1.0, "density": 0.2, "k": 0.6}, 0
    )
    assert searched.to_recipe({"method": "m3_dare", **chosen}).embedding.number("density") == 0.2


def test_whole_models_are_trimmed_where_that_is_asked() -> None:
    chosen = {"method": "m3_ties", "alpha": 1.0, "quantile.math": 0.25, "scale": 1.0, "k": 0.5}
    usual, whole = (space("m3", TWO, trim=trim) for trim in ("tensor", "model"))
    recipe = whole.to_recipe(chosen)
    assert (recipe.trim, usual.to_recipe(chosen).trim) == ("model", "tensor")
    assert recipe.digest != usual.to_recipe(chosen).digest
    assert usual.from_recipe(recipe) is None
    found = whole.from_recipe(recipe)
    assert found is not None
    assert whole.to_recipe(found).digest == recipe.digest
    average = {"method": "linear", "alpha": 1.0, "quantile.math": 0.25}
    assert whole.to_recipe(average).digest == usual.to_recipe(average).digest


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": (0.0, 1.0)}, r"\[0.0, 1.0\] is not accepted; give \[lowest, highest\] above 0"),
        ({"scale": (2.0, 1.0)}, r"\[2.0, 1.0\] is not accepted"),
        ({"density": (0.5, 0.5)}, "0.5 is given twice"),
        ({"methods": ("linear",), "density": 0.5}, "has no effect without m3_dare or m3_dare_ties; leave it out"),
        ({"methods": ("m3_dare",), "k": 0.5}, "has no effect without m3_ties or m3_ties_majority or m3_dare_ties"),
        ({"methods": ("m3_dare",), "trim": "model"}, "has no effect without m3_ties or"),
        ({"directions": ("dirichlet",), "orders": ("a>b",)}, "has no effect with directions: "),
    ],
)
def test_contradictions_are_reported(options: dict[str, Any], message: str) -> None:
    (problem,) = M3Section(kind="m3", **options).contradictions()
    assert re.search(message, problem.message)


def test_one_expert_has_a_scale_alone_and_no_average() -> None:
    assert space("m3", models(("math",)), methods=("task_arithmetic",)).parameters.names == ("scale",)
    with pytest.raises(InvalidStudy, match="the average of one expert is that expert; name another method"):
        space("m3", models(("math",)), methods=("linear",))


def test_experts_averages_and_task_arithmetic_are_contained() -> None:
    beyond = {"task arithmetic 0.7", "task arithmetic 1.0"}  # with three experts, scales of 2.1 and 3
    for experts, larger in ((("math", "code"), set()), (("math", "code", "text"), beyond)):
        family = models(experts)
        searched = space("m3", family)
        known = all_baselines(
            base="base", experts=experts, fingerprints=family.fingerprints, num_layers=family.num_layers
        )
        lacking = {label for _, label, recipe in known if searched.from_recipe(recipe) is None}
        assert lacking == {"base", "TIES k 0.2 lambda 1.0"} | larger  # a scale of 0, and TIES with a lower k


def test_a_recipe_that_differs_between_layers_is_not_contained() -> None:
    family = models()
    recipe = space("layerwise", family).to_recipe(dict.fromkeys(space("layerwise", family).parameters.names, 1 / 3))
    assert space("m3", family).from_recipe(recipe) is not None
    changed = dict.fromkeys(space("layerwise", family, granularity="layer").parameters.names, 1 / 3)
    changed["layers.1.math"] = 0.5
    recipe = space("layerwise", family, granularity="layer").to_recipe(changed)
    assert space("m3", family).from_recipe(recipe) is None


def test_rounded_numbers_are_read_back_at_the_ends_of_the_scale() -> None:
    searched = space("m3", methods=("task_arithmetic",))
    for scale, quantile in itertools.product((0.5, 2.0), (0.123, 0.77)):
        configuration = {"direction": "dirichlet", "alpha": 2.0, "quantile.math": quantile, "quantile.code": 0.4}
        recipe = searched.to_recipe({**configuration, "scale": scale})
        found = searched.from_recipe(recipe)
        assert found is not None
        assert math.isclose(found["scale"], scale, abs_tol=1e-5)
        assert searched.to_recipe(found).digest == recipe.digest
