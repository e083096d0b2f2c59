"""Samples of one trial or of two trials side by side: which trial has each sample right, and how values differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Objective
from service.results.holdout import sample_bounds
from service.results.statistics import paired_difference
from service.types import Estimate

__all__ = ["Kept", "SideBySide", "best_value", "side_by_side"]

Kept: TypeAlias = Literal["differs", "a_only", "b_only", "both_wrong"]
Values: TypeAlias = NDArray[np.float64]


@dataclass(frozen=True)
class SideBySide:
    """Comparison of two trials: how many samples each trial and both trials have right, and how their values differ.

    A trial has a sample right if its value is the best of the metric's range.

    - `num_samples`: number of samples that both trials have
    - `both_right`, `a_only`, `b_only`, `both_wrong`: numbers of these samples that are right for both trials, only for
      the first trial, only for the second trial, or for none
    - `difference`: mean of the first trial's value minus the second's, paired by sample; None without samples, and for
      a single sample of a metric without bounds
    """

    num_samples: int
    both_right: int
    a_only: int
    b_only: int
    both_wrong: int
    difference: Estimate | None


def best_value(objective: Objective) -> float:
    """The best value of the metric's range; a trial whose value equals it has the sample right."""
    low, high = objective.bounds
    return high if objective.direction == "maximize" else low


def side_by_side(
    objective: Objective, a: Values, b: Values | None, *, only: Kept | None = None
) -> tuple[list[int], SideBySide | None]:
    """Compare the values of two trials sample by sample.

    Args:
        objective: Objective of the samples.
        a: Values of the first trial by position [num_samples]; NaN where no sample is stored.
        b: Values of the second trial; None to look at the first trial alone.
        only: Selects the listed samples among those that both trials have: "differs" selects samples with different
            values; "a_only" and "b_only" select samples that only the first or only the second trial has right;
            "both_wrong" selects samples that no trial has right. None lists all.

    Returns:
        Positions of the listed samples in order, and the comparison. The comparison is over all samples that both
        trials have; it is None without a second trial.
    """
    if b is None:
        return np.flatnonzero(~np.isnan(a)).tolist(), None
    length = min(len(a), len(b))
    both = np.flatnonzero(~np.isnan(a[:length]) & ~np.isnan(b[:length]))
    first, second = a[both], b[both]
    best = best_value(objective)
    is_right, is_right_too = first == best, second == best
    groups = {
        "a_only": is_right & ~is_right_too,
        "b_only": ~is_right & is_right_too,
        "both_wrong": ~is_right & ~is_right_too,
        "differs": first != second,
    }
    comparison = SideBySide(
        num_samples=len(both),
        both_right=int((is_right & is_right_too).sum()),
        a_only=int(groups["a_only"].sum()),
        b_only=int(groups["b_only"].sum()),
        both_wrong=int(groups["both_wrong"].sum()),
        difference=_difference(objective, first, second),
    )
    return (both if only is None else both[groups[only]]).tolist(), comparison


def _difference(objective: Objective, first: Values, second: Values) -> Estimate | None:
    if not len(first):
        return None
    bounds = sample_bounds((objective,), ({objective.name: first}, {objective.name: second})).get(objective.name)
    return paired_difference(first, second, bounds=bounds)
