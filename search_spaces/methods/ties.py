"""Variants of TIES, each named after its origin; the method `ties` is TIES as published."""

from __future__ import annotations

from dataclasses import replace

from search_spaces.methods.base import MergeMethod
from search_spaces.methods.coefficients import (
    DENSITIES,
    LAMBDA,
    LAMBDA_OR_1,
    SHARES,
    WEIGHTS,
    K,
    normalize,
    weights_do_not_cancel,
)
from search_spaces.methods.mergekit import EQUAL_MAGNITUDES, elected, generalized

POSITION = 3

TIES_MAJORITY = MergeMethod(
    name="ties_majority",
    source="MergeLM",
    variant="`ties`, but where signs cancel, the tensor's majority sign is elected",
    coefficients=(LAMBDA, K),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="lambda",
)

TIES_SUM = MergeMethod(
    name="ties_sum",
    source="MergeBench",
    variant="`ties`, but the sum of those that agree; k per tensor, not of the whole model",
    coefficients=(LAMBDA, K),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="lambda",
)

TIES_WEIGHTED = MergeMethod(
    name="ties_weighted",
    source="mergekit",
    variant=(
        f"`ties` with weights in election and mean, + where signs cancel; {EQUAL_MAGNITUDES}, and floors "
        "the floating-point `density * n`"
    ),
    coefficients=(WEIGHTS, DENSITIES, LAMBDA_OR_1, normalize(1)),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    drops_zeros="weight",
    base_at_zero="lambda",
    mergekit=generalized(
        "ties",
        elected("density"),
        normalize=True,
        rescale=False,
        exact_at={"density": 1.0},
        settings={"rescale": False},
    ),
    mergekit_difference="differs in mergekit where magnitudes are equal",
)

TIES_PEFT = MergeMethod(
    name="ties_peft",
    source="PEFT",
    variant="`ties` with weights in the mean only, divided by the number that agree, + where signs cancel",
    coefficients=(WEIGHTS, DENSITIES),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="weight",
)

M3_TIES = MergeMethod(
    name="m3_ties",
    source="Mixup Model Merge (M3), appendix H",
    variant="`ties`, but elements that several keep are interpolated by weight, those that one keeps are unchanged",
    # Scaling factor 0.5 to 2: M3, section 4.1; retained share 0.5 to 0.9: its Table 3.
    coefficients=(replace(SHARES, low=0), LAMBDA.searched_in(0.5, 2.0), K.searched_in(0.5, 0.9)),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="lambda",
    constraint=weights_do_not_cancel,
)

M3_TIES_MAJORITY = replace(
    M3_TIES,
    name="m3_ties_majority",
    source="Mixup Model Merge (M3), its code",
    variant=(
        "`m3_ties`, but where signs cancel, the majority sign; shares of models that do not keep an element are "
        "divided equally among those that do"
    ),
)
