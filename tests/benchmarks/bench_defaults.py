"""Search quality for different shares of fitted samples, and for different schedulers that stop trials early.

Everything is as in `bench_search`: trained families, exact match in one pass, judge items that no search saw, and arms
that are kept in `tests/benchmarks/results/search`.

    make bench ONLY=defaults
    DEFAULTS_PARTS=fit_share,schedulers SEARCH_FAMILIES=shipped SEARCH_SEEDS=0-1 make bench ONLY=defaults

- `fit_share`: `auto` on the mean of the skills, for the cost of 8 full evaluations. Either gradients use all search
  items and trials are scored on a part of these items, or gradients use a share and trials are scored on the other
  items.
- `schedulers`: `auto` (half of the budget for the descent, the rest for the local search after it), SMAC and the (1+1)
  evolution strategy, with every trial scored in full, and with those that stop trials early. The cost of running trials
  is not known when the last trial begins, so schedulers spend more than the budget by different amounts. Therefore a
  search is compared with the search of the same seed whose trials were all scored in full, after the same number of
  samples.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.benchmarks.arms import compared
from tests.benchmarks.bench_search import (
    DEVELOPMENT,
    EVALUATION,
    NUM_COMPARED,
    RIVAL_SPACE,
    answers_of,
    named,
    seeds_of,
    shown_interval,
    single_spec,
    summary,
)
from tests.benchmarks.search_arms import Best, best_of
from tests.benchmarks.search_families import FAMILIES
from tests.benchmarks.search_intervals import interval
from tests.benchmarks.search_runs import SearchSpec

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
    seeds = seeds_of("SEARCH_SEEDS")
    parts = {"fit_share": fit_share, "schedulers": schedulers}
    asked = os.environ.get("DEFAULTS_PARTS", ",".join(parts)).split(",")
    return {"seeds": list(seeds), **{part: parts[part](families, seeds) for part in asked}}


def fit_share(families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    found = {
        share: [[best_of(share_spec(family, seed, share)) for seed in seeds] for family in families] for share in SHARES
    }
    rows = []
    for share, each in found.items():
        minus = None if share == 1 else minus_of(f"fit_share-{share:g}-{named(seeds)}", each, found[1.0])
        rows.append(row_of(f"fit_share {share:g}", each, minus))
    return rows


def schedulers(families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    rows = []
    for searcher in SEARCHERS:

        def each(measure: Callable[[str, int], Best]) -> list[list[Best]]:
            return [[measure(family, seed) for seed in seeds] for family in families]

        def in_full(family: str, seed: int, cut: int, searcher: str = searcher) -> Best:
            return best_of(scheduler_spec(family, seed, searcher, "none"), cut=cut)

        for scheduler in SCHEDULERS:
            if scheduler == "none":
                rows.append(row_of(f"{searcher}, none", each(lambda family, seed: in_full(family, seed, BUDGET)), None))
                continue

            def stopped(family: str, seed: int, searcher: str = searcher, scheduler: str = scheduler) -> Best:
                return best_of(scheduler_spec(family, seed, searcher, scheduler))

            found = each(stopped)
            equal = each(lambda family, seed: in_full(family, seed, stopped(family, seed).spent))
            name = f"{searcher}-{scheduler.replace(', ', '-')}-{named(seeds)}"
            rows.append(row_of(f"{searcher}, {scheduler}", found, minus_of(name, found, equal)))
    return rows


def minus_of(name: str, ours: Sequence[Sequence[Best]], theirs: Sequence[Sequence[Best]]) -> dict[str, float]:
    """Paired difference between two lists of searches, item by item, over families and seeds."""
    return compared("search", f"defaults-{name}", interval, list(map(answers_of, ours)), list(map(answers_of, theirs)))


def row_of(name: str, found: Sequence[Sequence[Best]], minus: Mapping[str, float] | None) -> dict[str, Any]:
    """A table row for the searches of one variant, by family and seed."""
    per_family = [summary(each) for each in found]
    return {
        "name": name,
        "search": [each["search"] for each in per_family],
        "judge": [each["judge"] for each in per_family],
        "spread": [each["spread"] for each in per_family],
        "spent": sum(each.spent for of in found for each in of) / sum(map(len, found)),
        "full_trials": [each.proposed for of in found for each in of],
        "minus": minus,
    }


def show(result: dict[str, Any]) -> None:
    print(f"seeds {result['seeds']}, a budget of {BUDGET} samples' worth; judge items, ± over seeds, by family")
    for part in ("fit_share", "schedulers"):
        if part in result:
            print(f"\n{table(part, result[part])}")


def table(part: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Table with one row per search: scores on judge items by family, and the difference of the mean."""
    compared_with = "minus the first" if part == "fit_share" else "minus trials in full"
    lines = [f"| search | samples' worth | search data | judge items | trials scored in full | {compared_with} |"]
    lines.append("|---|---|---|---|---|---|")
    for row in rows:
        judge = ", ".join(f"{v:.3f} ± {s:.3f}" for v, s in zip(row["judge"], row["spread"], strict=True))
        search = ", ".join(f"{value:.3f}" for value in row["search"])
        full = sum(row["full_trials"]) / len(row["full_trials"])
        minus = "" if row["minus"] is None else shown_interval(row["minus"])
        lines.append(f"| {row['name']} | {row['spent']:,.0f} | {search} | {judge} | {full:.1f} | {minus} |")
    return "\n".join(lines)


TABLES: Mapping[str, Callable[[], str]] = {
    "schedulers": lambda: table("schedulers", schedulers(tuple(FAMILIES), DEVELOPMENT)),
}
