"""Ranks of an engine on GPUs, for tests: processes (gloo) that merge shards by Triton's kernels in its interpreter.

Run as `python -m tests.workers.merging.gpu_ranks FAMILY DIRECTORY RANK`, with TRITON_INTERPRET=1. The memory of the
"GPU" is that of the process. Each rank writes what it held, read and made to DIRECTORY/RANK.pt.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from search_spaces.recipe import Recipe
from tests.workers.merging.test_shards import halves, recipe_by, shard_of
from workers.engines.vllm.worker_extension import family_from_json
from workers.merging import kernels, node
from workers.merging.bank import Bank
from workers.merging.materialize import in_order_of_rank, merge_into
from workers.merging.plan import merged_names, plan_tensors

__all__ = ["NAMES", "main", "merged_by"]

NAMES = sorted(kernels.ON_CUDA)


def merged_by(bank: Bank, recipe: Recipe, rank: int | None) -> dict[str, Any]:
    """Merge a rank's half, or all for None; returns tensors, those merged whole, and counts of reads and of rules."""
    shapes = merged_names(recipe, bank)
    whole = {key: torch.empty(shape) for key, shape in shapes.items()}
    parts = whole if rank is None else {key: halves(key, tensor, rank) for key, tensor in whole.items()}
    of = {key: shard_of(part) for key, part in parts.items()}
    shards = {key: shard for key, shard in of.items() if not shard.is_whole(shapes[key])}
    found = {key: torch.full(part.shape, 7.0) for key, part in parts.items()}
    read, made = bank.elements_read, bank.node.num_made
    ordered = in_order_of_rank(plan_tensors(recipe, bank), found, rank=rank or 0, ranks=2)
    why = merge_into(ordered, bank, found, shards)
    return {
        "tensors": found,
        "why": why,
        "read": bank.elements_read - read,
        "made": bank.node.num_made - made,
    }


def main(family_file: str, directory: str, rank: str) -> None:
    """Merge by every method with a CUDA kernel: first together with the other rank, then as a single rank."""
    kernels.backend = lambda device: "cuda"
    root = Path(directory)
    node.SHARED_MEMORY = root
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=int(rank), world_size=2)
    family = family_from_json(Path(family_file).read_text())
    bank, alone = Bank(family, is_shared=True, cache=root / "cache"), Bank(family, cache=root / "cache")
    results = {}
    for name in NAMES:
        recipe = recipe_by(family, name)
        torch.distributed.barrier()
        results[name] = merged_by(bank, recipe, int(rank))
        if rank == "0":
            results[name]["of one rank"] = merged_by(alone, recipe, None)
    torch.distributed.barrier()
    torch.save(results, root / f"{rank}.pt")
    print(json.dumps({name: result["read"] for name, result in results.items()}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
