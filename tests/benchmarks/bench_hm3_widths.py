"""Scores of random layer paths through two models of different widths, by the kind of alignment between layers.

The narrow model is the shipped expert `text`, of 96 channels. The wide one, of 128, computes the same as the shipped
expert `math`, in channels that do not correspond to those of `text` (`tests/foreign_models.py`). So the scores of a
path through both are known if nothing is lost between them: those of the same path through `text` and `math`, which
share their channels. Every arm has the same 40 paths of a seed, on a vLLM engine.

    make bench ONLY=hm3_widths
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tests.benchmarks.arms import kept
from tests.benchmarks.code_digests import statements_of
from tests.foreign_models import foreign_model
from workers.export.expansion.files import expand
from workers.tiny_family import family_dir

BENCHMARK = "hm3_widths"
WIDTH, PATHS, SAMPLES = 128, 40, 100
OBJECTIVES = ("math", "text")
SEEDS = range(3)

# By the name of a row: the second model of the paths, and the alignment.
ROWS: Mapping[str, tuple[str, str]] = {
    "`text` and `math`, which share their channels": ("math", "none"),
    "`alignment: ridge`": ("wide", "ridge"),
    "`alignment: mlp`": ("wide", "mlp"),
    "`alignment: moments`": ("wide", "moments"),
    "`alignment: none`": ("wide", "none"),
}
CODE = ("workers/alignments/fitting.py", "workers/export/expansion/expanded_model.py", "tests/foreign_models.py")


def run() -> dict[str, Any]:
    return {"rows": {name: [arm(name, seed) for seed in SEEDS] for name in ROWS}}


def arm(name: str, seed: int) -> dict[str, Any]:
    second, alignment = ROWS[name]
    return kept(
        BENCHMARK,
        f"{second}-{alignment}-{seed}",
        {"seed": seed, "alignment": alignment, "second": second, "paths": PATHS, "samples": SAMPLES, "width": WIDTH},
        lambda: measured(second, alignment, seed),
        depends=lambda: {"code": _digest()},
    )


def _digest() -> str:
    root = Path(__file__).parents[2]
    return hashlib.sha256("".join(statements_of((root / file).read_text()) for file in CODE).encode()).hexdigest()[:16]


@cache
def models() -> Mapping[str, Path]:
    """Directories of the models, all of one shape; they are written once."""
    place, family = Path(tempfile.mkdtemp(prefix="mergesearch-widths-")), family_dir()
    experts = {alias: family / "experts" / alias for alias in OBJECTIVES}
    wide = foreign_model(experts["math"], place, width=WIDTH)
    found = expand({"base": family / "base", **experts, "wide": wide}, place / "models")
    return found.directories


def study(second: str, alignment: str, seed: int) -> dict[str, Any]:
    directories = {alias: str(directory) for alias, directory in models().items()}
    base = directories.pop("base")
    tasks = family_dir() / "tasks"
    return {
        "name": "widths",
        "models": {"base": base, "experts": directories},
        "search_space": {
            "kind": "hm3",
            "models": ["text", second],
            "alignment": alignment,
            "min_path_length": 6,
            "max_path_length": 10,
        },
        "search": {"algorithm": "random", "max_trials": PATHS, "seed": seed},
        "fidelity": {"scheduler": "none", "max_samples": SAMPLES},
        "objectives": [
            {
                "name": name,
                "task": {"file": str(tasks / f"{name}_search.jsonl"), "max_tokens": 8},
                "metric": "exact_match",
            }
            for name in OBJECTIVES
        ],
        "engine": {"max_model_len": 64},
    }


def measured(second: str, alignment: str, seed: int) -> dict[str, Any]:
    """Run the study, and return the values of its paths: their mean, the best mean of both objectives, and all."""
    with tempfile.TemporaryDirectory() as directory:
        file, out = Path(directory) / "study.json", Path(directory) / "run"
        file.write_text(json.dumps(study(second, alignment, seed)))
        _command("run", str(file), "--out", str(out))
        trials = json.loads(_command("trials", str(out), "--json"))
        verification = json.loads((out / "summary.json").read_text())["verification"]
    paths = [trial["values"] for trial in trials if trial["origin"] == "search"]
    assert len(paths) == PATHS
    assert verification["equal"] == verification["samples"] > 0
    values = np.array([[path[name] for name in OBJECTIVES] for path in paths])
    experts = {trial["label"]: trial["values"] for trial in trials if trial["origin"] == "source"}
    return {
        "mean": float(values.mean()),
        "best": float(values.mean(axis=1).max()),
        "values": values.round(4).tolist(),
        "wide": experts["expert:wide"],
        "math": experts["expert:math"],
    }


def _command(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "service.cli.main", *arguments], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"mergesearch {' '.join(arguments)}: {done.stderr[-2000:]}")
    return done.stdout


# -- tables ------------------------------------------------------------------------------------------------------------


def table() -> str:
    rows = {name: [arm(name, seed) for seed in SEEDS] for name in ROWS}
    reference = np.array([each["mean"] for each in next(iter(rows.values()))])
    lines = ["| paths through | mean of all paths | minus the first row | best path |", "|---|---|---|---|"]
    for name, arms in rows.items():
        means, best = (np.array([each[key] for each in arms]) for key in ("mean", "best"))
        minus = means - reference
        difference = f"{minus.mean():+.3f} ({minus.min():+.3f} to {minus.max():+.3f})" if minus.any() else ""
        lines.append(f"| {name} | {means.mean():.3f} ± {means.std(ddof=1):.3f} | {difference} | {best.mean():.3f} |")
    return "\n".join(lines)


def show(result: dict[str, Any]) -> None:
    print(table())


TABLES = {"alignments": table}
