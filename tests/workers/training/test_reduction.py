"""Memory that derivatives by coefficients take, measured against what is planned for each merge method."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from search_spaces.methods import METHODS
from tests.workers.merging.kernels.test_kernels import operands
from tests.workers.merging.test_devices import BLOCK, BLOCK_VALUES, SHAPE, SIZE, merges, peak_of, with_all
from workers.merging import masks, order_statistics
from workers.merging.methods import arithmetic as reductions
from workers.merging.methods.peaks import BLOCK_BYTES, GPU_BLOCK_BYTES
from workers.models.headers import TensorInfo
from workers.training.memory import BY_PRODUCTS, PEAKS, REDUCTION_CHUNK_BYTES, UNKNOWN, reduction_bytes
from workers.training.reduction import FUSED, _through_the_function

LARGE = (8_192, 1_024)


@pytest.mark.slow
def test_derivatives_take_the_memory_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planned memory of derivatives is at least the measured peak, and close to it for methods with a figure."""
    for module, name in ((masks, "CHUNK"), (reductions, "CHUNK"), (order_statistics, "TIES_AT_ONCE")):
        monkeypatch.setattr(module, name, BLOCK)
    measured: dict[tuple[str, int], int] = {}
    for num_sources, dtype in ((2, torch.float32), (3, torch.bfloat16)):
        stored = operands(SHAPE, (dtype,) * (num_sources + 1))
        assert stored.ranks is not None
        given = replace(stored, ranks=tuple(ranks.int() for ranks in stored.ranks)).in_float32()
        gradient = torch.ones(SHAPE)
        for merge in merges(num_sources):
            names = {c.name: c.per_model for c in METHODS[merge.method].gradients_by if c.name in merge.coefficients}
            if names and merge.method not in BY_PRODUCTS:
                peak = peak_of(partial(_through_the_function, with_all(merge, given), merge, gradient, names))
                key = (merge.method, num_sources)
                measured[key] = max(measured.get(key, 0), peak)
    assert measured
    bad = []
    for (name, num_sources), peak in measured.items():
        planned = PEAKS.get(name, UNKNOWN).num_bytes(SHAPE, num_sources)
        is_near = name not in PEAKS or planned <= 1.6 * peak
        if not (peak - BLOCK * BLOCK_VALUES * 8 <= planned and is_near):
            bad.append((name, num_sources, peak / SIZE, planned / SIZE))
    assert not bad


def test_methods_by_products_are_known() -> None:
    """No table is needed for methods whose derivatives are inner products, and for unchanged copies."""
    assert FUSED.keys() | {"passthrough"} == BY_PRODUCTS
    assert METHODS.keys() >= PEAKS.keys()


def family_of(*, adapts: str | None) -> Any:
    """A base and two experts in bfloat16 of a large embedding and a layer; one expert adapts the tensor `adapts`."""

    def info(shape: tuple[int, ...]) -> TensorInfo:
        return TensorInfo("BF16", shape, Path(), "")

    tensors: dict[str, Any] = {"embedding": info(LARGE), "layers.0.mlp": info((1_024, 1_024))}
    adapted = tensors if adapts is None else tensors | {adapts: SimpleNamespace(shape=tensors[adapts].shape)}
    base = SimpleNamespace(tensors=tensors, base=None)
    adapter = SimpleNamespace(tensors=adapted, base=None if adapts is None else base)
    return SimpleNamespace(base=base, views={"base": base, "math": base, "code": adapter})


def test_memory_of_derivatives_depends_on_the_method() -> None:
    """Methods that PyTorch differentiates need float32 operands and temporary tensors; inner products need neither."""
    sources, count = family_of(adapts=None), LARGE[0] * LARGE[1]
    assert reduction_bytes(sources, ["task_arithmetic"]) == 3 * 2 * count + REDUCTION_CHUNK_BYTES
    assert reduction_bytes(sources, ["linear"], on_gpu=False) == 0, "kernels on the CPU copy nothing"
    # The operands and the gradient in float32, and eight bytes for each of two experts and ten more (`ties_peft`).
    through = (3 + 1) * 4 * count + (8 * 2 + 10) * count
    assert reduction_bytes(sources, ["ties_peft"], on_gpu=False) == through + BLOCK_BYTES
    on_gpu = 3 * 2 * count + through + GPU_BLOCK_BYTES + REDUCTION_CHUNK_BYTES
    assert reduction_bytes(sources, ["linear", "ties_peft"]) == on_gpu


def test_adapted_tensors_alone_are_computed() -> None:
    """An adapter's product is counted for tensors that it changes, not for an embedding that it leaves as it is."""
    whole = reduction_bytes(family_of(adapts=None))
    assert reduction_bytes(family_of(adapts="layers.0.mlp")) == whole
    assert reduction_bytes(family_of(adapts="embedding")) == whole + (8 - 2) * LARGE[0] * LARGE[1]
