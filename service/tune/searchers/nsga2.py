"""Optuna's NSGA-II: a genetic algorithm that keeps the front and its spread.

Deb et al., IEEE TEC 6(2), 2002, with its simulated binary crossover and polynomial mutation. A generation is filled by
the next trials in order; the generations are rebuilt for every proposal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from service.tune.searchers.base import ProposalContext

__all__ = ["SEARCHER", "NsgaSearcher"]


@dataclass(frozen=True)
class NsgaSearcher:
    """The searchers NSGA-II and NSGA-III, for spaces without conditions; `sampler` says which of the two is used.

    A generation has `population_size` trials. In long searches, Optuna's sampler receives the results of the best and
    the newest trials only: so few that (number of results) x (number of parameters) is at most `max_numbers`. A child
    takes each choice from either parent with equal probability. If a choice mutates, it is replaced by any other
    option.
    """

    sampler: Literal["NSGAIISampler", "NSGAIIISampler"]
    population_size: int = 20
    max_numbers: int = 160_000  # numbers in the table of observations and parameters: as in SMAC

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        import optuna.samplers
        from optuna.samplers.nsgaii import PolynomialMutation, SBXCrossover

        from service.tune.searchers.optuna_study import propose

        def sampler_of(seed: int) -> optuna.samplers.BaseSampler:
            kind = getattr(optuna.samplers, self.sampler)
            sampler: optuna.samplers.BaseSampler = kind(
                population_size=self.population_size,
                crossover=SBXCrossover(),
                mutation=PolynomialMutation(),
                seed=seed,
            )
            return sampler

        size = self.population_size
        return propose(sampler_of, context, num_initial=size, max_numbers=self.max_numbers, group=size)


SEARCHER = NsgaSearcher("NSGAIISampler")
