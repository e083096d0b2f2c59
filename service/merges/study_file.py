"""Beginning of a study file from a mergekit configuration: its models, and its merge as a recipe to be scored."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidRecipe
from search_spaces.study.yaml import read_document
from service.merges.sources import aliases_of, directory_of
from workers.mergekit.config import split_adapter
from workers.mergekit.reader import read_configuration
from workers.object_store import is_object_url

__all__ = ["study_from_mergekit", "study_of_file"]

# Keys of a mergekit configuration whose values are names of models.
MODEL_KEYS = ("model", "base_model", "tokenizer_source", "source")

BASE = "base"


def study_of_file(file: Path, *, name: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Begin a study file with the models and the merge of the mergekit configuration in `file`.

    Models that are directories, relative to the folder of `file` or to the current directory, get absolute paths, so
    that the study file may be in another folder. Other names stay as they are.

    The arguments `name` and `warn` are those of the function `study_from_mergekit`. Raises InvalidStudy if the file
    cannot be read as YAML, and InvalidRecipe as that function does.
    """
    study = study_from_mergekit(read_document(file), name=name, warn=warn)

    def placed(model: str) -> str:
        directory = None if is_object_url(model) else directory_of(model, file, warn)
        return model if directory is None else str(directory.resolve())

    models = study["models"]
    experts = {alias: placed(model) for alias, model in models["experts"].items()}
    return {**study, "models": {"base": placed(models["base"]), "experts": experts}}


def study_from_mergekit(document: Any, *, name: str, warn: Callable[[str], None]) -> dict[str, Any]:
    """Begin a study file with the models of a mergekit configuration and with its merge.

    `document` is the configuration, as parsed from YAML, and `name` is the name of the study and of the merge. The base
    of the study is the configuration's base, or its first model. The merge is in `search.recipes`, with the study's
    names of the models. The study scores it beside the baselines, and searches for better merges. The objectives are
    empty. `warn` is called with a line for each setting that has no effect, and if the configuration names no base.

    Raises:
        InvalidRecipe: The document is no mergekit configuration, or a study cannot have its models.
    """
    if not isinstance(document, Mapping) or "merge_method" not in document:
        raise InvalidRecipe("is no mergekit configuration: it has no merge_method")
    configuration = read_configuration(document, warn=warn)
    base = configuration.base
    if split_adapter(base)[1] is not None:
        raise InvalidRecipe(f"the base {base} is a model with an adapter; give the base model alone as base_model")
    if configuration.base_model is None:
        warn(f"the configuration names no base_model; the study's base is its first model, {base}")
    own = aliases_of(configuration.models)
    aliases = {base: BASE}
    experts: dict[str, str] = {}
    for model in configuration.models:
        if model == base:
            continue
        whole, adapter = split_adapter(model)
        if adapter is not None and whole != base:
            raise InvalidRecipe(
                f"{model}: the adapter's model is not the base {base}; a study's adapters change the base"
            )
        alias = own[model]
        while alias in (BASE, "union", *experts):
            alias += "-2"
        aliases[model], experts[alias] = alias, adapter or whole
    if not experts:
        raise InvalidRecipe("names one model only; a study merges a base and at least one expert")
    return {
        "name": name,
        "models": {"base": base, "experts": experts},
        "search": {"recipes": [{"name": name, "recipe": _renamed(document, aliases)}], "recipes_only": False},
        "fidelity": {"scheduler": "none"},
        "objectives": [{"name": "task", "task": "", "metric": ""}],
    }


def _renamed(part: Any, aliases: Mapping[str, str]) -> Any:
    """Copy of a mergekit configuration, or of a part of it, in which `aliases` gives each model its new name."""
    if isinstance(part, Mapping):
        return {
            key: aliases.get(value, value) if key in MODEL_KEYS and isinstance(value, str) else _renamed(value, aliases)
            for key, value in part.items()
        }
    if isinstance(part, list):
        return [_renamed(each, aliases) for each in part]
    return part if isinstance(part, str | int | float | bool | None) else str(part)  # such as a date
