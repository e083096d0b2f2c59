"""HM3's policy on a made-up environment: paths of 6 steps of 12 actions each, scored by a table, with a deceptive
optimum.

The best path scores 1, and a path that has m of its steps in place m / 6. Beside it there are six lures, for which it
is 0.8 m / 6; the score is the largest of the seven. A lure is a local optimum that four exchanged steps do not leave,
and six of them attract more paths than the best one does. But on average over all other steps the steps of the best
path are worth most: what a policy learns from many paths at once, and what a search that keeps one path does not see.

Evaluations are counted until the best path is first scored: of different paths (the service scores equal ones once),
and for the policy of all episodes too. Of random search, which draws without repetition, the median is known: half of
all paths.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from search_spaces.parameters import Categorical, Parameters
from search_spaces.spaces.layer_paths import LayerPaths
from service.tune.searchers.base import Observation, ProposalContext
from service.tune.searchers.es import SEARCHER as ES
from workers.training.hm3.training import Training, TrainingOptions

NUM_STEPS, NUM_MODELS, NUM_LAYERS = 6, 3, 4
NUM_ACTIONS = NUM_MODELS * NUM_LAYERS
NUM_LURES, LURE = 6, 0.8

# Half of all paths: the median of random search.
RANDOM = NUM_ACTIONS**NUM_STEPS // 2

MAX_EPISODES, MAX_ES = 12_000, 3000

# For a search of thousands of episodes: larger iterations, and 2,560 episodes of exploration.
OPTIONS = TrainingOptions(episodes=64, explored=40, exploration=0.1)


class Toy:
    """The table of one seed: [num_actions] * num_steps, float32."""

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


def episodes(toy: Toy, *, seed: int, num_models: int, options: TrainingOptions = OPTIONS) -> Iterator[tuple[int, ...]]:
    """The paths that a policy plays in the environment, while it learns."""
    names = tuple(f"model{number}" for number in range(num_models))
    paths = LayerPaths(names, toy.table.shape[0] // num_models, toy.num_steps, toy.num_steps)
    training = Training(paths, options, seed=seed, preferences=((1.0,),))
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


def by_policy(seed: int, options: TrainingOptions = OPTIONS) -> tuple[int, int] | None:
    """Different paths that were scored, and episodes that were played, up to the best path; None: it was not found."""
    toy = Toy(seed)
    seen: set[tuple[int, ...]] = set()
    played = episodes(toy, seed=seed, num_models=NUM_MODELS, options=options)
    for number, path in enumerate(itertools.islice(played, MAX_EPISODES), start=1):
        seen.add(path)
        if path == toy.best:
            return len(seen), number
    return None


def by_evolution(seed: int, *, max_evaluations: int = MAX_ES) -> int | None:
    """Evaluations of the searcher `es` up to the best path; None: it was not found."""
    toy = Toy(seed)
    parameters = Parameters(Categorical(f"step{step}", tuple(range(NUM_ACTIONS))) for step in range(NUM_STEPS))
    trials: list[Observation] = []
    for number in range(max_evaluations):
        found = ES.advance(ProposalContext(parameters, number=number, seed=seed, observations=trials))
        path = tuple(found.values())
        if path == toy.best:
            return number + 1
        trials.append(Observation(found, 1.0, (1.0 - toy.score(path),), number=number, rung=0))
    return None


def run(num_seeds: int = 10) -> dict[str, Any]:
    policy = [by_policy(seed) for seed in range(num_seeds)]
    evolution = [by_evolution(seed) for seed in range(num_seeds)]
    paths = _median([found and found[0] for found in policy], MAX_EPISODES)
    episodes = _median([found and found[1] for found in policy], MAX_EPISODES)
    es = _median(evolution, MAX_ES)
    return {
        "seeds": list(range(num_seeds)),
        "policy": policy,
        "es": evolution,
        "random_median": RANDOM,
        "policy_median": {"paths": paths, "episodes": episodes},
        "es_median": es,
        "met": episodes <= RANDOM / 10 and episodes < es,
    }


def _median(found: Sequence[int | None], limit: int) -> float:
    """With those that were not found at the limit: a lower bound, if it is that."""
    return statistics.median(limit if count is None else count for count in found)


def show(result: dict[str, Any]) -> None:
    print("| seed | policy: different paths | policy: episodes | (1+1)-ES |\n|---|---|---|---|")
    for seed, policy, es in zip(result["seeds"], result["policy"], result["es"], strict=True):
        paths, episodes = policy or (f"> {MAX_EPISODES}",) * 2
        print(f"| {seed} | {paths} | {episodes} | {f'> {MAX_ES}' if es is None else es} |")
    median = result["policy_median"]
    es = result["es_median"]
    print(f"| median | {median['paths']:.0f} | {median['episodes']:.0f} | {'> ' * (es >= MAX_ES)}{es:.0f} |")
    print(f"random search, median: {result['random_median']}")
