"""The gradient actor: it computes the steps of a searcher with a transformers model of its own, beside the engines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from search_spaces.parameters import Float
from search_spaces.recipe import COEFFICIENT_DECIMALS
from search_spaces.spaces.base import DifferentiableSpace
from search_spaces.study.sections import EngineOptions
from service.tune.steps import StepKind, StepRequest, StepResult
from workers.errors import TrialFailed
from workers.types import Completions, Family, TaskSpec

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
        point = _without_zeros(space, request.point) if request.kind is StepKind.GRADIENT else request.point
        configuration = dict(zip(space.parameters.names, point, strict=True))
        recipe = space.to_recipe(configuration)
        held = StepResult(recipe=recipe.digest, bank=self._job.family.fingerprint)
        try:
            if request.kind is StepKind.LOSSES:
                each = gradients.losses(recipe, request.positions, completions=request.completions)
                return replace(held, losses={name: sum(found) / len(found) for name, found in each.items()})
            result = gradients.loss_and_gradient(
                recipe, request.positions, request.weights, completions=request.completions
            )
        except TrialFailed as error:
            return replace(held, failure=str(error))
        slopes = self._by_parameter(result.by_source)
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

    def _by_parameter(self, by_source: Any) -> dict[str, float]:
        """The sums of the derivatives by the coefficients that are one parameter."""
        slopes: dict[str, float] = {}
        for tensor, of_models in by_source.items():
            for model, parameter in self._job.space.slots(tensor):
                slopes[parameter] = slopes.get(parameter, 0.0) + of_models.get(model, 0.0)
        return slopes


def _without_zeros(space: DifferentiableSpace, point: tuple[float, ...]) -> tuple[float, ...]:
    """The point with zeros replaced by the smallest coefficient of a recipe: a source at 0 is not part of a recipe's
    canonical form, and would have no derivative."""
    smallest = 10.0**-COEFFICIENT_DECIMALS
    numbers = (parameter for parameter in space.parameters if isinstance(parameter, Float))
    return tuple(
        value if abs(value) >= smallest else smallest if parameter.high >= smallest else -smallest
        for parameter, value in zip(numbers, point, strict=True)
    )
