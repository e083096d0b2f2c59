"""Sorting and filtering of a study's trials by their fields, values and parameters, for tables of many trials."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

from search_spaces.objectives import Objective
from service.errors import InvalidQuery
from service.results.columns import PARAMETER, VALUE
from service.results.selection import accuracy_objectives
from service.types import TrialResult

__all__ = ["DEFAULT_SORT", "MAX_CONDITIONS", "TrialTable"]

DEFAULT_SORT = "number"
MEAN = "mean"

# A trial's value of a field; None where it has none.
Field: TypeAlias = Callable[[TrialResult], Any]

FIELDS: Mapping[str, Field] = {
    "number": lambda trial: trial.number,
    "state": lambda trial: trial.state.value,
    "origin": lambda trial: trial.origin.value,
    "label": lambda trial: trial.label,
    "bracket": lambda trial: trial.bracket,
    "rung": lambda trial: trial.rungs[-1].rung if trial.rungs else None,
    "samples": lambda trial: sum(trial.rungs[-1].num_samples.values()) if trial.rungs else None,
    "samples_scored": lambda trial: trial.samples_scored,
    "samples_reused": lambda trial: trial.samples_reused,
    "invalid": lambda trial: trial.invalid,
}

OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "!=": operator.ne,
    "=": operator.eq,
    ">": operator.gt,
    "<": operator.lt,
}

# The first operator of a condition. The search takes a time proportional to the condition's length.
OPERATOR = re.compile(r">=|<=|!=|=|>|<")
SIGNS = frozenset("<>=!")
MAX_CONDITIONS = 50
EXAMPLES = "math>=0.6, rung<2 or origin=search"


class TrialTable:
    """Trials of a study, which can be sorted and filtered.

    A trial's values are its values at the highest rung that it has finished. Values of trials with different numbers of
    samples are not comparable. Therefore a table that is sorted by values has the trials at full budget first.

    Args:
        trials: Trials of the study.
        configurations: Reads the configurations, keyed by trial number; called once, and only if parameters are used.
        objectives: Objectives of the study.
    """

    def __init__(
        self,
        trials: Sequence[TrialResult],
        configurations: Callable[[], Mapping[int, Mapping[str, Any]]],
        objectives: Sequence[Objective],
    ) -> None:
        self._trials = trials
        self._configurations = cache(configurations)
        self._objectives = tuple(objective.name for objective in objectives)
        self._accuracies = accuracy_objectives(objectives)

    def select(
        self,
        *,
        sort: str = DEFAULT_SORT,
        where: Sequence[str] = (),
        text: str | None = None,
        state: str | None = None,
        origin: str | None = None,
    ) -> list[int]:
        """Numbers of the trials that satisfy every condition, sorted.

        Args:
            sort: Name of the field to sort by; with "-" before the name, the largest value is first. Trials without a
                value are last, and equal trials are in the order of their numbers.
            where: Conditions such as "math>=0.6", at most MAX_CONDITIONS. A text may hold several conditions, separated
                by commas.
            text: Text that must occur in the trial's label or number; case is ignored.
            state: Only trials in this state, such as "COMPLETE".
            origin: Only trials whose recipe has this origin: "source" (a source model alone), "published", "search",
                "refined" (improved by gradients after the search) or "user".

        Raises:
            InvalidQuery: A condition or the field to sort by is not accepted, or there are too many conditions; the
                message says what is accepted.
        """
        key, is_descending, is_value = self._order(sort)
        if (num_conditions := sum(each.count(",") + 1 for each in where)) > MAX_CONDITIONS:
            raise InvalidQuery("where", f"has {num_conditions} conditions; give at most {MAX_CONDITIONS}")
        conditions = [self._condition(part) for each in where for part in each.split(",")]
        wanted = None if text is None else text.lower()
        found = [
            trial
            for trial in self._trials
            if (state is None or trial.state.value == state)
            and (origin is None or trial.origin.value == origin)
            and (wanted is None or wanted in trial.label.lower() or wanted in str(trial.number))
            and all(condition(trial) for condition in conditions)
        ]
        found.sort(key=lambda trial: trial.number)
        # Groups that follow each other: trials at full budget, others, and those without a value.
        groups: tuple[list[tuple[Any, int]], ...] = ([], [], [])
        for trial in found:
            value = key(trial)
            place = 2 if value is None else int(is_value and not trial.values)
            groups[place].append((value if is_value else _sortable(value), trial.number))
        for group in groups[:2]:
            group.sort(key=operator.itemgetter(0), reverse=is_descending)
        return [number for group in groups for _, number in group]

    def _order(self, sort: str) -> tuple[Field, bool, bool]:
        """Parse `sort`, the field to sort trials by; with "-" before the field, the largest value is first.

        Returns the field, whether the largest value is first, and whether the field is the value of an objective or a
        mean over objectives. Raises InvalidQuery if there is no such field.
        """
        name = sort.removeprefix("-")
        field = self._field(name)
        if field is None:
            raise InvalidQuery("sort", f"{name!r} is no field to sort by; accepted are {self._accepted()}, also with -")
        return field, sort.startswith("-"), name == MEAN or name.removeprefix(VALUE) in self._objectives

    def _condition(self, text: str) -> Callable[[TrialResult], bool]:
        text = text.strip()
        found = OPERATOR.search(text)
        name, sign, wanted = (
            ("", "", "") if found is None else (text[: found.start()].strip(), found[0], text[found.end() :].strip())
        )
        if not name or "!" in name or not wanted or wanted[0] in SIGNS:
            raise InvalidQuery(
                "where",
                f"{text!r} is not FIELD, one of {' '.join(OPERATORS)} and a value; write {EXAMPLES}, several "
                "separated by commas",
            )
        field = self._field(name)
        if field is None:
            raise InvalidQuery("where", f"{text!r}: the study has no {name!r}; accepted are {self._accepted()}")
        compare, number = OPERATORS[sign], _number(wanted)
        if number is None and sign not in ("=", "!="):
            raise InvalidQuery("where", f"{text!r}: {wanted!r} is not a number, which {sign} needs; write rung{sign}2")

        def holds(trial: TrialResult) -> bool:
            value = field(trial)
            if value is None:
                return False
            if isinstance(value, bool) or not isinstance(value, int | float):
                return sign in ("=", "!=") and compare(str(value).lower(), wanted.lower())
            return compare(value, number) if number is not None else sign == "!="

        return holds

    def _field(self, name: str) -> Field | None:
        if name in FIELDS:
            return FIELDS[name]
        if name == MEAN and self._accuracies:
            return lambda trial: _mean(trial, self._accuracies)
        if (objective := name.removeprefix(VALUE)) in self._objectives:
            return lambda trial: trial.rungs[-1].values.get(objective) if trial.rungs else None
        if name.startswith(PARAMETER):
            parameter, configurations = name.removeprefix(PARAMETER), self._configurations()
            if any(parameter in configuration for configuration in configurations.values()):
                return lambda trial: configurations.get(trial.number, {}).get(parameter)
        return None

    def _accepted(self) -> str:
        mean = [MEAN] if self._accuracies else []
        return ", ".join([*FIELDS, *mean, *(VALUE + name for name in self._objectives), f"{PARAMETER}NAME"])


def _mean(trial: TrialResult, names: Sequence[str]) -> float | None:
    """Mean of the trial's values of the objectives `names` at its highest rung.

    Returns None if one of these values is missing.
    """
    values = trial.rungs[-1].values if trial.rungs else {}
    found = [values[name] for name in names if name in values]
    return sum(found) / len(names) if len(found) == len(names) else None


def _sortable(value: Any) -> tuple[bool, float, str]:
    """Sort key for a mixture of numbers and texts: numbers are before texts."""
    is_number = isinstance(value, int | float)
    return (not is_number, float(value) if is_number else 0.0, "" if is_number else str(value).lower())


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
