"""Episodes until HM3's policy finds the best path of a made-up environment with deceptive optima.

Paths have 6 steps of 12 actions each, and are scored by a table.

The best path scores 1, and a path with m of the best path's steps in place scores m / 6. There are also six lures: a
path with m steps of a lure in place scores 0.8 m / 6. A path's score is the largest of these seven. A lure is a local
optimum that four exchanged steps do not leave, and six of them attract more paths than the best one does. But on
average over all other steps, the best path's steps are worth most. A policy can learn this from many paths at once,
while a search that keeps a single path does not see it.

Evaluations of different paths are counted until the best path is first scored (the service scores equal paths once);
for the policy, all episodes are counted too. Random search draws without repetition, so its median is known: half of
all paths. Every run of a seed is an arm, whose result is kept.
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch

from search_spaces.parameters import Categorical, Parameters
from search_spaces.spaces.layer_paths import LayerPaths
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.es import SEARCHER as ES
from service.tune.searchers.hm3 import FIRST_GAMMA
from tests.benchmarks.arms import kept
from tests.benchmarks.code_digests import code_digest
from workers.training.hm3.actions import Action
from workers.training.hm3.learner import LearnerOptions
from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

NUM_STEPS, NUM_MODELS, NUM_LAYERS = 6, 3, 4
NUM_ACTIONS = NUM_MODELS * NUM_LAYERS
NUM_LURES, LURE = 6, 0.8

# Half of all paths: the median of random search.
RANDOM = NUM_ACTIONS**NUM_STEPS // 2

MAX_EPISODES, MAX_ES = 12_000, 3000

BENCHMARK = "hm3_toy"
SEEDS = range(10)

# For a search of thousands of episodes: larger iterations, and 2,560 episodes of exploration.
# Version 4 of the searcher learns as version 3 does where outcomes are not discounted.
OPTIONS = PolicyTrainingOptions(episodes=64, explored=40, exploration=0.1, version=3)
POLICIES: Mapping[str, PolicyTrainingOptions] = {
    "policy": OPTIONS,
    "policy, `exploration: 0.03`": replace(OPTIONS, exploration=0.03),
    "policy, 12 neighbours": replace(OPTIONS, k=NUM_ACTIONS),
    "policy, `action: categorical`": replace(OPTIONS, learner=LearnerOptions(action=Action.CATEGORICAL)),
    "policy of version 1": replace(OPTIONS, version=1, learner=LearnerOptions(gamma=FIRST_GAMMA)),
}


class Toy:
    """The score table of the environment for one seed: [num_actions] * num_steps, float32."""

    def __init__(
        self, seed: int, *, num_steps: int = NUM_STEPS, num_actions: int = NUM_ACTIONS, num_lures: int = NUM_LURES
    ) -> None:
        rng = np.random.default_rng(seed)
        # In no step do two of the paths have the same action.
        self.paths = np.array([rng.permutation(num_actions)[: num_lures + 1] for _ in range(num_steps)]).T
        self.best = tuple(int(action) for action in self.paths[0])
        self.table = np.zeros((num_actions,) * num_steps, dtype=np.float32)
        for path, top in zip(self.paths, (1.0, *[LURE] * num_lures), strict=True):
            matches = sum(
                (np.arange(num_actions) == action).reshape([-1 if axis == step else 1 for axis in range(num_steps)])
                for step, action in enumerate(path)
            )
            np.maximum(self.table, top * matches / num_steps, out=self.table)

    @property
    def num_steps(self) -> int:
        return self.table.ndim

    def score(self, path: Sequence[int]) -> float:
        return float(self.table[tuple(path)])


def episodes(
    toy: Toy, *, seed: int, num_models: int, options: PolicyTrainingOptions = OPTIONS
) -> Iterator[tuple[int, ...]]:
    """Yield the paths that a policy builds in the environment while it learns."""
    names = tuple(f"model{number}" for number in range(num_models))
    paths = LayerPaths(names, toy.table.shape[0] // num_models, toy.num_steps, toy.num_steps)
    training = PolicyTraining(paths, options, seed=seed, preferences=((1.0,),))
    scores: list[float] = []
    num_finished = 0
    for number in itertools.count():
        while num_finished < training.num_needed(number):
            scored = [[scores[each]] for each in training.numbers_in(num_finished)]
            training.learn(num_finished, torch.tensor(scored))
            num_finished += 1
        path = training.play(number).path
        scores.append(toy.score(path))
        yield path


def by_policy(seed: int, options: PolicyTrainingOptions = OPTIONS) -> dict[str, int | None]:
    """Numbers of different scored paths and of episodes until the policy finds the best path; None if it does not."""
    toy = Toy(seed)
    seen: set[tuple[int, ...]] = set()
    played = episodes(toy, seed=seed, num_models=NUM_MODELS, options=options)
    for number, path in enumerate(itertools.islice(played, MAX_EPISODES), start=1):
        seen.add(path)
        if path == toy.best:
            return {"paths": len(seen), "episodes": number}
    return {"paths": None, "episodes": None}


def by_evolution(seed: int) -> dict[str, int | None]:
    """Number of evaluations until the searcher `es` finds the best path; None if it does not."""
    toy = Toy(seed)
    parameters = Parameters(Categorical(f"step{step}", tuple(range(NUM_ACTIONS))) for step in range(NUM_STEPS))
    trials: list[Observation] = []
    for number in range(MAX_ES):
        found = ES.advance(ProposalContext(parameters, number=number, seed=seed, observations=trials))
        path = tuple(found.values())
        if path == toy.best:
            return {"evaluations": number + 1}
        trials.append(Observation(found, 1.0, (1.0 - toy.score(path),), number=number, rung=0))
    return {"evaluations": None}


def run() -> dict[str, Any]:
    torch.set_num_threads(1)  # a seed's figure depends on rounding
    toy = {"steps": NUM_STEPS, "models": NUM_MODELS, "layers": NUM_LAYERS, "lures": NUM_LURES, "lure": LURE}

    def arms(
        name: str, limit: int, measure: Callable[[int], dict[str, int | None]], *modules: str, **settings: Any
    ) -> list[dict[str, Any]]:
        file = re.sub(r"[^a-z0-9.]+", "-", name).strip("-")
        return [
            kept(
                BENCHMARK,
                f"{file}-{seed}",
                {"seed": seed, "toy": toy, "limit": limit, **settings},
                lambda seed=seed: measure(seed),  # type: ignore[misc]
                depends=lambda: {"code": code_digest(*modules)},
            )
            for seed in SEEDS
        ]

    policies = {
        name: arms(
            name,
            MAX_EPISODES,
            lambda seed, options=options: by_policy(seed, options),  # type: ignore[misc]
            "workers.training.hm3.training",
            options=asdict(options),
        )
        for name, options in POLICIES.items()
    }
    evolution = arms("es", MAX_ES, by_evolution, "service.tune.searchers.es")
    medians = {
        "policy": median([each["episodes"] for each in policies["policy"]], MAX_EPISODES),
        "es": median([each["evaluations"] for each in evolution], MAX_ES),
        "random": RANDOM,
    }
    return {
        "policies": policies,
        "es": evolution,
        "medians": medians,
        "met": medians["policy"] <= RANDOM / 10 and medians["policy"] < medians["es"],
    }


def median(found: Sequence[int | None], limit: int) -> float:
    """Median over seeds; a path that was not found counts as `limit`, so that the median is then a lower bound."""
    return statistics.median(limit if count is None else count for count in found)


def table(result: Mapping[str, Any]) -> str:
    """Table of the episodes or evaluations until the best path was found, by seed."""
    rows = {name: ([each["episodes"] for each in arms], MAX_EPISODES) for name, arms in result["policies"].items()}
    rows["`es`"] = [each["evaluations"] for each in result["es"]], MAX_ES
    lines = [f"| seed | {' | '.join(map(str, SEEDS))} | median |", f"|---|{'---|' * len(SEEDS)}---|"]
    for name, (counts, limit) in rows.items():
        middle = median(counts, limit)
        cells = [f"> {limit:,}" if count is None else f"{count:,}" for count in counts]
        lines.append(f"| {name} | {' | '.join(cells)} | {'> ' * (middle >= limit)}{middle:,.0f} |")
    return "\n".join(lines)


def show(result: dict[str, Any]) -> None:
    print(table(result))
    print(f"random search, median: {result['medians']['random']:,}; the policy must need a tenth, and fewer than es")


TABLES = {"found": lambda: table(run())}
