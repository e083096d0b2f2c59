"""Descriptions of the merged model's tensors before they are computed."""

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
    """One tensor of the merged model that is computed as a part of a stack, the joined experts of an MoE layer.

    A stack joins the matrices of all experts of a layer's mixture of experts in one tensor. The piece consists of the
    rows `start` to `stop` - 1 of the matrix of the expert with the index `expert`. `name` is the tensor's name in the
    merged model.
    """

    name: str
    expert: int
    start: int
    stop: int


@dataclass(frozen=True)
class MergedTensor:
    """Description of one tensor of the merged model before it is computed.

    - `merge`: the merge that computes the tensor
    - `layer`, `suffix`: the index of the merged layer, and the tensor's name within the layer; outside layers, `layer`
      is None and `suffix` is the whole name
    - `factor`: a number that multiplies the result, because scales of layers are folded into weights (module
      `residual_scales`)
    - `pieces`: the tensors of the merged model that the result is split into, if it is a stack

    A stack is the matrices of all experts of a layer's mixture of experts, joined in one tensor. The merged model does
    not have the stack itself.
    """

    name: str
    merge: Merge
    suffix: str
    shape: tuple[int, ...]
    layer: int | None = None
    factor: float = 1.0
    pieces: tuple[Piece, ...] = ()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the merged model's tensors that this merge gives, keyed by the tensors' names.

        A stack (the matrices of all experts of a layer's mixture of experts) is split into its pieces, which are
        tensors of the merged model. Any other tensor is not split, and its own name and shape are returned.
        """
        if not self.pieces:
            return {self.name: self.shape}
        return {piece.name: (piece.stop - piece.start, *self.shape[2:]) for piece in self.pieces}

    def split(self, merged: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Split the computed tensor `merged` into tensors of the merged model.

        A stack (the matrices of all experts of a layer's mixture of experts) is split into the parts that it was joined
        from. Any other tensor is yielded as a whole. Yields (name, tensor) in the order of the method `shapes`.
        """
        if not self.pieces:
            yield self.name, merged
        for piece in self.pieces:
            yield piece.name, merged[piece.expert, piece.start : piece.stop]


def pieces_of(model: Checkpoint, name: str, layout: Layout, index: int | None) -> tuple[Piece, ...]:
    """List the merged model's tensors that are parts of the stack `name` of `model`; empty if `name` is not a stack.

    A stack is the matrices of all experts of a layer's mixture of experts, joined in one tensor. The pieces are named
    as in layer `index` of the merged model, whose layout is `layout`; `index` is None outside layers.
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
