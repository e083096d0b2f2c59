"""An anytime-valid bound on paired differences, for samples drawn without replacement.

Anytime-valid means that the error rate holds for all rungs together.

A gambler bets that a trial is worse than a rival: each sample multiplies the gambler's capital by a factor. If the
trial is not worse on all samples together, the expectation of this factor is at most 1, so the capital is a nonnegative
supermartingale. By Ville's inequality, the probability that the capital ever reaches 1 / alpha is then at most alpha.
On paired differences of right and wrong answers, this bound needs far fewer samples than the bounds of Hoeffding and
Serfling.

Sources: Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting" (JRSS B 86, 2024), section
5, and "Confidence sequences for sampling without replacement" (NeurIPS 2020).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Bound", "largest_capital"]

Differences = NDArray[np.float64]

# Shares of the capital that are bet: one gambler for each share. Their mean capital counts.
BETS = (np.arange(20) + 0.5) / 20


def largest_capital(differences: Differences, *, population: int) -> float:
    """The largest capital that a gambler reaches by bets that the sum of a population of numbers is positive.

    The capital measures the evidence for a positive sum. The gambler starts with the capital 1, so the result is at
    least 1. If the sum is not positive, the capital reaches c with a probability of at most 1 / c. `differences` [n],
    in [-1, 1], are the first n of the `population` numbers, in a random order. The capital is infinite if the sum must
    be positive whatever the remaining numbers in [-1, 1] are.
    """
    drawn = np.arange(len(differences))
    sums = np.concatenate(([0.0], np.cumsum(differences)[:-1]))
    # The expected next difference if the sum over the population is 0; it is smaller if that sum is negative.
    expected = -sums / (population - drawn)
    if (expected < -1).any() or math.fsum(differences) > population - len(differences):
        return math.inf
    # If every further difference must be -1, the gambler does not bet.
    gains = np.divide(differences - expected, 1 + expected, out=np.zeros_like(expected), where=expected > -1)
    capital = np.exp(np.cumsum(np.log1p(np.outer(BETS, gains)), axis=1)).mean(axis=0)
    return float(max(1.0, capital.max(initial=1.0)))


@dataclass(frozen=True)
class Bound:
    """Statistical test of whether a trial is worse than another trial, its rival, in every objective.

    All tests of a study together have one error rate: with a probability of at least 1 - `error_rate`, every trial that
    is stopped would have been worse than its rival on all samples. The trials that may be stopped are called
    candidates, and numbered from 1. Candidate k has the share 1 / (k (k + 1)) of the error rate. The shares sum to at
    most 1 for any number of candidates.

    A candidate's share is divided equally between its rivals, but not between rungs (numbers of samples at which trials
    are compared) or objectives: each test holds at all rungs together, and a trial is stopped only if the tests of all
    objectives agree.

    The samples must be in a random order that is independent of the recipes. If a searcher learns from results at lower
    rungs, this holds only approximately, and so does the error rate.

    `differences(trial, rival, rung)` has an array for each objective: the cost of the trial minus the cost of the rival
    on each sample of the rung, in [-1, 1], in the order of the samples. `populations` has, for each objective, the
    number of all its samples.
    """

    differences: Callable[[int, int, int], Sequence[Differences]]
    populations: tuple[int, ...]
    error_rate: float

    def is_behind(self, trial: int, rival: int, rung: int, *, candidate: int, num_rivals: int) -> bool:
        """Whether the samples up to a rung show that a trial is worse than the trial `rival` in every objective.

        A rung is a number of samples at which trials are compared; `rung` is its index. `candidate` is the position,
        counted from 1, of `trial` among the study's trials that may be stopped (candidates), and `num_rivals` is the
        number of trials that it is compared with. A later candidate with more rivals gets a smaller share of the error
        rate, so it needs stronger evidence.
        """
        least = candidate * (candidate + 1) * num_rivals / self.error_rate
        found = zip(self.differences(trial, rival, rung), self.populations, strict=True)
        return all(largest_capital(each, population=population) >= least for each, population in found)

    def reason(self, rung: int) -> str:
        return f"behind at rung {rung}, by the bound for an error rate of {self.error_rate:g}"
