"""The small study of additions that tests of commands and of the server share, and the results of a finished one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from search_spaces.recipe import Recipe
from service.store import JobWriter
from service.types import Origin, RungRecord, TrialRecord, TrialState

__all__ = ["score_baselines", "sums_study", "write_sums"]


def write_sums(directory: Path) -> None:
    """search.jsonl and holdout.jsonl, with 40 and 20 samples, all of them different."""
    for name, numbers in (("search", range(40)), ("holdout", range(40, 60))):
        lines = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in numbers]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def sums_study(models: Path, *, data_dir: Path = Path()) -> dict[str, Any]:
    """A study of the tiny family in `models` on the data in `data_dir`, which may be relative to the study's file."""

    def objective(name: str) -> dict[str, Any]:
        task = {"file": str(data_dir / f"{name}.jsonl"), "max_tokens": 6}
        return {"name": "sums", "task": task, "metric": "exact_match"}

    return {
        "name": "sums",
        "models": {"base": str(models / "base"), "experts": {a: str(models / a) for a in ("math", "text")}},
        "search_space": {"kind": "lfs", "layer_groups": 2, "component_groups": 3, "methods": ["ties", "linear"]},
        "search": {"algorithm": "random", "max_trials": 6, "seed": 0},
        "fidelity": {"scheduler": "hyperband", "min_samples": 4, "max_samples": 36, "eta": 3},
        "objectives": [objective("search")],
        "holdout": [objective("holdout")],
        "engine": {"max_model_len": 64, "replicas": 1},
    }


def score_baselines(writer: JobWriter, baselines: Iterable[tuple[Origin, str, Recipe]]) -> None:
    """Store the first eight baselines at full budget, in increasing order of values, and a failed searched trial."""
    for number, (origin, label, recipe) in enumerate(islice(baselines, 8)):
        writer.add_trial(TrialRecord(number, origin, label, TrialState.RUNNING, recipe))
        rung = RungRecord(2, {"sums": 36}, {"sums": number / 10}, {"sums": 0.01})
        writer.finish_rung(number, rung, samples_reused=0, state=TrialState.COMPLETE)
    writer.add_trial(
        TrialRecord(number + 1, Origin.SEARCH, "trial:8", TrialState.WAITING, recipe, 0, configuration={"a": 1})
    )
    writer.finish_trials([number + 1], TrialState.FAIL, "NaN logits")
