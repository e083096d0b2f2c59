"""Fused merge kernels for tensors on one CUDA device.

Multiplications and additions are not contracted, and divisions are rounded correctly. So the results have the same bits
as the results of the plain methods on the same device. The tests marked `gpu` run the kernels on a device; without a
device they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Self

import torch
import triton
import triton.language as tl

from workers.merging.kernels import rules
from workers.merging.kernels.lowering.averages import Nearswap
from workers.merging.masks import MULTIPLIERS, STEP, hashes
from workers.merging.order_statistics import LARGEST_MARK, SPACING, Threshold
from workers.merging.shards import Shard

__all__ = ["element_hash", "launching_on", "merge"]

BLOCK = 1024  # elements of one Triton program

Tensors = Sequence[torch.Tensor]
WEYL, FIRST, SECOND = tl.constexpr(STEP), tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])


def merge(
    rule: rules.Rule, tensors: Tensors, base: torch.Tensor | None, out: torch.Tensor, shard: Shard | None = None
) -> None:
    """Merge tensors on a CUDA device by a rule, and write the result to `out`, without waiting for the device.

    A rule is the formula of a merge with its numbers, as plain data; the merge must be by a method in the constant
    `lowering.ON_CUDA`. `tensors` are the sources, and `base` is the base's tensor or None if the rule does not use it.
    All tensors are contiguous and have fewer than 2^32 elements.

    With `shard`, only the elements of the shard are computed, and `out` has only these elements. Then `tensors` and
    `base` are either all whole, or all have only the elements of the shard, in the same order. The thresholds of the
    rule must be exact (function `kernels.exact_rule`), because elements between two bounds of a threshold may be in
    other shards.
    """
    xs, size = tuple(tensors), out.numel()
    at = _Places.of(shard, out.device, is_packed=all(tensor.numel() == size for tensor in xs))
    match rule:
        case rules.WeightedSum(weights):
            at.launch(_weighted_sum, size, xs, _floats(weights, out), out, size)
        case rules.TaskSum(weights):
            at.launch(_weighted_task_sum, size, base, xs, _floats(weights, out), out, size)
        case Nearswap(t):
            at.launch(_nearswap, size, *xs, _floats([t, 1e-6], out), out, size)
        case rules.SharedOut(epsilon, factors) if set(factors) == {1.0}:
            at.launch(_ram, size, base, xs, _floats([epsilon], out), out, size)
        case rules.Sum(rules.Whole(), factors):
            at.launch(_task_arithmetic, size, base, xs, _floats(factors, out), out, size)
        case rules.Sum(rules.Dropped() as sparse, factors):
            numbers = _masks(sparse, out), _floats(sparse.scales, out), _floats(factors, out)
            at.launch(_dare_linear, size, base, xs, *numbers, out, size)
        case rules.Mean(rules.Dropped() as sparse, lambda_):
            numbers = _masks(sparse, out), _floats(sparse.scales, out), _floats([lambda_], out)
            at.launch(_dare_ties, size, base, xs, *numbers, out, size)
        case rules.Mean(rules.Trimmed() as sparse, lambda_):
            assert base is not None
            _ties_of(sparse, lambda_, xs, base, out, at)
        case _:
            raise NotImplementedError(f"no CUDA kernel for {rule}")


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Context manager that makes Triton launch kernels on `device`; it has no effect for other devices than CUDA's.

    Triton launches on the process's current device, which may differ from the device of the operands.
    """
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@dataclass(frozen=True)
class _Places:
    """Places of the computed elements in their whole tensor, as arguments of kernels.

    The element at the position p of the result is the element first + p / run * stride + p % run of the whole tensor,
    with p / run rounded down. `is_shard` says whether the result has only the elements of a shard; otherwise `first`,
    `run` and `stride` are not used. `is_packed` says whether the operands, too, have only the elements of the shard.
    `device` is the device of the operands and the result.
    """

    device: torch.device
    first: int = 0
    run: int = 1
    stride: int = 1
    is_shard: bool = False
    is_packed: bool = False

    @classmethod
    def of(cls, shard: Shard | None, device: torch.device, *, is_packed: bool) -> Self:
        if shard is None:
            return cls(device)
        return cls(device, shard.first, max(1, shard.run), shard.stride, is_shard=True, is_packed=is_packed)

    def launch(self, kernel: Any, size: int, *arguments: Any, **constants: Any) -> None:
        """Launch `kernel` for `size` elements on the operands' device, without waiting for the device."""
        with launching_on(self.device):
            kernel[(triton.cdiv(size, BLOCK),)](
                *arguments,
                self.first,
                self.run,
                self.stride,
                SHARD=self.is_shard,
                PACKED=self.is_packed,
                BLOCK=BLOCK,
                enable_fp_fusion=False,
                **constants,
            )


def _ties_of(
    sparse: rules.Trimmed,
    lambda_: float,
    xs: tuple[torch.Tensor, ...],
    base: torch.Tensor,
    out: torch.Tensor,
    places: _Places,
) -> None:
    """Compute a TIES merge on a CUDA device in one or two passes, and write the result to `out`.

    TIES keeps the elements of each source's task vector that are at a threshold or above; `sparse` has two bounds of
    each threshold. The first pass collects the elements between the bounds, which are not decided yet. The exact
    thresholds are found among these elements, and the second pass computes the merge of these elements with the exact
    thresholds. For a shard there is only the first pass, and the bounds must be equal, so that no element is undecided.
    `xs` are the sources, and `base` is the base. `lambda_` multiplies the merged task vector, which is then added to
    the base. `places` says where the computed elements are in the whole tensor.
    """
    lambdas, thresholds = _floats([lambda_], out), _thresholds(sparse, out)
    assert not places.is_shard or (sparse.lows, sparse.low_marks) == (sparse.highs, sparse.high_marks), "not exact"
    most = 1 if places.is_shard else len(xs) * SPACING
    found = torch.full((most,), -1, dtype=torch.int64, device=out.device)
    count = torch.zeros(1, dtype=torch.int32, device=out.device)
    places.launch(_ties, out.numel(), base, xs, *thresholds, lambdas, out, found, count, most, out.numel(), AT=False)
    if places.is_shard:
        return
    at = found.clamp(min=0)
    exact = []
    for s, tensor in enumerate(xs):
        sizes = (tensor.view(-1)[at].float() - base.view(-1)[at].float()).abs_()
        keys = (sizes.view(torch.int32).long() << 32) | (hashes(0, at) * sparse.factors[s]) & LARGEST_MARK
        low = Threshold(sparse.lows[s], sparse.low_marks[s]).key
        high = Threshold(sparse.highs[s], sparse.high_marks[s]).key
        is_between = (found >= 0) & (keys > low) & (keys < high)
        exact.append(keys.masked_fill_(~is_between, high).sort().values[sparse.ranks[s]])
    reached = torch.stack(exact)
    magnitudes, marks = (reached >> 32).int().view(torch.float32), reached & LARGEST_MARK
    thresholds = (magnitudes, marks, magnitudes, marks, thresholds[-1])
    places.launch(_ties, most, base, xs, *thresholds, lambdas, out, found, count, most, most, AT=True)


@triton.jit
def _element(p, first, run, stride, SHARD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert the position `p` of an element in the result to its index in the whole tensor (class `_Places`)."""
    return first + p // run * stride + p % run if SHARD else p


@triton.jit
def _weighted_sum(  # type: ignore[no-untyped-def]
    xs, weights, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    total = tl.load(xs[0] + at, mask=is_inside).to(tl.float32) * tl.load(weights)
    for s in tl.static_range(1, len(xs)):
        total += tl.load(xs[s] + at, mask=is_inside).to(tl.float32) * tl.load(weights + s)
    tl.store(out + p, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _weighted_task_sum(  # type: ignore[no-untyped-def]
    base, xs, weights, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside).to(tl.float32)
    total = (tl.load(xs[0] + at, mask=is_inside).to(tl.float32) - b) * tl.load(weights)
    for s in tl.static_range(1, len(xs)):
        total += (tl.load(xs[s] + at, mask=is_inside).to(tl.float32) - b) * tl.load(weights + s)
    tl.store(out + p, (total + b).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _nearswap(  # type: ignore[no-untyped-def]
    one, other, numbers, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel that merges the two sources `one` and `other` with NearSwap.

    NearSwap moves each element of `one` towards `other`, at most by a distance t: the element of `other` has the
    share min(1, t / d), with d = |one - other|. `numbers` points to two numbers: t, and a lower limit of d, which
    replaces smaller values. The result is written to `out`, which has `size` elements; one program computes `BLOCK` of
    them.
    """
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    a = tl.load(one + at, mask=is_inside, other=0).to(tl.float32)
    b = tl.load(other + at, mask=is_inside, other=0).to(tl.float32)
    distance = tl.maximum(tl.abs(a - b), tl.load(numbers + 1))
    share = tl.minimum(tl.div_rn(tl.full(distance.shape, 1.0, tl.float32), distance) * tl.load(numbers), 1.0)
    tl.store(out + p, (share * b + (1 - share) * a).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _ram(  # type: ignore[no-untyped-def]
    base, xs, epsilon, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside, other=0).to(tl.float32)
    count, total = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + at, mask=is_inside, other=0).to(tl.float32) - b
        count += tl.where(tl.abs(tau) > tl.load(epsilon), 1.0, 0.0)
    share = tl.div_rn(tl.full(count.shape, 1.0, tl.float32), tl.maximum(count, 1.0))
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + at, mask=is_inside, other=0).to(tl.float32) - b
        total += tl.where(tl.abs(tau) > tl.load(epsilon), tau, 0.0) * share
    tl.store(out + p, (total + b).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _task_arithmetic(  # type: ignore[no-untyped-def]
    base, xs, lambdas, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside).to(tl.float32)
    total = b
    for s in tl.static_range(len(xs)):
        total += (tl.load(xs[s] + at, mask=is_inside).to(tl.float32) - b) * tl.load(lambdas + s)
    tl.store(out + p, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _ties(  # type: ignore[no-untyped-def]
    base, xs, lows, low_marks, highs, high_marks, factors, lambdas, out, found, count, most, size, first, run, stride,
    SHARD: tl.constexpr, PACKED: tl.constexpr, AT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Triton kernel for one of the passes of a TIES merge of the sources `xs`.

    TIES keeps the elements of each source's task vector (source minus `base`) that are at a threshold or above. The
    threshold is known by two bounds. Elements strictly between the bounds are not decided yet and count as dropped in
    this pass. The result is written to `out`.

    - `lows`, `low_marks`, `highs`, `high_marks`: the magnitudes and tie-breaking marks of the two bounds, with a number
      for each source; marks are hashes that order elements of equal magnitude
    - `found`, `count`, `most`: without `AT`, the positions of the undecided elements are written to `found`, whose
      length is `most`, and their number is added to `count`
    - `first`, `run`, `stride`, `SHARD`, `PACKED`: where the computed elements are in the whole tensor (`_Places`)
    - `AT`: whether only the elements at the positions in `found` are merged; negative positions are skipped
    - `factors`: for each source, the number by which hashes of the elements' indices are multiplied to give marks
    - `lambdas`: the factor of the merged task vector, which is added to the base
    - `size`: the number of elements, or with `AT` the number of positions in `found`; one program handles `BLOCK` of
      them
    """
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    if AT:
        p = tl.load(found + p, mask=is_inside, other=-1)
        is_inside = p >= 0
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside, other=0).to(tl.float32)
    total = tl.zeros_like(b)
    is_undecided = tl.zeros_like(b) > 0
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + at, mask=is_inside, other=0).to(tl.float32) - b
        size_, mark = tl.abs(tau), _marked(i, factors + s)
        low, high = tl.load(lows + s), tl.load(highs + s)
        low_mark, high_mark = tl.load(low_marks + s).to(tl.uint32), tl.load(high_marks + s).to(tl.uint32)
        is_above = (size_ > low) | ((size_ == low) & (mark > low_mark))
        is_below = (size_ < high) | ((size_ == high) & (mark < high_mark))
        is_undecided = is_undecided | (is_above & is_below)
        total += tl.where((size_ > high) | ((size_ == high) & (mark >= high_mark)), tau, 0.0)
    elected = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    merged, number = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + at, mask=is_inside, other=0).to(tl.float32) - b
        size_, mark = tl.abs(tau), _marked(i, factors + s)
        high, high_mark = tl.load(highs + s), tl.load(high_marks + s).to(tl.uint32)
        is_kept = (size_ > high) | ((size_ == high) & (mark >= high_mark))
        agreeing = tl.where(is_kept, tau * elected, 0.0)
        merged += tl.where(agreeing > 0, agreeing, 0.0)
        number += tl.where(agreeing > 0, 1.0, 0.0)
    result = tl.div_rn(merged * elected, tl.maximum(number, 1.0)) * tl.load(lambdas) + b
    tl.store(out + p, result.to(out.dtype.element_ty), mask=is_inside)
    if not AT:
        is_undecided = is_undecided & is_inside
        place = tl.atomic_add(count + tl.zeros_like(p), 1, mask=is_undecided)
        tl.store(found + place, p, mask=is_undecided & (place < most))


@triton.jit
def _dare_linear(  # type: ignore[no-untyped-def]
    base, xs, masks, scales, factors, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside).to(tl.float32)
    total = b
    for s in tl.static_range(len(xs)):
        tau = (tl.load(xs[s] + at, mask=is_inside).to(tl.float32) - b) * tl.load(scales + s)
        total += tl.where(_is_kept(i, masks + 3 * s), tau, 0.0) * tl.load(factors + s)
    tl.store(out + p, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _dare_ties(  # type: ignore[no-untyped-def]
    base, xs, masks, scales, lambdas, out, size,
    first, run, stride, SHARD: tl.constexpr, PACKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    p = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = p < size
    i = _element(p, first, run, stride, SHARD)
    at = p if PACKED else i
    b = tl.load(base + at, mask=is_inside).to(tl.float32)
    total = tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = (tl.load(xs[s] + at, mask=is_inside).to(tl.float32) - b) * tl.load(scales + s)
        total += tl.where(_is_kept(i, masks + 3 * s), tau, 0.0)
    elected = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    merged, number = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = (tl.load(xs[s] + at, mask=is_inside).to(tl.float32) - b) * tl.load(scales + s)
        agreeing = tl.where(_is_kept(i, masks + 3 * s), tau * elected, 0.0)
        merged += tl.where(agreeing > 0, agreeing, 0.0)
        number += tl.where(agreeing > 0, 1.0, 0.0)
    result = tl.div_rn(merged * elected, tl.maximum(number, 1.0)) * tl.load(lambdas) + b
    tl.store(out + p, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _is_kept(i, mask):  # type: ignore[no-untyped-def]
    """Whether a random mask keeps element i, for i below 2^32.

    `mask` points to three numbers: the low and the high 32 bits of the mask's key, and a bound. The mask keeps the
    element if the element's hash by this key is at most the bound (module `workers.merging.masks`).
    """
    drawn = element_hash(i, tl.load(mask).to(tl.uint32), tl.load(mask + 1).to(tl.uint32))
    return drawn <= tl.load(mask + 2).to(tl.uint32)


@triton.jit
def _marked(i, factor):  # type: ignore[no-untyped-def]
    """The tie-breaking mark of element i, a number that orders elements of equal magnitude; i is below 2^32.

    The mark is a hash of i, multiplied modulo 2^32 by an odd number that differs between tensors (property
    `TieOrder.factor`). `factor` points to this number.
    """
    zero = tl.cast(0, tl.uint32)
    return element_hash(i, zero, zero) * tl.load(factor).to(tl.uint32)


@triton.jit
def element_hash(i, k0, k1):  # type: ignore[no-untyped-def]
    """The hash of element i; by this hash, a random mask keeps or drops the element (module `workers.merging.masks`).

    k0 and k1 are the low and the high 32 bits of the mask's key. For i from 2^32 on, the caller adds i / 2^32, rounded
    down, to k1.
    """
    x = i.to(tl.uint32) * tl.cast(WEYL, tl.uint32) + k0
    x = (x ^ (x >> 16)) * tl.cast(FIRST, tl.uint32)
    x = ((x ^ (x >> 15)) + k1) * tl.cast(SECOND, tl.uint32)
    return x ^ (x >> 16)


def _floats(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)


def _thresholds(sparse: rules.Trimmed, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert a rule's threshold bounds and tie-breaking factors to tensors on the device of `like`.

    `sparse` has a lower and an upper bound of each source's threshold. A bound consists of a magnitude and a
    tie-breaking mark. The mark of an element is a hash of its index times the source's factor. The result is (low
    magnitudes, low marks, high magnitudes, high marks, factors), with a number for each source.
    """
    low_marks, high_marks, factors = (
        torch.tensor(words, dtype=torch.int64, device=like.device)
        for words in (sparse.low_marks, sparse.high_marks, sparse.factors)
    )
    return _floats(sparse.lows, like), low_marks, _floats(sparse.highs, like), high_marks, factors


def _masks(sparse: rules.Dropped, like: torch.Tensor) -> torch.Tensor:
    rows = list(zip(sparse.k0s, sparse.k1s, sparse.bounds, strict=True))
    return torch.tensor(rows, dtype=torch.int64, device=like.device)
