"""Ahead-of-time compilation of the CPU kernels of the most used methods: `python -m workers.merging.precompile`.

`make install` runs this command. Without it, the first use of a kernel for a rule, a number of sources and a dtype
compiles the kernel, and takes seconds. The code is kept on disk (module `kernels.compilation`). The command saves no
time if the code cannot be kept on disk, or is on disk already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from search_spaces.methods import METHODS
from search_spaces.recipe import Merge, Source
from workers.merging.kernels import merge_stored
from workers.merging.masks import mask_key
from workers.merging.methods.plain import PLAIN, Operands
from workers.merging.order_statistics import TieOrder
from workers.merging.statistics import inner_products, magnitude_selection, magnitude_table, variance_table

__all__ = ["Usual", "compile_kernels", "operands", "usual"]

DTYPES = (torch.bfloat16, torch.float32)
NUM_SOURCES = (2, 3)
# Kernels do not depend on the values of coefficients. Methods with the same rule share its kernel: `ties` compiles that
# of trimmed task vectors, `linear` that of means and interpolations.
COEFFICIENTS = {
    "linear": {"weight": 0.5},
    "task_arithmetic": {"lambda": 0.5},
    "ties": {"lambda": 1.0, "k": 0.2},
    "ties_weighted": {"weight": 0.5, "density": 0.5},
    "dare_linear": {"lambda": 0.5, "density": 0.5},
    "dare_ties": {"lambda": 1.0, "density": 0.5},
    "dare_ties_l1": {"weight": 0.5, "density": 0.5},
    "sce_mergekit": {"select_topk": 0.1},
}
SHAPE = (64, 512)


@dataclass(frozen=True)
class Usual:
    """A common merge whose kernel is compiled in advance, with operands and result in `dtype`.

    If `is_tied` is True, many elements have the magnitude of a threshold. Another kernel, which also compares
    tie-breaking marks (hashes that order equal magnitudes), handles this case.
    """

    merge: Merge
    dtype: torch.dtype
    is_tied: bool


def usual() -> Iterator[Usual]:
    """Yield common merges, for which kernels are compiled in advance.

    The merges have two or three sources, in bfloat16 and float32.
    """
    for name, numbers in COEFFICIENTS.items():
        uses = PLAIN[name].uses
        for count in NUM_SOURCES:
            seed = 0 if METHODS[name].takes_seed else None
            merge = Merge(name, tuple(Source(f"m{i}") for i in range(count)), numbers, seed)
            for dtype in DTYPES:
                cuts = uses & {"magnitudes", "variances"}
                for is_tied in (True, False) if cuts and dtype == torch.float32 else (True,):
                    yield Usual(merge, dtype, is_tied)


def operands(case: Usual) -> Operands:
    """Make random operands for compiling the kernel of a merge, with the statistics that its method uses.

    `case` is the merge, with its dtype and whether many elements have the magnitude of a threshold.
    """
    generator = torch.Generator().manual_seed(0)
    finest = torch.bfloat16 if case.is_tied else torch.float32
    base = torch.randn(SHAPE, generator=generator).to(finest)
    count = len(case.merge.sources)
    changes = (0.05 * torch.randn(SHAPE, generator=generator) for _ in range(count))
    tensors = tuple((base.float() + change).to(finest).to(case.dtype) for change in changes)
    base = base.to(case.dtype)
    orders = tuple(map(TieOrder, range(count)))
    uses = PLAIN[case.merge.method].uses
    return Operands(
        tensors,
        base if METHODS[case.merge.method].needs_base else None,
        magnitudes=(
            tuple(magnitude_table(tensor, base, order) for tensor, order in zip(tensors, orders, strict=True))
            if "magnitudes" in uses
            else None
        ),
        keys=tuple(mask_key(0, source.model, "weight") for source in case.merge.sources),
        variances=variance_table(tensors, base, TieOrder(count)) if "variances" in uses else None,
        orders=orders,
        order=TieOrder(count),
        name="weight",
    )


def compile_kernels() -> None:
    """Compile the kernels of common merges, and the kernels that compute statistics for these merges.

    The merges have two or three sources, in bfloat16 or float32, and the methods that most users need. Kernels whose
    compiled code is already on disk are not compiled again.
    """
    for case in usual():
        merge_stored(case.merge, operands(case), torch.empty(SHAPE, dtype=case.dtype))
    for dtype in DTYPES:  # for SLERP, whose merge kernel is that of `linear`
        inner_products([torch.ones(SHAPE, dtype=dtype)] * 2)
        # A single merge selects its thresholds; a study makes tables.
        magnitude_selection(torch.ones(SHAPE, dtype=dtype), torch.zeros(SHAPE, dtype=dtype), TieOrder(0)).trim(1)


if __name__ == "__main__":
    compile_kernels()
