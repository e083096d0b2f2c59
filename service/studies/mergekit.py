"""Conversion of a merge of a stored study to a mergekit configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.recipe import Recipe
from service.resolved_study import ResolvedStudy
from service.studies.preflight.dtype import engine_dtype
from service.studies.preflight.files import check_files
from service.studies.preflight.models import unchanged_models
from service.types import JobRecord
from workers.mergekit.exporter import Inexpressible, configuration_text, family_config

__all__ = ["mergekit_file"]


def mergekit_file(stored: JobRecord, recipe: Mapping[str, Any], *, has_directories: bool = True) -> str:
    """Convert a recipe of a stored study to a mergekit configuration, as YAML.

    mergekit computes the tensors of the recipe's merge from the configuration, up to float32 rounding, and stores them
    in the dtype of the study's engines. `stored` is the job of the study, and `recipe` is the document of the recipe.
    Models without a hub id are named by their directories. If `has_directories` is False, the file is for another
    machine: these models are named by their aliases in the study, and a comment says that a reader must replace the
    aliases.

    Raises:
        InvalidStudy: The models cannot be read, or have changed since the study was created (problems with the place
            `models`), or mergekit computes other tensors (one problem for each reason, with the place `recipe`).
    """
    study, sources = unchanged_models(stored)
    resolved = ResolvedStudy.of(stored)
    check_files(study, resolved.access, section="models")
    try:
        document = family_config(
            Recipe.from_json(recipe), sources, dtype=engine_dtype(study, resolved), has_directories=has_directories
        )
    except Inexpressible as error:
        raise InvalidStudy(tuple(Problem("recipe", reason) for reason in error.reasons)) from error
    return configuration_text(document, sources, has_directories=has_directories)
