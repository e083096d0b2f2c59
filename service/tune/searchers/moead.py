"""MOEA/D-DE, an evolutionary searcher for several objectives: Li and Zhang, IEEE TEC 13(2), 2009.

Each member of the population combines the objectives with its own weights (Tchebycheff function). A child replaces
members that it improves on, mostly members with similar weights. Trial n is a child of member n modulo the population's
size. The trials are replayed in their order for every proposal, each with its result at the highest rung that it has
reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.preferences import SMALLEST_WEIGHT, simplex_lattice
from service.tune.searchers.base import Observation, ProposalContext, proposal_generator
from service.tune.searchers.encoding import Encoding, Rows
from service.tune.searchers.history import by_trial, violation

__all__ = ["SEARCHER", "MoeadSearcher"]

# Children drawn for a proposal; the first whose configuration is new is proposed.
_NUM_CHILDREN = 16


@dataclass(frozen=True)
class MoeadSearcher:
    """The searcher MOEA/D-DE (Li and Zhang, 2009), for several objectives.

    - `population_size`: the number of members
    - `crossover_rate`, `scale`: CR and F in the paper
    - `mutation_rate`, `mutation_index`: the probability that a parameter mutates, and eta of the polynomial mutation
    - `num_neighbours`, `neighbour_share`, `max_replaced`: T, delta and n_r in the paper

    The size of the population and the rates of crossover and mutation are the values that papers on merging use for
    MOEA/D-DE as a baseline. Choices and inactive parameters are treated as numbers in [0, 1], like numeric parameters.
    """

    population_size: int = 30
    crossover_rate: float = 0.9  # CR
    mutation_rate: float = 0.1  # the probability that a parameter mutates
    mutation_index: float = 20.0  # eta of the polynomial mutation
    scale: float = 0.5  # F
    num_neighbours: int = 6  # T: a fifth of the population
    neighbour_share: float = 0.9  # delta: the probability that parents, and members that are replaced, are neighbours
    max_replaced: int = 2  # n_r: how many members a child replaces

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng = context.generator()
        scored = [trial for trial in by_trial(context.observations) if trial.costs is not None]
        if len(scored) < self.population_size:
            return context.sample_unseen(rng)
        members, neighbours = self._replay(scored, seed=context.seed)
        encoding = Encoding(context.parameters)
        parents = (member.configuration for member in members)
        rows = encoding.fill(encoding.encode_parents(parents, version=context.setting.version), rng)
        place = context.number % self.population_size
        children = [self._child(rows, place, neighbours[place], rng) for _ in range(_NUM_CHILDREN)]
        child = encoding.first_unknown(encoding.normalise(np.vstack(children)), context.known_configurations())
        return context.sample_unseen(rng) if child is None else encoding.decode(child)

    def _replay(self, scored: Sequence[Observation], *, seed: int) -> tuple[list[Observation], NDArray[np.intp]]:
        """The population after all trials `scored`: the member at each index, and the neighbours of each index.

        Each index belongs to one vector of weights of the objectives. Its neighbours [population_size, num_neighbours]
        are the indices with the most similar weights, the nearest first; each index is its own first neighbour. `seed`
        determines the random choices of which members a trial replaces.
        """
        costs = np.array([trial.costs for trial in scored])
        lattice = simplex_lattice(costs.shape[1], max_vectors=self.population_size)
        weights = np.maximum(np.resize(lattice, (self.population_size, costs.shape[1])), SMALLEST_WEIGHT)
        distances = np.linalg.norm(weights[:, None] - weights[None], axis=2)
        neighbours = np.argsort(distances, axis=1, kind="stable")[:, : self.num_neighbours]
        combined = (weights * (costs - costs.min(axis=0))[:, None]).max(axis=2)  # [trial, place]
        excess = np.array([violation(trial) for trial in scored])
        every = np.arange(self.population_size)
        members = np.zeros(self.population_size, dtype=np.intp)
        for index, trial in enumerate(scored):
            # Baselines belong to no place, nor do the draws that the population starts from.
            is_child = trial.is_proposed and index >= self.population_size
            rng = proposal_generator(seed=seed, number=trial.number)
            is_near = is_child and rng.random() < self.neighbour_share
            places = rng.permutation(neighbours[trial.number % self.population_size] if is_near else every)
            present = members[places]
            is_cheaper = combined[index, places] < combined[present, places]
            is_better = (excess[index] < excess[present]) | ((excess[index] == excess[present]) & is_cheaper)
            members[places[is_better][: self.max_replaced if is_child else None]] = index
        return [scored[index] for index in members.tolist()], neighbours

    def _child(self, rows: Rows, place: int, near: NDArray[np.intp], rng: np.random.Generator) -> Rows:
        pool = near if rng.random() < self.neighbour_share else np.arange(len(rows))
        a, b = rng.choice(pool[pool != place], 2, replace=False)
        donor = rows[place] + self.scale * (rows[a] - rows[b])
        child = np.where(rng.random(rows.shape[1]) < self.crossover_rate, donor, rows[place])
        mutates = rng.random(rows.shape[1]) < self.mutation_rate
        return np.clip(np.where(mutates, child + self._mutation(rows.shape[1], rng), child), 0.0, 1.0)

    def _mutation(self, num: int, rng: np.random.Generator) -> Rows:
        """Random changes of `num` parameters by polynomial mutation, as shares of the parameters' ranges.

        The changes are drawn with `rng`. The formula is equation 3 of Li and Zhang (2009).
        """
        u = rng.random(num)
        power = 1 / (self.mutation_index + 1)
        return np.where(u < 0.5, (2 * u) ** power - 1, 1 - (2 - 2 * u) ** power)


SEARCHER = MoeadSearcher()
