"""Effect of single options of the spaces LFS and DIS on SMAC's results, on trained families.

The options are those of the ablations by Su and Geiping, "Fine, I'll Merge It Myself" (2025), at the size of the
shipped family: number of layer groups G and component groups C, unit that chooses a method, selection of experts, layer
retention (Table 5), orders of layers, and scales. Everything is as in `bench_search`: exact match in one pass, judge
items that no search saw, and arms that are kept in `tests/benchmarks/results/search`.

    make bench ONLY=ablations
    ABLATIONS=lfs,dis SEARCH_FAMILIES=shipped SEARCH_SEEDS=0-2 make bench ONLY=ablations

A search scores 40 configurations in full, and knows the sources and published recipes. `random` draws from the
published space. The comparison is of each search's proposed trial with the best mean on search data. The table also
counts the searches in which a baseline is better on these data, that is, which have found nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.arms import compared
from tests.benchmarks.bench_search import (
    EVALUATION,
    answers_of,
    named,
    num_known,
    seeds_of,
    shown_interval,
    summary,
)
from tests.benchmarks.search_arms import Best, best_of
from tests.benchmarks.search_intervals import interval
from tests.benchmarks.search_runs import SearchSpec

EVALUATIONS = 40
SEEDS = range(3)

LFS = {"kind": "lfs", "layer_groups": 4, "component_groups": 3}
DIS = {"kind": "dis", "depth_granularity": 1, "repeats": 1}

# The space as published, then one changed option each; the name says which.
ABLATIONS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "lfs": {
        "published": LFS,
        "layer_groups: 1": {**LFS, "layer_groups": 1},
        "layer_groups: 8": {**LFS, "layer_groups": 8},
        "component_groups: 1": {**LFS, "component_groups": 1},
        "method_per: component": {**LFS, "method_per": "component"},
        "selection: all": {**LFS, "selection": "all"},
    },
    "dis": {
        "published": DIS,
        "layer_retention: false": {**DIS, "layer_retention": False},
        "permutations: false": {**DIS, "permutations": False},
        "scales: false": {**DIS, "scales": False},
    },
}


def spec(family: str, seed: int, space: str, change: str, searcher: str = "smac") -> SearchSpec:
    name = f"{searcher}-{space}-{change.replace(': ', '-')}"
    search = {"algorithm": searcher, "max_trials": EVALUATIONS}
    fidelity = {"scheduler": "none", "max_samples": EVALUATION}
    return SearchSpec(family, "mean", name, seed, search, ABLATIONS[space][change], fidelity)


def run() -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    families = os.environ.get("SEARCH_FAMILIES", "shipped").split(",")
    seeds = seeds_of("SEARCH_SEEDS") if "SEARCH_SEEDS" in os.environ else SEEDS
    spaces = os.environ.get("ABLATIONS", ",".join(ABLATIONS)).split(",")
    return {"seeds": list(seeds), **{space: ablation(space, families, seeds) for space in spaces}}


def ablation(space: str, families: Sequence[str], seeds: range) -> list[dict[str, Any]]:
    """One row for each changed option of a space, and one for random search in the published space."""
    known: dict[tuple[str, str], int] = {}

    def searches(change: str, searcher: str = "smac") -> list[list[Best]]:
        specs = [[spec(family, seed, space, change, searcher) for seed in seeds] for family in families]
        known[change, searcher] = sum(num_known([best_of(each) for each in of]) for of in specs)
        return [[best_of(each, proposed=True) for each in of] for of in specs]

    published = searches("published")

    def minus(name: str, found: Sequence[Sequence[Best]]) -> dict[str, float]:
        arm = f"ablations-proposed-{space}-{name.replace(': ', '-')}-{'+'.join(families)}-{named(seeds)}"
        return compared("search", arm, interval, list(map(answers_of, found)), list(map(answers_of, published)))

    rows = [row_of("as published", published, None, known["published", "smac"])]
    for change in list(ABLATIONS[space])[1:]:
        found = searches(change)
        rows.append(row_of(f"`{change}`", found, minus(change, found), known[change, "smac"]))
    found = searches("published", "random")
    rows.append(row_of("as published, `random`", found, minus("random", found), known["published", "random"]))
    return rows


def row_of(
    name: str, found: Sequence[Sequence[Best]], minus: Mapping[str, float] | None, num_baselines: int
) -> dict[str, Any]:
    """A table row for the searches of one variant; in `num_baselines` of the searches a baseline was best."""
    per_family = [summary(each) for each in found]
    return {
        "name": name,
        "search": [each["search"] for each in per_family],
        "judge": [each["judge"] for each in per_family],
        "spread": [each["spread"] for each in per_family],
        "baselines": num_baselines,
        "searches": sum(map(len, found)),
        "minus": minus,
    }


def show(result: dict[str, Any]) -> None:
    print(f"seeds {result['seeds']}, {EVALUATIONS} configurations scored in full; judge items, ± over seeds, by family")
    for space in ABLATIONS:
        if space in result:
            print(f"\n{table(result[space])}")


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Table with one row per variant: scores on search data and judge items, and differences from the paper's space."""
    lines = [
        "| space | search data | judge items | minus as published | a baseline is better |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        judge = ", ".join(f"{v:.3f} ± {s:.3f}" for v, s in zip(row["judge"], row["spread"], strict=True))
        search = ", ".join(f"{value:.3f}" for value in row["search"])
        minus = "" if row["minus"] is None else shown_interval(row["minus"])
        known = f"{row['baselines']} of {row['searches']}"
        lines.append(f"| {row['name']} | {search} | {judge} | {minus} | {known} |")
    return "\n".join(lines)


TABLES = {
    "lfs": lambda: table(ablation("lfs", ("shipped",), SEEDS)),
    "dis": lambda: table(ablation("dis", ("shipped",), SEEDS)),
}
