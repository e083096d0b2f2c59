"""The default searcher: the one our benchmark shows to be best (tests/benchmarks/bench_searchers.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from search_spaces.parameters import Parameters
from service.tune.searchers.base import Observation
from service.tune.searchers.smac import SmacSearcher

__all__ = ["AutoSearcher"]


class AutoSearcher:
    """Proposes exactly what `smac` proposes."""

    name = "auto"

    def __init__(self) -> None:
        self._chosen = SmacSearcher()

    def propose(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        return self._chosen.propose(parameters, number=number, seed=seed, observations=observations, pending=pending)
