"""Numba functions on single elements: a stored one as float32, what is made of it, and that rounded once to be stored.

NumPy has no bfloat16: arrays of 16-bit words stand for it (uint16), and for float16 (int16), of which Numba does no
arithmetic on CPU. Infinities and NaN come out of arithmetic, never out of the sources: the bank refuses those.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import llvmlite.binding as llvm
import numba
import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload

from workers.merging.masks import MULTIPLIERS, STEP

__all__ = [
    "IN_PLACE",
    "NONE",
    "ONE",
    "SOME",
    "ZERO",
    "as_array",
    "as_arrays",
    "bits_of",
    "compiled",
    "copied_past_caches",
    "hashed",
    "is_between",
    "is_kept",
    "larger",
    "positive",
    "rounded",
    "sign",
    "stores_done",
    "value",
    "variance_of",
]

F = TypeVar("F", bound=Callable[..., Any])

# Loops over the sources are inside those over the elements: with more than a handful of sources LLVM would give up
# unrolling the former, or checking that no operand overlaps the result, and no loop over elements would be vectorised.
for option in ("-unroll-threshold=10000", "-runtime-memory-check-threshold=200"):
    llvm.set_option("mergesearch", option)

WORDS = {torch.float32: torch.float32, torch.bfloat16: torch.uint16, torch.float16: torch.int16}
U32 = np.uint32
ZERO, ONE = np.float32(0), np.float32(1)
NONE, SOME = U32(0), U32(1)
WEYL, FIRST, SECOND = U32(STEP), U32(MULTIPLIERS[0]), U32(MULTIPLIERS[1])
# For functions that become part of those that call them.
IN_PLACE = {"nogil": True, "error_model": "numpy", "forceinline": True}
BFLOAT16, FLOAT16 = types.uint16, types.int16


def compiled(function: F) -> F:
    """Compiled at the first call with operands of given types, and kept on disk where there is a place for it.

    It runs without the interpreter lock. Sums keep their order and nothing is contracted to fused multiply-add: the
    bits are those of the same operations in torch.
    """
    try:
        return cast("F", numba.njit(nogil=True, error_model="numpy", cache=True)(function))
    except RuntimeError:  # neither this folder nor the user's cache can be written
        return cast("F", numba.njit(nogil=True, error_model="numpy")(function))


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a contiguous tensor as a flat array that `value` and `rounded` know."""
    return tensor.detach().view(-1).view(WORDS[tensor.dtype]).numpy()


def as_arrays(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray, ...]:
    """For `value`, in one dtype, since the loop over them is compiled for one: float32 where they differ."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        tensors = [tensor.float() for tensor in tensors]
    return tuple(map(as_array, tensors))


LINE = 32  # bytes, the widest store past the caches that all processors with AVX have; others split it


@intrinsic
def _line_past_caches(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy 32 bytes between two addresses, of which the target's is a multiple of 32.

    What is written once and read much later needs no place in the caches: an ordinary store would first read what it
    overwrites, a third of all that copying moves.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), LINE // 8).as_pointer()
        store = builder.store(
            builder.load(builder.inttoptr(arguments[1], line), align=1), builder.inttoptr(arguments[0], line)
        )
        store.align = LINE
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))
        return context.get_dummy_value()

    return types.void(types.uint64, types.uint64), build


@intrinsic
def stores_done(typing_context: Any) -> Any:
    """Whoever learns later that this thread is done sees what it stored past the caches."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@compiled
def copied_past_caches(block: Any, out: Any, start: Any, stop: Any) -> None:
    """out[start:stop] = block[: stop - start], arrays of one element type; unsigned positions. Then `stores_done`."""
    item = np.uint64(block.itemsize)
    target = np.uint64(out.ctypes.data) + start * item
    source, size = np.uint64(block.ctypes.data), (stop - start) * item
    if (target | size) % np.uint64(LINE):
        for i in range(np.uint64(0), stop - start):
            out[start + i] = block[i]
    else:
        for at in range(np.uint64(0), size, np.uint64(LINE)):
            _line_past_caches(target + at, source + at)


@intrinsic
def bits_of(typing_context: Any, number: Any) -> Any:
    """The bits of a float32."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), build


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:
    """The float32 of these bits."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), build


def value(word: Any) -> Any:
    """An element as float32."""
    raise NotImplementedError("only in compiled code")


@overload(value)
def _value(word: Any) -> Any:
    return {types.float32: _from_float32, BFLOAT16: _from_bfloat16, FLOAT16: _from_float16}.get(word)


def _from_float32(word: Any) -> Any:
    return word


def _from_bfloat16(word: Any) -> Any:
    return _float(np.uint32(np.uint32(word) << np.uint32(16)))


def _from_float16(word: Any) -> Any:
    # Exponent and mantissa in their places; the product corrects the exponent's bias, exactly, subnormals included.
    magnitude = _float(np.uint32(np.uint32(word & 0x7FFF) << np.uint32(13))) * np.float32(2.0**112)
    return _float(np.uint32(bits_of(magnitude) | np.uint32(np.uint32(word & 0x8000) << np.uint32(16))))


def rounded(number: Any, like: Any) -> Any:
    """A float32 as an element of the same type as `like`, rounded to nearest, ties to even."""
    raise NotImplementedError("only in compiled code")


@overload(rounded)
def _rounded(number: Any, like: Any) -> Any:
    return {types.float32: _as_float32, BFLOAT16: _as_bfloat16, FLOAT16: _as_float16}.get(like)


def _as_float32(number: Any, like: Any) -> Any:
    return number


def _as_bfloat16(number: Any, like: Any) -> Any:
    bits = bits_of(number)
    nearest = np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> np.uint32(16)) & np.uint32(1)))
    return np.uint16(0x7FC0) if number != number else np.uint16(nearest >> np.uint32(16))


def _as_float16(number: Any, like: Any) -> Any:
    bits = bits_of(number)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    # From 2^-14 the exponent's bias changes by 112; from 65520 the carry makes infinity of it, and so it stays.
    last = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    nearest = np.uint32(np.uint32(magnitude - np.uint32(112 << 23) + np.uint32(0xFFF) + last) >> np.uint32(13))
    nearest = np.uint32(0x7C00) if magnitude >= np.uint32(143 << 23) else nearest
    # Below 2^-14 results are multiples of 2^-24, which is the last bit of 0.5: the sum rounds to them.
    small = np.uint32(bits_of(np.float32(abs(number) + np.float32(0.5))) - np.uint32(126 << 23))
    nearest = small if magnitude < np.uint32(113 << 23) else nearest
    nearest = np.uint32(0x7E00) if number != number else nearest
    return np.int16(np.uint16(nearest | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000))))


@numba.njit(**IN_PLACE)
def variance_of(base: Any, xs: Any, i: Any) -> Any:
    """Of element i between the task vectors: `merge_methods.competition.variance`. Only in compiled code."""
    b, count = value(base[i]), np.float32(len(xs))
    first = value(xs[0][i]) - b
    mean, squares = ZERO, ZERO
    for s in range(len(xs)):
        mean += (value(xs[s][i]) - b) - first
    mean /= count
    for s in range(len(xs)):
        offset = (value(xs[s][i]) - b) - first - mean
        squares += offset * offset
    return squares / count


# The built-in max also looks for NaN, in a branch.


@numba.njit(**IN_PLACE)
def larger(first: Any, second: Any) -> Any:
    return first if first > second else second


@numba.njit(**IN_PLACE)
def positive(number: Any) -> Any:
    return number if number > ZERO else ZERO


@numba.njit(**IN_PLACE)
def is_between(size: Any, low: Any, high: Any) -> Any:
    return SOME if (size > low) & (size < high) else NONE


@numba.njit(**IN_PLACE)
def sign(number: Any) -> Any:
    return ONE if number > ZERO else (-ONE if number < ZERO else ZERO)


@numba.njit(**IN_PLACE)
def is_kept(i: Any, k0: Any, k1: Any, bound: Any) -> Any:
    """`workers.merging.masks` for i below 2^32; `bound` is the threshold less one."""
    return hashed(i, k0, k1) <= bound


@numba.njit(**IN_PLACE)
def hashed(i: Any, k0: Any, k1: Any) -> Any:
    """The hash of `workers.merging.masks` for i below 2^32."""
    x = U32(U32(U32(i) * WEYL) + k0)
    x = U32(U32(x ^ U32(x >> U32(16))) * FIRST)
    x = U32(U32(U32(x ^ U32(x >> U32(15))) + k1) * SECOND)
    return U32(x ^ U32(x >> U32(16)))
