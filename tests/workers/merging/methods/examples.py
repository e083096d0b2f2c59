"""Example coefficients of every merge method, for three models."""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.methods import METHODS
from search_spaces.methods.base import Range

# The middle of the searched range, for coefficients that a method needs and that have no number below.
MIDDLES: Mapping[str, float] = {
    coefficient.name: (coefficient.searched.low + coefficient.searched.high) / 2
    for method in METHODS.values()
    for coefficient in method.coefficients
    if coefficient.default is None and isinstance(coefficient.searched, Range)
}
SHARES = (0.2, 0.5, 0.3)
EXAMPLES: Mapping[str, float | tuple[float, ...]] = {
    **MIDDLES,
    "weight": SHARES,
    "lambda": 0.4,
    "k": 0.3,
    "t": 0.3,
    "density": 0.4,
    "epsilon": 0.1,
    "gamma": 0.1,
    "select_topk": 0.5,
    "mask_lambda": 0.4,
    "agreement": 2.0,
    "scale": 0.7,
    "steps": 5.0,
    "learning_rate": 1e-3,
}
