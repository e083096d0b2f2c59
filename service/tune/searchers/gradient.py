"""Gradient descent on the coefficients of a merge, followed by midpoints of the Pareto front or a local search.

The loss is the cross-entropy of reference answers (`workers.training.gradients`): a few forward and backward passes
improve all coefficients at once. AdaMerging (Yang et al., "AdaMerging: Adaptive Model Merging for Multi-Task Learning",
ICLR 2024, arXiv 2310.02575) also learns coefficients by gradients, but the gradients are of the entropy of predictions,
which needs no labels. Tasks of images may have this loss (option `search.gradient.loss`).

First, the module `loss_comparison` decides whether gradients are used. If they are not used, SMAC proposes all trials.
If they are used, a descent starts at the defaults of the space's parameters, and some of its points become trials. A
local search from the best trial follows.

A study with preference vectors has a descent for each vector (module `descents`). After the descents, points halfway
between trials of the front are proposed (module `midpoints`). When no midpoint would add to the front, a local search
follows for each vector in turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any, Literal

import numpy as np

from search_spaces.parameters import Float, Parameters
from service.store.steps import GradientRequest, GradientStep, NoteStep, Step, StepRequest
from service.tune.searchers.adam import Point, minibatch, numbers_of, point_after, share_of
from service.tune.searchers.base import Observation, ProposalContext, SearchSetting
from service.tune.searchers.descents import Descent, descents_of, place_of
from service.tune.searchers.es import SEARCHER as LOCAL_SEARCH
from service.tune.searchers.loss_comparison import NOT_USED, compare, mean_loss, reference_completions
from service.tune.searchers.midpoints import midpoint
from service.tune.searchers.smac import SEARCHER as WITHOUT_GRADIENTS

__all__ = ["OTHERS", "SEARCHER", "GradientSearcher"]

# Versions of the searchers that propose trials beside the descents, by the version of this searcher in a study.
OTHERS = {1: {"smac": 1, "es": 1}, 2: {"smac": 4, "es": 2}}


class GradientSearcher:
    """Searcher by gradient descent with Adam, with one descent for each preference vector (weights of the objectives).

    Before its first proposal it decides whether gradients are used, by comparing the baselines' losses with their
    scores. If gradients are not used, another searcher makes all proposals. Otherwise points of the descents become
    trials. After the descents, a study with preference vectors gets the midpoints between trials of the Pareto front
    that are expected to improve the front. All other trials are proposed by a local search.
    """

    def advance(self, context: ProposalContext) -> StepRequest | dict[str, Any]:
        setting = context.setting
        decisions = [step.request.decision for step in context.steps if isinstance(step, NoteStep)]
        if not decisions:
            return compare(context)
        if decisions[0] == NOT_USED:
            return WITHOUT_GRADIENTS.advance(_for(context, "smac"))
        place = place_of(context.number - setting.num_baselines, _descents(setting))
        if place is not None:
            found = self._descend(context, *place)
            if found is not None:
                return found
        elif setting.preferences and (between := midpoint(context)) is not None:
            return between
        return LOCAL_SEARCH.advance(_for(replace(context, observations=_with_one_cost(context)), "es"))

    def _descend(self, context: ProposalContext, number: int, point: int) -> GradientRequest | dict[str, Any] | None:
        """The configuration at a point of a gradient descent: the point with index `point` of the descent `number`.

        Some points of a descent become trials, and are indexed from 0. If gradients on the way to the point are still
        missing in `context`, a request for the next gradient is returned instead. Returns None if the descent has
        failed, because a loss was not finite.
        """
        setting, steps = context.setting, context.steps
        descent = _descents(setting)[number]
        wanted = descent.num_steps_to(point)
        done = _steps_of(number, steps)[:wanted]
        if any(step.result.failure is not None for step in done):
            return None
        reached = _after(context.parameters, self._start(context, number), descent, done)
        if len(done) == wanted:
            return dict(zip(context.parameters.names, reached.tolist(), strict=True))
        preference = dict(zip(setting.objectives, descent.preference, strict=True))
        names = [name for name, share in preference.items() if share > 0]
        batch = _minibatch(context, names)
        return GradientRequest(
            label=f"descent {number}",
            descent=number,
            point=tuple(reached.tolist()),
            positions=batch,
            # A loss counts in units of its mean over the baselines, so that equal preferences weigh objectives alike.
            weights={name: preference[name] / max(mean_loss(name, steps), 1e-6) for name in names},
            preference=preference if setting.preferences else {},
            completions=tuple(name for name in reference_completions(steps) or () if name in batch),
        )

    def _start(self, context: ProposalContext, number: int) -> Point:
        """The point where gradient descent `number` starts: the end of an earlier descent with a similar vector.

        There is a descent for each preference vector (weights of the objectives). Of the earlier descents that have not
        failed, the descent with the nearest vector is taken. If there is none, the start has the parameters' defaults;
        the option `search.gradient.start` replaces the default of every expert's coefficient.
        """
        parameters, setting, steps = context.parameters, context.setting, context.steps
        if done := _steps_of(number, steps):
            return np.array(done[0].request.point)
        descents = _descents(setting)
        for neighbour in descents[number].neighbours:
            before = _steps_of(neighbour, steps)
            if before and all(step.result.failure is None for step in before):
                return _after(parameters, np.array(before[0].request.point), descents[neighbour], before)
        stated = setting.options.gradient.start

        def of(parameter: Float) -> float:
            if stated is None or parameters.roles.get(parameter.name) not in setting.experts:
                return parameter.default_value
            return min(max(stated, parameter.low), parameter.high)

        return np.array([of(parameter) for parameter in numbers_of(parameters)])


SEARCHER = GradientSearcher()


def _for(context: ProposalContext, searcher: Literal["smac", "es"]) -> ProposalContext:
    """The same context for another searcher, whose version is that of the study's version of this one."""
    versions = OTHERS[max(OTHERS) if context.setting.version is None else context.setting.version]
    return replace(context, setting=replace(context.setting, version=versions[searcher]))


def _descents(setting: SearchSetting) -> tuple[Descent, ...]:
    return descents_of(setting.options.gradient, setting.vectors)


def _steps_of(descent: int, steps: Sequence[Step]) -> list[GradientStep]:
    return [step for step in steps if isinstance(step, GradientStep) and step.request.descent == descent]


def _after(parameters: Parameters, start: Point, descent: Descent, done: Sequence[GradientStep]) -> Point:
    """The point that `descent` reaches from `start` after the gradient steps `done`.

    A point has one value for each of the search space's `parameters`.
    """
    return point_after(
        parameters,
        start,
        done,
        num_steps=descent.num_steps,
        learning_rate=descent.learning_rate,
        is_constant=descent.is_constant,
    )


def _minibatch(context: ProposalContext, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """The samples for the next gradient: equally many sample positions for each objective in `names`, ascending.

    `context` has the earlier gradients; samples that they have not used come first.
    """
    setting = context.setting
    completed = reference_completions(context.steps) or {}
    return minibatch(
        {name: completed.get(name, setting.fitted(name)) for name in setting.objectives if name in names},
        [step for step in context.steps if isinstance(step, GradientStep)],
        share=share_of(setting.options.gradient.batch, len(names)),
        indices={name: index for index, name in enumerate(setting.objectives)},
        seed=context.seed,
    )


def _with_one_cost(context: ProposalContext) -> list[Observation]:
    """The observations in `context` with the costs of all objectives combined into one cost, as the local search needs.

    The cost is the mean over the objectives. In a study with preference vectors (weights of the objectives) it is the
    mean weighted by the vector for which the present trial is proposed (function `_turn`). Trials that were proposed
    for other vectors are then marked as not proposed. The local search learns the size of its steps from proposed
    trials, and the success of a trial for another vector says nothing about this size.
    """
    setting = context.setting
    turn = _turn(context.number, setting)
    weights = _descents(setting)[turn].preference if setting.preferences else ()

    def with_one_cost(o: Observation) -> Observation:
        is_of_turn = o.is_proposed and _turn(o.number, setting) == turn
        if o.costs is None:
            return replace(o, is_proposed=is_of_turn)
        cost = math.fsum(w * c for w, c in zip(weights, o.costs, strict=True)) if weights else fmean(o.costs)
        return replace(o, costs=(cost,), standard_errors=(None,), is_proposed=is_of_turn)

    return [with_one_cost(observation) for observation in context.observations]


def _turn(number: int, setting: SearchSetting) -> int:
    """The index of the gradient descent whose preference vector is used to propose trial `number`.

    `setting` has the options and the preference vectors (weights of the objectives), one for each descent. A trial that
    is a point of a descent uses this descent's vector. Trials after all descents use the vectors of the descents in
    turn.
    """
    descents = _descents(setting)
    index = number - setting.num_baselines
    place = place_of(index, descents)
    return place[0] if place is not None else (index - sum(d.num_points for d in descents)) % len(descents)
