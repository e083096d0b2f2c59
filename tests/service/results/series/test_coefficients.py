"""The coefficients of the best trial, by layer and part."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.layerwise import LayerwiseSection
from service.results.record import RunRecord
from service.results.series.coefficients import Coefficient, coefficients
from tests.search_spaces.spaces.families import models
from tests.service.synthetic_run import EXPERTS, FINGERPRINTS, best_of, run_record

RUN = run_record(num_trials=12)


def with_best(recipe: Recipe | None = None, **changes: Any) -> RunRecord:
    best = best_of(RUN)
    changed = replace(best, recipe=recipe or best.recipe, **changes)
    return replace(RUN, trials=tuple(changed if trial.number == best.number else trial for trial in RUN.trials))


def test_parameters_are_coefficients() -> None:
    """Every parameter of a layerwise space is one of the coefficients."""
    known = models(experts=EXPERTS, num_layers=3)
    for granularity in ("tensor", "component", "layer"):
        space = LayerwiseSection(kind="layerwise", granularity=granularity).build(known)
        configuration = {name: number / 100 for number, name in enumerate(space.parameters.names)}
        found = coefficients(with_best(configuration=configuration)).values
        assert sorted(c.value for c in found) == sorted(configuration.values())
        assert {c.expert for c in found} == set(EXPERTS)
        assert {c.layer for c in found} == {None, 0, 1, 2}
        parts = {c.part for c in found if c.layer == 1}
        assert {"tensor": "self_attn.qkv_proj", "component": "attention", "layer": ""}[granularity] in parts
        assert not any(part.endswith(".weight") for part in parts)


def test_aliases_may_have_dots_and_tensors_numbers() -> None:
    run = with_best(configuration={"model.layers.2.experts.7.w1.weight.math.v2": 0.5, "head.math.v2": 0.25})
    document = {**run.study.document, "models": {"experts": {"v2": "a", "math.v2": "b"}}}
    run = replace(run, study=replace(run.study, document=document))
    assert coefficients(run).values == (
        Coefficient("math.v2", 2, "experts.7.w1", 0.5),
        Coefficient("math.v2", None, "head", 0.25),
    )


def test_of_other_spaces_they_are_read_from_the_recipe() -> None:
    math, text = Source("math", 0), Source("text", 0)
    layer = LayerRecipe(
        attention=Merge("task_arithmetic", (math, text), {"lambda": (0.25, -0.5)}),
        mlp=Merge("slerp", (math, text), {"t": 0.5}),
        norm=Merge("passthrough", (text,)),
    )
    ties = Merge("ties", (Source("math"), Source("lookup")), {"k": 0.2, "lambda": 0.75})
    weighted = Merge("ties_weighted", (Source("math"), Source("text")), {"weight": (0.5, 1.0), "lambda": 0.5, "k": 0.2})
    recipe = Recipe(FINGERPRINTS, "base", (layer,), embedding=ties, head=weighted)
    found = {(c.layer, c.part, c.expert): c.value for c in coefficients(with_best(recipe)).values}
    assert found == {
        (None, "embedding", "math"): 0.75,
        (None, "embedding", "text"): 0.0,
        (None, "embedding", "lookup"): 0.75,
        (0, "attention", "math"): 0.25,
        (0, "attention", "text"): -0.5,
        (0, "attention", "lookup"): 0.0,
        (0, "norm", "math"): 0.0,
        (0, "norm", "text"): 1.0,
        (0, "norm", "lookup"): 0.0,
        (None, "head", "math"): 0.25,
        (None, "head", "text"): 0.5,
        (None, "head", "lookup"): 0.0,
    }


def test_before_there_is_a_best_trial_there_are_none() -> None:
    assert coefficients(replace(RUN, trials=())).values == ()
