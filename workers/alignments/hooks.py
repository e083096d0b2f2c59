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
    """Register hooks that apply alignments to the inputs of a transformers model's layers, in float32.

    Alignments are maps of the residual stream. The keys of `placed` are the indices of the layers before which they are
    applied. The model is changed in place.
    """
    computed = {each.digest: each.alignment.to(dtype=torch.float32) for each in placed.values()}
    layers = model.get_decoder().layers
    for index, each in placed.items():
        layers[index].register_forward_pre_hook(partial(_align_input, computed[each.digest], each.factor))


def _align_input(alignment: Alignment, factor: float, _: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
    stream, *others = given
    return (alignment(stream, factor), *others)
