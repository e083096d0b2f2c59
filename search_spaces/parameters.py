"""Parameters: the searched dimensions, the conditions under which they exist, and the checks of configurations.

A configuration is a dict from parameter name to value; it contains active parameters only. The search space defines the
meaning of a parameter.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from search_spaces.errors import InvalidConfiguration

__all__ = [
    "Categorical",
    "Choice",
    "Condition",
    "Configuration",
    "Float",
    "Integer",
    "Parameter",
    "Parameters",
    "Structure",
]

Choice: TypeAlias = str | int | float | bool
Configuration: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class Condition:
    """A condition under which a parameter is a part of a configuration.

    The parameter named `parent` must itself be a part of the configuration, and have one of `values`.
    """

    parent: str
    values: tuple[Choice, ...]


@dataclass(frozen=True)
class Float:
    """A parameter that is a real number in [low, high], both ends included, on a linear scale."""

    name: str
    low: float
    high: float
    default: float | None = None
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ValueError(f"parameter {self.name!r}: range [{self.low}, {self.high}] is empty or not finite")
        _check_default(self)

    @property
    def default_value(self) -> float:
        return (self.low + self.high) / 2 if self.default is None else self.default

    @property
    def accepts(self) -> str:
        return f"a number in [{self.low:g}, {self.high:g}]"

    def contains(self, value: object) -> bool:
        return isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high

    def sample(self, rng: np.random.Generator) -> float:
        return min(float(rng.uniform(self.low, self.high)), self.high)


@dataclass(frozen=True)
class Integer:
    """A parameter that is a whole number in [low, high], both ends included, on a linear scale."""

    name: str
    low: int
    high: int
    default: int | None = None
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ValueError(f"parameter {self.name!r}: range [{self.low}, {self.high}] is empty")
        _check_default(self)

    @property
    def default_value(self) -> int:
        return (self.low + self.high) // 2 if self.default is None else self.default

    @property
    def accepts(self) -> str:
        return f"a whole number in [{self.low}, {self.high}]"

    def contains(self, value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and self.low <= value <= self.high

    def sample(self, rng: np.random.Generator) -> int:
        return int(rng.integers(self.low, self.high, endpoint=True))


@dataclass(frozen=True)
class Categorical:
    """A parameter with one of `choices`, which have no order, as its value.

    Without a `default`, the first choice is the default.
    """

    name: str
    choices: tuple[Choice, ...]
    default: Choice | None = None
    conditions: tuple[Condition, ...] = ()

    def __post_init__(self) -> None:
        if len(set(self.choices)) != len(self.choices) or not self.choices:
            raise ValueError(f"parameter {self.name!r}: choices {self.choices} are empty or repeat")
        _check_default(self)

    @property
    def default_value(self) -> Choice:
        return self.choices[0] if self.default is None else self.default

    @property
    def accepts(self) -> str:
        return "one of " + ", ".join(repr(choice) for choice in self.choices)

    def contains(self, value: object) -> bool:
        # True == 1 in Python: a choice must agree in type too.
        return any(type(value) is type(choice) and value == choice for choice in self.choices)

    def sample(self, rng: np.random.Generator) -> Choice:
        return self.choices[int(rng.integers(len(self.choices)))]


Parameter: TypeAlias = Float | Integer | Categorical


class Structure(Protocol):
    """Rules of a search space: how configurations are drawn, and which of several equivalent ones is stored.

    Configurations are equivalent if they give the same merge. The configuration that is stored is called the repaired
    configuration. Implementations are immutable and picklable.
    """

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """Draw a random configuration, with the random numbers `rng`, from the search space's own distribution.

        The result is in the form in which studies store configurations: the method `repair` does not change it.
        """
        ...

    def repair(self, configuration: Configuration) -> dict[str, Any]:
        """Convert a configuration to the form that studies store; the result gives the same merge.

        All configurations that give the same merge have the same result. The method is deterministic, and a result that
        is repaired again does not change. Each value of `configuration` must be accepted by its parameter.
        """
        ...

    def unused(self, configuration: Configuration) -> Collection[str]:
        """Names of parameters that have no effect on the merge of `configuration`, and whose stored value is arbitrary.

        `configuration` is in the form in which studies store it. If a searcher changes it so that such a parameter gets
        an effect, the searcher draws a value instead of keeping the stored one.
        """
        ...


class Parameters:
    """The parameters of a search space, an ordered and immutable collection.

    A parameter may exist only if another parameter, its parent, has certain values. A parent comes before the
    parameters that depend on it. Parameters with the same role have the same meaning in different places, for example
    the coefficient of TIES in each layer group. Searchers may start with configurations in which all parameters of a
    role have the same value. A parameter may have no role.
    """

    def __init__(
        self,
        parameters: Iterable[Parameter],
        *,
        roles: Mapping[str, str] | None = None,
        structure: Structure | None = None,
    ) -> None:
        """Store the parameters, after checking their names and conditions.

        `roles` maps the name of a parameter to its role, a meaning that parameters of different layers share, such as
        the coefficient of TIES; a parameter need not have a role. `structure` has the rules of the space for drawing
        and repairing configurations; if it is None, configurations are drawn uniformly and stored unchanged. Raises
        ValueError for a repeated name, a condition that never holds, or a parent (the parameter in a condition) that is
        missing or comes later.
        """
        self.roles = dict(roles or {})
        self.structure = structure
        self._by_name: dict[str, Parameter] = {}
        for parameter in parameters:
            if parameter.name in self._by_name:
                raise ValueError(f"parameter {parameter.name!r} is given twice")
            for condition in parameter.conditions:
                self._check_condition(parameter, condition)
            self._by_name[parameter.name] = parameter

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._by_name)

    def __iter__(self) -> Iterator[Parameter]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Parameter:
        return self._by_name[name]

    def active(self, configuration: Configuration) -> tuple[str, ...]:
        """The names of the parameters that exist in `configuration`, in the order of the parameters.

        A parameter exists, or is active, if the values in `configuration` meet its conditions. A parameter without
        conditions is always active.
        """
        active: set[str] = set()
        for parameter in self:
            if self._is_active(parameter, configuration, active):
                active.add(parameter.name)
        return tuple(name for name in self._by_name if name in active)

    def check(self, configuration: Configuration) -> None:
        """Check that `configuration` belongs to this space.

        Raises InvalidConfiguration for an unknown name, a value out of range or of the wrong type, a missing active
        parameter, and an inactive parameter.
        """
        for name in configuration:
            if name not in self._by_name:
                near = difflib.get_close_matches(str(name), self._by_name, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(self._by_name)}"
                raise InvalidConfiguration(f"configuration: unknown parameter {name!r}; {hint}")
        active: set[str] = set()
        for parameter in self:
            name = parameter.name
            if not self._is_active(parameter, configuration, active):
                if name in configuration:
                    raise InvalidConfiguration(
                        f"configuration: {name!r} is given but does not exist here; it exists if {_needs(parameter)}"
                    )
                continue
            active.add(name)
            if name not in configuration:
                raise InvalidConfiguration(f"configuration: {name!r} is missing; give {parameter.accepts}")
            if not parameter.contains(configuration[name]):
                raise InvalidConfiguration(
                    f"configuration: {name}={configuration[name]!r} is not accepted; give {parameter.accepts}"
                )

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """A random configuration, drawn by the rules of the space's structure, or uniformly if it has no structure.

        `rng` gives the random numbers. A parameter is drawn after the parameters that decide whether it exists. The
        same generator state gives the same configuration.
        """
        if self.structure is not None:
            return self.structure.sample(rng)
        return self.build(lambda parameter: parameter.sample(rng))

    def repair(self, configuration: Configuration) -> Configuration:
        """Convert a proposed configuration to the form that studies store.

        If several configurations give the same merge, only one of them is stored; the space's structure says which one
        (method `Structure.repair`). The method `check` must accept `configuration`. Without a structure the result is
        `configuration` itself.
        """
        return configuration if self.structure is None else self.structure.repair(configuration)

    def build(self, choose: Callable[[Parameter], Any]) -> dict[str, Any]:
        """Make a configuration by choosing the value `choose(parameter)` for each active parameter.

        A parameter is active if the conditions under which it exists are met. Its value is chosen after the values of
        the parameters in its conditions.
        """
        configuration: dict[str, Any] = {}
        for parameter in self:
            if self._is_active(parameter, configuration, configuration):
                configuration[parameter.name] = choose(parameter)
        return configuration

    def to_json(self) -> list[dict[str, Any]]:
        return [{"type": type(parameter).__name__.lower(), **asdict(parameter)} for parameter in self]

    def _is_active(self, parameter: Parameter, configuration: Configuration, active: Container[str]) -> bool:
        return all(
            condition.parent in active and configuration.get(condition.parent) in condition.values
            for condition in parameter.conditions
        )

    def _check_condition(self, parameter: Parameter, condition: Condition) -> None:
        parent = self._by_name.get(condition.parent)
        if parent is None:
            raise ValueError(f"parameter {parameter.name!r}: its parent {condition.parent!r} must come before it")
        if not any(parent.contains(value) for value in condition.values):
            raise ValueError(
                f"parameter {parameter.name!r}: {condition.parent!r} is never one of {condition.values}; "
                f"it is {parent.accepts}"
            )


def _check_default(parameter: Parameter) -> None:
    if parameter.default is not None and not parameter.contains(parameter.default):
        raise ValueError(f"parameter {parameter.name!r}: default {parameter.default!r} is not {parameter.accepts}")


def _needs(parameter: Parameter) -> str:
    return " and ".join(
        f"{condition.parent} = {' or '.join(repr(value) for value in condition.values)}"
        for condition in parameter.conditions
    )
