"""Time from a recipe to an engine that serves the merge, compared with a merge by mergekit and a new engine.

The models are those of `merge_family` in float32; the engine is vLLM on CPU with two threads. A swap is: plan, merge,
write in place, pack again (CPU only, on its own line), reset the prefix cache, checksum. Every candidate has new
coefficients; "one layer" changes only the last layer of the candidate held. The alternative is a merge by mergekit to a
RAM disk and a new engine on it, each measured in its own process. mergekit's imports are not counted. The new engine's
imports are counted, because every new process needs them; a second ratio leaves them out.

"At most" is an upper bound of the ratio: the time of mergekit's merge divided by the time to move the method's bytes at
the speed of copying, with each source read once and the result written once.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family
from tests.benchmarks.merge_family import PEERS, STAND_INS, THREADS

# Methods for which mergekit takes more than ten seconds are in `bench_swap_slow`.
SLOW = ("ties", "ties_weighted", "karcher", "arcee_fusion", "breadcrumbs", "breadcrumbs_ties", "sce_mergekit")
FAST = tuple(method for method in (*PEERS, *STAND_INS) if method not in SLOW and not method.startswith("della"))
REPEATS = 5
WITHOUT_REPACKING = (20, 100)  # must, goal: times faster than mergekit's merge alone
WITH_REPACKING = (20, 200)  # than the merge and a new engine's process


def run(methods: Sequence[str] = FAST) -> dict[str, Any]:
    from search_spaces.methods import METHODS as DECLARED

    with merge_family.ram_disk() as directory:
        merge_family.output("tests.benchmarks.bench_merge", "make", str(directory))
        swaps = json.loads(merge_family.output("tests.benchmarks.bench_swap", "swaps", str(directory), *methods))
        restart = json.loads(merge_family.output("tests.benchmarks.bench_swap", "restart", str(directory)))
        peers = sorted({STAND_INS.get(method, method) for method in methods})
        merges = json.loads(merge_family.output("tests.benchmarks.merge_family", str(directory), *peers))
    for row in swaps["methods"]:
        merge_s = merges[STAND_INS.get(row["method"], row["method"])]
        floor_s = merge_family.models_moved(DECLARED[row["method"]]) * swaps["copy_s"] / 2
        row |= {
            "mergekit_s": merge_s,
            "floor_s": floor_s,
            "at_most": merge_s / floor_s,
            "without_repacking": merge_s / (row["median_s"] - row["repack_s"]),
            "with_repacking": (merge_s + restart["import_s"] + restart["start_s"]) / row["median_s"],
            "without_imports": (merge_s + restart["start_s"]) / row["median_s"],
        }
    return {
        "threads": THREADS,
        "without_repacking": dict(zip(("must", "goal"), WITHOUT_REPACKING, strict=True)),
        "with_repacking": dict(zip(("must", "goal"), WITH_REPACKING, strict=True)),
        "restart": restart,
        **swaps,
    }


def show(result: dict[str, Any]) -> None:
    print(
        "method             swap s  merge s  repack s  floor s  mergekit s  faster (at most)  "
        "than merge and restart (without imports)"
    )
    for row in result["methods"]:
        print(
            f"{row['method']:<16} {row['median_s']:8.3f} {row['materialise_s']:8.3f} {row['repack_s']:9.3f} "
            f"{row['floor_s']:8.3f} {row['mergekit_s']:11.2f} {row['without_repacking']:6.0f}x "
            f"{'(' + format(row['at_most'], '.0f') + 'x)':>9} {row['with_repacking']:22.0f}x "
            f"{'(' + format(row['without_imports'], '.0f') + 'x)':>9}"
        )
    for name in ("without_repacking", "with_repacking"):
        print(f"{name.replace('_', ' ')}: must {result[name]['must']}x, goal {result[name]['goal']}x")
    restart = result["restart"]
    print(f"a new engine starts in {restart['start_s']:.1f} s, its imports take {restart['import_s']:.1f} s more")
    print(
        f"one layer of 12 changed: {result['one_layer_s']:.3f} s; model {result['model_bytes'] / 1e6:.0f} MB; "
        f"a swap without repacking takes {result['copies']:.1f} times copying the model"
    )


def measure_swaps(directory: Path, *methods: str) -> dict[str, Any]:
    from search_spaces.study.engine import EngineOptions
    from workers.engines.source_recipes import base_recipe
    from workers.engines.vllm.engine import Engine

    family = merge_family.open_made(directory)
    rows = []
    with Engine(family, EngineOptions(max_model_len=256, threads=THREADS)) as engine:
        for method in methods:
            engine.swap(merge_family.recipe(family, method, 0))  # compiles, makes the statistics
            seconds, reports = [], []
            for seed in range(1, REPEATS + 1):
                candidate = merge_family.recipe(family, method, seed)
                if candidate.digest == engine.held_digest:  # the method takes no numbers: what it makes is held already
                    engine.swap(base_recipe(family))
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
    """The number of bytes of one model, and the seconds for copying them."""
    import torch

    torch.set_num_threads(THREADS)
    num_bytes = merge_family.model_bytes(family)
    source, target = torch.randn(num_bytes // 4), torch.zeros(num_bytes // 4)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - started)
    return num_bytes, statistics.median(seconds)


def measure_restart(directory: Path) -> dict[str, Any]:
    """Seconds of a new engine on a merged model: for its imports, and from its start to the first token."""
    from search_spaces.study.engine import EngineOptions
    from workers.engines.vllm.environment import engine_environment

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
    measure: Callable[..., Any] = {"swaps": measure_swaps, "restart": measure_restart}[sys.argv[1]]
    print(json.dumps(measure(Path(sys.argv[2]), *sys.argv[3:])))
