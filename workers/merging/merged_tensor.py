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
    """One tensor of the model within a stack of a layer's experts: rows `start` to `stop` of the matrix of `expert`.

    A stack joins a matrix of all experts of a layer in one tensor.
    """

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class MergedTensor:
    """Description of one tensor of the merged model before it is computed.

    `merge` says how it is computed. `suffix` is its name within merged layer `layer`; outside layers, `layer` is None
    and `suffix` the whole name. The result is multiplied by `factor`, which folds the scales of earlier layers into
    weights (`residual_scales`). A stack of a layer's experts is not itself a tensor of the model; it is split into
    `pieces`, which are.
    """

    name: str
    merge: Merge
    suffix: str
    shape: tuple[int, ...]
    layer: int | None = None
    factor: float = 1.0
    pieces: tuple[Piece, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes, by name, of the tensors of the model that this merged tensor is split into.

        For a tensor that is no stack of experts, it is the shape of the tensor itself.
        """
        if not self.pieces:
            return {self.name: self.shape}
        return {piece.name: (piece.stop - piece.start, *self.shape[2:]) for piece in self.pieces}

    def split(self, merged: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split the computed tensor into the tensors of the model, (name, tensor), in the order of `shapes`."""
        if not self.pieces:
            yield self.name, merged
        for piece in self.pieces:
            yield piece.name, merged[piece.expert, piece.start : piece.stop]


def pieces_of(model: Checkpoint, name: str, layout: Layout, index: int | None) -> tuple[Piece, ...]:
    """The tensors of the model that a stack of experts is split into; empty for a tensor that is no stack.

    `name` is the stack in `model`. The pieces are named as in layer `index` of the merged model, whose layout is
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
