"""HM3's paths: what may follow what, lengths, paths as configurations, and what is refused."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest

from search_spaces.baselines import sources_and_published
from search_spaces.errors import InvalidStudy
from search_spaces.parameters import Parameters
from search_spaces.spaces.hm3 import Hm3Section
from search_spaces.spaces.layer_paths import LENGTH, LayerPaths
from tests.search_spaces.spaces.families import models, space

SHAPES = [
    LayerPaths(("a", "b"), 4, 3, 5, 1),
    LayerPaths(("a", "b"), 4, 1, 4, 0),
    LayerPaths(("a", "b"), 5, 1, 4, 2),
    LayerPaths(("a",), 6, 2, 5, 1),
    LayerPaths(("a", "b"), 2, 1, 4, None),
]
shapes = pytest.mark.parametrize("paths", SHAPES, ids=str)


def every_path(paths: LayerPaths) -> set[tuple[int, ...]]:
    """Built step by step by what may follow."""
    found, open_paths = set(), [()]
    while open_paths:
        path = open_paths.pop()
        if paths.may_end(path):
            found.add(path)
        open_paths += [
            (*path, paths.step(model, layer)) for layer in paths.next_layers(path) for model in range(len(paths.models))
        ]
    return found


def keeps_to_limits(paths: LayerPaths, path: tuple[int, ...]) -> bool:
    """Said in another way."""
    layers = [paths.layer_of(step) for step in path]
    if not paths.min_length <= len(path) <= paths.max_length:
        return False
    if paths.max_jump is None:
        return True
    jumps = [layers[0], paths.num_layers - 1 - layers[-1], *(b - a - 1 for a, b in itertools.pairwise(layers))]
    return all(abs(jump) <= paths.max_jump for jump in jumps)


@shapes
def test_step_by_step_every_path_within_the_limits_is_built_and_no_other(paths: LayerPaths) -> None:
    lengths = range(1, paths.max_length + 1)
    every = {path for n in lengths for path in itertools.product(range(paths.num_steps), repeat=n)}
    expected = {path for path in every if keeps_to_limits(paths, path)}
    assert every_path(paths) == expected
    assert {path for path in every if paths.contains(path)} == expected
    assert {len(path) for path in expected} == set(range(paths.shortest, paths.longest + 1))


@shapes
def test_no_path_comes_to_an_end_where_it_may_not_end(paths: LayerPaths) -> None:
    begun = [(), *every_path(paths)]
    prefixes = {path[:at] for path in begun for at in range(len(path) + 1)}
    assert all(paths.next_layers(prefix) or paths.may_end(prefix) for prefix in prefixes)


@shapes
def test_a_path_and_its_configuration_are_one(paths: LayerPaths) -> None:
    for path in every_path(paths):
        assert paths.path(paths.configuration(path)) == path
        assert paths.repair(paths.configuration(path)) == paths.configuration(path)


@shapes
def test_what_is_drawn_parameter_by_parameter_becomes_a_path_of_that_length(paths: LayerPaths) -> None:
    parameters = Parameters(paths.parameters(), structure=paths)
    rng = np.random.default_rng(0)
    for _ in range(100):
        drawn = parameters.build(lambda parameter: parameter.sample(rng))
        path = paths.path(drawn)
        assert paths.contains(path)
        assert len(path) == drawn[LENGTH]
        near = parameters.sample(rng)
        parameters.check(near)
        assert paths.contains(paths.path(near))


def test_layers_that_may_not_follow_become_the_nearest_that_may() -> None:
    paths = SHAPES[0]
    drawn = paths.configuration((0, 1, 2, 3)) | {"step2.layer": 3, "step3.layer": 0}
    assert [paths.layer_of(step) for step in paths.path(drawn)] == [0, 2, 2, 3]


def test_draws_are_near_the_models() -> None:
    own = space("hm3", models(num_layers=8)).paths
    rng = np.random.default_rng(0)
    drawn = [own.path(own.sample(rng)) for _ in range(300)]
    changed = [min(sum(a != own.step(m, i) for i, a in enumerate(path)) for m in range(3)) for path in drawn]
    assert 60 < changed.count(0) < 160
    assert len(set(drawn)) > 120
    assert {len(path) for path in drawn} >= {7, 8, 9}


def test_the_experts_are_paths_of_the_space() -> None:
    family = models(num_layers=6)
    own = space("hm3", family)
    known = sources_and_published(base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=6)
    found = {label: own.from_recipe(recipe) for _, label, recipe in known}
    assert [label for label, configuration in found.items() if configuration] == [
        "expert:math",
        "expert:code",
        "expert:text",
    ]
    assert found["expert:code"] == own.paths.configuration(range(6, 12))


def test_lengths_follow_from_the_sources_or_the_limit() -> None:
    assert (space("hm3", models(num_layers=8)).paths.shortest, space("hm3", models(num_layers=8)).max_layers) == (4, 10)
    assert space("hm3", models(num_layers=8, max_layers=9)).max_layers == 9
    assert space("hm3", models(num_layers=8), max_jump=0).max_layers == 8
    own = space("hm3", models(num_layers=8), max_path_length=20, min_path_length=2)
    assert (own.paths.shortest, own.paths.longest) == (4, 20)  # three layers at a time do not lead through eight
    assert own.describe().text == (
        "a path of 4 to 20 layers out of 8 of each of 3 models, each at most 1 away from the one after the last"
    )


@pytest.mark.parametrize(
    ("family", "options", "place", "message"),
    [
        (models(("math",)), {}, "search_space.models", "math alone has no layers to exchange; give two or more of "),
        (models(), {"models": ["math", "cook"]}, "search_space.models.1", "'cook' is not a model of the study"),
        (
            models(num_layers=8),
            {"max_path_length": 3},
            "search_space.max_path_length",
            "3 is below the shortest path of 4 layers; give at least 4",
        ),
        (
            models(num_layers=8, max_layers=9),
            {"max_path_length": 12},
            "search_space.max_path_length",
            "12 is above limits.max_layers=9; give at most 9",
        ),
        (
            models(num_layers=8, max_layers=7),
            {},
            "limits.max_layers",
            "7 is below the 8 layers of the sources, which are scored too; give at least 8",
        ),
        (
            models(num_layers=4),
            {"min_path_length": 6},
            "search_space.max_path_length",
            "5 is below the shortest path of 6 layers; give at least 6",
        ),
        (
            models(num_layers=8),
            {"min_path_length": 1, "max_path_length": 2},
            "search_space.max_path_length",
            "no path of 1 to 2 layers leads through 8 layers with jumps of at most 1",
        ),
    ],
)
def test_what_does_not_fit_is_refused(family, options, place, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidStudy, match=re.escape(message)) as refused:
        space("hm3", family, **options)
    assert place in {problem.field for problem in refused.value.problems}


def test_contradictions_are_found_without_the_models() -> None:
    section = Hm3Section(kind="hm3", models=("math",), max_path_length=3, min_path_length=5)
    assert [(problem.field, problem.message) for problem in section.contradictions()] == [
        ("search_space.models", "math alone has no layers to exchange; give two or more"),
        ("search_space.max_path_length", "3 is below min_path_length=5; give at least 5"),
    ]
