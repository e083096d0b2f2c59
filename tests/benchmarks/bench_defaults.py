"""What the defaults of a search rest on: the share of samples that is fitted, and how trials are stopped early.

Everything is as in `bench_search`: trained families, exact match in one pass, judge items that no search saw, and every
finished search stored in `.bench/search`.

    make bench ONLY=defaults
    DEFAULTS_PARTS=fit_share,schedulers SEARCH_FAMILIES=shipped SEARCH_SEEDS=0-1 make bench ONLY=defaults

- `fit_share`: `auto` on the mean of the skills for 8 full evaluations' worth. Of the search items, gradients are of all
  and trials are scored on a part of the same ones; or gradients are of a share, and trials are scored on others.
- `schedulers`: `auto` (half of the budget for the descent, the rest for the local search after it), SMAC and the (1+1)
  evolution strategy, with every trial scored in full, and with those that stop trials early. What the trials that have
  begun will cost is not known when the last one begins, so schedulers spend more than the budget, each another amount:
  a search is compared with that of its seed whose trials were all scored in full, after as many samples.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.bench_search import EVALUATION, NUM_COMPARED, RIVAL_SPACE, done, judge_all, single_spec, summary
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_intervals import interval
from tests.benchmarks.search_runs import Bench, Run, SearchSpec

BUDGET = 8 * EVALUATION
LONGEST = 12 * EVALUATION  # of searches whose trials are all scored in full, as long as any other
BATCH, POINTS = 48, 2

# Of 2,700 search items a share of 0.7 leaves the 810 of an evaluation.
SHARES = (1.0, 0.7, 0.4)

_RUNGS = {"min_samples": 90, "max_samples": EVALUATION}
SCHEDULERS: dict[str, dict[str, Any]] = {
    "none": {"scheduler": "none", "max_samples": EVALUATION},
    "hyperband": {"scheduler": "hyperband", **_RUNGS},
    "asha": {"scheduler": "asha", **_RUNGS},
    "racing, behind": {"scheduler": "racing", "rule": "behind", **_RUNGS},
    "racing, bound": {"scheduler": "racing", "rule": "bound", **_RUNGS},
}
SEARCHERS = ("auto", "smac", "es")


def share_spec(family: str, seed: int, share: float) -> SearchSpec:
    spec = single_spec(family, seed, BUDGET // EVALUATION)
    if share == 1:
        return spec
    return SearchSpec(
        family, "mean", f"auto-8-share-{share}", seed, {**spec.search, "fit_share": share}, fidelity=spec.fidelity
    )


def scheduler_spec(family: str, seed: int, searcher: str, scheduler: str) -> SearchSpec:
    name = f"{searcher}-{scheduler.replace(', ', '-')}"
    search: dict[str, Any] = {"algorithm": searcher, "max_trials": BUDGET // _RUNGS["min_samples"]}
    if searcher == "auto":
        steps = (BUDGET // 2 - NUM_COMPARED - POINTS * EVALUATION) // (3 * BATCH)
        search["gradient"] = {"steps": steps, "batch": BATCH, "points": POINTS}
    space = None if searcher == "auto" else RIVAL_SPACE
    budget = LONGEST if scheduler == "none" else BUDGET
    return SearchSpec(family, "mean", name, seed, search, space, SCHEDULERS[scheduler], budget)


def run() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    families = os.environ.get("SEARCH_FAMILIES", ",".join(FAMILIES)).split(",")
    first, _, last = os.environ.get("SEARCH_SEEDS", "0-4").partition("-")
    seeds = range(int(first), int(last or first) + 1)
    parts = {"fit_share": fit_share, "schedulers": schedulers}
    asked = os.environ.get("DEFAULTS_PARTS", ",".join(parts)).split(",")
    return {"seeds": list(seeds), **{part: parts[part](families, seeds) for part in asked}}


def fit_share(families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    runs = {
        f"fit_share {share:g}": [[done(Bench.of(f), share_spec(f, s, share)) for s in seeds] for f in families]
        for share in SHARES
    }
    return _rows(runs, first="fit_share 1")


def schedulers(families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    rows = []
    for searcher in SEARCHERS:
        runs = {
            scheduler: [
                [done(Bench.of(family), scheduler_spec(family, seed, searcher, scheduler)) for seed in seeds]
                for family in families
            ]
            for scheduler in SCHEDULERS
        }
        in_full = runs["none"]
        runs["none"] = [[run.cut(BUDGET) for run in each] for each in in_full]
        for scheduler, found in runs.items():
            equal = [list(map(after_as_much, each, of)) for each, of in zip(in_full, found, strict=True)]
            *_, row = _rows({"in full": equal, f"{searcher}, {scheduler}": found}, first="in full")
            rows.append({**row, "minus_first": None} if scheduler == "none" else row)
    return rows


def after_as_much(run: Run, other: Run) -> Run:
    """`run` after as many samples' worth as all of `other`."""
    return run.cut(other.spent)


def _rows(found_by_name: Mapping[str, list[list[Run]]], *, first: str) -> list[dict[str, Any]]:
    """A row for each name, over families and seeds; differences are from the row named `first`, item by item."""
    found = {
        name: (runs, [judge_all(Bench.of(each[0].spec.family), each) for each in runs])
        for name, runs in found_by_name.items()
    }
    rows = []
    for name, (runs, judged) in found.items():
        per_family = [summary(values, [r.best().mean for r in each]) for each, values in zip(runs, judged, strict=True)]
        rows.append({
            "name": name,
            "search": [each["search"] for each in per_family],
            "judge": [each["judge"] for each in per_family],
            "spread": [each["spread"] for each in per_family],
            "spent": sum(r.spent for each in runs for r in each) / sum(map(len, runs)),
            "full_trials": [len(r.proposed().trials) for each in runs for r in each],
            "minus_first": None if name == first else interval(judged, found[first][1]),
        })  # fmt: skip
    return rows


def show(result: dict[str, Any]) -> None:
    print(f"seeds {result['seeds']}, a budget of {BUDGET} samples' worth; judge items, ± over seeds, by family")
    for part in ("fit_share", "schedulers"):
        if part not in result:
            continue
        compared = "minus the first" if part == "fit_share" else "minus trials in full for as many samples"
        print(f"\n| search | samples' worth | search data | judge | trials scored in full | {compared} |")
        print("|---|---|---|---|---|---|")
        for row in result[part]:
            judge = ", ".join(f"{v:.3f} ± {s:.3f}" for v, s in zip(row["judge"], row["spread"], strict=True))
            search = ", ".join(f"{value:.3f}" for value in row["search"])
            full = sum(row["full_trials"]) / len(row["full_trials"])
            minus = row["minus_first"]
            shown = "" if minus is None else f"{minus['value']:+.3f} [{minus['low']:+.3f}, {minus['high']:+.3f}]"
            print(f"| {row['name']} | {row['spent']:.0f} | {search} | {judge} | {full:.1f} | {shown} |")
