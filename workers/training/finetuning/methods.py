"""The optimizers that the specification of a fine-tuning may name; the step of each is `step(closure)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch.optim import Optimizer

from workers.models.remote import locate
from workers.training.finetuning.spec import Method
from workers.training.mergopt.fit import Fit, fit, sample_of
from workers.training.mergopt.noise import Gaussian, Laplace, Noise
from workers.training.mergopt.optimizer import MergOPT
from workers.training.mergopt.sharpness import SharpnessAware

__all__ = ["fitted_scale", "make_optimizer"]


def fitted_scale(method: Method, base: Path) -> Fit | None:
    """Fit the scale of MergOPT's noise to the task vectors of the experts that the specification names (`fit_to`).

    Returns None unless the method is MergOPT with `scale: auto`. `base` is the directory of the base model. Raises
    InvalidModel, and ValueError if the task vectors are 0.
    """
    if method.scale != "auto" or method.kind != "mergopt":
        return None
    return fit(sample_of(base, [locate(expert) for expert in method.fit_to]), method.noise)


def make_optimizer(
    method: Method,
    trained: Iterable[torch.nn.Parameter],
    *,
    learning_rate: float,
    seed: int,
    model: torch.nn.Module,
    moved: Sequence[torch.nn.Parameter] | None = None,
    fitted: Fit | None = None,
) -> Optimizer:
    """Make the optimizer that a specification names, for the parameters `trained` of `model`.

    `moved` are the parameters to which MergOPT adds its offset while the gradient is computed; None means the trained
    parameters. `fitted` is the result of `fitted_scale`, which gives the scale of this offset; if it is None, the
    specification gives the scale.
    """
    parameters = list(trained)
    is_sgd = method.kind == "sgd" or (method.kind != "adamw" and method.optimizer == "sgd")
    inner: Optimizer
    if is_sgd:
        inner = torch.optim.SGD(
            parameters, lr=learning_rate, momentum=method.momentum, weight_decay=method.weight_decay
        )
    else:
        inner = torch.optim.AdamW(parameters, lr=learning_rate, betas=method.betas, weight_decay=method.weight_decay)
    if method.kind in ("sam", "asam"):
        return SharpnessAware(inner, rho=method.rho, is_adaptive=method.kind == "asam")
    if method.kind == "mergopt":
        return MergOPT(
            inner,
            noise=_noise(method, method.scale if fitted is None else fitted.scale),
            coefficients=method.coefficients,
            max_models=method.max_models,
            seed=seed,
            model=model if method.in_layers else None,
            moved=moved,
        )
    return inner


def _noise(method: Method, scale: float | str) -> Noise:
    assert not isinstance(scale, str)  # auto is fitted
    return Laplace(scale, method.mean) if method.noise == "laplace" else Gaussian(scale, method.mean)
