"""Memory of a bank and one merge by every fused method, in a process with a memory limit.

The models are those of `merge_family`. The limit allows the sources, one result, and a tenth of both. The limit is
RLIMIT_DATA, because it needs no right to make a control group. RLIMIT_DATA counts all memory that a process may write
to, and also mapped files, although their pages belong to the page cache. Therefore the limit is set after a bank is
opened, to the memory in use plus the rest of the allowance. Samples of anonymous memory show that opening the bank
takes no more than the sources.
"""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any

from tests.benchmarks.process_memory import Highest, output, status

PLACEMENTS = ("mapped", "host")
ALLOWED = 1.1  # sources and result, times this


def run() -> dict[str, Any]:
    from tests.benchmarks import merge_family

    with merge_family.ram_disk() as directory:
        merge_family.make(directory)
        rows = measure(directory)
    return {"met": all(row["merging"] <= ALLOWED for row in rows), "allowed": ALLOWED, "placements": rows}


def show(result: dict[str, Any]) -> None:
    print(f"memory of a bank and one candidate, in parts of sources and result; must {result['allowed']}\n")
    print("placement  sources MB  result MB   opening   merging  methods under the limit")
    for row in result["placements"]:
        print(
            f"{row['placement']:<9} {row['sources'] / 1e6:11.0f} {row['result'] / 1e6:10.0f} {row['opening']:9.3f} "
            f"{row['merging']:9.3f}  {len(row['methods'])}"
        )


def measure(directory: Path, methods: Collection[str] = ()) -> list[dict[str, Any]]:
    """Memory of a bank and its merges, measured by `measure_here` in a separate process."""
    return list(json.loads(output(__name__, str(directory), *methods)))


def measure_here(directory: Path, methods: Collection[str]) -> list[dict[str, Any]]:
    """Memory of a bank for each placement, and under the limit of a candidate of each of `methods`, or all fused ones.

    The family is the one that `merge_family.make` left in `directory`. `opening` and `merging` are the largest shares
    of sources and result needed.
    """
    import torch

    from tests.benchmarks import merge_family
    from workers.merging.bank import Bank
    from workers.merging.kernels import FUSED
    from workers.merging.materialize import merge_into

    def merge(bank: Bank, destinations: dict[str, torch.Tensor]) -> None:
        for method in methods or FUSED:
            merge_into(merge_family.recipe(family, method, 0), bank, destinations)

    threading.stack_size(1 << 20)  # stacks count by their whole size, 8 MB for each thread
    family = merge_family.open_made(directory)
    bank = Bank(family, cache=directory / "cache")  # contents are known to be finite, what is compiled is compiled
    shapes = {name: info.shape for name, info in bank.base.tensors.items()}
    merge(bank, {name: torch.zeros(shape) for name, shape in shapes.items() if len(shape) == 1})
    sources, result = bank.num_bytes, sum(4 * math.prod(shape) for shape in shapes.values())
    del bank
    rows = []
    for placement in PLACEMENTS:
        before = status("RssAnon")
        with Highest() as opening:
            bank = Bank(family, placement, cache=directory / "cache")
        # The pages of mapped sources are the sources' memory too, though not anonymous.
        held = max(sources, status("RssAnon") - before)
        limit, most = status("VmData") + int(ALLOWED * (sources + result)) - held, resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_DATA, (limit, most))
        with Highest() as merging:
            merge(bank, {name: torch.zeros(shape) for name, shape in shapes.items()})
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        mapped = sources if placement == "mapped" else 0
        peaks = [(highest.bytes - before + mapped) / (sources + result) for highest in (opening, merging)]
        sizes = {"placement": placement, "sources": sources, "result": result}
        rows.append(
            {**sizes, **dict(zip(("opening", "merging"), peaks, strict=True)), "methods": list(methods or FUSED)}
        )
        del bank
    return rows


if __name__ == "__main__":
    print(json.dumps(measure_here(Path(sys.argv[1]), sys.argv[2:])))
