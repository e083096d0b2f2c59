"""From a recipe to an engine that serves it, against mergekit's merge and against mergekit and a new engine.

The models of `merge_family`, in float32; the engine is vLLM on CPU with two threads. A swap is: plan, merge, write in
place, pack again (CPU only, on its own line), reset the prefix cache, checksum. Every candidate has new coefficients;
"one layer" changes only the last layer of the candidate held. What users do today is a merge by mergekit to a RAM disk
and a new engine on it: both measured in processes of their own, once, imports excluded (and given apart).
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family
from tests.benchmarks.merge_family import STAND_INS, THREADS

METHODS = ("linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp")
REPEATS = 5
WITHOUT_REPACKING = (20, 100)  # must, goal: times faster than mergekit's merge alone
WITH_REPACKING = (20, 200)  # than the merge and a new engine


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        _output("tests.benchmarks.bench_merge", "make", str(directory))
        swaps = json.loads(_output(__name__, "swaps", str(directory)))
        restart = json.loads(_output(__name__, "restart", str(directory)))
        for row in swaps["methods"]:
            peer = STAND_INS.get(row["method"], row["method"])
            merge_s = json.loads(_output("tests.benchmarks.merge_family", str(directory), peer))["seconds"]
            without = row["median_s"] - row["repack_s"]
            row |= {
                "mergekit_s": merge_s,
                "without_repacking": merge_s / without,
                "with_repacking": (merge_s + restart["start_s"]) / row["median_s"],
            }
    return {
        "threads": THREADS,
        "without_repacking": dict(zip(("must", "goal"), WITHOUT_REPACKING, strict=True)),
        "with_repacking": dict(zip(("must", "goal"), WITH_REPACKING, strict=True)),
        "restart": restart,
        **swaps,
    }


def show(result: dict[str, Any]) -> None:
    print("method             swap s  merge s  repack s  mergekit s   faster than merge   than merge and restart")
    for row in result["methods"]:
        print(
            f"{row['method']:<16} {row['median_s']:8.3f} {row['materialise_s']:8.3f} {row['repack_s']:9.3f} "
            f"{row['mergekit_s']:11.1f} {row['without_repacking']:18.0f}x {row['with_repacking']:22.0f}x"
        )
    for name in ("without_repacking", "with_repacking"):
        print(f"{name.replace('_', ' ')}: must {result[name]['must']}x, goal {result[name]['goal']}x")
    restart = result["restart"]
    print(f"a new engine starts in {restart['start_s']:.1f} s, its imports take {restart['import_s']:.1f} s more")
    print(
        f"one layer of 12 changed: {result['one_layer_s']:.3f} s; model {result['model_bytes'] / 1e6:.0f} MB; "
        f"a swap without repacking takes {result['copies']:.1f} times copying the model"
    )


def _output(module: str, *arguments: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", module, *arguments]
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return finished.stdout.splitlines()[-1]


def measure_swaps(directory: Path) -> dict[str, Any]:
    from workers.engine import Engine
    from workers.types import EngineOptions

    family = merge_family.open_made(directory)
    rows = []
    with Engine(family, EngineOptions(max_model_len=256, threads=THREADS)) as engine:
        for method in METHODS:
            engine.swap(merge_family.recipe(family, method, 0))  # compiles, makes the statistics
            seconds, reports = [], []
            for seed in range(1, REPEATS + 1):
                candidate = merge_family.recipe(family, method, seed)
                started = time.perf_counter()
                reports.append(engine.swap(candidate))
                seconds.append(time.perf_counter() - started)
            parts = [asdict(report) for report in reports]
            names = ("materialise_s", "swap_s", "repack_s")
            medians = {name: statistics.median(part[name] for part in parts) for name in names}
            rows.append({"method": method, "median_s": statistics.median(seconds), "all_s": seconds, **medians})
        one_layer = [_swap_last_layer(engine, family, seed) for seed in range(REPEATS)]
    model_bytes, copy_s = _copying(family)
    fastest = min(row["median_s"] - row["repack_s"] for row in rows)
    return {
        "methods": rows,
        "one_layer_s": statistics.median(one_layer),
        "model_bytes": model_bytes,
        "copy_s": copy_s,
        "copies": fastest / copy_s,
    }


def _swap_last_layer(engine: Any, family: Any, seed: int) -> float:
    held = merge_family.recipe(family, "task_arithmetic", 0)
    other = merge_family.recipe(family, "task_arithmetic", seed + 1)
    engine.swap(held)
    started = time.perf_counter()
    engine.swap(replace(held, layers=(*held.layers[:-1], other.layers[-1])))
    return time.perf_counter() - started


def _copying(family: Any) -> tuple[int, float]:
    """The bytes of one model, and the seconds to copy them."""
    import torch

    from workers.checkpoints import open_checkpoint

    torch.set_num_threads(THREADS)
    num_bytes = sum(info.num_bytes for info in open_checkpoint(family.base.directory).tensors.values())
    source, target = torch.randn(num_bytes // 4), torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return num_bytes, statistics.median(seconds)


def measure_restart(directory: Path) -> dict[str, Any]:
    """A new engine on a merged model: the seconds of its imports, and of its start to the first token."""
    from workers.engine import engine_environment
    from workers.types import EngineOptions

    started = time.perf_counter()
    os.environ.update(engine_environment(EngineOptions(threads=THREADS), os.environ))
    from vllm import LLM, SamplingParams

    import_s = time.perf_counter() - started
    started = time.perf_counter()
    llm = LLM(
        model=str(directory / "base"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=2**28,
    )
    llm.generate("1+1=", SamplingParams(max_tokens=1), use_tqdm=False)
    start_s = time.perf_counter() - started
    llm.llm_engine.engine_core.shutdown()
    return {"import_s": import_s, "start_s": start_s}


if __name__ == "__main__":
    measure = {"swaps": measure_swaps, "restart": measure_restart}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]))))
