"""What searchers find on trained families, for how many samples' worth: `auto` beside black-box searchers.

`bench_searchers` compares searchers on families whose accuracies are made up: true values are known, spaces with
conditions and choices are searched too, and it takes minutes. Here models are trained, so gradients exist and what was
found can be judged on items that no search saw. That takes hours: every search is stored in `.bench/search`, and a
bench that was interrupted goes on after the last one.

    make bench ONLY=search
    SEARCH_PARTS=demo,single,front SEARCH_FAMILIES=shipped,letters SEARCH_SEEDS=0-4 make bench ONLY=search

Seeds 0 to 4 are for development. The default searcher is named before seeds 100 to 104 are run, on all families, and
nothing is chosen by those: `SEARCH_SEEDS=100-104`.

A sample that is scored for a proposed trial counts 1, a sample of a loss 1, one of a gradient 3; sources and published
recipes are not counted. The parts:

- `demo`: the shipped study with `auto` on three objectives, against task arithmetic with the lambda that a scan on all
  search data finds, and against what black-box searchers find for as many samples.
- `single`: one objective, the mean of the skills. `auto` for 8 and for 5 full evaluations' worth against the black-box
  searcher that is best on the judge items of each family after 40: the strongest rival, known only in hindsight.
- `front`: three objectives. After how many samples' worth `auto` has the hypervolume that random search has after 200
  full evaluations; and hypervolumes at equal samples, of fronts chosen on search data, on judge items.

Black-box searchers get what was fixed before any of them was run: one coefficient from 0 to 1 for each expert in each
of four groups of layers, embedding and head (18 numbers: few, as suits them, and all sensible), full evaluations only,
and the source and published recipes as known results. The best trial of a search is that with the best mean on its
search data, one of the known recipes included, as in a study.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import hypervolume, non_dominated
from tests.benchmarks.one_pass_check import check_against_engine
from tests.benchmarks.search_families import FAMILIES, FULL
from tests.benchmarks.search_intervals import interval, volume_interval, volume_of
from tests.benchmarks.search_runs import CACHE, Bench, Run, SearchSpec, Trial

NUM_SKILLS = 3
EVALUATION = NUM_SKILLS * FULL  # samples of a full evaluation

RIVAL_SPACE = {"kind": "layerwise", "granularity": "layer_group", "layer_groups": 4, "range": [0.0, 1.0]}
SINGLE_RIVALS = ("smac", "tpe", "gp", "cmaes", "es", "random")
SINGLE_EVALUATIONS = 40
FRONT_RIVALS = ("random", "nsga2", "moead", "grid")
TARGET_EVALUATIONS = 200  # of random search, whose hypervolume is to be reached
FRONT_BUDGETS = (20, 60)  # full evaluations' worth at which hypervolumes are compared; must reach the target with 20

DEMO_BUDGET, DEMO_MUST = 12_000, 0.785
SINGLE_BUDGETS = (8, 5)  # must, goal: full evaluations' worth
SINGLE_MUST = -0.01  # lower end of the interval of what `auto` is better by than the best rival
FRONT_MUST = 0.1  # of random search's samples

NUM_COMPARED = 10 * 16  # samples of an objective on which the gradient searcher compares losses with scores

# Of `auto` on three objectives: the divisions of the preference vectors' lattice, the descents, and the trials in all,
# which use up each budget. Chosen on seeds 0 and 1 of all families. What was chosen before any run, all vectors of
# lattice 2 and batches of 48 without midpoints, had reached the target with no seed from 100 to 104 of the shipped
# family.
FRONT_OPTIONS: Mapping[int, tuple[int, Mapping[str, int], int]] = {
    20: (3, {"steps": 75, "warm_steps": 19, "batch": 12, "points": 7}, 11),
    60: (4, {"steps": 150, "warm_steps": 40, "batch": 12, "points": 12}, 32),
}
LAMBDAS = tuple(round(0.05 * i, 2) for i in range(1, 31))


def demo_spec(family: str, seed: int) -> SearchSpec:
    """The shipped study, with the defaults of `auto`."""
    search = {"algorithm": "auto", "max_trials": 4}
    return SearchSpec(family, "skills", "demo", seed, search, fidelity={"scheduler": "none", "max_samples": FULL})


def single_spec(family: str, seed: int, evaluations: int) -> SearchSpec:
    """`auto` on the mean of the skills: a quarter of the budget's evaluations are points of the descent."""
    points = max(1, evaluations // 4)
    batch = 48
    steps = ((evaluations - points) * EVALUATION - NUM_COMPARED) // (3 * batch)
    options = {"steps": steps, "batch": batch, "points": points}
    search = {"algorithm": "auto", "max_trials": points, "gradient": options}
    return SearchSpec(family, "mean", f"auto-{evaluations}", seed, search, fidelity=_full(EVALUATION))


def front_spec(family: str, seed: int, evaluations: int) -> SearchSpec:
    """`auto` on three objectives: a descent for each preference vector of a lattice, then midpoints of the front."""
    divisions, options, trials = FRONT_OPTIONS[evaluations]
    search = {
        "algorithm": "auto",
        "max_trials": trials,
        "gradient": options,
        "preferences": {"lattice": divisions, "corners": False},
    }
    budget = evaluations * EVALUATION
    return SearchSpec(family, "skills", f"auto-{evaluations}", seed, search, fidelity=_full(FULL), budget=budget)


def rival_spec(family: str, seed: int, goal: str, searcher: str, evaluations: int) -> SearchSpec:
    """A black-box searcher; the first trials of a longer search are those of a shorter one."""
    search = {"algorithm": searcher, "max_trials": evaluations}
    name, samples = f"{searcher}-{evaluations}", EVALUATION if goal == "mean" else FULL
    return SearchSpec(family, goal, name, seed, search, space=RIVAL_SPACE, fidelity=_full(samples))


def _full(samples: int) -> dict[str, Any]:
    return {"scheduler": "none", "max_samples": samples}


# -- the parts ---------------------------------------------------------------------------------------------------------


def run() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    families = os.environ.get("SEARCH_FAMILIES", ",".join(FAMILIES)).split(",")
    first, _, last = os.environ.get("SEARCH_SEEDS", "0-4").partition("-")
    seeds = range(int(first), int(last or first) + 1)
    parts: Mapping[str, Callable[[Sequence[str], range], dict[str, Any]]] = {
        "demo": demo, "single": single, "front": front
    }  # fmt: skip
    asked = os.environ.get("SEARCH_PARTS", ",".join(parts)).split(",")
    checks = {name: check_against_engine(name) for name in families}
    found = {part: parts[part](families, seeds) for part in asked}
    return {
        "met": all(check["differing"] == 0 for check in checks.values()) and all(p["met"] for p in found.values()),
        "seeds": list(seeds),
        "against_engine": checks,
        **found,
    }


def demo(families: Sequence[str], seeds: range) -> dict[str, Any]:
    bench = Bench.of("shipped")
    runs = [done(bench, demo_spec("shipped", seed)) for seed in seeds]
    winners = np.stack([judged(bench, run, run.best()) for run in runs])
    scan = scanned(bench)
    alone = np.broadcast_to(scan["judged"], winners.shape)
    rows = []
    for searcher in SINGLE_RIVALS:
        found = [
            done(bench, rival_spec("shipped", seed, "mean", searcher, DEMO_BUDGET // EVALUATION)) for seed in seeds
        ]
        best = [run.best() for run in found]
        values = np.stack([judged(bench, run, trial) for run, trial in zip(found, best, strict=True)])
        rows.append({
            "searcher": searcher,
            "spent": found[0].spent,
            **summary(values, [trial.mean for trial in best]),
            "known_recipes": sum(trial.origin != "search" for trial in best),
            "auto_minus": interval([winners], [values]),
        })  # fmt: skip
    beside = interval([winners], [alone])
    is_met = winners.mean() >= DEMO_MUST and max(run.spent for run in runs) <= DEMO_BUDGET and beside["low"] > 0
    return {
        "met": bool(is_met),
        "auto": {"spent": [run.spent for run in runs], "seconds": [run.seconds for run in runs],
                 **summary(winners, [run.best().mean for run in runs])},
        "scan": {"lambda": scan["lambda"], "search": scan["search"], "judge": float(alone.mean()),
                 "auto_minus": beside,
                 "auto_minus_by_seed": [interval([winners[[i]]], [alone[[i]]]) for i in range(len(runs))]},
        "rivals": rows,
    }  # fmt: skip


def single(families: Sequence[str], seeds: range) -> dict[str, Any]:
    ours: dict[int, list[NDArray[np.bool_]]] = {budget: [] for budget in SINGLE_BUDGETS}
    theirs: list[NDArray[np.bool_]] = []
    best_rivals: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for name in families:
        bench = Bench.of(name)
        table: dict[str, NDArray[np.bool_]] = {}
        for budget in SINGLE_BUDGETS:
            runs = [done(bench, single_spec(name, seed, budget)) for seed in seeds]
            table[f"auto {budget}"] = judge_all(bench, runs)
            ours[budget].append(table[f"auto {budget}"])
            rows.append(row_of(name, "auto", budget, runs, table[f"auto {budget}"]))
        for searcher in SINGLE_RIVALS:
            runs = [done(bench, rival_spec(name, seed, "mean", searcher, SINGLE_EVALUATIONS)) for seed in seeds]
            table[searcher] = judge_all(bench, runs)
            rows.append(row_of(name, searcher, SINGLE_EVALUATIONS, runs, table[searcher]))
        best_rivals[name] = max(SINGLE_RIVALS, key=lambda searcher: table[searcher].mean())
        theirs.append(table[best_rivals[name]])
    minus = {
        str(budget): {
            "all": interval(ours[budget], theirs),
            **{n: interval([a], [b]) for n, a, b in zip(families, ours[budget], theirs, strict=True)},
        }
        for budget in SINGLE_BUDGETS
    }
    is_met = minus[str(SINGLE_BUDGETS[0])]["all"]["low"] > SINGLE_MUST
    return {"met": is_met, "rows": rows, "best_rivals": best_rivals, "auto_minus_best_rival": minus}


def front(families: Sequence[str], seeds: range) -> dict[str, Any]:
    reached, rows = [], []
    fronts: dict[tuple[str, int], list[list[NDArray[np.bool_]]]] = {}
    for name in families:
        bench = Bench.of(name)
        for budget in FRONT_BUDGETS:
            runs = {"auto": [done(bench, front_spec(name, seed, budget)) for seed in seeds]}
            for searcher in FRONT_RIVALS:
                trials = TARGET_EVALUATIONS if searcher == "random" else max(FRONT_BUDGETS)
                specs = [rival_spec(name, seed, "skills", searcher, trials) for seed in seeds]
                runs[searcher] = [done(bench, spec) for spec in specs]
            if budget == FRONT_BUDGETS[0]:
                reached += [target_of(name, *pair) for pair in zip(runs["auto"], runs["random"], strict=True)]
            for searcher, found in runs.items():
                members = [front_of(run.until(budget * EVALUATION)) for run in found]
                values = [
                    np.stack([judged(bench, run, trial) for trial in own])
                    for run, own in zip(found, members, strict=True)
                ]
                fronts.setdefault((searcher, budget), []).append(values)
                rows.append(
                    {
                        "family": name,
                        "searcher": searcher,
                        "evaluations": budget,
                        "search": [volume(own) for own in members],
                        "judge": [volume_of(each) for each in values],
                        "merges": [len(own) for own in members],
                    }
                )
    minus = {
        f"{searcher} at {budget}": {
            "all": volume_interval(fronts["auto", budget], fronts[searcher, budget]),
            **{
                name: volume_interval([a], [b])
                for name, a, b in zip(families, fronts["auto", budget], fronts[searcher, budget], strict=True)
            },
        }
        for budget in FRONT_BUDGETS
        for searcher in FRONT_RIVALS
    }
    shares = [row["all"]["share"] for row in reached]
    is_met = all(share is not None and share <= FRONT_MUST for share in shares)
    is_met = is_met and all(found["all"]["low"] > 0 for found in minus.values())
    return {"met": is_met, "reached": reached, "rows": rows, "auto_minus": minus}


# -- searches and what they found --------------------------------------------------------------------------------------


def done(bench: Bench, spec: SearchSpec) -> Run:
    started = time.perf_counter()
    run = bench.run(spec)
    if (seconds := time.perf_counter() - started) > 2:
        best = run.best()
        print(f"{spec.family} {spec.goal} {spec.name} seed {spec.seed}: {best.mean:.3f} on search data after "
              f"{run.spent} samples' worth, {seconds:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return run


def judged(bench: Bench, run: Run, trial: Trial) -> NDArray[np.bool_]:
    """[skills, items]"""
    return bench.judged(bench.recipe(run.spec, trial))


def judge_all(bench: Bench, runs: Sequence[Run]) -> NDArray[np.bool_]:
    """Of each run's best trial, [runs, skills, items]."""
    return np.stack([judged(bench, run, run.best()) for run in runs])


def scanned(bench: Bench) -> dict[str, Any]:
    """Task arithmetic with one lambda everywhere, the best of a scan on all search items."""
    file = CACHE / "scan" / f"{bench.fingerprint[:16]}.json"
    from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

    family, experts = bench.judge.family, bench.family.skills

    def recipe(lambda_: float) -> Recipe:
        def merge(layer: int | None) -> Merge:
            return Merge("task_arithmetic", tuple(Source(e, layer) for e in experts), {"lambda": lambda_})

        layers = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(bench.judge.num_layers))
        return Recipe(family.fingerprints, family.base.alias, layers, merge(None), merge(None)).canonical()

    if not file.exists():
        values = {lambda_: float(bench.searched(recipe(lambda_), 0).mean()) for lambda_ in LAMBDAS}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values))
    found = {float(lambda_): value for lambda_, value in json.loads(file.read_text()).items()}
    best = max(found, key=lambda lambda_: found[lambda_])
    return {"lambda": best, "search": found[best], "judged": bench.judged(recipe(best))}


def row_of(
    family: str, searcher: str, evaluations: int, runs: Sequence[Run], values: NDArray[np.bool_]
) -> dict[str, Any]:
    return {
        "family": family,
        "searcher": searcher,
        "evaluations": evaluations,
        "spent": max(run.spent for run in runs),
        "known_recipes": sum(run.best().origin != "search" for run in runs),
        **summary(values, [run.best().mean for run in runs]),
    }


def summary(values: NDArray[np.bool_], on_search: Sequence[float]) -> dict[str, Any]:
    by_seed = values.mean(axis=(1, 2))
    spread = float(by_seed.std(ddof=1)) if len(by_seed) > 1 else 0.0
    return {
        "judge": float(by_seed.mean()),
        "spread": spread,
        "by_seed": by_seed.tolist(),
        "search": float(np.mean(on_search)),
    }


def front_of(trials: Sequence[Trial]) -> list[Trial]:
    """The trials that none dominates on search data; of equal recipes the first."""
    first = {trial.digest: trial for trial in reversed(trials)}
    unique = sorted(first.values(), key=lambda trial: trial.number)
    is_best = non_dominated([costs(trial) for trial in unique])
    return [trial for trial, is_on_front in zip(unique, is_best, strict=True) if is_on_front]


def costs(trial: Trial) -> tuple[float, ...]:
    return tuple(1 - value for value in trial.values.values())


def volume(trials: Sequence[Trial]) -> float:
    """On search data."""
    return hypervolume([costs(trial) for trial in trials])


def target_of(family: str, auto: Run, random: Run) -> dict[str, Any]:
    """Samples until `auto` has the hypervolume of all of random search's trials; source and published recipes count on
    both sides, or ("proposed") on none."""
    row: dict[str, Any] = {"family": family, "seed": auto.spec.seed}
    for key, ours, theirs in (("all", auto, random), ("proposed", auto.proposed(), random.proposed())):
        target = volume(theirs.trials)
        spent = samples_to_reach(ours, target)
        share = None if spent is None else spent / (TARGET_EVALUATIONS * EVALUATION)
        row[key] = {"target": target, "auto": volume(ours.trials), "spent": spent, "share": share}
    return row


def samples_to_reach(run: Run, target: float) -> int | None:
    """What had been spent when the front of all trials so far had that hypervolume; None if it never had."""
    return next((trial.spent for trial in run.trials if volume(run.until(trial.spent)) >= target), None)


# -- tables ------------------------------------------------------------------------------------------------------------


def show(result: dict[str, Any]) -> None:
    print(f"seeds {result['seeds']}")
    for name, check in result["against_engine"].items():
        print(f"{name}: {check['compared']} samples of {check['recipes']} recipes scored as the engine scores them")
    for part, table in (("demo", show_demo), ("single", show_single), ("front", show_front)):
        if part in result:
            table(result[part])


def show_demo(part: dict[str, Any]) -> None:
    auto, scan = part["auto"], part["scan"]
    print(f"\ndemo: must >= {DEMO_MUST} for {DEMO_BUDGET} samples' worth, goal 0.80 for 6,000; met: {part['met']}")
    print("| searcher | samples' worth | search | held out (± over seeds) | auto minus it |\n|---|---|---|---|---|")
    print(f"| auto | {max(auto['spent'])} | {auto['search']:.3f} | {_with_spread(auto)} | |")
    one = f"task arithmetic, lambda {scan['lambda']} by a scan"
    print(f"| {one} | | {scan['search']:.3f} | {scan['judge']:.3f} | {_interval(scan['auto_minus'])} |")
    for row in part["rivals"]:
        print(
            f"| {row['searcher']} | {row['spent']} | {row['search']:.3f} | {_with_spread(row)} | "
            f"{_interval(row['auto_minus'])} |"
        )
    print(f"held out by seed: {_each(auto['by_seed'])}; seconds: {[round(s) for s in auto['seconds']]}")
    print("auto minus the scan's, by seed: " + ", ".join(map(_interval, scan["auto_minus_by_seed"])))


def show_single(part: dict[str, Any]) -> None:
    must, goal = SINGLE_BUDGETS
    print(f"\nsingle objective: must lower end above {SINGLE_MUST} with {must} evaluations' worth, goal with {goal}; "
          f"met: {part['met']}")  # fmt: skip
    print("| family | searcher | evaluations | search | judge (± over seeds) | best is a known recipe |")
    print("|---|---|---|---|---|---|")
    for row in part["rows"]:
        print(
            f"| {row['family']} | {row['searcher']} | {row['evaluations']} | {row['search']:.3f} | "
            f"{_with_spread(row)} | {row['known_recipes']} of {len(row['by_seed'])} |"
        )
    print(f"best rivals: {part['best_rivals']}")
    for budget, found in part["auto_minus_best_rival"].items():
        print(f"auto after {budget} minus the best rival after {SINGLE_EVALUATIONS}: "
              + ", ".join(f"{name} {_interval(each)}" for name, each in found.items()))  # fmt: skip


def show_front(part: dict[str, Any]) -> None:
    print(
        f"\nthree objectives: must reach the hypervolume of random search after {TARGET_EVALUATIONS} evaluations with"
    )
    print(f"{FRONT_MUST:.0%} of its samples, goal 2%, and be above each rival; met: {part['met']}; without source and "
          "published recipes in brackets")  # fmt: skip
    print("| family | seed | random search's | auto's | reached with |\n|---|---|---|---|---|")
    for row in part["reached"]:
        one, other = row["all"], row["proposed"]
        cells = (f"{one[key]:.3f} ({other[key]:.3f})" for key in ("target", "auto"))
        print(f"| {row['family']} | {row['seed']} | {' | '.join(cells)} | {_share(one)} ({_share(other)}) |")
    print("| family | searcher | evaluations | hypervolume on search data | on judge items | merges |")
    print("|---|---|---|---|---|---|")
    for row in part["rows"]:
        cells = (f"{np.mean(row[key]):.3f} ± {_std(row[key]):.3f}" for key in ("search", "judge"))
        print(
            f"| {row['family']} | {row['searcher']} | {row['evaluations']} | {' | '.join(cells)} | "
            f"{np.mean(row['merges']):.1f} |"
        )
    for rival, found in part["auto_minus"].items():
        print(f"auto minus {rival}: " + ", ".join(f"{name} {_interval(each)}" for name, each in found.items()))


def _share(found: Mapping[str, Any]) -> str:
    return "not reached" if found["share"] is None else f"{found['share']:.1%}"


def _with_spread(row: Mapping[str, Any]) -> str:
    return f"{row['judge']:.3f} ± {row['spread']:.3f}"


def _interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
