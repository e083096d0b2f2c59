"""Fused merge kernels for CPU: one pass over the operands, no temporaries, bit-identical to the PyTorch methods.

There is one pass, `_merge`, which Numba compiles for every rule (`rules`), number of sources and dtype. The rule's type
selects its formula (`formulas`), the elements that it keeps (`sparsity`) and the elements that it leaves undecided
(`thresholds`). Elements do not depend on each other, so the number of threads changes no bit.
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

__all__ = ["merge"]

Tensors = Sequence[torch.Tensor]
U64 = np.uint64


def merge(rule: rules.Rule, tensors: Tensors, base: torch.Tensor | None, out: torch.Tensor) -> None:
    """Merge tensors on CPU by a rule, and write the result to `out`.

    `tensors` are the sources, and `base` is the base's tensor or None if the rule does not use it. All tensors are
    contiguous and have fewer than 2^32 elements. A rule may have only two bounds of a threshold. In this case the
    elements between the bounds are collected, the exact threshold is found among them, and they are merged again.
    """
    xs, merged = as_arrays(tensors), as_array(out)
    if isinstance(rule, rules.Important):
        return _merge_important(rule, xs, merged)
    b, numbers = xs[0] if base is None else as_array(base), typed(rule)
    parts = pieces(merged.size, BLOCK)
    found = np.empty((len(parts), most_undecided(rule)), np.int64)
    counts = run(_merge, [(numbers, b, xs, merged, row, *part) for row, part in zip(found, parts, strict=True)])
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        _merge_at(typed(decided(rule, b, xs, positions)), b, xs, merged, positions)
    return None


# Indices are unsigned: a signed one may count from the end, and the check for that prevents vectorised loops.


@compiled
def _merge(rule: Any, base: Any, xs: Any, out: Any, found: Any, start: int, stop: int) -> int:
    """Merge the elements from `start` to `stop` - 1 by a rule, and write them to `out`.

    If the rule has only bounds of a threshold, elements between the bounds cannot be decided yet. Their positions are
    written to `found`, and their number is returned.
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
def _merge_at(rule: Any, base: Any, xs: Any, out: Any, positions: Any) -> None:
    for i in positions:
        out[i] = rounded(element(rule, base, xs, U64(i)), out[i])


def _merge_important(rule: rules.Important, xs: tuple[np.ndarray, ...], out: np.ndarray) -> None:
    rows = as_array(rule.rows)
    width = out.size // rows.size
    calls = [
        (*xs, rows, np.float32(rule.threshold), width, out, start // width, -(-stop // width))
        for start, stop in pieces(out.size, width)
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
