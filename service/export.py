"""Merged models as files: of a trial of a run, or of a recipe file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Recipe
from search_spaces.study import Study
from service.errors import Conflict, NotFound
from service.run_record import run_record
from service.selection import best_trial
from service.store import Store
from service.types import StudyRecord, TrialRecord
from workers.types import Family, ModelSource

__all__ = ["export_trial", "merge_recipe"]


def export_trial(store: Store, record: StudyRecord, trial: str, out: Path, *, dtype: str | None = None) -> Path:
    """Write the merge of a trial ("best" or its number) to `out` and return it; `dtype` None is the engine's.

    Raises NotFound (no such trial), Conflict (the sources have changed since, or `out` is taken).
    """
    from workers.bank import Bank
    from workers.checkpoints import open_family

    result = run_record(store, record.id)
    chosen = _chosen(result.trials, trial, best_trial(result.trials, result.objectives))
    study = Study.model_validate(record.document)
    family = open_family(study.models.base, study.models.experts)
    if family.fingerprints != record.facts["fingerprints"]:
        changed = sorted(a for a, f in family.fingerprints.items() if record.facts["fingerprints"].get(a) != f)
        raise Conflict(f"models {', '.join(changed)} have changed since the study; what was scored cannot be written")
    held_out = next((row.values for row in result.holdout if row.trial == chosen.number), None)
    return _write(
        chosen.recipe, Bank(family), out, dtype=dtype or _engine_dtype(study), scores=held_out, study=study.name
    )


def merge_recipe(recipe_file: Path, directories: Mapping[str, Path], out: Path, *, dtype: str) -> Path:
    """Write the merge that a recipe file describes to `out` and return it.

    `directories` says where each of its models is. Raises InvalidRecipe, InvalidModel, Conflict.
    """
    from workers.bank import Bank

    recipe = _read_recipe(recipe_file)
    if missing := sorted(set(recipe.models) - set(directories)):
        hint = " ".join(f"--model {alias}=DIR" for alias in missing)
        raise InvalidRecipe(f"{recipe_file}: where are {', '.join(missing)}? Add {hint}")
    if unknown := sorted(set(directories) - set(recipe.models)):
        raise InvalidRecipe(f"{recipe_file}: has no model {', '.join(unknown)}; it names {', '.join(recipe.models)}")
    family = _family(recipe.base, directories)
    for alias, fingerprint in family.fingerprints.items():
        if recipe.models[alias] != fingerprint:
            raise InvalidRecipe(
                f"{recipe_file}: {directories[alias]} is not the recipe's {alias!r}: its content has fingerprint "
                f"{fingerprint[:12]}, the recipe's {recipe.models[alias][:12]}"
            )
    return _write(recipe, Bank(family), out, dtype=dtype)


def _read_recipe(file: Path) -> Recipe:
    try:
        return Recipe.from_json(json.loads(file.read_text()))
    except OSError as error:
        raise InvalidRecipe(f"{file}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InvalidRecipe(f"{file}: is not UTF-8 text (byte {error.start}); give a recipe.json") from error
    except json.JSONDecodeError as error:
        raise InvalidRecipe(f"{file}: line {error.lineno}: not JSON: {error.msg}") from error
    except RecursionError as error:
        raise InvalidRecipe(f"{file}: is nested too deeply") from error
    except ValueError as error:  # a number too long for Python, or what `from_json` says
        raise InvalidRecipe(f"{file}: {error}") from error


def _family(base: str, directories: Mapping[str, Path]) -> Family:
    """The models of a recipe; it may name no other than its base."""
    from workers.checkpoints import fingerprint, open_family

    experts = {alias: directory for alias, directory in directories.items() if alias != base}
    if experts:
        return open_family(directories[base], experts, base_alias=base)
    directory = directories[base].resolve()
    return Family(ModelSource(base, str(directory), fingerprint(directory)), experts=())


def _write(recipe: Recipe, bank: Any, out: Path, *, dtype: str, **details: Any) -> Path:
    import torch

    from workers.writer import export

    try:
        return export(recipe, bank, out, dtype=getattr(torch, dtype), **details)
    except FileExistsError as error:
        raise Conflict(str(error)) from error


def _chosen(trials: tuple[TrialRecord, ...], trial: str, winner: TrialRecord | None) -> TrialRecord:
    if not trials:
        raise NotFound("the run has no trials yet; there is nothing to export")
    if trial == "best":
        if winner is None:
            raise NotFound("no trial has reached the full budget yet, so there is no best one")
        return winner
    if not trial.isdecimal() or int(trial) >= len(trials):
        raise NotFound(f'trial {trial!r}: give "best" or a number from 0 to {len(trials) - 1}')
    return trials[int(trial)]


def _engine_dtype(study: Study) -> str:
    import torch

    if study.engine.dtype != "auto":
        return study.engine.dtype
    return "bfloat16" if torch.cuda.is_available() else "float32"
