"""Fused merge kernels for CPU: one pass over the operands, no temporaries, bit-identical to the PyTorch methods.

There is one pass, the function `_merge`, which Numba compiles for every rule (module `rules`), number of sources and
dtype. The rule's type selects its formula (module `formulas`), the elements that it keeps (module `sparsity`) and the
elements that it leaves undecided (module `thresholds`). Elements do not depend on each other, so the number of threads
changes no bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from workers.merging.kernels import rules
from workers.merging.kernels.arguments import as_array, as_arrays, typed
from workers.merging.kernels.compilation import compiled
from workers.merging.kernels.elements import BLOCK, NONE, copied_past_caches, either, rounded, stores_done
from workers.merging.kernels.formulas import element
from workers.merging.kernels.operations import ZERO, value
from workers.merging.kernels.threads import pieces, run
from workers.merging.kernels.thresholds import decided, most_undecided, undecided
from workers.merging.shards import Shard

__all__ = ["exact", "merge"]

Tensors = Sequence[torch.Tensor]
U64 = np.uint64


def merge(
    rule: rules.Rule, tensors: Tensors, base: torch.Tensor | None, out: torch.Tensor, shard: Shard | None = None
) -> None:
    """Merge tensors on CPU by a rule, and write the result to `out`.

    A rule is the formula of a merge with its numbers, as plain data. `tensors` are the sources, and `base` is the
    base's tensor or None if the rule does not use it. The sources and the base are always whole. All tensors are
    contiguous and have fewer than 2^32 elements. With `shard`, only the elements of the shard are computed, and `out`
    has only these elements.

    Some rules keep only elements whose magnitude reaches a threshold, and state only a lower and an upper bound of it.
    Without `shard`, the elements between the bounds are collected, the exact threshold is found among them, and these
    elements are merged with the exact threshold. With `shard`, the rule must have exact thresholds (function `exact`),
    because the elements between the bounds may be in other shards.
    """
    xs, merged = as_arrays(tensors), as_array(out)
    if isinstance(rule, rules.Important):
        return _merge_important(rule, xs, merged, None if shard is None else _runs(shard))
    b, numbers = xs[0] if base is None else as_array(base), typed(rule)
    parts = pieces(merged.size, BLOCK)
    if shard is not None:
        run(_merge_runs, [(numbers, b, xs, merged, *part, *_runs(shard)) for part in parts])
        return None
    found = np.empty((len(parts), most_undecided(rule)), np.int64)
    counts = run(_merge, [(numbers, b, xs, merged, row, *part) for row, part in zip(found, parts, strict=True)])
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        _merge_at(typed(decided(rule, b, xs, positions)), b, xs, merged, positions)
    return None


def exact(rule: rules.Rule, tensors: Tensors, base: torch.Tensor | None) -> rules.Rule:
    """Find the exact thresholds of a rule, and return the rule with these thresholds.

    A rule is the formula of a merge with its numbers, as plain data. Some rules keep only elements whose magnitude
    reaches a threshold, and state only a lower and an upper bound of it. The exact threshold is found among the
    elements between the bounds, in one pass over the whole sources `tensors` and `base` (None if the rule uses no
    base). A rule without thresholds is returned unchanged.
    """
    if not most_undecided(rule):
        return rule
    xs = as_arrays(tensors)
    b, numbers = xs[0] if base is None else as_array(base), typed(rule)
    parts = pieces(xs[0].size, BLOCK)
    found = np.empty((len(parts), most_undecided(rule)), np.int64)
    counts = run(_find_undecided, [(numbers, b, xs, row, *part) for row, part in zip(found, parts, strict=True)])
    positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
    decisive: rules.Rule = decided(rule, b, xs, positions)
    return decisive


def _runs(shard: Shard) -> tuple[np.uint64, np.uint64, np.uint64]:
    return U64(shard.first), U64(max(1, shard.run)), U64(shard.stride)


# Indices are unsigned: a signed one may count from the end, and the check for that prevents vectorised loops.


@compiled
def _merge(rule: Any, base: Any, xs: Any, out: Any, found: Any, start: int, stop: int) -> int:
    """Merge the elements from `start` to `stop` - 1 of the sources `xs` by a rule, and write them to `out`.

    The rule has the numbers of the merge's formula; `base` is the array of the base. A rule may keep only elements
    whose magnitude reaches a threshold, and have only a lower and an upper bound of it. Then elements between the
    bounds cannot be decided yet: their positions are written to `found`, and their number is returned.
    """
    num_found, block = 0, np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        is_any_undecided = NONE
        for i in range(begin, end):
            is_any_undecided = either(is_any_undecided, undecided(rule, base, xs, i))
            block[i - begin] = rounded(element(rule, base, xs, i), block[0])
        copied_past_caches(block, out, begin, end)
        if is_any_undecided > NONE:
            for i in range(begin, end):
                if undecided(rule, base, xs, i) > NONE:
                    found[num_found] = i
                    num_found += 1
    stores_done()
    return num_found


@compiled
def _merge_runs(
    rule: Any, base: Any, xs: Any, out: Any, start: int, stop: int, first: Any, size: Any, stride: Any
) -> None:
    """Compute the merged elements [start, stop) of one shard of a tensor, and write them to `out`.

    A shard is the part of a tensor that one rank (process) of a tensor-parallel engine holds. It consists of runs of
    `size` consecutive elements. The first run begins at the element `first` of the whole tensor, and each further run
    begins `stride` elements after the beginning of the run before it. `start` and `stop` are positions in the shard,
    and so in `out`. `rule` has the constants of the merge's formula, such as thresholds. `base` and `xs` are the arrays
    of the base and of the sources, which are whole tensors.
    """
    block = np.empty(BLOCK, out.dtype)
    at, last = U64(start), U64(stop)
    while at < last:
        column = at % size
        ahead = first + at // size * stride + column - at  # from a position in `out` to the element's index
        until = min(last, at + (size - column))
        for begin in range(at, until, U64(BLOCK)):
            end = min(begin + U64(BLOCK), until)
            low = begin + ahead
            for i in range(low, end + ahead):
                block[i - low] = rounded(element(rule, base, xs, i), block[0])
            copied_past_caches(block, out, begin, end)
        at = until
    stores_done()


@compiled
def _find_undecided(rule: Any, base: Any, xs: Any, found: Any, start: int, stop: int) -> int:
    num_found = 0
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        is_any_undecided = NONE
        for i in range(begin, end):
            is_any_undecided = either(is_any_undecided, undecided(rule, base, xs, i))
        if is_any_undecided > NONE:
            for i in range(begin, end):
                if undecided(rule, base, xs, i) > NONE:
                    found[num_found] = i
                    num_found += 1
    return num_found


@compiled
def _merge_at(rule: Any, base: Any, xs: Any, out: Any, positions: Any) -> None:
    for i in positions:
        out[i] = rounded(element(rule, base, xs, U64(i)), out[i])


def _merge_important(
    rule: rules.Important, xs: tuple[np.ndarray, ...], out: np.ndarray, of: tuple[np.uint64, ...] | None
) -> None:
    rows, threshold = as_array(rule.rows), np.float32(rule.threshold)
    width = xs[0].size // rows.size
    if of is not None:
        parts = pieces(out.size, BLOCK)
        run(_important_of_shard, [(*xs, rows, threshold, U64(width), out, *part, *of) for part in parts])
        return
    calls = [
        (*xs, rows, threshold, width, out, start // width, -(-stop // width)) for start, stop in pieces(out.size, width)
    ]
    run(_important, calls)


@compiled
def _important(first: Any, second: Any, rows: Any, threshold: Any, width: int, out: Any, start: int, stop: int) -> None:
    block = np.empty(BLOCK, out.dtype)
    for row in range(start, stop):
        weight = rows[row]
        last = U64(row + 1) * U64(width)
        for begin in range(U64(row) * U64(width), last, U64(BLOCK)):
            end = min(begin + U64(BLOCK), last)
            for i in range(begin, end):
                a = value(first[i])
                delta = value(second[i]) - a
                block[i - begin] = rounded((delta if abs(delta) * weight >= threshold else ZERO) + a, block[0])
            copied_past_caches(block, out, begin, end)
    stores_done()


@compiled
def _important_of_shard(
    one: Any, other: Any, rows: Any, threshold: Any, width: Any, out: Any, start: int, stop: int,
    first: Any, size: Any, stride: Any,
) -> None:  # fmt: skip
    for at in range(U64(start), U64(stop)):
        i = first + at // size * stride + at % size
        a = value(one[i])
        delta = value(other[i]) - a
        out[at] = rounded((delta if abs(delta) * rows[i // width] >= threshold else ZERO) + a, out[at])
