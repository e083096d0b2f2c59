"""Configurations as rows of numbers, for searchers that learn from them.

Each column is a parameter, in the order of the space. Values are in [0, 1]: a real number is encoded by its position in
its range. The range of a whole number or a choice is divided into equal cells, and each value is encoded by the middle
of its cell. INACTIVE marks a parameter that does not exist in a configuration. In a space with a structure, such as
layer paths, the space itself draws random rows. Several configurations may mean the same merge there; rows made by this
module encode the one that a study stores. Arrays are [num_rows, num_parameters], float64.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Categorical, Condition, Float, Integer, Parameter, Parameters

__all__ = ["INACTIVE", "Encoding", "Rows"]

Rows = NDArray[np.float64]

# Outside [0, 1], so that a tree separates inactive parameters with one split, as in SMAC's imputation.
INACTIVE = -1.0

# Columns in which configurations are compared first.
_NUM_COMPARED = 8


class Encoding:
    """The encoding of a search space's configurations as rows of numbers, with methods that draw and change rows.

    `parameters` are the parameters of the space. A row has one number for each parameter, in their order: a value
    scaled to [0, 1], or INACTIVE for an inactive parameter.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._space = parameters
        self._parameters = tuple(parameters)
        self._names = parameters.names
        found = itemgetter(*self._names) if self._names else tuple
        self._values = found if len(self._names) != 1 else lambda configuration: (found(configuration),)
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
        return self._first_columns(configurations, len(self._parameters))

    def encode_parents(self, configurations: Iterable[Mapping[str, Any]], *, version: int | None) -> Rows:
        """Encode stored `configurations` from which a searcher makes new ones.

        A parameter that has no effect in a configuration (`Structure.unused`) is INACTIVE in its row, so that the
        methods `mutate` and `fill` draw a value for it. `version` is the version of the searcher in the study
        (`SearchSetting.version`). Version 1 is given the stored value instead.
        """
        structure = self._space.structure
        if structure is None or version == 1:
            return self.encode(configurations)
        return self.encode(
            {name: value for name, value in each.items() if name not in unused}
            for each in configurations
            for unused in [structure.unused(each)]
        )

    def _first_columns(self, configurations: Iterable[Mapping[str, Any]], num: int) -> Rows:
        """Encode only the first `num` parameters of the `configurations`, as rows [num_configurations, num]."""
        found = itertools.chain.from_iterable(self._numbers(configuration, num) for configuration in configurations)
        rows = np.fromiter(found, dtype=np.float64).reshape(-1, num)
        rows -= self._low[:num]  # in place: a table of thousands of rows does not fit in the processor's cache
        rows += self._half[:num]
        rows /= self._span[:num]
        rows[np.isnan(rows)] = INACTIVE
        return rows

    def _numbers(self, configuration: Mapping[str, Any], num: int) -> Sequence[Any]:
        """The values of the first `num` parameters of a `configuration`, not scaled yet.

        A choice is given as its index among its options, and an inactive parameter is given as NaN.
        """
        if len(configuration) == len(self._names) == num:  # all are active
            values = self._values(configuration)
        else:
            values = [configuration.get(name, math.nan) for name in self._names[:num]]
        if not self._choices:
            return values
        numbers = [*values]
        for column, index_of in self._choices.items():
            if column < num and self._names[column] in configuration:
                numbers[column] = index_of[type(numbers[column]), numbers[column]]
        return numbers

    def _encoded(self, condition: Condition) -> Rows:
        """The values of a condition's parent parameter that activate the dependent parameter, in encoded form.

        A parameter with a condition depends on another parameter, its parent: it is active only if the parent has one
        of the values that `condition` lists.
        """
        column = self._names.index(condition.parent)
        values = [value for value in condition.values if self._parameters[column].contains(value)]
        return self.encode({condition.parent: value} for value in values)[:, column]

    def decode(self, row: Rows) -> dict[str, Any]:
        """The configuration that `row` encodes, as plain Python values, without inactive parameters."""
        return {p.name: _decode(p, float(u)) for p, u in zip(self._parameters, row, strict=True) if u != INACTIVE}

    def sample(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Draw `num_rows` random rows with `rng`, each the encoding of a random configuration.

        If the space has a structure, such as layer paths (sequences of layers), the space itself draws the
        configurations. Otherwise the rows are drawn uniformly.
        """
        if self._space.structure is not None:
            return self.encode(self._space.sample(rng) for _ in range(num_rows))
        return self.normalise(rng.random((num_rows, len(self._parameters))))

    def sample_tied(self, num_rows: int, rng: np.random.Generator) -> Rows:
        """Draw `num_rows` random rows with `rng` in which all parameters with the same role have the same value.

        A row is an encoded configuration. A role is a meaning that parameters of different layers share, such as the
        coefficient of a method. No rows are returned if no two parameters share a role.
        """
        if len(set(self._role)) == len(self._role):
            num_rows = 0
        return self.normalise(rng.random((num_rows, len(self._parameters)))[:, self._role])

    @property
    def is_categorical(self) -> NDArray[np.bool_]:
        """Boolean array [num_parameters] that is True for each column of a categorical parameter."""
        return self._is_categorical

    def fill(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """A copy of `rows` (encoded configurations) with random numbers, drawn with `rng`, for inactive parameters.

        Inactive parameters have no meaningful number; with random numbers, rows can be added and subtracted.
        """
        return np.where(rows == INACTIVE, rng.random(rows.shape), rows)

    def first_unknown(self, rows: Rows, known: Sequence[Mapping[str, Any]]) -> Rows | None:
        """The first of `rows` that encodes a configuration outside of `known`; None if there is no such row."""
        are_known = self.are_known(rows, known)
        return next((row for row, is_known in zip(rows, are_known, strict=True) if not is_known), None)

    def are_known(self, rows: Rows, known: Sequence[Mapping[str, Any]]) -> list[bool]:
        """Whether the configuration that each of `rows` encodes is among the configurations `known`."""
        # Few of many known configurations agree with a row in its first columns; only these are compared in full.
        begins = set(self.keys(rows[:, :_NUM_COMPARED]))
        known_begins = self.keys(self._first_columns(known, min(_NUM_COMPARED, len(self._parameters))))
        near = [each for each, begin in zip(known, known_begins, strict=True) if begin in begins]
        seen = set(self.keys(self.encode(near)))
        return [key in seen for key in self.keys(rows)]

    def values_by_role(self, num_levels: int) -> list[Rows]:
        """A few encoded values to try for the parameters of each role.

        A role is a meaning that parameters of different layers share, such as the coefficient of a method. All
        parameters with the same role share these values. For a role of categorical parameters, or of numbers with at
        most `num_levels` values, the result contains all values. For any other role, the result has `num_levels`
        numbers, evenly spaced over the whole range. Roles are in the order of the columns that the method `tied` takes.
        """
        levels = np.linspace(0.0, 1.0, num_levels)
        first = [column for column, role in enumerate(self._role) if column == role]
        return [
            (np.arange(cells) + 0.5) / cells if is_categorical or cells <= num_levels else levels
            for cells, is_categorical in zip(self._num_cells[first], self._is_categorical[first], strict=True)
        ]

    def tied(self, values: Rows) -> Rows:
        """Rows (encoded configurations) in which all parameters with the same role have the same value.

        A role is a meaning that parameters of different layers share, such as the coefficient of a method. `values` has
        one column for each role, in the order of the method `values_by_role`. The result contains a row for each row of
        `values`.
        """
        _, index = np.unique(self._role, return_inverse=True)
        return self.normalise(values[:, index])

    def mutate(self, rows: Rows, rng: np.random.Generator, *, rate: float | Rows, step: float) -> Rows:
        """Random changes of `rows`, the encodings of configurations.

        Each parameter is changed with probability `rate`. At least one active parameter of each row is changed. `rate`
        is one number for all parameters, or a row with one number for each parameter. A number is changed by a normally
        distributed step with standard deviation `step`, as a share of its range, and is clipped to the range. A choice
        that is changed, and a parameter that becomes active, is drawn uniformly. `rng` gives the random numbers.
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
        """A hashable key for each row (encoded configuration).

        Two rows have equal keys if their configurations agree to 1e-6 of each parameter's range.
        """
        return [row.tobytes() for row in np.round(rows * 1e6).astype(np.int64)]

    def normalise(self, rows: Rows) -> Rows:
        """Convert rows of arbitrary numbers in [0, 1] to valid rows of this encoding; `rows` is not changed.

        - A whole number or a choice is moved to the middle of its interval.
        - Inactive parameters get the number INACTIVE.
        - In some spaces, such as spaces of layer paths (sequences of layers), several configurations may mean the same
          merge. There, each configuration is brought into the form in which a study stores it.
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
    """Numbers (low, half, span) for scaling a parameter's values to [0, 1].

    A value, or the index of a choice, is encoded as (value - low + half) / span. `half` is 0.5 for whole numbers and
    choices, which are encoded as the middle of their interval. For other numbers, `half` is 0.
    """
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
