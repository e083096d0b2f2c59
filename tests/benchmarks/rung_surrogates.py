"""Value of three surrogates, by kind of rungs: a forest of all rungs, a forest of the highest budget, and a choice.

The objective is made up: the squared distance to a point of eight numbers, with noise that samples share across rungs.
Scores below the full budget measure the distance to another point: the same one (rungs that inform), one drawn anew
(unrelated), or the mirrored one (rungs that mislead).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.fidelity import bracket_plan, hyperband_brackets
from search_spaces.objectives import Candidate, promotion_order
from search_spaces.parameters import Float, Parameters
from search_spaces.study.search import Search, SmacOptions
from service.store.steps import NoteRequest, NoteResult, Step, step_of
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.encoding import Encoding
from service.tune.searchers.loss_comparison import rank_correlation
from service.tune.searchers.rung_choice import chosen, highest_rung
from service.tune.searchers.smac import SmacSearcher

SURROGATES = ("all_rungs", "highest_budget", "auto")
KINDS = ("inform", "unrelated", "mislead")
PARAMETERS = Parameters([Float(f"x{number}", 0.0, 1.0) for number in range(8)])
RUNGS = (30, 90, 270)
NUM_TOLD = 8  # random configurations that are scored at the full budget before the search, as baselines are
NOISE = 0.4  # standard deviation of one sample; true costs have one of 0.09 over the space
LAG = 4


@dataclass
class Made:
    """A search in the made-up space of PARAMETERS, with its results and steps so far."""

    kind: str
    seed: int
    surrogate: str
    known: list[Observation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.seed, KINDS.index(self.kind)])
        self._best = rng.uniform(0.2, 0.8, len(PARAMETERS))
        drawn = rng.uniform(0.2, 0.8, len(PARAMETERS))
        self._low = {"inform": self._best, "unrelated": drawn, "mislead": 1 - self._best}[self.kind]
        self._setting = SearchSetting(
            objectives=("made",),
            num_baselines=NUM_TOLD,
            options=Search(smac=SmacOptions(surrogate=self.surrogate)),  # type: ignore[arg-type]
        )
        told = [PARAMETERS.sample(rng) for _ in range(NUM_TOLD)]
        self.known = [self.observe(c, 2, number=n, is_proposed=False) for n, c in enumerate(told)]

    def cost(self, configuration: Mapping[str, Any]) -> float:
        """The true cost of a configuration at the full budget."""
        return self._distance(configuration, self._best)

    def observe(
        self, configuration: Mapping[str, Any], rung: int, *, number: int, is_proposed: bool = True
    ) -> Observation:
        values = np.array(list(configuration.values()))
        noise = np.random.default_rng([self.seed, *(values * 1e6).astype(int)]).normal(size=RUNGS[-1])
        cost = (
            self._distance(configuration, self._best if rung == 2 else self._low) + NOISE * noise[: RUNGS[rung]].mean()
        )
        fidelity = RUNGS[rung] / RUNGS[-1]
        return Observation(configuration, fidelity, (float(cost),), number=number, rung=rung, is_proposed=is_proposed)

    def run(self, num_trials: int, *, is_random: bool = False) -> float:
        """Search by Hyperband; return the true cost of the proposed trial that looks best at the full budget."""
        numbers = itertools.count(NUM_TOLD)
        rng = np.random.default_rng([self.seed, 99])
        for bracket in bracket_plan(hyperband_brackets(len(RUNGS), 3), num_trials):
            seen: list[Observation] = []
            for index in range(bracket.num_configurations):
                past = max(0, index + 1 - LAG)
                pending = [observation.configuration for observation in seen[past:]]
                number = next(numbers)
                drawn = PARAMETERS.sample(rng) if is_random else self._ask(number, self.known + seen[:past], pending)
                seen.append(self.observe(drawn, bracket.first_rung, number=number))
            self.known += seen
            for rung in range(bracket.first_rung + 1, bracket.num_rungs):
                order = promotion_order([Candidate(i, observation.costs) for i, observation in enumerate(seen)])
                promoted = [seen[i] for i in order[: bracket.num_promoted(len(seen))]]
                seen = [self.observe(o.configuration, rung, number=o.number) for o in promoted]
                self.known += seen
        full = [o for o in self.known if o.is_proposed and o.fidelity == 1.0]
        return self.cost(min(full, key=lambda o: o.costs or (np.inf,)).configuration)

    def correlation(self, num_configurations: int = 500) -> float:
        """Rank correlation of a forest's full-budget predictions and the true costs, over random configurations.

        The forest learns from the results so far as the searcher's would.
        """
        searcher, encoding = SmacSearcher(), Encoding(PARAMETERS)
        rows = encoding.encode(observation.configuration for observation in self.known)
        fidelities = np.array([observation.fidelity for observation in self.known])
        costs = np.array([observation.costs for observation in self.known])[:, 0]
        self._ask(max(o.number for o in self.known) + 1, self.known)
        choice = chosen(self.steps)
        is_used = np.ones(len(rows), dtype=bool)
        if choice is not None and choice[0] == "highest_budget":
            is_used = fidelities == highest_rung(fidelities, is_used, min_results=searcher.num_initial)
        forest = searcher._fit(rows[is_used], fidelities[is_used], costs[is_used], is_log=False, seed=0)
        rng = np.random.default_rng(1)
        further = [PARAMETERS.sample(rng) for _ in range(num_configurations)]
        truths = [self.cost(configuration) for configuration in further]
        return rank_correlation(forest.predicted_costs(encoding.encode(further)).tolist(), truths)

    def _ask(
        self, number: int, known: Sequence[Observation], pending: Sequence[Mapping[str, Any]] = ()
    ) -> Mapping[str, Any]:
        while True:
            answer = SmacSearcher().advance(
                ProposalContext(
                    PARAMETERS,
                    number=number,
                    seed=self.seed,
                    observations=known,
                    pending=pending,
                    steps=self.steps,
                    setting=self._setting,
                )
            )
            if not isinstance(answer, NoteRequest):
                return answer
            self.steps.append(step_of(len(self.steps), number, answer, NoteResult()))

    def _distance(self, configuration: Mapping[str, Any], point: NDArray[np.float64]) -> float:
        return float(3 * np.mean((np.array(list(configuration.values())) - point) ** 2))


def compare(*, num_seeds: int, num_trials: int) -> list[dict[str, Any]]:
    """Figures for each kind of rungs and surrogate, by seed.

    - `correlation`: rank correlation of predictions, from the results of a random search
    - `cost`: true cost of the trial that a search with the surrogate chooses
    - `choice`: what the surrogate learned from at the end
    """
    found = []
    for kind, surrogate in itertools.product(KINDS, SURROGATES):
        correlations, costs, choices = [], [], []
        for seed in range(num_seeds):
            drawn = Made(kind, seed, surrogate)
            drawn.run(num_trials, is_random=True)
            correlations.append(drawn.correlation())
            search = Made(kind, seed, surrogate)
            costs.append(search.run(num_trials))
            choice = chosen(search.steps)
            choices.append("all_rungs" if choice is None else choice[0])
        found.append(
            {
                "rungs": kind,
                "surrogate": surrogate,
                "trials": num_trials,
                "correlation": correlations,
                "cost": costs,
                "choice": choices,
            }
        )
    return found


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        "| lower rungs | trials | surrogate | rank correlation of predictions | true cost of the chosen trial "
        "| learns from at the end |"
    )
    print("|---|---|---|---|---|---|")
    for row in rows:
        cells = " | ".join(
            f"{statistics.fmean(row[key]):.{digits}f} ± {statistics.stdev(row[key]):.{digits}f}"
            for key, digits in (("correlation", 2), ("cost", 3))
        )
        full = sum(choice == "highest_budget" for choice in row["choice"])
        print(
            f"| {row['rungs']} | {row['trials']} | `{row['surrogate']}` | {cells} | "
            f"full budget in {full} of {len(row['choice'])} |"
        )
