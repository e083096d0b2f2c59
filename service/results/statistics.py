"""Means, paired differences and their 95 % intervals, computed from the values of single samples.

Every interval is two-sided, with 95 % nominal coverage unless the argument `level` states another coverage. For metrics
that are 0 or 1 on each sample, intervals stay inside the metric's range and have a width above 0 even at 0 % and 100 %.
For other metrics, intervals are Student's t. This module does not depend on whether larger or smaller values are
better.

Sources:
    Wilson 1927, "Probable inference, the law of succession, and statistical inference", JASA 22 (one proportion;
        recommended by Brown, Cai and DasGupta 2001, "Interval estimation for a binomial proportion", Stat. Sci. 16).
    Bonett and Price 2012, "Adjusted Wald confidence interval for a difference of binomial proportions based on paired
        data", J. Educ. Behav. Stat. 37 (difference of two paired proportions; recommended by Fagerland, Lydersen and
        Laake 2014, Stat. Med. 33).
    Zou and Donner 2008, "Construction of confidence limits about effect measures: a general approach", Stat. Med. 27
        (limits of a sum of independent estimates from the limits of its terms; for correlated estimates, section 2.2).
    Davison and Hinkley 1997, "Bootstrap Methods and their Application", section 5.2.1 (the basic bootstrap interval).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from service.types import Estimate

__all__ = [
    "LEVEL",
    "Bounds",
    "bootstrap",
    "correlations",
    "estimate",
    "independent_difference",
    "interval_of_mean",
    "mean_of",
    "paired_difference",
]

LEVEL = 0.95
# The normal quantile of a two-sided interval at LEVEL: 1.95996.
Z = float(special.ndtri(0.5 + LEVEL / 2))

Bounds = tuple[float, float]
Samples = NDArray[np.float64]

# Resamples of a bootstrap: its limits vary by about 3 % of the interval's width between seeds.
NUM_RESAMPLES = 1000


def estimate(values: ArrayLike, *, bounds: Bounds | None = None) -> Estimate:
    """Estimate the mean of a metric, with its standard error and 95 % interval.

    The interval is Wilson's if every value lies on a bound (as with exact match), else Student's t, which is cut to the
    bounds. The standard error is the sample standard deviation over sqrt(n). If several values are all equal, it is 0,
    and only the interval is meaningful. For a single sample, it is half of the width of `bounds`.

    Args:
        values: One value per sample [num_samples], in the metric's unit.
        bounds: The range that the metric cannot leave. Without it, (0, 1) is assumed if every value is 0 or 1.

    Returns:
        The mean, its standard error and its 95 % interval, in the metric's unit.

    Raises:
        ValueError: There are no samples, a value is not finite or outside `bounds`, or there is one sample of a metric
            without bounds.
    """
    sample = _checked(values, bounds)
    n, mean = len(sample), float(sample.mean())
    low, high = bounds or (0.0, 1.0)
    if n == 1:
        if bounds is None and sample[0] not in (low, high):
            raise ValueError("estimate: one sample of a metric without bounds has no interval; give at least 2 samples")
        standard_error = (high - low) / 2
    else:
        standard_error = float(sample.std(ddof=1)) / math.sqrt(n)

    if _is_two_valued(sample, low, high):
        proportion = (mean - low) / (high - low)
        ci95 = tuple(low + (high - low) * limit for limit in _wilson(proportion, n))
    elif n == 1:
        ci95 = (low, high)
    else:
        ci95 = _students_t(mean, standard_error, n)
        if bounds is not None:
            ci95 = (max(low, ci95[0]), min(high, ci95[1]))
    return Estimate(mean, standard_error, n, (ci95[0], ci95[1]))


def interval_of_mean(mean: float, standard_error: float, n: int, *, bounds: Bounds) -> Bounds:
    """Compute the 95 % interval of a mean of which only the standard error is known, and not the samples.

    `n` is the number of samples, at least 1. The interval is Student's t, cut to `bounds`, the range that the metric
    cannot leave, with three exceptions:

    - If the mean is equal to a bound, all samples must be equal to it, and the interval is Wilson's.
    - If a single sample lies between the bounds, the interval is the whole range.
    - If the mean is outside `bounds`, the interval is not cut.
    """
    low, high = bounds
    if not low <= mean <= high:
        return _students_t(mean, standard_error, max(n, 2))
    if mean in (low, high):
        limits = _wilson((mean - low) / (high - low), n)
        return low + (high - low) * limits[0], low + (high - low) * limits[1]
    if n == 1:
        return bounds
    found = _students_t(mean, standard_error, n)
    return max(low, found[0]), min(high, found[1])


def paired_difference(
    values: ArrayLike, reference: ArrayLike, *, bounds: Bounds | None = None, level: float = LEVEL
) -> Estimate:
    """Estimate the mean of `values - reference`, sample by sample, with its standard error and interval.

    The interval is Bonett and Price's if all values and all reference values lie on the bounds. Two merges that agree
    on every sample then differ by 0, with an interval that narrows as the number of samples grows. Otherwise the
    interval is Student's t of the differences, cut to plus and minus the distance of the bounds.

    Args:
        values: One value per sample [num_samples], in the metric's unit.
        reference: Values of the reference on the same samples in the same order.
        bounds: The range that the metric cannot leave. Without it, (0, 1) is assumed if every value is 0 or 1.
        level: Coverage of the interval. At 1 - 0.05 / m, the intervals of m differences all contain the true
            differences with a probability of at least 95 % (Bonferroni).

    Returns:
        The mean difference, in the metric's unit.

    Raises:
        ValueError: The lengths differ, or the function `estimate` would raise ValueError for the values.
    """
    first, second = _checked(values, bounds), _checked(reference, bounds)
    if len(first) != len(second):
        raise ValueError(f"paired_difference: {len(first)} values against {len(second)}; give the same samples of both")
    differences, n = first - second, len(first)
    mean = float(differences.mean())
    low, high = bounds or (0.0, 1.0)
    width = high - low
    is_two_valued = _is_two_valued(first, low, high) and _is_two_valued(second, low, high)
    if n == 1:
        if bounds is None and not is_two_valued:
            raise ValueError("paired_difference: one sample of an unbounded metric has no interval; give at least 2")
        return Estimate(mean, width, 1, (-width, width))

    standard_error = float(differences.std(ddof=1)) / math.sqrt(n)
    if is_two_valued:
        limits = _bonett_price(int((differences > 0).sum()), int((differences < 0).sum()), n, level)
        ci95 = (width * limits[0], width * limits[1])
    else:
        ci95 = _students_t(mean, standard_error, n, level)
        if bounds is not None:
            ci95 = (max(-width, ci95[0]), min(width, ci95[1]))
    return Estimate(mean, standard_error, n, ci95)


def mean_of(estimates: Sequence[Estimate], *, correlation: ArrayLike | None = None) -> Estimate:
    """Estimate the unweighted mean of several estimates.

    All estimates have the same weight, however many samples they have. The limits of the interval are Zou and Donner's
    (the MOVER method): if the intervals of the estimates are asymmetric, the interval of the mean is asymmetric too.

    Args:
        estimates: The estimates, in one unit.
        correlation: Correlation of the estimates' errors [num_estimates, num_estimates], as the function `correlations`
            computes it; None if the errors are independent.

    Returns:
        The mean; its field `samples` is the sum over the estimates.

    Raises:
        ValueError: There are no estimates.
    """
    if not estimates:
        raise ValueError("mean_of: no estimates; give at least 1")
    count = len(estimates)
    matrix = np.eye(count) if correlation is None else np.asarray(correlation, dtype=np.float64)

    def combined(distances: Sequence[float]) -> float:
        return math.sqrt(max(0.0, float(np.asarray(distances) @ matrix @ np.asarray(distances)))) / count

    value = sum(e.value for e in estimates) / count
    return Estimate(
        value,
        combined([e.standard_error for e in estimates]),
        sum(e.samples for e in estimates),
        (
            value - combined([e.value - e.ci95[0] for e in estimates]),
            value + combined([e.ci95[1] - e.value for e in estimates]),
        ),
    )


def correlations(samples: Sequence[ArrayLike], documents: Sequence[str]) -> Samples:
    """Matrix of the correlations between several sample means.

    Means over the same documents have correlated errors; means over different data are independent. The correlation of
    two means is Pearson's correlation of their values on the shared documents, times a factor. The factor is the number
    of shared documents, divided by the geometric mean of the two numbers of samples. Pearson's correlation is not
    defined for values that do not vary, or for fewer than two values. In these cases it is assumed to be 1, which gives
    the widest confidence interval of the average of the means.

    Args:
        samples: Values of each mean [num_means][num_samples]. For means with equal `documents`, values at equal
            positions are of the same document, and the longer list continues with further documents.
        documents: Identifier of the documents of each mean [num_means].

    Returns:
        Correlations in [-1, 1], [num_means, num_means], with 1 on the diagonal.
    """
    arrays = [np.asarray(values, dtype=np.float64) for values in samples]
    matrix = np.eye(len(arrays))
    for i, first in enumerate(arrays):
        for j, second in enumerate(arrays[:i]):
            if documents[i] == documents[j]:
                matrix[i, j] = matrix[j, i] = _correlation(first, second)
    return matrix


def _correlation(first: Samples, second: Samples) -> float:
    shared = min(len(first), len(second))
    # The covariance of the means is that of the values on shared documents, times shared / (n1 n2); the variance of a
    # mean is s^2 / n.
    share = shared / math.sqrt(len(first) * len(second))
    first, second = first[:shared], second[:shared]
    if shared < 2 or np.ptp(first) == 0 or np.ptp(second) == 0:
        return share
    return share * float(np.corrcoef(first, second)[0, 1])


def bootstrap(
    statistic: Callable[[Mapping[str, Samples]], float],
    samples: Mapping[str, ArrayLike],
    documents: Mapping[str, str],
    *,
    seed: int = 0,
) -> Estimate:
    """Estimate a statistic that is computed from the means of several merges, with its basic bootstrap interval.

    Whole documents are drawn with replacement: the same documents for all merges, and for all objectives with equal
    `documents` and equal numbers of samples. The basic interval, 2 * value - quantile, also corrects the upward bias of
    statistics such as the maximum of several values.

    Args:
        statistic: Computes the statistic from the merges' means by objective [num_merges].
        samples: Values by objective [num_merges, num_samples].
        documents: Identifier of the documents on which each objective was scored.
        seed: The same seed gives the same interval.

    Returns:
        The statistic of the original means. Its standard error is the standard deviation over the resamples. Its field
        `samples` is the sum of the objectives' numbers of samples.
    """
    arrays = {name: np.asarray(values, dtype=np.float64) for name, values in samples.items()}
    data: dict[tuple[str, int], list[str]] = {}
    for name, values in arrays.items():
        data.setdefault((documents[name], values.shape[1]), []).append(name)
    value = statistic({name: values.mean(axis=1) for name, values in arrays.items()})
    draw = np.random.default_rng(seed)
    drawn = np.empty(NUM_RESAMPLES)
    for index in range(NUM_RESAMPLES):
        means: dict[str, Samples] = {}
        for (_, count), names in data.items():
            times = np.bincount(draw.integers(count, size=count), minlength=count)
            means |= {name: arrays[name] @ times / count for name in names}
        drawn[index] = statistic(means)
    tail = (1 - LEVEL) / 2
    low, high = (float(limit) for limit in np.quantile(drawn, [tail, 1 - tail]))
    num_samples = sum(values.shape[1] for values in arrays.values())
    return Estimate(value, float(drawn.std(ddof=1)), num_samples, (2 * value - high, 2 * value - low))


def independent_difference(first: Estimate, second: Estimate) -> Estimate:
    """Estimate `first - second` of two estimates that are independent, because they are from different samples.

    Args:
        first: An estimate.
        second: An estimate in the same unit.

    Returns:
        The difference with Zou and Donner's limits; its field `samples` is the smaller of the two numbers of samples.
    """
    value = first.value - second.value
    below = math.hypot(first.value - first.ci95[0], second.ci95[1] - second.value)
    above = math.hypot(first.ci95[1] - first.value, second.value - second.ci95[0])
    return Estimate(
        value,
        math.hypot(first.standard_error, second.standard_error),
        min(first.samples, second.samples),
        (value - below, value + above),
    )


def _checked(values: ArrayLike, bounds: Bounds | None) -> NDArray[np.float64]:
    """Convert the values of samples to an array [num_samples], and check that they can be averaged.

    Raises:
        ValueError: There are no samples, or a value is not finite or outside `bounds`.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.ndim != 1 or len(sample) == 0:
        raise ValueError(f"samples of shape {sample.shape}; give one value per sample, at least 1")
    if not np.isfinite(sample).all():
        at = int(np.flatnonzero(~np.isfinite(sample))[0])
        raise ValueError(f"sample {at} is {sample[at]}; every value must be finite")
    if bounds is not None and (sample.min() < bounds[0] or sample.max() > bounds[1]):
        raise ValueError(f"values between {sample.min()} and {sample.max()}; bounds are {bounds[0]} to {bounds[1]}")
    return sample


def _is_two_valued(sample: NDArray[np.float64], low: float, high: float) -> bool:
    return bool(((sample == low) | (sample == high)).all())


def _wilson(proportion: float, n: int) -> tuple[float, float]:
    """Compute Wilson's score interval of a proportion that was observed in `n` samples.

    The interval consists of the proportions that a score test at LEVEL does not reject, given the observed proportion.
    """
    shrink = 1 + Z**2 / n
    centre = (proportion + Z**2 / (2 * n)) / shrink
    half = Z * math.sqrt(proportion * (1 - proportion) / n + Z**2 / (4 * n**2)) / shrink
    # At 0 and 1 the limit is the proportion itself, which rounding may miss by one bit.
    return max(0.0, min(proportion, centre - half)), min(1.0, max(proportion, centre + half))


def _bonett_price(num_better: int, num_worse: int, n: int, level: float) -> tuple[float, float]:
    """Compute Bonett and Price's interval of the difference of two paired proportions, with coverage `level`.

    `n` is the number of pairs. In `num_better` pairs, the first member has the better value; in `num_worse` pairs, the
    second member has the better value; in all other pairs, the values are equal. The interval is Wald's interval after
    two pairs are added: one with a better first member, and one with a better second member.
    """
    better, worse = (num_better + 1) / (n + 2), (num_worse + 1) / (n + 2)
    centre = better - worse
    half = float(special.ndtri(0.5 + level / 2)) * math.sqrt((better + worse - centre**2) / (n + 2))
    return max(-1.0, centre - half), min(1.0, centre + half)


def _students_t(mean: float, standard_error: float, n: int, level: float = LEVEL) -> tuple[float, float]:
    half = float(special.stdtrit(n - 1, 0.5 + level / 2)) * standard_error
    return mean - half, mean + half
