"""The CPU formulas of the merge rules; a formula computes one merged element.

A formula computes element i from `value(base[i])` and the sources' `value(xs[s][i])`.
The type of the rule selects its formula, which becomes part of the compiled pass.
"""

from __future__ import annotations

from typing import Any

import numba
from numba.extending import overload

from workers.merging.kernels import rules
from workers.merging.kernels.compilation import IN_PLACE
from workers.merging.kernels.elements import has_sign_of, variance_of
from workers.merging.kernels.operations import FORMULAS, ONE, ZERO, computes, larger, positive, sign, value
from workers.merging.kernels.sparsity import is_at_or_above, kept

__all__ = ["element"]


def element(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    """Compute element i of a merge in float32, by the formula that belongs to the type of `rule`.

    A rule has the numbers of a merge's formula, such as the weights of the sources. `base` and `xs` are the arrays of
    the base and the sources, as the function `arguments.as_array` makes them. Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


@overload(element, jit_options=IN_PLACE)
def _element_of(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return FORMULAS[rule.instance_class]


@computes(rules.WeightedSum)
def _weighted_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    total = value(xs[0][i]) * rule.weights[0]
    for s in range(1, len(xs)):
        total += value(xs[s][i]) * rule.weights[s]
    return total


@computes(rules.TaskSum)
def _task_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = (value(xs[0][i]) - b) * rule.weights[0]
    for s in range(1, len(xs)):
        total += (value(xs[s][i]) - b) * rule.weights[s]
    return total + b


@computes(rules.Sum)
def _sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = b
    for s in range(len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.factors[s]
    return total


@computes(rules.Mean)
def _mean(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return _mean_of_agreeing(rule.sparse, base, xs, i) * rule.lambda_ + value(base[i])


@computes(rules.AgreeingSum)
def _agreeing_sum(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b, elected = value(base[i]), _elected(rule.sparse, base, xs, i)
    merged = ZERO
    for s in range(len(xs)):
        merged += positive(kept(rule.sparse, value(xs[s][i]) - b, s, i) * elected)
    return merged * elected * rule.lambda_ + b


@computes(rules.Weighted)
def _weighted(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = kept(rule.sparse, value(xs[0][i]) - b, 0, i) * rule.weights[0]
    for s in range(1, len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.weights[s]
    merged, divisor = ZERO, ZERO
    for s in range(len(xs)):
        tau = kept(rule.sparse, value(xs[s][i]) - b, s, i) * rule.weights[s]
        agrees = has_sign_of(tau, total)
        merged += tau if agrees else ZERO
        divisor += rule.weights[s] * rule.normalize if agrees else ZERO
    return merged / (divisor if divisor != ZERO else ONE) * rule.lambda_ + b


@computes(rules.WeightedMean)
def _weighted_mean(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    total = ZERO
    for s in range(len(xs)):
        total += kept(rule.sparse, value(xs[s][i]) - b, s, i)
    merged, count = ZERO, ZERO
    for s in range(len(xs)):
        tau = kept(rule.sparse, value(xs[s][i]) - b, s, i)
        agrees = has_sign_of(tau, total)
        merged += (tau if agrees else ZERO) * rule.weights[s]
        count += ONE if agrees else ZERO
    return merged / larger(count, ONE) + b


@computes(rules.Interpolation)
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


@computes(rules.Agreed)
def _agreed(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    merged = _merged_of(rule.sparse, base, xs, i)
    votes = ZERO
    for s in range(len(xs)):
        tau = value(xs[s][i]) - b
        votes += ONE if abs(tau) >= abs(merged - tau) * rule.mask_lambdas[s] else ZERO
    return (merged if votes >= rule.agreement else ZERO) * rule.lambda_ + b


@computes(rules.SharedOut)
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


@computes(rules.Variable)
def _variable(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    is_kept = _is_variable(rule, base, xs, i)
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


@computes(rules.VariableElection)
def _variable_election(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    b = value(base[i])
    keeps = _is_variable(rule, base, xs, i)
    total = ZERO
    for s in range(len(xs)):
        total += value(xs[s][i]) - b if keeps else ZERO
    merged, divisor = ZERO, ZERO
    for s in range(len(xs)):
        tau = value(xs[s][i]) - b if keeps else ZERO
        agrees = has_sign_of(tau, total)
        merged += (tau if agrees else ZERO) * rule.weights[s]
        divisor += rule.weights[s] if agrees else ZERO
    return merged / larger(divisor, rule.least) + b


# Parts of several formulas.


@numba.njit(**IN_PLACE)
def _is_variable(rule: Any, base: Any, xs: Any, i: Any) -> Any:
    return is_at_or_above(rule.by, variance_of(base, xs, i), 0, i, rule.factor, rule.threshold, rule.mark)


@numba.njit(**IN_PLACE)
def _elected(sparse: Any, base: Any, xs: Any, i: Any) -> Any:
    """The elected sign of element i: the sign of the sum of the sources' sparse task vectors, 1, -1 or 0.

    `sparse` is the rule that says which elements of a task vector are kept and which are set to zero. `base` and `xs`
    are the arrays of the base and the sources, as the function `arguments.as_array` makes them.
    """
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
