"""HM3's vision table at a small size: merges that its policy and other searchers find on the image family.

The authors' replies to reviewers have a table of CLIP ViT-B/32 and one of ViT-L/14: the accuracy of one merge on each
of eight tasks, by consensus merging, PCB-Merging, HM3 without PCB-Merging's model in its pool, and HM3 with it. Here
the models are those of `image_family` (seed 0; six encoder blocks, three experts), and other searchers are compared
as well. The protocol was fixed before a judge image was scored:

- Fixed merges: `expert`, the best expert, and `recipe`, the best of the published recipes that every study scores as
  baselines, both by the mean accuracy on 270 search images of each task; `consensus` and `pcb`, consensus merging and
  PCB-Merging with the coefficients that HM3's pool has for equal weights.
- Searches of paths of 5 to 7 blocks (`max_jump: 1`), with 480 merges' worth of 30 search images of each task: `hm3`,
  through the experts alone; `hm3_dare` and `hm3_pcb`, with one more model in the pool, merged by DARE-TIES or
  PCB-Merging for one of 15 preference vectors without a weight of 0; `moead_pcb`, `es_pcb` and `random_pcb`, other
  searchers with the pool of `hm3_pcb`. `es` has one objective, the mean of the tasks.
- `hm3_pcb_halving`, `moead_pcb_halving` and `random_pcb_halving`, successive halving with as many samples: 360 merges'
  worth of 30 images of each task, and the best 60 on 90. Their fronts are those on 90 images.
- A search's merge is the one of its front that is best on 270 search images, by the mean of the tasks. Each seed has
  its own search images.
- Judged on held-out images: the merge on 1,000 of MNIST, 1,000 of Fashion-MNIST and 500 digits, the whole front on 500
  of each. Baselines that a search scores do not count for it.

    make bench ONLY=hm3_images
    HM3_IMAGES_ARMS=hm3_pcb,random_pcb HM3_IMAGES_SEEDS=0 make bench ONLY=hm3_images

Each arm and seed is an arm in `tests/benchmarks/results/hm3_images`. Tables have the first seeds of which all arms are
on file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.objectives import hypervolume, non_dominated
from search_spaces.recipe import Merge, Recipe
from search_spaces.spaces.hm3 import MergedOptions
from search_spaces.study.engine import EngineOptions
from search_spaces.study.search import Search
from service.tune.searchers import get_searcher
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from tests.benchmarks.arms import NotKept, compared, files_alone, kept, packed, unpacked
from tests.benchmarks.bench_images import FULL, Arm, ImageBench, ImageFamily, difference
from tests.benchmarks.bench_search import seeds_of, shown_interval
from tests.benchmarks.image_family import TASKS
from tests.benchmarks.search_intervals import volume_interval, volume_of
from tests.benchmarks.search_runs import SearchSpec, code_of
from workers.serving.image_worker import ImageWorker

BENCHMARK = "hm3_images"
SEEDS = range(5)
TRIALS, SAMPLES, EPISODES = 480, 30, 30
# 360 * 30 + 360 / 6 * (90 - 30) images of each task are as many as 480 * 30.
HALVED_TRIALS, MORE_SAMPLES, ETA = 360, 90, 6
FRONT_IMAGES = 500  # of each task, on which fronts are judged
MAX_LAYERS = 7

PATHS: Mapping[str, Any] = {"kind": "hm3", "min_path_length": 5, "max_path_length": MAX_LAYERS}
VECTORS: Mapping[str, Any] = {"preferences": {"lattice": 7, "interior": True}}
# As in `bench_hm3`, a third of the policy's iterations explore less and less.
LEARNING = {"policy": "conditioned", "episodes": EPISODES, "explored": TRIALS // EPISODES // 3}
POLICY: Mapping[str, Any] = {"algorithm": "hm3", "hm3": LEARNING, **VECTORS}


def with_merged(method: str) -> dict[str, Any]:
    return {**PATHS, "merged": {"method": method}}


@dataclass(frozen=True)
class Method:
    """A searcher's section of the study file, its space, and its name in tables.

    If `is_halved` is True, successive halving scores the best merges on more samples after the search.
    """

    label: str
    search: Mapping[str, Any]
    space: Mapping[str, Any]
    is_halved: bool = False

    @property
    def num_trials(self) -> int:
        return HALVED_TRIALS if self.is_halved else TRIALS

    @property
    def fidelity(self) -> Mapping[str, Any]:
        if self.is_halved:
            return {"scheduler": "successive_halving", "rungs": [SAMPLES, MORE_SAMPLES], "eta": ETA}
        return {"scheduler": "none", "max_samples": SAMPLES}

    @property
    def budget(self) -> int:
        """The limit of samples, in which a search keeps those of one more trial at full budget for its next trial."""
        more = (MORE_SAMPLES - SAMPLES) * len(TASKS) if self.is_halved else 0
        return self.num_trials * SAMPLES * len(TASKS) + more


SEARCHES: Mapping[str, Method] = {
    "hm3": Method("`hm3`, paths through the experts", POLICY, PATHS),
    "hm3_dare": Method("`hm3`, DARE-TIES in the pool", POLICY, with_merged("dare_ties_l1")),
    "hm3_pcb": Method("`hm3`, PCB-Merging in the pool", POLICY, with_merged("pcb")),
    "moead_pcb": Method("`moead`, PCB-Merging in the pool", {"algorithm": "moead", **VECTORS}, with_merged("pcb")),
    "es_pcb": Method("`es` (of the mean), PCB-Merging in the pool", {"algorithm": "es", **VECTORS}, with_merged("pcb")),
    "random_pcb": Method("`random`, PCB-Merging in the pool", {"algorithm": "random", **VECTORS}, with_merged("pcb")),
}
SEARCHES = {
    **SEARCHES,
    **{
        f"{name}_halving": replace(
            SEARCHES[name], label=f"{SEARCHES[name].label}, the best on {MORE_SAMPLES}", is_halved=True
        )
        for name in ("hm3_pcb", "moead_pcb", "random_pcb")
    },
}
FIXED: Mapping[str, str] = {
    "expert": "best expert",
    "recipe": "best published recipe",
    "consensus": "consensus merging",
    "pcb": "PCB-Merging",
}
ARMS = (*FIXED, *SEARCHES)
OURS = "hm3_pcb"


def label(arm: str) -> str:
    return FIXED[arm] if arm in FIXED else SEARCHES[arm].label


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    names = os.environ.get("HM3_IMAGES_ARMS", ",".join(ARMS)).split(",")
    for seed in seeds_of("HM3_IMAGES_SEEDS"):
        for name in names:
            found = found_by(name, seed)
            print(
                f"seed {seed} {name}: {found.best.label}, held out {found.best.mean:.3f}", file=sys.stderr, flush=True
            )
    with files_alone():
        seeds = kept_seeds()
        arms = kept_arms(seeds) if seeds else {}
    # Differences of fronts that are not on file are computed now.
    return {
        "seeds": len(seeds),
        "tables": [table(seeds, arms) for table in (vision_table, fronts_table) if seeds],
    }


def show(result: dict[str, Any]) -> None:
    print(f"seeds with all arms: {result['seeds']}")
    for table in result["tables"]:
        print(f"\n{table}")


# -- searches and what they found --------------------------------------------------------------------------------------


class PathBench(ImageBench):
    """The searches of the image family, with an engine for paths of up to MAX_LAYERS blocks."""

    @cached_property
    def scorer(self) -> Any:
        return ImageWorker(
            self.judge.models.family, EngineOptions(dtype="float32", max_layers=MAX_LAYERS), device="cpu"
        )


@cache
def bench() -> PathBench:
    return PathBench(ImageFamily())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Found:
    """Result of an arm with one seed.

    - `best`: the arm's merge
    - `volume`: hypervolume of the arm's front on SAMPLES search images of each task
    - `front`: which of FRONT_IMAGES held-out images of each task each merge of the front has right, [merges, tasks,
      images]
    - `different`: number of different merges that the arm scored
    """

    best: Arm
    volume: float
    front: NDArray[np.bool_]
    different: int


def spec_of(name: str, seed: int) -> SearchSpec:
    method = SEARCHES[name]
    # A policy repeats itself, and paths that were scored before cost nothing.
    is_policy = method.search["algorithm"] == "hm3"
    return SearchSpec(
        "images",
        "skills",
        name,
        seed,
        {**method.search, "max_trials": 2 * method.num_trials if is_policy else method.num_trials},
        space=method.space,
        fidelity=method.fidelity,
        budget=method.budget if is_policy else None,
    )


def found_by(name: str, seed: int) -> Found:
    """Result of an arm with one seed, read from its file if there is one, else measured."""
    settings: dict[str, Any] = {"arm": name, "seed": seed, "tasks": list(TASKS), "samples": [SAMPLES, FULL]}
    if name in SEARCHES:
        settings["spec"] = asdict(spec_of(name, seed))

    def measure() -> dict[str, Any]:
        found = of_search(name, seed) if name in SEARCHES else of_fixed(name, seed)
        return {
            "label": found.best.label,
            "search": found.best.search,
            "spent": found.best.spent,
            "answers": {task: packed(each) for task, each in found.best.answers.items()},
            "volume": found.volume,
            "front": packed(found.front),
            "different": found.different,
        }

    def depends() -> dict[str, str]:
        algorithm = SEARCHES[name].search["algorithm"] if name in SEARCHES else "random"
        return {"family": ImageFamily().digest, f"code of {algorithm}": code_of(algorithm)}

    known = kept(BENCHMARK, f"{name}-{seed}", settings, measure, depends=depends)
    answers = {task: unpacked(each) for task, each in known["answers"].items()}
    best = Arm(known["label"], known["search"], known["spent"], answers)
    return Found(best, known["volume"], unpacked(known["front"]), known["different"])


def of_search(name: str, seed: int) -> Found:
    if SEARCHES[name].search["algorithm"] == "es":
        return of_mean(name, seed)
    spec = spec_of(name, seed)
    ran = bench().run(spec)
    merges = {
        trial.digest: (f"trial {trial.number}", bench().recipe(spec, trial), tuple(trial.values.values()))
        for trial in reversed(ran.proposed().trials)
    }
    climbed = (MORE_SAMPLES - SAMPLES) * len(TASKS) * len(merges) if SEARCHES[name].is_halved else 0
    num_scored = (ran.spent - climbed) // (SAMPLES * len(TASKS)) if SEARCHES[name].is_halved else len(merges)
    return chosen(list(merges.values())[::-1], seed, spent=ran.spent, num_scored=num_scored)


def of_mean(name: str, seed: int) -> Found:
    """A search of the mean of the tasks, by a searcher that has one objective.

    Tasks have heads of their own, so that no single task of a study has the images of all.
    """
    spec = spec_of(name, seed)
    # The space of a study of all tasks, whose preference vectors its merged models have.
    preflight = bench().preflight(
        SearchSpec(**{**vars(spec), "search": {**spec.search, "algorithm": "random"}, "budget": None})
    )
    options = Search.model_validate(dict(spec.search))
    searcher = get_searcher(options.algorithm)
    setting = SearchSetting(objectives=("mean",), num_samples={"mean": SAMPLES * len(TASKS)}, options=options)
    merges: dict[str, tuple[str, Recipe, tuple[float, ...]]] = {}
    observations: list[Observation] = []
    for number in range(TRIALS):
        context = ProposalContext(
            preflight.space.parameters, number=number, seed=seed, observations=observations, setting=setting
        )
        answer = searcher.advance(context)
        assert isinstance(answer, dict)
        recipe = preflight.space.to_recipe(answer)
        if recipe.digest not in merges:
            values = means(bench().answers(recipe, preflight.tasks.search, SAMPLES))
            merges[recipe.digest] = f"trial {number}", recipe, values
        cost = 1 - float(np.mean(merges[recipe.digest][2]))
        observations.append(Observation(answer, 1.0, (cost,), number=number, rung=0))
    return chosen(list(merges.values()), seed, spent=len(merges) * SAMPLES * len(TASKS))


def of_fixed(name: str, seed: int) -> Found:
    """The merge of a fixed arm, the best on FULL search images of each task where there are several."""
    known = baselines(seed)
    candidates = {
        "expert": [(text, recipe) for origin, text, recipe in known if origin == "source" and text != "base"],
        "recipe": [(text, recipe) for origin, text, recipe in known if origin == "published"],
        "consensus": [(FIXED["consensus"], uniform("consensus_ta"))],
        "pcb": [(FIXED["pcb"], uniform("pcb"))],
    }[name]
    tasks = bench().tasks(seed)
    scored = [(np.mean(means(bench().answers(recipe, tasks, FULL))), text, recipe) for text, recipe in candidates]
    _, text, recipe = max(scored, key=lambda each: each[0])
    values = means(bench().answers(recipe, tasks, SAMPLES))
    return chosen([(text, recipe, values)], seed, spent=len(candidates) * FULL * len(TASKS))


def baselines(seed: int) -> list[tuple[str, str, Recipe]]:
    found = bench().preflight(spec_of("random_pcb", seed)).baselines()
    return [(str(origin), text, recipe) for origin, text, recipe in found]


def uniform(method: str) -> Recipe:
    """The merge of all layers as HM3's pool has it for equal weights."""
    options: Any = {"method": method}
    merge: Merge = MergedOptions(**options).merge(dict.fromkeys(TASKS, 1 / len(TASKS)))
    return Recipe.uniform(
        merge,
        models={model.alias: model.fingerprint for model in bench().judge.models.family.models},
        base="base",
        num_layers=len(bench().scorer.engine.base_recipe.layers),
    )


def chosen(
    merges: Sequence[tuple[str, Recipe, tuple[float, ...]]], seed: int, *, spent: int, num_scored: int | None = None
) -> Found:
    """The front of different merges (name, recipe, values on search images), and its best one, judged.

    `num_scored` is the number of different merges that the search scored; None if these are all of them.
    """
    costs = [tuple(1 - value for value in values) for _, _, values in merges]
    on_front = [merge for merge, is_best in zip(merges, non_dominated(costs), strict=True) if is_best]
    tasks, judge = bench().tasks(seed), bench().judge.tasks.search
    if num_scored is not None:
        # The values are on more images than those of the other arms.
        few = (means(bench().answers(recipe, tasks, SAMPLES)) for _, recipe, _ in on_front)
        costs = [tuple(1 - value for value in values) for values in few]
    scored = [float(np.mean(means(bench().answers(recipe, tasks, FULL)))) for _, recipe, _ in on_front]
    place = int(np.argmax(scored))
    text, recipe, _ = on_front[place]
    front = [bench().answers(each, judge, FRONT_IMAGES) for _, each, _ in on_front]
    return Found(
        best=Arm(text, scored[place], spent, bench().answers(recipe, judge)),
        volume=hypervolume(costs),
        front=np.stack([np.stack([each[task] for task in TASKS]) for each in front]),
        different=len(merges) if num_scored is None else num_scored,
    )


def means(answers: Mapping[str, NDArray[np.bool_]]) -> tuple[float, ...]:
    return tuple(float(answers[task].mean()) for task in TASKS)


# -- tables ------------------------------------------------------------------------------------------------------------


def kept_seeds() -> range:
    """The seeds, from 0, of which all arms are on file. Called inside `files_alone`."""
    for seed in SEEDS:
        try:
            kept_arms(range(seed, seed + 1))
        except NotKept:
            return range(seed)
    return SEEDS


def kept_arms(seeds: range) -> dict[str, list[Found]]:
    """All arms with these seeds. Raises NotKept without a seed."""
    if not seeds:
        raise NotKept(f"{BENCHMARK}: no seed has all arms on file")
    return {name: [found_by(name, seed) for seed in seeds] for name in ARMS}


def vision_table(seeds: range, arms: Mapping[str, Sequence[Found]] | None = None) -> str:
    """Held-out accuracy of the merge of each arm on each task, means over seeds, and its difference from OURS.

    `arms` are those of `kept_arms` with these seeds, or None to read them.
    """
    arms = kept_arms(seeds) if arms is None else arms
    lines = [
        f"| merge (seeds: {len(seeds)}) | {' | '.join(TASKS)} | mean | `{OURS}` minus it | samples |",
        f"|---|{'---|' * len(TASKS)}---|---|---|",
    ]
    for name, found in arms.items():
        values = [f"{np.mean([each.best.values[task] for each in found]):.3f}" for task in TASKS]
        mean = f"{np.mean([each.best.mean for each in found]):.3f}"
        minus = ""
        if name != OURS:
            value, low, high = difference([each.best for each in arms[OURS]], [each.best for each in found])
            minus = f"{value:+.3f} [{low:+.3f}, {high:+.3f}]"
        spent = f"{np.mean([each.best.spent for each in found]):,.0f}"
        lines.append(f"| {label(name)} | {' | '.join(values)} | {mean} | {minus} | {spent} |")
    return "\n".join(lines)


def fronts_table(seeds: range, arms: Mapping[str, Sequence[Found]] | None = None) -> str:
    """Hypervolumes of fronts on search and held-out images, means over seeds, and their differences from OURS.

    `arms` are those of `kept_arms` with these seeds, or None to read them.
    """
    arms = kept_arms(seeds) if arms is None else arms
    lines = [
        f"| front (seeds: {len(seeds)}) | search images | held-out images | `{OURS}` minus it | merges | scored |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in arms.items():
        minus = ""
        if name != OURS:
            pair = [[each.front for each in arms[OURS]]], [[each.front for each in found]]
            minus = shown_interval(compared(BENCHMARK, f"fronts-{OURS}-{name}", volume_interval, *pair))
        cells = [f"{np.mean([each.volume for each in found]):.3f}"]
        cells += [f"{np.mean([volume_of(each.front) for each in found]):.3f}", minus]
        cells += [f"{np.mean([len(each.front) for each in found]):.0f}"]
        cells += [f"{np.mean([each.different for each in found]):.0f}"]
        lines.append(f"| {label(name)} | {' | '.join(cells)} |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "vision": lambda: vision_table(kept_seeds()),
    "fronts": lambda: fronts_table(kept_seeds()),
}
