"""The gradient actor: it computes the steps of a searcher with a transformers model of its own, beside the engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from search_spaces.methods import METHODS
from search_spaces.parameters import Float
from search_spaces.recipe import COEFFICIENT_DECIMALS
from search_spaces.spaces.base import DifferentiableSpace
from search_spaces.study.engine import EngineOptions
from service.tune.steps import StepKind, StepRequest, StepResult
from workers.errors import TrialFailed
from workers.types import Completions, Family, GradientResult, TaskSpec

if TYPE_CHECKING:
    from workers.training.gradients import CoefficientGradients

__all__ = ["GradientActor", "GradientJob"]


@dataclass(frozen=True)
class GradientJob:
    """What a gradient actor works on: the family, the objectives' tasks by name, and the space of the coefficients."""

    family: Family
    options: EngineOptions
    tasks: dict[str, TaskSpec]
    space: DifferentiableSpace


class GradientActor:
    """Holds the model and the bank; one step at a time. Equal requests have equal results, on one device with one
    number of threads."""

    def __init__(self, job: GradientJob) -> None:
        self._job = job
        self._opened: CoefficientGradients | None = None
        self._completions: Completions | None = None  # those that are not set yet

    def use_completions(self, completions: Completions) -> None:
        """Those that requests name as references from now on."""
        self._completions = completions

    def run(self, request: StepRequest) -> StepResult:
        """Losses, and for a GRADIENT the derivatives by every parameter. A loss that is not finite is a failure.

        Raises InvalidModel and InvalidTask if models or task data cannot be used."""
        gradients = self._gradients()
        space = self._job.space
        point = _stated(space, request.point) if request.kind is StepKind.GRADIENT else request.point
        configuration = dict(zip(space.parameters.names, point, strict=True))
        recipe = space.to_recipe(configuration)
        held = StepResult(recipe=recipe.digest, bank=self._job.family.fingerprint)
        try:
            if request.kind is StepKind.LOSSES:
                each = gradients.losses(recipe, request.positions, completions=request.completions)
                return replace(held, losses={name: sum(found) / len(found) for name, found in each.items()})
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

    def _gradients(self) -> CoefficientGradients:
        """Opened by the first step: what an actor's constructor raises is taken for the death of its process, and
        nobody asks what `use_completions` raises."""
        if self._opened is None:
            import torch

            from workers.training.gradients import CoefficientGradients

            job = self._job
            if job.options.threads:
                torch.set_num_threads(job.options.threads)
            self._opened = CoefficientGradients(job.family, job.options, job.tasks)
        if self._completions is not None:
            self._opened.set_completions(self._completions)
            self._completions = None
        return self._opened

    def _by_parameter(self, result: GradientResult) -> dict[str, float]:
        """The sums of the derivatives by the coefficients that are one parameter."""
        space = self._job.space
        slopes: dict[str, float] = {}
        for tensor, of_models in result.by_source.items():
            for model, parameter in space.slots(tensor):
                slopes[parameter] = slopes.get(parameter, 0.0) + of_models.get(model, 0.0)
        for tensor, of_coefficients in result.shared.items():
            for _, parameter in space.slots(tensor)[:1]:
                slopes[parameter] = slopes.get(parameter, 0.0) + of_coefficients.get(space.coefficient, 0.0)
        for layer, parameter in space.layer_scales.items():
            slopes[parameter] = slopes.get(parameter, 0.0) + result.layer_scales[layer]
        return slopes


def _stated(space: DifferentiableSpace, point: tuple[float, ...]) -> tuple[float, ...]:
    """The nearest point at which a recipe states every coefficient; of others there is no derivative. A source at 0,
    and a shared coefficient at its default, are not part of a recipe's canonical form: these numbers are moved by the
    smallest step that recipes know."""
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
