"""Survival of studies that compute gradients: their processes are killed in a seeded order.

HTTP server, Ray, its jobs, Serve, the gradient actor and store are real. Twenty kills of a driver, a replica or a
gradient actor (of a tiny model) while fakes score, and two while real engines score the shipped family: of a gradient
actor and a replica. Every study must end with the trials and steps of an undisturbed run.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.end_to_end.chaos import GRADIENT_KILLS, on_the_server, run_chaos
from tests.end_to_end.studies import write_gradient_study, write_shipped_gradient_study

NUM_KILLS, SEED = 20, 0
REAL_KILLS = ("gradient actor", "replica")


def run() -> dict[str, Any]:
    fakes = _run_chaos(
        kills=random.Random(SEED).choices(tuple(GRADIENT_KILLS), k=NUM_KILLS),
        rungs=(20, 60),
        max_trials=12,
        write_study=write_gradient_study,
        FAKE_SCORER={"sample_delay_s": 0.01},
    )
    engines = _run_chaos(
        kills=REAL_KILLS,
        rungs=(90, 270),
        max_trials=4,
        write_study=write_shipped_gradient_study,
        max_pause_s=10.0,
        command=("service.cli.main", "serve"),
    )
    is_killed = all(fakes["kills"].get(part) for part in GRADIENT_KILLS) and all(
        sum(result["kills"].values()) == number for result, number in ((fakes, NUM_KILLS), (engines, len(REAL_KILLS)))
    )
    is_equal = not any(result["differing"] or not any(result["gradients"]) for result in (fakes, engines))
    return {"fakes": fakes, "engines": engines, "met": is_killed and is_equal}


def _run_chaos(**options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        return run_chaos(Path(directory), seed=SEED, undisturbed=on_the_server, patience_s=300.0, **options)


def show(result: dict[str, Any]) -> None:
    for name in ("fakes", "engines"):
        part = result[name]
        kills = ", ".join(f"{number} x {what}" for what, number in sorted(part["kills"].items()))
        print(f"{name}: kills: {kills}; {part['studies']} studies in {part['seconds']:.0f} s")
        print(f"    gradients of each study: {', '.join(map(str, part['gradients']))}")
        print(
            f"    studies that differ from an undisturbed run: {', '.join(part['differing']) or 'none'}   must be none"
        )
