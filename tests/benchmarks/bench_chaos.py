"""Survival of studies under faults: 100 kills of their processes, five of them for lack of memory, and two long stops.

Kills are drawn from a seed: SIGKILL of drivers, trial actors, replicas, Serve's controller, the server and Ray's head.
Five times memory is filled until Ray's memory monitor ends workers. A driver and a replica are stopped (SIGSTOP) once
each. HTTP server, Ray, its jobs, Serve and store are real; the replicas are fakes. Every study must end with the trials
of an undisturbed run, and an event must report the replacement of each stopped process.
"""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

from tests.end_to_end.chaos import KILLS, MEMORY, STOPS, run_chaos

NUM_KILLS, NUM_MEMORY, SEED = 100, 5, 0
STOP_S = 300.0
SETTINGS = {"sample_delay_s": 0.03}


def run() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory:
        result = run_chaos(
            Path(directory),
            kills=[*random.Random(SEED).choices(tuple(KILLS), k=NUM_KILLS - NUM_MEMORY), *[MEMORY] * NUM_MEMORY],
            seed=SEED,
            stops=tuple(STOPS),
            stop_s=STOP_S,
            FAKE_SCORER=SETTINGS,
        )
    is_told = all(stop["told_after_s"] is not None for stop in result["stops"])
    return {**result, "met": not result["differing"] and is_told and sum(result["kills"].values()) >= 0.9 * NUM_KILLS}


def show(result: dict[str, Any]) -> None:
    kills = ", ".join(f"{number} x {part}" for part, number in sorted(result["kills"].items()))
    print(f"kills: {kills}; {result['studies']} studies in {result['seconds']:.0f} s")
    for stop in result["stops"]:
        told = "never" if stop["told_after_s"] is None else f"after {stop['told_after_s']:.0f} s"
        print(f"{stop['part']} stopped for {STOP_S:.0f} s: replacement told {told}")
    print(f"studies that differ from an undisturbed run: {', '.join(result['differing']) or 'none'}   must be none")
