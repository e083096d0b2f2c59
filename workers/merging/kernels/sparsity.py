"""CPU functions that compute the value of a task vector's element after each kind of sparsification.

The dict KEPT has the function of each type of sparsification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.compilation import IN_PLACE
from workers.merging.kernels.elements import hashed, is_kept, passes, reaches, turned_mark
from workers.merging.kernels.operations import ONE, ZERO

__all__ = ["is_above", "is_at_or_above", "kept"]

HASHES = 2.0**32  # number of different hashes


def is_at_or_above(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    """Whether element i of source s, of magnitude `size`, is at a threshold or above it.

    The threshold is the magnitude `low` with the mark `low_mark`. Marks order elements of equal magnitude: the mark of
    element i is a hash of i times `factor`. `by` says how the element is compared with the threshold. The class
    `ByMark` compares magnitude and mark. The class `ByMagnitude` compares the magnitude alone; an element for which
    this is not sufficient counts as below the threshold. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


def is_above(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    """Whether element i of source s, of magnitude `size`, is above a threshold.

    The threshold is the magnitude `low` with the mark `low_mark`. Marks order elements of equal magnitude: the mark of
    element i is a hash of i times `factor`. `by` says how the element is compared with the threshold. The class
    `ByMark` compares magnitude and mark. With the class `ByMagnitude`, the element is above if its magnitude is at
    least `by.aboves[s]`. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


@overload(is_at_or_above, jit_options=IN_PLACE)
def _is_at_or_above_by(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    return _is_larger if by.instance_class is rules.ByMagnitude else _reaches_threshold


@overload(is_above, jit_options=IN_PLACE)
def _is_above_by(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    return _is_larger if by.instance_class is rules.ByMagnitude else _passes_threshold


def _is_larger(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    return size >= by.aboves[s]


def _reaches_threshold(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    return reaches(size, turned_mark(i, factor), low, low_mark)


def _passes_threshold(by: Any, size: Any, s: Any, i: Any, factor: Any, low: Any, low_mark: Any) -> Any:
    return passes(size, turned_mark(i, factor), low, low_mark)


def kept(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    """The value of element i of the task vector of source s after the sparsification `sparse`.

    `tau` is the element's value before the sparsification. `sparse` is the rule that decides which elements are
    dropped. The result is 0 if the element is dropped, else `tau`, possibly rescaled. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


@overload(kept, jit_options=IN_PLACE)
def _kept_of(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return KEPT[sparse.instance_class]


def _whole(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau


def _trimmed(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    size, factor = abs(tau), sparse.factors[s]
    return tau if is_at_or_above(sparse.by, size, s, i, factor, sparse.highs[s], sparse.high_marks[s]) else ZERO


def _between(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    size, factor = abs(tau), sparse.factors[s]
    is_in = is_at_or_above(sparse.by, size, s, i, factor, sparse.highs[s], sparse.high_marks[s])
    return (
        tau
        if is_in & (not is_above(sparse.top_by, size, s, i, factor, sparse.top_lows[s], sparse.top_low_marks[s]))
        else ZERO
    )


def _dropped(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau * sparse.scales[s] if is_kept(i, sparse.k0s[s], sparse.k1s[s], sparse.bounds[s]) else ZERO


def _sampled(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    rank, origin = np.float64(sparse.ranks[s][i]), np.float64(sparse.origins[s])
    probability = sparse.starts[s] + abs(rank - origin) * sparse.steps[s]
    # hash < floor(probability * 2^32), as integers
    is_in = np.float64(hashed(i, sparse.k0s[s], sparse.k1s[s])) + 1.0 <= probability * HASHES
    divisor = np.float32(probability) if is_in & (sparse.is_divided[s] > ZERO) else ONE
    return tau / divisor * sparse.scales[s] if is_in else ZERO


KEPT: dict[type, Callable[..., Any]] = {
    rules.Whole: _whole,
    rules.Trimmed: _trimmed,
    rules.Between: _between,
    rules.Dropped: _dropped,
    rules.Sampled: _sampled,
}
