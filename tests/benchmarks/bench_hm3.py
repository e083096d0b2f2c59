"""HM3's policy and the other searchers of layer paths on the shipped family: three objectives, the same samples for
all, real engines.

    make bench ONLY=hm3
    HM3_METHODS=hm3,moead HM3_SEEDS=0-4 HM3_TRIALS=960 make bench ONLY=hm3

Each search is `mergesearch run` in a directory of its own, `.bench/hm3/METHOD-SEED-TRIALS`: one that is finished is
not run again, and one that was interrupted goes on. Of each the hypervolume is reported: of the front that its own
proposals have on search data, and of its finalists, sources and published recipes among them, on holdout data, as
pareto.json has it. `hm3_merged` is `hm3` with one more model in the pool, merged by the preference.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from search_spaces.objectives import hypervolume, non_dominated
from search_spaces.study.file import load_study

ROOT = Path(__file__).parents[2]
CACHE = Path(".bench/hm3")

EPISODES = 30
POLICY = {"policy": "conditioned", "episodes": EPISODES}
METHODS: Mapping[str, Mapping[str, Any]] = {
    "hm3": {"algorithm": "hm3", "preferences": {"lattice": 4}},
    "hm3_merged": {"algorithm": "hm3", "preferences": {"lattice": 4}},
    "moead": {"algorithm": "moead"},
    "smac": {"algorithm": "smac"},
    "grid": {"algorithm": "grid"},
    "random": {"algorithm": "random"},
}


def study(method: str, seed: int, trials: int) -> dict[str, Any]:
    """docs/examples/hm3.yaml with another searcher. A third of the policy's iterations explore less and less."""
    document = load_study(ROOT / "docs" / "examples" / "hm3.yaml").canonical()
    search: dict[str, Any] = {**METHODS[method], "max_trials": trials, "seed": seed}
    if search["algorithm"] == "hm3":
        search["hm3"] = {**POLICY, "explored": max(1, trials // EPISODES // 3)}
    document["search_space"]["merged"] = {} if method == "hm3_merged" else None
    return {**document, "name": f"{method}-{seed}", "search": search}


def run(methods: str = "", seeds: str = "", trials: int = 0) -> dict[str, Any]:
    chosen = (methods or os.environ.get("HM3_METHODS") or ",".join(METHODS)).split(",")
    first, _, last = (seeds or os.environ.get("HM3_SEEDS") or "0-4").partition("-")
    numbers = list(range(int(first), int(last or first) + 1))
    count = trials or int(os.environ.get("HM3_TRIALS") or 960)
    found = {method: [_volumes(method, seed, count) for seed in numbers] for method in chosen}
    return {"trials": count, "seeds": numbers, "volumes": found}


def _volumes(method: str, seed: int, trials: int) -> dict[str, float]:
    directory = CACHE / f"{method}-{seed}-{trials}"
    if not _is_finished(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = directory.with_suffix(".json")
        file.write_text(json.dumps(study(method, seed, trials)))
        command = [sys.executable, "-m", "service.cli.main", "run", str(file), "--out", str(directory)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    pareto = json.loads((directory / "pareto.json").read_text())
    rows = [json.loads(line) for line in (directory / "trials.jsonl").read_text().splitlines()]
    costs = [
        tuple(1 - value for value in row["values"].values())
        for row in rows
        if row["origin"] == "search" and row["state"] == "COMPLETE"
    ]
    front = [each for each, is_best in zip(costs, non_dominated(costs), strict=True) if is_best]
    judged = pareto["holdout_hypervolume"]
    return {
        "search": hypervolume(front),
        "holdout": judged["value"],
        "paths": float(len({row["recipe_digest"] for row in rows if row["origin"] == "search"})),
    }


def _is_finished(directory: Path) -> bool:
    file = directory / "summary.json"
    return file.exists() and json.loads(file.read_text())["state"] == "COMPLETE"


def show(result: dict[str, Any]) -> None:
    print(f"{result['trials']} trials, seeds {', '.join(map(str, result['seeds']))}; mean (deviation)")
    print("| method | proposals, search data | finalists, holdout data | different paths |\n|---|---|---|---|")
    for method, runs in result["volumes"].items():
        cells = []
        for name, digits in (("search", 3), ("holdout", 3), ("paths", 0)):
            values = [each[name] for each in runs]
            cells.append(f"{statistics.fmean(values):.{digits}f} ({statistics.pstdev(values):.{digits}f})")
        print(f"| {method} | {' | '.join(cells)} |")
