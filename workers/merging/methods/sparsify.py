"""Sparsification of task vectors: by magnitude (TIES, Model Breadcrumbs) and at random (DARE, DELLA).

DELLA keeps larger elements with higher probability. Each function returns the sparse task vector and may modify its
argument. The module `workers.merging.masks` makes the random masks; the key of a mask is made from seed, model and
tensor name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.merging import masks
from workers.merging.methods.arithmetic import num_kept, share_of, total
from workers.merging.order_statistics import Ranked, TieOrder, magnitude_keys, threshold_of_rank

__all__ = [
    "CutRanks",
    "cut_both_ends",
    "cut_ranks",
    "dropped",
    "l1_ratio",
    "magnitude_sampled",
    "masked_task_vectors",
    "match_l1_norm",
    "probability_by_rank",
    "row_width",
    "trimmed",
]

# L1 norms below this are not matched: there is nothing to rescale.
NO_NORM = 1e-7


def trimmed(tau: torch.Tensor, k: float, order: TieOrder, magnitudes: Ranked | None = None) -> torch.Tensor:
    """Set all but the largest-magnitude elements of a task vector to zero (TIES, arXiv:2306.01708).

    The function keeps `num_kept(k, n)` of the n elements of `tau`, about the share `k`; this is equation 6 of
    "Automated Model Merging". `order` is the rule that breaks ties between equal magnitudes. `magnitudes` is a
    precomputed table of the magnitudes, from which the threshold is taken; with None, the threshold is searched for. In
    a merge that trims whole models, the table is for the model's whole task vector, and n is the number of its
    elements. `tau` may be modified.
    """
    num_elements = tau.numel() if magnitudes is None else magnitudes.num_elements
    rank = num_kept(k, num_elements)
    if rank == num_elements:
        return tau
    sizes = tau.abs()
    smallest = order.lowest(threshold_of_rank(sizes, rank, order, magnitudes))
    return tau.masked_fill_(~smallest.reached_by(sizes, order), 0)


def cut_both_ends(
    tau: torch.Tensor, density: float, gamma: float, order: TieOrder, magnitudes: Ranked | None = None
) -> torch.Tensor:
    """Set the elements of largest and of smallest magnitude in a task vector to zero (Model Breadcrumbs).

    The method is from arXiv:2312.06795. `tau` has n elements. The floor(gamma n) largest magnitudes are dropped, and
    the floor(density n) largest of the other magnitudes are kept. The paper's two percentiles are 1 - gamma and 1 -
    gamma - density. `order` is the rule that breaks ties between equal magnitudes. `magnitudes` is a precomputed table
    of the magnitudes, from which thresholds are taken; with None, the thresholds are searched for. In a merge that
    trims whole models, the table is for the model's whole task vector, and n is the number of its elements. `tau` may
    be modified.
    """
    ranks = cut_ranks(density, gamma, tau.numel() if magnitudes is None else magnitudes.num_elements)
    if ranks is None:
        return tau
    if ranks.is_empty:
        return tau.zero_()
    sizes = tau.abs()
    largest, smallest = (threshold_of_rank(sizes, rank, order, magnitudes) for rank in (ranks.largest, ranks.smallest))
    is_cut = ~order.lowest(smallest).reached_by(sizes, order)
    return tau.masked_fill_(is_cut | order.above(largest).reached_by(sizes, order), 0)


@dataclass(frozen=True)
class CutRanks:
    """The ranks of the largest and the smallest magnitude that Model Breadcrumbs keeps in a task vector.

    This method (function `cut_both_ends`) drops the elements of largest and of smallest magnitude. Rank 1 is the
    largest magnitude.
    """

    largest: int
    smallest: int

    @property
    def is_empty(self) -> bool:
        """Whether no element of the task vector is kept."""
        return self.smallest < self.largest


def cut_ranks(density: float, gamma: float, num_elements: int) -> CutRanks | None:
    """Ranks of the largest and smallest magnitude kept by the function `cut_both_ends`; None if it keeps all elements.

    Rank 1 is the largest of `num_elements` magnitudes. The function `cut_both_ends` (Model Breadcrumbs) divides the
    elements in descending order of magnitude into three parts. The first part, the share `gamma` of all elements, is
    dropped. The second part, the share `density` of all elements, is kept. The third part is dropped. If the two shares
    sum to more than 1, the first part is made smaller.
    """
    count = share_of(density, num_elements)
    num_cut = min(share_of(gamma, num_elements), num_elements - count)
    return None if count == num_elements else CutRanks(num_cut + 1, num_cut + count)


def dropped(tau: torch.Tensor, density: float, key: int) -> torch.Tensor:
    """Keep each element of a task vector with probability `density`, and set the other elements to zero (DARE).

    DARE is described in arXiv:2311.03099. `key` is the key of the random mask. The kept elements are not rescaled.
    `tau` is modified.
    """
    return tau.masked_fill_(~masks.keep(key, tau.shape, density, device=tau.device), 0)


def masked_task_vectors(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, densities: Sequence[float], keys: Sequence[int]
) -> list[torch.Tensor]:
    """Task vectors (tensors minus base) after a random mask, divided by the share of elements that is kept (DARE).

    `densities` has, for each tensor, the share of elements that its mask keeps, and `keys` has the key of the mask.
    """
    return [
        dropped(tensor - base, density, key).mul_(1 / density)
        for tensor, density, key in zip(tensors, densities, keys, strict=True)
    ]


def magnitude_sampled(
    tau: torch.Tensor,
    density: float,
    epsilon: float,
    key: int,
    order: TieOrder,
    *,
    is_symmetric: bool = False,
    rescale: bool = True,
    ranks: torch.Tensor | None = None,
) -> torch.Tensor:
    """MagPrune (DELLA, arXiv:2406.11617): keep random elements, larger elements of a row with higher probability.

    `tau` is the task vector. The probability of keeping an element grows with the rank of its magnitude in its row, in
    equal steps from density - epsilon to density + epsilon. A tensor with fewer than two dimensions is one row. With
    `rescale`, elements that are kept are divided by their probability.

    `key` is the key of the random mask. `order` is the rule that breaks ties between equal magnitudes; in recipes of
    format 1, the earlier of two equal elements counts as the smaller element. `ranks` are the precomputed ranks of
    magnitudes in their rows, where 0 is the smallest; None computes them.

    The paper's epsilon is twice the argument `epsilon`. In a row of n elements, the paper's step is 2 epsilon / n: the
    largest element is kept with probability density + epsilon, and the smallest with one step more than density -
    epsilon. With `is_symmetric` the step is 2 epsilon / (n - 1), as in mergekit, so that both ends are reached.
    """
    ranks = _sorted_ranks(tau, order) if ranks is None else ranks
    origin, start, step = probability_by_rank(row_width(tau), density, epsilon, is_symmetric=is_symmetric)
    probabilities = (ranks.double() - origin).abs_().mul_(step).add_(start)
    kept = masks.keep_each(key, probabilities)
    if rescale:
        tau = tau / torch.where(kept, probabilities, 1).float()
    return tau.masked_fill_(~kept, 0)


def row_width(tensor: torch.Tensor) -> int:
    """Length of a tensor's rows; MagPrune ranks the elements within each row.

    A row is a vector along the last dimension of `tensor`; a tensor with fewer than two dimensions is one row. MagPrune
    is a method that drops elements of task vectors at random, and smaller elements of a row more often.
    """
    return tensor.numel() if tensor.dim() < 2 else tensor.shape[-1]


def probability_by_rank(width: int, density: float, epsilon: float, *, is_symmetric: bool) -> tuple[int, float, float]:
    """The parameters of MagPrune's rule for the probability of keeping an element, in a row of `width` elements.

    The parameters are (origin, start, step). An element is kept with the probability start + |rank - origin| step.
    Ranks are counted in the row from 0, the smallest magnitude. Probabilities are from density - epsilon to density +
    epsilon. With `is_symmetric` both ends are reached; without `is_symmetric` only the upper end is reached.
    """
    if not is_symmetric:
        return width - 1, density + epsilon, -2 * epsilon / width
    return (0, density - epsilon, 2 * epsilon / (width - 1)) if width > 1 else (0, density, 0.0)


def _sorted_ranks(tau: torch.Tensor, order: TieOrder) -> torch.Tensor:
    """The rank of each element's magnitude in its row, from 0 for the smallest; int64 in the shape of `tau`.

    `order` is the rule that breaks ties between equal magnitudes. A tensor with fewer than two dimensions is one row.
    """
    rows = tau.reshape(1, -1) if tau.dim() < 2 else tau
    keys = magnitude_keys(rows.abs(), order)
    places = keys.sort(dim=-1, stable=True).indices
    ranks = torch.empty_like(places)
    ranks.scatter_(-1, places, torch.arange(rows.shape[-1], device=tau.device).expand_as(places))
    return ranks.reshape(tau.shape)


def match_l1_norm(sparse: torch.Tensor, tau: torch.Tensor, norm: float | None = None) -> torch.Tensor:
    """Scale a sparse task vector to the L1 norm of the whole task vector `tau`, as in mergekit.

    `sparse` is `tau` after some elements were set to zero. `norm` is the precomputed L1 norm of `tau`; None computes
    it. The sparse task vector is returned unchanged if its L1 norm or that of `tau` is below 1e-7.
    """
    return sparse * l1_ratio(total(torch.abs, tau) if norm is None else norm, total(torch.abs, sparse))


def l1_ratio(before: float, after: float) -> float:
    """Factor that restores the L1 norm of a task vector after elements were dropped.

    `before` is the L1 norm of the whole task vector, and `after` is the L1 norm after elements were dropped. The factor
    is `before` / `after`, or 1 if one of the two norms is below 1e-7.
    """
    return 1.0 if min(before, after) < NO_NORM else before / after
