"""Configurations as rows of numbers, for searchers that learn from them.

A column is a parameter, in the order of the space. Values are in [0, 1]: a real number is encoded by its position in
its range, a whole number or a choice by the middle of its cell. INACTIVE marks a parameter that does not exist in that
row. In a space with a structure, every row that is made here encodes a repaired configuration, and rows are drawn as
the space draws. Arrays are [num_rows, num_parameters], float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Categorical, Condition, Float, Integer, Parameter, Parameters

__all__ = ["INACTIVE", "Encoding", "Rows"]

Rows = NDArray[np.float64]

# Outside [0, 1], so that a tree separates inactive parameters with one split, as in SMAC's imputation.
INACTIVE = -1.0


class Encoding:
    """Encodes, decodes, draws and mutates rows of one space."""

    def __init__(self, parameters: Parameters) -> None:
        self._space = parameters
        self._parameters = tuple(parameters)
        self._names = parameters.names
        self._choices = {
            column: {(type(choice), choice): index for index, choice in enumerate(parameter.choices)}
            for column, parameter in enumerate(self._parameters)
            if isinstance(parameter, Categorical)
        }
        self._low, self._half, self._span = np.array([_scale(p) for p in self._parameters]).reshape(-1, 3).T
        self._num_cells = np.array([_num_cells(parameter) for parameter in self._parameters], dtype=np.float64)
        self._is_discrete = np.isfinite(self._num_cells)
        self._is_categorical = np.array([isinstance(parameter, Categorical) for parameter in self._parameters])
        column = {name: index for index, name in enumerate(parameters.names)}
        roles = [parameters.roles.get(name, name) for name in parameters.names]
        self._role = np.array([roles.index(role) for role in roles], dtype=np.intp)
        self._conditions = tuple(
            (index, column[condition.parent], self._encoded(condition))
            for index, parameter in enumerate(self._parameters)
            for condition in parameter.conditions
        )

    def encode(self, configurations: Iterable[Mapping[str, Any]]) -> Rows:
        rows = [self._numbers(configuration) for configuration in configurations]
        numbers = np.array(rows, dtype=np.float64).reshape(-1, len(self._parameters))
        return np.where(np.isnan(numbers), INACTIVE, (numbers - self._low + self._half) / self._span)

    def _numbers(self, configuration: Mapping[str, Any]) -> list[Any]:
        """The values of all parameters: numbers as they are, choices by their index, NaN for inactive parameters."""
        values = [configuration.get(name, math.nan) for name in self._names]
        for column, index_of in self._choices.items():
            if self._names[column] in configuration:
                values[column] = index_of[type(values[column]), values[column]]
        return values

    def _encoded(self, condition: Condition) -> Rows:
        """The encoded values of a condition's parent for which the condition holds."""
        column = self._names.index(condition.parent)
        values = [value for value in condition.values if self._parameters[column].contains(value)]
        return self.encode({condition.parent: value} for value in values)[:, column]

    def decode(self, row: Rows) -> dict[str, Any]:
        """The configuration of one row, with plain Python values and without inactive parameters."""
        return {p.name: _decode(p, float(u)) for p, u in zip(self._parameters, row, strict=True) if u != INACTIVE}

    def sample(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Rows drawn uniformly, or from the distribution of the space's structure."""
        if self._space.structure is not None:
            return self.encode(self._space.sample(rng) for _ in range(num_rows))
        return self.normalise(rng.random((num_rows, len(self._parameters))))

    def sample_tied(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Rows drawn uniformly among those in which all parameters of one role have the same value.

        There are none where no two parameters share a role.
        """
        if len(set(self._role)) == len(self._role):
            num_rows = 0
        return self.normalise(rng.random((num_rows, len(self._parameters)))[:, self._role])

    @property
    def is_categorical(self) -> NDArray[np.bool_]:
        """Which columns are choices."""
        return self._is_categorical

    def fill(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """`rows` with uniform draws for inactive parameters, so that rows can be added and subtracted."""
        return np.where(rows == INACTIVE, rng.random(rows.shape), rows)

    def first_unknown(self, rows: Rows, known: Rows) -> Rows | None:
        """The first of `rows` that is none of `known`; None if all are."""
        seen = set(self.keys(known))
        return next((row for row, key in zip(rows, self.keys(rows), strict=True) if key not in seen), None)

    def values_by_role(self, num_levels: int) -> list[Rows]:
        """A few values of each role, in the order of `tied`.

        They are all choices, and at most `num_levels` numbers from one end of the range to the other.
        """
        levels = np.linspace(0.0, 1.0, num_levels)
        first = [column for column, role in enumerate(self._role) if column == role]
        return [
            (np.arange(cells) + 0.5) / cells if is_categorical or cells <= num_levels else levels
            for cells, is_categorical in zip(self._num_cells[first], self._is_categorical[first], strict=True)
        ]

    def tied(self, values: Rows) -> Rows:
        """Rows in which all parameters of one role have the same value: a column of `values` for each role."""
        _, index = np.unique(self._role, return_inverse=True)
        return self.normalise(values[:, index])

    def mutate(self, rows: Rows, rng: np.random.Generator, *, rate: float | Rows, step: float) -> Rows:
        """Neighbours of `rows`: each parameter moves with probability `rate`, and at least one active parameter does.

        `rate` is one number for all parameters, or a row with one for each.
        A number moves by a normal step of standard deviation `step`, a share of its range, and is clipped to it; a
        choice is drawn uniformly, and so are parameters that become active.
        """
        is_active = rows != INACTIVE
        fresh = rng.random(rows.shape)
        moves = rng.random(rows.shape) < rate
        picked = np.where(is_active, rng.random(rows.shape), -1.0).argmax(axis=1)
        moves[np.arange(len(rows)), picked] = True
        stepped = np.clip(rows + rng.normal(0.0, step, rows.shape), 0.0, 1.0)
        moved = np.where(moves, np.where(self._is_categorical, fresh, stepped), rows)
        return self.normalise(np.where(is_active, moved, fresh))

    def keys(self, rows: Rows) -> list[bytes]:
        """One key per row: equal where the configurations agree to 1e-6 of each range."""
        return [row.tobytes() for row in np.round(rows * 1e6).astype(np.int64)]

    def normalise(self, rows: Rows) -> Rows:
        """Rows of any numbers in [0, 1] as rows of this encoding; `rows` is not changed.

        Discrete values are moved to the middle of their cell, inactive parameters marked, configurations repaired.
        """
        cells = np.where(self._is_discrete, self._num_cells, 1.0)
        middles = (np.minimum(np.floor(rows * cells), cells - 1) + 0.5) / cells
        rows = np.where(self._is_discrete, middles, rows)
        for column, parent, values in self._conditions:  # parents come first, so inactive ones are already marked
            rows[~np.isin(rows[:, parent], values), column] = INACTIVE
        if self._space.structure is not None:
            return self.encode(self._space.repair(self.decode(row)) for row in rows)
        return rows


def _num_cells(parameter: Parameter) -> float:
    match parameter:
        case Float():
            return np.inf
        case Integer():
            return parameter.high - parameter.low + 1
        case Categorical():
            return len(parameter.choices)


def _scale(parameter: Parameter) -> tuple[float, float, float]:
    """(low, half, span): a value, or the index of a choice, is encoded as (value - low + half) / span."""
    match parameter:
        case Float():
            return parameter.low, 0.0, parameter.high - parameter.low
        case Integer():
            return parameter.low, 0.5, _num_cells(parameter)
        case Categorical():
            return 0.0, 0.5, _num_cells(parameter)


def _decode(parameter: Parameter, u: float) -> Any:
    match parameter:
        case Float():
            value = parameter.low + u * (parameter.high - parameter.low)
            return min(max(float(value), parameter.low), parameter.high)
        case Integer():
            return parameter.low + int(u * _num_cells(parameter))
        case Categorical():
            return parameter.choices[int(u * len(parameter.choices))]
