"""The optimizers that the specification of a fine-tuning can name.

A step of each optimizer is the call `step(closure)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from workers.errors import InvalidModel
from workers.models.checkpoints import Checkpoint, open_checkpoint, read_expert
from workers.models.remote import locate
from workers.training.finetuning.sharding import local, part_of
from workers.training.finetuning.spec import OF_EXPERTS, Method
from workers.training.mergopt.fit import Fit, fit, sample_of
from workers.training.mergopt.noise import Gaussian, Laplace, Noise
from workers.training.mergopt.optimizer import MergOPT
from workers.training.mergopt.sharpness import SharpnessAware
from workers.training.mergopt.task_vectors import TaskVectors, digest_of

__all__ = ["fitted_scale", "make_optimizer", "read_task_vectors"]


def fitted_scale(method: Method, base: Path) -> Fit | None:
    """Fit the scale of MergOPT's noise to the task vectors of the experts that `method.fit_to` names.

    MergOPT is an optimizer that adds noise to the parameters while gradients are computed, to simulate a later merge.
    The scale is fitted only for the method MergOPT with `scale: auto` and random noise. Otherwise the result is None,
    because the specification states the scale, or there is no random noise. `base` is the directory of the base model.
    Raises InvalidModel if a model cannot be used, and ValueError if the task vectors are 0.
    """
    if method.scale != "auto" or method.kind != "mergopt" or method.noise in OF_EXPERTS:
        return None
    return fit(sample_of(base, [locate(expert) for expert in method.fit_to]), method.noise)


@torch.no_grad()
def read_task_vectors(
    method: Method, base: Path, model: torch.nn.Module, moved: Sequence[torch.nn.Parameter] | None = None
) -> TaskVectors | None:
    """Read the task vectors of the experts in `method.fit_to`; MergOPT computes its offsets from them.

    MergOPT adds an offset to the parameters while the gradient is computed, to simulate a later merge. Returns None if
    the method is not MergOPT, or if the offsets are random noise. `base` is the directory of the base model. `model` is
    a transformers model in float32 that still has the weights of the base model. `moved` are the parameters that get an
    offset; None means all parameters of `model`. If parameters are sharded, only the parts of this rank are read.
    Raises InvalidModel if an expert has other tensors than the base model.
    """
    if method.kind != "mergopt" or method.noise not in OF_EXPERTS:
        return None
    wanted = {id(p) for p in (model.parameters() if moved is None else moved)}
    parameters = {name: p for name, p in model.named_parameters() if id(p) in wanted}
    origins = {name: local(p).detach().clone() for name, p in parameters.items()}
    checkpoint = open_checkpoint(base)
    experts = [_reader(model, read_expert(locate(place), checkpoint), checkpoint) for place in method.fit_to]
    vectors = [
        [part_of(read(name), p).to(origins[name].device) - origins[name] for name, p in parameters.items()]
        for read in experts
    ]
    digest = None
    if any(isinstance(p, DTensor) for p in parameters.values()):  # of whole tensors, as all ranks together have them
        digest = digest_of(
            read(name) - p.full_tensor().cpu() if isinstance(p, DTensor) else read(name) - p.cpu()
            for read in experts
            for name, p in parameters.items()
        )
    return TaskVectors(vectors, list(origins.values()) if method.noise == "merges" else None, digest)


def _reader(model: Any, expert: Checkpoint | None, base: Checkpoint) -> Callable[[str], torch.Tensor]:
    """Make a function that reads a parameter of `expert` in float32, given the parameter's name in `model`.

    `expert` must not be None. Raises InvalidModel if the expert has other tensors than the base model `base`.
    """
    assert expert is not None
    heads = {*base.layout.task_heads, *expert.layout.task_heads}  # of tasks; they are not merged
    shapes = [
        {name: tensor.shape for name, tensor in each.tensors.items() if name not in heads} for each in (expert, base)
    ]
    if shapes[0] != shapes[1]:
        raise InvalidModel(
            (f"method.fit_to: {expert.directory} has other tensors than {base.directory}; expected an expert of it",)
        )
    if all(shapes[0].get(name) == tuple(p.shape) for name, p in model.named_parameters()):
        return lambda name: expert.read(name).to(torch.float32)
    # transformers names or groups the weights of this model otherwise than its files do
    tensors = {name: expert.read(name).to(torch.float32) for name in expert.tensors if name not in heads}
    loaded = type(model).from_pretrained(None, config=model.config, state_dict=tensors, dtype=torch.float32)
    return dict(loaded.named_parameters()).__getitem__


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

    The optimizer MergOPT computes each gradient at parameters that are moved by an offset, as a later merge will move
    them. An offset is random noise or is made of task vectors of other experts.

    - `method`: the section of the specification that names the optimizer and its options
    - `learning_rate`: the optimizer's learning rate
    - `seed`: the seed of MergOPT's random draws (function `trainer.noise_seed`)
    - `moved`: the parameters to which MergOPT adds its offset while the gradient is computed; None means the trained
      parameters
    - `fitted`: the result of the function `fitted_scale`, which gives the scale of MergOPT's noise; None if the
      specification gives the scale
    - `vectors`: the task vectors of which offsets are made, from the function `read_task_vectors`; None if offsets are
      noise
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
