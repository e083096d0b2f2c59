"""Random search: every configuration drawn uniformly, parent parameters first. The baseline of all other searchers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from search_spaces.parameters import Parameters
from service.tune.searchers.base import Observation

__all__ = ["SEARCHER", "RandomSearcher", "proposal_generator", "sample_unseen"]

# In a small space most draws are known configurations; after this many draws, a known one is proposed.
_MAX_DRAWS = 64


class RandomSearcher:
    """Draws uniformly; of the observations it uses only which configurations are known already."""

    def propose(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        known = [*(observation.configuration for observation in observations), *pending]
        return sample_unseen(parameters, proposal_generator(seed=seed, number=number), known)


SEARCHER = RandomSearcher()


def proposal_generator(*, seed: int, number: int) -> np.random.Generator:
    """The random state of proposal `number`: a function of the two numbers alone, on every machine."""
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest))


def sample_unseen(
    parameters: Parameters, rng: np.random.Generator, known: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A configuration drawn uniformly, and not among the known ones if a few draws find such a one."""
    for _ in range(_MAX_DRAWS):
        configuration = parameters.sample(rng)
        if configuration not in known:
            break
    return configuration
