"""Fused merge kernels: most methods have one for the CPU (Numba), and the methods used most have one for CUDA (Triton).

On the same kind of device, they give the same bits as the plain methods of `workers.merging.methods`. A kernel needs
one pass over the sources in their stored dtype, or two if coefficients depend on the elements that a method drops. The
result is rounded once and written to its destination. Kernels receive the sources' statistics as arguments.

- `lowering`: the rule of each fused method, from its coefficients and operands.
- `rules`: the rules, plain numbers that every backend can execute.
- `cpu`: the pass that executes a rule on CPU.
- `cuda`: the pass that executes a rule on a CUDA device.
- `operations`: the operations in which formulas are written.
- `formulas`: the formula of each of `rules`, on CPU.
- `sparsity`: which elements of a task vector each rule keeps, on CPU.
- `thresholds`: exact thresholds from the elements that a table of magnitudes leaves undecided, on CPU.
- `elements`: compiled functions on single elements: reading, rounding and storing them, their hashes.
- `arguments`: tensors and rules as arguments of compiled functions.
- `reductions`: sums and counts over whole tensors, on CPU.
- `sorting`: sorting in bounded memory, on CPU.
- `threads`: the threads of the CPU kernels.
- `compilation`: how functions are compiled and where the compiled code is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, TypeVar

import torch

from search_spaces.recipe import Merge
from workers.merging.kernels.lowering import FUSED, ON_CUDA
from workers.merging.kernels.rules import Rule
from workers.merging.kernels.threads import MIN_PIECE, each_in_one_thread
from workers.merging.methods.plain import Operands
from workers.merging.shards import Shard

__all__ = [
    "FUSED",
    "ON_CUDA",
    "backend",
    "can_fuse",
    "exact_rule",
    "for_each",
    "is_fused",
    "merge_shard",
    "merge_stored",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A tensor with more than 1 / SHARES of each thread's share of the work is merged by all threads together.
SHARES = 8
T = TypeVar("T")
# Kernels count a tensor's elements in 32 bits.
MAX_ELEMENTS = 2**32 - 1


def backend(device: torch.device) -> Literal["cuda", "cpu"]:
    """The kind of kernels that compute merges on `device`: "cuda" (Triton) for a CUDA device, else "cpu" (Numba)."""
    return "cuda" if device.type == "cuda" else "cpu"


def is_fused(merge: Merge, stored: Operands, dtype: torch.dtype) -> bool:
    """Whether a compiled kernel can compute `merge` from the operands `stored`, with the result in `dtype`.

    The result is True if the method has a kernel on the operands' device, and all dtypes are float32, bfloat16 or
    float16. Operands must also be contiguous, not empty, and of fewer than 2^32 elements.
    """
    tensors = [*stored.tensors, *([] if stored.base is None else [stored.base])]
    return (
        merge.method in (ON_CUDA if backend(tensors[0].device) == "cuda" else FUSED)
        and can_fuse((dtype, *(tensor.dtype for tensor in tensors)), tensors[0].numel())
        and all(tensor.is_contiguous() for tensor in tensors)
        and tensors[0].device.type in ("cpu", "cuda")
    )


def can_fuse(dtypes: Iterable[torch.dtype], num_elements: int) -> bool:
    """Whether kernels can read and write tensors with `num_elements` elements in each of the dtypes `dtypes`."""
    return 0 < num_elements <= MAX_ELEMENTS and all(dtype in DTYPES for dtype in dtypes)


def merge_stored(merge: Merge, stored: Operands, out: torch.Tensor) -> None:
    """Compute a merge with its kernel, and write the result to `out`, rounded once to the dtype of `out`.

    `stored` are the operands in their stored dtypes, with the statistics that the method needs; the function `is_fused`
    must have returned True for them. `out` is contiguous and has the shape of the operands.
    """
    # Imported here because each of the two compilers takes a second to import.
    if backend(out.device) == "cuda":
        from workers.merging.kernels.cuda import merge as execute
    else:
        from workers.merging.kernels.cpu import merge as execute
    execute(FUSED[merge.method](merge, stored), stored.tensors, stored.base, out)


def exact_rule(merge: Merge, stored: Operands) -> Rule:
    """The rule of a merge with exact thresholds, so that any part of the merge can be computed alone.

    A rule is the formula of a merge with its numbers, as plain data that a kernel executes. A threshold is the least
    magnitude of the elements that are kept. `stored` are the whole operands on the CPU, with the statistics that the
    method needs; they are read as a whole to find the thresholds, and are not read if there are no thresholds. The rule
    is the same for all shards of the tensor.
    """
    from workers.merging.kernels.cpu import exact

    return exact(FUSED[merge.method](merge, stored), stored.tensors, stored.base)


def merge_shard(
    rule: Rule, tensors: Sequence[torch.Tensor], base: torch.Tensor | None, out: torch.Tensor, shard: Shard
) -> None:
    """Compute the elements of `shard` of a merge, and write them to `out`, rounded once to its dtype.

    `rule` is the formula of the merge with its numbers, as the function `exact_rule` returns it. `tensors` and `base`
    are the whole operands, of which only the elements of the shard are read. On a CUDA device, `tensors` and `base` may
    instead have only the elements of the shard, in the same order. `out` is contiguous. The result has the same bits as
    the shard's elements of the whole merge.
    """
    if backend(out.device) == "cuda":
        from workers.merging.kernels.cuda import merge as execute
    else:
        from workers.merging.kernels.cpu import merge as execute
    execute(rule, tensors, base, out, shard)


def for_each(function: Callable[[T], None], items: Sequence[tuple[int, T]], device: torch.device) -> None:
    """Call `function` for each of several merged tensors, in any order, and on a CPU in several threads.

    `items` are pairs (number of elements of the tensor, item); `function` gets only the item. On a CPU, each thread
    processes one item at a time. Items are processed one after another if their tensors are so large that each can use
    all threads, or so small that threads would save no time.
    """
    if device.type != "cpu":
        for _, item in items:
            function(item)
        return
    threads = torch.get_num_threads()
    large = sum(size for size, _ in items) / (SHARES * threads) if threads > 1 else 0
    small = []
    for size, item in sorted(items, key=lambda each: -each[0]):
        if size > large or size < MIN_PIECE:
            function(item)
        else:
            small.append(item)
    each_in_one_thread(function, small)
