"""Checks of merges that users enqueue in a stored study, with the shipped models."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from search_spaces.errors import InvalidStudy
from search_spaces.recipe import Recipe
from search_spaces.spaces.base import SearchSpace
from search_spaces.study.file import Study, parse_study
from service.studies.enqueued import check_enqueued
from service.studies.preflight.examine import built_space
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study, study_document
from workers.models.family import locate_family
from workers.tiny_family import family_dir

LINEAR = {
    "merge_method": "linear",
    "models": [{"model": name, "parameters": {"weight": 0.5}} for name in ("math", "text")],
}


@pytest.fixture(scope="module")
def stored() -> JobRecord:
    experts = {name: str(family_dir() / "experts" / name) for name in ("math", "text")}
    document = {**study_document(), "models": {"base": str(family_dir() / "base"), "experts": experts}}
    study = parse_study({**document, "search_space": {"kind": "lfs", "layer_groups": 2, "methods": ["linear", "ties"]}})
    located = locate_family(study.models.base, study.models.named).resolve(tokenizer="base")
    accepted = resolved_study(fingerprints=located.fingerprints, algorithm="random")
    return JobRecord(
        id="c0ffee",
        name="s",
        state=JobState.COMPLETE,
        document=study.canonical(),
        accepted=accepted.to_json(),
        created_at=0.0,
        kind="search",
    )


def space_of(stored: JobRecord) -> SearchSpace:
    study = Study.model_validate(stored.document)
    sources = locate_family(study.models.base, study.models.named).resolve(tokenizer="base")
    space = built_space(study, sources, sources.fingerprints, [])
    assert space is not None
    return space


def problems(stored: JobRecord, **merge: Any) -> list[str]:
    with pytest.raises(InvalidStudy) as refused:
        check_enqueued(stored, "by hand", **merge)
    return [f"{problem.field}: {problem.message}" for problem in refused.value.problems]


def test_a_recipe_over_the_models_is_accepted(stored: JobRecord) -> None:
    """A mergekit configuration becomes a recipe, which is accepted too."""
    document = check_enqueued(stored, "by hand", recipe=LINEAR)
    assert document is not None
    recipe = Recipe.from_json(document)
    assert recipe.layers[0].attention.method == "linear"
    assert check_enqueued(stored, "by hand", recipe=document) == document


def test_a_configuration_of_the_space_is_accepted(stored: JobRecord) -> None:
    space = space_of(stored)
    configuration = space.parameters.build(lambda parameter: parameter.default_value)
    assert check_enqueued(stored, "by hand", configuration=configuration) is None
    name = next(iter(configuration))
    (refused,) = problems(stored, configuration={**configuration, name: "nonsense"})
    assert refused.startswith("configuration: ")
    assert name in refused
    (refused,) = problems(stored, configuration={**configuration, "nonsense": 1})
    assert refused.startswith("configuration: unknown parameter 'nonsense'")
    (refused,) = problems(stored, configuration={})
    assert refused.startswith("configuration: ")


def test_other_models_are_refused(stored: JobRecord) -> None:
    """Neither a merge of other models, nor models whose weights have changed since, are accepted."""
    document = check_enqueued(stored, "by hand", recipe=LINEAR)
    assert document is not None
    other = {**document, "models": {**document["models"], "math": "0" * 64}}
    (refused,) = problems(stored, recipe=other)
    assert refused.startswith("recipe: merges math (000000000000), whose content is of no model of this study")
    accepted = resolved_study(algorithm="random").to_json()
    (refused,) = problems(replace(stored, accepted=accepted), recipe=document)
    assert refused == "models: their weights have changed since the study was created; restore them"


@pytest.mark.parametrize(
    ("recipe", "text"),
    [
        ({}, "is neither a recipe"),
        ({"merge_method": "nonsense", "models": []}, "nonsense"),
        ({"format": "mergesearch-recipe/9"}, "mergesearch-recipe/9"),
    ],
)
def test_what_is_no_recipe_is_refused(stored: JobRecord, recipe: dict[str, Any], text: str) -> None:
    refused = problems(stored, recipe=recipe)
    assert refused[0].startswith("recipe: ")
    assert text in refused[0]
