"""Quality of fronts of made-up layer paths that `hm3` and other searchers find, by the share of mutants.

The paths are those of the shipped family: three models of 8 layers, 6 to 10 layers a path, `max_jump: 1`. A made-up
score takes the place of engines. Each objective has 30 search samples and 1,000 judge samples; a path answers a sample
right if the sum of the path's gains is above 0. Each layer has a gain of its own, and each pair of layers that follow
each other has one; a layer's gain also differs from sample to sample. As in a search, all paths have the same search
samples, so that the best of many paths is partly lucky on them.

Every search has 960 episodes. Hypervolumes after 480 and 960 are those of search samples, and that of the last front on
judge samples is given too. Every search of a seed is an arm that is kept.

    make bench ONLY=hm3_paths
    HM3_PATHS_ARMS=0,3 HM3_PATHS_SEEDS=0-1 make bench ONLY=hm3_paths

The numbers are places in `ARMS`. The table in docs has the seeds whose arms are on file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.objectives import hypervolume, non_dominated
from search_spaces.parameters import Parameters
from search_spaces.searchers import SEARCHERS
from search_spaces.searchers.base import Feature
from search_spaces.spaces.layer_paths import LayerPaths, Path
from search_spaces.study.search import Search
from service.store.steps import Step, UpdateRequest, step_of
from service.tune.searchers import get_searcher
from service.tune.searchers.base import LearningSearcher, Observation, ProposalContext, SearchSetting
from tests.benchmarks.arms import NotKept, kept
from tests.benchmarks.bench_search import seeds_of
from tests.benchmarks.code_digests import code_digest

BENCHMARK = "hm3_paths"
OBJECTIVES = ("math", "text", "lookup")
MODELS, LAYERS = OBJECTIVES, 8
PATHS = LayerPaths(MODELS, LAYERS, min_length=6, max_length=10, max_jump=1)
EPISODES, TRIALS, HALF = 30, 960, 480
SEARCHED, JUDGED = 30, 1000
SEEDS = range(5)

# 15 vectors of three objectives each; 12 of the first have a weight of 0, and none of the second.
LATTICE, INTERIOR = {"lattice": 4}, {"lattice": 7, "interior": True}
POLICY = {"policy": "conditioned", "episodes": EPISODES, "explored": TRIALS // EPISODES // 3}


def policy(vectors: Mapping[str, Any] = LATTICE, **options: Any) -> dict[str, Any]:
    return {"algorithm": "hm3", "preferences": vectors, "hm3": {**POLICY, **options}}


# The rows without which the table in docs is not made: the first of ARMS.
NUM_COMPARED = 4

# By the name of a row. The key `version` is no option of a study: it is the version of the searcher.
ARMS: Mapping[str, Mapping[str, Any]] = {
    "version 2: the policy alone": {**policy(), "version": 2},
    "`elite_share: 0.5`": policy(elite_share=0.5),
    "`random`": {"algorithm": "random"},
    "`es` (of the mean)": {"algorithm": "es"},
    "`elite_share: 1`": policy(elite_share=1.0),
    "`moead`": {"algorithm": "moead"},
    "`elite_share: 0.5`, Tchebycheff, interior vectors": policy(INTERIOR, elite_share=0.5, scalarisation="tchebycheff"),
    "`elite_share: 0`": policy(elite_share=0.0),
    "`elite_share: 0.75`": policy(elite_share=0.75),
    "`elite_share: 0.25`": policy(elite_share=0.25),
    "`elite_share: 0.5`, `archive: 1`": policy(elite_share=0.5, archive=1),
    "`elite_share: 0.5`, `restart_after: 3`": policy(elite_share=0.5, restart_after=3),
}


class MadeUpScores:
    """The made-up answers of all paths to the samples of three objectives, a function of the seed.

    Sums of gains begin at -2. The layers of an objective's own expert add 3.5 to it in their own order. Gains of other
    layers are normal with the mean 0.1 and the deviation 0.45; each sample changes them with the deviation 0.3, and its
    difficulty has the deviation 1. Layers that follow each other, but are not neighbours in one model, cost something.
    """

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng((seed, 0))
        size, items = PATHS.num_steps, SEARCHED + JUDGED
        self._layers = rng.normal(0.1, 0.45, (len(OBJECTIVES), size))
        for objective, gains in enumerate(self._layers):
            own = gains[objective * LAYERS : (objective + 1) * LAYERS]
            own += (3.5 - own.sum()) / LAYERS
        self._samples = rng.normal(0.0, 0.3, (len(OBJECTIVES), items, size))
        self._difficulties = rng.normal(0.0, 1.0, (len(OBJECTIVES), items))
        steps = np.arange(size)
        jumps = np.abs(steps[None] % LAYERS - steps[:, None] % LAYERS - 1)
        self._pairs = -np.abs(rng.normal(0.0, 0.3, (len(OBJECTIVES), size, size))) - 0.5 * jumps
        for step in steps[steps % LAYERS < LAYERS - 1]:
            self._pairs[:, step, step + 1] = 0.0
        self._known: dict[Path, tuple[NDArray[np.float64], NDArray[np.float64]]] = {}

    def of(self, path: Path) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The shares of each objective's search samples and of its judge samples that a path answers right."""
        if path not in self._known:
            steps = list(path)
            gains = self._layers[:, steps].sum(axis=1) + self._pairs[:, steps[:-1], steps[1:]].sum(axis=1)
            is_right = self._samples[:, :, steps].sum(axis=2) - self._difficulties + gains[:, None] - 2.0 > 0
            self._known[path] = is_right[:, :SEARCHED].mean(axis=1), is_right[:, SEARCHED:].mean(axis=1)
        return self._known[path]


def proposed(section: Mapping[str, Any], scores: MadeUpScores, *, seed: int, trials: int = TRIALS) -> list[Path]:
    """The paths that a searcher proposes if it knows all earlier results at each proposal.

    `section` is a study's section `search`; its key `version` is the version of the searcher.
    """
    given = {name: value for name, value in section.items() if name != "version"}
    options = Search.model_validate({**given, "max_trials": trials})
    name = options.algorithm
    searcher, num_objectives = get_searcher(name), _num_objectives(name)
    goals = OBJECTIVES[:num_objectives]
    vectors = () if options.preferences is None else options.preferences.weights(goals, seed=seed)
    setting = SearchSetting(
        objectives=goals,
        num_samples=dict.fromkeys(goals, SEARCHED),
        options=options,
        preferences=vectors,
        version=section.get("version", SEARCHERS[name].version),
    )
    parameters = Parameters(PATHS.parameters(), structure=PATHS)
    found: list[Path] = []
    observations: list[Observation] = []
    steps: list[Step] = []
    checkpoints: dict[int, bytes] = {}
    while len(found) < trials:
        context = ProposalContext(
            parameters,
            number=len(found),
            seed=seed,
            observations=observations,
            steps=steps,
            setting=setting,
            checkpoints=checkpoints,
        )
        answer = searcher.advance(context)
        if isinstance(answer, UpdateRequest):
            assert isinstance(searcher, LearningSearcher)
            result, content = searcher.learn(context, iteration=answer.iteration)
            checkpoints |= {} if content is None else {answer.iteration: content}
            steps.append(step_of(len(steps), len(found), answer, result))
            continue
        assert isinstance(answer, dict)
        found.append(PATHS.path(answer))
        values = scores.of(found[-1])[0]
        costs = tuple(1 - values) if num_objectives > 1 else (1 - float(values.mean()),)
        observations.append(Observation(answer, 1.0, costs, number=len(observations), rung=0))
    return found


def _num_objectives(name: str) -> int:
    """Number of objectives of a searcher: 1 if it can only search the mean, otherwise all."""
    return len(OBJECTIVES) if Feature.OBJECTIVES in SEARCHERS[name].handles else 1


def figures(section: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Figures of one search: hypervolumes, number of different paths, and mean value of the last third of episodes."""
    scores = MadeUpScores(seed)
    paths = proposed(section, scores, seed=seed)
    searched = np.array([scores.of(path)[0] for path in paths])
    judged = np.array([scores.of(path)[1] for path in paths])
    is_best = non_dominated([tuple(row) for row in 1 - searched])
    return {
        "half": volume(searched[:HALF]),
        "all": volume(searched),
        "judge": volume(judged[np.array(is_best)]),
        "last third": float(searched[-TRIALS // 3 :].mean()),
        "different": len(set(paths)),
    }


def volume(values: NDArray[np.float64]) -> float:
    return hypervolume([tuple(row) for row in 1 - values])


def run() -> dict[str, Any]:
    torch.set_num_threads(1)  # a seed's figure depends on rounding
    places = os.environ.get("HM3_PATHS_ARMS", ",".join(map(str, range(len(ARMS))))).split(",")
    names = [list(ARMS)[int(place)] for place in places]
    return {"rows": {name: [arm(name, seed) for seed in seeds_of("HM3_PATHS_SEEDS")] for name in names}}


def arm(name: str, seed: int) -> dict[str, Any]:
    section = ARMS[name]
    modules = [f"service.tune.searchers.{section['algorithm']}"]
    modules += ["workers.training.hm3.training"] if section["algorithm"] == "hm3" else []
    return kept(
        BENCHMARK,
        f"{re.sub(r'[^a-z0-9.]+', '-', name.lower()).strip('-')}-{seed}",
        {"seed": seed, "search": section, "trials": TRIALS, "samples": [SEARCHED, JUDGED]},
        lambda: figures(section, seed),
        depends=lambda: {"code": code_digest(*modules)},
    )


# -- tables ------------------------------------------------------------------------------------------------------------


def on_file() -> dict[str, list[dict[str, Any]]]:
    """The arms on file, for those seeds that all of the first NUM_COMPARED rows have.

    A row that lacks one of these seeds is left out.
    """

    def known(name: str) -> Iterator[dict[str, Any]]:
        with suppress(NotKept):
            for seed in SEEDS:
                yield arm(name, seed)

    found = {name: list(known(name)) for name in ARMS}
    num = min(len(found[name]) for name in list(ARMS)[:NUM_COMPARED])
    if num == 0:
        raise NotKept(f"{BENCHMARK}: one of the first {NUM_COMPARED} rows has no arm on file")
    return {name: arms[:num] for name, arms in found.items() if len(arms) >= num}


def table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    """Table of hypervolumes and proposals: means over seeds, sorted by the hypervolume on judge samples."""
    order = sorted(rows, key=lambda name: -mean(rows[name], "judge"))
    policy_alone = rows.get(next(iter(ARMS)), ())
    lines = [
        "| search | after 480 | after 960 | judge samples | minus version 2 | last third | different of 960 | seeds |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in order:
        pairs = zip(rows[name], policy_alone, strict=False)
        minus = [ours["judge"] - theirs["judge"] for ours, theirs in pairs]
        cells = [f"{mean(rows[name], key):.3f}" for key in ("half", "all", "judge")]
        cells += [f"{np.mean(minus):+.3f} ({min(minus):+.3f} to {max(minus):+.3f})" if any(minus) else ""]
        cells += [f"{mean(rows[name], 'last third'):.3f}", f"{mean(rows[name], 'different'):.0f}", str(len(rows[name]))]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def mean(arms: Sequence[Mapping[str, Any]], key: str) -> float:
    return float(np.mean([each[key] for each in arms]))


def show(result: dict[str, Any]) -> None:
    print(table(result["rows"]))


TABLES = {"elites": lambda: table(on_file())}
