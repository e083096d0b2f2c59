"""Quality of the fronts that HM3's policy and other searchers find on the shipped family with equal numbers of samples.

Three objectives, 86,400 samples (960 merges of 90 samples each), real models.

    make bench ONLY=hm3
    HM3_PARTS=fronts,growth,ablations,pools,zero_shot,reuse HM3_METHODS=hm3,moead HM3_SEEDS=0-4 make bench ONLY=hm3

The coordinator, the searchers and the learner are the product's; one teacher-forced pass decides exact match in place
of engines (`one_pass`), and is first compared with a vLLM engine on paths. Every search is an arm that is kept in
`tests/benchmarks/results/hm3`; the tables of fronts have the methods whose arms are all on file. The samples of
proposed trials, losses and gradients count; those of sources and published recipes do not.

- `fronts`: hypervolumes of the front of a search's proposals, chosen on search data, on search data and on judge items
  (1,000 for each skill, which no search scored); paired differences from `hm3`. The policy is `conditioned` on 15
  preference vectors without a weight of 0. `hm3`, `moead`, `de`, `es`, `grid` and `random` search the same paths;
  `hm3_merged` to `random_merged` have one more model in the pool, merged by DARE-TIES with the weights of one of the
  same 15 vectors; with `_halving`, successive halving scores the best sixth of 720 merges on 90 samples of each skill,
  and with `_60` half as many merges are scored on 60. `de` and `es` have one objective, the mean of 90 samples of all
  skills; their front is that of the skills on the same samples. `lfs_dis` is LFS with half of the samples, and DIS with
  the other half, whose fourth model is the best merge of LFS.
- `growth`: how the hypervolume on search data grows with the number of different paths, up to twice as many.
- `ablations`: the method with and without each of its parts, among them mutants without a policy.
- `pools`: task arithmetic, PCB-Merging and consensus merging, alone and as models of the pool, as in the authors'
  answers.
- `zero_shot`: paths that the policy of `hm3` proposes for new preference vectors, compared with policies that were
  trained for only these vectors.
- `reuse`: 120 paths through the models of another family with partly other skills, proposed by the policy that has
  learned on this family (with and without further learning), by a new policy, and at random.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from search_spaces.recipe import Recipe
from search_spaces.searchers import SEARCHERS
from search_spaces.searchers.base import Feature
from service.tune.searchers.hm3 import SEARCHER
from tests.benchmarks.arms import NotKept, compared, kept, packed, unpacked
from tests.benchmarks.bench_search import DEVELOPMENT, named, seeds_of, shown_interval
from tests.benchmarks.one_pass_check import check_against_engine
from tests.benchmarks.search_arms import depends_on, done, front_of, judged, slug, volume
from tests.benchmarks.search_families import FAMILIES, TrainedFamily
from tests.benchmarks.search_intervals import interval, volume_interval, volume_of
from tests.benchmarks.search_runs import CACHE, Bench, Run, SearchSpec, Trial
from workers.export.checkpoint import export
from workers.merging.bank import Bank as ModelBank
from workers.types import Placement

BENCHMARK = "hm3"
FAMILY = "shipped"
TRIALS, SAMPLES, NUM_SKILLS = 960, 30, 3
# 720 * 30 + 720 / 6 * (90 - 30) samples of each skill are as many as 960 * 30.
HALVED_TRIALS, MORE_SAMPLES, ETA = 720, 90, 6
TWICE = 2 * SAMPLES  # of half as many merges
EPISODES = 30

PATHS: Mapping[str, Any] = {"kind": "hm3", "min_path_length": 6, "max_path_length": 10}
MERGED: Mapping[str, Any] = {**PATHS, "merged": {"method": "dare_ties_l1"}}
POOLS: Mapping[str, Mapping[str, Any]] = {
    "task arithmetic": {**PATHS, "merged": {"method": "task_arithmetic"}},
    "PCB-Merging": {**PATHS, "merged": {"method": "pcb"}},
    "consensus merging": {**PATHS, "merged": {"method": "consensus_ta"}},
}
VECTORS: Mapping[str, Any] = {"preferences": {"lattice": 7, "interior": True}}
# A third of the policy's iterations explore less and less.
LEARNING = {"policy": "conditioned", "episodes": EPISODES, "explored": TRIALS // EPISODES // 3}
POLICY: Mapping[str, Any] = {"algorithm": "hm3", "hm3": LEARNING, **VECTORS}
# Half as many iterations, and the archive that was the best of 8 and 32 on scores of a model of earlier searches.
ON_TWICE = {**POLICY, "hm3": {**LEARNING, "explored": TRIALS // 2 // EPISODES // 3, "archive": 8}}
SEARCHES: Mapping[str, Mapping[str, Any]] = {
    "hm3": POLICY,
    **{name: {"algorithm": name} for name in ("moead", "de", "es", "grid", "random")},
}
GRADIENTS: Mapping[str, Any] = {"algorithm": "auto", "gradient": {"steps": 48, "points": 30}, **VECTORS}


@dataclass(frozen=True)
class Method:
    """A compared method: its section `search` and its space. With 1 objective, the search uses the mean of skills.

    `num_samples` is the number of samples of each skill for a merge; with more samples, fewer merges are scored. If
    `is_halved` is True, successive halving scores the best merges on more samples after the search.
    """

    search: Mapping[str, Any]
    space: Mapping[str, Any] | None = None
    is_halved: bool = False
    num_samples: int = SAMPLES

    @property
    def goal(self) -> str:
        return "skills" if Feature.OBJECTIVES in SEARCHERS[self.search["algorithm"]].handles else "mean"

    def spec(self, name: str, seed: int, *, family: str = FAMILY, trials: int = TRIALS) -> SearchSpec:
        joined = 1 if self.goal == "skills" else NUM_SKILLS  # skills of an objective
        # A policy repeats itself, and paths that were scored before cost nothing.
        repeats = 2 if self.search["algorithm"] == "hm3" else 1
        fidelity: dict[str, Any] = {"scheduler": "none", "max_samples": self.num_samples * joined}
        budget = trials * SAMPLES * NUM_SKILLS if self.search["algorithm"] in ("auto", "hm3") else None
        if self.is_halved:
            trials = HALVED_TRIALS
            rungs = [SAMPLES * joined, MORE_SAMPLES * joined]
            fidelity = {"scheduler": "successive_halving", "rungs": rungs, "eta": ETA}
            # A search keeps the samples of one more trial at full budget for its next trial.
            budget = trials * SAMPLES * NUM_SKILLS + (MORE_SAMPLES - SAMPLES) * NUM_SKILLS if repeats > 1 else None
        search = {**self.search, "max_trials": repeats * (trials * SAMPLES // self.num_samples)}
        return SearchSpec(family, self.goal, name, seed, search, space=self.space, fidelity=fidelity, budget=budget)


METHODS: Mapping[str, Method] = {
    **{name: Method(search, PATHS) for name, search in SEARCHES.items()},
    **{f"{name}_merged": Method({**search, **VECTORS}, MERGED) for name, search in SEARCHES.items()},
    **{
        f"{name}_merged_halving": Method({**SEARCHES[name], **VECTORS}, MERGED, is_halved=True)
        for name in ("hm3", "moead", "es", "random")
    },
    **{
        f"{name}_merged_60": Method({**search, **VECTORS}, MERGED, num_samples=TWICE)
        for name, search in {**SEARCHES, "hm3": ON_TWICE}.items()
        if name in ("hm3", "moead", "es", "random")
    },
    "dis": Method({"algorithm": "smac"}, {"kind": "dis", "preset": "d1m3r1"}),
    "lfs_dis": Method({"algorithm": "smac"}, {"kind": "lfs", "preset": "paper"}),
    "layerwise": Method(GRADIENTS),
}
LABELS = {
    **{f"{name}_merged": f"`{name}`, a merged model in the pool" for name in SEARCHES},
    **{f"{name}_merged_halving": f"`{name}`, a merged model in the pool, successive halving" for name in SEARCHES},
    **{f"{name}_merged_60": f"`{name}`, a merged model in the pool, {TWICE} samples" for name in SEARCHES},
    "de": "`de` (of the mean)",
    "es": "`es` (of the mean)",
    "dis": "DIS, `smac`",
    "lfs_dis": "LFS, then DIS with its best merge, `smac`",
    "layerwise": "`layerwise`, gradients",
}
OWN = ("hm3", "hm3_merged", "hm3_merged_halving", "hm3_merged_60")  # which are compared with all others
LATER = range(5, 10)  # seeds on which no option was chosen
GROWTH = ("hm3", "es", "random")
NUM_DIFFERENT = (120, 240, 480, 960, 1440, 1920)


def with_options(**options: Any) -> dict[str, Any]:
    """The policy's section `search` with other options in `search.hm3`."""
    return {**POLICY, "hm3": {**LEARNING, **options}}


ABLATIONS: Mapping[str, Method] = {
    "paths alone": METHODS["hm3"],
    "paths and merged models": METHODS["hm3_merged"],
    "paths and merged models, mutants without a policy": Method(with_options(elite_share=1.0), MERGED),
    "paths and merged models, a policy without mutants": Method(with_options(elite_share=0.0), MERGED),
    "paths and merged models, Tchebycheff": Method(with_options(scalarisation="tchebycheff"), MERGED),
    "paths and merged models, categorical actions": Method(with_options(action="categorical"), MERGED),
    "paths and merged models, scales of steps": Method(POLICY, {**MERGED, "scales": [0.8, 1.25]}),
    "paths and merged models, vectors of lattice 4": Method({**POLICY, "preferences": {"lattice": 4}}, MERGED),
    "paths, mutants without a policy": Method(with_options(elite_share=1.0), PATHS),
    "paths, alignment: moments": Method(POLICY, {**PATHS, "alignment": "moments"}),
    "paths, alignment: mlp": Method(POLICY, {**PATHS, "alignment": "mlp"}),
    "paths and merged models, alignment: mlp": Method(POLICY, {**MERGED, "alignment": "mlp"}),
}
# The method of which the others lack a part, and the merged models without paths.
WHOLE, ALONE = "paths and merged models", "merged models alone"
# A policy that knows models by the statistics of their layers, and those that begin with it elsewhere.
DESCRIBED: Mapping[str, Any] = {**POLICY, "hm3": {**LEARNING, "knows_models": False}}
OTHER_FAMILY, REUSE_TRIALS = "letters", 120
NEW = "new policy"
# Not among the vectors of the searches.
UNSEEN = ((0.45, 0.45, 0.1), (0.1, 0.3, 0.6))
NUM_SCORED = 16
ZERO_SHOT = ("first", "best of 16", "trained for it")


@dataclass(frozen=True)
class Found:
    """Result of a search: its front, the hypervolume on search data, and the merges' `answers` [merges, skills, items].

    `late` is the mean on search data of the last third of all different proposals. `volumes` are the hypervolumes on
    search data after NUM_DIFFERENT different proposals, or after all proposals if there are fewer. `paths` is the
    number of different proposals. With successive halving, the other figures are of the promoted trials alone.
    """

    search: float
    late: float
    volumes: list[float]
    paths: int
    spent: int
    seconds: float
    answers: NDArray[np.bool_]


def run() -> dict[str, Any]:
    torch.set_num_threads(1)
    seeds = seeds_of("HM3_SEEDS")
    parts: Mapping[str, Callable[[range], dict[str, Any]]] = {
        "fronts": fronts, "growth": growth, "ablations": ablations, "pools": pools, "zero_shot": zero_shot,
        "reuse": reuse,
    }  # fmt: skip
    asked = os.environ.get("HM3_PARTS", ",".join(parts)).split(",")
    check = check_against_engine(FAMILY, MERGED)
    return {"seeds": list(seeds), "against_engine": check, **{part: parts[part](seeds) for part in asked}}


# -- the parts ---------------------------------------------------------------------------------------------------------


def fronts(seeds: range, names: Sequence[str] | None = None) -> dict[str, Any]:
    names = os.environ.get("HM3_METHODS", ",".join(METHODS)).split(",") if names is None else names
    found = {name: [found_by(name, seed) for seed in seeds] for name in names}
    return part_of("fronts", found, [own for own in OWN if own in found], seeds)


def on_file(names: Iterable[str], find: Callable[[str, int], Found], seeds: range) -> list[str]:
    """The `names` of searches whose arms of all seeds are on file. Call it inside `files_alone`."""

    def is_on_file(name: str) -> bool:
        try:
            return bool([find(name, seed) for seed in seeds])
        except NotKept:
            return False

    found = [name for name in names if is_on_file(name)]
    if not found:
        raise NotKept(f"{BENCHMARK}: no search has arms of all seeds on file")
    return found


def methods_on_file(seeds: range) -> list[str]:
    return on_file(METHODS, found_by, seeds)


def growth(seeds: range) -> dict[str, Any]:
    found = {
        name: [search_of(METHODS[name].spec(f"{name}-longer", seed, trials=2 * TRIALS)) for seed in seeds]
        for name in GROWTH
    }
    return part_of("growth", found, ["hm3"], seeds)


def ablations(seeds: range, names: Sequence[str] | None = None) -> dict[str, Any]:
    names = [*ABLATIONS, ALONE] if names is None else names
    found = {name: [ablated(name, seed) for seed in seeds] for name in names}
    return part_of("ablations", found, [WHOLE], seeds)


def ablated(name: str, seed: int) -> Found:
    if name == ALONE:
        return merged_alone(MERGED["merged"]["method"], MERGED, seed)
    return search_of(ABLATIONS[name].spec(spec_name(name), seed))


def ablations_on_file(seeds: range) -> list[str]:
    found = on_file([*ABLATIONS, ALONE], ablated, seeds)
    if WHOLE not in found:
        raise NotKept(f"{BENCHMARK}: the arms of the whole method are not on file")
    return found


def pools(seeds: range) -> dict[str, Any]:
    found: dict[str, list[Found]] = {}
    minus: dict[str, Any] = {}
    for name, space in POOLS.items():
        method = space["merged"]["method"]
        pair = {
            f"paths, {name} in the pool": [
                search_of(Method(POLICY, space).spec(f"hm3-{method}", seed)) for seed in seeds
            ],
            f"{name} alone": [merged_alone(method, space, seed) for seed in seeds],
        }
        found |= pair
        minus |= differences("pools", pair, [f"paths, {name} in the pool"], seeds)
    return {"rows": [row_of(name, each) for name, each in found.items()], "minus": minus}


def zero_shot(seeds: range) -> dict[str, Any]:
    """Answers to judge items of paths that the policy proposes without training, weighted by the preference.

    Three paths are compared: the first path, the best of NUM_SCORED paths on search data, and the best path of a search
    for this vector alone with as many samples as all 15 vectors had.
    """
    rows = []
    for vector in UNSEEN:
        weights = np.array(vector)[:, None]
        answers = [proposed_for(vector, seed) for seed in seeds]
        stacked = {name: np.stack([each[name] * weights * NUM_SKILLS for each in answers]) for name in ZERO_SHOT}
        trained = stacked["trained for it"]
        short = "-".join(map(str, vector))
        rows.append({
            "vector": vector,
            **{name: by_seed(each) for name, each in stacked.items()},
            "minus": {
                name: compared(BENCHMARK, f"zero_shot-{slug_of(name)}-{short}-{named(seeds)}", interval,
                               [stacked[name]], [trained])
                for name in ZERO_SHOT if name != "trained for it"
            },
        })  # fmt: skip
    return {"rows": rows}


def reuse(seeds: range) -> dict[str, Any]:
    bench = Bench.of(FAMILY)

    def learned(seed: int, **options: Any) -> Method:
        trained = Method(DESCRIBED, PATHS).spec("hm3-described", seed)
        start = {"dir": str(bench.file(trained).with_suffix(""))}
        return Method({**DESCRIBED, "hm3": {**DESCRIBED["hm3"], "start": start, **options}}, PATHS)

    def search(name: str, method: Method, seed: int) -> Found:
        before = [Method(DESCRIBED, PATHS).spec("hm3-described", seed)] if name.startswith("learned") else []
        return search_of(
            method.spec(f"reuse-{slug_of(name)}", seed, family=OTHER_FAMILY, trials=REUSE_TRIALS), before=before
        )

    methods: Mapping[str, Callable[[int], Method]] = {
        "learned on the other, learning": learned,
        "learned on the other, as it is": lambda seed: learned(seed, learns=False),
        NEW: lambda seed: Method(DESCRIBED, PATHS),
        "random": lambda seed: METHODS["random"],
    }
    found = {name: [search(name, method(seed), seed) for seed in seeds] for name, method in methods.items()}
    return part_of("reuse", found, list(found)[:2], seeds)


# -- searches and what they found --------------------------------------------------------------------------------------


def spec_name(name: str) -> str:
    """Name of a method's searches on file, which is the same in the parts `fronts` and `ablations`."""
    return {"paths alone": "hm3", "paths and merged models": "hm3_merged"}.get(name, name.replace(" ", "-"))


def slug_of(name: str) -> str:
    return re.sub(r"[^\w.]+", "-", name)


def found_by(name: str, seed: int) -> Found:
    return chained(seed) if name == "lfs_dis" else search_of(METHODS[name].spec(name, seed))


def search_of(spec: SearchSpec, *, before: Sequence[SearchSpec] = ()) -> Found:
    """Front of one search; the searches in `before` must be finished first, because it begins with their policies."""

    def measure() -> Found:
        for each in before:
            done(Bench.of(each.family), each)
        bench = Bench.of(spec.family)
        found = done(bench, spec)
        return front_found(bench, with_skills(bench, found) if spec.goal == "mean" else found)

    settings = {"spec": asdict(spec), **({"skills": "of the same samples"} if spec.goal == "mean" else {})}
    return found_in(slug(spec), settings, measure, spec, *before)


def found_in(name: str, settings: Mapping[str, Any], measure: Callable[[], Found], *specs: SearchSpec) -> Found:
    """The front that `measure` computes, kept as an arm."""

    def figures() -> dict[str, Any]:
        found = measure()
        return {**vars(found), "seconds": round(found.seconds, 1), "answers": packed(found.answers)}

    settings = {**settings, "samples": SAMPLES, "different": NUM_DIFFERENT}
    known = kept(BENCHMARK, name, settings, figures, depends=depends_on(*specs))
    return Found(**{**known, "answers": unpacked(known["answers"])})


def front_found(bench: Bench, found: Run) -> Found:
    """The front of the trials that the search has scored on its largest number of samples."""
    proposed = found.proposed().trials
    front = front_of(proposed)
    judgments = [judged(bench, found, trial) for trial in front]
    known = found_of(proposed, front, judgments, spent=found.spent, seconds=found.seconds)
    if "rungs" not in found.spec.fidelity:
        return known
    promoted = (MORE_SAMPLES - SAMPLES) * NUM_SKILLS * known.paths
    return replace(known, paths=(found.spent - promoted) // (SAMPLES * NUM_SKILLS))


def found_of(
    trials: Sequence[Trial],
    front: Sequence[Trial],
    answers: Sequence[NDArray[np.bool_]],
    *,
    spent: int,
    seconds: float,
) -> Found:
    different = list({trial.digest: trial for trial in trials}.values())
    late = different[-max(len(different) // 3, 1) :]
    return Found(
        search=volume(front),
        late=float(np.mean([trial.mean for trial in late])),
        volumes=[volume(front_of(different[:number])) for number in NUM_DIFFERENT],
        paths=len(different),
        spent=spent,
        seconds=seconds,
        answers=np.stack(answers),
    )


def with_skills(bench: Bench, found: Run) -> Run:
    """A finished search of the mean, with the values of each skill added to its trials.

    The values are those of the samples that the search scored, so a trial has as many samples as with other searchers.
    """
    task = bench.preflight(found.spec).tasks.search["mean"]
    fidelity = found.spec.fidelity
    num_scored = fidelity["rungs"][-1] if "rungs" in fidelity else fidelity["max_samples"]
    num_items = bench.scorer.num_samples(task) // NUM_SKILLS
    skill_of = bench.scorer.documents(task)[:num_scored] // num_items

    def scored(trial: Trial) -> Trial:
        is_right = bench.scorer.exact_matches(bench.recipe(found.spec, trial), task, 0, num_scored)
        values = {name: float(is_right[skill_of == skill].mean()) for skill, name in enumerate(bench.family.skills)}
        return replace(trial, values=values)

    return replace(found, trials=tuple(scored(trial) for trial in found.proposed().trials))


def chained(seed: int) -> Found:
    """Front of two searches together: LFS, then DIS with the best merge of LFS as a fourth model."""
    lfs = METHODS["lfs_dis"].spec("lfs", seed, trials=TRIALS // 2)
    dis = replace(METHODS["dis"], space={"kind": "dis", "depth_granularity": 1})
    later = dis.spec("dis", seed, family=f"{FAMILY}-lfs-{seed}", trials=TRIALS - TRIALS // 2)

    def measure() -> Found:
        bench = Bench.of(FAMILY)
        first = done(bench, lfs)
        best = max(first.proposed().trials, key=lambda trial: trial.mean)
        directory = CACHE / "chained" / best.digest[:16]
        if not directory.exists():
            export(bench.recipe(first.spec, best), ModelBank(bench.judge.models.family, Placement.MAPPED), directory)
        longer = Bench(ChainedFamily(later.family, FAMILIES[FAMILY].skills, found=str(directory.resolve())))
        second = done(longer, later)
        of_first = {trial.digest for trial in first.proposed().trials}
        trials = [
            *first.proposed().trials,
            *(replace(trial, number=trial.number + len(first.trials)) for trial in second.proposed().trials),
        ]
        front = front_of(trials)
        return found_of(
            trials,
            front,
            [judged(bench, first, t) if t.digest in of_first else judged(longer, second, t) for t in front],
            spent=first.spent + second.spent,
            seconds=first.seconds + second.seconds,
        )

    return found_in(f"lfs_dis-{seed}", {"specs": [asdict(lfs), asdict(later)]}, measure, lfs)


@dataclass(frozen=True)
class ChainedFamily(TrainedFamily):
    """The shipped family with a merge as a fourth expert."""

    found: str = ""

    def study(self, goal: str, **sections: Any) -> Any:
        root = self.directory()
        experts = {skill: str(root / "experts" / skill) for skill in self.skills}
        models = {"base": str(root / "base"), "experts": {**experts, "found": self.found}}
        return super().study(goal, models=models, **sections)


def part_of(part: str, found: Mapping[str, Sequence[Found]], own: Sequence[str], seeds: range) -> dict[str, Any]:
    """Rows of one part of the benchmark, and differences between `own` and all other methods."""
    return {"rows": [row_of(name, each) for name, each in found.items()], "minus": differences(part, found, own, seeds)}


def differences(part: str, found: Mapping[str, Sequence[Found]], of: Sequence[str], seeds: range) -> dict[str, Any]:
    """Differences of hypervolumes on judge items between each method in `of` and every other method."""
    return {
        f"{own} minus {name}": compared(
            BENCHMARK,
            f"{part}-{slug_of(own)}-{slug_of(name)}-{named(seeds)}",
            volume_interval,
            [[f.answers for f in found[own]]],
            [[f.answers for f in each]],
        )
        for own in of
        for name, each in found.items()
        if name != own
    }


def merged_alone(method: str, space: Mapping[str, Any], seed: int) -> Found:
    """Front of the merged models of the 15 preference vectors, without layer paths."""
    spec = Method(POLICY, space).spec("pool", seed)

    def measure() -> Found:
        bench = Bench.of(FAMILY)
        searched_in: Any = bench.preflight(spec).space
        merged = {name: recipe for name, recipe in searched_in.pool.items() if name not in bench.family.skills}
        recipes = list({recipe.digest: recipe for recipe in merged.values()}.values())
        trials = []
        for number, recipe in enumerate(recipes):
            values = dict(zip(bench.family.skills, searched(bench, recipe, seed).tolist(), strict=True))
            trials.append(Trial(number, "search", "", None, recipe.digest, values, 0))
        front = front_of(trials)
        answers = [bench.judged(recipes[trial.number]) for trial in front]
        return found_of(trials, front, answers, spent=len(recipes) * SAMPLES * NUM_SKILLS, seconds=0.0)

    return found_in(f"merged_alone-{method}-{seed}", {"spec": asdict(spec)}, measure, spec)


def proposed_for(vector: tuple[float, ...], seed: int) -> dict[str, NDArray[np.bool_]]:
    """Answers [skills, items] of the merges that ZERO_SHOT lists, proposed for one preference vector."""
    spec = METHODS["hm3"].spec("hm3", seed)
    names = dict(zip(FAMILIES[FAMILY].skills, vector, strict=True))
    short = "-".join(map(str, vector))
    alone = Method({**METHODS["hm3"].search, "preferences": {"vectors": [names]}}, PATHS).spec(f"hm3-for-{short}", seed)

    def measure() -> dict[str, Any]:
        bench = Bench.of(FAMILY)
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
        trained = done(bench, alone)
        best = max(trained.proposed().trials, key=lambda trial: np.array(list(trial.values.values())) @ vector)
        merges = bench.judged(recipes[0]), bench.judged(recipes[int(np.argmax(scores))]), judged(bench, trained, best)
        return {name: packed(each) for name, each in zip(ZERO_SHOT, merges, strict=True)}

    settings = {"specs": [asdict(spec), asdict(alone)], "scored": NUM_SCORED}
    found = kept(BENCHMARK, f"zero_shot-{short}-{seed}", settings, measure, depends=depends_on(spec))
    return {name: unpacked(found[name]) for name in ZERO_SHOT}


def searched(bench: Bench, recipe: Recipe, seed: int) -> NDArray[np.float64]:
    """Share of each skill's first SAMPLES search samples that a merge answers correctly, in the order of a seed."""
    means: NDArray[np.float64] = bench.searched(recipe, seed, SAMPLES).mean(axis=1)
    return means


def by_seed(values: NDArray[np.float64]) -> list[float]:
    return [float(each) for each in values.mean(axis=(1, 2))]


def row_of(name: str, found: Sequence[Found]) -> dict[str, Any]:
    return {
        "name": name,
        "search": [each.search for each in found],
        "judge": [volume_of(each.answers) for each in found],
        "late": [each.late for each in found],
        "best_mean": [float(each.answers.mean(axis=(1, 2)).max()) for each in found],
        "volumes": [each.volumes for each in found],
        "merges": [len(each.answers) for each in found],
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
            print(f"\n{part}\n{rows_table(result[part]['rows'])}")
            for name, found in result[part]["minus"].items():
                print(f"{name}: {shown_interval(found)}")
    if "growth" in result:
        print(growth_table(result["growth"]))
    if "zero_shot" in result:
        print(zero_shot_table(result["zero_shot"]))


def rows_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table of the fronts: hypervolumes, best mean on judge items, mean of the last third on search data, and costs."""
    lines = ["| search | search data | judge items | best mean | last third | merges of the front | different merges | "
             "samples' worth |", "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in rows:
        cells = [_spread(row[key]) for key in ("search", "judge", "best_mean", "late")]
        cells += [f"{np.mean(row[key]):.0f}" for key in ("merges", "paths")]
        lines.append(f"| {label(row['name'])} | {' | '.join(cells)} | {np.mean(row['spent']):,.0f} |")
    return "\n".join(lines)


def minus_table(minus: Mapping[str, Mapping[str, float]]) -> str:
    """Table of paired differences of hypervolumes on judge items: each column's search minus each row's search."""
    pairs = [tuple(name.split(" minus ")) for name in minus]
    columns, rows = (list(dict.fromkeys(pair[i] for pair in pairs)) for i in (0, 1))
    lines = [f"| minus | {' | '.join(map(label, columns))} |", f"|---|{'---|' * len(columns)}"]
    for row in rows:
        found = (minus.get(f"{column} minus {row}") for column in columns)
        cells = ["" if each is None else shown_interval(each) for each in found]
        lines.append(f"| {label(row)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def label(name: str) -> str:
    """Name of a search in tables."""
    return LABELS.get(name, f"`{name}`" if name in METHODS else name)


def ablations_table(part: Mapping[str, Any]) -> str:
    """Table of the fronts of the method without each of its parts, and of the whole method minus each."""
    lines = ["| search | search data | judge items | last third | different merges | the whole method minus it |",
             "|---|---|---|---|---|---|"]  # fmt: skip
    for row in part["rows"]:
        cells = [_spread(row[key]) for key in ("search", "judge", "late")]
        minus = part["minus"].get(f"{WHOLE} minus {row['name']}")
        difference = "" if minus is None else shown_interval(minus)
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {np.mean(row['paths']):.0f} | {difference} |")
    return "\n".join(lines)


def reuse_table(part: Mapping[str, Any]) -> str:
    """Table of the fronts of policies from another family, and of their differences from a new policy."""
    lines = ["| policy | search data | judge items | minus a new policy |", "|---|---|---|---|"]
    for row in part["rows"]:
        minus = part["minus"].get(f"{row['name']} minus {NEW}")
        difference = "" if minus is None else shown_interval(minus)
        lines.append(f"| {label(row['name'])} | {_spread(row['search'])} | {_spread(row['judge'])} | {difference} |")
    return "\n".join(lines)


def growth_table(part: Mapping[str, Any]) -> str:
    """Table of hypervolumes on search data after different numbers of paths, and on judge items after all paths."""
    heads = " | ".join(f"{number:,}" for number in NUM_DIFFERENT)
    lines = [f"| different paths | {heads} | judge items, all |", f"|---|{'---|' * len(NUM_DIFFERENT)}---|"]
    for row in part["rows"]:
        cells = [f"{mean:.3f}" for mean in np.mean(row["volumes"], axis=0)]
        lines.append(f"| {label(row['name'])} | {' | '.join(cells)} | {_spread(row['judge'])} |")
    return "\n".join(lines)


def zero_shot_table(part: Mapping[str, Any]) -> str:
    """Table of answers weighted by the preference vector, with differences from a search for this vector alone."""
    others = [name for name in ZERO_SHOT if name != "trained for it"]
    heads = " | ".join([*ZERO_SHOT, *(f"{name} minus trained" for name in others)])
    lines = [f"| vector | {heads} |", f"|---|{'---|' * (len(ZERO_SHOT) + len(others))}"]
    for row in part["rows"]:
        cells = [_spread(row[name]) for name in ZERO_SHOT] + [shown_interval(row["minus"][name]) for name in others]
        lines.append(f"| {', '.join(map(str, row['vector']))} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    spread = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
    return f"{np.mean(values):.3f} ± {spread:.3f}"


TABLES: Mapping[str, Callable[[], str]] = {
    "fronts": lambda: rows_table(fronts(DEVELOPMENT, methods_on_file(DEVELOPMENT))["rows"]),
    "fronts-differences": lambda: minus_table(fronts(DEVELOPMENT, methods_on_file(DEVELOPMENT))["minus"]),
    "fronts-later": lambda: rows_table(fronts(LATER, methods_on_file(LATER))["rows"]),
    "fronts-later-differences": lambda: minus_table(fronts(LATER, methods_on_file(LATER))["minus"]),
    "growth": lambda: growth_table(growth(range(3))),
    "ablations": lambda: ablations_table(ablations(DEVELOPMENT, ablations_on_file(DEVELOPMENT))),
    "pools": lambda: rows_table(pools(DEVELOPMENT)["rows"]),
    "zero-shot": lambda: zero_shot_table(zero_shot(DEVELOPMENT)),
    "reuse": lambda: reuse_table(reuse(DEVELOPMENT)),
}
