"""Bounds on how much rounding errors of float32 change the log-probabilities of single tokens.

An engine and transformers compute the same sums in different orders. For nearly all tokens their log-probabilities
therefore differ by less than 1e-4. A few tokens are unstable: where attention or a prediction depends on numbers that
nearly cancel, rounding errors grow by orders of magnitude. Whether a token is unstable is measured with transformers
alone: the output of every module gets random errors of the size of rounding errors, and the spread of the token's
log-probability is observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from workers.engines.transformers.backend import logprobs

__all__ = ["MOST", "explained", "rounding_bounds"]

NUM_DRAWS = 8
# Random errors as a share of the root mean square of a module's output: half a unit in the last place of float32, times
# two for sums of many terms.
ERROR = 2.0**-23
# Rounding explains a difference between two computations up to this number of standard deviations of one computation.
# On 1,752 tokens of a merge of SmolLM2-135M, vLLM and transformers differed by at most 12 of them.
TIMES = 20.0
# Rounding explains no difference above this, however unstable a token is.
MOST = 0.02
# At most this share of the compared log-probabilities, or one, may be unstable: a wrong merge moves most of them.
MOST_SHARE = 0.02


def rounding_bounds(model: Any, tokens: Sequence[int]) -> list[float]:
    """Estimate, for each of `tokens` except the first, by how much float32 rounding may change its log-probability.

    `model` is a transformers model in float32. Random errors, as large as rounding errors, are added to the outputs of
    its modules, and the log-probabilities are computed again. A token's bound is a multiple of the root mean square of
    the changes, but at most the constant `MOST` of this module. The random errors are the same at every call.
    """
    plain = torch.tensor(logprobs(model, tokens))
    squares = torch.zeros_like(plain)
    for seed in range(NUM_DRAWS):
        with _with_errors(model, seed):
            squares += (torch.tensor(logprobs(model, tokens)) - plain).square()
    found: list[float] = (TIMES * (squares / NUM_DRAWS).sqrt()).clamp(max=MOST).tolist()
    return found


def explained(
    ours: Sequence[float], theirs: Sequence[float], bounds: Sequence[float], *, tolerance: float
) -> tuple[float, int]:
    """Find the differences of log-probabilities that are large only because rounding makes their tokens unstable.

    `ours` are the engine's log-probabilities, and `theirs` are transformers' log-probabilities of the same tokens.
    `bounds` has the largest difference that rounding explains for each token (function `rounding_bounds`). A difference
    above `tolerance` is explained if it is at most the token's bound. If more than the share MOST_SHARE of all
    differences (or more than one, for short texts) is above `tolerance`, none is explained. Returns the largest
    difference that is not explained, and the number of explained differences.
    """
    apart = [0.0 if a == b else abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    beyond = [not each <= tolerance for each in apart]
    unstable = [is_beyond and each <= bound for each, bound, is_beyond in zip(apart, bounds, beyond, strict=True)]
    if sum(beyond) > max(1.0, MOST_SHARE * len(apart)) or not any(unstable):
        return max(apart, default=0.0), 0
    return max((each for each, is_one in zip(apart, unstable, strict=True) if not is_one), default=0.0), sum(unstable)


@contextmanager
def _with_errors(model: Any, seed: int) -> Iterator[None]:
    """Context manager that adds random errors to the outputs of a model's modules, as large as float32 rounding errors.

    `seed` fixes the errors. Only modules without submodules are changed.
    """
    draw = torch.Generator().manual_seed(seed)

    def add(module: Any, given: Any, output: Any) -> Any:
        if not isinstance(output, torch.Tensor) or not output.is_floating_point():
            return output
        size = output.square().mean(-1, keepdim=True).sqrt_() * ERROR
        return output + size * torch.randn(output.shape, generator=draw).to(output.device)

    hooks = [module.register_forward_hook(add) for module in model.modules() if next(module.children(), None) is None]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
