"""SearchSpace: the interface of every search space, from a configuration to a Recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from search_spaces.parameters import Configuration, Parameters
from search_spaces.recipe import Component, Recipe

__all__ = ["LayerGroup", "SearchSpace", "SpaceDescription"]


@dataclass(frozen=True)
class LayerGroup:
    """Adjacent layers [start, stop) (0-based) that share their coefficients."""

    name: str
    start: int
    stop: int

    @property
    def label(self) -> str:
        """The layers as people count them, from 1: "layers 1-3"."""
        return f"layer {self.stop}" if self.stop - self.start == 1 else f"layers {self.start + 1}-{self.stop}"


@dataclass(frozen=True)
class SpaceDescription:
    """How a space divides the model: for reports. `component_groups` maps a group's name to its components."""

    kind: str
    layer_groups: tuple[LayerGroup, ...]
    component_groups: dict[str, tuple[Component, ...]]


class SearchSpace(Protocol):
    """One search space over one family of models. Implementations are immutable and picklable."""

    @property
    def kind(self) -> str:
        """The space's name in a study file."""
        ...

    @property
    def parameters(self) -> Parameters:
        """The searched dimensions; every configuration they accept decodes to a recipe."""
        ...

    def to_recipe(self, configuration: Configuration) -> Recipe:
        """The merge that `configuration` stands for, in canonical form. Equal configurations give equal recipes.

        Raises InvalidConfiguration if `parameters` does not accept it."""
        ...

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        """A configuration that decodes to `recipe` (equal digests), or None where the space does not contain it."""
        ...

    def describe(self) -> SpaceDescription:
        """The division of the model that reports draw."""
        ...
