"""Archive of the best layer paths of a search, and random mutations of them as further proposals.

A path is the sequence of the layers of which a merge consists. A policy learns slowly, and often proposes a path that
it has proposed before. Therefore a share of a search's paths are mutants of the best known paths, and repeated paths
are replaced by mutants. Each preference vector has a separate archive: the paths with the best outcomes for this
vector, even if they were proposed for another vector. This module does not depend on policies.
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
    """A set of layer paths, which are sequences of source models' layers.

    `configurations` has one configuration for each path.

    A search uses the set to recognise paths that it need not propose again.
    """

    def __init__(self, configurations: Iterable[Mapping[str, Any]]) -> None:
        self._known = {frozenset(configuration.items()) for configuration in configurations}

    def __contains__(self, configuration: Mapping[str, Any]) -> bool:
        return frozenset(configuration.items()) in self._known


def outcomes_of(values: NDArray[np.float64], preference: tuple[float, ...], scalarisation: str) -> NDArray[np.float64]:
    """The outcome of each layer path (sequence of layers): its objective values, combined into one number.

    `values` are [num_paths, num_objectives], the result is [num_paths]. An outcome is the sum of a path's values,
    weighted by the vector `preference`. With the scalarisation "tchebycheff" it is minus the largest weighted distance
    from the best values. Larger is better.
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

    `outcomes` has one number for each configuration, into which its objective values are combined; larger is better. If
    configurations have equal outcomes, the earlier configuration comes first.
    """
    found: dict[frozenset[Any], Mapping[str, Any]] = {}
    for index in np.argsort(-outcomes, kind="stable"):
        found.setdefault(frozenset(configurations[index].items()), configurations[index])
        if len(found) == size:
            break
    return list(found.values())


def last_improvement(values: NDArray[np.float64], preferences: Sequence[tuple[float, ...]], scalarisation: str) -> int:
    """The index of the latest layer path (sequence of layers) that set a record for at least one preference vector.

    `preferences` are the vectors, each with the weights of the objectives. A path sets a record for a vector if its
    outcome for this vector is better than the outcomes of all earlier paths. The outcome combines the objective values
    into one number (function `outcomes_of`); `scalarisation` is the formula for this. `values` [num_paths,
    num_objectives] has the objective values of the paths in their order.
    """
    return max(int(outcomes_of(values, preference, scalarisation).argmax()) for preference in preferences)


def unseen_near(
    paths: LayerPaths,
    configuration: Mapping[str, Any],
    known: KnownPaths,
    rng: np.random.Generator,
    *,
    preference: int | None = None,
) -> dict[str, Any] | None:
    """A layer path that is a random mutation of the path `configuration`, and is not in `known`.

    A layer path is the sequence of source models' layers of which a merge consists; `paths` is the space of all paths.
    Mutations are drawn with `rng`. `preference` is the index of the preference vector of merged layers that a mutation
    adds to a path without merged layers, by default 0. Returns None if a few draws give only known paths.
    """
    for drawn in range(_NUM_MUTANTS):
        most = _MOST_CHANGES * (1 + 2 * drawn // _NUM_MUTANTS)
        found = paths.mutant(configuration, rng, most=most, preference=preference)
        if found not in known:
            return found
    return None
