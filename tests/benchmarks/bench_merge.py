"""Merging in memory: bandwidth of each method against copying, time against mergekit, memory against the models' size.

Base and three experts of 110M float32 parameters each, random, in a Llama's shapes, two threads. Every candidate has
new coefficients (a new k, t, or seed). Its time is from the recipe to the last merged tensor, written to memory that
was there before; the first candidate, which also makes the statistics, is given apart. A method's bytes are each source
read once and the result written once. Copying is `copy_` between tensors of 256 MB, in the same process, in turn with
the methods. Medians of ten. mergekit merges the same to a RAM disk in a process of its own, once, imports excluded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.benchmarks import merge_family
from tests.benchmarks.merge_family import PEERS, STAND_INS, THREADS

REPEATS = 10
COPIED_BYTES = 256 * 10**6
# Method: share of copy bandwidth that it must reach, and the goal.
BARS = {
    "linear": (0.8, 1.0),
    "task_arithmetic": (0.8, 1.0),
    "ties": (0.5, 0.9),
    "dare_linear": (0.4, 0.7),
    "dare_ties": (0.4, 0.7),
    "slerp": (0.4, 0.6),
}
SPEEDUP = (20, 100)
MEMORY = 1.1  # sources and result, times this


def run() -> dict[str, Any]:
    with merge_family.ram_disk() as directory:
        _output("make", directory)
        bandwidth = json.loads(_output("bandwidth", directory))
        plain = json.loads(_output("plain", directory))
        memory = json.loads(_output("memory", directory))
        peers = {method: _mergekit(directory, method) for method in PEERS}
    rows = [*bandwidth["methods"], *plain]
    for row in rows:
        if seconds := peers.get(STAND_INS.get(row["method"], row["method"])):
            row |= {"mergekit_s": seconds, "speedup": seconds / row["median_s"]}
    return {
        "threads": THREADS,
        "bars": {method: {"must": must, "goal": goal} for method, (must, goal) in BARS.items()},
        "speedup": {"must": SPEEDUP[0], "goal": SPEEDUP[1]},
        **bandwidth,
        "methods": rows,
        "memory": memory,
    }


def show(result: dict[str, Any]) -> None:
    print(f"copying {result['copy_gb_per_s']:.1f} GB/s with {result['threads']} threads\n")
    print("method             first s  median s   GB/s  of copy   must  goal  mergekit s  faster")
    for row in result["methods"]:
        bars = result["bars"].get(row["method"], {"must": "", "goal": ""})
        ratio = f"{row['ratio']:8.2f}" if "ratio" in row else " " * 8
        speed = f"{row['gb_per_s']:6.1f}" if "gb_per_s" in row else " " * 6
        peer = f"{row['mergekit_s']:10.1f}  {row['speedup']:5.0f}x" if "mergekit_s" in row else ""
        print(
            f"{row['method']:<18} {row['first_s']:7.2f}  {row['median_s']:8.3f} {speed} {ratio}  "
            f"{bars['must']!s:>5} {bars['goal']!s:>5}  {peer}"
        )
    print(f"faster than mergekit: must {result['speedup']['must']}x, goal {result['speedup']['goal']}x (but DELLA)\n")
    memory = result["memory"]
    print(
        f"bank and one TIES candidate: {memory['peak_bytes'] / 1e6:.0f} MB at most, "
        f"{memory['ratio']:.3f} of sources and result; it ran under a limit of {memory['limit_ratio']} of them"
    )


def _output(part: str, directory: Path, *arguments: str) -> str:
    return _last_line([sys.executable, "-m", "tests.benchmarks.bench_merge", part, str(directory), *arguments])


def _mergekit(directory: Path, method: str) -> float:
    command = [sys.executable, "-m", "tests.benchmarks.merge_family", str(directory), method]
    return float(json.loads(_last_line(command))["seconds"])


def _last_line(command: list[str]) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": str(THREADS), "HF_HUB_OFFLINE": "1"}
    finished = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return finished.stdout.splitlines()[-1]


def measure_bandwidth(directory: Path) -> dict[str, Any]:
    """Copying and the methods that have a bar, in turn."""
    import torch

    family, merge = _merging(directory)
    source, target = torch.randn(COPIED_BYTES // 4), torch.empty(COPIED_BYTES // 4)
    first = {method: _seconds(lambda method=method: merge(method, 0)) for method in BARS}  # type: ignore[misc]
    target.copy_(source)
    seconds: dict[str, list[float]] = {name: [] for name in ("copy", *BARS)}
    for repeat in range(1, REPEATS + 1):
        seconds["copy"].append(_seconds(lambda: target.copy_(source)))
        for method in BARS:
            seconds[method].append(_seconds(lambda method=method, seed=repeat: merge(method, seed)))  # type: ignore[misc]
    copy = 2 * COPIED_BYTES / statistics.median(seconds["copy"])
    model_bytes = _model_bytes(family)
    rows = []
    for method in BARS:
        median = statistics.median(seconds[method])
        num_models = {"linear": 3, "slerp": 2}.get(method, 4) + 1
        speed = num_models * model_bytes / median
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
    return {"copy_gb_per_s": copy / 1e9, "model_bytes": model_bytes, "methods": rows}


def measure_plain(directory: Path) -> list[dict[str, Any]]:
    """Methods of mergekit's that have no bar of bandwidth: the first candidate and the median of two others."""
    _, merge = _merging(directory)
    rows = []
    for method in PEERS:
        if method not in BARS:
            first, *others = (_seconds(lambda method=method, seed=seed: merge(method, seed)) for seed in range(3))  # type: ignore[misc]
            rows.append({"method": method, "first_s": first, "median_s": statistics.median(others), "all_s": others})
    return rows


def measure_memory(directory: Path) -> dict[str, Any]:
    """A bank in memory and one TIES candidate, all of it held, under a limit on what the process may allocate."""
    import resource

    import torch

    from workers.bank import Bank
    from workers.kernels import cpu
    from workers.magnitudes import MagnitudeTable
    from workers.merging import merged_tensors

    family = merge_family.open_made(directory)
    few = torch.randn(4, 1 << 17)
    tables = [MagnitudeTable.of(row, few[0]).trim(99) for row in few[1:]]
    cpu.ties(list(few[1:]), few[0], torch.empty(1 << 17), lambda_=1.0, trims=tables)  # compiled, threads started
    Bank(family, cache=directory / "cache")  # the contents are known to be finite
    allowed = len(merge_family.EXPERTS) + 2
    wanted = allowed * _model_bytes(family)
    limit = _allocated() + int(MEMORY * wanted)
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    before = _resident()
    bank = Bank(family, "host", cache=directory / "cache")
    candidate = merge_family.recipe(family, "ties", 0)
    merged = dict(merged_tensors(candidate, bank, torch.float32))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert len(merged) > 100
    return {"bytes": wanted, "peak_bytes": peak, "ratio": peak / wanted, "limit_ratio": MEMORY}


def _merging(directory: Path) -> tuple[Any, Callable[[str, int], None]]:
    """The family, and a function that merges the candidate of a method and a seed."""
    import torch

    from workers.bank import Bank
    from workers.merging import merged_tensors

    torch.set_num_threads(THREADS)
    family = merge_family.open_made(directory)
    bank = Bank(family, cache=directory / "cache")
    result = {name: torch.zeros(info.shape) for name, info in bank.base.tensors.items()}

    def merge(method: str, seed: int) -> None:
        for _ in merged_tensors(
            merge_family.recipe(family, method, seed), bank, torch.float32, into=lambda name, shape: result[name]
        ):
            pass

    return family, merge


def _model_bytes(family: Any) -> int:
    from workers.checkpoints import open_checkpoint

    return sum(info.num_bytes for info in open_checkpoint(family.base.directory).tensors.values())


def _seconds(function: Callable[[], Any]) -> float:
    started = time.perf_counter()
    function()
    return time.perf_counter() - started


def _status(field: str) -> int:
    lines: Iterator[str] = iter(Path("/proc/self/status").read_text().splitlines())
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _allocated() -> int:
    """Bytes that count for RLIMIT_DATA."""
    return _status("VmData")


def _resident() -> int:
    return _status("VmRSS")


if __name__ == "__main__":
    part, place = sys.argv[1], Path(sys.argv[2])
    if part == "make":
        merge_family.make(place)
        print(json.dumps({}))
    else:
        measures = {"bandwidth": measure_bandwidth, "plain": measure_plain, "memory": measure_memory}
        print(json.dumps(measures[part](place)))
