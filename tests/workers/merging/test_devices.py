"""The device that computes each merged tensor, and the limit on memory: no method takes more than planned."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Recipe, Source
from tests.workers.merging.kernels.test_kernels import chosen_merges, given_to, operands
from tests.workers.merging.methods.examples import EXAMPLES
from tests.workers.recipes import arithmetic
from workers.merging import masks, order_statistics
from workers.merging.bank import Bank
from workers.merging.devices import bank_for, devices_of, peak_bytes
from workers.merging.kernels.lowering import ON_CUDA
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods import arithmetic as reductions
from workers.merging.methods.peaks import GPU_BLOCK_BYTES
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.plan import plan_tensors
from workers.types import Family

SHAPE = (64, 128)
SIZE = 64 * 128
MOST_MERGES = 2  # of a method, with different coefficients
# Elements whose hashes and sums are computed at a time here, and 8-byte values for each of them.
BLOCK, BLOCK_VALUES = 512, 5


def peak_of(call: Callable[[], object]) -> int:
    """Peak of the bytes that PyTorch's CPU allocator held during `call`, beyond those at its start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        call()
    held = most = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def merges(num_sources: int) -> Iterator[Merge]:
    """A few merges by every method that takes this number of sources."""
    chosen: list[Merge] = []
    for merge in chosen_merges(num_sources):
        if sum(each.method == merge.method for each in chosen) < MOST_MERGES:
            chosen.append(merge)
    yield from chosen
    sources = tuple(Source(f"m{i}") for i in range(num_sources))
    for name in METHODS.keys() - {merge.method for merge in chosen}:
        declared = METHODS[name]
        if declared.min_sources <= num_sources <= (declared.max_sources or num_sources):
            given = {c.name: EXAMPLES[c.name] for c in declared.coefficients if c.default is None}
            numbers = {
                name: value[:num_sources] if isinstance(value, tuple) else value for name, value in given.items()
            }
            yield Merge(name, sources, numbers, 3 if declared.takes_seed else None)


@pytest.mark.slow
def test_methods_take_the_memory_that_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """The peak that each method states is at least what it takes for any coefficients, and at most half more."""
    for module, name in ((masks, "CHUNK"), (reductions, "CHUNK"), (order_statistics, "TIES_AT_ONCE")):
        monkeypatch.setattr(module, name, BLOCK)
    measured: dict[tuple[str, int], int] = {}
    # In bfloat16 a tenth of all elements may have the magnitude at a threshold.
    for num_sources, dtype in ((2, torch.float32), (3, torch.bfloat16)):
        stored = operands(SHAPE, (dtype,) * (num_sources + 1))
        assert stored.ranks is not None
        given = replace(stored, ranks=tuple(ranks.int() for ranks in stored.ranks)).in_float32()
        for merge in merges(num_sources):
            key, taken = (merge.method, num_sources), with_all(merge, given)
            peak = peak_of(partial(PLAIN[merge.method].merge, taken, merge))
            measured[key] = max(measured.get(key, 0), peak)
    assert {name for name, _ in measured} == set(METHODS)
    for (name, num_sources), peak in measured.items():
        planned = PLAIN[name].peak.num_bytes(SHAPE, num_sources)
        assert peak - BLOCK * BLOCK_VALUES * 8 <= planned <= 1.5 * peak, (name, peak / SIZE, planned / SIZE)


def with_all(merge: Merge, given: Operands) -> Operands:
    """The operands with a bank's statistics: no magnitudes for methods with random masks, which change them."""
    declared = METHODS[merge.method]
    magnitudes = None if declared.takes_seed else given.magnitudes
    return replace(given_to(merge, given), base=given.base if declared.needs_base else None, magnitudes=magnitudes)


def all_of(family: Family, method: str, coefficients: dict[str, float], seed: int | None = None) -> Recipe:
    """A recipe in which one method merges every tensor."""
    plain = arithmetic(family, *(0.5 for _ in family.experts))

    def merge(layer: int | None) -> Merge:
        sources = tuple(Source(expert.alias, layer) for expert in family.experts)
        return Merge(method, sources, coefficients, seed)

    layers = tuple(
        replace(each, attention=merge(i), mlp=merge(i), norm=merge(i)) for i, each in enumerate(plain.layers)
    )
    return replace(plain, layers=layers, embedding=merge(None), head=merge(None))


DELLA = ("della", {"lambda": 0.5, "density": 0.5, "epsilon": 0.1}, 3)


@pytest.fixture
def gpu_bank(untied_family: Family, tmp_path: Path) -> Bank:
    """A bank for merges on a GPU that does not exist; the tests compute nothing on it."""
    bank = Bank(untied_family, cache=tmp_path)
    bank.device = torch.device("cuda", 0)
    return bank


def test_device_is_chosen_per_method(untied_family: Family, gpu_bank: Bank) -> None:
    """A GPU merges by its kernels where a plain function would need more memory than it has."""
    fused = plan_tensors(arithmetic(untied_family, 0.5, 0.5), gpu_bank)
    plain = plan_tensors(all_of(untied_family, *DELLA), gpu_bank)
    assert "della" not in ON_CUDA
    assert "task_arithmetic" in ON_CUDA
    assert set(devices_of(plain, gpu_bank, torch.bfloat16).values()) == {"cuda"}, "nothing says how much room it has"
    most = max(peak_bytes(tensor, fused, gpu_bank, torch.bfloat16) for tensor in fused.tensors)
    gpu_bank.room_bytes = most
    assert set(devices_of(fused, gpu_bank, torch.bfloat16).values()) == {"cuda"}
    assert set(devices_of(plain, gpu_bank, torch.bfloat16).values()) == {"cpu"}
    large = max(plain.tensors, key=lambda tensor: peak_bytes(tensor, plain, gpu_bank, torch.bfloat16))
    gpu_bank.room_bytes = peak_bytes(large, plain, gpu_bank, torch.bfloat16) - 1
    found = devices_of(plain, gpu_bank, torch.bfloat16)
    assert found.pop(large.name) == "cpu"
    assert "cuda" in found.values()
    assert bank_for(large, plain, gpu_bank, torch.bfloat16) is gpu_bank.on("cpu")


def test_peak_of_the_largest_tensor_of_8b(untied_family: Family, gpu_bank: Bank) -> None:
    """By its plain function, DELLA of three sources takes more than 31 GB for an embedding of 128,256 x 4,096."""
    plan = plan_tensors(all_of(untied_family, *DELLA), gpu_bank)
    merge = replace(plan.tensors[0].merge, sources=(*plan.tensors[0].merge.sources, plan.tensors[0].merge.sources[0]))
    tensor = replace(plan.tensors[0], merge=merge, shape=(128_256, 4_096))
    elements = 128_256 * 4_096
    # Four copies in bfloat16 and in float32, ranks of three sources, and the method's own.
    assert (
        peak_bytes(tensor, plan, gpu_bank, torch.bfloat16) == elements * (4 * 6 + 3 * 4 + 3 * 4 + 21) + GPU_BLOCK_BYTES
    )
    assert peak_bytes(tensor, plan, gpu_bank, torch.bfloat16) > 31e9


def test_what_the_cpu_merges_for_a_gpu_has_the_same_bits(untied_family: Family, tmp_path: Path) -> None:
    """A merge whose tensors are divided between devices is that of one device."""
    recipe = all_of(untied_family, *DELLA)
    expected = dict(merged_tensors(recipe, Bank(untied_family, cache=tmp_path), torch.bfloat16))
    bank = Bank(untied_family, cache=tmp_path)
    bank.device, bank.room_bytes = torch.device("cuda", 0), 0
    into = {name: torch.full(tensor.shape, torch.nan, dtype=tensor.dtype) for name, tensor in expected.items()}
    merge_into(recipe, bank, into)
    found = dict(merged_tensors(recipe, bank, torch.bfloat16))
    assert all(torch.equal(into[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
