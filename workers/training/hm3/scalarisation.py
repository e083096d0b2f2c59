"""Scalarisation: functions that map the values of several objectives to the one outcome which policies maximise.

Miettinen, "Nonlinear Multiobjective Optimization" (1998), sections 3.1 (weighted sum) and 3.4 (Tchebycheff).
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from search_spaces.preferences import SMALLEST_WEIGHT

__all__ = ["Scalarisation", "scalarised"]


class Scalarisation(StrEnum):
    """The function that maps an episode's outcomes by objective and its preference vector to its outcome R."""

    WEIGHTED_SUM = "weighted_sum"
    TCHEBYCHEFF = "tchebycheff"


def scalarised(outcomes: Tensor, preferences: Tensor, ideal_K: Tensor | None) -> Tensor:
    """The outcome R [...] of outcomes by objective [..., K] under preference vectors [..., K]; larger is better.

    With `ideal_K` None it is the weighted sum. Otherwise it is Tchebycheff's function, negated: the largest of the
    weighted distances from `ideal_K`, the best known outcome in each of the K objectives. Every point of a front has
    the best value of Tchebycheff's function for some weights, whereas weighted sums leave out points where the front is
    not convex.
    """
    if ideal_K is None:
        return (outcomes * preferences).sum(dim=-1)
    return -(preferences.clamp(min=SMALLEST_WEIGHT) * (ideal_K - outcomes)).amax(dim=-1)
