"""The trials of a served study by the names that requests give them, and their recipes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass

from search_spaces.recipe import Recipe
from service.errors import NotFound
from service.store import Store
from service.types import TrialState

__all__ = ["Model", "ServedTrials"]

# Parsed recipes that are kept; those of large models with a merge for each tensor have some hundred KB.
MAX_RECIPES = 8


@dataclass(frozen=True)
class Model:
    """A trial as a model: its name in requests, and the number and label of the trial."""

    name: str
    trial: int
    label: str


class ServedTrials:
    """Trials of the study `study_id` that requests name as models; the recipes used last are kept in memory.

    The name of a trial is its number. A baseline has its label as a second name, such as "base" or "expert:math".
    """

    def __init__(self, store: Store, study_id: str) -> None:
        self._store = store
        self._study_id = study_id
        self._recipes: OrderedDict[int, Recipe] = OrderedDict()
        self._lock = threading.Lock()

    def models(self) -> tuple[Model, ...]:
        """List the trials of the study as models; trials whose merge failed are left out."""
        trials = self._store.trial_results(self._study_id)
        return tuple(
            Model(str(trial.number), trial.number, trial.label)
            for trial in trials
            if trial.state is not TrialState.FAIL
        )

    def recipe(self, name: str) -> Recipe:
        """The recipe of the trial with the given number or label. Raises NotFound if there is no such trial."""
        number = int(name) if name.isascii() and name.isdecimal() and len(name) < 10 else self._labelled(name)
        with self._lock:
            if number in self._recipes:
                self._recipes.move_to_end(number)
                return self._recipes[number]
            recipe = self._store.trial(self._study_id, number).read_recipe()
            self._recipes[number] = recipe
            if len(self._recipes) > MAX_RECIPES:
                self._recipes.popitem(last=False)
            return recipe

    def _labelled(self, label: str) -> int:
        given = [trial for trial in self._store.trial_results(self._study_id) if trial.origin.is_given]
        found = next((trial.number for trial in given if trial.label == label), None)
        if found is None:
            known = ", ".join(trial.label for trial in given)
            raise NotFound(f"model {label!r:.80}: give the number of a trial, or one of {known or 'the baselines'}")
        return found
