"""GPU memory and its copy stream, simulated on a CPU: a copy that nobody waits for arrives late."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["GPU", "DelayedCopies"]

GPU = torch.device("cuda", 0)


class DelayedCopies:
    """A copy stream of a simulated GPU, whose memory is the CPU's.

    `on_gpu` gives a tensor that says it is on `GPU`. A copy to the CPU with `non_blocking=True` returns at once with
    NaN in its memory, as CUDA returns memory that is not written yet, and has its values after `synchronize`. Other
    copies, and all copies to the GPU, have their values at once. `num_delayed` counts the copies that came late.
    """

    def __init__(self) -> None:
        self.num_delayed = 0
        self._queued: list[Callable[[], object]] = []

    def on_gpu(self, tensor: torch.Tensor) -> torch.Tensor:
        on_gpu = tensor.as_subclass(_OnGpu)
        on_gpu.stream, on_gpu.values_on_cpu = self, tensor
        return on_gpu

    def synchronize(self) -> None:
        for copy in self._queued:
            copy()
        self._queued.clear()

    def to_cpu(self, tensor: torch.Tensor, *, non_blocking: bool) -> torch.Tensor:
        if not non_blocking:
            return tensor.clone()
        self.num_delayed += 1
        late = torch.full_like(tensor, torch.nan)
        self._queued.append(lambda: late.copy_(tensor))
        return late


class _OnGpu(torch.Tensor):
    stream: DelayedCopies
    values_on_cpu: torch.Tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if func == torch.Tensor.device.__get__:
            return GPU
        if func == torch.Tensor.is_cuda.__get__:  # type: ignore[attr-defined]
            return True
        if func in (torch.Tensor.to, torch.Tensor.cpu):
            assert func is torch.Tensor.cpu or torch.device(args[1]).type == "cpu", args[1:]
            on_gpu: _OnGpu = args[0]
            return on_gpu.stream.to_cpu(on_gpu.values_on_cpu, non_blocking=bool(named.get("non_blocking")))
        return super().__torch_function__(func, types, args, named)
