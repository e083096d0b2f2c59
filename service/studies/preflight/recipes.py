"""Reading and checks of the recipes that a study file lists: recipe documents and mergekit configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidRecipe, InvalidStudy, Problem
from search_spaces.merge import Merge
from search_spaces.methods import METHODS
from search_spaces.recipe import Recipe
from search_spaces.study.file import Study, resolved_model
from search_spaces.study.search import GivenRecipe
from search_spaces.study.yaml import parse_document
from workers.errors import InvalidTask
from workers.mergekit.config import MergekitConfig
from workers.mergekit.importer import to_recipe
from workers.mergekit.reader import read_configuration
from workers.models.family import ResolvedFamily
from workers.models.remote import local_file

__all__ = ["given_recipes"]

MAX_BYTES = 16_000_000  # of the file of a recipe


def given_recipes(
    study: Study,
    sources: ResolvedFamily,
    problems: list[Problem],
    *,
    max_layers: int = 0,
    note: Callable[[str], None],
) -> tuple[tuple[str, Recipe], ...]:
    """Read the recipes that a study file lists (`search.recipes`), each with its name.

    `sources` are the study's models, with content fingerprints. A merge may have up to `max_layers` layers; if
    `max_layers` is 0, it may have up to the base's number of layers. Recipes that cannot be used are added to
    `problems`. `note` is called with warnings about mergekit settings that have no effect.
    """
    found: dict[str, tuple[str, Recipe]] = {}
    for index, given in enumerate(study.search.recipes):
        place = f"search.recipes.{index}"
        try:
            document, directory = _document(given)
            recipe = _recipe(document, directory, study, sources, note)
            _check(recipe, sources, max_layers)
        except InvalidRecipe as error:
            problems += [Problem(place, line) for line in str(error).splitlines()]
            continue
        name = given.label
        if any(name == other for other, _ in found.values()):
            problems.append(Problem(f"{place}.name", f"{name} is the name of two recipes; give another name"))
        elif recipe.digest in found:
            problems.append(Problem(place, f"{name} is the same merge as {found[recipe.digest][0]}; leave one out"))
        else:
            found[recipe.digest] = (name, recipe)
    return tuple(found.values())


def _document(given: GivenRecipe) -> tuple[Mapping[str, Any], Path | None]:
    """Read `given`, a recipe in the study file or in another file that the study file names.

    Returns the parsed recipe, and the directory to which paths in it are relative. The directory is None for a recipe
    in the study file itself. Raises InvalidRecipe if the file cannot be read.
    """
    if given.file is None:
        assert given.recipe is not None
        return given.recipe, None
    try:
        file = local_file(given.file)
        with file.open("rb") as stream:
            content = stream.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise InvalidRecipe(f"{given.file}: has more than {MAX_BYTES:,} bytes, the limit of a recipe's file")
        document = parse_document(content, given.file, is_json=file.suffix == ".json")
    except InvalidStudy as error:
        raise InvalidRecipe("\n".join(problem.message for problem in error.problems)) from error
    except InvalidTask as error:
        raise InvalidRecipe(str(error)) from error
    except OSError as error:
        raise InvalidRecipe(f"{given.file}: cannot be read ({error.strerror})") from error
    return document, file.parent


def _recipe(
    document: Mapping[str, Any],
    directory: Path | None,
    study: Study,
    sources: ResolvedFamily,
    note: Callable[[str], None],
) -> Recipe:
    if "merge_method" in document:
        return _of_mergekit(read_configuration(document, warn=note), directory, study, sources, note)
    if "format" not in document:
        raise InvalidRecipe("is neither a recipe (it has no format) nor a mergekit configuration (no merge_method)")
    return Recipe.from_json(document).canonical()


def _of_mergekit(
    configuration: MergekitConfig,
    directory: Path | None,
    study: Study,
    sources: ResolvedFamily,
    note: Callable[[str], None],
) -> Recipe:
    """Convert a mergekit configuration to a recipe over the study's models, with the study's vocabulary.

    `directory` is the directory to which paths in the configuration are relative; None is the current directory.
    `sources` are the study's models. `note` is called with warnings about settings that have no effect. Raises
    InvalidRecipe if the configuration has other models or another vocabulary. If the configuration has another base
    than the study, the merges state it, because a recipe's base is that of the study.
    """
    named = {alias: alias for alias in sources.checkpoints}
    named |= {_without_revision(model): alias for alias, model in study.models.named.items()}
    named[_without_revision(study.models.base)] = sources.base_alias
    aliases: dict[str, str] = {}
    for model in configuration.models:
        place = resolved_model(model, directory or Path())
        alias = named.get(model) or named.get(_without_revision(place)) or named.get(_without_revision(model))
        if alias is None:
            raise InvalidRecipe(f"{model} is no model of this study; it has {', '.join(sources.checkpoints)}")
        aliases[model] = alias
    tokenizer = configuration.tokenizer_source
    if tokenizer not in (None, "base", study.models.tokenizer) and aliases.get(tokenizer or "") != sources.base_alias:
        message = f"the study's vocabulary is models.tokenizer: {study.models.tokenizer}"
        raise InvalidRecipe(f"{configuration.tokenizer_place}: {tokenizer}: {message}; give the same, or leave it out")
    layouts = {alias: checkpoint.layout for alias, checkpoint in sources.checkpoints.items()}
    recipe = to_recipe(
        configuration,
        aliases,
        fingerprints=sources.fingerprints,
        layout=layouts[aliases[configuration.base]],
        layouts=layouts,
        warn=note,
    )

    def with_own_base(merge: Merge) -> Merge:
        return replace(merge, base=merge.base_in(recipe.base)) if METHODS[merge.method].needs_base else merge

    models = {**recipe.models, sources.base_alias: sources.fingerprints[sources.base_alias]}
    recipe = replace(recipe.rewritten(with_own_base), models=models, base=sources.base_alias)
    return replace(recipe, tokenizer=study.models.tokenizer).canonical()


def _without_revision(model: str) -> str:
    return model if Path(model).is_absolute() else model.partition("@")[0]


def _check(recipe: Recipe, sources: ResolvedFamily, max_layers: int) -> None:
    """Check that a recipe merges only the models `sources`, and has no more layers than engines can hold.

    A merge may have up to `max_layers` layers; if `max_layers` is 0, it may have up to the base's number of layers.
    Raises InvalidRecipe if the recipe has other models, another vocabulary or too many layers.
    """
    known = set(sources.fingerprints.values())
    unknown = [f"{alias} ({print_[:12]})" for alias, print_ in recipe.models.items() if print_ not in known]
    if unknown:
        names = ", ".join(f"{alias} ({print_[:12]})" for alias, print_ in sources.fingerprints.items())
        raise InvalidRecipe(f"merges {', '.join(unknown)}, whose content is of no model of this study: it has {names}")
    base, own = recipe.models[recipe.base], sources.fingerprints[sources.base_alias]
    if base != own:
        raise InvalidRecipe(f"its base {recipe.base} ({base[:12]}) is not that of the study ({own[:12]})")
    tokenizer = _of_vocabulary(recipe.tokenizer, recipe.models)
    if tokenizer != _of_vocabulary(sources.tokenizer, sources.fingerprints):
        message = f"the study's is models.tokenizer: {sources.tokenizer}; give a recipe with the same"
        raise InvalidRecipe(f"its vocabulary is tokenizer: {recipe.tokenizer}, and {message}")
    if recipe.vocabulary != sources.vocabulary:
        raise InvalidRecipe(
            f"has the vocabulary options {dict(recipe.vocabulary)}, which merges of a study cannot have"
        )
    num_layers, of_base = len(recipe.layers), sources.layout.num_layers
    if max_layers == 0 and num_layers != of_base:
        message = f"has {num_layers} layers, and merges in this search space have {of_base}"
        raise InvalidRecipe(f"{message}; give a search_space with layers of any number, such as dis")
    if 0 < max_layers < num_layers:
        raise InvalidRecipe(f"has {num_layers} layers; give limits.max_layers: {num_layers} or more, now {max_layers}")


def _of_vocabulary(tokenizer: str, fingerprints: Mapping[str, str]) -> str:
    """The vocabulary that `tokenizer` selects, without the model's name: "base", "union" or a model's fingerprint."""
    return fingerprints.get(tokenizer, tokenizer)
