"""CPU seconds of whole commands: their start-up, and merges compared with mergekit's command.

User and system time are counted, which other programs on the machine change little. Start-up: `mergesearch merge` of
two of the shipped experts, and `run --check` of the example study, compared with a process that imports torch. Merges:
the models of `merge_family` in a RAM disk, with one mergekit file for both programs. Each command ran once before, so
fingerprints, compiled kernels and vLLM's answers about models are cached.
"""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks import merge_family

REPEATS = 3
# Bars as multiples of the time of importing torch: must, goal.
START_UP = (1.5, 1.2)
# Times less than mergekit's command: must; goal 8 for the last two.
MUST = {"linear": 2.5, "slerp": 2.5, "ties_weighted": 4.0, "dare_ties_l1": 4.0}
OURS = (sys.executable, "-m", "service.cli.main")
EXAMPLES = Path("docs/examples")


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        environment = {"OMP_NUM_THREADS": str(merge_family.THREADS), "HF_HUB_OFFLINE": "1"}
        out = directory / "out"
        started = {
            "import torch": (sys.executable, "-c", "import torch"),
            "merge": (*OURS, "merge", str(EXAMPLES / "mergekit.yml"), "--out", str(out)),
            "run --check": (*OURS, "run", str(EXAMPLES / "lfs.yaml"), "--out", str(directory / "run"), "--check"),
        }
        start_up = _medians(started, out, environment)
        merge_family.output("tests.benchmarks.bench_merge", "make", str(directory))
        family = merge_family.open_made(directory)
        merges = {}
        for method in MUST:
            candidate = merge_family.recipe(family, method, 0)
            file = directory / f"{method}.yml"
            file.write_text(yaml.safe_dump(merge_family.mergekit_config(directory, candidate, method)))
            theirs = (sys.executable, "-m", "mergekit.scripts.run_yaml", str(file), str(out), "--no-write-model-card")
            commands = {"ours": (*OURS, "merge", str(file), "--out", str(out)), "mergekit": theirs}
            merges[method] = _medians(commands, out, environment)
    return {"start_up_cpu_s": start_up, "merge_cpu_s": merges, "start_up": START_UP, "must": MUST}


def show(result: dict[str, Any]) -> None:
    start_up = result["start_up_cpu_s"]
    least = start_up["import torch"]
    for name, seconds in start_up.items():
        print(f"{name:<14} {seconds:6.2f} CPU s, {seconds / least:.2f} times import torch")
    print("merge: must {} times, goal {}".format(*result["start_up"]))
    print("method          ours CPU s  mergekit CPU s  less  must")
    for method, seconds in result["merge_cpu_s"].items():
        ours, theirs = seconds["ours"], seconds["mergekit"]
        print(f"{method:<16} {ours:9.2f} {theirs:15.2f} {theirs / ours:4.1f}x {result['must'][method]:4.1f}x")


def _medians(commands: Mapping[str, tuple[str, ...]], out: Path, environment: Mapping[str, str]) -> dict[str, float]:
    """The median CPU seconds of each command, run in turns; their files in `out` are removed."""
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(1 + REPEATS):
        for name, command in commands.items():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **environment})
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            shutil.rmtree(out, ignore_errors=True)
            seconds[name].append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    return {name: statistics.median(taken[1:]) for name, taken in seconds.items()}
