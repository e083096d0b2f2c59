"""Scalarisation: functions that combine an episode's values of several objectives into one outcome to be maximised.

Miettinen, "Nonlinear Multiobjective Optimization" (1998), sections 3.1 (weighted sum) and 3.4 (Tchebycheff).
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor

from search_spaces.preferences import SMALLEST_WEIGHT

__all__ = ["Scalarisation", "scalarised"]


class Scalarisation(StrEnum):
    """The function by which an episode's outcomes in several objectives are combined into one outcome.

    An outcome is the score of an episode's layer path in an objective. The function takes the outcomes and a
    preference vector, which has the weight of each objective.

    - WEIGHTED_SUM: the sum of the weighted outcomes
    - TCHEBYCHEFF: minus the largest weighted distance of an outcome from the best known outcome
    """

    WEIGHTED_SUM = "weighted_sum"
    TCHEBYCHEFF = "tchebycheff"


def scalarised(outcomes: Tensor, preferences: Tensor, ideal_K: Tensor | None) -> Tensor:
    """Combine the outcomes of the objectives into one outcome, with preference vectors as weights; larger is better.

    `outcomes` and `preferences` are [..., objectives], and the result is [...]. If `ideal_K` is None, the result is the
    weighted sum. Otherwise it is Tchebycheff's function, negated: the largest of the weighted distances from `ideal_K`,
    which has the best known outcome in each objective. Every point of a Pareto front has the best value of
    Tchebycheff's function for some weights, whereas weighted sums leave out points where the front is not convex.
    """
    if ideal_K is None:
        return (outcomes * preferences).sum(dim=-1)
    return -(preferences.clamp(min=SMALLEST_WEIGHT) * (ideal_K - outcomes)).amax(dim=-1)
