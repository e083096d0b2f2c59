"""Bandwidth of merging in memory by each method, compared with copying.

The models are a base and three experts of 110M random float32 parameters each, in a Llama's shapes; two threads merge
them. Every candidate has new coefficients (a new k, t, or seed). A candidate's time is from the recipe to the last
merged tensor, written to memory allocated before. The first candidate also computes statistics and may compile, so its
time is given separately. A method's bytes are each source read once and the result written once. Copying is `copy_`
between tensors of 256 MB, in the same process, in turn with the methods. All times are medians of ten.

All other methods that have a kernel follow; DELLA is measured a second time, with its ranks kept. The last rows are
kernels on one tensor of 64 MB for each of eight experts. `bench_swap` measures the effect of merging on a swap.

With `NUMBA_CPU_NAME=znver3 NUMBA_CPU_FEATURES=+avx2` the kernels are those of a processor without AVX-512; the name
alone does not take it away.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family
from tests.benchmarks.merge_family import THREADS

REPEATS = 10
COPIED_BYTES = 256 * 10**6
# Method: share of copy bandwidth that it must reach, and the goal. DELLA, which sorts for every candidate, has none.
FIRST = {
    "linear": (0.8, 1.0),
    "task_arithmetic": (0.8, 1.0),
    "ties": (0.5, 0.9),
    "dare_linear": (0.4, 0.7),
    "dare_ties": (0.4, 0.7),
    "slerp": (0.4, 0.6),
}
TWO_PASSES = ("dare_linear_l1", "dare_ties_l1", "ramplus_tl")
BARS = FIRST | {"sce": (0.2, 0.5), "sce_mergekit": (0.2, 0.5)} | dict.fromkeys(TWO_PASSES, (0.3, 0.5))
ONE_PASS = (0.4, 0.8)  # every other fused method
RANKED = ("della", "della_l1", "della_linear", "della_linear_l1")
MANY, MANY_ELEMENTS = 8, 16 * 10**6


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        merge_family.output(__name__, "make", str(directory))
        fused = json.loads(merge_family.output(__name__, "fused", str(directory)))
        ranked = json.loads(merge_family.output(__name__, "ranked", str(directory)))
        many = json.loads(merge_family.output(__name__, "many", str(directory)))
    return {
        "threads": THREADS,
        "bars": {row["method"]: _bar(row["method"]) for row in fused["methods"]},
        **fused,
        "ranked": ranked,
        "many": many,
    }


def show(result: dict[str, Any]) -> None:
    extensions = ", ".join(result["extensions"])
    print(f"copying {result['copy_gb_per_s']:.1f} GB/s with {result['threads']} threads; kernels use {extensions}\n")
    print("method                  first s  median s   GB/s  of copy   must  goal")
    for row in result["methods"]:
        bars = result["bars"][row["method"]]
        print(
            f"{row['method']:<23} {row['first_s']:7.2f} {row['median_s']:9.3f} {row['gb_per_s']:6.1f} "
            f"{row['ratio']:8.2f}  {bars['must']!s:>5} {bars['goal']!s:>5}"
        )
    for row in result["ranked"]:
        print(f"{row['method']:<23} {row['first_s']:7.2f} {row['median_s']:9.3f}   (engine.rank_cache)")
    print(f"\n{result['many']['experts']} experts, one tensor, of copy: ", end="")
    print(", ".join(f"{method} {ratio:.2f}" for method, ratio in result["many"]["ratios"].items()))


def measure_fused(directory: Path) -> dict[str, Any]:
    """Measure copying and the methods that have kernels, in turn."""
    import torch

    from search_spaces.methods import METHODS
    from workers.merging.kernels import FUSED

    family, _, merge = _merging(directory)
    methods = [*FIRST, *(method for method in FUSED if method not in FIRST)]
    source, target = torch.randn(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4)
    first = {method: _seconds(lambda method=method: merge(method, 0)) for method in methods}  # type: ignore[misc]
    target.copy_(source)
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *methods)}
    for repeat in range(1, REPEATS + 1):
        seconds["copy"].append(_seconds(lambda: target.copy_(source)))
        for method in methods:
            seconds[method].append(_seconds(lambda method=method, seed=repeat: merge(method, seed)))  # type: ignore[misc]
    copy = 2 * COPIED_BYTES / statistics.median(seconds["copy"])
    model_bytes = merge_family.model_bytes(family)
    rows = []
    for method in methods:
        median = statistics.median(seconds[method])
        speed = merge_family.models_moved(METHODS[method]) * model_bytes / median
        rows.append(
            {
                "method": method,
                "first_s": first[method],
                "median_s": median,
                "all_s": seconds[method],
                "gb_per_s": speed / 1e9,
                "ratio": speed / copy,
            }
        )
    return {
        "copy_gb_per_s": copy / 1e9,
        "copy_s": seconds["copy"],
        "model_bytes": model_bytes,
        "extensions": _extensions(),
        "methods": rows,
    }


def measure_ranked(directory: Path) -> list[dict[str, Any]]:
    """Measure DELLA with a bank that caches ranks: the first merge, which sorts, and a further one."""
    _, bank, merge = _merging(directory)
    bank.keep_ranks()
    rows = []
    for method in RANKED:
        first, *others = (_seconds(lambda method=method, seed=seed: merge(method, seed)) for seed in range(6))  # type: ignore[misc]
        rows.append({"method": method, "first_s": first, "median_s": statistics.median(others)})
    return rows


def measure_many(directory: Path) -> dict[str, Any]:
    """Measure kernels with many sources, as shares of the copy bandwidth."""
    import torch

    from search_spaces.recipe import Merge, Source
    from workers.merging.kernels import merge_stored
    from workers.merging.methods.plain import Operands
    from workers.merging.order_statistics import TieOrder
    from workers.merging.statistics import magnitude_table

    torch.set_num_threads(THREADS)
    base, out = torch.randn(MANY_ELEMENTS), torch.zeros(MANY_ELEMENTS)
    tensors = [base + 0.01 * torch.randn(MANY_ELEMENTS) for _ in range(MANY)]
    orders = tuple(map(TieOrder, range(MANY)))
    tables = tuple(magnitude_table(tensor, base, order) for tensor, order in zip(tensors, orders, strict=True))
    stored = Operands(tuple(tensors), base, magnitudes=tables, keys=tuple(range(MANY)), orders=orders)
    methods: dict[str, tuple[int, dict[str, float], int | None]] = {
        "linear": (MANY + 1, {"weight": 0.3}, None),
        "task_arithmetic": (MANY + 2, {"lambda": 0.3}, None),
        "ties": (MANY + 2, {"lambda": 0.5, "k": 0.3}, None),
        "dare_linear": (MANY + 2, {"lambda": 0.3, "density": 0.3}, 0),
        "dare_ties": (MANY + 2, {"lambda": 0.5, "density": 0.3}, 0),
    }
    sources = tuple(Source(f"m{i}") for i in range(MANY))

    def kernel(method: str) -> Callable[[], None]:
        _, coefficients, seed = methods[method]
        merge = Merge(method, sources, coefficients, seed)
        return lambda: merge_stored(merge, stored, out)

    kernels: dict[str, tuple[int, Callable[[], Any]]] = {"copy": (2, lambda: out.copy_(base))}
    kernels |= {method: (count, kernel(method)) for method, (count, *_) in methods.items()}
    seconds: dict[str, list[float]] = {name: [] for name in kernels}
    for repeat in range(REPEATS + 1):
        for name, (_, call) in kernels.items():
            took = _seconds(call)
            if repeat:
                seconds[name].append(took)
    speeds = {name: count / statistics.median(seconds[name]) for name, (count, _) in kernels.items()}
    ratios = {name: speed / speeds["copy"] for name, speed in speeds.items() if name != "copy"}
    return {"experts": MANY, "ratios": ratios}


def _merging(directory: Path) -> tuple[Any, Any, Callable[[str, int], None]]:
    """The family, its bank, and a function that merges by a given method and seed."""
    import torch

    from workers.merging.bank import Bank
    from workers.merging.materialize import merge_into

    torch.set_num_threads(THREADS)
    family = merge_family.open_made(directory)
    bank = Bank(family, cache=directory / "cache")
    result = {name: torch.zeros(info.shape) for name, info in bank.base.tensors.items()}

    def merge(method: str, seed: int) -> None:
        merge_into(merge_family.recipe(family, method, seed), bank, result)

    return family, bank, merge


def _bar(method: str) -> dict[str, Any]:
    must, goal = ("", "") if method in RANKED else BARS.get(method, ONE_PASS)
    return {"must": must, "goal": goal}


def _extensions() -> list[str]:
    """The vector extensions of the processor for which the kernels are compiled."""
    import llvmlite.binding as llvm
    import numba

    features = numba.config.CPU_FEATURES or llvm.get_host_cpu_features().flatten()
    named = [feature[1:] for feature in features.split(",") if feature.startswith("+")]
    return [name for name in named if name.startswith(("sse4", "avx", "neon", "sve"))]


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


if __name__ == "__main__":
    part, place = sys.argv[1], Path(sys.argv[2])
    if part == "make":
        merge_family.make(place)
        print(json.dumps({}))
    else:
        measures = {"fused": measure_fused, "ranked": measure_ranked, "many": measure_many}
        print(json.dumps(measures[part](place)))
