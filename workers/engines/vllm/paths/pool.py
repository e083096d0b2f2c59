"""Which layer of the pool holds what: the layers of a path stay, the others are replaced, the longest unused first."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

__all__ = ["LayerPool", "Step"]


@dataclass(frozen=True)
class Step:
    """One position of a path: a layer of the pool, what the outputs of its branches are multiplied by, and the digest
    of the alignment before it, if there is one."""

    layer: int
    factor: float
    alignment: str | None = None


class LayerPool:
    """The contents of `size` layers, by any hashable description of what a layer holds."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._layers: dict[Hashable, int] = {}  # the last used last

    def __len__(self) -> int:
        return len(self._layers)

    def has(self, content: Hashable) -> bool:
        return content in self._layers

    def place(self, contents: Sequence[Hashable]) -> tuple[list[int], set[int]]:
        """A layer for each position, equal contents in one, and those layers that do not hold theirs yet.

        Raises ValueError if there are more different contents than layers."""
        wanted = dict.fromkeys(contents)
        if len(wanted) > self.size:
            raise ValueError(f"{len(wanted)} different layers; the pool has {self.size}")
        missing = [content for content in wanted if content not in self._layers]
        unused = [content for content in self._layers if content not in wanted]
        free = sorted(set(range(self.size)) - set(self._layers.values()))
        new = set()
        for number, content in enumerate(missing):
            place = free[number] if number < len(free) else self._layers.pop(unused[number - len(free)])
            self._layers[content] = place
            new.add(place)
        for content in wanted:
            self._layers[content] = self._layers.pop(content)
        return [self._layers[content] for content in contents], new

    def clear(self) -> None:
        self._layers.clear()
