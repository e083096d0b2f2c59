"""Noise of MergOPT, added where layers read their weights; the parameters themselves stay unchanged and need no copy.

While a module computes, a tensor with noise replaces a parameter. Autograd does not save that tensor, but a description
from which it can be recomputed. Therefore the tensor is freed when the module is done, and the backward pass recomputes
the tensors, one at a time. At most the tensors of one layer exist at once or, with activation checkpointing, the
tensors of one checkpointed part of the model. A sharded parameter (FSDP2) gets its noise after it is gathered; the
noise is the same as without shards. If the parameter is gathered in bfloat16, the noise is added after rounding to
bfloat16.

If a module reads a parameter of another module, it reads the parameter without noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from workers.training.mergopt.elements import Part, add

__all__ = ["offset_in_layers"]


@contextmanager
def offset_in_layers(
    model: torch.nn.Module, parts: Sequence[Part], tables: Mapping[torch.device, torch.Tensor], *, key: int
) -> Iterator[None]:
    """Context manager in which passes of `model` use its parameters plus noise, forward and backward.

    `parts` are the parts of parameters that this process holds; only parameters in `parts` get noise. `tables` has, for
    each device, the quantiles of the noise's distribution. A hash of `key` and of an element's index selects the
    quantile that is the element's noise. Raises ValueError if `model` lacks one of the parameters.
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
    """Record from which the backward pass recomputes a tensor with noise; autograd saves it instead of the tensor.

    The tensor is a view of the parameter that `read` describes, with noise added to it. `size` and `stride` are the
    view's shape and strides, and `place` is the offset of the view's first element in memory.
    """

    read: _Read
    size: tuple[int, ...]
    stride: tuple[int, ...]
    place: Any


class _Read(NamedTuple):
    """A parameter that a layer reads: the parameter `name` of `module`.

    `first` is the number of the parameter's first element among the elements of all parameters. The parameter is looked
    up at each access, because FSDP2 replaces it by a gathered parameter while the layer computes.
    """

    module: torch.nn.Module
    name: str
    first: int

    @property
    def parameter(self) -> torch.Tensor:
        found = self.module._parameters[self.name]
        assert found is not None
        return found


class _Draw:
    """Noise of one optimizer step, which is added to parameters when layers read them.

    Noisy parameters are not saved for the backward pass, which computes them again. `tables` has the quantiles of the
    noise's distribution on each device; `key` is the seed of the random numbers.
    """

    def __init__(self, tables: Mapping[torch.device, torch.Tensor], key: int) -> None:
        self._tables, self._key = tables, key
        self._alive: dict[int, tuple[_Read, torch.dtype]] = {}

    def hide(self, named: Mapping[str, Part], module: torch.nn.Module, _: Any) -> None:
        for name, part in named.items():
            read = _Read(module, name, part.first)
            noisy: torch.Tensor = _with_noise(read.parameter, partial(self._made, read))
            self._alive[noisy.untyped_storage().data_ptr()] = read, noisy.dtype
            module.__dict__[name] = noisy  # hides the parameter, which state_dict still finds

    def show(self, named: Mapping[str, Part], module: torch.nn.Module, *_: Any) -> None:
        for name in named:
            noisy = module.__dict__.pop(name, None)
            if noisy is not None:
                self._alive.pop(noisy.untyped_storage().data_ptr(), None)

    def pack(self, tensor: torch.Tensor) -> torch.Tensor | _Note:
        read, dtype = self._alive.get(tensor.untyped_storage().data_ptr(), (None, None))
        if read is None or tensor.dtype != dtype:
            return tensor
        return _Note(read, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def unpack(self, kept: torch.Tensor | _Note) -> torch.Tensor:
        if not isinstance(kept, _Note):
            return kept
        return self._made(kept.read).as_strided(kept.size, kept.stride, kept.place)

    def _made(self, read: _Read) -> torch.Tensor:
        with torch.no_grad():
            noisy = read.parameter.detach().clone(memory_format=torch.contiguous_format)
            add(noisy, self._tables[noisy.device], key=self._key, start=read.first)
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
