"""Merge methods that resolve conflicts between task vectors: SCE, RAM, PCB-Merging, consensus (TALL masks), WUDI."""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.methods.base import Coefficient, MergeMethod, NumSources
from search_spaces.methods.coefficients import LAMBDA, K
from search_spaces.methods.mergekit import CoefficientValue, Counterpart, Parameter, Values

POSITION = 5

RAM_PAPER = "arXiv:2601.13572"
PCB_PAPER = "arXiv:2410.02396"
TALL_PAPER = "arXiv:2405.07813"

# FuseChat (arXiv:2408.07990), which introduced SCE, selects a tenth.
SELECT_TOPK = Coefficient("select_topk", 0, 1).searched_in(0.1, 1.0)
# A constant of the paper.
RAM_EPSILON = Coefficient("epsilon", 0, default=1e-5)
# PCB-Merging: its code's ratios are 0.05 and 0.1, its scale 0.8 to 1.3.
PCB_COEFFICIENTS = (LAMBDA.searched_in(0.0, 2.0), Coefficient("density", 1e-6, 1).searched_in(0.05, 0.3))
# TALL masks: mask lambdas 0.2 to 0.6, agreement of two models.
MASK_LAMBDAS = Coefficient("mask_lambda", 0, per_model=True).searched_in(0.2, 0.6)
AGREEMENT = Coefficient("agreement", 1, is_whole=True, searched=NumSources(2.0))


def _selected(values: Values) -> Mapping[str, CoefficientValue]:
    return {"select_topk": min(1.0, max(0.0, values.number("select_topk")))}


SCE = MergeMethod(
    name="sce",
    source="arXiv:2408.07990",
    variant=(
        "weights always by mean square, zero where signs cancel; mergekit uses equal weights below a sum of 1e-6, "
        "which most fine-tuned tensors have: `sce_mergekit`"
    ),
    coefficients=(SELECT_TOPK,),
    needs_base=True,
    cuts_at_rank=True,
    mergekit_difference="differs in mergekit where task vectors are small and where signs cancel",
)

SCE_MERGEKIT = MergeMethod(
    name="sce_mergekit",
    source="mergekit",
    variant=(
        "`sce`, but equal weights where mean squares sum to less than 1e-6, + where signs cancel; of "
        "equal variances at the cut, those kept are drawn by hash"
    ),
    coefficients=(SELECT_TOPK,),
    needs_base=True,
    cuts_at_rank=True,
    mergekit=Counterpart("sce", (Parameter("select_topk", default=1.0),), "recipe", coefficients=_selected),
    mergekit_difference="differs in mergekit where variances are equal",
)

RAM = MergeMethod(
    name="ram",
    source=RAM_PAPER,
    variant="only changes above epsilon, 1e-5",
    coefficients=(RAM_EPSILON,),
    needs_base=True,
    mergekit=Counterpart("ram", (Parameter("epsilon", default=1e-5),), "recipe"),
)

RAMPLUS_TL = MergeMethod(
    name="ramplus_tl",
    source=RAM_PAPER,
    variant="`ram`, with elements that one model alone changed scaled up by counts per tensor",
    # The paper uses r 0.1 and alpha 0.2; searched from 0 to five times these.
    coefficients=(
        Coefficient("r", 0, default=0.1).searched_in(0.0, 0.5),
        Coefficient("alpha", 0, default=0.2).searched_in(0.0, 1.0),
        RAM_EPSILON,
    ),
    needs_base=True,
    mergekit=Counterpart(
        "ramplus_tl",
        (Parameter("r", default=0.1), Parameter("alpha", default=0.2), Parameter("epsilon", default=1e-5)),
        "recipe",
    ),
)

PCB = MergeMethod(
    name="pcb",
    source=PCB_PAPER,
    variant="the paper's equations; balanced per tensor",
    coefficients=PCB_COEFFICIENTS,
    needs_base=True,
    cuts_at_rank=True,
    base_at_zero="lambda",
    depends_on_device=True,
)

PCB_TANH = MergeMethod(
    name="pcb_tanh",
    source=PCB_PAPER,
    variant="the authors' code: tanh, clipped; balanced per tensor",
    coefficients=PCB_COEFFICIENTS,
    needs_base=True,
    base_at_zero="lambda",
    depends_on_device=True,
)

CONSENSUS_TA = MergeMethod(
    name="consensus_ta",
    source=TALL_PAPER,
    variant="mask of the sum of task vectors",
    coefficients=(LAMBDA, MASK_LAMBDAS, AGREEMENT),
    needs_base=True,
    base_at_zero="lambda",
)

CONSENSUS_TIES = MergeMethod(
    name="consensus_ties",
    source=TALL_PAPER,
    variant="mask of the merged task vector of `ties`; k per tensor",
    coefficients=(LAMBDA, K, MASK_LAMBDAS, AGREEMENT),
    needs_base=True,
    cuts_at_rank=True,
    trims=True,
    base_at_zero="lambda",
)

WUDI = MergeMethod(
    name="wudi",
    source="arXiv:2503.08099",
    variant="Adam on matrices, embeddings included, from the sum of task vectors; other tensors averaged",
    # Steps and learning rate are the paper's.
    coefficients=(
        Coefficient("lambda", default=1, has_gradient=True).searched_in(0.0, 1.0),
        Coefficient("steps", 0, 10_000, default=300, is_whole=True),
        Coefficient("learning_rate", 1e-6, 1, default=1e-5),
    ),
    needs_base=True,
    base_at_zero="lambda",
    depends_on_device=True,
)
