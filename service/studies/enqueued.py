"""Checks of a merge that a user enqueues in a stored study: a recipe, a mergekit configuration, or a configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.errors import InvalidStudy, Problem, SearchSpaceError
from search_spaces.spaces.base import AlignedSpace, LayeredSpace
from search_spaces.study.search import GivenRecipe
from service.studies.preflight.examine import built_space
from service.studies.preflight.models import unchanged_models
from service.studies.preflight.recipes import given_recipes
from service.types import JobRecord

__all__ = ["check_enqueued"]


def check_enqueued(
    stored: JobRecord,
    label: str,
    *,
    recipe: Mapping[str, Any] | None = None,
    configuration: Mapping[str, Any] | None = None,
) -> Mapping[str, Any] | None:
    """Check that a stored study can evaluate a given merge.

    Args:
        stored: The job of the study.
        label: Label of the trial that will evaluate the merge.
        recipe: A recipe document or mergekit configuration over the study's models; None if `configuration` is given.
        configuration: A value for each parameter of the study's search space; None if `recipe` is given.

    Returns:
        The document of the recipe, also for a mergekit configuration; None for a configuration.

    Raises:
        InvalidStudy: The study cannot evaluate the merge. Problems have the place `recipe` or `configuration`.
    """
    study, sources = unchanged_models(stored)
    problems: list[Problem] = []
    space = built_space(study, sources, sources.fingerprints, problems)
    if problems or space is None:
        raise InvalidStudy(tuple(problems))
    if recipe is not None:
        given = GivenRecipe(name=label, recipe=dict(recipe))
        alone = study.model_copy(update={"search": study.search.model_copy(update={"recipes": (given,)})})
        max_layers = space.max_layers if isinstance(space, LayeredSpace) else 0
        warnings: list[str] = []
        found = given_recipes(alone, sources, problems, max_layers=max_layers, note=warnings.append)
        if problems:
            raise InvalidStudy(tuple(Problem("recipe", problem.message) for problem in problems))
        return found[0][1].to_json()
    try:
        space.parameters.check(configuration or {})
        if not isinstance(space, AlignedSpace) or space.alignment == "none":
            space.to_recipe(space.parameters.repair(configuration or {}))
    except SearchSpaceError as error:
        text = str(error).removeprefix("configuration: ")
        raise InvalidStudy((Problem("configuration", text),)) from error
    return None
