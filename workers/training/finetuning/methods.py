"""The optimizers that the specification of a fine-tuning can name.

A step of each optimizer is the call `step(closure)`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint, open_checkpoint, read_expert
from workers.models.remote import locate
from workers.training.finetuning.spec import OF_EXPERTS, Method
from workers.training.mergopt.fit import Fit, fit, sample_of
from workers.training.mergopt.noise import Gaussian, Laplace, Noise
from workers.training.mergopt.optimizer import MergOPT
from workers.training.mergopt.sharpness import SharpnessAware
from workers.training.mergopt.task_vectors import TaskVectors

__all__ = ["fitted_scale", "make_optimizer", "read_task_vectors"]


def fitted_scale(method: Method, base: Path) -> Fit | None:
    """Fit the scale of MergOPT's noise to the task vectors of the experts that the specification names (`fit_to`).

    Returns None unless the method is MergOPT with `scale: auto` and a noise that has a scale. `base` is the directory
    of the base model. Raises InvalidModel if a model cannot be used, and ValueError if the task vectors are 0.
    """
    if method.scale != "auto" or method.kind != "mergopt" or method.noise in OF_EXPERTS:
        return None
    return fit(sample_of(base, [locate(expert) for expert in method.fit_to]), method.noise)


@torch.no_grad()
def read_task_vectors(
    method: Method, base: Path, model: torch.nn.Module, moved: Sequence[torch.nn.Parameter] | None = None
) -> TaskVectors | None:
    """Read the task vectors of experts, if MergOPT computes its offsets from them.

    MergOPT adds an offset to the parameters while the gradient is computed. The option `fit_to` of `method` names the
    experts. Returns None if the method is not MergOPT, or if its offsets are random noise. `base` is the directory of
    the base model. `model` is a transformers model in float32 that still has the weights of the base model. `moved` are
    the parameters that get an offset; None means all parameters of `model`. Raises InvalidModel if an expert has other
    tensors than the base model.
    """
    if method.kind != "mergopt" or method.noise not in OF_EXPERTS:
        return None
    wanted = {id(p) for p in (model.parameters() if moved is None else moved)}
    origins = {name: p.detach().clone() for name, p in model.named_parameters() if id(p) in wanted}
    checkpoint = open_checkpoint(base)
    vectors = []
    for place in method.fit_to:
        weights = _weights(model, read_expert(locate(place), checkpoint), checkpoint)
        vectors.append([weights[name].to(origin.device) - origin for name, origin in origins.items()])
    return TaskVectors(vectors, list(origins.values()) if method.noise == "merges" else None)


def _weights(model: Any, expert: Checkpoint | None, base: Checkpoint) -> Mapping[str, torch.Tensor]:
    """The parameters of an expert in float32, by their names in the transformers model `model`.

    Raises InvalidModel if the expert has other tensors than the base model `base`.
    """
    assert expert is not None
    shapes = [{name: tensor.shape for name, tensor in each.tensors.items()} for each in (expert, base)]
    if shapes[0] != shapes[1]:
        raise InvalidModel(
            (f"method.fit_to: {expert.directory} has other tensors than {base.directory}; expected an expert of it",)
        )
    tensors = {name: expert.read(name).to(torch.float32) for name in expert.tensors}
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=torch.float32)
    return dict(loaded.named_parameters())


def make_optimizer(
    method: Method,
    trained: Iterable[torch.nn.Parameter],
    *,
    learning_rate: float,
    seed: int,
    model: torch.nn.Module,
    moved: Sequence[torch.nn.Parameter] | None = None,
    fitted: Fit | None = None,
    vectors: TaskVectors | None = None,
) -> Optimizer:
    """Make the optimizer that a specification names for the parameters `trained` of `model`.

    `moved` are the parameters to which MergOPT adds its offset while the gradient is computed; None means the trained
    parameters. `fitted` is the result of `fitted_scale`, which gives the scale of MergOPT's noise; if it is None, the
    specification gives the scale. `vectors` is the result of `read_task_vectors`.
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
            noise=vectors or _noise(method, method.scale if fitted is None else fitted.scale),
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
