"""A bound on paired differences that holds at all looks at once, for samples that are drawn without replacement.

Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 86, 2024), section 5, and
"Confidence sequences for sampling without replacement" (NeurIPS 2020): a gambler who bets that a candidate is worse
than a rival multiplies the capital at each sample by a factor whose expectation is at most 1 if the candidate is not
worse on all samples. The capital is a nonnegative supermartingale then, and by Ville's inequality it ever reaches 1 /
alpha with a probability of at most alpha. On paired differences of right and wrong answers it needs far fewer samples
than the bounds of Hoeffding and Serfling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bound", "largest_capital"]

Differences = NDArray[np.float64]

# The shares of the capital that are bet: gamblers with one each, whose mean capital counts.
BETS = (np.arange(20) + 0.5) / 20


def largest_capital(differences: Differences, *, population: int) -> float:
    """The largest capital so far of betting that the sum of a population is positive, which begins at 1.

    `differences` [n], in [-1, 1], are those drawn so far of the `population`, in the order of a random permutation.
    Infinite where the sum is positive whatever follows."""
    drawn = np.arange(len(differences))
    sums = np.concatenate(([0.0], np.cumsum(differences)[:-1]))
    # If the sum over the population is 0, this is expected of the next one; less if it is negative.
    expected = -sums / (population - drawn)
    if (expected < -1).any() or math.fsum(differences) > population - len(differences):
        return math.inf
    # Where nothing but -1 can follow, there is nothing to bet on.
    gains = np.divide(differences - expected, 1 + expected, out=np.zeros_like(expected), where=expected > -1)
    capital = np.exp(np.cumsum(np.log1p(np.outer(BETS, gains)), axis=1)).mean(axis=0)
    return float(max(1.0, capital.max(initial=1.0)))


@dataclass(frozen=True)
class Bound:
    """Stops a candidate that is behind a rival in every objective, as sure as `error_rate` says: with at least 1 -
    `error_rate`, no candidate of the study is stopped that would not have been worse than that rival on all samples.

    The k-th candidate's share of the error rate is 1 / (k (k + 1)), whatever number follows; its rivals share it
    equally. Looks need no shares, as the bound holds at all of them; nor do objectives, as a candidate that is not
    worse in one of them is stopped only if that one's bound is wrong. It supposes that the candidate does not depend on
    which samples come first: a searcher that learns from the lower rungs of earlier trials makes the rate approximate.

    `differences(trial, rival, rung)`: by objective, cost of the trial minus that of the rival on each sample of the
    rung, in [-1, 1] and in the order of the samples. `populations` are the numbers of samples in the same order.
    """

    differences: Callable[[int, int, int], Sequence[Differences]]
    populations: tuple[int, ...]
    error_rate: float

    def is_behind(self, trial: int, rival: int, rung: int, *, candidate: int, num_rivals: int) -> bool:
        """Whether the trial, the study's `candidate`-th (from 1), is behind one of its rivals at this look."""
        least = candidate * (candidate + 1) * num_rivals / self.error_rate
        found = zip(self.differences(trial, rival, rung), self.populations, strict=True)
        return all(largest_capital(each, population=population) >= least for each, population in found)

    def reason(self, rung: int) -> str:
        return f"behind at rung {rung}, by the bound for an error rate of {self.error_rate:g}"
