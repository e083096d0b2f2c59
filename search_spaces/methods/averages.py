"""Merge methods: averages and interpolations of whole models or their task vectors, and fusions of two models."""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.methods.base import Coefficient, MergeMethod, Range
from search_spaces.methods.coefficients import PAIR_WEIGHT, SHARES, weights_do_not_cancel
from search_spaces.methods.mergekit import CoefficientValue, Counterpart, Parameter, Values

POSITION = 2

MULTISLERP_PAGE = "goddard.blog/posts/multislerp"
MODEL_STOCK_PAPER = "arXiv:2403.19522"

NUSLERP_PARAMETERS = (
    Parameter("weight", "expert"),
    Parameter("nuslerp_row_wise", default=False),
    Parameter("nuslerp_flatten", default=True),
)
MULTISLERP_PARAMETERS = (
    Parameter("weight", "expert"),
    Parameter("normalize_weights", default=True),
    Parameter("eps", default=1e-8),
)
# Added to the norms by which multislerp divides.
EPS = Coefficient("eps", 0, 0.01, default=1e-8, decimals=12)
MODEL_STOCK_PARAMETERS = (Parameter("filter_wise", default=False),)
# With 1, a ratio outside its range is used as it is, as in mergekit.
UNBOUNDED = Coefficient("unbounded", 0, 1, default=0, is_whole=True)


def _unbounded(values: Values) -> Mapping[str, CoefficientValue]:
    return {UNBOUNDED.name: 1}


NUSLERP = MergeMethod(
    name="nuslerp",
    source="mergekit",
    variant=(
        "`slerp` by weights, spherical up to a cosine of +-(1 - 1e-7); between opposite tensors mergekit's result "
        "depends on rounding"
    ),
    coefficients=(PAIR_WEIGHT,),
    min_sources=2,
    max_sources=2,
    drops_zeros="weight",
    is_itself_alone=True,
    mergekit=Counterpart("nuslerp", NUSLERP_PARAMETERS, settings={"nuslerp_flatten": True}),
)

NUSLERP_ROWS = MergeMethod(
    name="nuslerp_rows",
    source="mergekit",
    variant="`nuslerp` of each row",
    coefficients=(PAIR_WEIGHT,),
    min_sources=2,
    max_sources=2,
    drops_zeros="weight",
    is_itself_alone=True,
    mergekit=Counterpart("nuslerp", NUSLERP_PARAMETERS, settings={"nuslerp_flatten": False, "nuslerp_row_wise": False}),
)

NUSLERP_COLUMNS = MergeMethod(
    name="nuslerp_columns",
    source="mergekit",
    variant="`nuslerp` of each column; mergekit calls these rows",
    coefficients=(PAIR_WEIGHT,),
    min_sources=2,
    max_sources=2,
    drops_zeros="weight",
    is_itself_alone=True,
    mergekit=Counterpart("nuslerp", NUSLERP_PARAMETERS, settings={"nuslerp_flatten": False, "nuslerp_row_wise": True}),
)

NUSLERP_TASK_VECTORS = MergeMethod(
    name="nuslerp_task_vectors",
    source="mergekit",
    variant="`nuslerp` of task vectors",
    coefficients=(PAIR_WEIGHT,),
    needs_base=True,
    min_sources=2,
    max_sources=2,
    drops_zeros="weight",
    is_itself_alone=True,
    mergekit=Counterpart("nuslerp", NUSLERP_PARAMETERS, "recipe", settings={"nuslerp_flatten": True}),
)

MULTISLERP = MergeMethod(
    name="multislerp",
    source=MULTISLERP_PAGE,
    variant="of whole models; all-zero tensors stay zero, where mergekit raises",
    coefficients=(SHARES, EPS),
    drops_zeros="weight",
    is_itself_alone=True,
    constraint=weights_do_not_cancel,
    mergekit=Counterpart("multislerp", MULTISLERP_PARAMETERS, settings={"normalize_weights": True}),
)

MULTISLERP_TASK_VECTORS = MergeMethod(
    name="multislerp_task_vectors",
    source=MULTISLERP_PAGE,
    variant="of task vectors; models equal to the base give the base, where mergekit raises; one source alone is kept",
    coefficients=(SHARES, EPS),
    needs_base=True,
    drops_zeros="weight",
    is_itself_alone=True,
    constraint=weights_do_not_cancel,
    mergekit=Counterpart("multislerp", MULTISLERP_PARAMETERS, "recipe", settings={"normalize_weights": True}),
)

KARCHER = MergeMethod(
    name="karcher",
    source="arXiv:2603.04972",
    variant=(
        "weights, equal unless given; steps until one is shorter than `tol`; opposite directions are left out of a "
        "step, where mergekit divides by sin(pi)"
    ),
    # Not searched: the weights are equal, as published.
    coefficients=(
        Coefficient("weight", 0, per_model=True, default=1, has_gradient=True),
        Coefficient("max_iter", 0, 1_000_000, default=10, is_whole=True),
        Coefficient("tol", 0, 0.1, default=1e-5, decimals=12),
    ),
    drops_zeros="weight",
    is_itself_alone=True,
    constraint=weights_do_not_cancel,
    mergekit=Counterpart(
        "karcher",
        (Parameter("max_iter", default=10.0), Parameter("tol", default=1e-5)),
        exact_at={"weight": 1.0},
    ),
    mergekit_difference="has equal weights in mergekit",
)

MODEL_STOCK = MergeMethod(
    name="model_stock",
    source=MODEL_STOCK_PAPER,
    variant=(
        "a ratio per tensor, from -N for N models to 1 (`unbounded`: any, as in mergekit); exact cosines, where "
        "mergekit clamps products of norms to 1e-6"
    ),
    coefficients=(UNBOUNDED,),
    needs_base=True,
    min_sources=2,
    mergekit=Counterpart(
        "model_stock",
        MODEL_STOCK_PARAMETERS,
        "recipe",
        settings={"filter_wise": False},
        coefficients=_unbounded,
    ),
    mergekit_difference="differs in mergekit where task vectors are short",
)

MODEL_STOCK_ROWS = MergeMethod(
    name="model_stock_rows",
    source=MODEL_STOCK_PAPER,
    variant="`model_stock` with a ratio per row",
    coefficients=(UNBOUNDED,),
    needs_base=True,
    min_sources=2,
    mergekit=Counterpart(
        "model_stock",
        MODEL_STOCK_PARAMETERS,
        "recipe",
        settings={"filter_wise": True},
        coefficients=_unbounded,
    ),
    mergekit_difference="differs in mergekit where task vectors are short",
)

NEARSWAP = MergeMethod(
    name="nearswap",
    source="mergekit",
    variant="the first source is what mergekit calls the base",
    # QuartetAnemoi-70B, which introduced it, uses t = 0.0001; searched from 0 to ten times that.
    coefficients=(Coefficient("t", 0, searched=Range(0.0, 0.001), has_gradient=True),),
    min_sources=2,
    max_sources=2,
    is_ordered=True,
    first_at_zero="t",
    is_itself_alone=True,
    mergekit=Counterpart("nearswap", (Parameter("t"),), "first"),
)

ARCEE_FUSION = MergeMethod(
    name="arcee_fusion",
    source="mergekit",
    variant=(
        "the first source is what mergekit calls the base; quartiles of the whole tensor, where mergekit samples "
        "tensors of more than a million elements"
    ),
    min_sources=2,
    max_sources=2,
    is_ordered=True,
    is_itself_alone=True,
    mergekit=Counterpart("arcee_fusion", base="first"),
    mergekit_difference="takes random quartiles in mergekit for tensors of more than a million elements",
)
