"""MergOPT: A Merge-Aware Optimizer for Robust Model Merging (under review, 2025), algorithm 1.

MergOPT wraps another optimizer. At every step of this optimizer, the gradient is taken where a merge might move the
parameters:

    alpha ~ Uniform(A), K ~ Uniform{1, ..., K_max}, z ~ Laplace(0, b)                           (line 4, equation 10)
    g = grad L(theta + (K alpha - 1) z)                                                         (lines 5 and 6)
    theta <- Optimizer(theta, g)                                                                (line 7)

Here theta are the parameters, L is the loss, and z is a random task vector with the scale b. The simulated merge has K
models, at most K_max, and the coefficient alpha from the set A.

The implementation follows the paper's text, not its published code, which differs from the text in three points: b
is 0.01 by default (the paper: 0.0005), a closure's gradients are added up over two backward passes, and the last update
uses the gradient at the offset.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from workers.training.mergopt.elements import Part, parts_of
from workers.training.mergopt.in_layers import offset_in_layers
from workers.training.mergopt.noise import Laplace, Noise, draw_key
from workers.training.mergopt.task_vectors import TaskVectors
from workers.training.mergopt.wrapper import OptimizerWrapper

__all__ = ["COEFFICIENTS", "MAX_MODELS", "Draw", "MergOPT", "draw_of"]

# The paper's A and K_max (appendix B.2).
COEFFICIENTS = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
MAX_MODELS = 7

STATE = "mergopt"
EXPERTS = "task_vectors"  # in the state: the digest of the task vectors of which offsets are made, if they are


@dataclass(frozen=True)
class Draw:
    """The merge that one optimizer step simulates: of the trained model with `num_models` - 1 other models.

    `alpha` is the coefficient of all task vectors. `key` is the seed from which the random task vectors are drawn.
    """

    alpha: float
    num_models: int
    key: int

    @property
    def factor(self) -> float:
        """Factor on the random task vectors in the offset added to parameters: `num_models` * `alpha` - 1.

        The offset simulates a merge. The factor is (K alpha - 1) in algorithm 1 of the MergOPT paper.
        """
        return self.num_models * self.alpha - 1


def draw_of(
    seed: int, step: int, *, coefficients: Sequence[float] = COEFFICIENTS, max_models: int = MAX_MODELS
) -> Draw:
    """Draw the merge that step `step` of the optimizer MergOPT simulates.

    A step simulates the effect of merging the model with other models. The coefficient is drawn from `coefficients`,
    and the number of models is drawn from 1 to `max_models`. The random numbers depend only on `seed` and `step`, so
    that all ranks draw the same merge.
    """
    rng = random.Random(f"mergopt {seed} {step}")
    return Draw(rng.choice(list(coefficients)), rng.randint(1, max_models), draw_key(seed, step))


class MergOPT(OptimizerWrapper):
    """Wrapper of an optimizer; gradients are computed at the parameters plus an offset, which simulates a merge.

    In each step the gradient is computed at the parameters theta plus an offset (K alpha - 1) z. The offset simulates a
    merge of K models with coefficient alpha and random task vectors z. Call a step with a closure that computes the
    loss and its gradients (of all micro-batches, clipped if wanted):

        optimizer.step(closure)

    or, with a gradient scaler for example:

        with optimizer.offset():            # the parameters are theta + (K alpha - 1) z
            scaler.scale(loss()).backward()
        scaler.step(optimizer)              # the parameters are theta

    Each step of the optimizer has one draw of alpha, K and z, however often the context `offset` is entered before the
    step. Outside of this context the parameters are theta, bit for bit. By default the parameters are restored from a
    copy, which needs the memory of all parameters. With `model` the parameters never change: the noise is added where
    the layers of `model` read their weights, and computed again in the backward pass, which needs the memory of the
    largest tensor (module `in_layers`).

    `noise` is the distribution of z, or the task vectors of experts from which offsets are made. If offsets simulate
    merges of N given experts, K is at most N + 1. alpha is drawn from `coefficients`, and K is drawn from 1 to
    `max_models`. `moved` are the parameters that get an offset, by default the parameters of the optimizer; if adapters
    are trained, they are the frozen weights that the adapters change. `seed` and the number of the step determine the
    draw; both are in the result of the method `state_dict`. All ranks of a data-parallel or fully sharded model must
    have the same seed, and hold their parameters in the same order.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise: Noise | TaskVectors | None = None,
        coefficients: Sequence[float] = COEFFICIENTS,
        max_models: int = MAX_MODELS,
        seed: int = 0,
        model: torch.nn.Module | None = None,
        moved: Iterable[torch.Tensor] | None = None,
    ) -> None:
        if not coefficients:
            raise ValueError("mergopt: no coefficients; expected at least one, such as 0.3")
        if max_models < 1:
            raise ValueError(f"mergopt: max_models {max_models}; expected at least 1")
        super().__init__(optimizer)
        self._noise: Noise | TaskVectors = noise if noise is not None else Laplace()
        limit = noise.max_models if isinstance(noise, TaskVectors) else None
        self._coefficients, self._max_models = tuple(coefficients), min(max_models, limit or max_models)
        self._seed, self._step = seed, 0
        of_optimizer = (p for group in optimizer.param_groups for p in group["params"])
        self._parts = parts_of(of_optimizer if moved is None else moved)
        self._model = model
        if isinstance(noise, TaskVectors):
            _check_fit(noise, self._parts, in_layers=model is not None)
        self._copies: list[torch.Tensor] = []
        self._tables: dict[torch.device, torch.Tensor] = {}
        self._is_offset = False
        self._has_gradient = False

    @property
    def draw(self) -> Draw:
        """The random draw for the next update: the simulated merge of this model with other models.

        The result contains the number of merged models, their coefficient, and the seed of the random task vectors.
        """
        return draw_of(self._seed, self._step, coefficients=self._coefficients, max_models=self._max_models)

    @property
    def _experts(self) -> dict[str, str]:
        return {EXPERTS: self._noise.digest} if isinstance(self._noise, TaskVectors) else {}

    @property
    def num_moved(self) -> int:
        """Number of all elements of the parameters that get MergOPT's offset.

        The offset simulates a later merge. Elements in the shards of other processes are included.
        """
        return sum(part.parameter.numel() for part in self._parts)

    @contextmanager
    def offset(self) -> Iterator[Draw]:
        """Context manager in which forward and backward passes use the parameters plus the offset of the next draw.

        A training step simulates a merge, whose random settings are the draw that the context yields. Without given
        experts, the offset is (K alpha - 1) z: K is the number of merged models, alpha is their coefficient, and z is a
        random vector with the distribution of a task vector. With given experts (module `task_vectors`), the offset is
        the change that a merge with these experts makes to the parameters. Raises RuntimeError if contexts are nested.
        """
        if self._is_offset:
            raise RuntimeError("mergopt: offset() within offset()")
        draw = self.draw
        self._is_offset = True
        torch.clear_autocast_cache()  # an outer autocast keeps casts of the parameters without the offset
        try:
            with self._offset(draw):
                yield draw
        finally:
            self._is_offset = False
            torch.clear_autocast_cache()
        self._has_gradient = True

    def _offset(self, draw: Draw) -> AbstractContextManager[None]:
        """Context manager in which forward and backward passes use the parameters plus an offset.

        The offset simulates the merge `draw`, of this model with other models.
        """
        if isinstance(self._noise, TaskVectors):
            tensors = [part.tensor for part in self._parts]
            return self._moved(
                partial(self._noise.add, tensors, alpha=draw.alpha, num_models=draw.num_models, key=draw.key)
            )
        if draw.factor == 0:
            return nullcontext()
        tables = self._scaled_quantiles(self._noise, draw.factor)
        if self._model is not None:
            return offset_in_layers(self._model, self._parts, tables, key=draw.key)
        return self._moved(partial(self._add_noise, tables, key=draw.key))

    def _add_noise(self, tables: Mapping[torch.device, torch.Tensor], *, key: int) -> None:
        for part in self._parts:
            part.add_noise(tables[part.tensor.device], key=key)

    @contextmanager
    def _moved(self, add: Callable[[], None]) -> Iterator[None]:
        """Context manager that adds an offset to the parameters by calling `add`, and restores the parameters on exit.

        The offset simulates a merge with other models. The parameters are restored from a copy that is made on entry.
        """
        tensors = [part.tensor for part in self._parts]
        with torch.no_grad():
            if not self._copies:
                self._copies = [torch.empty_like(tensor) for tensor in tensors]
            torch._foreach_copy_(self._copies, tensors)
        try:
            with torch.no_grad():
                add()
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(tensors, self._copies)

    def _scaled_quantiles(self, noise: Noise, factor: float) -> dict[torch.device, torch.Tensor]:
        """The quantiles of the distribution `noise`, multiplied by `factor`, on each device that has parameters.

        Each product is rounded to float32 before it is added to a parameter, so that all devices add the same numbers.
        """
        devices = {part.tensor.device for part in self._parts}
        for device in devices - self._tables.keys():
            self._tables[device] = noise.quantiles.to(device)
        return {device: self._tables[device] * factor for device in devices}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the parameters with gradients that were computed while an offset was added to them (context `offset`).

        The offset simulates a later merge. If `closure` is given, it is called to compute the gradients with the
        offset, and its result is returned. Without `closure`, the caller must have computed the gradients within the
        context `offset`. Raises RuntimeError if no gradients were computed within this context since the last step, or
        if the method `step` is called within this context.
        """
        if self._is_offset:
            raise RuntimeError("mergopt: step() within offset(); the update belongs to theta, so leave offset() first")
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.offset():
                loss = closure()
        if not self._has_gradient:
            raise RuntimeError("mergopt: step() without gradients from within offset(); others have no offset")
        self.optimizer.step()
        self._step += 1
        self._has_gradient = False
        return loss

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, and the seed and step number of MergOPT's random numbers.

        MergOPT adds a random offset to the parameters while gradients are computed, to simulate a later merge.
        MergOPT's own part of the state has the seed and the number of updates so far, which determine the next offset.
        It also has the number of elements that get an offset and, if offsets are made of the task vectors of given
        experts, the digest of these task vectors; the method `load_state_dict` compares this number and this digest
        with the optimizer that is restored.
        """
        own = {"seed": self._seed, "step": self._step, "moved": self.num_moved, **self._experts}
        return {**super().state_dict(), STATE: own}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state of the wrapped optimizer, the seed and the step's number from `state_dict`.

        `state_dict` must be a result of the method `state_dict`. MergOPT adds an offset to parameters, to simulate a
        later merge. If the state was saved by an earlier version, it may lack the number of elements that got an
        offset; this number is then not checked.

        Raises:
            ValueError: The state is from another kind of optimizer, another number of elements got an offset, or the
                offsets were made of task vectors of other experts.
        """
        if STATE not in state_dict:
            raise ValueError(f"mergopt: the state has no {STATE!r}; expected one that its state_dict() gave")
        if (moved := state_dict[STATE].get("moved", self.num_moved)) != self.num_moved:
            raise ValueError(f"mergopt: the state is of noise on {moved} numbers; expected {self.num_moved}")
        of_experts = {key: value for key, value in state_dict[STATE].items() if key == EXPERTS}
        if of_experts != self._experts:
            raise ValueError("mergopt: the state is of other task vectors; expected those of the same experts")
        super().load_state_dict({name: value for name, value in state_dict.items() if name != STATE})
        self._seed, self._step = state_dict[STATE]["seed"], state_dict[STATE]["step"]
        self._has_gradient = False


def _check_fit(noise: TaskVectors, parts: Sequence[Part], *, in_layers: bool) -> None:
    """Raise ValueError if offsets cannot be made of the task vectors `noise` for the parameters `parts`.

    The task vectors must have the same shapes as `parts`, in the same order. Offsets of task vectors also need a copy
    of the parameters, so `in_layers` (offsets are added where layers read parameters, without a copy) must be False.
    """
    if in_layers:
        raise ValueError("mergopt: offsets of task vectors need a copy; leave `model` out")
    shapes = [part.tensor.shape for part in parts]  # of this rank's parts
    for given in (*noise.vectors, *([noise.origin] if noise.origin is not None else [])):
        if [tensor.shape for tensor in given] != shapes:
            raise ValueError(
                f"mergopt: task vectors of {len(given)} parameters with other shapes than the {len(parts)} that get an "
                "offset; expected one for each whole parameter"
            )
