"""Costs of a merge that follow from its recipe alone: numbers of layers and of parameters.

These costs are exact, and known before the merge is scored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.objectives import Cost
from search_spaces.recipe import COMPONENTS, Component, Recipe

__all__ = ["ModelSize"]


@dataclass(frozen=True)
class ModelSize:
    """Numbers of parameters in the models of one family (a base model and its experts), which all have the same size.

    - `outside`: the number of parameters outside decoder layers
    - `components`: for each component of a layer, such as attention, its number of parameters in each layer
    - `max_layers`: the largest number of layers that a merge may have
    """

    outside: int
    components: Mapping[Component, tuple[int, ...]]
    max_layers: int

    def of(self, recipe: Recipe, cost: Cost) -> float:
        """Number of layers or of parameters (`cost`) of the merge that `recipe` describes.

        A layer that the merge repeats is counted each time.
        """
        if cost == "layers":
            return float(len(recipe.layers))
        total = self.outside
        for layer in recipe.layers:
            for component in COMPONENTS:
                at = layer.component(component).sources[0].layer
                total += self.components[component][at or 0]
        return float(total)

    def most(self, cost: Cost) -> float:
        """Largest number of layers or of parameters (`cost`) that a merge may have."""
        if cost == "layers":
            return float(self.max_layers)
        largest = max(map(sum, zip(*self.components.values(), strict=True)), default=0)
        return float(self.outside + self.max_layers * largest)
