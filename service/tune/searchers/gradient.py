"""Gradient descent on the coefficients of a merge, then a local search from the best point found.

The loss is that of teacher forcing on reference answers (`workers.training.gradients`): all coefficients are improved
at once by a few forward and backward passes. AdaMerging (Yang et al., "AdaMerging: Adaptive Model Merging for
Multi-Task Learning", 2024) learns coefficients by gradients too, of the entropy of predictions. Adam is Kingma and Ba's
(2015), algorithm 1.

A descent starts at the defaults of the space's parameters, and some of its points become trials. Before it, the losses
of the sources and published recipes that the space contains are compared with their scores: where a lower loss does not
go with a better score, a descent would not help, and SMAC proposes all trials. The comparison is of all of them, as the
searcher waits for baselines.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Float, Parameters
from search_spaces.study.sections import GradientOptions
from service.tune.searchers.base import Observation, SearchSetting
from service.tune.searchers.es import SEARCHER as LOCAL_SEARCH
from service.tune.searchers.random import proposal_generator
from service.tune.searchers.smac import SEARCHER as WITHOUT_GRADIENTS
from service.tune.steps import Step, StepKind, StepRequest

__all__ = ["SEARCHER", "GradientSearcher", "rank_correlation"]

Point = NDArray[np.float64]

# The random numbers of the descent's minibatches are those of a proposal that no trial has.
BATCHES = 10**9

USED, NOT_USED = "gradient", "smac"


@dataclass(frozen=True)
class GradientSearcher:
    """One descent, then local search."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    last_rate: float = 5e-4  # the learning rate falls linearly to this share of its first value
    # Samples of each objective on which losses are compared with scores, and the rank correlation that is asked for.
    # Of fewer than four known recipes nothing can be said, and the descent is tried.
    num_compared: int = 16
    min_correlation: float = 0.3
    min_recipes: int = 4

    def advance(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
        steps: Sequence[Step] = (),
        setting: SearchSetting,
    ) -> StepRequest | dict[str, Any]:
        compared = [step for step in steps if step.request.kind is StepKind.LOSSES]
        decisions = [step.request.decision for step in steps if step.request.kind is StepKind.NOTE]
        if not decisions:
            known = [o for o in observations if not o.is_proposed and o.costs is not None]
            if len(compared) < len(known):
                return self._comparison(parameters, known[len(compared)], setting)
            return self._decision(known, compared, setting)
        call: dict[str, Any] = {"number": number, "seed": seed, "pending": pending}
        if decisions[0] == NOT_USED:
            return WITHOUT_GRADIENTS.propose(parameters, observations=observations, **call)
        if (index := number - setting.num_baselines) < setting.options.points:
            descent = [step for step in steps if step.request.kind is StepKind.GRADIENT]
            found = self._descend(parameters, index, seed, descent, compared, setting)
            if found is not None:
                return found
        return LOCAL_SEARCH.propose(parameters, observations=[_by_mean(o) for o in observations], **call)

    # -- whether losses say anything about scores ------------------------------------------------------------------

    def _comparison(self, parameters: Parameters, known: Observation, setting: SearchSetting) -> StepRequest:
        """The losses of a known recipe on the first search samples."""
        positions = {
            name: tuple(range(min(self.num_compared, setting.num_samples[name]))) for name in setting.objectives
        }
        point = tuple(float(known.configuration[parameter.name]) for parameter in parameters)
        return StepRequest(StepKind.LOSSES, f"trial {known.number}", point, positions)

    def _decision(self, known: Sequence[Observation], compared: Sequence[Step], setting: SearchSetting) -> StepRequest:
        if len(known) < self.min_recipes:
            reason = f"{len(known)} known recipes are too few to compare losses with scores"
            return StepRequest(StepKind.NOTE, f"gradients are used: {reason}", decision=USED)
        found: dict[str, float] = {}
        for index, name in enumerate(setting.objectives):
            pairs = [
                (step.result.losses[name], o.costs[index])
                for step, o in zip(compared, known, strict=True)
                if step.result.failure is None and o.costs is not None
            ]
            found[name] = rank_correlation([loss for loss, _ in pairs], [cost for _, cost in pairs])
        text = f"rank correlation over {len(known)} known recipes: " + ", ".join(
            f"{name} {value:.2f}" for name, value in found.items()
        )
        if min(found.values()) >= self.min_correlation:
            return StepRequest(StepKind.NOTE, f"gradients are used: losses go with scores ({text})", decision=USED)
        reason = f"losses do not go with scores ({text}; {self.min_correlation:g} is needed)"
        return StepRequest(StepKind.NOTE, f"gradients are not used, smac proposes: {reason}", decision=NOT_USED)

    # -- the descent -----------------------------------------------------------------------------------------------

    def _descend(
        self,
        parameters: Parameters,
        index: int,
        seed: int,
        descent: Sequence[Step],
        compared: Sequence[Step],
        setting: SearchSetting,
    ) -> StepRequest | dict[str, Any] | None:
        """The point `index` of the descent, the next gradient on the way to it, or None if the descent has failed."""
        options = setting.options
        wanted = _num_steps_to(index, options)
        done = descent[:wanted]
        if any(step.result.failure is not None for step in done):
            return None
        point = self._after(parameters, done, options)
        if len(done) == wanted:
            return dict(zip(parameters.names, point.tolist(), strict=True))
        return StepRequest(
            StepKind.GRADIENT,
            "descent 0",
            tuple(point.tolist()),
            _minibatch(len(done), seed, setting),
            _weights(compared, setting),
        )

    def _after(self, parameters: Parameters, descent: Sequence[Step], options: GradientOptions) -> Point:
        """The point after these steps: Adam's, each kept in the parameters' ranges."""
        numbers = [parameter for parameter in parameters if isinstance(parameter, Float)]
        low, high = np.array([p.low for p in numbers]), np.array([p.high for p in numbers])
        point = np.array([p.default_value for p in numbers])
        mean, square = np.zeros_like(point), np.zeros_like(point)
        for number, step in enumerate(descent):
            gradient = np.array(step.result.gradient)
            mean = self.beta1 * mean + (1 - self.beta1) * gradient
            square = self.beta2 * square + (1 - self.beta2) * gradient**2
            rate = options.learning_rate * (1 - number / options.steps + self.last_rate)
            direction = mean / (1 - self.beta1 ** (number + 1))
            size = np.sqrt(square / (1 - self.beta2 ** (number + 1))) + self.epsilon
            point = np.clip(point - rate * direction / size, low, high)
        return point


SEARCHER = GradientSearcher()


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values at their mean rank; 0 where one side is constant or has fewer than two
    values."""
    from scipy.stats import rankdata

    if len(left) < 2 or len(set(left)) == 1 or len(set(right)) == 1:
        return 0.0
    return float(np.corrcoef(rankdata(left), rankdata(right))[0, 1])


def _num_steps_to(index: int, options: GradientOptions) -> int:
    return -(-options.steps * (index + 1) // options.points)


def _minibatch(step: int, seed: int, setting: SearchSetting) -> dict[str, tuple[int, ...]]:
    """Equal shares of all objectives, in ascending order. Every sample is drawn once before one is drawn again."""
    share = max(1, setting.options.batch // len(setting.objectives))
    batch = {}
    for place, name in enumerate(setting.objectives):
        size = setting.num_samples[name]
        drawn: list[int] = []
        for position in range(step * share, (step + 1) * share):
            epoch, offset = divmod(position, size)
            if not drawn or offset == 0:
                order = proposal_generator(seed=seed, number=BATCHES + epoch * 1000 + place).permutation(size)
            drawn.append(int(order[offset]))
        batch[name] = tuple(sorted(drawn))
    return batch


def _weights(compared: Sequence[Step], setting: SearchSetting) -> dict[str, float]:
    """Of each objective's loss: one over its mean over the known recipes, so that all count alike."""
    weights = {}
    for name in setting.objectives:
        losses = [step.result.losses[name] for step in compared if step.result.failure is None]
        scale = fmean(losses) if losses else 1.0
        weights[name] = 1.0 / (len(setting.objectives) * max(scale, 1e-6))
    return weights


def _by_mean(observation: Observation) -> Observation:
    """With the mean of the objectives' costs as the only one."""
    if observation.costs is None:
        return observation
    return replace(observation, costs=(fmean(observation.costs),), standard_errors=(None,))
