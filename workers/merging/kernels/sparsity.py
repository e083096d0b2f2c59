"""What each kind of sparsity keeps of an element of a task vector, by the sparsity's type in KEPT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.compilation import IN_PLACE
from workers.merging.kernels.elements import hashed, is_kept, marked, passes, reaches
from workers.merging.kernels.operations import ONE, ZERO

__all__ = ["kept"]

HASHES = 2.0**32  # number of different hashes


def kept(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    """What `sparse` makes of `tau`, element i of the task vector of source s. Only in compiled code."""
    raise NotImplementedError("only in compiled code")


@overload(kept, jit_options=IN_PLACE)
def _kept_of(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return KEPT[sparse.instance_class]


def _whole(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau


def _trimmed(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau if abs(tau) >= sparse.highs[s] else ZERO


def _trimmed_tied(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    mark = marked(i, sparse.factors[s])
    return tau if reaches(abs(tau), mark, sparse.highs[s], sparse.high_marks[s]) else ZERO


def _between(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau if (abs(tau) >= sparse.highs[s]) & (abs(tau) <= sparse.top_lows[s]) else ZERO


def _between_tied(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    size, mark = abs(tau), marked(i, sparse.factors[s])
    is_above = passes(size, mark, sparse.top_lows[s], sparse.top_low_marks[s])
    return tau if reaches(size, mark, sparse.highs[s], sparse.high_marks[s]) & (not is_above) else ZERO


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
    rules.TrimmedTied: _trimmed_tied,
    rules.Between: _between,
    rules.BetweenTied: _between_tied,
    rules.Dropped: _dropped,
    rules.Sampled: _sampled,
}
