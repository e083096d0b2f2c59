"""Whether studies that compute gradients survive: 20 seeded kill -9s of a driver, a replica or a gradient actor.

HTTP server, Ray, its jobs, Serve, the gradient actor (of a tiny model) and store are real; the replicas are fakes.
Every study must end with the trials and steps of an undisturbed run.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.end_to_end.chaos import GRADIENT_KILLS, on_the_server, run_chaos
from tests.end_to_end.studies import write_gradient_study

NUM_KILLS, SEED = 20, 0


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        result = run_chaos(
            Path(directory),
            kills=random.Random(SEED).choices(tuple(GRADIENT_KILLS), k=NUM_KILLS),
            seed=SEED,
            rungs=(20, 60),
            max_trials=12,
            write_study=write_gradient_study,
            undisturbed=on_the_server,
            patience_s=300.0,
            FAKE_SCORER={"sample_delay_s": 0.01},
        )
    is_killed = sum(result["kills"].values()) == NUM_KILLS and all(result["kills"].get(part) for part in GRADIENT_KILLS)
    return {**result, "met": not result["differing"] and is_killed and any(result["gradients"])}


def show(result: dict[str, Any]) -> None:
    kills = ", ".join(f"{number} x {part}" for part, number in sorted(result["kills"].items()))
    print(f"kills: {kills}; {result['studies']} studies in {result['seconds']:.0f} s")
    print(f"gradients of each study: {', '.join(map(str, result['gradients']))}")
    print(f"studies that differ from an undisturbed run: {', '.join(result['differing']) or 'none'}   must be none")
