"""Building blocks of the merge methods in PyTorch: weighted sums, and reductions independent of the thread count.

The constants BLOCK and PARTS define the order in which elements are added. The module
`workers.merging.kernels.reductions` adds in the same order, so that its faster reductions give the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch

from search_spaces.recipe import COEFFICIENT_DECIMALS

__all__ = [
    "Products",
    "cosine",
    "cosine_of",
    "dot",
    "inner_products",
    "norm",
    "num_kept",
    "row_cosines",
    "share_of",
    "total",
    "weighted_sum",
]

Products = Sequence[Sequence[float]]  # inner products of tensors, [N, N]
# A tensor of a smaller Euclidean norm has no direction.
NO_DIRECTION = 1e-8
# The order of a reduction: each block of BLOCK elements is cut into PARTS equal parts, which are added one after
# another, and so on with the result until one number is left. The sums of the blocks are added exactly.
BLOCK, PARTS = 4096, 8
# Elements that are converted to float64 at a time. The sums of each chunk are copied to the CPU, which waits for a GPU.
CHUNK = 64 * BLOCK
GPU_CHUNK = 512 * BLOCK


def weighted_sum(tensors: Sequence[torch.Tensor], weights: Sequence[float]) -> torch.Tensor:
    """The sum of the tensors, each times its number in `weights`, added in the given order."""
    merged = tensors[0] * weights[0]
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        merged += tensor * weight
    return merged


def total(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> float:
    """Apply a function to tensors element by element, and return the sum of its results in float64.

    `function` receives chunks of the tensors, converted to float64, one argument per tensor.
    """
    return math.fsum(_block_sums(function, *tensors))


def dot(first: torch.Tensor, second: torch.Tensor) -> float:
    """The inner product of `first` and `second`, taken as vectors, summed in float64."""
    return total(torch.mul, first, second)


def norm(tensor: torch.Tensor) -> float:
    """The Euclidean norm of a tensor, summed in float64."""
    return math.sqrt(dot(tensor, tensor))


def cosine(first: torch.Tensor, second: torch.Tensor) -> float:
    """The cosine in [-1, 1] of the angle between the tensors `first` and `second`, taken as vectors.

    The result is 0 if one of the tensors has a norm of at most 1e-8, because its direction is not defined.
    """
    return cosine_of(inner_products((first, second)), 0, 1)


def inner_products(tensors: Sequence[torch.Tensor], base: torch.Tensor | None = None) -> Products:
    """The inner products of all pairs of the N tensors, [N, N], summed in float64.

    With `base`, each tensor is replaced by its difference from the base, rounded to float32.
    """
    products = [[0.0] * len(tensors) for _ in tensors]
    for i, first in enumerate(tensors):
        for j, second in enumerate(tensors[: i + 1]):
            products[i][j] = products[j][i] = _inner_product(first, second, base)
    return products


def cosine_of(products: Products, first: int, second: int) -> float:
    """The cosine of the angle between two of N tensors, from the inner products [N, N] of all pairs.

    `first` and `second` are the indices of the two tensors. The result is 0 if one of the two tensors has a norm of at
    most 1e-8.
    """
    norms = (math.sqrt(products[first][first]), math.sqrt(products[second][second]))
    if min(norms) <= NO_DIRECTION:
        return 0.0
    return max(-1.0, min(1.0, products[first][second] / (norms[0] * norms[1])))


def row_cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """The cosines of the angles between corresponding rows of `first` and `second` [..., n], as float64 [..., 1].

    A cosine is 0 if a row has a norm of at most 1e-8. Tensors with fewer than two dimensions are one row.
    """
    if first.dim() < 2:
        return torch.full((1,), cosine(first, second), dtype=torch.float64, device=first.device)
    x, y = first.double(), second.double()
    norms = [(z * z).sum(-1, keepdim=True).sqrt() for z in (x, y)]
    has_direction = torch.minimum(*norms) > NO_DIRECTION
    cosines = (x * y).sum(-1, keepdim=True) / torch.where(has_direction, norms[0] * norms[1], 1)
    return torch.where(has_direction, cosines.clamp(-1, 1), 0)


def num_kept(k: float, num_elements: int) -> int:
    """The number of elements that TIES keeps of `num_elements`: the share `k`, rounded down, but at least one.

    The product is exact for a share with at most six decimals.
    """
    return min(num_elements, max(1, share_of(k, num_elements)))


def share_of(share: float, num_elements: int) -> int:
    """The number of elements in a share of a tensor: floor(share * num_elements).

    The product is exact for a share with at most six decimals.
    """
    scale: int = 10**COEFFICIENT_DECIMALS
    return round(share * scale) * num_elements // scale


def _inner_product(first: torch.Tensor, second: torch.Tensor, base: torch.Tensor | None) -> float:
    given = [tensor.float() if tensor.dtype == torch.float64 else tensor for tensor in (first, second)]
    if base is None:
        return dot(*given)
    # The differences are rounded to float32, as in a task vector, although `total` passes float64.
    return total(lambda x, y, b: (x.float() - b.float()).double() * (y.float() - b.float()).double(), *given, base)


def _block_sums(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Iterator[float]:
    chunk = CHUNK if tensors[0].device.type == "cpu" else GPU_CHUNK
    for pieces in zip(*(torch.split(tensor.flatten(), chunk) for tensor in tensors), strict=True):
        values = function(*(piece.double() for piece in pieces))
        yield from _blocks(values)


def _blocks(values: torch.Tensor) -> list[float]:
    rows = torch.nn.functional.pad(values.flatten(), (0, -values.numel() % BLOCK)).view(-1, BLOCK)
    while rows.shape[1] > 1:
        rows, *others = rows.chunk(PARTS, dim=1)
        for other in others:
            rows = rows + other
    sums: list[float] = rows.flatten().tolist()
    return sums
