"""Quality of the merges that each searcher finds on families with made-up accuracies, and time of a proposal.

The search spaces are the product's; only the scores are made up (`MadeUpFamily`): three skills, each with an expert,
whose layers and components matter to each skill by amounts drawn at random, and experts that disturb each other. A
score on n samples is a draw of n Bernoulli trials, nested across rungs, so searchers see the noise of a real rung. All
searchers run the same brackets, know the same baselines, and see results with the same lag.

The tables give the true mean accuracy of the proposed trial that looks best at the full budget, and the true
hypervolume of all proposed trials at the full budget. Every searcher that can search a space searches it. For SMAC,
`rung_surrogates` compares what its forest may learn from.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.baselines import all_baselines
from search_spaces.fidelity import bracket_plan, hyperband_brackets
from search_spaces.objectives import Candidate, hypervolume, promotion_order
from search_spaces.recipe import COMPONENTS, Merge, Recipe
from search_spaces.searchers import SEARCHERS as DECLARED
from search_spaces.searchers import unsupported
from search_spaces.spaces.base import SearchSpace
from search_spaces.study.search import Search as Options
from search_spaces.study.search import SmacOptions
from service.store.steps import NoteRequest, NoteResult, Step, step_of
from service.tune.searchers import SEARCHERS
from service.tune.searchers.base import Observation, ProposalContext, Searcher, SearchSetting
from service.tune.searchers.smac import SmacSearcher
from tests.benchmarks import rung_surrogates
from tests.search_spaces.spaces import families

EXPERTS = ("math", "text", "lookup")
FINGERPRINTS = {alias: alias for alias in ("base", *EXPERTS)}
NUM_LAYERS = 12
LAG = 4  # proposal n knows first-rung results of its bracket up to trial n - LAG


class MadeUpFamily:
    """A family of models with made-up accuracies of merges.

    A skill grows, with diminishing returns, with its expert's share in each layer's component, and suffers from the
    square of what the other experts put there; both times weights that differ between skills and places.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        shape = (len(EXPERTS), NUM_LAYERS, len(COMPONENTS))
        # Neighbouring layers matter alike, as in real models: smooth noise along the depth.
        rough = rng.normal(size=(len(EXPERTS), NUM_LAYERS + 4, len(COMPONENTS)))
        smooth = np.stack([rough[:, i : i + NUM_LAYERS] for i in range(5)]).mean(axis=0)
        self._gains = _shares(np.exp(2.0 * smooth) * np.exp(0.3 * rng.normal(size=shape)))
        self._losses = _shares(np.exp(2.0 * smooth[::-1]) * np.exp(0.3 * rng.normal(size=shape)))

    def accuracies(self, recipe: Recipe) -> tuple[float, ...]:
        shares = np.array(
            [[_shares_of_experts(layer.component(c)) for c in COMPONENTS] for layer in recipe.layers]
        )  # [num_layers, num_components, num_experts]
        values = []
        for skill in range(len(EXPERTS)):
            own = shares[:, :, skill]
            others = (shares**2).sum(axis=2) - own**2
            gain = (self._gains[skill] * (1 - (1 - own) ** 2)).sum()
            loss = (self._losses[skill] * others).sum()
            values.append(float(np.clip(0.35 + 0.55 * gain - 0.45 * loss, 0.02, 0.98)))
        return tuple(values)


def _shares(weights: NDArray[np.float64]) -> NDArray[np.float64]:
    shares: NDArray[np.float64] = weights / weights.sum(axis=(1, 2), keepdims=True)
    return shares


def _shares_of_experts(merge: Merge) -> list[float]:
    """Share of each expert's task vector in a merge."""
    numbers: Mapping[str, float]
    models = [source.model for source in merge.sources]
    match merge.method:
        case "passthrough":
            numbers = {models[0]: 1.0}
        case "linear":
            numbers = dict(zip(models, merge.per_source("weight"), strict=True))
        case "slerp":
            numbers = dict(zip(models, (1 - merge.number("t"), merge.number("t")), strict=True))
        case "ties":  # trimming at k near 0.4 keeps most of the gain
            kept = 0.85 - 0.6 * (merge.number("k") - 0.4) ** 2
            numbers = dict.fromkeys(models, merge.number("lambda") * kept)
        case _:
            numbers = dict(zip(models, merge.per_source("lambda"), strict=True))
    return [numbers.get(expert, 0.0) for expert in EXPERTS]


@dataclass(frozen=True)
class Scenario:
    name: str
    space: Mapping[str, Any]
    rungs: tuple[int, ...]
    num_trials: int
    num_objectives: int  # 3: one per skill; 1: their mean

    def build_space(self) -> SearchSpace:
        family = replace(families.models(EXPERTS, NUM_LAYERS), fingerprints=FINGERPRINTS)
        built: SearchSpace = families.space(family=family, **self.space)
        return built

    def searchers(self) -> tuple[str, ...]:
        """Searchers that can run this search; random search is the first."""
        parameters = self.build_space().parameters
        able = (
            name
            for name in SEARCHERS
            if DECLARED[name].proposes_at_once
            and DECLARED[name].alias_of is None
            and not unsupported(name, parameters, num_objectives=self.num_objectives)
            and len(parameters) <= MAX_PARAMETERS.get(name, len(parameters))
        )
        return tuple(sorted(able, key=lambda name: name != "random"))


# Beyond this many a proposal takes seconds.
MAX_PARAMETERS = {"gp": 30}

LFS = {"kind": "lfs"}
BY_GROUP = {"kind": "layerwise", "granularity": "layer_group"}
BY_COMPONENT = {"kind": "layerwise", "granularity": "component"}
RUNGS = (30, 90, 270)
ALWAYS_FOREST = SearchSetting(options=Options(smac=SmacOptions(random_share=0.0)))

SCENARIOS = (
    Scenario("4x3 groups, hyperband, 3 objectives", LFS, RUNGS, 60, 3),
    Scenario("4x3 groups, hyperband, 1 objective", LFS, RUNGS, 60, 1),
    Scenario("4x1 groups, full budget, 1 objective", {**LFS, "component_groups": 1}, (270,), 60, 1),
    Scenario("4x3 groups, hyperband, 200 trials, 3 objectives", LFS, RUNGS, 200, 3),
    Scenario("layerwise by group, full budget, 1 objective", BY_GROUP, (270,), 60, 1),
    Scenario("layerwise by group, full budget, 3 objectives", BY_GROUP, (270,), 60, 3),
    Scenario("layerwise by component, full budget, 1 objective", BY_COMPONENT, (270,), 60, 1),
    Scenario("layerwise by component, full budget, 3 objectives", BY_COMPONENT, (270,), 60, 3),
)


@dataclass
class Search:
    """One search: its proposals and results, in the driver's order."""

    scenario: Scenario
    searcher: Searcher
    seed: int
    setting: SearchSetting = field(default_factory=SearchSetting)
    known: list[Observation] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    ask_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.space = self.scenario.build_space()
        self.family = MadeUpFamily(self.seed)

    def run(self) -> tuple[float, float]:
        """The true mean accuracy of the chosen trial, and the true hypervolume of the full-budget trials."""
        last = len(self.scenario.rungs) - 1
        self.known = [
            self.observe(c, last, number=number, is_proposed=False) for number, c in enumerate(told(self.space))
        ]
        numbers = itertools.count(len(self.known))
        full_budget: list[Mapping[str, Any]] = []
        for bracket in bracket_plan(hyperband_brackets(len(self.scenario.rungs), 3), self.scenario.num_trials):
            first: list[Observation] = []
            for i in range(bracket.num_configurations):
                past = max(0, i + 1 - LAG)
                pending = [observation.configuration for observation in first[past:]]
                number = next(numbers)
                configuration = self.ask(number, self.known + first[:past], pending)
                first.append(self.observe(configuration, bracket.first_rung, number=number))
            self.known += first
            seen = first
            for rung in range(bracket.first_rung + 1, bracket.num_rungs):
                candidates = [Candidate(i, observation.costs) for i, observation in enumerate(seen)]
                order = promotion_order(candidates)
                promoted = [seen[i] for i in order[: bracket.num_promoted(len(seen))]]
                seen = [self.observe(o.configuration, rung, number=o.number) for o in promoted]
                self.known += seen
            full_budget += [observation.configuration for observation in seen]
        chosen = max(full_budget, key=lambda c: float(np.mean(self._observed(c, self.scenario.rungs[-1]))))
        truths = [self.family.accuracies(self.space.to_recipe(c)) for c in full_budget]
        volume = hypervolume([tuple(1 - value for value in truth) for truth in truths])
        return float(np.mean(self.family.accuracies(self.space.to_recipe(chosen)))), volume

    def ask(
        self, number: int, observations: list[Observation], pending: Sequence[Mapping[str, Any]] = ()
    ) -> dict[str, Any]:
        start = time.process_time()
        while True:
            answer = self.searcher.advance(
                ProposalContext(
                    self.space.parameters,
                    number=number,
                    seed=self.seed,
                    observations=observations,
                    pending=pending,
                    steps=self.steps,
                    setting=self.setting,
                )
            )
            if isinstance(answer, dict):
                self.ask_s.append(time.process_time() - start)
                return answer
            assert isinstance(answer, NoteRequest)
            self.steps.append(step_of(len(self.steps), number, answer, NoteResult()))

    def observe(
        self, configuration: Mapping[str, Any], rung: int, *, number: int, is_proposed: bool = True
    ) -> Observation:
        values = self._observed(configuration, self.scenario.rungs[rung])
        costs = 1 - values if self.scenario.num_objectives > 1 else [1 - values.mean()]
        fidelity = self.scenario.rungs[rung] / self.scenario.rungs[-1]
        return Observation(
            configuration,
            fidelity,
            tuple(float(cost) for cost in costs),
            number=number,
            rung=rung,
            is_proposed=is_proposed,
        )

    def _observed(self, configuration: Mapping[str, Any], num_samples: int) -> NDArray[np.float64]:
        recipe = self.space.to_recipe(configuration)
        rng = np.random.default_rng(int(recipe.digest[:12], 16) + self.seed)
        draws = rng.random((len(EXPERTS), self.scenario.rungs[-1]))
        is_right = draws < np.array(self.family.accuracies(recipe))[:, None]
        means: NDArray[np.float64] = is_right[:, :num_samples].mean(axis=1)
        return means


def told(space: SearchSpace) -> list[dict[str, Any]]:
    """The baselines that the space contains, as configurations."""
    recipes = all_baselines(base="base", experts=EXPERTS, fingerprints=FINGERPRINTS, num_layers=NUM_LAYERS)
    found = (space.from_recipe(known.recipe) for known in recipes)
    return [configuration for configuration in found if configuration is not None]


def run(num_seeds: int = 10) -> dict[str, Any]:
    return {
        "ask": [ask_times(2, 1), ask_times(4, 1), ask_times(4, 3), ask_times(8, 3)],
        "surrogates": [
            row for num in (68, 136) for row in rung_surrogates.compare(num_seeds=num_seeds, num_trials=num)
        ],
        "searches": [compare(scenario, range(num_seeds)) for scenario in SCENARIOS],
    }


def ask_times(
    layer_groups: int, component_groups: int, *, num_observations: int = 200, num_proposals: int = 20
) -> dict[str, Any]:
    """Processor seconds of one proposal by `smac` with many results known.

    The first proposal, which loads the libraries, is given apart.
    """
    options = {**LFS, "layer_groups": layer_groups, "component_groups": component_groups}
    search = Search(Scenario("ask", options, RUNGS, 0, 3), SmacSearcher(), seed=0, setting=ALWAYS_FOREST)
    rng = np.random.default_rng(0)
    known = [search.observe(search.space.parameters.sample(rng), i % 3, number=i) for i in range(num_observations)]
    for number in range(num_proposals + 1):
        search.ask(number, known)
    first, *others = search.ask_s
    return {
        "parameters": len(search.space.parameters),
        "observations": num_observations,
        "first_s": first,
        "mean_s": statistics.fmean(others),
        "worst_s": max(others),
    }


def compare(scenario: Scenario, seeds: range) -> dict[str, Any]:
    """True accuracy of the chosen trial, and hypervolume of the full-budget trials, by searcher and seed.

    The table also has the true accuracy of the best baseline, by seed.
    """
    outcomes = {
        name: [Search(scenario, SEARCHERS[name], seed).run() for seed in seeds] for name in scenario.searchers()
    }
    space = scenario.build_space()
    recipes = [space.to_recipe(configuration) for configuration in told(space)]
    return {
        "scenario": scenario.name,
        "seeds": list(seeds),
        "best_told": [
            max(float(np.mean(MadeUpFamily(seed).accuracies(recipe))) for recipe in recipes) for seed in seeds
        ],
        "searchers": {
            name: {
                "accuracy": [accuracy for accuracy, _ in runs],
                "hypervolume": [volume for _, volume in runs],
            }
            for name, runs in outcomes.items()
        },
    }


def show(result: dict[str, Any]) -> None:
    print("| parameters | results known | first proposal, s | mean, s | worst, s |\n|---|---|---|---|---|")
    for row in result["ask"]:
        times = " | ".join(f"{row[key]:.2f}" for key in ("first_s", "mean_s", "worst_s"))
        print(f"| {row['parameters']} | {row['observations']} | {times} |")
    print()
    rung_surrogates.show(result["surrogates"])
    print("\n| search | searcher | accuracy of the chosen trial | hypervolume | better than random |")
    print("|---|---|---|---|---|")
    for row in result["searches"]:
        best = f"{statistics.fmean(row['best_told']):.3f} ± {statistics.stdev(row['best_told']):.3f}"
        print(f"| {row['scenario']} | best baseline | {best} | | |")
        for name, found in row["searchers"].items():
            drawn = row["searchers"]["random"]["accuracy"]
            wins = sum(a > b for a, b in zip(found["accuracy"], drawn, strict=True))
            share = f"{wins} of {len(row['seeds'])}" if name != "random" else "-"
            cells = " | ".join(
                f"{statistics.fmean(found[key]):.3f} ± {statistics.stdev(found[key]):.3f}"
                for key in ("accuracy", "hypervolume")
            )
            print(f"| {row['scenario']} | {name} | {cells} | {share} |")
