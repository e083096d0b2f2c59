"""The Triton kernels compared with the plain methods in Triton's interpreter; `tests/gpu` has the tests on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from workers.merging.shards import Shard


def check_all(sizes: tuple[int, ...], device: str) -> int:
    """Compare every fused method for each size and dtype; returns the number of comparisons."""
    from tests.workers.merging.kernels.test_kernels import bits, given_to, merges, operands
    from workers.merging.kernels import FUSED, ON_CUDA, cuda
    from workers.merging.methods.plain import PLAIN
    from workers.merging.methods.trimming import trim_ranks
    from workers.merging.order_statistics import Threshold, Trim
    from workers.merging.whole_models import ModelMagnitudes

    compared = 0
    for num_sources, dtype in ((2, torch.float32), (3, torch.bfloat16), (5, torch.float32)):
        for size in sizes:
            stored = operands((size,), (dtype,) * (num_sources + 1))
            assert stored.base is not None
            tensors, base = tuple(tensor.to(device) for tensor in stored.tensors), stored.base.to(device)
            given = replace(stored, tensors=tensors, base=base)
            for merge in merges(num_sources):
                # The interpreter rounds to bfloat16 towards zero, a device to nearest.
                to = dtype if device == "cuda" else torch.float32
                found = torch.empty(size, dtype=to, device=device)
                if merge.method not in ON_CUDA:
                    continue
                taken = given_to(merge, given)
                cuda.merge(FUSED[merge.method](merge, taken), taken.tensors, base, found)
                alone = replace(taken, magnitudes=None).in_float32()
                expected = PLAIN[merge.method].merge(alone, merge).to(to)
                assert torch.equal(bits(found), bits(expected)), (merge, size, int((found != expected).sum()))
                compared += 1
            # Thresholds of a whole model, which are not found among the elements of the tensor.
            merge = next(merge for merge in merges(num_sources) if merge.method == "ties" and merge.number("k") == 0.2)
            (rank,) = trim_ranks(merge, 3 * size)[0]
            trims = (Trim.at(Threshold(0.03 + 0.01 * i, 2**31), is_tied=True) for i in range(num_sources))
            whole = replace(given, magnitudes=tuple(ModelMagnitudes(3 * size, {rank: trim}) for trim in trims))
            found = torch.empty(size, device=device)
            cuda.merge(FUSED["ties"](merge, whole), whole.tensors, base, found)
            assert torch.equal(bits(found), bits(PLAIN["ties"].merge(whole.in_float32(), merge))), size
    return compared


def check_shards(shape: tuple[int, ...], device: str) -> int:
    """Compare shards by every kernel with the same elements of whole merges; returns the number of comparisons.

    The operands are whole tensors, and then only the elements of the shard.
    """
    from tests.workers.merging.kernels.test_kernels import bits, given_to, merges, operands
    from workers.merging.kernels import FUSED, ON_CUDA, cuda, exact_rule

    compared = 0
    for num_sources, dtype in ((2, torch.float32), (3, torch.bfloat16)):
        stored = operands(shape, (dtype,) * (num_sources + 1))
        for merge in merges(num_sources):
            if merge.method not in ON_CUDA:
                continue
            on_cpu = given_to(merge, stored)
            tensors = tuple(tensor.to(device) for tensor in on_cpu.tensors)
            assert on_cpu.base is not None
            base, rule = on_cpu.base.to(device), exact_rule(merge, on_cpu)
            whole = torch.empty(shape, device=device)
            cuda.merge(FUSED[merge.method](merge, replace(on_cpu, tensors=tensors, base=base)), tensors, base, whole)
            for view in (whole[3:], whole[:, 5:12], whole[1:2]):
                shard = Shard.of(view, whole)
                assert shard is not None
                packed = tuple(shard.view(tensor).contiguous() for tensor in tensors), shard.view(base).contiguous()
                for operands_, of_base in ((tensors, base), packed):
                    memory = torch.full((shard.num_elements + 2,), 7.0, device=device)
                    cuda.merge(rule, operands_, of_base, memory[1:-1], shard)
                    assert torch.equal(bits(memory[1:-1]), bits(view.reshape(-1))), (merge, shard)
                    assert memory[0] == memory[-1] == 7, merge
                    compared += 1
    return compared


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu tests the device itself")
def test_interpreter_gives_plain_bits_and_shards_those_of_wholes() -> None:
    """In the interpreter, kernels give the bits of the plain methods, and shards those of whole merges.

    Shards are computed from whole operands and from their parts.
    """
    compared, of_shards = interpreted("check_all((1, 1500), 'cpu'), check_shards((7, 33), 'cpu')")
    assert compared > 50
    assert of_shards > 150


def test_kernels_are_launched_on_the_device_of_their_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton launches on the process's current device, so that of the operands is made the current one."""
    from workers.merging.kernels import cuda

    current: list[torch.device] = []
    launched: list[tuple[torch.device, ...]] = []

    @contextmanager
    def device(chosen: torch.device) -> Iterator[None]:
        current.append(chosen)
        yield
        current.pop()

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda *_, **__: launched.append(tuple(current))

    monkeypatch.setattr(torch.cuda, "device", device)
    second = torch.device("cuda:1")
    for shard in (None, Shard(0, 1, 1, (1,))):
        cuda._Places.of(shard, second, is_packed=False).launch(Kernel(), 5)
    cuda._Places.of(None, torch.device("cpu"), is_packed=False).launch(Kernel(), 5)
    assert launched == [(second,), (second,), ()]


def interpreted(calls: str) -> list[int]:
    """The numbers that calls of this module's functions return in one process under Triton's interpreter."""
    code = f"from tests.workers.merging.kernels.test_cuda import check_all, check_shards; print(*({calls}))"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=570, check=False
    )
    assert finished.returncode == 0, finished.stderr[-3000:]
    return list(map(int, finished.stdout.split()))
