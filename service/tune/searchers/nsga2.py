"""NSGA-II: a genetic algorithm that keeps the front and its spread. By Optuna.

Deb et al., IEEE TEC 6(2), 2002, with its simulated binary crossover and polynomial mutation. A generation is the next
trials that fill it, in their order; the generations are rebuilt for every proposal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.parameters import Parameters
from service.tune.searchers.base import Observation

__all__ = ["SEARCHER", "Nsga2Searcher"]


@dataclass(frozen=True)
class Nsga2Searcher:
    """For spaces without conditions. Choices are crossed uniformly, and mutate to any other."""

    population_size: int = 20

    def propose(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        from optuna.samplers import NSGAIISampler
        from optuna.samplers.nsgaii import PolynomialMutation, SBXCrossover

        from service.tune.searchers.optuna_study import propose

        def sampler_of(seed: int) -> NSGAIISampler:
            return NSGAIISampler(
                population_size=self.population_size,
                crossover=SBXCrossover(),
                mutation=PolynomialMutation(),
                seed=seed,
            )

        return propose(sampler_of, parameters, number=number, seed=seed, observations=observations, pending=pending)


SEARCHER = Nsga2Searcher()
