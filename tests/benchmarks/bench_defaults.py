"""What the defaults of a search rest on: the share of samples that is fitted, and how trials are stopped early.

Everything is as in `bench_search`: trained families, exact match in one pass, judge items that no search saw, and every
finished search stored in `.bench/search`. All rows of a table may spend the same.

    make bench ONLY=defaults
    DEFAULTS_PARTS=fit_share,schedulers SEARCH_FAMILIES=shipped SEARCH_SEEDS=0-1 make bench ONLY=defaults

- `fit_share`: `auto` on the mean of the skills for 8 full evaluations' worth. Of the search items, gradients are of all
  and trials are scored on a part of the same ones; or gradients are of a share, and trials are scored on others.
- `schedulers`: `auto` (half of the budget for the descent, the rest for the local search after it), SMAC and the (1+1)
  evolution strategy, with every trial scored in full, and with those that stop trials early.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tests.benchmarks.bench_search import EVALUATION, NUM_COMPARED, RIVAL_SPACE, done, judge_all, single_spec, summary
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_intervals import interval
from tests.benchmarks.search_runs import Bench, SearchSpec

BUDGET = 8 * EVALUATION
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
    return SearchSpec(family, "mean", name, seed, search, space, SCHEDULERS[scheduler], BUDGET)


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
    specs = {f"fit_share {share:g}": [[share_spec(f, s, share) for s in seeds] for f in families] for share in SHARES}
    return _rows(specs, first="fit_share 1")


def schedulers(families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    rows = []
    for searcher in SEARCHERS:
        specs = {
            f"{searcher}, {scheduler}": [[scheduler_spec(f, s, searcher, scheduler) for s in seeds] for f in families]
            for scheduler in SCHEDULERS
        }
        rows += _rows(specs, first=f"{searcher}, none")
    return rows


def _rows(specs: dict[str, list[list[SearchSpec]]], *, first: str) -> list[dict[str, Any]]:
    """A row for each name, over families and seeds; differences are from the row named `first`, item by item."""
    found = {}
    for name, of_families in specs.items():
        runs = [[done(Bench.of(spec.family), spec) for spec in each] for each in of_families]
        found[name] = runs, [judge_all(Bench.of(each[0].spec.family), each) for each in runs]
    rows = []
    for name, (runs, judged) in found.items():
        per_family = [summary(values, [r.best().mean for r in each]) for each, values in zip(runs, judged, strict=True)]
        rows.append({
            "name": name,
            "search": [each["search"] for each in per_family],
            "judge": [each["judge"] for each in per_family],
            "spread": [each["spread"] for each in per_family],
            "spent": max(r.spent for each in runs for r in each),
            "full_trials": [len(r.proposed().trials) for each in runs for r in each],
            "minus_first": None if name == first else interval(judged, found[first][1]),
        })  # fmt: skip
    return rows


def show(result: dict[str, Any]) -> None:
    print(f"seeds {result['seeds']}, at most {BUDGET} samples' worth; judge items, ± over seeds, by family")
    for part in ("fit_share", "schedulers"):
        if part not in result:
            continue
        print("\n| search | search data | judge | trials scored in full | minus the first |\n|---|---|---|---|---|")
        for row in result[part]:
            judge = ", ".join(f"{v:.3f} ± {s:.3f}" for v, s in zip(row["judge"], row["spread"], strict=True))
            search = ", ".join(f"{value:.3f}" for value in row["search"])
            full = sum(row["full_trials"]) / len(row["full_trials"])
            minus = row["minus_first"]
            shown = "" if minus is None else f"{minus['value']:+.3f} [{minus['low']:+.3f}, {minus['high']:+.3f}]"
            print(f"| {row['name']} | {search} | {judge} | {full:.1f} | {shown} |")
