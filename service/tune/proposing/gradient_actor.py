"""The gradient actor: computes losses and gradients of merges for a searcher, with a transformers model."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from search_spaces.methods import METHODS
from search_spaces.parameters import Float
from search_spaces.recipe import COEFFICIENT_DECIMALS, Recipe
from search_spaces.spaces.base import Coefficients
from search_spaces.study.engine import EngineOptions
from service.store.steps import GradientRequest, GradientResult, LossesRequest, LossesResult
from workers.engines.host_memory import free_host_bytes
from workers.engines.vllm.memory import HOST_SHARE
from workers.errors import TrialFailed
from workers.merging.node import free_shared_bytes, remove_leftovers, shared_bytes
from workers.models.family import on_this_machine, open_sources
from workers.telemetry import logs
from workers.types import Completions, Family, Placement, TaskSpec
from workers.types import GradientResult as CoefficientDerivatives

if TYPE_CHECKING:
    from workers.training.gradients import CoefficientGradients

__all__ = ["GradientActor", "GradientInputs"]


@dataclass(frozen=True)
class GradientInputs:
    """Inputs of a gradient actor: models, engine options, each objective's task, and the coefficients of merges.

    `space` describes how parameters determine the coefficients of merges; each request has a value for every parameter.
    If `space` is None, the actor's method `use_coefficients` must be called before the first request. `device` is the
    device on which the actor computes ("cpu" or "cuda"). `recomputes` says whether the actor computes activations twice
    to save memory. `num_gpus` is the number of GPUs of one machine over which the model's layers are divided. `tokens`
    is the largest number of tokens of a forward pass; None means MAX_TOKENS. `entropies` are the objectives whose loss
    is the entropy of predictions.
    """

    family: Family
    options: EngineOptions
    tasks: dict[str, TaskSpec]
    space: Coefficients | None = None
    device: str = "cpu"
    recomputes: bool = False
    num_gpus: int = 1
    tokens: int | None = None
    entropies: tuple[str, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """Names of the PyTorch devices that share the model's layers: "cpu", "cuda", or "cuda:0", "cuda:1", ..."""
        if self.device == "cpu" or self.num_gpus == 1:
            return (self.device,)
        return tuple(f"{self.device}:{index}" for index in range(self.num_gpus))


class GradientActor:
    """The actor that computes losses and gradients of merges, one request at a time.

    The actor holds a trainable model and the weights of all source models, which `inputs` names. Equal requests have
    equal results on the same device with the same number of threads.
    """

    def __init__(self, inputs: GradientInputs) -> None:
        logs.log_in_worker()
        self._inputs = inputs
        self._space = inputs.space
        self._opened: CoefficientGradients | None = None
        self._completions: Completions | None = None  # those that are not set yet

    def use_completions(self, completions: Completions) -> None:
        """Set the source models' completions that later requests may use in place of the tasks' reference answers.

        A request uses them only for the objectives that it lists in its field `completions`.
        """
        self._completions = completions

    def use_coefficients(self, coefficients: Coefficients) -> None:
        """Set the parameters with respect to which gradients are computed; they determine the coefficients of merges.

        Every later request describes its merge by a value for each of these parameters.
        """
        self._space = coefficients

    def run(self, request: LossesRequest | GradientRequest) -> LossesResult | GradientResult:
        """Compute the mean loss of each objective and, for a GradientRequest, the derivatives of their weighted sum.

        The derivatives are with respect to the parameters that set the coefficients of the merge. If a loss is not
        finite, the result contains a failure instead of losses. Raises InvalidModel and InvalidTask if models or task
        data cannot be used.
        """
        return self._losses(request) if isinstance(request, LossesRequest) else self._gradient(request)

    def close(self) -> None:
        """End this process's use of the sources in memory that processes of the machine share.

        The actor is closed before it is killed, because exit handlers of a killed process do not run.
        """
        if self._opened is not None:
            self._opened.bank.close()

    def _losses(self, request: LossesRequest) -> LossesResult:
        gradients, recipe = self._gradients(), self._recipe(request.point)
        held = LossesResult(recipe=recipe.digest, bank=self._inputs.family.fingerprint)
        try:
            each = gradients.losses(recipe, request.positions, completions=request.completions)
        except TrialFailed as error:
            return replace(held, failure=str(error))
        return replace(held, losses={name: sum(found) / len(found) for name, found in each.items()})

    def _gradient(self, request: GradientRequest) -> GradientResult:
        gradients, space = self._gradients(), self._known_space
        recipe = self._recipe(_with_stated_coefficients(space, request.point))
        held = GradientResult(recipe=recipe.digest, bank=self._inputs.family.fingerprint)
        try:
            result = gradients.loss_and_gradient(
                recipe,
                request.positions,
                request.weights,
                completions=request.completions,
                by_scales=bool(space.layer_scales),
            )
        except TrialFailed as error:
            return replace(held, failure=str(error))
        slopes = self._by_parameter(result)
        gradient = tuple(slopes.get(name, 0.0) for name in space.parameters.names)
        return replace(held, losses=result.losses, gradient=gradient, seconds=result.seconds)

    @property
    def _known_space(self) -> Coefficients:
        assert self._space is not None, "a request for losses, and no coefficients"
        return self._space

    def _recipe(self, point: tuple[float, ...]) -> Recipe:
        space = self._known_space
        return space.to_recipe(dict(zip(space.parameters.names, point, strict=True)))

    def _gradients(self) -> CoefficientGradients:
        """The trainable model, which computes losses and gradients; the first call opens it.

        Completions that `use_completions` has set since the last call are passed on to the model. The model is opened
        here and not in the constructor, because Ray reports an error in the constructor as the death of the process.
        The model is not opened in `use_completions` either, because the driver does not wait for that call and would
        miss its errors.
        """
        if self._opened is None:
            import torch

            from workers.training.gradients import MAX_TOKENS, CoefficientGradients

            inputs = self._inputs
            if threads := inputs.options.threads or (_cpu_threads() if inputs.device == "cpu" else 0):
                torch.set_num_threads(threads)
            family, (device, *more_devices) = on_this_machine(inputs.family), inputs.devices
            is_in_host = inputs.device == "cuda" and _has_room(family)
            self._opened = CoefficientGradients(
                family,
                inputs.options,
                inputs.tasks,
                placement=Placement.HOST if is_in_host else Placement.MAPPED,
                device=device,
                more_devices=more_devices,
                is_shared=is_in_host,
                recomputes=inputs.recomputes,
                max_tokens=inputs.tokens or MAX_TOKENS,
                entropies=inputs.entropies,
                methods=(self._space.method,) if self._space is not None else (),
            )
        if self._completions is not None:
            self._opened.set_completions(self._completions)
            self._completions = None
        return self._opened

    def _by_parameter(self, result: CoefficientDerivatives) -> dict[str, float]:
        """Convert derivatives with respect to a merge's coefficients to derivatives by parameter of the search space.

        If several coefficients, or scales of layers, have the value of one parameter, their derivatives are added. If a
        tensor has a derivative for each source, its derivative with respect to a coefficient that all sources share is
        ignored.
        """
        space = self._known_space
        slopes: dict[str, float] = {}
        for tensor, of_models in result.by_source.items():
            for model, parameter in space.slots(tensor):
                slopes[parameter] = slopes.get(parameter, 0.0) + of_models.get(model, 0.0)
        for tensor, of_coefficients in result.shared.items():
            if tensor in result.by_source:
                continue
            for _, parameter in space.slots(tensor)[:1]:
                slopes[parameter] = slopes.get(parameter, 0.0) + of_coefficients.get(space.coefficient, 0.0)
        for layer, parameter in space.layer_scales.items():
            slopes[parameter] = slopes.get(parameter, 0.0) + result.layer_scales[layer]
        return slopes


def _cpu_threads() -> int:
    """Number of threads that compute gradients on the CPU: the cores that this process may use less one; at least 1.

    One core is left to other processes, as plans of studies assume. Ray sets OMP_NUM_THREADS to 1 in an actor that
    reserves at most one CPU, so that PyTorch alone would use one thread.
    """
    return max(1, len(os.sched_getaffinity(0)) - 1)


def _has_room(family: Family) -> bool:
    """Whether the sources of `family` are in the machine's shared memory already, or fit into it.

    If so, GPUs read the sources from pinned memory, which is many times as fast as reading memory-mapped files. Engines
    on the machine use the same copy. What killed processes have left in the shared memory is removed first.
    """
    from workers.merging.bank import content_name

    size, content = open_sources(family).stored_bytes, content_name(family, "cuda")
    remove_leftovers(except_for=content)
    already = shared_bytes(content)
    return already >= size or size <= min(free_shared_bytes(), int(HOST_SHARE * free_host_bytes()))


def _with_stated_coefficients(space: Coefficients, point: tuple[float, ...]) -> tuple[float, ...]:
    """Parameter values close to `point` whose recipe states every coefficient, even one that is 0 or a default.

    `point` has a value for each parameter of `space`. A recipe in canonical form leaves out a source's coefficient that
    is 0, and a shared coefficient that has its default. A loss has no derivative with respect to a coefficient that is
    left out. A parameter value that leads to such a coefficient is therefore changed by the smallest step that recipes
    can express, upwards if the range allows.
    """
    declared = METHODS[space.method].coefficient(space.coefficient)
    left_out = 0.0
    if declared is not None and not declared.per_model and declared.default is not None:
        left_out = float(declared.default)
    smallest = 10.0**-COEFFICIENT_DECIMALS
    numbers = (parameter for parameter in space.parameters if isinstance(parameter, Float))
    return tuple(
        value
        if abs(value - left_out) >= smallest
        else left_out + (smallest if parameter.high >= left_out + smallest else -smallest)
        for parameter, value in zip(numbers, point, strict=True)
    )
