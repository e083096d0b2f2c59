"""SMAC: a random forest learns from results, and expected improvement at the full budget picks the next configuration.

The forest and the acquisition function are SMAC's. SMAC's rungs, promotion and state are not used: the forest is
trained for every proposal. The forest learns from results at all rungs (numbers of samples), with the fidelity as one
more feature, or from the highest rung that has enough results, as in SMAC; the module `rung_choice` makes the choice.

SMAC's own maximiser is not used either. Its local search counts an inactive parameter as changed (NaN differs from NaN)
and skips every neighbour that changes more than one parameter. Therefore, in a conditional space, the local search
never leaves its starting points. The local search can also never change a method, because another method has other
parameters.

Sources:

- forest, expected improvement, interleaved random proposals: Lindauer et al., SMAC3, JMLR 23(54), 2022
- several objectives: Knowles, ParEGO, IEEE TEC 10(1), 2006, and Su and Geiping, "Fine, I'll Merge It Myself" (2025),
  section 3.3.2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from search_spaces.preferences import augmented_chebyshev, equal_preference, simplex_lattice
from service.store.steps import NoteRequest
from service.tune.searchers.base import Observation, ProposalContext, proposal_generator
from service.tune.searchers.encoding import Encoding, Rows
from service.tune.searchers.history import thinned, violation
from service.tune.searchers.rung_choice import RungChoice, choice_of, chosen, highest_rung

__all__ = ["SEARCHER", "SmacSearcher"]


@dataclass(frozen=True)
class SmacSearcher:
    """The searcher SMAC, a random forest with expected improvement; a study sets further options in `search.smac`.

    The searcher draws configurations at random until `num_initial` trials have results. Afterwards it proposes the
    candidate with the largest expected improvement. Candidates are `num_uniform` random configurations, `num_tied`
    configurations in which all layers have the same values, and `num_mutants` random changes of each of the
    `num_parents` scored configurations that the forest predicts to be best. A random change moves each parameter with
    the probability `mutation_rate`, by a step of standard deviation `mutation_step`, as a share of the parameter's
    range. For a share `tied_share` of the proposals, only candidates with the same values in all layers are used.

    The forest has `num_trees` trees. It learns from all results while (number of results) x (number of parameters) is
    at most `max_numbers`, and otherwise from the results of the best and the newest trials. With several objectives, a
    weight vector is drawn for each proposal, from at most `max_weight_vectors` vectors. A configuration that violates
    constraints counts as worse than all configurations that meet them; a larger violation counts as worse than a
    smaller one. The defaults were chosen with tests/benchmarks/bench_searchers.py.
    """

    # Configurations with results, baselines included, before the forest is used; with `highest_budget`, at one rung.
    num_initial: int = 8
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

    def advance(self, context: ProposalContext) -> NoteRequest | dict[str, Any]:
        rng, observations = context.generator(), thinned(context, max_numbers=self.max_numbers).observations
        options = context.setting.options.smac
        encoding = Encoding(context.parameters)
        rows = encoding.encode(observation.configuration for observation in observations)
        scored = {key for key, o in zip(encoding.keys(rows), observations, strict=True) if o.costs is not None}
        if len(scored) < self.num_initial or rng.random() < options.random_share:
            return context.sample_unseen(rng)
        fidelities = np.array([observation.fidelity for observation in observations])
        choice = self._choice(context, observations, rows, fidelities)
        if isinstance(choice, NoteRequest):
            return choice
        is_used = np.ones(len(rows), dtype=bool)
        if choice == "highest_budget":
            has_result = np.array([observation.costs is not None for observation in observations])
            highest = highest_rung(fidelities, has_result, min_results=self.num_initial)
            if highest is None:
                return context.sample_unseen(rng)
            is_used = (fidelities == highest) | ~has_result
            fidelities = np.ones(len(rows))
        # All proposals of a batch use the forest of its first proposal, made with the same random draws.
        first = context.setting.first_in_batch(context.number)
        of_forest = rng if first == context.number else proposal_generator(seed=context.seed, number=first)
        if of_forest is not rng:
            of_forest.random()
        used = [observation for observation, each in zip(observations, is_used, strict=True) if each]
        costs = self._scalarise(used, of_forest)
        acquisition = self._acquisition(
            rows[is_used],
            fidelities[is_used],
            _log_scaled(costs) if options.acquisition == "log_ei" else costs,
            is_log=options.acquisition == "log_ei",
            seed=int(of_forest.integers(2**31)),
        )
        candidates = self._maximise(encoding, acquisition, rows, rng)
        unknown = encoding.first_unknown(candidates, context.known_configurations())
        return encoding.decode(candidates[0] if unknown is None else unknown)

    def _choice(
        self, context: ProposalContext, observations: Sequence[Observation], rows: Rows, fidelities: Rows
    ) -> RungChoice | NoteRequest:
        """Choose whether the forest learns from results at all rungs or only at the full budget (all samples).

        A rung is a number of samples at which trials are compared. The option `search.smac.surrogate` may fix the
        choice. Returns the choice, or a request to store a new choice. If the option is "all_rungs" (the default), or
        all results are at one rung, the choice is "all_rungs" and nothing is stored. `rows` and `fidelities` are the
        encoded configurations and the fidelities (shares of the full budget) of the `observations`. `context` has the
        options and the stored choices.
        """
        surrogate, last = context.setting.options.smac.surrogate, chosen(context.steps)
        if surrogate == "all_rungs" or len(np.unique(fidelities)) == 1:
            return "all_rungs"
        if surrogate == "highest_budget":
            text = f"smac learns from the highest rung with enough results: search.smac.surrogate={surrogate}"
            return surrogate if last is not None else NoteRequest(label=text, decision=f"{surrogate} 0")

        def predict(rows: Rows, fidelities: Rows, costs: Rows, further: Rows) -> Rows:
            return self._fit(rows, fidelities, costs, is_log=False, seed=context.seed).predicted_costs(further)

        scored = np.array([observation.costs is not None for observation in observations])
        results = [observation for observation in observations if observation.costs is not None]
        note = choice_of(
            np.array([observation.number for observation in results]),
            rows[scored],
            fidelities[scored],
            self._scalarise(results),
            last=None if last is None else last[1],
            predict=predict,
        )
        return note or (last or ("all_rungs", 0))[0]

    def _acquisition(self, rows: Rows, fidelities: Rows, costs: Rows, *, is_log: bool, seed: int) -> _Acquisition:
        """The acquisition function, fitted to encoded configurations `rows` with their fidelities and costs.

        The fidelity of a result is the share of all samples on which it was computed. With `is_log`, the costs are
        logarithms. If data and seed are the same as in the last call, the function of that call is returned again.
        """
        data = (rows, fidelities, costs, np.array([seed, is_log]))
        if len(self._last) == 0 or not all(map(np.array_equal, data, self._last[0])):
            self._last[:] = [data, self._fit(rows, fidelities, costs, is_log=is_log, seed=seed)]
        acquisition: _Acquisition = self._last[1]
        return acquisition

    def _fit(self, rows: Rows, fidelities: Rows, costs: Rows, *, is_log: bool, seed: int) -> _Acquisition:
        from smac.acquisition.function.expected_improvement import EI
        from smac.model.random_forest.random_forest import RandomForest

        forest = RandomForest(
            _columns(rows.shape[1] + 1),
            log_y=is_log,  # the mean of a leaf is that of the costs, not of their logarithms
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
        acquisition = _Acquisition(forest, EI(log=is_log))
        acquisition.function.update(model=forest, eta=float(acquisition.predicted_costs(rows).min()))
        return acquisition

    def _scalarise(self, observations: Sequence[Observation], rng: np.random.Generator | None = None) -> Rows:
        """One cost for each observation (result of a trial at a number of samples), from which the forest learns.

        Each objective is scaled to [0, 1] by its observed range; a failure has the worst cost. Several objectives are
        combined by the augmented Tchebycheff function (Su and Geiping 2025, section 3.3.2, equation 3), with a weight
        vector drawn with `rng`, or with equal weights if `rng` is None. An observation that violates constraints has a
        cost above the costs of all observations that meet the constraints.
        """
        num_objectives = len(next(o.costs for o in observations if o.costs is not None))
        table = np.array([o.costs if o.costs is not None else (np.nan,) * num_objectives for o in observations])
        low, high = np.nanmin(table, axis=0), np.nanmax(table, axis=0)
        table = np.where(np.isnan(table), high, table)
        shares: Rows = (table - low) / np.where(high > low, high - low, 1.0)
        if num_objectives == 1:
            joined = shares[:, 0]
        else:
            weights = np.array(equal_preference(num_objectives))
            if rng is not None:
                lattice = simplex_lattice(num_objectives, max_vectors=self.max_weight_vectors)
                weights = lattice[rng.integers(len(lattice))]
            joined = augmented_chebyshev(shares, weights)
        excess = np.array([violation(observation) for observation in observations])
        if not excess.any():
            return joined
        worst = joined.max(where=excess == 0, initial=0.0)
        return np.where(excess > 0, worst + excess / excess.max(), joined)

    def _maximise(
        self, encoding: Encoding, acquisition: _Acquisition, observed: Rows, rng: np.random.Generator
    ) -> Rows:
        """Candidates for the next configuration, as encoded rows, sorted by expected improvement, the largest first.

        The candidates are random rows, drawn with `rng`, and random changes (mutants) of the rows of `observed` that
        the forest predicts to be best. `acquisition` computes the expected improvement of rows, and `encoding` draws
        and changes them. With probability `tied_share`, only rows are used in which all parameters with the same role
        (a meaning that parameters of different layers share) have the same value.
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
    """The acquisition function of SMAC: a call returns the expected improvement of each of several configurations.

    `forest` is the random forest that predicts costs, and `function` is SMAC's object that computes expected
    improvement from it. Predictions are for costs on all samples. Improvement is measured from the observed
    configuration that the forest predicts to be best.
    """

    forest: Any
    function: Any

    def __call__(self, rows: Rows) -> Rows:
        values: Rows = self.function._compute(_at_full_budget(rows))[:, 0]
        return values

    def predicted_costs(self, rows: Rows) -> Rows:
        means, _ = self.forest.predict_marginalized(_at_full_budget(rows))
        return np.asarray(means, dtype=np.float64).reshape(-1)


def _log_scaled(costs: Rows) -> Rows:
    """Logarithms of costs after scaling to (0, 1], as SMAC does it (`RunHistoryLogScaledEncoder`).

    The scaling is linear: it maps the largest cost to 1, and maps best - (p5 - best) to 0, where p5 is the 5th
    percentile of the costs. This lower end is below the best cost, so that the logarithm of the best cost is finite.
    """
    best = costs.min()
    low = 2 * best - np.percentile(costs, 5) - 1e-10
    logarithms: Rows = np.log((costs - low) / (costs.max() - low))
    return logarithms


def _at_full_budget(rows: Rows) -> Rows:
    return np.column_stack([rows, np.ones(len(rows))])


@lru_cache(maxsize=4)
def _columns(num: int) -> Any:
    """A ConfigSpace space of `num` numbers in [0, 1], one for each input column of SMAC's forest.

    The last column is the fidelity, the share of all samples on which a result was computed. SMAC needs such a space to
    make a forest, although the rows that the forest learns from are encoded already.
    """
    from ConfigSpace import ConfigurationSpace

    return ConfigurationSpace({f"column{i}": (0.0, 1.0) for i in range(num)})


SEARCHER = SmacSearcher()
