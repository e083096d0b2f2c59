"""Observer of vLLM's weight loader, which records where the loader writes each tensor.

If the loader only copies a tensor, or the shard of it that a rank holds, to one part of a parameter, the tensor can be
written there directly, without the loader.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from workers.merging.shards import Shard

__all__ = ["Destination", "LoadObserver"]


@dataclass(frozen=True)
class Destination:
    """Part of a parameter's memory that holds one tensor of the merged model, or a shard of the tensor.

    `parameter` is the name of the parameter, and `memory` is a view of this part. `shard` says which elements of the
    tensor are there; None means all elements.
    """

    parameter: str
    memory: torch.Tensor
    shard: Shard | None = None

    def overlaps(self, other: torch.Tensor) -> bool:
        if _storage(other) != _storage(self.memory) or other.numel() == 0:
            return False
        (begin, end), (first, last) = _extent(self.memory), _extent(other)
        return first < end and begin < last

    def is_in(self, parameters: Mapping[str, torch.Tensor]) -> bool:
        """Whether the memory for writing a tensor (the destination) still belongs to the model's parameter.

        vLLM may have given the parameter other memory since the weights were loaded. `parameters` has all parameters of
        the model, keyed by name.
        """
        return _storage(parameters[self.parameter]) == _storage(self.memory)


class LoadObserver(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Observer of vLLM's weight loader: it yields (name, tensor), and records where the loader writes each tensor.

    The observer is passed to the loader as the weights to load.

    - `source`: yields the pairs (name, tensor)
    - `parameters`: the model's parameters, keyed by name
    - `wait`: called after each pair is taken from `source`; returns when the computation of the tensor has ended
    - `copies`: if False, nothing is written to the model, and the observer only finds out where the loader would write

    The attribute `seconds` is the time spent computing the tensors.

    If the loader only copies a tensor, as a whole or a shard of it, to a part of a parameter, this part is the tensor's
    destination. The tensor can later be written there without the loader. A tensor has no destination if the loader
    changes this part again before loading ends.
    """

    def __init__(
        self,
        source: Iterator[tuple[str, torch.Tensor]],
        parameters: Mapping[str, torch.Tensor],
        *,
        wait: Callable[[], None] = lambda: None,
        copies: bool = True,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.source = source
        self._wait = wait
        self._is_copying = copies
        self.seconds = 0.0
        self._destinations: dict[str, Destination | None] = {}
        self._owners = {_storage(parameter): name for name, parameter in parameters.items()}
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._changed: list[torch.Tensor] = []

    @property
    def destinations(self) -> dict[str, Destination | None]:
        """The part of a parameter's memory into which vLLM's weight loader has copied each tensor, keyed by its name.

        The value is None for a tensor that only the loader can write, because it does more than copy the elements to
        one part.
        """
        return {
            name: None if destination is None or any(map(destination.overlaps, self._changed)) else destination
            for name, destination in self._destinations.items()
        }

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        while True:
            started = time.perf_counter()
            with _disable_current_modes():
                item = next(self.source, None)
                self._wait()
            self.seconds += time.perf_counter() - started
            if item is None:
                return
            self._copies.clear()
            yield item
            self._destinations[item[0]] = self._destination(item[1])

    def _destination(self, tensor: torch.Tensor) -> Destination | None:
        if len(self._copies) != 1:
            return None
        memory, copied = self._copies[0]
        shard = Shard.of(copied, tensor)  # None if transposed on the way, as GPT-2's weights are
        is_plain = memory.is_contiguous() and memory.dtype == tensor.dtype and memory.device == tensor.device
        owner = self._owners.get(_storage(memory))
        if shard is None or copied.shape != memory.shape or not is_plain or owner is None:
            return None
        return Destination(owner, memory.detach(), None if shard.is_whole(tuple(tensor.shape)) else shard)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._copies.append(args[:2])
            if not self._is_copying and _storage(args[0]) in self._owners:
                return args[0]
        elif func._schema.is_mutable and isinstance(args[0], torch.Tensor):
            self._changed.append(args[0])
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The range of addresses that a tensor spans: (its first byte, the byte after its last element)."""
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + length * tensor.element_size()
