"""Merge methods of mergekit with settings that differ from mergekit's defaults.

They are the weighted sum and multi-SLERP with weights that are not divided by their sum, NuSLERP of the rows or the
columns of task vectors, and methods that rescale trimmed task vectors.
"""

from __future__ import annotations

from dataclasses import replace

from search_spaces.methods import averages, sparse, ties
from search_spaces.methods.base import MergeMethod
from search_spaces.methods.coefficients import WEIGHTS
from search_spaces.methods.mergekit import Counterpart, elected, generalized, summed
from search_spaces.methods.published import LINEAR_PARAMETERS

POSITION = 6

WEIGHTED_SUM = MergeMethod(
    name="weighted_sum",
    source="mergekit",
    variant="`linear` with weights as they are",
    coefficients=(WEIGHTS,),
    drops_zeros="weight",
    mergekit=Counterpart("linear", LINEAR_PARAMETERS, settings={"normalize": False}),
)

MULTISLERP_UNSCALED = replace(
    averages.MULTISLERP,
    name="multislerp_unscaled",
    variant="`multislerp` with weights as they are; one source alone is kept",
    coefficients=(WEIGHTS, averages.EPS),
    drops_zeros=None,
    constraint=None,
    mergekit=Counterpart("multislerp", averages.MULTISLERP_PARAMETERS, settings={"normalize_weights": False}),
)

MULTISLERP_UNSCALED_TASK_VECTORS = replace(
    averages.MULTISLERP_TASK_VECTORS,
    name="multislerp_unscaled_task_vectors",
    variant="`multislerp_task_vectors` with weights as they are; one source alone is kept",
    coefficients=(WEIGHTS, averages.EPS),
    drops_zeros=None,
    constraint=None,
    mergekit=Counterpart("multislerp", averages.MULTISLERP_PARAMETERS, "recipe", settings={"normalize_weights": False}),
)

NUSLERP_ROWS_TASK_VECTORS = replace(
    averages.NUSLERP_TASK_VECTORS,
    name="nuslerp_rows_task_vectors",
    variant="`nuslerp_rows` of task vectors",
    mergekit=Counterpart(
        "nuslerp", averages.NUSLERP_PARAMETERS, "recipe", settings={"nuslerp_flatten": False, "nuslerp_row_wise": False}
    ),
)

NUSLERP_COLUMNS_TASK_VECTORS = replace(
    averages.NUSLERP_TASK_VECTORS,
    name="nuslerp_columns_task_vectors",
    variant="`nuslerp_columns` of task vectors; mergekit calls these rows",
    mergekit=Counterpart(
        "nuslerp", averages.NUSLERP_PARAMETERS, "recipe", settings={"nuslerp_flatten": False, "nuslerp_row_wise": True}
    ),
)

TIES_WEIGHTED_L1 = replace(
    ties.TIES_WEIGHTED,
    name="ties_weighted_l1",
    variant="`ties_weighted`, what is kept rescaled to the sum of magnitudes",
    mergekit=generalized(
        "ties",
        elected("density"),
        normalize=True,
        rescale=False,
        exact_at={"density": 1.0},
        settings={"rescale": True},
    ),
)

BREADCRUMBS_L1 = replace(
    sparse.BREADCRUMBS,
    name="breadcrumbs_l1",
    variant="`breadcrumbs`, what is kept rescaled to the sum of magnitudes",
    mergekit=generalized(
        "breadcrumbs",
        summed("density", "gamma"),
        sparse.MERGEKIT_GAMMA,
        normalize=False,
        rescale=False,
        settings={"rescale": True},
    ),
)

BREADCRUMBS_TIES_L1 = replace(
    sparse.BREADCRUMBS_TIES,
    name="breadcrumbs_ties_l1",
    variant="`breadcrumbs_ties`, what is kept rescaled to the sum of magnitudes",
    mergekit=generalized(
        "breadcrumbs_ties",
        elected("density", "gamma"),
        sparse.MERGEKIT_GAMMA,
        normalize=False,
        rescale=False,
        settings={"rescale": True},
    ),
)
