"""The description of one merged tensor, before it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from search_spaces.recipe import Merge
from workers.models.checkpoints import Checkpoint
from workers.models.components import Layout

__all__ = ["MergedTensor", "Piece", "pieces_of"]


@dataclass(frozen=True)
class Piece:
    """One expert's matrix in the stack of a layer's experts: rows `start` to `stop` of stacked matrix `expert`."""

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class MergedTensor:
    """One tensor of the merged model before it is computed: its name, its merge, and its operands' name in the bank.

    `suffix` is the tensor's name within merged layer `layer`, or its whole name outside layers (None). The merged
    tensor is multiplied by `factor`, which folds the scales of earlier layers into weights (`residual_scales`). A stack
    of a layer's experts is not a tensor of the model: the model's tensors are its `pieces`.
    """

    name: str
    merge: Merge
    suffix: str
    shape: tuple[int, ...]
    layer: int | None = None
    factor: float = 1.0
    pieces: tuple[Piece, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the model's tensors that a merged tensor consists of, by name."""
        if not self.pieces:
            return {self.name: self.shape}
        return {piece.name: (piece.stop - piece.start, *self.shape[2:]) for piece in self.pieces}

    def split(self, merged: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """The model's tensors that a merged tensor consists of, in the order of `shapes`."""
        if not self.pieces:
            yield self.name, merged
        for piece in self.pieces:
            yield piece.name, merged[piece.expert, piece.start : piece.stop]


def pieces_of(model: Checkpoint, name: str, layout: Layout, index: int | None) -> tuple[Piece, ...]:
    """The model's tensors that a stack of experts consists of; none for a tensor that is no stack.

    `name` is the stack in `model`. The pieces are named as in layer `index` of the merged model, which has the layout
    `layout`.
    """
    if name in model.tensors:
        return ()
    pieces = []
    for expert, parts in enumerate(model.layout.stacks[name]):
        start = 0
        for part in parts:
            stop = start + model.tensors[part].shape[0]
            pieces.append(Piece(layout.name(model.layout.places[part].suffix, index), expert, start, stop))
            start = stop
    return tuple(pieces)
