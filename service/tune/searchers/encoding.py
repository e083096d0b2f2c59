"""Configurations as rows of numbers, for searchers that learn from them.

A column is a parameter, in the order of the space. Values lie in [0, 1]: a real number by its place in its range, a
whole number or a choice by the middle of its cell; INACTIVE marks a parameter that does not exist in that row.
Arrays are [num_rows, num_parameters], float64.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Categorical, Float, Integer, Parameter, Parameters

__all__ = ["INACTIVE", "Encoding", "Rows"]

Rows = NDArray[np.float64]

# Outside [0, 1], so that a tree separates inactive parameters with one split, as in SMAC's imputation.
INACTIVE = -1.0


class Encoding:
    """Encodes, decodes, draws and mutates rows of one space."""

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = tuple(parameters)
        self._num_cells = np.array([_num_cells(parameter) for parameter in self._parameters], dtype=np.float64)
        self._is_discrete = np.isfinite(self._num_cells)
        self._is_categorical = np.array([isinstance(parameter, Categorical) for parameter in self._parameters])
        column = {name: index for index, name in enumerate(parameters.names)}
        roles = [parameters.roles.get(name, name) for name in parameters.names]
        self._role = np.array([roles.index(role) for role in roles], dtype=np.intp)
        self._conditions = tuple(
            (index, column[condition.parent], _encoded(parameters[condition.parent], condition.values))
            for index, parameter in enumerate(self._parameters)
            for condition in parameter.conditions
        )

    def encode(self, configurations: Iterable[Mapping[str, Any]]) -> Rows:
        rows = [
            [_encode(p, configuration[p.name]) if p.name in configuration else INACTIVE for p in self._parameters]
            for configuration in configurations
        ]
        return np.array(rows, dtype=np.float64).reshape(-1, len(self._parameters))

    def decode(self, row: Rows) -> dict[str, Any]:
        """The configuration of one row, with plain Python values and without inactive parameters."""
        return {p.name: _decode(p, float(u)) for p, u in zip(self._parameters, row, strict=True) if u != INACTIVE}

    def sample(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Rows drawn uniformly."""
        return self.normalise(rng.random((num_rows, len(self._parameters))))

    def sample_tied(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Rows drawn uniformly among those that give all parameters of one role the same value; none where no two
        parameters share a role."""
        if len(set(self._role)) == len(self._role):
            num_rows = 0
        return self.normalise(rng.random((num_rows, len(self._parameters)))[:, self._role])

    def mutate(self, rows: Rows, rng: np.random.Generator, *, rate: float, step: float) -> Rows:
        """Neighbours of `rows`: each parameter moves with probability `rate`, and at least one active one does.

        A number moves by a normal step of standard deviation `step`, a share of its range, and is clipped to it; a
        choice is drawn uniformly, and so are parameters that become active."""
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
        """Rows of numbers in [0, 1] as rows of this encoding: discrete values in the middle of their cell, inactive
        parameters marked. `rows` stays as it is."""
        cells = np.where(self._is_discrete, self._num_cells, 1.0)
        middles = (np.minimum(np.floor(rows * cells), cells - 1) + 0.5) / cells
        rows = np.where(self._is_discrete, middles, rows)
        for column, parent, values in self._conditions:  # parents come first, so inactive ones are already marked
            rows[~np.isin(rows[:, parent], values), column] = INACTIVE
        return rows


def _num_cells(parameter: Parameter) -> float:
    match parameter:
        case Float():
            return np.inf
        case Integer():
            return parameter.high - parameter.low + 1
        case Categorical():
            return len(parameter.choices)


def _encode(parameter: Parameter, value: Any) -> float:
    match parameter:
        case Float():
            return (float(value) - parameter.low) / (parameter.high - parameter.low)
        case Integer():
            return (int(value) - parameter.low + 0.5) / _num_cells(parameter)
        case Categorical():
            index = next(
                i for i, choice in enumerate(parameter.choices) if type(choice) is type(value) and choice == value
            )
            return (index + 0.5) / len(parameter.choices)


def _encoded(parameter: Parameter, values: Iterable[Any]) -> Rows:
    return np.array([_encode(parameter, value) for value in values if parameter.contains(value)])


def _decode(parameter: Parameter, u: float) -> Any:
    match parameter:
        case Float():
            value = parameter.low + u * (parameter.high - parameter.low)
            return min(max(float(value), parameter.low), parameter.high)
        case Integer():
            return parameter.low + int(u * _num_cells(parameter))
        case Categorical():
            return parameter.choices[int(u * len(parameter.choices))]
