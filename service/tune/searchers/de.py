"""Differential evolution, DE/rand/1/bin: Storn and Price, J. Global Optimization 11, 1997.

The population changes with every trial: trial n competes for the place n modulo the population's size, and the member
at a place is the best trial that has competed for it. The result of a trial is its result at the highest rung that it
has reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.encoding import Encoding, Rows
from service.tune.searchers.history import by_trial, merit

__all__ = ["SEARCHER", "DifferentialEvolution"]

# Children drawn for a proposal; the first whose configuration is new is proposed.
_NUM_CHILDREN = 16


@dataclass(frozen=True)
class DifferentialEvolution:
    """The searcher by differential evolution, for one objective.

    The searcher changes the members of a population by the differences between other members, times `scale` (F in the
    paper). `population_size` is the number of members, and `crossover_rate` is CR in the paper. Choices and inactive
    parameters are treated as numbers in [0, 1], like numeric parameters.
    """

    population_size: int = 20
    scale: float = 0.5  # F in the paper
    crossover_rate: float = 0.9  # CR in the paper

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng = context.generator()
        trials = by_trial(context.observations)
        members = self._members(trials)
        if len(trials) < self.population_size or len(members) < 4:  # a child has a target and three others
            return context.sample_unseen(rng)
        encoding = Encoding(context.parameters)
        places = list(members)
        parents = (member.configuration for member in members.values())
        rows = encoding.fill(encoding.encode_parents(parents, version=context.setting.version), rng)
        place = context.number % self.population_size
        target = places.index(place) if place in members else int(rng.integers(len(places)))
        children = encoding.normalise(np.vstack([self._child(rows, target, rng) for _ in range(_NUM_CHILDREN)]))
        child = encoding.first_unknown(children, context.known_configurations())
        return context.sample_unseen(rng) if child is None else encoding.decode(child)

    def _members(self, trials: Sequence[Observation]) -> dict[int, Observation]:
        """The members of the population after all `trials`, keyed by their index in the population.

        Trial n competes for the index n modulo `population_size`. Trial n replaces the member at this index if trial n
        is at least as good. An index stays without a member until a trial for it has succeeded.
        """
        members: dict[int, Observation] = {}
        for trial in trials:
            place = trial.number % self.population_size
            if trial.costs is not None and (place not in members or merit(trial) <= merit(members[place])):
                members[place] = trial
        return members

    def _child(self, rows: Rows, target: int, rng: np.random.Generator) -> Rows:
        a, b, c = rng.choice(np.delete(np.arange(len(rows)), target), 3, replace=False)
        donor = rows[a] + self.scale * (rows[b] - rows[c])
        columns = np.arange(rows.shape[1])
        crosses = (rng.random(len(columns)) < self.crossover_rate) | (columns == rng.integers(len(columns)))
        return np.clip(np.where(crosses, donor, rows[target]), 0.0, 1.0)


SEARCHER = DifferentialEvolution()
