"""MergOPT's offsets, added where layers read their weights, so that parameters never change and need no copy.

While a module computes, a tensor with noise replaces each of its parameters that gets an offset. Instead of that
tensor, autograd saves a description from which the tensor can be recomputed, so that the tensor is freed when the
module is done. The backward pass recomputes the tensors, one at a time. The tensors of at most one layer exist at once
or, with activation checkpointing, the tensors of one checkpointed part.

A parameter that is read by another module than the one that owns it has no offset in that module. Autocast keeps casts
of weights, as it does without offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from workers.training.mergopt.elements import Part

__all__ = ["offset_in_layers"]


@contextmanager
def offset_in_layers(
    model: torch.nn.Module, parts: Sequence[Part], tables: Mapping[torch.device, torch.Tensor], *, key: int
) -> Iterator[None]:
    """Context manager in which forward and backward passes of `model` see its parameters with noise added.

    `parts` are the parameters that get noise, as far as this process holds them. `key` determines the random numbers
    (`noise.draw_key`). `tables` has the quantiles of the noise's distribution for each device. Raises ValueError if
    `model` lacks one of the parameters.
    """
    known = {id(part.parameter): part for part in parts}
    owners: list[tuple[torch.nn.Module, dict[str, Part]]] = []
    for module in model.modules():
        named = {name: known[id(p)] for name, p in module._parameters.items() if p is not None and id(p) in known}
        if named:
            owners.append((module, named))
    held = {id(part.parameter) for _, named in owners for part in named.values()}
    if missing := known.keys() - held:
        raise ValueError(f"mergopt: the model lacks {len(missing)} of the {len(known)} parameters")
    draw = _Draw(tables, key)
    with ExitStack() as stack:
        for module, named in owners:
            stack.callback(module.register_forward_pre_hook(partial(draw.hide, named)).remove)
            stack.callback(module.register_forward_hook(partial(draw.show, named), always_call=True).remove)
        stack.enter_context(saved_tensors_hooks(draw.pack, draw.unpack))
        yield


@dataclass(frozen=True)
class _Note:
    """Description from which the backward pass recomputes a tensor with noise; autograd saves it, not the tensor.

    The tensor is a view of the parameter's `part` with noise. Its shape is `size`, its strides are `stride`, and
    `place` is the index of its first element in the memory of the part.
    """

    part: Part
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: Any


class _Draw:
    """The noise of one optimizer step, and a table of the tensors that currently have this noise.

    The tensors in the table are identified by the address of their memory. `tables` has the quantiles of the noise's
    distribution for each device; `key` determines the random numbers.
    """

    def __init__(self, tables: Mapping[torch.device, torch.Tensor], key: int) -> None:
        self._tables, self._key = tables, key
        self._alive: dict[int, Part] = {}

    def hide(self, named: Mapping[str, Part], module: torch.nn.Module, _: Any) -> None:
        for name, part in named.items():
            noisy: torch.Tensor = _with_noise(part.parameter, partial(self._made, part))
            self._alive[noisy.untyped_storage().data_ptr()] = part
            module.__dict__[name] = noisy  # hides the parameter, which state_dict still finds

    def show(self, named: Mapping[str, Part], module: torch.nn.Module, *_: Any) -> None:
        for name in named:
            noisy = module.__dict__.pop(name, None)
            if noisy is not None:
                self._alive.pop(noisy.untyped_storage().data_ptr(), None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Note:
        part = self._alive.get(tensor.untyped_storage().data_ptr())
        if part is None or tensor.dtype != part.tensor.dtype:
            return tensor
        return _Note(part, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: torch.Tensor | _Note) -> torch.Tensor:
        if not isinstance(kept, _Note):
            return kept
        return self._made(kept.part).as_strided(kept.size, kept.stride, kept.place)

    def _made(self, part: Part) -> torch.Tensor:
        with torch.no_grad():
            noisy = part.tensor.clone(memory_format=torch.contiguous_format)
            Part(part.parameter, noisy, part.start).add_noise(self._tables[noisy.device], key=self._key)
        return noisy


class _WithNoise(torch.autograd.Function):
    """Autograd function that returns a parameter with noise, and passes the gradient to the parameter unchanged.

    Its arguments are the parameter and `make`, a function without arguments that returns a copy of the parameter with
    noise.
    """

    @staticmethod
    def forward(ctx: Any, parameter: torch.Tensor, make: Any) -> Any:
        return make()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


_with_noise: Any = _WithNoise.apply
