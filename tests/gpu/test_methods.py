"""Merge methods on a GPU: kernels against plain functions, GPU against CPU, large tensors, and memory.

All comparisons are of bits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import pytest
import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from tests.gpu.conftest import Figure
from tests.workers.merging.kernels.test_cuda import check_all, check_shards
from tests.workers.merging.kernels.test_kernels import bits, chosen_merges, given_to, operands, with_statistics
from tests.workers.merging.test_devices import merges, with_all
from tests.workers.training.mergopt.test_noise import check_cuda_kernel
from workers.merging import masks
from workers.merging.kernels import ON_CUDA, is_fused, merge_stored
from workers.merging.methods import arithmetic
from workers.merging.methods.peaks import GPU_BLOCK_BYTES
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.order_statistics import Threshold, TieOrder, Trim
from workers.merging.whole_models import ModelMagnitudes

pytestmark = [pytest.mark.gpu, pytest.mark.bare]

GPU = "cuda"
FLOAT32, BFLOAT16, FLOAT16 = torch.float32, torch.bfloat16, torch.float16
BY_DEVICE = frozenset(name for name, method in METHODS.items() if method.depends_on_device)


def on_gpu(stored: Operands, *, shift: int = 0) -> Operands:
    """The operands on the GPU, `shift` elements behind the start of their memory: not aligned to 16 bytes."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        memory = torch.empty(tensor.numel() + shift, dtype=tensor.dtype, device=GPU)
        return memory[shift:].view(tensor.shape).copy_(tensor)

    base = None if stored.base is None else moved(stored.base)
    ranks = None if stored.ranks is None else tuple(each.int().to(GPU) for each in stored.ranks)
    importance = stored.importance
    if importance is not None:
        importance = replace(importance, rows=importance.rows.to(GPU))
    return replace(stored, tensors=tuple(map(moved, stored.tensors)), base=base, ranks=ranks, importance=importance)


def chosen(num_sources: int) -> Iterator[Merge]:
    """Merges by every method that takes this number of sources; above three, only methods with CUDA kernels."""
    if num_sources <= 3:
        yield from merges(num_sources)
        return
    for merge in chosen_merges(5):
        if merge.method in ON_CUDA and len(merge.sources) == 5:
            sources = tuple(Source(f"m{i}") for i in range(num_sources))
            numbers = {
                name: (value * 2)[:num_sources] if isinstance(value, tuple) else value
                for name, value in merge.coefficients.items()
            }
            yield replace(merge, sources=sources, coefficients=numbers)


@pytest.mark.parametrize(
    ("num_sources", "dtypes"),
    [
        (2, (FLOAT32,)),
        (3, (BFLOAT16, FLOAT32, FLOAT16)),
        (9, (BFLOAT16, FLOAT32)),
    ],
)
def test_methods_have_the_bits_of_the_cpu(num_sources: int, dtypes: tuple[torch.dtype, ...], figure: Figure) -> None:
    """Kernels equal plain functions on the GPU, and these equal the CPU's, for every method."""
    found: dict[str, set[str]] = {"kernel": set(), "plain": set(), "other bits": set()}
    stored = operands((33, 1001), tuple(dtypes[i % len(dtypes)] for i in range(num_sources + 1)))
    for merge in chosen(num_sources):
        taken = with_all(merge, given_to(merge, stored))
        there = on_gpu(taken, shift=1)
        expected = PLAIN[merge.method].merge(taken.in_float32(), merge)
        plain = PLAIN[merge.method].merge(there.in_float32(), merge)
        assert plain.is_cuda or merge.method == "passthrough", merge
        if torch.equal(bits(plain.cpu()), bits(expected)):
            found["plain"].add(merge.method)
        else:
            found["other bits"].add(merge.method)
        for dtype in (FLOAT32, BFLOAT16, *(each for each in dtypes if each == FLOAT16)):
            if is_fused(merge, there, dtype):
                memory = torch.empty(plain.numel() + 1, dtype=dtype, device=GPU)
                out = memory[1:].view(plain.shape)
                merge_stored(merge, there, out)
                assert torch.equal(bits(out), bits(plain.to(dtype))), (merge, dtype)
                found["kernel"].add(merge.method)
    names = f"{num_sources} sources, {', '.join(str(dtype)[6:] for dtype in dtypes)}"
    others = sorted(found["other bits"])
    figure(f"{names}: {len(found['plain'])} methods equal the CPU, {len(found['kernel'])} by kernels; other: {others}")
    assert found["other bits"] <= BY_DEVICE
    assert found["kernel"] == ON_CUDA & {merge.method for merge in chosen(num_sources)}


def test_kernels_have_the_bits_of_plain_functions() -> None:
    """Kernels give the bits of the plain methods on the device, for odd sizes and thresholds of whole models."""
    assert check_all((1, 1000, 1_000_003), GPU) > 100


def test_kernels_give_shards_the_bits_of_whole_merges() -> None:
    """Kernels compute rows and columns with the bits of the whole tensor, from whole and packed operands."""
    assert check_shards((33, 1001), GPU) > 150


def test_noise_has_the_bits_of_plain_functions() -> None:
    """MergOPT's kernel gives the bits of torch, on the GPU and on the CPU."""
    assert check_cuda_kernel(GPU) == 30


@pytest.mark.parametrize("dtype", [FLOAT32, BFLOAT16])
def test_massive_ties(dtype: torch.dtype) -> None:
    """Elements of equal magnitude are cut by their marks, as on the CPU."""
    draw = torch.Generator().manual_seed(0)
    base = torch.zeros(64, 1024, dtype=dtype)
    tensors = tuple((torch.randint(0, 2, base.shape, generator=draw) * 2 - 1).to(dtype) * 0.5 for _ in range(3))
    tensors[2][:32] = 0  # ties at zero, too
    stored = with_statistics(tensors, base)
    compared = 0
    for merge in merges(3):
        if not METHODS[merge.method].trims and "magnitudes" not in PLAIN[merge.method].uses:
            continue
        taken = with_all(merge, given_to(merge, stored))
        there = on_gpu(taken)
        expected = PLAIN[merge.method].merge(taken.in_float32(), merge)
        assert torch.equal(PLAIN[merge.method].merge(there.in_float32(), merge).cpu(), expected), merge
        if is_fused(merge, there, FLOAT32):
            out = torch.empty(base.shape, device=GPU)
            merge_stored(merge, there, out)
            assert torch.equal(out.cpu(), expected), merge
        compared += 1
    assert compared >= 10


def _random(size: int, seed: int) -> torch.Tensor:
    draw = torch.Generator(GPU).manual_seed(seed)
    made = torch.empty(size, dtype=BFLOAT16, device=GPU)
    for part in made.split(1 << 28):
        part.copy_(torch.randn(part.numel(), generator=draw, device=GPU))
    return made


@pytest.mark.parametrize("method", ["task_arithmetic", "dare_linear", "ties"])
def test_a_tensor_above_two_billion_elements(method: str) -> None:
    """A tensor of more than 2^31 elements is merged to its end."""
    size = 2**31 + 1025
    base, source = _random(size, 0), _random(size, 1)
    sources = (Source("m0"),)
    numbers: dict[str, dict[str, float]] = {"ties": {"lambda": 0.7, "k": 0.2}, "task_arithmetic": {"lambda": 0.7}}
    numbers["dare_linear"] = {"lambda": 0.7, "density": 0.5}
    merge = Merge(method, sources, numbers[method], 3 if METHODS[method].takes_seed else None)
    key = masks.mask_key(3, "m0", "weight")
    given = Operands((source,), base, keys=(key,), orders=(TieOrder(0),), order=TieOrder(1))
    if method == "ties":
        from workers.merging.methods.trimming import trim_ranks

        (rank,) = trim_ranks(merge, 2 * size)[0]
        trim = Trim.at(Threshold(1.5, 2**31), is_tied=True)
        given = replace(given, magnitudes=(ModelMagnitudes(2 * size, {rank: trim}),))
    found = torch.empty(size, dtype=BFLOAT16, device=GPU)
    merge_stored(merge, given, found)
    plain = PLAIN[method].merge(given.in_float32(), merge)
    for start in range(0, size, 1 << 28):
        assert torch.equal(found[start : start + (1 << 28)], plain[start : start + (1 << 28)].to(BFLOAT16)), start
    assert not torch.equal(found[-1000:], base[-1000:])


def peak_of(call: Callable[[], torch.Tensor]) -> int:
    """Peak of the GPU memory that `call` takes, in bytes, with its result."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = call()
    torch.cuda.synchronize()
    del made
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("chunks", ["as shipped", "small"])
def test_methods_take_the_memory_that_is_planned(chunks: str, monkeypatch: pytest.MonkeyPatch, figure: Figure) -> None:
    """No plain function takes more GPU memory than is planned for it, and for chunks of a fixed size."""
    if chunks == "small":  # only what grows with the tensor is left, and workspace of CUDA's libraries
        monkeypatch.setattr(masks, "GPU_CHUNK", masks.CHUNK)
        monkeypatch.setattr(arithmetic, "GPU_CHUNK", arithmetic.CHUNK)
    of_chunks = GPU_BLOCK_BYTES if chunks == "as shipped" else GPU_BLOCK_BYTES // 4
    shape = (2048, 4096)
    over: dict[str, float] = {}
    closest = 0.0
    count = 0
    for num_sources, dtype in ((2, FLOAT32), (3, BFLOAT16)):
        stored = operands(shape, (dtype,) * (num_sources + 1))
        given = on_gpu(stored).in_float32()
        for merge in merges(num_sources):
            taken = with_all(merge, given_to(merge, given))
            run = partial(PLAIN[merge.method].merge, taken, merge)
            run()  # what CUDA's libraries allocate once is not counted
            peak = peak_of(run)
            planned = PLAIN[merge.method].peak.num_bytes(shape, num_sources, on_gpu=True) + of_chunks
            closest = max(closest, peak / planned)
            count += 1
            if peak > planned:
                over[f"{merge.method} of {num_sources}"] = peak / planned
    size = " x ".join(map(str, shape))
    figure(f"memory of plain functions, chunks {chunks}: {count} merges of {size}, at most {closest:.2f} of the plan")
    assert not over


def seconds_of(call: Callable[[], object], repeats: int = 3) -> float:
    call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - began)
    return best


def test_chunks_do_not_cost_launches(figure: Figure) -> None:
    """Masks, exact sums and noise take a small multiple of the time that reading the memory takes."""
    from workers.training.mergopt.cuda_kernel import add_noise
    from workers.training.mergopt.noise import Laplace

    size = 1 << 28
    one, other = _random(size, 0), _random(size, 1)
    copy = seconds_of(partial(one.copy_, other))  # 1 GiB is read or written
    chances = torch.full((1 << 26,), 0.5, dtype=torch.float64, device=GPU)
    taken = {
        "mask of 2^28 elements": seconds_of(partial(masks.keep, 12345, (size,), 0.5, device=GPU)),
        "mask of 2^26 single probabilities": seconds_of(partial(masks.keep_each, 12345, chances)),
        "inner product of 2^28 elements in float64": seconds_of(partial(arithmetic.dot, one, other)),
        "noise on 2^28 elements": seconds_of(partial(add_noise, one, Laplace().quantiles.to(GPU), key=7, start=0)),
    }
    for name, seconds in taken.items():
        figure(f"{name}: {1e3 * seconds:.1f} ms, {seconds / copy:.1f} times that of a copy in bfloat16")
    assert taken["mask of 2^28 elements"] < 0.5
    assert taken["mask of 2^26 single probabilities"] < 0.25
    assert taken["inner product of 2^28 elements in float64"] < 1.0
    assert taken["noise on 2^28 elements"] < 0.02


def test_bandwidth_of_kernels(figure: Figure) -> None:
    """Sums move memory nearly as fast as a copy; masks, and the marks of TIES, are computed meanwhile."""
    size = 1 << 28
    tensors = tuple(_random(size, seed) for seed in range(4))
    out = torch.empty(size, dtype=BFLOAT16, device=GPU)
    copied = 2 * 2 * size / seconds_of(partial(out.copy_, tensors[0]))
    figure(f"copy on the device: {copied / 1e12:.2f} TB/s read and written")
    slow = {}
    shares = {"linear": 0.8, "task_arithmetic": 0.8, "dare_ties": 0.3, "ties": 0.1}  # of a copy's speed
    for num_sources in (2, 3):
        sources = tuple(Source(f"m{i}") for i in range(num_sources))
        each: dict[str, dict[str, float | tuple[float, ...]]] = {
            "linear": {"weight": (0.3,) * num_sources},
            "task_arithmetic": {"lambda": 0.4},
            "dare_ties": {"lambda": 0.4, "density": 0.5},
            "ties": {"lambda": 0.4, "k": 0.2},
        }
        keys = tuple(masks.mask_key(3, f"m{i}", "weight") for i in range(num_sources))
        orders = tuple(TieOrder(i) for i in range(num_sources))
        given = Operands(tensors[1 : 1 + num_sources], tensors[0], keys=keys, orders=orders, order=TieOrder(9))
        for method, numbers in each.items():
            merge = Merge(method, sources, numbers, 3 if METHODS[method].takes_seed else None)
            taken = given
            if method == "ties":
                from workers.merging.methods.trimming import trim_ranks

                (rank,) = trim_ranks(merge, 2 * size)[0]
                trim = Trim.at(Threshold(1.5, 2**31), is_tied=True)
                taken = replace(given, magnitudes=(ModelMagnitudes(2 * size, {rank: trim}),) * num_sources)
            seconds = seconds_of(partial(merge_stored, merge, taken, out))
            num_read = num_sources + int(METHODS[method].needs_base)
            moved = 2 * size * (num_read + 1) / seconds
            figure(f"{method} of {num_sources}: {moved / 1e12:.2f} TB/s, {moved / copied:.2f} of a copy")
            if moved < shares[method] * copied:
                slow[f"{method} of {num_sources}"] = moved / copied
    assert not slow
