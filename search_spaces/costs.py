"""Costs of a merge that follow from its recipe alone: numbers of layers and of parameters.

They are exact, and known before the merge is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.objectives import Cost
from search_spaces.recipe import COMPONENTS, Component, Recipe

__all__ = ["ModelSize"]


@dataclass(frozen=True)
class ModelSize:
    """The numbers of parameters of one family's models.

    `outside` counts the parameters outside layers, `components` those of each component by layer. `max_layers` is the
    largest number of layers that a merge may have.
    """

    outside: int
    components: Mapping[Component, tuple[int, ...]]
    max_layers: int

    def of(self, recipe: Recipe, cost: Cost) -> float:
        """The number of layers or parameters of the merged model as exported; a repeated layer counts each time."""
        if cost == "layers":
            return float(len(recipe.layers))
        total = self.outside
        for layer in recipe.layers:
            for component in COMPONENTS:
                at = layer.component(component).sources[0].layer
                total += self.components[component][at or 0]
        return float(total)

    def most(self, cost: Cost) -> float:
        """The largest number of layers or parameters that a merge may have, which is the objective's worst value."""
        if cost == "layers":
            return float(self.max_layers)
        largest = max(map(sum, zip(*self.components.values(), strict=True)), default=0)
        return float(self.outside + self.max_layers * largest)
