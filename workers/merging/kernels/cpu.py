"""Fused merge kernels for CPU: one pass over the operands, no temporaries, bit for bit the plain methods.

There is one pass, `_merge`, which Numba compiles for every rule (`rules`), number of sources and dtype: what it makes
of an element is looked up by the rule's type, in ELEMENTS, KEPT and UNDECIDED. Elements do not depend on
each other, so the number of threads changes no bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_type_hints

import numba
import numpy as np
import torch
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.elements import (
    IN_PLACE,
    NONE,
    ONE,
    ZERO,
    as_array,
    as_arrays,
    compiled,
    copied_past_caches,
    hashed,
    is_between,
    is_kept,
    larger,
    positive,
    rounded,
    sign,
    stores_done,
    value,
    variance_of,
)
from workers.merging.kernels.threads import pieces, run
from workers.merging.order_statistics import SPACING

__all__ = ["decided", "kept", "merge", "typed"]

# Results are made in blocks, which stay in the first cache, and go from there to where they shall be. Undecided
# elements are looked for one by one only in blocks that have any.
BLOCK = 256  # elements

Tensors = Sequence[torch.Tensor]
U32 = np.uint32
U64 = np.uint64
NEAREST = np.float32(1e-6)
HASHES = 2.0**32


def merge(rule: rules.Rule, tensors: Tensors, base: torch.Tensor | None, out: torch.Tensor) -> None:
    """Write what `rule` makes of the operands, contiguous and of fewer than 2^32 elements, to `out`.

    What the rule leaves undecided is collected in the pass and merged once it is known.
    """
    xs, merged = as_arrays(tensors), as_array(out)
    if isinstance(rule, rules.Important):
        return _merge_important(rule, xs, merged)
    b, numbers = xs[0] if base is None else as_array(base), typed(rule)
    parts = pieces(merged.size, BLOCK)
    found = np.empty((len(parts), _most_undecided(rule)), np.int64)
    counts = run(_merge, [(numbers, b, xs, merged, row, *part) for row, part in zip(found, parts, strict=True)])
    if any(counts):
        positions = np.concatenate([row[:count] for row, count in zip(found, counts, strict=True)])
        _merge_at(typed(decided(rule, b, xs, positions)), b, xs, merged, found[0], positions)
    return None


# Indices are unsigned: a signed one could count from the end, and the check for that keeps loops from being vectorised.


@compiled
def _merge(rule: Any, base: Any, xs: Any, out: Any, found: Any, start: int, stop: int) -> int:
    """Positions of undecided elements are written to `found`. Returns how many."""
    num_found, block = 0, np.empty(BLOCK, out.dtype)
    for begin in range(U64(start), U64(stop), U64(BLOCK)):
        end = min(begin + U64(BLOCK), U64(stop))
        undecided = NONE
        for i in range(begin, end):
            undecided |= _undecided(rule, base, xs, i)
            block[i - begin] = rounded(_element(rule, base, xs, i), block[0])
        copied_past_caches(block, out, begin, end)
        if undecided > NONE:
            for i in range(begin, end):
                if _undecided(rule, base, xs, i) > NONE:
                    found[num_found] = i
                    num_found += 1
    stores_done()
    return num_found


@compiled
def _merge_at(rule: Any, base: Any, xs: Any, out: Any, found: Any, positions: Any) -> None:
    for i in positions:
        _merge(rule, base, xs, out, found, i, i + 1)


# What is made of an element: `value(base[i])` and the sources' `value(xs[s][i])` by a rule.


def _element(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_element, jit_options=IN_PLACE)
def _element_of(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return ELEMENTS[rule.instance_class]


def _weighted_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    total = value(xs[0][i]) * rule.weights[0]
    for s in range(1, len(xs)):
        total += value(xs[s][i]) * rule.weights[s]
    return total


def _task_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = (value(xs[0][i]) - b) * rule.weights[0]
    for s in range(1, len(xs)):
        total += (value(xs[s][i]) - b) * rule.weights[s]
    return total + b


def _sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = b
    for s in range(len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.factors[s]
    return total


def _mean(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return _mean_of_agreeing(rule.sparse, base, xs, i) * rule.lambda_ + value(base[i])


def _agreeing_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, elected = value(base[i]), _elected(rule.sparse, base, xs, i)
    merged = ZERO
    for s in range(len(xs)):
        merged += positive(kept(rule.sparse, value(xs[s][i]) - b, s, i) * elected)
    return merged * elected * rule.lambda_ + b


def _weighted(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = kept(rule.sparse, value(xs[0][i]) - b, 0, i) * rule.weights[0]
    for s in range(1, len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.weights[s]
    merged, divisor = ZERO, ZERO
    for s in range(len(xs)):
        tau = kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.weights[s]
        agrees = (tau > ZERO) if total >= ZERO else (tau < ZERO)
        merged += tau if agrees else ZERO
        divisor += rule.weights[s] * rule.normalize if agrees else ZERO
    return merged / (divisor if divisor != ZERO else ONE) * rule.lambda_ + b


def _weighted_mean(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = ZERO
    for s in range(len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i)
    merged, count = ZERO, ZERO
    for s in range(len(xs)):
        tau = kept(rule.sparse, value(xs[s][i]) - b, s, i)
        agrees = (tau > ZERO) if total >= ZERO else (tau < ZERO)
        merged += (tau if agrees else ZERO) * rule.weights[s]
        count += ONE if agrees else ZERO
    return merged / larger(count, ONE) + b


def _interpolation(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, elected = value(base[i]), _elected(rule.sparse, base, xs, i)
    alone, mixed, count, divisor = ZERO, ZERO, ZERO, ZERO
    for s in range(len(xs)):
        agreeing = positive(kept(rule.sparse, value(xs[s][i]) - b, s, i) * elected)
        alone += agreeing
        mixed += agreeing * rule.weights[s]
        count += ONE if agreeing > ZERO else ZERO
        divisor += rule.weights[s] if agreeing > ZERO else ZERO
    mixed /= divisor if divisor != ZERO else ONE
    return (mixed if count > ONE else alone) * elected * rule.lambda_ + b


def _agreed(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    merged = _merged_of(rule.sparse, base, xs, i)
    votes = ZERO
    for s in range(len(xs)):
        tau = value(xs[s][i]) - b
        votes += ONE if abs(tau) >= abs(merged - tau) * rule.mask_lambdas[s] else ZERO
    return (merged if votes >= rule.agreement else ZERO) * rule.lambda_ + b


def _shared_out(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    count = ZERO
    for s in range(len(xs)):
        count += ONE if abs(value(xs[s][i]) - b) > rule.epsilon else ZERO
    share = ONE / larger(count, ONE)
    total = ZERO
    for s in range(len(xs)):
        tau = value(xs[s][i]) - b
        total += (tau if abs(tau) > rule.epsilon else ZERO) * (rule.factors[s] if count == ONE else share)
    return total + b


def _variable(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    is_kept = variance_of(base, xs, i) >= rule.high
    total = ZERO
    for s in range(len(xs)):
        total += value(xs[s][i]) - b if is_kept else ZERO
    elected = sign(total)
    merged, divisor = ZERO, ZERO
    for s in range(len(xs)):
        agreeing = positive((value(xs[s][i]) - b if is_kept else ZERO) * elected)
        merged += agreeing * rule.weights[s]
        divisor += rule.weights[s] if agreeing > ZERO else ZERO
    return merged * elected / (divisor if divisor != ZERO else ONE) + b


def _variable_election(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    keeps = variance_of(base, xs, i) >= rule.high
    total = ZERO
    for s in range(len(xs)):
        total += value(xs[s][i]) - b if keeps else ZERO
    merged, divisor = ZERO, ZERO
    for s in range(len(xs)):
        tau = value(xs[s][i]) - b if keeps else ZERO
        agrees = (tau > ZERO) if total >= ZERO else (tau < ZERO)
        merged += (tau if agrees else ZERO) * rule.weights[s]
        divisor += rule.weights[s] if agrees else ZERO
    return merged / larger(divisor, rule.least) + b


def _nearswap(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    a, b = value(xs[0][i]), value(xs[1][i])
    share = ONE / larger(abs(a - b), NEAREST) * rule.t
    share = share if share < ONE else ONE
    return share * b + (ONE - share) * a


ELEMENTS: dict[type, Callable[..., Any]] = {
    rules.WeightedSum: _weighted_sum,
    rules.TaskSum: _task_sum,
    rules.Sum: _sum,
    rules.Mean: _mean,
    rules.AgreeingSum: _agreeing_sum,
    rules.Weighted: _weighted,
    rules.WeightedMean: _weighted_mean,
    rules.Interpolation: _interpolation,
    rules.Agreed: _agreed,
    rules.SharedOut: _shared_out,
    rules.Variable: _variable,
    rules.VariableElection: _variable_election,
    rules.Nearswap: _nearswap,
}


# What is kept of an element of a task vector, of source s.


def kept(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(kept, jit_options=IN_PLACE)
def _kept_of(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return KEPT[sparse.instance_class]


def _whole(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau


def _trimmed(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau if abs(tau) >= sparse.highs[s] else ZERO


def _between(sparse: Any, tau: Any, s: Any, i: Any) -> Any:
    return tau if (abs(tau) >= sparse.highs[s]) & (abs(tau) <= sparse.top_lows[s]) else ZERO


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


# Whether it cannot be said yet: SOME or NONE.


def _undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_undecided, jit_options=IN_PLACE)
def _undecided_of(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    fields = dict(zip(rule.instance_class._fields, rule.types, strict=True))
    return UNDECIDED.get(fields.get("sparse", rule).instance_class, _never_undecided)


def _never_undecided(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return NONE


def _undecided_trim(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        found |= is_between(abs(value(xs[s][i]) - b), rule.sparse.lows[s], rule.sparse.highs[s])
    return found


def _undecided_between(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, found = value(base[i]), NONE
    for s in range(len(xs)):
        size = abs(value(xs[s][i]) - b)
        found |= is_between(size, rule.sparse.lows[s], rule.sparse.highs[s])
        found |= is_between(size, rule.sparse.top_lows[s], rule.sparse.top_highs[s])
    return found


def _undecided_variance(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return is_between(variance_of(base, xs, i), rule.low, rule.high)


UNDECIDED: dict[type, Callable[..., Any]] = {
    rules.Trimmed: _undecided_trim,
    rules.Between: _undecided_between,
    rules.Variable: _undecided_variance,
    rules.VariableElection: _undecided_variance,
}


# Of what they are made.


@numba.njit(**IN_PLACE)
def _elected(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    """The sign of the sum of what is kept."""
    b, total = value(base[i]), ZERO
    for s in range(len(xs)):
        total += kept(sparse, value(xs[s][i]) - b, s, i)
    return sign(total)


@numba.njit(**IN_PLACE)
def _mean_of_agreeing(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    b, elected = value(base[i]), _elected(sparse, base, xs, i)
    merged, count = ZERO, ZERO
    for s in range(len(xs)):
        agreeing = positive(kept(sparse, value(xs[s][i]) - b, s, i) * elected)
        merged += agreeing
        count += ONE if agreeing > ZERO else ZERO
    return merged * elected / larger(count, ONE)


def _merged_of(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    raise NotImplementedError("only in compiled code")


@overload(_merged_of, jit_options=IN_PLACE)
def _merged_of_sparse(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    return _sum_of_taus if sparse.instance_class is rules.Whole else _mean_of_agreeing.py_func


def _sum_of_taus(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = value(xs[0][i]) - b
    for s in range(1, len(xs)):
        total += value(xs[s][i]) - b
    return total


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


def typed(rule: Any) -> Any:
    """The rule with NumPy's numbers and arrays, of the types that its fields are to have."""
    return type(rule)(*(convert(field) for convert, field in zip(FIELDS[type(rule)], rule, strict=True)))


def _float32(number: float) -> np.float32:
    with np.errstate(over="ignore"):  # too large for float32 is infinite, as in torch
        return np.float32(number)


def _array(tensor: torch.Tensor) -> np.ndarray:
    return tensor.view(-1).numpy()


CONVERSIONS: dict[Any, Callable[[Any], Any]] = {
    float: _float32,
    int: U32,
    rules.Numbers: lambda numbers: tuple(map(_float32, numbers)),
    rules.Words: lambda words: tuple(map(U32, words)),
    rules.Doubles: lambda numbers: tuple(map(np.float64, numbers)),
    rules.Tensors: lambda tensors: tuple(map(_array, tensors)),
    rules.Sparsity: typed,
}
FIELDS = {rule: tuple(CONVERSIONS[kind] for kind in get_type_hints(rule).values()) for rule in (*ELEMENTS, *KEPT)}


def _most_undecided(rule: Any) -> int:
    """How many elements of a tensor a rule may leave undecided: fewer than SPACING for each threshold."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        return SPACING
    sparse = getattr(rule, "sparse", None)
    if isinstance(sparse, rules.Trimmed | rules.Between):
        return SPACING * len(sparse.lows) * (2 if isinstance(sparse, rules.Between) else 1)
    return 0


def decided(rule: Any, base: np.ndarray, xs: tuple[np.ndarray, ...], positions: np.ndarray) -> Any:
    """The rule with the thresholds that the elements at `positions`, all that were undecided, say."""
    if isinstance(rule, rules.Variable | rules.VariableElection):
        variances = _variances_at(base, xs, positions)
        exact = _of_rank(variances, rule.low, rule.high, rule.rank)
        return rule._replace(low=exact, high=exact)
    sparse = rule.sparse
    sizes = [_magnitudes_at(base, x, positions) for x in xs]
    bottom = tuple(map(_of_rank, sizes, sparse.lows, sparse.highs, sparse.ranks))
    sparse = sparse._replace(lows=bottom, highs=bottom)
    if isinstance(sparse, rules.Between):
        top = tuple(map(_of_rank, sizes, sparse.top_lows, sparse.top_highs, sparse.top_ranks))
        sparse = sparse._replace(top_lows=top, top_highs=top)
    return rule._replace(sparse=sparse)


def _of_rank(sizes: np.ndarray, low: float, high: float, rank: int) -> float:
    return high if low == high else float(np.sort(sizes[(sizes > low) & (sizes < high)])[rank])


@compiled
def _magnitudes_at(base: Any, x: Any, positions: Any) -> Any:
    sizes = np.empty(positions.size, np.float32)
    for at in range(positions.size):
        i = positions[at]
        sizes[at] = abs(value(x[i]) - value(base[i]))
    return sizes


@compiled
def _variances_at(base: Any, xs: Any, positions: Any) -> Any:
    variances = np.empty(positions.size, np.float32)
    for at in range(positions.size):
        variances[at] = variance_of(base, xs, U64(positions[at]))
    return variances
