"""HM3's paths: the layers that may follow a layer, lengths, paths as configurations, and refused options."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from search_spaces.baselines import all_baselines
from search_spaces.errors import InvalidStudy
from search_spaces.parameters import Parameters
from search_spaces.recipe import Recipe, Source
from search_spaces.spaces.base import AlignedSpace, SearchedModels
from search_spaces.spaces.hm3 import Hm3Section, MergedOptions
from search_spaces.spaces.layer_paths import LENGTH, MERGED, PREFERENCE, LayerPaths
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
    """All paths, built step by step from the layers that may follow."""
    found: set[tuple[int, ...]] = set()
    open_paths: list[tuple[int, ...]] = [()]
    while open_paths:
        path = open_paths.pop()
        if paths.may_end(path):
            found.add(path)
        open_paths += [
            (*path, paths.step(model, layer)) for layer in paths.next_layers(path) for model in range(len(paths.models))
        ]
    return found


def keeps_to_limits(paths: LayerPaths, path: tuple[int, ...]) -> bool:
    """Whether a path keeps to the limits, computed independently of `LayerPaths`."""
    layers = [paths.layer_of(step) for step in path]
    if not paths.min_length <= len(path) <= paths.max_length:
        return False
    if paths.max_jump is None:
        return True
    jumps = [layers[0], paths.num_layers - 1 - layers[-1], *(b - a - 1 for a, b in itertools.pairwise(layers))]
    return all(abs(jump) <= paths.max_jump for jump in jumps)


@shapes
def test_mutants_are_other_paths_nearby(paths: LayerPaths) -> None:
    rng = np.random.default_rng(0)
    configuration = paths.sample(rng)
    path = paths.path(configuration)
    found = [paths.mutant(configuration, rng) for _ in range(200)]
    assert all(paths.preference(mutant) in (0, paths.preference(configuration)) for mutant in found)
    mutants = {paths.path(mutant) for mutant in found}
    assert all(paths.contains(mutant) for mutant in mutants)
    assert all(abs(len(mutant) - len(path)) <= 3 for mutant in mutants)
    assert mutants - {path}
    again = np.random.default_rng(1), np.random.default_rng(1)
    assert paths.mutant(configuration, again[0]) == paths.mutant(configuration, again[1])


def test_mutants_change_one_scale_besides() -> None:
    """The layers that a mutant keeps keep their scales, but for one."""
    paths = LayerPaths(("a", "b"), 4, 4, 4, 0, scale_range=(0.5, 2.0))
    rng = np.random.default_rng(0)
    scales = (0.6, 0.8, 1.4)
    configuration = paths.configuration((0, 1, 2, 3), scales=scales)
    changed = [
        sum(new != old for new, old in zip(paths.scales(paths.mutant(configuration, rng)), scales, strict=True))
        for _ in range(50)
    ]
    assert set(changed) == {0, 1}  # 0: the last layer has no scale


@shapes
def test_steps_build_every_path(paths: LayerPaths) -> None:
    """Steps build every path within the limits and no other."""
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
def test_drawn_parameters_become_a_path(paths: LayerPaths) -> None:
    """Parameters drawn one by one become a path of the drawn length."""
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


@shapes
def test_passthrough_merges_have_that_many_blocks(paths: LayerPaths) -> None:
    def num_blocks(path: tuple[int, ...]) -> int:
        goes_on = [b == a + 1 and paths.layer_of(b) > 0 for a, b in itertools.pairwise(path)]
        return 1 + goes_on.count(False)

    every = every_path(paths)
    rng = np.random.default_rng(0)
    for wanted in (1, 2, 3):
        drawn = {paths.path(each) for _ in range(4000) if (each := paths.passthrough(wanted, rng))}
        every_one = {path for path in every if num_blocks(path) == wanted}
        assert drawn == every_one if wanted < 3 else drawn <= every_one


def test_more_blocks_than_layers_there_are_not() -> None:
    assert SHAPES[1].passthrough(5, np.random.default_rng(0)) is None


def test_the_experts_are_paths_of_the_space() -> None:
    family = models(num_layers=6)
    own = space("hm3", family)
    known = all_baselines(base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=6)
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


# Alignments.


def test_alignments_join_distant_layers() -> None:
    """Alignments are placed between layers that do not follow each other."""
    own = space("hm3", models(("math", "text")), alignment="moments")
    is_aligned = isinstance(own, AlignedSpace)
    assert is_aligned
    of_pairs = {*own.pairs}
    assert len(of_pairs) == len(own.pairs)
    assert (("math", 1), ("text", 2)) in of_pairs
    assert (("math", 1), ("math", 2)) not in of_pairs
    assert (("math", 1), ("math", 1)) in of_pairs
    # Every pair of neighbours of every path, and no other.
    paths = own.paths
    at = {step: (paths.models[paths.model_of(step)], paths.layer_of(step)) for step in range(paths.num_steps)}
    neighbours = {(at[a], at[b]) for path in every_path(paths) for a, b in itertools.pairwise(path)}
    natural = {((name, layer), (name, layer + 1)) for name in ("math", "text") for layer in range(3)}
    assert of_pairs == neighbours - natural
    aligned = own.with_alignments({pair: f"{pair[0][0]}{pair[0][1]}{pair[1][0]}{pair[1][1]}" for pair in own.pairs})
    path = (paths.step(0, 0), paths.step(0, 1), paths.step(1, 2), paths.step(1, 2), paths.step(1, 3))
    configuration = paths.configuration(path)
    recipe = aligned.to_recipe(configuration)
    assert [layer.alignment for layer in recipe.layers] == [None, "math1text2", "text2text2", None, None]
    assert aligned.from_recipe(recipe) == configuration
    assert space("hm3", models(("math", "text"))).from_recipe(recipe) is None
    assert aligned.from_recipe(space("hm3", models(("math", "text"))).to_recipe(configuration)) is None


def test_paths_are_not_made_before_their_alignments_are_learned() -> None:
    own = space("hm3", models(("math", "text")), alignment="mlp")
    whole = own.to_recipe(own.paths.configuration(range(4)))
    assert all(layer.alignment is None for layer in whole.layers)
    with pytest.raises(ValueError, match="no alignment was learned for"):
        own.to_recipe(own.paths.configuration((0, 1, 6, 7)))
    with pytest.raises(ValueError, match=f"{len(own.pairs)} of {len(own.pairs)} pairs have no alignment"):
        own.with_alignments({})


def test_models_of_equal_weights_are_one_model_to_alignments() -> None:
    family = models(("math", "copy"))
    family = replace(family, fingerprints={**family.fingerprints, "copy": family.fingerprints["math"]})
    own = space("hm3", family, alignment="moments")
    assert (("math", 1), ("copy", 2)) not in own.pairs
    assert (("math", 1), ("copy", 1)) in own.pairs


def test_each_vector_s_merged_model_has_alignments_of_its_own() -> None:
    own = space("hm3", WITH_VECTORS, models=("math",), merged=MergedOptions(), alignment="moments")
    assert [*own.pool] == ["math", "merged 0", "merged 1"]
    assert own.pool["merged 1"] == own.to_recipe(own.paths.configuration(range(4, 8), preference=1))
    assert (("math", 1), ("merged 1", 2)) in own.pairs
    assert not [pair for pair in own.pairs if {"merged 0", "merged 1"} == {name for name, _ in pair}]
    aligned = own.with_alignments({pair: str(number) for number, pair in enumerate(own.pairs)})
    found = aligned.to_recipe(own.paths.configuration((0, 5, 2, 3), preference=1))
    pairs = (("math", 0), ("merged 1", 1)), (("merged 1", 1), ("math", 2))
    assert [layer.alignment for layer in found.layers][:3] == [*(str(own.pairs.index(pair)) for pair in pairs), None]


def test_more_alignments_than_anyone_would_learn_are_refused() -> None:
    with pytest.raises(InvalidStudy, match=r"14283 pairs of layers may be .* at most 10000 .* give a smaller max_jump"):
        space("hm3", models(num_layers=40), max_jump=None, alignment="moments")


# Scales.


def test_layers_of_a_path_but_the_last_have_scales() -> None:
    own = space("hm3", models(("math", "text")), scales=(0.8, 1.25))
    paths, path = own.paths, (0, 1, 6, 7)
    configuration = paths.configuration(path, scales=(0.8, 1.0, 1.2))
    own.parameters.check(configuration)
    recipe = own.to_recipe(configuration)
    assert [layer.scale for layer in recipe.layers] == [0.8, 1.0, 1.2, 1.0]
    assert own.from_recipe(recipe) == configuration == paths.repair(configuration)
    assert paths.scales(configuration) == (0.8, 1.0, 1.2)
    # Without scales, a path is the recipe that it was.
    plain = space("hm3", models(("math", "text")))
    assert own.to_recipe(paths.configuration(path)).digest == plain.to_recipe(plain.paths.configuration(path)).digest
    assert plain.from_recipe(recipe) is None
    narrow = space("hm3", models(("math", "text")), scales=(0.9, 1.25))
    assert narrow.from_recipe(recipe) is None
    assert own.describe().text.endswith("; a scale of 0.8 to 1.25 after each layer but the last")


@pytest.mark.parametrize("length", [3, 4, 5])
def test_drawn_paths_have_a_scale_for_each_layer_but_the_last(length: int) -> None:
    own = space("hm3", models(("math", "text")), scales=(0.8, 1.25), min_path_length=3)
    rng = np.random.default_rng(0)
    parameters = own.parameters
    near = [parameters.sample(rng) for _ in range(60)]
    plain = [parameters.build(lambda parameter: parameter.sample(rng)) for _ in range(60)]
    for drawn in [each for each in (*near, *plain) if each[LENGTH] == length]:
        parameters.check(drawn)
        scales = own.paths.scales(parameters.repair(drawn))
        assert len(scales) == length - 1
        assert all(0.8 <= scale <= 1.25 for scale in scales)
    drawn_scales = [scale for each in near for scale in own.paths.scales(each)]
    assert 0.3 < drawn_scales.count(1.0) / len(drawn_scales) < 0.7


def test_places_in_the_range_of_scales_are_logarithmic() -> None:
    paths = LayerPaths(("a", "b"), 4, 3, 5, 1, scale_range=(0.5, 2.0))
    assert [paths.scale_of(place) for place in (-3.0, -1.0, 0.0, 0.5, 1.0, 7.0)] == [
        0.5,
        0.5,
        1.0,
        pytest.approx(2**0.5),
        2.0,
        2.0,
    ]
    assert [paths.place_of(scale) for scale in (0.5, 1.0, 2.0)] == pytest.approx([-1.0, 0.0, 1.0])


@pytest.mark.parametrize("scales", [(1.0, 1.25), (0.8, 1.0), (0.0, 2.0), (1.25, 0.8)])
def test_scales_that_do_not_contain_one_are_refused(scales: tuple[float, float]) -> None:
    (problem,) = Hm3Section(kind="hm3", scales=scales).contradictions()
    assert problem.field == "search_space.scales"
    assert "give [lowest, highest], with 0 < lowest < 1 < highest" in problem.message


# The upper level.

VECTORS = ({"math": 0.5, "code": 0.25, "text": 0.25}, {"math": 0.0, "code": 1.0, "text": 0.0})
WITH_VECTORS = replace(models(), preferences=VECTORS)


def merged_by(method: Any, number: int = 0, **options: Any) -> Recipe:
    """The recipe of a whole merged model: that of the preference vector `number`."""
    own = space("hm3", WITH_VECTORS, merged=MergedOptions(method=method, **options))
    assert own.paths.models[-1] == MERGED
    recipe: Recipe = own.to_recipe(own.paths.configuration(range(12, 16), preference=number))
    return recipe


def test_a_merged_model_of_each_vector_is_one_more_in_the_pool() -> None:
    own = space("hm3", WITH_VECTORS, merged=MergedOptions())
    assert own.paths.models == ("math", "code", "text", MERGED)
    assert own.parameters[PREFERENCE].accepts == "one of 0, 1"
    path = (0, 13, 14, 3)  # math, two merged layers, math
    first, second = (own.to_recipe(own.paths.configuration(path, preference=number)) for number in (0, 1))
    # Coefficients: 0.4 under equal weights, so 0.4 * 3 times the weight.
    assert first.layers[1].mlp.per_source("lambda") == (0.3, 0.3, 0.6)  # sources by fingerprint: text, code, math
    assert [source.model for source in first.layers[1].mlp.sources] == ["text", "code", "math"]
    assert {source.layer for source in first.layers[2].attention.sources} == {2}
    assert [source.model for source in second.layers[1].mlp.sources] == ["code"]
    assert first.layers[0] == second.layers[0]
    assert first.embedding.sources == (Source("math"),)
    assert own.describe().text.endswith("; merged is merged by one of 2 preference vectors: task_arithmetic")


def test_mutants_keep_a_vector_and_add_the_given_one() -> None:
    """Merged layers of a mutant have the vector of its path's merged layers or, without any, the given vector."""
    own = space("hm3", WITH_VECTORS, merged=MergedOptions()).paths
    rng = np.random.default_rng(0)
    plain, merged = own.configuration(range(4)), own.configuration(range(12, 16), preference=0)
    for path, preference, expected in ((plain, 1, 1), (plain, None, 0), (merged, 1, 0)):
        mutants = [own.mutant(path, rng, preference=preference) for _ in range(100)]
        vectors = {m[PREFERENCE] for m in mutants if any(v == MERGED for v in m.values())}
        assert vectors == {expected}
    assert own.merged_preference(own.configuration((0, 13, 2, 3), preference=1)) == 1
    assert own.merged_preference(plain) is None


def test_a_path_is_merged_for_another_vector() -> None:
    """The layers stay; a path without merged layers has no vector."""
    own = space("hm3", WITH_VECTORS, merged=MergedOptions()).paths
    plain, merged = own.configuration(range(4)), own.configuration(range(12, 16), preference=0)
    assert own.with_preference(plain, 1) == plain
    assert own.with_preference(merged, 1) == own.configuration(range(12, 16), preference=1)


def test_unmerged_path_ignores_preferences() -> None:
    """A path without merged layers is the same under every preference vector."""
    own = space("hm3", WITH_VECTORS, merged=MergedOptions())
    assert own.paths.configuration(range(4), preference=1)[PREFERENCE] == 0
    assert own.parameters.repair({**own.paths.configuration(range(4)), PREFERENCE: 1})[PREFERENCE] == 0
    plain = space("hm3")
    assert own.to_recipe(own.paths.configuration(range(4))) == plain.to_recipe(plain.paths.configuration(range(4)))


def test_embedding_and_head_follow_the_path() -> None:
    """The embedding and the head follow the path into the merged model."""
    found = merged_by("task_arithmetic")
    assert found.embedding.method == found.head.method == "task_arithmetic"
    assert {source.layer for source in (*found.embedding.sources, *found.head.sources)} == {None}


@pytest.mark.parametrize(
    ("method", "coefficients"),
    [
        ("task_arithmetic", {"lambda": (0.3, 0.3, 0.6)}),
        ("ties_weighted", {"weight": (0.25, 0.25, 0.5), "density": 0.2}),
        ("dare_ties_l1", {"weight": (0.25, 0.25, 0.5), "density": 0.5}),
        ("pcb", {"lambda": 1.0, "density": 0.1}),
        ("consensus_ta", {"lambda": 0.4, "mask_lambda": 0.4, "agreement": 2.0}),
    ],
)
def test_coefficients_come_from_the_vector(method: str, coefficients: dict[str, Any]) -> None:
    merge = merged_by(method).layers[0].mlp
    assert merge.method == method
    for name, value in coefficients.items():
        expected = value if isinstance(value, tuple) else (value,) * 3
        assert merge.per_source(name) == expected
    assert merge.seed == (0 if method == "dare_ties_l1" else None)


def test_methods_without_weights() -> None:
    """Methods without weights leave experts out; strength and density are options."""
    assert [source.model for source in merged_by("pcb", 1).layers[0].mlp.sources] == ["code"]
    alone = merged_by("consensus_ta", 1).layers[0].mlp
    assert [source.model for source in alone.sources] == ["code"]
    assert (alone.number("lambda"), alone.number("agreement")) == pytest.approx((1.2, 1.0)), "it has the others' shares"
    merge = merged_by("ties_weighted", strength=1.5, density=0.3).layers[0].mlp
    assert (merge.number("lambda"), merge.per_source("density")) == (1.5, (0.3, 0.3, 0.3))


def test_without_vectors_there_is_one_merged_model() -> None:
    own = space("hm3", merged=MergedOptions())
    assert own.paths.num_preferences == 1
    assert PREFERENCE not in own.parameters.names
    family = models()
    known = all_baselines(base="base", experts=family.experts, fingerprints=family.fingerprints, num_layers=4)
    labels = [label for _, label, recipe in known if own.from_recipe(recipe) is not None]
    assert labels == ["expert:math", "expert:code", "expert:text", "task arithmetic 0.4"]


def test_one_model_and_the_merged_one_are_a_pool() -> None:
    own = space("hm3", WITH_VECTORS, models=("text",), merged=MergedOptions())
    assert own.paths.models == ("text", MERGED)
    assert not list(Hm3Section(kind="hm3", models=("text",), merged=MergedOptions()).contradictions())


OTHERS = replace(models(), preferences=({"sums": 0.5, "code": 0.5},))


@pytest.mark.parametrize(
    ("family", "options", "place", "message"),
    [
        (models(("merged", "text")), {}, "", "an expert is called 'merged', as the merged model of the pool is"),
        (OTHERS, {}, ".experts", "objective 'sums' has no expert: 'sums' is none of math, code, text; write sums: EXP"),
        (OTHERS, {"experts": {"sums": "maths"}}, ".experts", "objective 'sums' has no expert: 'maths' is none of"),
        (OTHERS, {"experts": {"sums": "code"}}, ".experts", "'code' is the expert of several objectives; give each"),
        (OTHERS, {"experts": {"sum": "math"}}, ".experts.sum", "'sum' is not an objective with a task; give some of"),
    ],
)
def test_a_merged_model_that_cannot_be_is_refused(
    family: SearchedModels, options: dict[str, Any], place: str, message: str
) -> None:
    with pytest.raises(InvalidStudy, match=re.escape(message)) as refused:
        space("hm3", family, merged=MergedOptions(**options))
    assert f"search_space.merged{place}" in {problem.field for problem in refused.value.problems}


def test_objectives_may_have_experts_of_other_names() -> None:
    own = space("hm3", OTHERS, merged=MergedOptions(experts={"sums": "math"}))
    layer = own.to_recipe(own.paths.configuration(range(12, 16))).layers[0]
    assert {source.model for source in layer.mlp.sources} == {"math", "code"}
    assert layer.mlp.per_source("lambda") == (0.4, 0.4)


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
def test_what_does_not_fit_is_refused(
    family: SearchedModels | None, options: dict[str, Any], place: str, message: str
) -> None:
    with pytest.raises(InvalidStudy, match=re.escape(message)) as refused:
        space("hm3", family, **options)
    assert place in {problem.field for problem in refused.value.problems}


def test_contradictions_are_found_without_the_models() -> None:
    section = Hm3Section(kind="hm3", models=("math",), max_path_length=3, min_path_length=5)
    assert [(problem.field, problem.message) for problem in section.contradictions()] == [
        ("search_space.models", "math alone has no layers to exchange; give two or more"),
        ("search_space.max_path_length", "3 is below min_path_length=5; give at least 5"),
    ]
    (problem,) = Hm3Section(kind="hm3", merged=MergedOptions(density=0.3)).contradictions()
    assert problem.field == "search_space.merged.density"
