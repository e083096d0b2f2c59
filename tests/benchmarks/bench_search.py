"""Quality of the merges that `auto` and black-box searchers find on trained families, by their cost in samples.

`bench_searchers` compares searchers on families with made-up accuracies: true values are known, spaces with conditions
and choices are searched too, and a run takes minutes. Here models are trained, so gradients exist, and merges can be
judged on items that no search saw. A run takes hours. Every search is an arm, kept in
`tests/benchmarks/results/search`, and an interrupted bench continues after the last arm.

    make bench ONLY=search
    SEARCH_PARTS=demo,single,front SEARCH_FAMILIES=shipped,letters SEARCH_SEEDS=0-4 make bench ONLY=search

Seeds 0 to 4 are those of development. The default searcher is named before seeds 100 to 104 are run, on all families,
and nothing is chosen by those: `SEARCH_SEEDS=100-104`.

A sample that is scored for a proposed trial counts 1, a sample of a loss 1, one of a gradient 3; sources and published
recipes are not counted. The parts:

- `demo`: the shipped study with `auto` on three objectives, compared with task arithmetic (its lambda found by a scan
  on all search data), and with black-box searchers for as many samples.
- `single`: one objective, the mean of the skills. `auto` for 8 and for 5 full evaluations' worth against the black-box
  searcher that is best on the judge items of each family after 40: the strongest rival, known only in hindsight.
- `front`: three objectives. After how many samples' worth `auto` has the hypervolume that random search has after 200
  full evaluations; and hypervolumes at equal samples, of fronts chosen on search data, on judge items.

The setting of black-box searchers was fixed before any of them was run: one coefficient from 0 to 1 for each expert in
each of four groups of layers, embedding and head (18 numbers: few, as suits them, and all sensible), full evaluations
only, and the baselines as known results. The best trial of a search is the one with the best mean on its search data,
baselines included, as in a study.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.benchmarks.arms import compared, kept, packed, unpacked
from tests.benchmarks.one_pass_check import check_against_engine
from tests.benchmarks.search_arms import Best, Front, best_of, depends_on, done, front_in, volume
from tests.benchmarks.search_families import FAMILIES, FULL
from tests.benchmarks.search_intervals import interval, volume_interval, volume_of
from tests.benchmarks.search_runs import Bench, Run, SearchSpec

BENCHMARK = "search"
DEVELOPMENT, HELD_OUT = range(5), range(100, 105)  # seeds
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

# Settings of `auto` on three objectives: the divisions of the preference vectors' lattice, the descents, and all
# trials, which use up each budget. They were chosen on seeds 0 and 1 of all families. The first setting, chosen before
# any run (all vectors of lattice 2, batches of 48, no midpoints), had reached the target with no seed from 100 to 104
# of the shipped family.
FRONT_OPTIONS: Mapping[int, tuple[int, Mapping[str, int], int]] = {
    20: (3, {"steps": 75, "warm_steps": 19, "batch": 12, "points": 7}, 11),
    60: (4, {"steps": 150, "warm_steps": 40, "batch": 12, "points": 12}, 32),
}
LAMBDAS = tuple(round(0.05 * i, 2) for i in range(1, 31))


def demo_spec(family: str, seed: int) -> SearchSpec:
    """The shipped study with the defaults of `auto`."""
    search = {"algorithm": "auto", "max_trials": 4}
    return SearchSpec(family, "skills", "demo", seed, search, fidelity={"scheduler": "none", "max_samples": FULL})


def single_spec(family: str, seed: int, evaluations: int) -> SearchSpec:
    """`auto` on the mean of the skills; a quarter of the evaluations are points of the descent."""
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
    """A search by a black-box searcher; a shorter search is the beginning of a longer one."""
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
    seeds = seeds_of("SEARCH_SEEDS")
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


def seeds_of(variable: str) -> range:
    """Seeds in an environment variable, such as "3" or "0-4"; without the variable, the seeds of development."""
    first, _, last = os.environ.get(variable, "0-4").partition("-")
    return range(int(first), int(last or first) + 1)


def demo(families: Sequence[str], seeds: range) -> dict[str, Any]:
    """Compare searches of the shipped study; `families` has no effect."""
    auto = [best_of(demo_spec("shipped", seed)) for seed in seeds]
    winners = answers_of(auto)
    scan = scanned("shipped")
    alone = np.broadcast_to(unpacked(scan["answers"]), winners.shape)

    def minus(name: str, ours: NDArray[np.bool_], theirs: NDArray[np.bool_]) -> dict[str, float]:
        return compared(BENCHMARK, f"demo-{name}", interval, [ours], [theirs])

    rows = []
    for searcher in SINGLE_RIVALS:
        specs = [rival_spec("shipped", seed, "mean", searcher, DEMO_BUDGET // EVALUATION) for seed in seeds]
        found = [best_of(spec) for spec in specs]
        values = answers_of(found)
        rows.append({
            "searcher": searcher,
            "spent": found[0].spent,
            **summary(found),
            "known_recipes": num_known(found),
            "auto_minus": minus(f"{searcher}-{named(seeds)}", winners, values),
        })  # fmt: skip
    beside = minus(f"scan-{named(seeds)}", winners, alone)
    is_met = winners.mean() >= DEMO_MUST and max(each.spent for each in auto) <= DEMO_BUDGET and beside["low"] > 0
    return {
        "met": bool(is_met),
        "auto": {"spent": [each.spent for each in auto], "seconds": [each.seconds for each in auto], **summary(auto)},
        "scan": {"lambda": scan["lambda"], "search": scan["search"], "judge": float(alone.mean()),
                 "auto_minus": beside,
                 "auto_minus_by_seed": [minus(f"scan-{seed}", winners[[i]], alone[[i]])
                                        for i, seed in enumerate(seeds)]},
        "rivals": rows,
    }  # fmt: skip


def single(families: Sequence[str], seeds: range) -> dict[str, Any]:
    ours: dict[int, list[NDArray[np.bool_]]] = {budget: [] for budget in SINGLE_BUDGETS}
    theirs: list[NDArray[np.bool_]] = []
    best_rivals: dict[str, str] = {}
    rows: list[dict[str, Any]] = []
    for family in families:
        rivals: dict[str, NDArray[np.bool_]] = {}
        for budget in SINGLE_BUDGETS:
            found = [best_of(single_spec(family, seed, budget)) for seed in seeds]
            ours[budget].append(answers_of(found))
            rows.append(row_of(family, "auto", budget, found))
        for searcher in SINGLE_RIVALS:
            found = [best_of(rival_spec(family, seed, "mean", searcher, SINGLE_EVALUATIONS)) for seed in seeds]
            rivals[searcher] = answers_of(found)
            rows.append(row_of(family, searcher, SINGLE_EVALUATIONS, found))
        best_rivals[family] = max(SINGLE_RIVALS, key=lambda searcher: rivals[searcher].mean())
        theirs.append(rivals[best_rivals[family]])

    def minus(budget: int, which: slice, name: str) -> dict[str, float]:
        arm = f"single-{budget}-{name}-{named(seeds)}"
        return compared(BENCHMARK, arm, interval, ours[budget][which], theirs[which])

    differences = {
        str(budget): {
            "all": minus(budget, slice(None), "+".join(families)),
            **{family: minus(budget, slice(i, i + 1), family) for i, family in enumerate(families)},
        }
        for budget in SINGLE_BUDGETS
    }
    is_met = differences[str(SINGLE_BUDGETS[0])]["all"]["low"] > SINGLE_MUST
    return {"met": is_met, "rows": rows, "best_rivals": best_rivals, "auto_minus_best_rival": differences}


def front(families: Sequence[str], seeds: range) -> dict[str, Any]:
    reached = [target_of(family, seed) for family in families for seed in seeds]
    rows = []
    fronts: dict[tuple[str, int], list[list[NDArray[np.bool_]]]] = {}
    for family in families:
        for budget in FRONT_BUDGETS:
            for searcher in ("auto", *FRONT_RIVALS):
                found = [
                    front_in(front_searches(family, seed, searcher, budget), budget * EVALUATION) for seed in seeds
                ]
                fronts.setdefault((searcher, budget), []).append([each.answers for each in found])
                rows.append(front_row(family, searcher, budget, found))

    def minus(searcher: str, budget: int, which: slice, name: str) -> dict[str, float]:
        arm = f"front-{searcher}-{budget}-{name}-{named(seeds)}"
        pair = fronts["auto", budget][which], fronts[searcher, budget][which]
        return compared(BENCHMARK, arm, volume_interval, *pair)

    differences = {
        f"{searcher} at {budget}": {
            "all": minus(searcher, budget, slice(None), "+".join(families)),
            **{family: minus(searcher, budget, slice(i, i + 1), family) for i, family in enumerate(families)},
        }
        for budget in FRONT_BUDGETS
        for searcher in FRONT_RIVALS
    }
    shares = [row["all"]["share"] for row in reached]
    is_met = all(share is not None and share <= FRONT_MUST for share in shares)
    is_met = is_met and all(found["all"]["low"] > 0 for found in differences.values())
    return {"met": is_met, "reached": reached, "rows": rows, "auto_minus": differences}


def front_searches(family: str, seed: int, searcher: str, budget: int) -> SearchSpec:
    """The search whose front after `budget` evaluations is compared; a rival has one search for all budgets."""
    if searcher == "auto":
        return front_spec(family, seed, budget)
    trials = TARGET_EVALUATIONS if searcher == "random" else max(FRONT_BUDGETS)
    return rival_spec(family, seed, "skills", searcher, trials)


# -- what searches found -----------------------------------------------------------------------------------------------


def answers_of(found: Sequence[Best]) -> NDArray[np.bool_]:
    """Answers of the best trial of each search, [searches, skills, items]."""
    return np.stack([each.answers for each in found])


def num_known(found: Sequence[Best]) -> int:
    """Number of searches whose best trial is a baseline."""
    return sum(each.origin != "search" for each in found)


def named(seeds: range) -> str:
    return f"{seeds[0]}-{seeds[-1]}"


def scanned(family: str) -> dict[str, Any]:
    """Task arithmetic with the lambda that is best in a scan on all search items."""
    from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

    def measure() -> dict[str, Any]:
        bench = Bench.of(family)
        models, experts = bench.judge.models.family, bench.family.skills

        def recipe(lambda_: float) -> Recipe:
            def merge(layer: int | None) -> Merge:
                return Merge("task_arithmetic", tuple(Source(e, layer) for e in experts), {"lambda": lambda_})

            layers = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(bench.judge.models.num_layers))
            return Recipe(models.fingerprints, models.base.alias, layers, merge(None), merge(None)).canonical()

        found = {lambda_: float(bench.searched(recipe(lambda_), 0).mean()) for lambda_ in LAMBDAS}
        best = max(found, key=lambda lambda_: found[lambda_])
        return {"lambda": best, "search": found[best], "answers": packed(bench.judged(recipe(best)))}

    settings = {"family": family, "lambdas": LAMBDAS}
    return kept(BENCHMARK, f"scan-{family}", settings, measure, depends=lambda: {"family": FAMILIES[family].digest})


def row_of(family: str, searcher: str, evaluations: int, found: Sequence[Best]) -> dict[str, Any]:
    return {
        "family": family,
        "searcher": searcher,
        "evaluations": evaluations,
        "spent": max(each.spent for each in found),
        "known_recipes": num_known(found),
        **summary(found),
    }


def front_row(family: str, searcher: str, evaluations: int, found: Sequence[Front]) -> dict[str, Any]:
    return {
        "family": family,
        "searcher": searcher,
        "evaluations": evaluations,
        "search": [each.search for each in found],
        "judge": [volume_of(each.answers) for each in found],
        "merges": [len(each.answers) for each in found],
    }


def summary(found: Sequence[Best]) -> dict[str, Any]:
    by_seed = answers_of(found).mean(axis=(1, 2))
    return {
        "judge": float(by_seed.mean()),
        "spread": _std(by_seed.tolist()),
        "by_seed": by_seed.tolist(),
        "search": float(np.mean([each.search for each in found])),
    }


def target_of(family: str, seed: int) -> dict[str, Any]:
    """Number of samples until `auto` reaches the hypervolume of all trials of random search.

    Baselines count on both sides, or ("proposed") on none.
    """
    specs = [front_searches(family, seed, searcher, FRONT_BUDGETS[0]) for searcher in ("auto", "random")]

    def measure() -> dict[str, Any]:
        auto, random = (done(Bench.of(family), spec) for spec in specs)
        row: dict[str, Any] = {}
        for key, ours, theirs in (("all", auto, random), ("proposed", auto.proposed(), random.proposed())):
            target = volume(theirs.trials)
            spent = samples_to_reach(ours, target)
            share = None if spent is None else spent / (TARGET_EVALUATIONS * EVALUATION)
            row[key] = {"target": target, "auto": volume(ours.trials), "spent": spent, "share": share}
        return row

    settings = {"specs": [asdict(spec) for spec in specs]}
    found = kept(BENCHMARK, f"reached/{family}-{seed}", settings, measure, depends=depends_on(*specs))
    return {"family": family, "seed": seed, **found}


def samples_to_reach(run: Run, target: float) -> int | None:
    """Cost of a run in samples when the front of all trials so far reaches a hypervolume; None if it never does."""
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
    print(demo_table(part))
    print(f"held out by seed: {_each(auto['by_seed'])}; seconds: {[round(s) for s in auto['seconds']]}")
    print("auto minus the scan's, by seed: " + ", ".join(map(shown_interval, scan["auto_minus_by_seed"])))


def demo_table(part: Mapping[str, Any]) -> str:
    """Table of held-out means of `auto`, of the scan and of black-box searchers, the best first."""
    auto, scan = part["auto"], part["scan"]
    one = f"task arithmetic, lambda {scan['lambda']}, the best of {len(LAMBDAS)} on all search items"
    lines = ["| searcher | samples' worth | search data | held out | `auto` minus it |", "|---|---|---|---|---|"]
    lines.append(f"| `auto` | {max(auto['spent']):,} | {auto['search']:.3f} | {_with_spread(auto)} | |")
    lines.append(f"| {one} | | {scan['search']:.3f} | {scan['judge']:.3f} | {shown_interval(scan['auto_minus'])} |")
    for row in sorted(part["rivals"], key=lambda row: -row["judge"]):
        lines.append(
            f"| `{row['searcher']}` | {row['spent']:,} | {row['search']:.3f} | {_with_spread(row)} | "
            f"{shown_interval(row['auto_minus'])} |"
        )
    return "\n".join(lines)


def show_single(part: dict[str, Any]) -> None:
    must, goal = SINGLE_BUDGETS
    print(f"\nsingle objective: must lower end above {SINGLE_MUST} with {must} evaluations' worth, goal with {goal}; "
          f"met: {part['met']}")  # fmt: skip
    print(single_table(part))
    for row in part["rows"]:
        if row["known_recipes"]:
            known = f"{row['known_recipes']} of {len(row['by_seed'])}"
            print(f"{row['family']}, {row['searcher']} {row['evaluations']}: best is a baseline in {known}")
    print(f"best rivals: {part['best_rivals']}")
    for budget, found in part["auto_minus_best_rival"].items():
        print(f"auto after {budget} minus the best rival after {SINGLE_EVALUATIONS}: "
              + ", ".join(f"{name} {shown_interval(each)}" for name, each in found.items()))  # fmt: skip


def single_table(part: Mapping[str, Any]) -> str:
    """Table of means on judge items by family; black-box searchers are sorted by their mean over all families."""
    by_searcher = _by_family(part["rows"])
    lines = _family_head(by_searcher)
    for (searcher, evaluations), rows in by_searcher.items():
        cells = (_with_spread(row) for row in rows.values())
        lines.append(f"| `{searcher}` | {evaluations} | {' | '.join(cells)} |")
    return "\n".join(lines)


def show_front(part: dict[str, Any]) -> None:
    print(
        f"\nthree objectives: must reach the hypervolume of random search after {TARGET_EVALUATIONS} evaluations with"
    )
    print(f"{FRONT_MUST:.0%} of its samples, goal 2%, and be above each rival; met: {part['met']}; without "
          "baselines in brackets")  # fmt: skip
    print("| family | seed | random search's | auto's | reached with |\n|---|---|---|---|---|")
    for row in part["reached"]:
        one, other = row["all"], row["proposed"]
        cells = (f"{one[key]:.3f} ({other[key]:.3f})" for key in ("target", "auto"))
        print(f"| {row['family']} | {row['seed']} | {' | '.join(cells)} | {_share(one)} ({_share(other)}) |")
    print(front_table(part))
    for rival, found in part["auto_minus"].items():
        print(f"auto minus {rival}: " + ", ".join(f"{name} {shown_interval(each)}" for name, each in found.items()))


def front_table(part: Mapping[str, Any]) -> str:
    """Table of hypervolumes on judge items by family, with differences over all families; best rival first."""
    by_searcher = _by_family([{**row, "by_seed": row["judge"]} for row in part["rows"]])
    first, rule = _family_head(by_searcher)
    lines = [f"{first} `auto` minus it |", f"{rule}---|"]
    for budget in FRONT_BUDGETS:
        for (searcher, evaluations), rows in by_searcher.items():
            if evaluations == budget:
                cells = (f"{np.mean(row['judge']):.3f} ± {_std(row['judge']):.3f}" for row in rows.values())
                minus = part["auto_minus"].get(f"{searcher} at {budget}")
                shown = "" if minus is None else f" {shown_interval(minus['all'])}"
                lines.append(f"| `{searcher}` | {evaluations} | {' | '.join(cells)} |{shown} |")
    return "\n".join(lines)


def _by_family(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, int], dict[str, Mapping[str, Any]]]:
    """Rows by searcher and evaluations, then by family; `auto` first, others by their mean over families and seeds."""
    found: dict[tuple[str, int], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["searcher"], row["evaluations"]), {})[row["family"]] = row

    def place(of: tuple[str, int]) -> tuple[bool, float]:
        return of[0] != "auto", -float(np.mean([row["by_seed"] for row in found[of].values()]))

    return {each: found[each] for each in sorted(found, key=place)}


def _family_head(by_searcher: Mapping[Any, Mapping[str, Any]]) -> list[str]:
    families = list(next(iter(by_searcher.values())))
    return [f"| searcher | evaluations | {' | '.join(families)} |", f"|---|---|{'---|' * len(families)}"]


def _share(found: Mapping[str, Any]) -> str:
    return "not reached" if found["share"] is None else f"{found['share']:.1%}"


def _with_spread(row: Mapping[str, Any]) -> str:
    return f"{row['judge']:.3f} ± {row['spread']:.3f}"


def shown_interval(found: Mapping[str, float]) -> str:
    return f"{found['value']:+.3f} [{found['low']:+.3f}, {found['high']:+.3f}]"


def _each(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.3f}" for value in values)


def _std(values: Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


TABLES: Mapping[str, Callable[[], str]] = {
    "demo": lambda: demo_table(demo(tuple(FAMILIES), DEVELOPMENT)),
    "single": lambda: single_table(single(tuple(FAMILIES), DEVELOPMENT)),
    "single-held-out": lambda: single_table(single(tuple(FAMILIES), HELD_OUT)),
    "front-held-out": lambda: front_table(front(tuple(FAMILIES), HELD_OUT)),
}
