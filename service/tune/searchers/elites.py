"""Archive of the best layer paths of a search, and random mutations of them as further proposals.

A path is the sequence of the layers of which a merge consists. A policy learns slowly and proposes the same path again.
Therefore a share of a search's paths are mutants of the best known paths, and repeated paths are replaced by mutants.
Each preference vector has a separate archive: the paths with the best outcomes for this vector, even if they were
proposed for another vector. This module does not depend on policies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.preferences import SMALLEST_WEIGHT, augmented_chebyshev
from search_spaces.spaces.layer_paths import LayerPaths

__all__ = ["KnownPaths", "archive", "last_improvement", "outcomes_of", "unseen_near"]

# Mutants that are drawn for a proposal; the later half have up to twice as many changes.
_NUM_MUTANTS = 32

# The largest number of changes of a mutant at first.
_MOST_CHANGES = 3


class KnownPaths:
    """A set of layer paths, which are sequences of source models' layers; each is given as its configuration.

    A search uses the set to recognise paths that need not be proposed again.
    """

    def __init__(self, configurations: Iterable[Mapping[str, Any]]) -> None:
        self._known = {frozenset(configuration.items()) for configuration in configurations}

    def __contains__(self, configuration: Mapping[str, Any]) -> bool:
        return frozenset(configuration.items()) in self._known


def outcomes_of(values: NDArray[np.float64], preference: tuple[float, ...], scalarisation: str) -> NDArray[np.float64]:
    """The outcome of each layer path: its objective values, combined into one number by a preference vector.

    `values` are [num_paths, num_objectives], the result is [num_paths]. An outcome is the sum of a path's values,
    weighted by the vector. With the scalarisation "tchebycheff" it is minus the largest weighted distance from the best
    values. Larger is better.
    """
    weights = np.array(preference)
    if scalarisation == "weighted_sum":
        found: NDArray[np.float64] = values @ weights
        return found
    return -augmented_chebyshev(values.max(axis=0) - values, np.maximum(weights, SMALLEST_WEIGHT), rho=0.0)


def archive(
    configurations: Sequence[Mapping[str, Any]], outcomes: NDArray[np.float64], *, size: int
) -> list[Mapping[str, Any]]:
    """The configurations with the largest outcomes, without duplicates: at most `size`, the best first.

    `outcomes` has one number for each configuration; larger is better (`outcomes_of`). Of configurations with equal
    outcomes, the earlier one comes first.
    """
    found: dict[frozenset[Any], Mapping[str, Any]] = {}
    for index in np.argsort(-outcomes, kind="stable"):
        found.setdefault(frozenset(configurations[index].items()), configurations[index])
        if len(found) == size:
            break
    return list(found.values())


def last_improvement(values: NDArray[np.float64], preferences: Sequence[tuple[float, ...]], scalarisation: str) -> int:
    """The index of the last layer path that set a new record for at least one preference vector.

    A path sets a record for a vector if its outcome (`outcomes_of`) for this vector is better than those of all paths
    before it. `values` [num_paths, num_objectives] has the objective values of the paths in their order.
    `scalarisation` is the formula of the outcome.
    """
    return max(int(outcomes_of(values, preference, scalarisation).argmax()) for preference in preferences)


def unseen_near(
    paths: LayerPaths, configuration: Mapping[str, Any], known: KnownPaths, rng: np.random.Generator
) -> dict[str, Any] | None:
    """A random mutation of the layer path `configuration` that is not in `known`; None if no draw gives one."""
    for drawn in range(_NUM_MUTANTS):
        found = paths.mutant(configuration, rng, most=_MOST_CHANGES * (1 + 2 * drawn // _NUM_MUTANTS))
        if found not in known:
            return found
    return None
