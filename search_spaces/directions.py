"""Direction and scale of a merge of the whole model: equation 2 of "Mixup Model Merge (M3)".

The merge is base + scale * sum of share_k * task vector k. The experts' shares, which sum to 1, are the direction.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from search_spaces.methods import METHODS
from search_spaces.recipe import Recipe

__all__ = ["Direction", "direction_of"]


@dataclass(frozen=True)
class Direction:
    """The experts' shares in a merge, and the factor (scale) on the weighted sum of their task vectors.

    The shares are the direction of the merge: `shares` maps the experts' aliases to numbers that sum to 1. `scale` is
    None for an average.
    """

    shares: Mapping[str, float]
    scale: float | None


def direction_of(recipe: Recipe) -> Direction | None:
    """Read each expert's share and the scale of a merge from a recipe that merges all tensors in the same way.

    The merge of the head is read, as an example of all merges. Shares and scale depend on the merge method:

    - a method that divides weights by their sum: the shares are the weights divided by their sum; the scale is the
      coefficient lambda, or None if the method has no lambda
    - a method with a lambda for each model: the scale is the sum of the lambdas; the shares are the lambdas divided by
      the scale
    - a method with one lambda and no weights, such as TIES: the shares are equal; the scale is the lambda
    - an unchanged expert: its share is 1; the scale is None

    Returns None for the base model, for numbers that sum to 0, and for other methods.
    """
    merge = recipe.head
    models, declared = [source.model for source in merge.sources], METHODS[merge.method]
    weight, lambda_ = declared.coefficient("weight"), declared.coefficient("lambda")
    scale: float | None = None
    numbers: tuple[float, ...]
    if merge.method == "passthrough":
        numbers = (0.0 if models[0] == recipe.base else 1.0,)
    elif lambda_ is not None and lambda_.per_model:
        numbers = merge.per_source("lambda")
        scale = math.fsum(numbers)
    elif weight is not None:
        numbers = merge.per_source("weight")
        scale = None if lambda_ is None else merge.number("lambda")
    elif lambda_ is not None:
        numbers, scale = (1.0,) * len(models), merge.number("lambda")
    else:
        return None
    if not (total := math.fsum(numbers)):
        return None
    return Direction({model: number / total for model, number in zip(models, numbers, strict=True)}, scale)
