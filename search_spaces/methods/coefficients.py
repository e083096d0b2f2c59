"""Coefficients and constraints that several methods share, most with the range for searching them.

For the methods of Su and Geiping, and similar methods, the ranges are from "Fine, I'll Merge It Myself: A
Multi-Fidelity Framework for Automated Model Merging" (2025), appendix A.6. A method with another range states the
range's source.
"""

from __future__ import annotations

import math

from search_spaces.methods.base import Coefficient, Numbers, PairShare, Range

__all__ = [
    "DENSITIES",
    "LAMBDA",
    "LAMBDAS",
    "LAMBDA_OR_1",
    "PAIR_WEIGHT",
    "SHARES",
    "WEIGHTS",
    "K",
    "normalize",
    "weights_do_not_cancel",
]

LAMBDA = Coefficient("lambda", searched=Range(0.0, 1.0), has_gradient=True)
LAMBDAS = Coefficient("lambda", per_model=True, searched=Range(0.0, 1.0), has_gradient=True)
LAMBDA_OR_1 = Coefficient("lambda", default=1, has_gradient=True)
K = Coefficient("k", 0, 1, searched=Range(0.1, 0.99))
DENSITIES = Coefficient("density", 1e-6, 1, per_model=True, searched=Range(0.1, 0.99))
WEIGHTS = Coefficient("weight", per_model=True, searched=Range(0.0, 1.0, per_expert=True), has_gradient=True)
# Weights that the method divides by their sum.
SHARES = Coefficient(
    "weight",
    per_model=True,
    searched=Range(0.0, 1.0, per_expert=True, on_simplex=True, default=0.0),
    has_gradient=True,
)
PAIR_WEIGHT = Coefficient("weight", per_model=True, searched=PairShare(), has_gradient=True)


def normalize(default: int) -> Coefficient:
    """The coefficient `normalize`, 0 or 1: whether the weighted sum of task vectors is divided by the sum of weights.

    With 1, each element is divided by the weights of those task vectors only that have the elected sign there.
    `default` is the value for a merge that does not state the coefficient.
    """
    return Coefficient("normalize", 0, 1, default=default, is_whole=True)


def weights_do_not_cancel(numbers: Numbers) -> str | None:
    """Check the weights of a method that divides by their sum: the sum must not be zero.

    `numbers` maps the name of a coefficient to its values, with one weight for each source. Returns a message if the
    weights sum to zero, else None.
    """
    weights = numbers("weight")
    return (
        None
        if abs(math.fsum(weights)) >= 1e-6
        else (f"weights {weights} sum to zero; they must not, as they are divided by their sum")
    )
