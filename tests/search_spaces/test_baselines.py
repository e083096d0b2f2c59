from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from search_spaces.baselines import all_baselines, baseline_labels
from search_spaces.recipe import Recipe
from search_spaces.spaces.lfs import LfsSpace


def known(experts: Sequence[str], num_layers: int = 3) -> tuple[dict[str, str], Sequence[tuple[Any, str, Recipe]]]:
    fingerprints = {alias: f"print of {alias}" for alias in ("base", *experts)}
    recipes = all_baselines(base="base", experts=experts, fingerprints=fingerprints, num_layers=num_layers)
    return fingerprints, recipes


def test_sources_come_first_then_published_merges_of_all_experts() -> None:
    _, recipes = known(("math", "text", "lookup"))
    assert [(origin, label) for origin, label, _ in recipes] == [
        ("source", "base"),
        ("source", "expert:math"),
        ("source", "expert:text"),
        ("source", "expert:lookup"),
        ("published", "uniform average"),
        ("published", "task arithmetic 1/n"),
        ("published", "task arithmetic 0.3"),
        ("published", "task arithmetic 0.4"),
        ("published", "task arithmetic 0.5"),
        ("published", "task arithmetic 0.7"),
        ("published", "task arithmetic 1.0"),
        ("published", "TIES k 0.2 lambda 1.0"),
    ]
    assert all(len(recipe.layers) == 3 for _, _, recipe in recipes)


def test_numbers_are_the_published_ones() -> None:
    _, recipes = known(("math", "text"))
    by_label = {label: recipe for _, label, recipe in recipes}
    assert by_label["uniform average"].head.per_source("weight") == (0.5, 0.5)
    assert by_label["task arithmetic 1/n"].head.number("lambda") == 0.5
    assert by_label["task arithmetic 0.3"].layers[2].mlp.number("lambda") == 0.3
    assert by_label["task arithmetic 0.7"].head.number("lambda") == 0.7
    assert by_label["task arithmetic 1.0"].head.number("lambda") == 1.0
    assert by_label["TIES k 0.2 lambda 1.0"].embedding.coefficients == {"k": 0.2, "lambda": 1.0}
    assert by_label["expert:text"].layers[1].norm.method == "passthrough"


def test_no_recipe_comes_twice() -> None:
    for experts in (("math",), ("a", "b"), tuple("abc")):
        digests = [recipe.digest for _, _, recipe in known(experts)[1]]
        assert len(set(digests)) == len(digests)


def test_baselines_of_one_expert() -> None:
    """With one expert, the average and the whole task vector equal the expert."""
    _, recipes = known(("math",))
    assert [label for _, label, _ in recipes] == [
        "base",
        "expert:math",
        "task arithmetic 0.3",
        "task arithmetic 0.4",
        "task arithmetic 0.5",
        "task arithmetic 0.7",
        "TIES k 0.2 lambda 1.0",
    ]


def test_the_grids_of_m3_are_a_set_of_their_own() -> None:
    fingerprints, usual = known(("math", "text"))
    of_m3 = all_baselines(base="base", experts=("math", "text"), fingerprints=fingerprints, num_layers=3, chosen="m3")
    by_label = {label: recipe for _, label, recipe in of_m3}
    assert len(by_label) == len({recipe.digest for recipe in by_label.values()}) == 6 + 3 * 6 + 5
    assert not {label for _, label, _ in usual} & by_label.keys()
    assert by_label["m3 task arithmetic 0.6"].head.number("lambda") == 0.6
    ties = by_label["m3 TIES k 0.7 lambda 1.0"]  # table 4, instruction following and code
    assert (ties.head.method, dict(ties.head.coefficients), ties.trim) == (
        "ties_majority",
        {"k": 0.7, "lambda": 1.0},
        "model",
    )
    dare = by_label["m3 DARE task arithmetic 1.0"].head
    assert (dare.method, dict(dare.coefficients)) == ("dare_linear", {"lambda": 1.0, "density": 0.8})
    both = by_label["m3 DARE TIES k 0.5 lambda 0.5"]
    assert both.head.method == "m3_dare_ties"
    assert len(set(both.head.per_source("weight"))) == 1


def test_the_lfs_space_contains_all_of_them() -> None:
    for experts in (("math",), ("a", "b"), tuple("abcd")):
        fingerprints, recipes = known(experts)
        space = LfsSpace(base="base", experts=experts, fingerprints=fingerprints, num_layers=3, layer_groups=2)
        for _, label, recipe in recipes:
            configuration = space.from_recipe(recipe)
            assert configuration is not None, label
            assert space.to_recipe(configuration).digest == recipe.digest


@pytest.mark.parametrize(
    ("chosen", "labels"),
    [
        ("none", ()),
        ("sources", ("base", "expert:a", "expert:b")),
        (["expert:b", "base"], ("base", "expert:b")),
        (["TIES k 0.2 lambda 1.0", "sources"], ("base", "expert:a", "expert:b", "TIES k 0.2 lambda 1.0")),
        (["task arithmetic 0.5"], ("task arithmetic 0.5",)),
        (["task arithmetic 1/n", "task arithmetic 0.5"], ("task arithmetic 1/n",)),
    ],
)
def test_chosen_baselines(chosen: Any, labels: tuple[str, ...]) -> None:
    """Groups and names choose baselines, which keep their order; of two with equal recipes the first one counts."""
    fingerprints = {alias: alias for alias in ("base", "a", "b")}
    found = all_baselines(base="base", experts=("a", "b"), fingerprints=fingerprints, num_layers=2, chosen=chosen)
    assert tuple(label for _, label, _ in found) == labels


def test_groups_divide_all_baselines() -> None:
    """The two groups together are all baselines."""
    experts = ("a", "b", "c")
    groups = [baseline_labels(group, experts) for group in ("sources", "published")]
    assert (
        baseline_labels("all", experts) == groups[0] + groups[1] == baseline_labels(["published", "sources"], experts)
    )
