"""Fused merge kernels for CUDA, the same functions as in `workers.kernels.cpu`: for tensors on one CUDA device.

Multiplications and additions are not contracted, and divisions are rounded correctly, so that the bits are those of the
plain methods there. The tests marked `gpu` run them on a device; without one they run in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from workers.magnitudes import SPACING, Trim
from workers.masks import MULTIPLIERS, STEP, key_words, threshold

__all__ = [
    "dare_linear",
    "dare_ties",
    "nearswap",
    "ram",
    "task_arithmetic",
    "ties",
    "weighted_sum",
    "weighted_task_sum",
]

BLOCK = 1024  # elements of a program

Tensors = Sequence[torch.Tensor]
WEYL, FIRST, SECOND = tl.constexpr(STEP), tl.constexpr(MULTIPLIERS[0]), tl.constexpr(MULTIPLIERS[1])


def weighted_sum(tensors: Tensors, out: torch.Tensor, *, weights: Sequence[float]) -> None:
    """Write `merge_methods.arithmetic.weighted_sum` to `out`."""
    _launch(_weighted_sum, out.numel(), tuple(tensors), _floats(weights, out), out, out.numel())


def weighted_task_sum(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, weights: Sequence[float]) -> None:
    """Write `merge_methods.arithmetic.weighted_sum` of the task vectors, plus the base, to `out`."""
    _launch(_weighted_task_sum, out.numel(), base, tuple(tensors), _floats(weights, out), out, out.numel())


def nearswap(tensors: Tensors, out: torch.Tensor, *, t: float) -> None:
    """Write `merge_methods.averages.nearswap` to `out`."""
    first, second = tensors
    _launch(_nearswap, out.numel(), first, second, _floats([t, 1e-6], out), out, out.numel())


def ram(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, epsilon: float) -> None:
    """Write `merge_methods.competition.ram` to `out`."""
    _launch(_ram, out.numel(), base, tuple(tensors), _floats([epsilon], out), out, out.numel())


def task_arithmetic(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, lambdas: Sequence[float]) -> None:
    """Write `merge_methods.task_arithmetic` to `out`."""
    _launch(_task_arithmetic, out.numel(), base, tuple(tensors), _floats(lambdas, out), out, out.numel())


def ties(tensors: Tensors, base: torch.Tensor, out: torch.Tensor, *, lambda_: float, trims: Sequence[Trim]) -> None:
    """Write `merge_methods.ties` to `out`, `trims` saying what of each task vector is kept.

    What they leave undecided is collected in the pass and merged once it is known; nothing waits for the device.
    """
    xs, lambdas = tuple(tensors), _floats([lambda_], out)
    lows, highs = _floats([trim.low for trim in trims], out), _floats([trim.high for trim in trims], out)
    found = torch.full((len(xs) * SPACING,), -1, dtype=torch.int64, device=out.device)
    count = torch.zeros(1, dtype=torch.int32, device=out.device)
    _launch(_ties, out.numel(), base, xs, lows, highs, lambdas, out, found, count, out.numel(), False)
    at = found.clamp(min=0)
    exact = []
    for tensor, trim in zip(tensors, trims, strict=True):
        magnitudes = (tensor.view(-1)[at].float() - base.view(-1)[at].float()).abs_()
        is_between = (found >= 0) & (magnitudes > trim.low) & (magnitudes < trim.high)
        exact.append(magnitudes.masked_fill_(~is_between, trim.high).sort().values[trim.num_smaller])
    thresholds = torch.stack(exact)
    _launch(_ties, found.numel(), base, xs, thresholds, thresholds, lambdas, out, found, count, found.numel(), True)


def dare_linear(
    tensors: Tensors,
    base: torch.Tensor,
    out: torch.Tensor,
    *,
    lambdas: Sequence[float],
    densities: Sequence[float],
    keys: Sequence[int],
) -> None:
    """Write `merge_methods.dare_linear` to `out`, of fewer than 2^32 elements."""
    factors = _floats([lambda_ / density for lambda_, density in zip(lambdas, densities, strict=True)], out)
    masks = _masks(keys, densities, out)
    _launch(_dare_linear, out.numel(), base, tuple(tensors), masks, factors, out, out.numel())


def dare_ties(
    tensors: Tensors,
    base: torch.Tensor,
    out: torch.Tensor,
    *,
    lambda_: float,
    densities: Sequence[float],
    keys: Sequence[int],
) -> None:
    """Write `merge_methods.dare_ties` to `out`, of fewer than 2^32 elements."""
    rescales, lambdas = _floats([1 / density for density in densities], out), _floats([lambda_], out)
    masks = _masks(keys, densities, out)
    _launch(_dare_ties, out.numel(), base, tuple(tensors), masks, rescales, lambdas, out, out.numel())


@triton.jit
def _weighted_sum(xs, weights, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    total = tl.load(xs[0] + i, mask=is_inside).to(tl.float32) * tl.load(weights)
    for s in tl.static_range(1, len(xs)):
        total += tl.load(xs[s] + i, mask=is_inside).to(tl.float32) * tl.load(weights + s)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _weighted_task_sum(base, xs, weights, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    b = tl.load(base + i, mask=is_inside).to(tl.float32)
    total = (tl.load(xs[0] + i, mask=is_inside).to(tl.float32) - b) * tl.load(weights)
    for s in tl.static_range(1, len(xs)):
        total += (tl.load(xs[s] + i, mask=is_inside).to(tl.float32) - b) * tl.load(weights + s)
    tl.store(out + i, (total + b).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _nearswap(first, second, numbers, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """`numbers`: t, and the smallest distance that it is divided by."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    a = tl.load(first + i, mask=is_inside, other=0).to(tl.float32)
    b = tl.load(second + i, mask=is_inside, other=0).to(tl.float32)
    distance = tl.maximum(tl.abs(a - b), tl.load(numbers + 1))
    share = tl.minimum(tl.div_rn(tl.full(distance.shape, 1.0, tl.float32), distance) * tl.load(numbers), 1.0)
    tl.store(out + i, (share * b + (1 - share) * a).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _ram(base, xs, epsilon, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    b = tl.load(base + i, mask=is_inside, other=0).to(tl.float32)
    count, total = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + i, mask=is_inside, other=0).to(tl.float32) - b
        count += tl.where(tl.abs(tau) > tl.load(epsilon), 1.0, 0.0)
    share = tl.div_rn(tl.full(count.shape, 1.0, tl.float32), tl.maximum(count, 1.0))
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + i, mask=is_inside, other=0).to(tl.float32) - b
        total += tl.where(tl.abs(tau) > tl.load(epsilon), tau, 0.0) * share
    tl.store(out + i, (total + b).to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _task_arithmetic(base, xs, lambdas, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    b = tl.load(base + i, mask=is_inside).to(tl.float32)
    total = b
    for s in tl.static_range(len(xs)):
        total += (tl.load(xs[s] + i, mask=is_inside).to(tl.float32) - b) * tl.load(lambdas + s)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _ties(base, xs, lows, highs, lambdas, out, found, count, size, AT: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """All elements, writing to `found` where one is undecided; or those at `found` (`AT`), where it is not negative."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    if AT:
        i = tl.load(found + i, mask=is_inside, other=-1)
        is_inside = i >= 0
    b = tl.load(base + i, mask=is_inside, other=0).to(tl.float32)
    total = tl.zeros_like(b)
    is_undecided = tl.zeros_like(b) > 0
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + i, mask=is_inside, other=0).to(tl.float32) - b
        is_undecided = is_undecided | ((tl.abs(tau) > tl.load(lows + s)) & (tl.abs(tau) < tl.load(highs + s)))
        total += tl.where(tl.abs(tau) >= tl.load(highs + s), tau, 0.0)
    elected = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    merged, number = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + i, mask=is_inside, other=0).to(tl.float32) - b
        agreeing = tl.where(tl.abs(tau) >= tl.load(highs + s), tau * elected, 0.0)
        merged += tl.where(agreeing > 0, agreeing, 0.0)
        number += tl.where(agreeing > 0, 1.0, 0.0)
    result = tl.div_rn(merged * elected, tl.maximum(number, 1.0)) * tl.load(lambdas) + b
    tl.store(out + i, result.to(out.dtype.element_ty), mask=is_inside)
    if not AT:
        is_undecided = is_undecided & is_inside
        place = tl.atomic_add(count + tl.zeros_like(i), 1, mask=is_undecided)
        tl.store(found + place, i, mask=is_undecided)


@triton.jit
def _dare_linear(base, xs, masks, factors, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    b = tl.load(base + i, mask=is_inside).to(tl.float32)
    total = b
    for s in tl.static_range(len(xs)):
        tau = tl.load(xs[s] + i, mask=is_inside).to(tl.float32) - b
        total += tl.where(_is_kept(i, masks + 3 * s), tau, 0.0) * tl.load(factors + s)
    tl.store(out + i, total.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _dare_ties(base, xs, masks, rescales, lambdas, out, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = i < size
    b = tl.load(base + i, mask=is_inside).to(tl.float32)
    total = tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = (tl.load(xs[s] + i, mask=is_inside).to(tl.float32) - b) * tl.load(rescales + s)
        total += tl.where(_is_kept(i, masks + 3 * s), tau, 0.0)
    elected = tl.where(total > 0, 1.0, tl.where(total < 0, -1.0, 0.0))
    merged, number = tl.zeros_like(b), tl.zeros_like(b)
    for s in tl.static_range(len(xs)):
        tau = (tl.load(xs[s] + i, mask=is_inside).to(tl.float32) - b) * tl.load(rescales + s)
        agreeing = tl.where(_is_kept(i, masks + 3 * s), tau * elected, 0.0)
        merged += tl.where(agreeing > 0, agreeing, 0.0)
        number += tl.where(agreeing > 0, 1.0, 0.0)
    result = tl.div_rn(merged * elected, tl.maximum(number, 1.0)) * tl.load(lambdas) + b
    tl.store(out + i, result.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def _is_kept(i, mask):  # type: ignore[no-untyped-def]
    """`workers.masks` for i below 2^32; `mask` points to the key's two words and the threshold less one."""
    x = i.to(tl.uint32) * tl.cast(WEYL, tl.uint32) + tl.load(mask).to(tl.uint32)
    x = (x ^ (x >> 16)) * tl.cast(FIRST, tl.uint32)
    x = ((x ^ (x >> 15)) + tl.load(mask + 1).to(tl.uint32)) * tl.cast(SECOND, tl.uint32)
    return (x ^ (x >> 16)) <= tl.load(mask + 2).to(tl.uint32)


def _floats(numbers: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float32, device=like.device)


def _masks(keys: Sequence[int], densities: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    rows = [[*key_words(key), threshold(density) - 1] for key, density in zip(keys, densities, strict=True)]
    return torch.tensor(rows, dtype=torch.int64, device=like.device)


def _launch(kernel: Any, size: int, *arguments: Any) -> None:
    kernel[(triton.cdiv(size, BLOCK),)](*arguments, BLOCK=BLOCK, enable_fp_fusion=False)
