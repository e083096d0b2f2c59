"""Merge methods: pure functions from tensors to a tensor, each with its source and equation, in one registry.

All arithmetic is in float32 on the tensors given, element by element in the order of the sources, without fused
multiply-add; reductions over a tensor are summed in fixed blocks. So the same operands give the same bits with any
number of threads (but for WUDI's matrix products). What a method takes is in `search_spaces.methods`; how the variants
of a name differ, and where they differ from what others compute, is in README.md beside this file.

Which tensors belong together, where they come from and what they are rounded to is not known here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from search_spaces.methods import METHODS as SPECS
from search_spaces.methods import Coefficient, MethodSpec
from search_spaces.recipe import Merge
from workers.merging.methods import averages, competition, task_vectors
from workers.merging.methods.arithmetic import Products, cosine, cosine_of, inner_products, num_kept
from workers.merging.methods.averages import (
    Importance,
    importance_of,
    karcher_weights,
    linear,
    linear_weights,
    model_stock_weights,
    multislerp_weights,
    nuslerp_weights,
    slerp,
    slerp_weights,
)
from workers.merging.methods.competition import num_selected, ramplus_factor, sce_mergekit_weights, sce_weights
from workers.merging.methods.sparsify import cut_ranks, l1_ratio, probability_by_rank, row_width
from workers.merging.methods.task_vectors import m3_lambdas, task_arithmetic, ties
from workers.merging.order_statistics import MagnitudeTable

__all__ = [
    "METHODS",
    "Importance",
    "MergeMethod",
    "Operands",
    "Products",
    "cosine",
    "cosine_of",
    "cut_ranks",
    "importance_of",
    "inner_products",
    "karcher_weights",
    "l1_ratio",
    "linear",
    "linear_weights",
    "m3_lambdas",
    "merge_tensors",
    "model_stock_weights",
    "multislerp_weights",
    "num_kept",
    "num_selected",
    "nuslerp_weights",
    "probability_by_rank",
    "ramplus_factor",
    "row_width",
    "sce_mergekit_weights",
    "sce_weights",
    "slerp",
    "slerp_weights",
    "task_arithmetic",
    "ties",
]

Statistic = Literal["cosine", "importance", "magnitudes", "products", "ranks", "variances"]


@dataclass(frozen=True)
class Operands:
    """The same tensor of every source, in the order of the merge's sources, float32 and of one shape. None is modified.

    `base` is the base model's, for methods that need it; `keys` are the masks' (`masks.mask_key`), one per source, for
    those that draw some. What depends only on the sources may be known from an earlier merge: `cosine` and `importance`
    of the first two tensors, for each source its `magnitudes`, the table of |source - base|, the inner `products` of
    all pairs of tensors, or with a base of task vectors, the table of the `variances` between these, and the `ranks` of
    their magnitudes in each row.
    """

    tensors: tuple[torch.Tensor, ...]
    base: torch.Tensor | None = None
    cosine: float | None = None
    magnitudes: tuple[MagnitudeTable | None, ...] | None = None
    keys: tuple[int, ...] | None = None
    products: Products | None = None
    importance: Importance | None = None
    variances: MagnitudeTable | None = None
    ranks: tuple[torch.Tensor, ...] | None = None

    def in_float32(self) -> Operands:
        """The same operands in float32, if they are in other dtypes."""
        base = None if self.base is None else self.base.float()
        return replace(self, tensors=tuple(tensor.float() for tensor in self.tensors), base=base)


@dataclass(frozen=True)
class MergeMethod:
    """A method: what it takes (`spec`), the function that computes it, its source, and what sets it apart.

    `function` is given the tensors, the base if it needs one, and its coefficients by name, in the plural where they
    are one per source (`lambdas`, but `lambda_`); `keys` if it draws masks. `uses` are the statistics of its sources
    that it can be given. `variant` says in what it differs from its namesakes and from other implementations; `peer` is
    what mergekit calls the same computation, None where it has none.
    """

    spec: MethodSpec
    function: Callable[..., torch.Tensor]
    source: str
    variant: str
    mergekit_equivalent: str | None = None
    uses: frozenset[Statistic] = frozenset()

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def needs_base(self) -> bool:
        return self.spec.needs_base

    @property
    def takes_seed(self) -> bool:
        return self.spec.takes_seed

    def merge(self, operands: Operands, merge: Merge) -> torch.Tensor:
        """The merged tensor. Raises InvalidRecipe for coefficients that the method does not take."""
        arguments: dict[str, Any] = {_keyword(c): _value(c, merge) for c in self.spec.coefficients}
        if self.takes_seed:
            assert operands.keys is not None, f"{self.name} was given no keys"
            arguments["keys"] = operands.keys
        for statistic in self.uses:
            arguments["cos" if statistic == "cosine" else statistic] = getattr(operands, statistic)
        if not self.needs_base:
            return self.function(operands.tensors, **arguments)
        assert operands.base is not None, f"{self.name} was given no base"
        return self.function(operands.tensors, operands.base, **arguments)


def merge_tensors(merge: Merge, operands: Operands) -> torch.Tensor:
    """Apply the merge's method. Raises InvalidRecipe for a merge that its method does not take."""
    merge.check()
    return METHODS[merge.method].merge(operands, merge)


PLURALS = {
    "weight": "weights",
    "lambda": "lambdas",
    "density": "densities",
    "epsilon": "epsilons",
    "gamma": "gammas",
    "mask_lambda": "mask_lambdas",
}


def _keyword(coefficient: Coefficient) -> str:
    if coefficient.per_model:
        return PLURALS[coefficient.name]
    return "lambda_" if coefficient.name == "lambda" else coefficient.name


def _value(coefficient: Coefficient, merge: Merge) -> float | tuple[float, ...]:
    if coefficient.per_model:
        return merge.per_source(coefficient.name)
    number = merge.number(coefficient.name)
    return int(number) if coefficient.is_whole else number


def _slerp(tensors: tuple[torch.Tensor, ...], *, t: float, cos: float | None) -> torch.Tensor:
    return slerp(*tensors, t=t, cos=cos)


def _method(
    name: str,
    function: Callable[..., torch.Tensor],
    source: str,
    variant: str,
    mergekit_equivalent: str | None = None,
    uses: tuple[Statistic, ...] = (),
) -> MergeMethod:
    return MergeMethod(SPECS[name], function, source, variant, mergekit_equivalent, frozenset(uses))


MERGEKIT = "mergekit"
TIES_PAPER = "arXiv:2306.01708"
DARE_PAPER = "arXiv:2311.03099"
DELLA_PAPER = "arXiv:2406.11617"
BREADCRUMBS_PAPER = "arXiv:2312.06795"
PCB_PAPER = "arXiv:2410.02396"
TALL_PAPER = "arXiv:2405.07813"
RAM_PAPER = "arXiv:2601.13572"
M3_PAPER = "Mixup Model Merge (M3)"
BY_NAME = "masks by seed, model and tensor name; mergekit draws them in the order of its schedule"
EQUALS = "keeps all magnitudes that equal the smallest kept; mergekit cuts among them in no defined order"

METHODS: Mapping[str, MergeMethod] = {
    method.name: method
    for method in (
        _method("passthrough", averages.passthrough, MERGEKIT, "the source, times `scale`", "passthrough"),
        _method(
            "linear",
            averages.linear,
            "arXiv:2203.05482",
            "weights divided by their sum, which must not be zero; mergekit divides by zero",
            "linear",
        ),
        _method(
            "task_arithmetic",
            task_vectors.task_arithmetic,
            "arXiv:2212.04089",
            "one lambda, or one per model; in mergekit weight times lambda, `normalize: false`",
            "task_arithmetic",
        ),
        _method(
            "ties",
            task_vectors.ties,
            TIES_PAPER,
            "the paper's: signs without weights, nothing where they cancel, mean of those that agree; k per tensor",
            uses=("magnitudes",),
        ),
        _method(
            "ties_majority",
            task_vectors.ties_majority,
            "MergeLM",
            "`ties`, but the tensor's majority of signs where they cancel",
            uses=("magnitudes",),
        ),
        _method(
            "ties_sum",
            task_vectors.ties_sum,
            "MergeBench",
            "`ties`, but the sum of those that agree; k per tensor, not of the whole model",
            uses=("magnitudes",),
        ),
        _method(
            "ties_weighted",
            task_vectors.ties_weighted,
            MERGEKIT,
            f"`ties` with weights in election and mean, + where signs cancel; {EQUALS}, and floors `density * n` in "
            "binary",
            "ties",
            uses=("magnitudes",),
        ),
        _method(
            "ties_peft",
            task_vectors.ties_peft,
            "PEFT",
            "`ties` with weights in the mean only, divided by the number that agree, + where signs cancel",
            uses=("magnitudes",),
        ),
        _method(
            "m3_ties",
            task_vectors.m3_ties,
            f"{M3_PAPER}, appendix H",
            "`ties`, but what several keep is interpolated by weight, what one keeps is kept",
            uses=("magnitudes",),
        ),
        _method(
            "slerp",
            _slerp,
            "Shoemake 1985",
            "angle per tensor; straight where the cosine is beyond 0.9995 or -0.9995, a tensor without direction is "
            "orthogonal",
            "slerp",
            uses=("cosine",),
        ),
        _method(
            "nuslerp",
            averages.nuslerp,
            MERGEKIT,
            "`slerp` by weights, on the circle up to a cosine of 1 - 1e-7 or its opposite; mergekit's result between "
            "opposite tensors is decided by rounding",
            "nuslerp",
            uses=("cosine",),
        ),
        _method(
            "nuslerp_rows", averages.nuslerp_rows, MERGEKIT, "`nuslerp` of each row", "nuslerp, nuslerp_flatten: false"
        ),
        _method(
            "nuslerp_columns",
            averages.nuslerp_columns,
            MERGEKIT,
            "`nuslerp` of each column; mergekit calls these rows",
            "nuslerp, nuslerp_flatten: false, nuslerp_row_wise: true",
        ),
        _method(
            "nuslerp_task_vectors",
            averages.nuslerp_task_vectors,
            MERGEKIT,
            "`nuslerp` of task vectors",
            "nuslerp with base_model",
            uses=("products",),
        ),
        _method(
            "multislerp",
            averages.multislerp,
            "goddard.blog/posts/multislerp",
            "of whole models; all-zero tensors stay zero, where mergekit raises",
            "multislerp",
            uses=("products",),
        ),
        _method(
            "multislerp_task_vectors",
            averages.multislerp_task_vectors,
            "goddard.blog/posts/multislerp",
            "of task vectors; models equal to the base give the base, where mergekit raises; a single source is itself",
            "multislerp with base_model",
            uses=("products",),
        ),
        _method(
            "karcher",
            averages.karcher,
            "arXiv:2603.04972",
            "weights, equal unless given; 10 steps, tolerance 1e-5; opposite directions are left out of a step, where "
            "mergekit divides by sin(pi)",
            "karcher",
            uses=("products",),
        ),
        _method(
            "model_stock",
            averages.model_stock,
            "arXiv:2403.19522",
            "a ratio per tensor; exact cosines, where mergekit takes norms whose product is below 1e-6 for larger",
            "model_stock",
            uses=("products",),
        ),
        _method(
            "model_stock_rows",
            averages.model_stock_rows,
            "arXiv:2403.19522",
            "a ratio per row",
            "model_stock, filter_wise: true",
        ),
        _method(
            "nearswap", averages.nearswap, MERGEKIT, "the first source is what mergekit calls the base", "nearswap"
        ),
        _method(
            "arcee_fusion",
            averages.arcee_fusion,
            MERGEKIT,
            "the first source is what mergekit calls the base; quartiles of the whole tensor, where mergekit samples "
            "above a million elements",
            "arcee_fusion",
            uses=("importance",),
        ),
        _method(
            "dare_linear",
            task_vectors.dare_linear,
            DARE_PAPER,
            "the paper's rescaling, 1 / density",
        ),
        _method(
            "dare_linear_l1",
            task_vectors.dare_linear_l1,
            MERGEKIT,
            f"rescaled to the sum of magnitudes; {BY_NAME}",
            "dare_linear",
        ),
        _method("dare_ties", task_vectors.dare_ties, DARE_PAPER, "1 / density, then signs and mean of `ties`"),
        _method(
            "dare_ties_l1",
            task_vectors.dare_ties_l1,
            MERGEKIT,
            f"rescaled to the sum of magnitudes, then signs of `ties_weighted`; {BY_NAME}",
            "dare_ties",
        ),
        _method(
            "m3_dare", task_vectors.m3_dare, f"{M3_PAPER}, section 4.4", "`dare_linear`, direction and magnitude apart"
        ),
        _method(
            "della",
            task_vectors.della,
            DELLA_PAPER,
            "the paper's probabilities (epsilon half as wide) and rescaling by each, signs and mean of `ties`",
            uses=("ranks",),
        ),
        _method(
            "della_l1",
            task_vectors.della_l1,
            MERGEKIT,
            f"symmetric probabilities, rescaled to the sum of magnitudes, signs of `ties_weighted`; {BY_NAME}; rows of "
            "one element, which mergekit cannot merge, by density",
            "della",
            uses=("ranks",),
        ),
        _method("della_linear", task_vectors.della_linear, DELLA_PAPER, "`della` without signs", uses=("ranks",)),
        _method(
            "della_linear_l1",
            task_vectors.della_linear_l1,
            MERGEKIT,
            f"`della_l1` without signs; {BY_NAME}",
            "della_linear",
            uses=("ranks",),
        ),
        _method(
            "breadcrumbs",
            task_vectors.breadcrumbs,
            BREADCRUMBS_PAPER,
            f"lambda per model; {EQUALS}, and lowers gamma where density + gamma exceeds 1, which is refused here",
            "breadcrumbs",
            uses=("magnitudes",),
        ),
        _method(
            "breadcrumbs_ties",
            task_vectors.breadcrumbs_ties,
            MERGEKIT,
            "`breadcrumbs`, then signs of `ties_weighted`",
            "breadcrumbs_ties",
            uses=("magnitudes",),
        ),
        _method(
            "sce",
            competition.sce,
            "arXiv:2408.07990",
            "weights always by mean square, nothing where signs cancel; mergekit weighs equally below a sum of 1e-6, "
            "where most fine-tuned tensors are: `sce_mergekit`",
            uses=("variances",),
        ),
        _method(
            "sce_mergekit",
            competition.sce_mergekit,
            MERGEKIT,
            "`sce`, but equal weights where mean squares sum to less than 1e-6, + where signs cancel; keeps all "
            "variances that equal the smallest kept",
            "sce",
            uses=("variances",),
        ),
        _method("ram", competition.ram, RAM_PAPER, "changes above epsilon, 1e-5", "ram"),
        _method(
            "ramplus_tl",
            competition.ramplus_tl,
            RAM_PAPER,
            "`ram`, own changes raised by counts per tensor",
            "ramplus_tl",
        ),
        _method("pcb", competition.pcb, PCB_PAPER, "the paper's equations; balanced per tensor"),
        _method("pcb_tanh", competition.pcb_tanh, PCB_PAPER, "the authors' code: tanh, clipped; balanced per tensor"),
        _method("consensus_ta", competition.consensus_ta, TALL_PAPER, "mask of the sum of task vectors"),
        _method(
            "consensus_ties",
            competition.consensus_ties,
            TALL_PAPER,
            "mask of what `ties` merges; k per tensor",
            uses=("magnitudes",),
        ),
        _method(
            "wudi",
            competition.wudi,
            "arXiv:2503.08099",
            "Adam from the sum of task vectors, of matrices; embeddings included, other tensors averaged",
        ),
    )
}
