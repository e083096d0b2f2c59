"""Alignments before the layers of a transformers model, applied by forward hooks."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch

from workers.alignments.alignment import Alignment
from workers.alignments.recipes import PlacedAlignment

__all__ = ["add_alignments"]


def add_alignments(model: Any, placed: Mapping[int, PlacedAlignment]) -> None:
    """Register hooks that apply alignments to the inputs of a transformers model's layers.

    Alignments are maps of the residual stream, and are computed in its dtype and on its device. The keys of `placed`
    are the indices of the layers before which they are applied. The model is changed in place.
    """
    converted = {each.digest: _Converted(each.alignment) for each in placed.values()}
    layers = model.get_decoder().layers
    for index, each in placed.items():
        layers[index].register_forward_pre_hook(partial(_align_input, converted[each.digest], each.factor))


class _Converted:
    """An alignment (a map of the residual stream) in the dtype and on the device of the latest stream."""

    def __init__(self, alignment: Alignment) -> None:
        self._given = alignment
        self._latest: tuple[torch.device, torch.dtype, Alignment] | None = None

    def for_stream(self, stream: torch.Tensor) -> Alignment:
        if self._latest is None or self._latest[:2] != (stream.device, stream.dtype):
            alignment = self._given.to(device=stream.device, dtype=stream.dtype)
            self._latest = stream.device, stream.dtype, alignment
        return self._latest[2]


def _align_input(alignment: _Converted, factor: float, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    stream, *others = given
    return (alignment.for_stream(stream)(stream, factor), *others)
