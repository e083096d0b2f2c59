"""HM3's policy and other searches on the shipped family: three objectives, 86,400 samples (960 merges of 90 samples
each), real models.

    make bench ONLY=hm3
    HM3_PARTS=fronts,growth,ablations,pools,zero_shot,reuse HM3_METHODS=hm3,moead HM3_SEEDS=0-4 make bench ONLY=hm3

The coordinator, the searchers and the learner are the product's; one teacher-forced pass decides exact match in place
of engines (`one_pass`), and is first compared with a vLLM engine on paths. A search that is finished is not run again
(`search_runs`). Samples of proposed trials, losses and gradients count, those of sources and published recipes do not.

- `fronts`: hypervolumes of the front that the proposals of a search have on search data, on search data and on judge
  items (1,000 a skill, which no search scored), and paired differences from `hm3`. The policy is `conditioned` on 15
  preference vectors. `hm3`, `moead`, `de`, `es`, `grid` and `random` search the same paths; `hm3_merged` and
  `moead_merged` have one more model in the pool, merged by a preference vector. `de` and `es` have one objective, the
  mean, of 90 samples; their front is of the skills, on as many samples of each as the others'. `lfs_dis` is LFS with
  half of the samples, and DIS with the other half, whose fourth model is the best merge of LFS.
- `growth`: how the hypervolume on search data grows with the number of different paths, up to twice as many.
- `ablations`: the method with and without each of its parts.
- `pools`: PCB-Merging and consensus merging alone and in the pool, as in the authors' answers.
- `zero_shot`: paths proposed for preference vectors that the policy of `hm3` has not seen, against policies that were
  trained for these alone.
- `reuse`: 120 paths through the models of another family, whose skills are partly others: proposed by the policy that
  has learned on this one, with and without learning further, by a new policy, and at random.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Recipe
from search_spaces.searchers import SEARCHERS
from search_spaces.searchers.base import Feature
from service.tune.searchers.hm3 import SEARCHER
from tests.benchmarks.bench_search import done, front_of, judged, volume
from tests.benchmarks.one_pass_check import check_against_engine
from tests.benchmarks.search_families import FAMILIES, TrainedFamily
from tests.benchmarks.search_intervals import interval, volume_interval, volume_of
from tests.benchmarks.search_runs import CACHE, Bench, Run, SearchSpec, Trial
from workers.export.checkpoint import export
from workers.merging.bank import Bank as ModelBank
from workers.types import Placement

FAMILY = "shipped"
TRIALS, SAMPLES, NUM_SKILLS = 960, 30, 3
EPISODES = 30

PATHS: Mapping[str, Any] = {"kind": "hm3", "min_path_length": 6, "max_path_length": 10}
MERGED: Mapping[str, Any] = {**PATHS, "merged": {}}
POOLS: Mapping[str, Mapping[str, Any]] = {
    "PCB-Merging": {**PATHS, "merged": {"method": "pcb"}},
    "consensus merging": {**PATHS, "merged": {"method": "consensus_ta"}},
}
VECTORS: Mapping[str, Any] = {"preferences": {"lattice": 4}}
# A third of the policy's iterations explore less and less.
LEARNING = {"policy": "conditioned", "episodes": EPISODES, "explored": TRIALS // EPISODES // 3}
POLICY: Mapping[str, Any] = {"algorithm": "hm3", "hm3": LEARNING, **VECTORS}
GRADIENTS: Mapping[str, Any] = {"algorithm": "auto", "gradient": {"steps": 48, "points": 30}, **VECTORS}


@dataclass(frozen=True)
class Method:
    """A searcher's section and its space. With `num_objectives` 1 it searches the mean of the skills."""

    search: Mapping[str, Any]
    space: Mapping[str, Any] | None = None

    @property
    def goal(self) -> str:
        return "skills" if Feature.OBJECTIVES in SEARCHERS[self.search["algorithm"]].handles else "mean"

    def spec(self, name: str, seed: int, *, family: str = FAMILY, trials: int = TRIALS) -> SearchSpec:
        samples = SAMPLES if self.goal == "skills" else SAMPLES * NUM_SKILLS
        # A policy repeats itself, and paths that were scored before cost nothing.
        repeats = 2 if self.search["algorithm"] == "hm3" else 1
        search = {**self.search, "max_trials": repeats * trials}
        fidelity = {"scheduler": "none", "max_samples": samples}
        budget = trials * SAMPLES * NUM_SKILLS if self.search["algorithm"] in ("auto", "hm3") else None
        return SearchSpec(family, self.goal, name, seed, search, space=self.space, fidelity=fidelity, budget=budget)


METHODS: Mapping[str, Method] = {
    "hm3": Method(POLICY, PATHS),
    "moead": Method({"algorithm": "moead"}, PATHS),
    "de": Method({"algorithm": "de"}, PATHS),
    "es": Method({"algorithm": "es"}, PATHS),
    "grid": Method({"algorithm": "grid"}, PATHS),
    "random": Method({"algorithm": "random"}, PATHS),
    "hm3_merged": Method(POLICY, MERGED),
    "moead_merged": Method({"algorithm": "moead", **VECTORS}, MERGED),
    "dis": Method({"algorithm": "smac"}, {"kind": "dis", "preset": "d1m3r1"}),
    "lfs_dis": Method({"algorithm": "smac"}, {"kind": "lfs", "preset": "paper"}),
    "layerwise": Method(GRADIENTS),
}
GROWTH = ("hm3", "es", "random")
NUM_DIFFERENT = (120, 240, 480, 960, 1440, 1920)
ABLATIONS: Mapping[str, Method] = {
    "paths alone": METHODS["hm3"],
    "paths and merged models": METHODS["hm3_merged"],
    "paths, alignment: moments": Method(POLICY, {**PATHS, "alignment": "moments"}),
    "paths, alignment: mlp": Method(POLICY, {**PATHS, "alignment": "mlp"}),
    "paths and merged models, alignment: mlp": Method(POLICY, {**MERGED, "alignment": "mlp"}),
}
# A policy that knows models by the statistics of their layers, and those that begin with it elsewhere.
DESCRIBED: Mapping[str, Any] = {**POLICY, "hm3": {**LEARNING, "knows_models": False}}
OTHER_FAMILY, REUSE_TRIALS = "letters", 120
# Not in the lattice of fourths.
UNSEEN = ((0.45, 0.45, 0.1), (0.1, 0.3, 0.6))
NUM_SCORED = 16


@dataclass(frozen=True)
class Found:
    """The front of a search: its hypervolume on search data, and its merges judged [merges, skills, items]; `late` is
    the mean on search data of the last third of all different proposals, good or bad."""

    search: float
    judged: NDArray[np.bool_]
    late: float
    paths: int
    spent: int
    seconds: float


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    first, _, last = os.environ.get("HM3_SEEDS", "0-4").partition("-")
    seeds = range(int(first), int(last or first) + 1)
    parts: Mapping[str, Callable[[range], dict[str, Any]]] = {
        "fronts": fronts, "growth": growth, "ablations": ablations, "pools": pools, "zero_shot": zero_shot,
        "reuse": reuse,
    }  # fmt: skip
    asked = os.environ.get("HM3_PARTS", ",".join(parts)).split(",")
    check = check_against_engine(FAMILY, MERGED)
    return {"seeds": list(seeds), "against_engine": check, **{part: parts[part](seeds) for part in asked}}


# -- the parts ---------------------------------------------------------------------------------------------------------


def fronts(seeds: range) -> dict[str, Any]:
    names = os.environ.get("HM3_METHODS", ",".join(METHODS)).split(",")
    found = {name: [found_by(name, seed) for seed in seeds] for name in names}
    return {
        "rows": [row_of(name, each) for name, each in found.items()],
        "minus": differences(found, [own for own in ("hm3", "hm3_merged") if own in found]),
    }


def growth(seeds: range) -> dict[str, Any]:
    bench = Bench.of(FAMILY)
    found: dict[str, list[Found]] = {}
    volumes: dict[str, list[list[float]]] = {}
    for name in GROWTH:
        specs = [METHODS[name].spec(f"{name}-longer", seed, trials=2 * TRIALS) for seed in seeds]
        runs = [done(bench, spec) for spec in specs]
        runs = [with_skills(bench, each) if METHODS[name].goal == "mean" else each for each in runs]
        found[name] = [front_found(bench, each) for each in runs]
        different = [list({trial.digest: trial for trial in each.proposed().trials}.values()) for each in runs]
        volumes[name] = [[volume(front_of(each[:number])) for number in NUM_DIFFERENT] for each in different]
    return {
        "rows": [row_of(name, each) for name, each in found.items()],
        "minus": differences(found, ["hm3"]),
        "numbers": NUM_DIFFERENT,
        "volumes": volumes,
    }


def ablations(seeds: range) -> dict[str, Any]:
    bench = Bench.of(FAMILY)
    found = {
        name: [front_found(bench, done(bench, method.spec(spec_name(name), seed))) for seed in seeds]
        for name, method in ABLATIONS.items()
    }
    found["merged models alone"] = [merged_alone(bench, MERGED, seed) for seed in seeds]
    return {
        "rows": [row_of(name, each) for name, each in found.items()],
        "minus": differences(found, ["paths and merged models"]),
    }


def pools(seeds: range) -> dict[str, Any]:
    bench = Bench.of(FAMILY)
    found: dict[str, list[Found]] = {}
    minus: dict[str, Any] = {}
    for name, space in POOLS.items():
        with_it = f"paths, {name} in the pool"
        specs = [Method(POLICY, space).spec(f"hm3-{space['merged']['method']}", seed) for seed in seeds]
        pair = {
            with_it: [front_found(bench, done(bench, spec)) for spec in specs],
            f"{name} alone": [merged_alone(bench, space, seed) for seed in seeds],
        }
        found |= pair
        minus |= differences(pair, [with_it])
    return {"rows": [row_of(name, each) for name, each in found.items()], "minus": minus}


def zero_shot(seeds: range) -> dict[str, Any]:
    """Judge items, weighted by the preference: the first path that the policy proposes, the best of NUM_SCORED on
    search data, and the best of a search for this vector alone, with as many samples as all 15 vectors had."""
    bench = Bench.of(FAMILY)
    rows = []
    for vector in UNSEEN:
        weights = np.array(vector)[:, None]
        values: dict[str, list[NDArray[np.float64]]] = {"first": [], "best of 16": [], "trained for it": []}
        for seed in seeds:
            spec = METHODS["hm3"].spec("hm3", seed)
            done(bench, spec)
            preflight = bench.preflight(spec)
            configurations = SEARCHER.proposals(
                preflight.space.parameters,
                preference=vector,
                count=NUM_SCORED,
                seed=seed,
                setting=preflight.search_setting(num_baselines=len(preflight.baselines())),
                checkpoints=bench.policy(spec),
            )
            recipes = [preflight.space.to_recipe(each) for each in configurations]
            scores = [searched(bench, recipe, seed) @ vector for recipe in recipes]
            names = dict(zip(FAMILIES[FAMILY].skills, vector, strict=True))
            alone = {**METHODS["hm3"].search, "preferences": {"vectors": [names]}}
            trained = done(bench, Method(alone, PATHS).spec("hm3-for-" + "-".join(map(str, vector)), seed))
            best = max(trained.proposed().trials, key=lambda trial: np.array(list(trial.values.values())) @ vector)
            for name, merge in (
                ("first", bench.judged(recipes[0])),
                ("best of 16", bench.judged(recipes[int(np.argmax(scores))])),
                ("trained for it", judged(bench, trained, best)),
            ):
                values[name].append(merge * weights * NUM_SKILLS)
        stacked = {name: np.stack(each) for name, each in values.items()}
        rows.append({
            "vector": vector,
            **{name: by_seed(each) for name, each in stacked.items()},
            "minus": {n: interval([stacked[n]], [stacked["trained for it"]]) for n in ("first", "best of 16")},
        })  # fmt: skip
    return {"rows": rows}


def reuse(seeds: range) -> dict[str, Any]:
    bench, other = Bench.of(FAMILY), Bench.of(OTHER_FAMILY)
    trained = [Method(DESCRIBED, PATHS).spec("hm3-described", seed) for seed in seeds]
    for spec in trained:
        done(bench, spec)

    def learned(seed: int, **options: Any) -> Method:
        start = {"dir": str(bench.file(trained[seed - seeds[0]]).with_suffix("").resolve())}
        return Method({**DESCRIBED, "hm3": {**DESCRIBED["hm3"], "start": start, **options}}, PATHS)

    methods: Mapping[str, Callable[[int], Method]] = {
        "learned on the other, learning": learned,
        "learned on the other, as it is": lambda seed: learned(seed, learns=False),
        "new policy": lambda seed: Method(DESCRIBED, PATHS),
        "random": lambda seed: METHODS["random"],
    }
    found: dict[str, list[Found]] = {}
    for name, method in methods.items():
        short = f"reuse-{name.replace(' ', '-').replace(',', '')}"
        specs = [method(seed).spec(short, seed, family=OTHER_FAMILY, trials=REUSE_TRIALS) for seed in seeds]
        found[name] = [front_found(other, done(other, spec)) for spec in specs]
    return {"rows": [row_of(name, each) for name, each in found.items()], "minus": differences(found, list(found)[:2])}


# -- searches and what they found --------------------------------------------------------------------------------------


def spec_name(name: str) -> str:
    """Of a method, whose searches of both parts are the same."""
    return {"paths alone": "hm3", "paths and merged models": "hm3_merged"}.get(name, name.replace(" ", "-"))


def found_by(name: str, seed: int) -> Found:
    if name == "lfs_dis":
        return chained(seed)
    bench, method = Bench.of(FAMILY), METHODS[name]
    found = done(bench, method.spec(name, seed))
    return front_found(bench, with_skills(bench, found) if method.goal == "mean" else found)


def front_found(bench: Bench, found: Run) -> Found:
    proposed = found.proposed().trials
    front = front_of(proposed)
    merges = np.stack([judged(bench, found, trial) for trial in front])
    return Found(
        volume(front), merges, late_of(proposed), len({trial.digest for trial in proposed}), found.spent, found.seconds
    )


def with_skills(bench: Bench, found: Run) -> Run:
    """A search of the mean with its trials' values of each skill."""

    def scored(trial: Trial) -> Trial:
        values = searched(bench, bench.recipe(found.spec, trial), found.spec.seed)
        return replace(trial, values=dict(zip(bench.family.skills, values.tolist(), strict=True)))

    return replace(found, trials=tuple(scored(trial) for trial in found.proposed().trials))


def chained(seed: int) -> Found:
    """LFS, then DIS with the best merge of LFS as a fourth model; the front of both."""
    bench, lfs = Bench.of(FAMILY), METHODS["lfs_dis"]
    first = done(bench, lfs.spec("lfs", seed, trials=TRIALS // 2))
    best = max(first.proposed().trials, key=lambda trial: trial.mean)
    directory = CACHE / "chained" / best.digest[:16]
    if not directory.exists():
        export(bench.recipe(first.spec, best), ModelBank(bench.judge.family, Placement.MAPPED), directory)
    longer = Bench(ChainedFamily(f"{FAMILY}-lfs-{seed}", FAMILIES[FAMILY].skills, found=str(directory.resolve())))
    dis = replace(METHODS["dis"], space={"kind": "dis", "depth_granularity": 1})
    second = done(longer, dis.spec("dis", seed, family=longer.family.name, trials=TRIALS - TRIALS // 2))
    of_first = {trial.digest for trial in first.proposed().trials}
    front = front_of([
        *first.proposed().trials,
        *(replace(trial, number=trial.number + len(first.trials)) for trial in second.proposed().trials),
    ])  # fmt: skip
    merges = []
    for trial in front:
        if trial.digest in of_first:
            merges.append(judged(bench, first, trial))
        else:
            merges.append(judged(longer, second, trial))
    return Found(
        volume(front),
        np.stack(merges),
        late_of([*first.proposed().trials, *second.proposed().trials]),
        len(of_first | {trial.digest for trial in second.proposed().trials}),
        first.spent + second.spent,
        first.seconds + second.seconds,
    )


@dataclass(frozen=True)
class ChainedFamily(TrainedFamily):
    """The shipped family with a merge as a fourth expert."""

    found: str = ""

    def study(self, goal: str, **sections: Any) -> Any:
        root = self.directory()
        experts = {skill: str(root / "experts" / skill) for skill in self.skills}
        models = {"base": str(root / "base"), "experts": {**experts, "found": self.found}}
        return super().study(goal, models=models, **sections)


def differences(found: Mapping[str, Sequence[Found]], of: Sequence[str]) -> dict[str, Any]:
    """Of hypervolumes on judge items, between each of these and every other."""
    return {
        f"{own} minus {name}": volume_interval([[f.judged for f in found[own]]], [[f.judged for f in each]])
        for own in of
        for name, each in found.items()
        if name != own
    }


def merged_alone(bench: Bench, space: Mapping[str, Any], seed: int) -> Found:
    """The merged models of the 15 preference vectors in the pool of this space, without paths."""
    searched_in: Any = bench.preflight(Method(POLICY, space).spec("pool", seed)).space
    merged = {name: recipe for name, recipe in searched_in.pool.items() if name not in bench.family.skills}
    recipes = list({recipe.digest: recipe for recipe in merged.values()}.values())
    values = [searched(bench, recipe, seed) for recipe in recipes]
    trials = [
        Trial(number, "search", "", None, recipe.digest, dict(zip(bench.family.skills, each.tolist(), strict=True)), 0)
        for number, (recipe, each) in enumerate(zip(recipes, values, strict=True))
    ]
    front = front_of(trials)
    merges = np.stack([bench.judged(recipes[trial.number]) for trial in front])
    return Found(volume(front), merges, late_of(trials), len(recipes), len(recipes) * SAMPLES * NUM_SKILLS, 0.0)


def late_of(trials: Sequence[Trial]) -> float:
    different = list({trial.digest: trial for trial in trials}.values())
    return float(np.mean([trial.mean for trial in different[-max(len(different) // 3, 1) :]]))


def searched(bench: Bench, recipe: Recipe, seed: int) -> NDArray[np.float64]:
    """Of each skill the share of its first SAMPLES search samples in a search with this seed."""
    means: NDArray[np.float64] = bench.searched(recipe, seed, SAMPLES).mean(axis=1)
    return means


def by_seed(values: NDArray[np.float64]) -> list[float]:
    return [float(each) for each in values.mean(axis=(1, 2))]


def row_of(name: str, found: Sequence[Found]) -> dict[str, Any]:
    return {
        "name": name,
        "search": [each.search for each in found],
        "judge": [volume_of(each.judged) for each in found],
        "late": [each.late for each in found],
        "best_mean": [float(each.judged.mean(axis=(1, 2)).max()) for each in found],
        "merges": [len(each.judged) for each in found],
        "paths": [each.paths for each in found],
        "spent": [each.spent for each in found],
        "seconds": [each.seconds for each in found],
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    check = result["against_engine"]
    equal, seeds = check["compared"] - check["differing"], result["seeds"]
    print(f"seeds {seeds[0]} to {seeds[-1]}; vLLM scores {equal:,} of {check['compared']:,} samples alike")
    for part in ("fronts", "growth", "ablations", "pools", "reuse"):
        if part in result:
            _show_rows(part, result[part]["rows"])
            for name, volumes in result[part].get("volumes", {}).items():
                points = zip(result[part]["numbers"], np.mean(volumes, axis=0), strict=True)
                print(f"{name}, after different paths: " + ", ".join(f"{num} {mean:.3f}" for num, mean in points))
            for name, found in result[part]["minus"].items():
                print(f"{name}: {_interval(found)}")
    for row in result.get("zero_shot", {}).get("rows", ()):
        cells = [f"{name} {_spread(row[name])}" for name in ("first", "best of 16", "trained for it")]
        print(f"zero-shot {row['vector']}: {', '.join(cells)}")
        print("  minus trained: " + ", ".join(f"{name} {_interval(each)}" for name, each in row["minus"].items()))


def _show_rows(part: str, rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        f"{part}: hypervolume of fronts; best mean on judge items; mean of the last third of the different "
        "proposals on search data; merges of the front; different merges; seconds"
    )
    print("| search | search data | judge items | best mean | late mean | front | merges | samples' worth | s |")
    for row in rows:
        print(
            f"| {row['name']} | {_spread(row['search'])} | {_spread(row['judge'])} | {_spread(row['best_mean'])} | "
            f"{_spread(row['late'])} | {np.mean(row['merges']):.0f} | {np.mean(row['paths']):.0f} | "
            f"{np.mean(row['spent']):,.0f} | {np.mean(row['seconds']):.0f} |"
        )


def _spread(values: Sequence[float]) -> str:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{np.mean(values):.3f} ± {spread:.3f}"


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"
