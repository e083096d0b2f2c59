"""The interface of a searcher: a pure function from results to the next configuration.

Searchers keep no state between proposals. Proposal n depends only on the seed, n and the observations, so a resumed
search proposes what an uninterrupted one would have proposed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from search_spaces.parameters import Parameters

__all__ = ["Observation", "Searcher"]


@dataclass(frozen=True)
class Observation:
    """A configuration's costs at one rung: one per objective, smaller is better, None if the candidate failed.

    `fidelity` is the rung's share of the full budget, in (0, 1]."""

    configuration: Mapping[str, Any]
    fidelity: float
    costs: tuple[float, ...] | None


class Searcher(Protocol):
    """One search algorithm."""

    def propose(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The configuration of trial `number`: valid in `parameters`, with inactive parameters left out.

        `pending` are earlier proposals whose results this one must not know."""
        ...
