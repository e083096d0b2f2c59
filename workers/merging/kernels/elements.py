"""Compiled functions on single elements: loading as float32, common operations, and rounding to the stored dtype.

The function `arguments.as_array` defines the words in which bfloat16 and float16 are stored. Stored elements are always
finite, because the bank (module `workers.merging.bank`) refuses sources with infinity or NaN.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, overload, register_jitable

from workers.merging.kernels.compilation import IN_PLACE, compiled
from workers.merging.kernels.operations import ZERO, larger, positive, sign, value
from workers.merging.masks import MULTIPLIERS, STEP

__all__ = [
    "BLOCK",
    "NONE",
    "SOME",
    "bits_of",
    "copied_past_caches",
    "either",
    "has_sign_of",
    "hashed",
    "is_kept",
    "marked",
    "passes",
    "reaches",
    "rounded",
    "stores_done",
    "turned_mark",
    "variance_of",
    "zero_unless",
]

# Results are computed in blocks that fit the first-level cache, and copied from there to their destination.
BLOCK = 256  # elements
LINE = 32  # bytes: the widest store past the caches on all processors with AVX; others split it

U32, I32 = np.uint32, np.int32
TOP = U32(1 << 31)
NONE, SOME = U32(0), U32(1)
WEYL, FIRST, SECOND = U32(STEP), U32(MULTIPLIERS[0]), U32(MULTIPLIERS[1])
BFLOAT16, FLOAT16 = types.uint16, types.int16


@intrinsic
def _line_past_caches(typing_context: Any, target: Any, source: Any) -> Any:
    """Copy 32 bytes from the address `source` to the address `target` by a store that bypasses the CPU caches.

    Compiled code calls the function without `typing_context`, which Numba supplies. `target` is a multiple of 32.
    Merged elements need no place in the caches, because they are read much later. An ordinary store would first read
    the memory that it overwrites; this read is a third of the memory traffic of copying.
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
    """Memory fence: afterwards, other threads see all data that were stored past the CPU caches.

    Compiled code calls the function without an argument; Numba supplies `typing_context`.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), build


@compiled
def copied_past_caches(block: Any, out: Any, start: Any, stop: Any) -> None:
    """Copy block[: stop - start] to out[start:stop], bypassing the CPU caches where alignment and size allow it.

    Both arrays have the same element type, and `start` and `stop` are unsigned integers. The function `stores_done`
    must be called after the last copy.
    """
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
    """The bits of a float32 number as a uint32; the number is not converted.

    Compiled code calls the function with `number` alone; Numba supplies `typing_context`. For numbers that are not
    negative, the integers have the same order as the numbers.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.uint32))

    return types.uint32(types.float32), build


@intrinsic
def _float(typing_context: Any, bits: Any) -> Any:
    """The float32 number whose bits are given as the uint32 `bits`; the number is not converted.

    Compiled code calls the function with `bits` alone; Numba supplies `typing_context`.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.uint32), build


for _operation in (larger, positive, sign):
    register_jitable(**IN_PLACE)(_operation)


@overload(value)
def _value(word: Any) -> Any:
    return {types.float32: _from_float32, BFLOAT16: _from_bfloat16, FLOAT16: _from_float16}.get(word)


def _from_float32(word: Any) -> Any:
    return word


def _from_bfloat16(word: Any) -> Any:
    return _float(np.uint32(np.uint32(word) << np.uint32(16)))


def _from_float16(word: Any) -> Any:
    # Exponent and mantissa are shifted to their bits; the product corrects the exponent's bias, exactly, subnormals
    # included.
    magnitude = _float(np.uint32(np.uint32(word & 0x7FFF) << np.uint32(13))) * np.float32(2.0**112)
    return _float(np.uint32(bits_of(magnitude) | np.uint32(np.uint32(word & 0x8000) << np.uint32(16))))


def rounded(number: Any, like: Any) -> Any:
    """Round a float32 number to the element type of the array `like`, to nearest, ties to even; return the stored bits.

    Callable only in compiled code.
    """
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
    # From 2^-14 the exponent's bias changes by 112; from 65520 the carry makes it infinity, which is right.
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
    """The variance of element i over its values in all task vectors; a task vector is xs[s] minus `base`.

    `base` and `xs` are the arrays of the base and the sources, as the function `arguments.as_array` makes them. The
    result has the same bits as the result of the function `methods.competition.variance`. Callable only in compiled
    code.
    """
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


@numba.njit(**IN_PLACE)
def either(first: Any, second: Any) -> Any:
    """Logical or of two flags; flags and result are 1 (SOME) or 0 (NONE) with 32 bits.

    Numba's operator `|` gives 64 bits, and a vectorised loop with a number of 64 bits handles only half as many
    elements at a time.
    """
    return U32(first | second)


@numba.njit(**IN_PLACE)
def zero_unless(condition: Any, number: Any) -> Any:
    """The float32 `number` if the condition is true, else zero, computed without a branch.

    LLVM would compile an ordinary conditional expression whose result is stored in an array to masked stores. Masked
    stores take about ten times longer on AMD's processors.
    """
    return _float(U32(bits_of(number) & U32(U32(0) - U32(condition))))


@numba.njit(**IN_PLACE)
def has_sign_of(number: Any, total: Any) -> Any:
    """Whether the float32 `number` has the sign of `total`; a `total` of zero counts as positive.

    The result is False if `number` is zero. The function flips the number's sign if `total` is negative, and compares
    it with zero. These operations take less time than two comparisons and a choice.
    """
    return _float(U32(bits_of(number) ^ (U32(0) if total >= ZERO else TOP))) > ZERO


@numba.njit(**IN_PLACE)
def reaches(size: Any, turned: Any, low: Any, low_mark: Any) -> Any:
    """Whether an element's magnitude is at a threshold or above it; hashes ("marks") break ties.

    The element has the magnitude `size`. `turned` is its mark, a hash that orders elements of equal magnitude, in the
    form in which the function `turned_mark` returns it. The threshold is the magnitude `low` with the mark `low_mark`.
    """
    return size >= (low if turned >= I32(low_mark ^ TOP) else following(low))


@numba.njit(**IN_PLACE)
def passes(size: Any, turned: Any, low: Any, low_mark: Any) -> Any:
    """Whether an element's magnitude is above a threshold; hashes ("marks") break ties.

    The element has the magnitude `size`. `turned` is its mark, a hash that orders elements of equal magnitude, in the
    form in which the function `turned_mark` returns it. The threshold is the magnitude `low` with the mark `low_mark`.
    """
    return size >= (low if turned > I32(low_mark ^ TOP) else following(low))


@numba.njit(**IN_PLACE)
def following(size: Any) -> Any:
    """The next larger float32 number after `size`, which is not negative.

    After infinity the result is NaN, with which every comparison is false.
    """
    return _float(U32(bits_of(size) + U32(1)))


@numba.njit(**IN_PLACE)
def is_kept(i: Any, k0: Any, k1: Any, bound: Any) -> Any:
    """Whether a random mask keeps element i, for i below 2^32.

    The mask keeps the element if the element's hash is at most `bound`. k0 and k1 are the low and the high 32 bits of
    the mask's key, from which the hash is computed (module `workers.merging.masks`).
    """
    return hashed(i, k0, k1) <= bound


@numba.njit(**IN_PLACE)
def marked(i: Any, factor: Any) -> Any:
    """The tie-breaking mark of element i, a number that orders elements of equal magnitude; i is below 2^32.

    The mark is a hash of i, multiplied modulo 2^32 by `factor`, an odd number that differs between tensors (property
    `TieOrder.factor`). Only the factor depends on the tensor, so compiled code computes the hash of i once for the
    tensors of all sources.
    """
    return U32(hashed(i, U32(0), U32(0)) * factor)


@numba.njit(**IN_PLACE)
def turned_mark(i: Any, factor: Any) -> Any:
    """The tie-breaking mark of element i as a signed number, because AVX2 compares only signed numbers.

    A mark is an unsigned number that orders elements of equal magnitude: a hash of i, multiplied by `factor`, an odd
    number that differs between tensors. The result is the mark with its top bit flipped; as signed numbers, such
    results have the order of the marks.
    """
    return I32(U32(U32(hashed(i, U32(0), U32(0)) ^ TOP) * factor))


@numba.njit(**IN_PLACE)
def hashed(i: Any, k0: Any, k1: Any) -> Any:
    """The hash of element i; by this hash, a random mask keeps or drops the element (module `workers.merging.masks`).

    i is below 2^32. k0 and k1 are the low and the high 32 bits of the mask's key.
    """
    x = U32(U32(U32(i) * WEYL) + k0)
    x = U32(U32(x ^ U32(x >> U32(16))) * FIRST)
    x = U32(U32(U32(x ^ U32(x >> U32(15))) + k1) * SECOND)
    return U32(x ^ U32(x >> U32(16)))
