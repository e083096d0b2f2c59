"""The four merge methods published with LFS (layer-wise fusion), and passthrough, which returns a model unchanged."""

from __future__ import annotations

from search_spaces.methods.base import Coefficient, MergeMethod, Range
from search_spaces.methods.coefficients import LAMBDA, LAMBDAS, SHARES, K, weights_do_not_cancel
from search_spaces.methods.mergekit import Counterpart, Parameter, generalized, summed

POSITION = 1

LINEAR_PARAMETERS = (Parameter("weight", "each"), Parameter("normalize", default=True))

PASSTHROUGH = MergeMethod(
    name="passthrough",
    source="mergekit",
    variant="the source, times `scale`",
    # As depth search (DIS) scales a layer's output: 0.5 to 1.5.
    coefficients=(Coefficient("scale", default=1, searched=Range(0.5, 1.5), has_gradient=True),),
    max_sources=1,
    mergekit=Counterpart("passthrough", (Parameter("scale", "each", 1.0),)),
)

LINEAR = MergeMethod(
    name="linear",
    source="arXiv:2203.05482",
    variant="weights divided by their sum, which must not be zero; mergekit divides by zero (see `weighted_sum`)",
    coefficients=(SHARES,),
    drops_zeros="weight",
    constraint=weights_do_not_cancel,
    mergekit=Counterpart(
        "linear",
        LINEAR_PARAMETERS,
        settings={"normalize": True},
    ),
)

TASK_ARITHMETIC = MergeMethod(
    name="task_arithmetic",
    source="arXiv:2212.04089",
    variant="one lambda, or one per model; in mergekit weight times lambda, `normalize: false`",
    coefficients=(LAMBDAS,),
    needs_base=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
    mergekit=generalized("task_arithmetic", summed(), normalize=False, rescale=False),
)

TIES = MergeMethod(
    name="ties",
    source="arXiv:2306.01708",
    variant="the paper's: signs without weights, zero where they cancel, mean of those that agree; k per tensor",
    coefficients=(LAMBDA, K),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="lambda",
    mergekit_difference="differs in mergekit where signs cancel and where magnitudes are equal",
)

SLERP = MergeMethod(
    name="slerp",
    source="Shoemake 1985",
    variant=("angle per tensor; linear beyond a cosine of +-0.9995; a tensor of zero norm counts as orthogonal"),
    coefficients=(Coefficient("t", searched=Range(0.0, 1.0), has_gradient=True),),
    min_sources=2,
    max_sources=2,
    is_itself_alone=True,
    mergekit=Counterpart("slerp", (Parameter("t"),), "first"),
)
