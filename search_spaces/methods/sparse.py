"""Merge methods that sparsify task vectors, at random (DARE, DELLA) or by magnitude (Model Breadcrumbs).

Methods whose names end in `_l1` scale the kept elements to the sum of magnitudes of the whole task vector, as in
mergekit. The other methods of DARE and DELLA divide each kept element by its probability of being kept, as in the
papers.
"""

from __future__ import annotations

from dataclasses import replace

from search_spaces.methods import ties
from search_spaces.methods.base import Coefficient, MergeMethod, Numbers
from search_spaces.methods.coefficients import (
    DENSITIES,
    LAMBDA,
    LAMBDA_OR_1,
    LAMBDAS,
    SHARES,
    WEIGHTS,
    normalize,
    weights_do_not_cancel,
)
from search_spaces.methods.mergekit import EQUAL_MAGNITUDES, Parameter, elected, generalized, summed

POSITION = 4

DARE_PAPER = "arXiv:2311.03099"
DELLA_PAPER = "arXiv:2406.11617"
BREADCRUMBS_PAPER = "arXiv:2312.06795"
MASKS_BY_NAME = "masks by seed, model and tensor name; mergekit draws them in the order of its schedule"

# The DARE paper sweeps drop rates from 0.1 to 0.9.
DARE_DENSITIES = DENSITIES.searched_in(0.1, 0.9)
# DELLA sweeps drop rates with an epsilon that leaves every probability in [0, 1].
DELLA_DENSITIES = DENSITIES.searched_in(0.2, 0.8)
EPSILONS = Coefficient("epsilon", 0, 0.5, per_model=True).searched_in(0.0, 0.2)
# Model Breadcrumbs: percentiles 85 and 99.3, which is density 0.143 and gamma 0.007; the ranges extend to both sides.
BREADCRUMBS_DENSITIES = DENSITIES.searched_in(0.1, 0.9)
GAMMAS = Coefficient("gamma", 0, 1, per_model=True).searched_in(0.0, 0.05)

# With 0, the elements that are kept are not rescaled.
RESCALE = Coefficient("rescale", 0, 1, default=1, is_whole=True)

MERGEKIT_EPSILON = Parameter("epsilon", "expert", 0.15)
MERGEKIT_GAMMA = Parameter("gamma", "expert", 0.01)


def _probabilities_are_valid(numbers: Numbers) -> str | None:
    for density, epsilon in zip(numbers("density"), numbers("epsilon"), strict=True):
        if round(density - epsilon, 9) < 0 or round(density + epsilon, 9) > 1:
            wrong = f"density {density:g} and epsilon {epsilon:g}"
            return f"{wrong}: density - epsilon and density + epsilon must be in [0, 1]"
    return None


DARE_LINEAR = MergeMethod(
    name="dare_linear",
    source=DARE_PAPER,
    variant="the paper's rescaling, 1 / density",
    coefficients=(LAMBDAS, DARE_DENSITIES),
    needs_base=True,
    takes_seed=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
)

DARE_LINEAR_L1 = MergeMethod(
    name="dare_linear_l1",
    source="mergekit",
    variant=f"rescaled to the sum of magnitudes unless `rescale` is 0; {MASKS_BY_NAME}",
    coefficients=(LAMBDAS, DARE_DENSITIES, RESCALE),
    needs_base=True,
    takes_seed=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
    mergekit=generalized("dare_linear", summed("density", "rescale"), normalize=False, rescale=True),
)

DARE_TIES = MergeMethod(
    name="dare_ties",
    source=DARE_PAPER,
    variant="1 / density, then signs and mean of `ties`",
    coefficients=(LAMBDA, DARE_DENSITIES),
    needs_base=True,
    takes_seed=True,
    base_at_zero="lambda",
)

DARE_TIES_L1 = MergeMethod(
    name="dare_ties_l1",
    source="mergekit",
    variant=f"rescaled to the sum of magnitudes, then signs of `ties_weighted`; {MASKS_BY_NAME}",
    coefficients=(WEIGHTS, DARE_DENSITIES, LAMBDA_OR_1, normalize(0), RESCALE),
    needs_base=True,
    takes_seed=True,
    drops_zeros="weight",
    base_at_zero="lambda",
    mergekit=generalized("dare_ties", elected("density", "rescale"), normalize=False, rescale=True),
)

M3_DARE = MergeMethod(
    name="m3_dare",
    source="Mixup Model Merge (M3), section 4.4",
    variant="`dare_linear`, with direction and magnitude as separate coefficients",
    # Scaling factor 0.5 to 2: M3, section 4.1.
    coefficients=(replace(SHARES, low=0), LAMBDA.searched_in(0.5, 2.0), DARE_DENSITIES),
    needs_base=True,
    takes_seed=True,
    drops_zeros="weight",
    base_at_zero="lambda",
    constraint=weights_do_not_cancel,
)

M3_DARE_TIES = MergeMethod(
    name="m3_dare_ties",
    source="Mixup Model Merge (M3), table 7",
    variant="1 / density, then `m3_ties_majority`, which trims what DARE keeps",
    coefficients=(*ties.M3_TIES.coefficients, DARE_DENSITIES),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    takes_seed=True,
    base_at_zero="lambda",
    constraint=weights_do_not_cancel,
)

DELLA = MergeMethod(
    name="della",
    source=DELLA_PAPER,
    variant="the paper's probabilities (epsilon halved) and rescaling by each, then signs and mean of `ties`",
    coefficients=(LAMBDA, DELLA_DENSITIES, EPSILONS),
    needs_base=True,
    cuts_at_rank=True,
    takes_seed=True,
    base_at_zero="lambda",
    constraint=_probabilities_are_valid,
)

DELLA_L1 = MergeMethod(
    name="della_l1",
    source="mergekit",
    variant=(
        f"symmetric probabilities, rescaled to the sum of magnitudes, signs of `ties_weighted`; {MASKS_BY_NAME}; rows "
        "of one element, which mergekit cannot merge, by density"
    ),
    coefficients=(WEIGHTS, DELLA_DENSITIES, EPSILONS, LAMBDA_OR_1, normalize(1), RESCALE),
    needs_base=True,
    cuts_at_rank=True,
    takes_seed=True,
    drops_zeros="weight",
    base_at_zero="lambda",
    constraint=_probabilities_are_valid,
    mergekit=generalized(
        "della", elected("density", "epsilon", "rescale"), MERGEKIT_EPSILON, normalize=True, rescale=True
    ),
)

DELLA_LINEAR = MergeMethod(
    name="della_linear",
    source=DELLA_PAPER,
    variant="`della` without signs",
    coefficients=(LAMBDAS, DELLA_DENSITIES, EPSILONS),
    needs_base=True,
    cuts_at_rank=True,
    takes_seed=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
    constraint=_probabilities_are_valid,
)

DELLA_LINEAR_L1 = MergeMethod(
    name="della_linear_l1",
    source="mergekit",
    variant=f"`della_l1` without signs; {MASKS_BY_NAME}",
    coefficients=(LAMBDAS, DELLA_DENSITIES, EPSILONS, RESCALE),
    needs_base=True,
    cuts_at_rank=True,
    takes_seed=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
    constraint=_probabilities_are_valid,
    mergekit=generalized(
        "della_linear", summed("density", "epsilon", "rescale"), MERGEKIT_EPSILON, normalize=False, rescale=True
    ),
)

BREADCRUMBS = MergeMethod(
    name="breadcrumbs",
    source=BREADCRUMBS_PAPER,
    variant=(f"lambda per model, a lower gamma where density + gamma exceeds 1; {EQUAL_MAGNITUDES}"),
    coefficients=(LAMBDAS, BREADCRUMBS_DENSITIES, GAMMAS),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    drops_zeros="lambda",
    base_at_zero="lambda",
    mergekit=generalized(
        "breadcrumbs",
        summed("density", "gamma"),
        MERGEKIT_GAMMA,
        normalize=False,
        rescale=False,
        settings={"rescale": False},
    ),
    mergekit_difference="differs in mergekit where magnitudes are equal",
)

BREADCRUMBS_TIES = MergeMethod(
    name="breadcrumbs_ties",
    source="mergekit",
    variant="`breadcrumbs`, then signs of `ties_weighted`",
    coefficients=(WEIGHTS, BREADCRUMBS_DENSITIES, GAMMAS, LAMBDA_OR_1, normalize(0)),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    drops_zeros="weight",
    base_at_zero="lambda",
    mergekit=generalized(
        "breadcrumbs_ties",
        elected("density", "gamma"),
        MERGEKIT_GAMMA,
        normalize=False,
        rescale=False,
        settings={"rescale": False},
    ),
    mergekit_difference="differs in mergekit where magnitudes are equal",
)
