"""CMA-ES: a search distribution whose covariance matrix adapts to the best trials.

Sources: Hansen, "The CMA evolution strategy: a tutorial" (2016); for the diagonal form, which spaces of many parameters
use, Ros and Hansen, "A simple modification in CMA-ES" (2008). The implementation is the package cmaes, on which
Optuna's sampler is based.

The distribution starts at the best baseline. For every proposal, the distribution is computed again from all proposed
trials, in their order, each with its result at the highest rung that it has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding, Rows
from service.tune.searchers.history import by_trial, merit

__all__ = ["SEARCHER", "CmaEsSearcher"]

# After this many draws of known configurations, a proposal is drawn uniformly.
_MAX_DRAWS = 16


@dataclass(frozen=True)
class CmaEsSearcher:
    """The searcher CMA-ES, for one objective and numeric parameters only.

    Proposals may run ahead of results, so some trials of a generation may be drawn from the distribution of an earlier
    generation. A generation is nevertheless formed from the next trials in the order of their numbers. The first
    distribution has the standard deviation `first_sigma`, as a share of each parameter's range. In spaces of at most
    `max_full` parameters, all correlations between parameters are learned.
    """

    # A share of each parameter's range. The search starts at a good recipe: with 0.2, the first generations were far
    # worse in spaces of 18 and 114 parameters (tests/benchmarks/bench_searchers.py).
    first_sigma: float = 0.1
    max_full: int = 100  # parameters up to which all correlations are learned

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng = context.generator()
        num_parameters = len(context.parameters)
        encoding = Encoding(context.parameters)
        strategy = self._replay(encoding, by_trial(context.observations), num_parameters=num_parameters)
        strategy.reseed_rng(int(rng.integers(2**32)))
        known = context.known_configurations()
        for _ in range(_MAX_DRAWS):
            row = encoding.normalise(strategy.ask()[np.newaxis, :num_parameters])
            if encoding.first_unknown(row, known) is not None:
                return encoding.decode(row[0])
        return context.sample_unseen(rng)

    def _replay(self, encoding: Encoding, trials: Sequence[Observation], *, num_parameters: int) -> Any:
        told = [trial for trial in trials if trial.is_proposed]
        starts = [trial for trial in trials if not trial.is_proposed and trial.costs is not None]
        mean = encoding.encode([min(starts, key=merit).configuration])[0] if starts else np.full(num_parameters, 0.5)
        strategy = self._start(mean)
        rows = encoding.encode(trial.configuration for trial in told)
        size = strategy.population_size
        for first in range(0, len(told) - size + 1, size):
            generation = sorted(range(first, first + size), key=lambda index: merit(told[index]))
            strategy.tell([(_padded(rows[index]), float(rank)) for rank, index in enumerate(generation)])
            if strategy.should_stop():
                strategy = self._start(rows[generation[0]])
        return strategy

    def _start(self, mean: Rows) -> Any:
        from cmaes import CMA, SepCMA

        strategy = CMA if len(mean) <= self.max_full else SepCMA
        padded = _padded(mean)
        return strategy(mean=padded, sigma=self.first_sigma, bounds=np.tile([0.0, 1.0], (len(padded), 1)), seed=0)


def _padded(row: Rows) -> Rows:
    """A copy of `row`; 0.5 is appended to a row with a single number, because the package cmaes needs two numbers."""
    return np.append(row, 0.5) if len(row) == 1 else row.copy()


SEARCHER = CmaEsSearcher()
