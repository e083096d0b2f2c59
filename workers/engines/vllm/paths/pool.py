"""Record of the contents of the pool of layers that an engine for layer paths holds, and choice of layers to overwrite.

The layers of the pool that the current path uses are kept. The least recently used of the other layers are replaced
first.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from workers.merging.residual_scales import UNSCALED, BranchFactors

__all__ = ["Hop", "LayerPool"]


@dataclass(frozen=True)
class Hop:
    """One step of a layer path (the sequence of layers of a merged model) in an engine.

    - `layer`: the layer to compute, as an index in the engine's pool of layers
    - `factors`: factors on the outputs of the layer's attention and MLP
    - `alignment`: the digest of the map of the residual stream before the layer, or None if there is no map
    """

    layer: int
    factors: BranchFactors = UNSCALED
    alignment: str | None = None


class LayerPool:
    """Record of the weights that each of an engine's `size` layers holds.

    Together these layers are the engine's pool; a merge uses some of them. The content of a layer is any hashable value
    that describes its weights; equal values mean equal weights.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._layers: dict[Hashable, int] = {}  # least recently used first

    def __len__(self) -> int:
        return len(self._layers)

    def has(self, content: Hashable) -> bool:
        return content in self._layers

    def place(self, contents: Sequence[Hashable]) -> tuple[list[int], set[int]]:
        """Choose, for each layer of a merge, a layer of the pool (the layers that an engine holds in memory).

        `contents` has a description of the weights of each layer of the merge; equal descriptions share a layer of the
        pool. A layer that already has the weights is used. If no layer has them, an empty layer is used. Without an
        empty layer, the least recently used layer is taken whose weights the merge does not need. Returns the chosen
        layer for each of `contents`, and the set of layers that must be written because they do not have their weights
        yet. Raises ValueError if there are more different contents than layers.
        """
        wanted = dict.fromkeys(contents)
        if len(wanted) > self.size:
            raise ValueError(f"{len(wanted)} different layers; the pool has {self.size}")
        missing = [content for content in wanted if content not in self._layers]
        unused = [content for content in self._layers if content not in wanted]
        free = sorted(set(range(self.size)) - set(self._layers.values()))
        new = set()
        for number, content in enumerate(missing):
            layer = free[number] if number < len(free) else self._layers.pop(unused[number - len(free)])
            self._layers[content] = layer
            new.add(layer)
        for content in wanted:
            self._layers[content] = self._layers.pop(content)
        return [self._layers[content] for content in contents], new

    def clear(self) -> None:
        self._layers.clear()
