"""SMAC: a random forest learns from all rungs, expected improvement at the full budget picks the next configuration.

Lindauer et al., SMAC3, JMLR 23(54), 2022 (forest, expected improvement, interleaved random proposals); Knowles, ParEGO,
IEEE TEC 10(1), 2006, and Su and Geiping, "Fine, I'll Merge It Myself" (2025), section 3.3.2 (several objectives). The
forest and the acquisition function are SMAC's. Its rungs, promotion and state are not used: the forest is trained for
every proposal, with the fidelity as one more feature.

SMAC's own maximiser is not used either. Its local search counts an inactive parameter as changed (NaN differs from NaN)
and skips every neighbour that changes more than one parameter. So in a conditional space it never leaves its starting
points, and it can never change a method, because that changes which parameters exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from search_spaces.preferences import augmented_chebyshev, simplex_lattice
from service.tune.searchers.base import Observation, ProposalContext, proposal_generator
from service.tune.searchers.encoding import Encoding, Rows
from service.tune.searchers.history import thinned, violation

__all__ = ["SEARCHER", "SmacSearcher"]


@dataclass(frozen=True)
class SmacSearcher:
    """The searcher SMAC, whose random forest learns from the results of all rungs.

    It proposes the candidate with the largest expected improvement. Candidates are `num_uniform` random configurations,
    `num_tied` in which all layers have the same values, and `num_mutants` random changes of each of `num_parents`
    scored configurations, those that the forest predicts to be best. A configuration that violates constraints counts
    as worse than all that do not, the more so the larger its violation. The defaults were chosen with
    tests/benchmarks/bench_searchers.py.
    """

    num_initial: int = 8  # configurations with results, baselines included, before the forest is used
    # Share of proposals drawn uniformly, so that no region is excluded forever. SMAC's share is 0.2; shares from 0 to
    # 0.2 made no difference beyond the spread between seeds.
    random_share: float = 0.1
    num_trees: int = 10
    max_weight_vectors: int = 100  # size of the lattice from which ParEGO draws a vector for each proposal
    # Candidates for the largest expected improvement. A further local search from the best of them made results worse:
    # the forest is accurate only near scored configurations.
    num_uniform: int = 1000
    # Tied merges use the same values in all layer and component groups. They are a small part of a space of many
    # groups, but most published recipes are tied, and few results are enough to learn which tied merges are good.
    num_tied: int = 500
    tied_share: float = 0.25  # share of proposals whose only candidates are tied merges
    num_parents: int = 10
    num_mutants: int = 50  # of each parent
    # Numbers in the table of observations and parameters. With more, fitting the forest and its predictions take more
    # than a second, and the forest learns from the best and the newest trials.
    max_numbers: int = 160_000
    mutation_rate: float = 0.1
    mutation_step: float = 0.15
    _last: list[Any] = field(default_factory=list, init=False, repr=False, compare=False)

    def advance(self, context: ProposalContext) -> dict[str, Any]:
        rng, observations = context.generator(), thinned(context, max_numbers=self.max_numbers).observations
        encoding = Encoding(context.parameters)
        rows = encoding.encode(observation.configuration for observation in observations)
        scored = {key for key, o in zip(encoding.keys(rows), observations, strict=True) if o.costs is not None}
        if len(scored) < self.num_initial or rng.random() < self.random_share:
            return context.sample_unseen(rng)
        fidelities = np.array([observation.fidelity for observation in observations])
        # The proposals of a batch share its first one's forest, and its draws for the forest.
        first = context.setting.first_in_batch(context.number)
        of_forest = rng if first == context.number else proposal_generator(seed=context.seed, number=first)
        if of_forest is not rng:
            of_forest.random()
        costs = self._scalarise(observations, of_forest)
        acquisition = self._acquisition(rows, fidelities, costs, seed=int(of_forest.integers(2**31)))
        candidates = self._maximise(encoding, acquisition, rows, rng)
        unknown = encoding.first_unknown(candidates, context.known_configurations())
        return encoding.decode(candidates[0] if unknown is None else unknown)

    def _acquisition(self, rows: Rows, fidelities: Rows, costs: Rows, *, seed: int) -> _Acquisition:
        """The acquisition function, fitted to encoded configurations `rows` with their fidelities and costs.

        If data and seed are those of the last call, its function is returned again.
        """
        data = (rows, fidelities, costs, np.array([seed]))
        if len(self._last) == 0 or not all(map(np.array_equal, data, self._last[0])):
            self._last[:] = [data, self._fit(rows, fidelities, costs, seed=seed)]
        acquisition: _Acquisition = self._last[1]
        return acquisition

    def _fit(self, rows: Rows, fidelities: Rows, costs: Rows, *, seed: int) -> _Acquisition:
        from smac.acquisition.function.expected_improvement import EI
        from smac.model.random_forest.random_forest import RandomForest

        forest = RandomForest(
            _columns(rows.shape[1] + 1),
            seed=seed,
            n_trees=self.num_trees,
            # As in SMAC's multi-fidelity facade. A tree that does not consider every column at every split can ignore
            # the fidelity, and then predicts a low rung's optimistic results for the full budget.
            ratio_features=1.0,
            min_samples_leaf=1,
            min_samples_split=2,
            max_leaf_nodes=None,  # with SMAC's 2^20 every tree spends 0.1 s on reserving nodes, whatever its data
            n_jobs=1,
        )
        forest.train(np.column_stack([rows, fidelities]), costs[:, np.newaxis])
        acquisition = _Acquisition(forest, EI())
        acquisition.function.update(model=forest, eta=float(acquisition.predicted_costs(rows).min()))
        return acquisition

    def _scalarise(self, observations: Sequence[Observation], rng: np.random.Generator) -> Rows:
        """One cost for each observation, from which the forest learns.

        Each objective is scaled to [0, 1] by its observed range; a failure has the worst cost. Several objectives are
        joined by the augmented Tchebycheff function (Su and Geiping 2025, section 3.3.2, equation 3), with a random
        weight vector. An observation that violates constraints has a cost above those of all that do not.
        """
        num_objectives = len(next(o.costs for o in observations if o.costs is not None))
        table = np.array([o.costs if o.costs is not None else (np.nan,) * num_objectives for o in observations])
        low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
        table = np.where(np.isnan(table), high, table)
        shares: Rows = (table - low) / np.where(high > low, high - low, 1.0)
        if num_objectives == 1:
            joined = shares[:, 0]
        else:
            lattice = simplex_lattice(num_objectives, max_vectors=self.max_weight_vectors)
            joined = augmented_chebyshev(shares, lattice[rng.integers(len(lattice))])
        excess = np.array([violation(observation) for observation in observations])
        if not excess.any():
            return joined
        worst = joined.max(where=excess == 0, initial=0.0)
        return np.where(excess > 0, worst + excess / excess.max(), joined)

    def _maximise(
        self, encoding: Encoding, acquisition: _Acquisition, observed: Rows, rng: np.random.Generator
    ) -> Rows:
        """Rows from which the next configuration is taken, by their expected improvement, the best first.

        They are random rows, and mutants of those of the rows `observed` that the forest predicts to be best. At
        random, with probability `tied_share`, they are only rows in which all parameters with the same role have the
        same value.
        """
        by_cost = np.argsort(acquisition.predicted_costs(observed), kind="stable")
        parents = np.repeat(observed[by_cost[: self.num_parents]], self.num_mutants, axis=0)
        mutants = encoding.mutate(parents, rng, rate=self.mutation_rate, step=self.mutation_step)
        tied = encoding.sample_tied(self.num_tied, rng)
        if len(tied) and rng.random() < self.tied_share:
            candidates = tied
        else:
            candidates = np.vstack([mutants, encoding.sample(self.num_uniform, rng), tied])
        best_first: Rows = candidates[np.argsort(-acquisition(candidates), kind="stable")]
        return best_first


@dataclass(frozen=True)
class _Acquisition:
    """The acquisition function: expected improvement at the full budget.

    Improvement is measured from the observed configuration that the forest predicts to be best.
    """

    forest: Any
    function: Any

    def __call__(self, rows: Rows) -> Rows:
        values: Rows = self.function._compute(_at_full_budget(rows))[:, 0]
        return values

    def predicted_costs(self, rows: Rows) -> Rows:
        means, _ = self.forest.predict_marginalized(_at_full_budget(rows))
        return np.asarray(means, dtype=np.float64).reshape(-1)


def _at_full_budget(rows: Rows) -> Rows:
    return np.column_stack([rows, np.ones(len(rows))])


@lru_cache(maxsize=4)
def _columns(num: int) -> Any:
    """A configuration space of `num` numbers in [0, 1] for SMAC's forest; the last number is the fidelity.

    The forest learns from rows that are encoded already, so it only needs to know how many columns there are.
    """
    from ConfigSpace import ConfigurationSpace

    return ConfigurationSpace({f"column{i}": (0.0, 1.0) for i in range(num)})


SEARCHER = SmacSearcher()
