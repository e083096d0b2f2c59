"""Methods in which task vectors compete for each element: SCE, RAM, PCB-Merging, consensus (TALL masks), WUDI."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from workers.merging.methods import consensus
from workers.merging.methods.arithmetic import dot, num_kept, share_of, total
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import merges
from workers.merging.methods.trimming import Magnitudes, Orders, each_order, trimmed_task_vectors
from workers.merging.order_statistics import Ranked, TieOrder, threshold_of_rank

__all__ = [
    "consensus_ta",
    "consensus_ties",
    "num_selected",
    "pcb",
    "pcb_tanh",
    "ram",
    "ramplus_factor",
    "ramplus_tl",
    "sce",
    "sce_mergekit",
    "sce_mergekit_weights",
    "sce_weights",
    "variance",
    "wudi",
]

ANY_ORDER = TieOrder(0)
# PCB-Merging's code clips magnitudes to their quantiles at this share from both ends.
PCB_CLIPPED = 0.0001
# Below this sum of mean squares mergekit's SCE uses equal weights.
NO_SQUARES = 1e-6
# Adam's constants, as in its paper.
ADAM_BETAS, ADAM_EPSILON = (0.9, 0.999), 1e-8


@merges("sce", peak=Peak(8, 12))
def sce(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    select_topk: float,
    variances: Ranked | None = None,
    order: TieOrder = ANY_ORDER,
) -> torch.Tensor:
    """SCE (FuseChat, arXiv:2408.07990): a weighted mean of the task vectors at the elements that vary most.

    theta_pre is the tensor of the base model, `base`. tau_t, the task vector of model t, is its tensor in `tensors`
    minus `base`. The method has three steps:

    - Select: of the elements whose values differ between the task vectors, the share `select_topk` with the largest
      variance is kept; the other elements become zero in every tau_t. With `select_topk` 1, all elements are kept.
    - Calculate: the weight w_t is the sum of the squares of tau_t's kept elements, divided by the number of all
      elements.
    - Erase: in each tau_t, elements whose sign differs from the sign of the sum of the task vectors become zero.

    The result is theta_pre + sum_t w_t tau_t / sum_t w_t over the elements that are left. For elements that are not
    selected, and where the sum of the task vectors is zero, the result is the base. `variances` is a precomputed table
    of the elements' variances, from which the selection takes its threshold; with None, the threshold is searched for.
    `order` is the rule that breaks ties between elements of equal variance.
    """
    taus = [tensor - base for tensor in tensors]
    if select_topk < 1:
        dropped = ~_most_variable(taus, select_topk, order, variances)
        taus = [tau.masked_fill_(dropped, 0) for tau in taus]
    weights = sce_weights([dot(tau, tau) for tau in taus])
    elected = taus[0].clone()
    for tau in taus[1:]:
        elected += tau
    elected.sign_()
    merged, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for tau, weight in zip(taus, weights, strict=True):
        agreeing = tau.mul_(elected).clamp_(min=0)
        merged += agreeing * weight
        divisor += agreeing.sign_().mul_(weight)
    return merged.mul_(elected).div_(divisor.masked_fill_(divisor == 0, 1)).add_(base)


@merges("sce_mergekit", peak=Peak(8, 12))
def sce_mergekit(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    select_topk: float,
    variances: Ranked | None = None,
    order: TieOrder = ANY_ORDER,
) -> torch.Tensor:
    """SCE as mergekit computes it, which differs from the method `sce` in three special cases.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. As in the method `sce`, a
    share `select_topk` of the elements is selected: the elements that vary most between the task vectors. The weight of
    a model is the mean square of its selected elements, and elements whose sign differs from the sign of the sum of the
    task vectors are erased. The three differences from the method `sce` are:

    - Weights are equal if the mean squares sum to less than 1e-6.
    - Where the sum of the task vectors is zero, the positive sign is elected.
    - The divisor, a sum of weights, is at least 1e-6.

    `variances` is a precomputed table of the elements' variances, from which the selection takes its threshold; with
    None, the threshold is searched for. `order` is the rule that breaks ties between elements of equal variance.
    """
    taus = [tensor - base for tensor in tensors]
    if select_topk < 1:
        dropped = ~_most_variable(taus, select_topk, order, variances)
        taus = [tau.masked_fill_(dropped, 0) for tau in taus]
    weights = sce_mergekit_weights([dot(tau, tau) for tau in taus], base.numel())
    elected = taus[0].clone()
    for tau in taus[1:]:
        elected += tau
    is_positive = elected >= 0
    merged, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for tau, weight in zip(taus, weights, strict=True):
        agrees = torch.where(is_positive, tau > 0, tau < 0)
        merged += tau.masked_fill_(~agrees, 0).mul_(weight)
        divisor += agrees.to(tau.dtype).mul_(weight)
    return merged.div_(divisor.clamp_(min=NO_SQUARES)).add_(base)


def num_selected(select_topk: float, num_variable: int) -> int:
    """Number of elements that the merge method SCE selects in a tensor.

    `num_variable` is the number of elements that differ between the task vectors. `select_topk` is the share of these
    elements to select. The product is rounded down.
    """
    return share_of(select_topk, num_variable)


def sce_weights(squares: Sequence[float]) -> list[float]:
    """The weight of each model in the method `sce`, from the sum of squares of its selected elements.

    SCE selects the elements that vary most between the task vectors. `squares` has the sum of squares for each model.
    The weights are these sums divided by their total. All weights are zero if all sums are zero.
    """
    whole = math.fsum(squares)
    return [square / whole if whole else 0.0 for square in squares]


@merges("ram", peak=Peak(5, 21))
def ram(tensors: Sequence[torch.Tensor], base: torch.Tensor, *, epsilon: float) -> torch.Tensor:
    """RAM (arXiv:2601.13572): average the changes of elements that several models changed, and add all other changes.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. A model has changed an
    element if it differs from the base by more than epsilon. If several models changed an element, the mean of their
    task vectors is added to the base. If one model changed an element, this model's task vector is added.
    """
    return _ram([tensor - base for tensor in tensors], base, epsilon, None)


@merges("ramplus_tl", peak=Peak(5, 21))
def ramplus_tl(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, r: float, alpha: float, epsilon: float
) -> torch.Tensor:
    """RAM+ with changes counted in each tensor (arXiv:2601.13572); mergekit calls the method tensor-local.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. A model has changed an
    element if it differs from the base by more than epsilon. If several models changed an element, the mean of their
    task vectors is added to the base. If one model changed an element, this model's task vector times 1 + r min(alpha,
    shared / unique) is added. In this formula, shared is the number of elements of the tensor that this model and
    others changed, and unique is the number of elements that this model alone changed.
    """
    return _ram([tensor - base for tensor in tensors], base, epsilon, (r, alpha))


@merges("pcb", peak=Peak(8, 16))
def pcb(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, lambda_: float, density: float, orders: Orders = None
) -> torch.Tensor:
    """PCB-Merging as published (arXiv:2410.02396): a mean of the task vectors with weights for each element.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. theta_pre is the base,
    tau_i is the task vector of model i, N is the number of models, and Norm scales a tensor linearly to [0, 1]. The
    weights of model i are beta_i = Softmax(N Norm(tau_i^2)) * sum_j Softmax(Norm(tau_i tau_j)), with each Softmax over
    the whole tensor. The largest elements of each beta_i, the share `density`, are kept, and the other elements are set
    to zero. The result is theta_pre + lambda sum_i beta_i tau_i / sum_i beta_i. For elements for which all beta_i are
    zero, the result is the base. `orders` has, for each model, the rule that breaks ties between equal elements of
    beta_i.
    """
    taus = [tensor - base for tensor in tensors]
    betas = []
    for tau, order in zip(taus, each_order(orders, tensors), strict=True):
        within = _softmax(_unit_range(tau * tau).mul_(len(taus)))
        between = torch.zeros_like(tau)
        for other in taus:
            between += _softmax(_unit_range(tau * other))
        beta = within.mul_(between)
        smallest = order.lowest(threshold_of_rank(beta, num_kept(density, beta.numel()), order))
        betas.append(beta.masked_fill_(~smallest.reached_by(beta, order), 0))
    return _balanced(taus, betas, lambda_, base)


@merges("pcb_tanh", peak=Peak(12, 24))
def pcb_tanh(tensors: Sequence[torch.Tensor], base: torch.Tensor, *, lambda_: float, density: float) -> torch.Tensor:
    """PCB-Merging as its authors' code computes it, with clipped magnitudes and a tanh.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. tau_i is the task vector
    of model i, N is the number of models, and Norm scales a tensor linearly to [0, 1]. Magnitudes are clipped to their
    quantiles at 0.01 % and 99.99 %. The weights are beta_i = exp(N Norm(|tau_i|)^2) tanh(tau_i sum_j tau_j). Elements
    of beta_i below the quantile at 1 - density are set to this quantile; then beta_i is scaled to [0, 1]. The result is
    the base plus lambda sum_i beta_i tau_i / sum_i beta_i, with clipped tau_i.
    """
    taus = [tensor - base for tensor in tensors]
    summed = taus[0].clone()
    for tau in taus[1:]:
        summed += tau
    clipped, betas = [], []
    for tau in taus:
        sizes = tau.abs()
        count = sizes.numel()
        low, high = (
            _smallest(sizes, int(count * PCB_CLIPPED)),
            _smallest(sizes, max(0, int(count * (1 - PCB_CLIPPED) - 1))),
        )
        sizes.clamp_(low, high)
        clipped.append(tau.sign() * sizes)
        beta = _unit_range(sizes).square_().mul_(len(taus)).exp_().mul_((tau * summed).tanh_())
        floor = _smallest(beta, min(count - 1, share_of(1 - density, count)))
        betas.append(_unit_range(beta.clamp_(min=floor)))
    return _balanced(clipped, betas, lambda_, base)


@merges("consensus_ta", peak=Peak(4, 17))
def consensus_ta(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    mask_lambdas: Sequence[float],
    agreement: int,
) -> torch.Tensor:
    """Consensus task arithmetic (TALL masks, arXiv:2405.07813): add only elements that matter to several models.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. tau_t is the task vector
    of model t, and tau is the sum of all task vectors. An element matters to model t if |tau_t| >= mask_lambda_t |tau -
    tau_t|, with mask_lambda_t from `mask_lambdas`. The elements of tau that matter to at least `agreement` models are
    kept, and the other elements are set to zero. The result is the base plus lambda times the kept elements.
    """
    taus = [tensor - base for tensor in tensors]
    merged = taus[0].clone()
    for tau in taus[1:]:
        merged += tau
    return _agreed(merged, taus, mask_lambdas, agreement).mul_(lambda_).add_(base)


@merges("consensus_ties", peak=Peak(4, 17))
def consensus_ties(
    tensors: Sequence[torch.Tensor],
    base: torch.Tensor,
    *,
    lambda_: float,
    k: float,
    mask_lambdas: Sequence[float],
    agreement: int,
    magnitudes: Magnitudes = None,
    orders: Orders = None,
) -> torch.Tensor:
    """Consensus merging with TIES: add the elements of TIES' merged task vector that matter to several models.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. TIES' merged task vector,
    tau, follows from equations 6 to 8 of "Automated Model Merging", with the share k of elements kept and without
    lambda. An element matters to model t if |tau_t| >= mask_lambda_t |tau - tau_t|, with tau_t the task vector of the
    model. The elements that matter to at least `agreement` models are multiplied by lambda and added to the base.

    `magnitudes` has, for each model, a precomputed table of its task vector's magnitudes, from which trimming takes its
    threshold; None computes the threshold without a table. `orders` has, for each model, the rule that breaks ties
    between elements of equal magnitude.
    """
    merged = consensus.disjoint_mean(trimmed_task_vectors(tensors, base, [k] * len(tensors), magnitudes, orders))
    taus = [tensor - base for tensor in tensors]
    return _agreed(merged, taus, mask_lambdas, agreement).mul_(lambda_).add_(base)


@merges("wudi", peak=Peak(4, 36, 12))
def wudi(
    tensors: Sequence[torch.Tensor], base: torch.Tensor, *, lambda_: float, steps: int, learning_rate: float
) -> torch.Tensor:
    """WUDI-Merging (arXiv:2503.08099): the base plus a scaled task vector that Adam optimises for each matrix.

    `tensors` has the tensor of each model; a model's task vector is its tensor minus `base`. The result is the base
    plus lambda m. tau_i are the task vectors, and m is the merged task vector. For a matrix, m begins as sum_i tau_i
    and is changed by `steps` steps of Adam, with the rate `learning_rate`, on the loss sum_i |(m - tau_i) tau_i^T|^2 /
    |tau_i|^2. For other tensors m is the mean task vector. Task vectors that are zero are left out of the loss.

    The gradient is 2 (m A - B), with A = sum_i tau_i^T tau_i / |tau_i|^2 and B = sum_i tau_i tau_i^T tau_i / |tau_i|^2,
    so that a step is one matrix product. The last bits of matrix products depend on the number of threads.
    """
    taus = [tensor - base for tensor in tensors]
    if base.dim() != 2:
        mean = taus[0].clone()
        for tau in taus[1:]:
            mean += tau
        return mean.mul_(lambda_ / len(taus)).add_(base)
    merged = torch.zeros_like(base)
    gram, target = base.new_zeros(base.shape[1], base.shape[1]), torch.zeros_like(base)
    for tau in taus:
        merged += tau
        if (square := dot(tau, tau)) > 0:
            own = tau.T @ tau / square
            gram += own
            target += tau @ own
    slope, curvature = torch.zeros_like(base), torch.zeros_like(base)
    beta, gamma = ADAM_BETAS
    for step in range(1, steps + 1):
        gradient = (merged @ gram).sub_(target).mul_(2)
        slope.mul_(beta).add_(gradient * (1 - beta))
        curvature.mul_(gamma).add_(gradient.square_().mul_(1 - gamma))
        scale = (curvature / (1 - gamma**step)).sqrt_().add_(ADAM_EPSILON)
        merged -= slope / scale * (learning_rate / (1 - beta**step))
    return merged.mul_(lambda_).add_(base)


def sce_mergekit_weights(squares: Sequence[float], num_elements: int) -> list[float]:
    """The weight of each model in the method `sce_mergekit`, from the sum of squares of its selected elements.

    The merge method selects the elements that vary most between the task vectors. `squares` has the sum of squares for
    each model. The weights are these sums divided by their total. The weights are equal if the total is less than 1e-6
    times the tensor's number of elements, `num_elements`.
    """
    whole = math.fsum(squares)
    if whole / max(1, num_elements) < NO_SQUARES:
        return [1 / len(squares)] * len(squares)
    return [square / whole for square in squares]


def variance(tensors: Sequence[torch.Tensor], base: torch.Tensor) -> torch.Tensor:
    """Variance of each element across the task vectors (`tensors` minus the base), in float32."""
    return _variance([tensor.float() - base.float() for tensor in tensors])


def _most_variable(taus: Sequence[torch.Tensor], share: float, order: TieOrder, known: Ranked | None) -> torch.Tensor:
    """Mask (bool) of the elements with the largest variances across the task vectors `taus`.

    The share `share` is counted among the elements whose variance is not zero. `order` is the rule that breaks ties
    between elements of equal variance. `known` is a precomputed table of the variances, from which the threshold is
    taken; with None, the threshold is searched for.
    """
    variances = _variance(taus)
    count = num_selected(share, int(torch.count_nonzero(variances)))
    if count == 0:
        return torch.zeros_like(variances, dtype=torch.bool)
    return order.lowest(threshold_of_rank(variances, count, order, known)).reached_by(variances, order)


def _variance(taus: Sequence[torch.Tensor]) -> torch.Tensor:
    # Differences from the first do not change the variance, and make it exactly zero where all are equal.
    offsets = [tau - taus[0] for tau in taus]
    mean = torch.zeros_like(taus[0])
    for offset in offsets:
        mean += offset
    mean /= len(offsets)
    squares = torch.zeros_like(mean)
    for offset in offsets:
        squares += (offset - mean).square_()
    squares /= len(offsets)
    return squares


def _ram(
    taus: list[torch.Tensor], base: torch.Tensor, epsilon: float, rescale: tuple[float, float] | None
) -> torch.Tensor:
    changed = [tau.abs() > epsilon for tau in taus]
    count = torch.zeros_like(base)
    for mask in changed:
        count += mask
    is_unique = count == 1
    merged = torch.zeros_like(base)
    for tau, mask in zip(taus, changed, strict=True):
        factor = 1.0
        if rescale is not None:
            factor = ramplus_factor(*rescale, int(mask.sum()), int((mask & is_unique).sum()))
        merged += tau.masked_fill_(~mask, 0) * torch.where(is_unique, factor, 1 / count.clamp(min=1))
    return merged.add_(base)


def ramplus_factor(r: float, alpha: float, num_changed: int, num_alone: int) -> float:
    """RAM+'s factor for elements that only one model changed; larger if the model shares more of its changes.

    `num_changed` is the number of elements that the model changed, and `num_alone` is the number of these elements that
    no other model changed. With shared = `num_changed` - `num_alone` and alone = `num_alone`, the factor is 1 + r
    min(alpha, shared / alone). The factor is 1 if alone is 0.
    """
    return 1 + r * min(alpha, (num_changed - num_alone) / num_alone) if num_alone else 1.0


def _agreed(
    merged: torch.Tensor, taus: Sequence[torch.Tensor], mask_lambdas: Sequence[float], agreement: int
) -> torch.Tensor:
    votes = torch.zeros_like(merged)
    for tau, mask_lambda in zip(taus, mask_lambdas, strict=True):
        votes += tau.abs() >= (merged - tau).abs_().mul_(mask_lambda)
    return merged.masked_fill_(votes < agreement, 0)


def _balanced(
    taus: Sequence[torch.Tensor], betas: Sequence[torch.Tensor], lambda_: float, base: torch.Tensor
) -> torch.Tensor:
    merged, divisor = torch.zeros_like(base), torch.zeros_like(base)
    for tau, beta in zip(taus, betas, strict=True):
        merged += tau * beta
        divisor += beta
    return merged.div_(divisor.masked_fill_(divisor == 0, 1)).mul_(lambda_).add_(base)


def _unit_range(tensor: torch.Tensor) -> torch.Tensor:
    """Scale a tensor linearly to [0, 1]; the result is all zeros if all elements are equal."""
    low, high = torch.aminmax(tensor)
    return (tensor - low).div_(high - low) if high > low else torch.zeros_like(tensor)


def _softmax(tensor: torch.Tensor) -> torch.Tensor:
    """Compute the softmax over a whole tensor, in place.

    The elements must be so small that exp does not overflow.
    """
    exponential = tensor.exp_()
    return exponential.mul_(1 / total(torch.clone, exponential))


def _smallest(tensor: torch.Tensor, index: int) -> torch.Tensor:
    """The element at the index `index` (from 0) of a tensor's elements in ascending order."""
    return torch.kthvalue(tensor.flatten(), index + 1).values
