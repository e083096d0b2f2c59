"""Gradient descent on the coefficients of a merge; then points between those found, or a local search from the best.

The loss is that of teacher forcing on reference answers (`workers.training.gradients`): all coefficients are improved
at once by a few forward and backward passes. AdaMerging (Yang et al., "AdaMerging: Adaptive Model Merging for
Multi-Task Learning", 2024) learns coefficients by gradients too, of the entropy of predictions. Adam is Kingma and Ba's
(2015), algorithm 1.

A descent starts at the defaults of the space's parameters, and some of its points become trials; a local search from
the best one follows. A study with preference vectors has a descent for each (`descents`); then come points halfway
between trials of the front (`midpoints`), and where none would add to it, a local search for one vector after the
other. Before the descents, the losses of the sources and published recipes that the space contains are compared with
their scores. Where a lower loss does not go with a better score (as with bare answers as references of a task that is
reasoned about), the sources' own correct completions are tried as references; where these say nothing either, a descent
would not help, and SMAC proposes all trials. All known recipes are compared, as the searcher waits for baselines.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.parameters import Float, Parameters
from service.tune.searchers.base import Observation, SearchSetting
from service.tune.searchers.descents import Descent, descents_of, place_of
from service.tune.searchers.es import SEARCHER as LOCAL_SEARCH
from service.tune.searchers.midpoints import midpoint
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
    """Descents, then midpoints or local search."""

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    last_rate: float = 5e-4  # the learning rate falls linearly to this share of its first value
    # Samples of each objective on which losses are compared with scores, and the rank correlation that is asked for.
    # Of fewer than four known recipes nothing can be said, and the descent is tried.
    num_compared: int = 16
    min_correlation: float = 0.3
    min_recipes: int = 4
    # Of fewer correct completions a loss is too noisy to compare.
    min_completions: int = 8

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
        decisions = [step.request.decision for step in steps if step.request.kind is StepKind.NOTE]
        if not decisions:
            known = [o for o in observations if not o.is_proposed and o.costs is not None]
            return self._compare(parameters, known, steps, setting)
        call: dict[str, Any] = {"number": number, "seed": seed, "pending": pending}
        if decisions[0] == NOT_USED:
            return WITHOUT_GRADIENTS.propose(parameters, observations=observations, **call)
        descents = _descents(setting)
        place = place_of(number - setting.num_baselines, descents)
        if place is not None:
            found = self._descend(parameters, *place, seed, steps, setting)
            if found is not None:
                return found
        elif setting.preferences:
            between = midpoint(parameters, observations=observations, pending=pending)
            if between is not None:
                return between
        return LOCAL_SEARCH.propose(parameters, observations=_scalar(observations, number, setting), **call)

    # -- whether losses say anything about scores ------------------------------------------------------------------

    def _compare(
        self, parameters: Parameters, known: Sequence[Observation], steps: Sequence[Step], setting: SearchSetting
    ) -> StepRequest:
        """The next step towards the decision, or the decision: the losses of the known recipes on the tasks' references
        first, then on the sources' own correct completions for the objectives where those do not go with scores."""
        first = _comparisons(steps, on_completions=False)
        if len(first) < len(known):
            return self._comparison(parameters, known[len(first)], {n: setting.fitted(n) for n in setting.objectives})
        if len(known) < self.min_recipes:
            reason = f"{len(known)} known recipes are too few to compare losses with scores"
            return StepRequest(StepKind.NOTE, f"gradients are used: {reason}", decision=USED)
        found = _correlations(known, first, setting)
        text = f"rank correlation over {len(known)} known recipes: {_listed(found)}"
        failing = tuple(name for name, value in found.items() if value < self.min_correlation)
        if not failing:
            return StepRequest(StepKind.NOTE, f"gradients are used: losses go with scores ({text})", decision=USED)
        reason = f"losses do not go with scores ({text}; {self.min_correlation:g} is needed)"
        if setting.first_fitted:
            return _refusal(f"{reason}, and no source is scored on the samples that are fitted", setting)
        completed = _completed(steps)
        if completed is None:
            return StepRequest(StepKind.COMPLETIONS, "correct completions of the sources", completions=failing)
        few = {name: len(pairs) for name, pairs in completed.items() if len(pairs) < self.min_completions}
        if few:
            counts = ", ".join(f"{name} {count}" for name, count in few.items())
            lack = f"the sources have too few correct completions ({counts}; {self.min_completions} are needed)"
            return _refusal(f"{reason}, and {lack}", setting)
        second = _comparisons(steps, on_completions=True)
        if len(second) < len(known):
            places = {name: [position for position, _ in pairs] for name, pairs in completed.items()}
            return self._comparison(parameters, known[len(second)], places, completions=failing)
        again = _correlations(known, second, setting)
        if min(again.values()) < self.min_correlation:
            return _refusal(
                f"{reason}, nor do those on the sources' own correct completions ({_listed(again)})", setting
            )
        counts = ", ".join(f"{name} on {len(pairs)} samples" for name, pairs in completed.items())
        label = (
            f"gradients are used, with the sources' own correct completions as references of {counts}: losses on them "
            f"go with scores ({_listed(again)}), those on the tasks' reference answers do not ({text}; "
            f"{self.min_correlation:g} is needed)"
        )
        return StepRequest(StepKind.NOTE, label, decision=USED)

    def _comparison(
        self,
        parameters: Parameters,
        known: Observation,
        places: Mapping[str, Sequence[int]],
        *,
        completions: tuple[str, ...] = (),
    ) -> StepRequest:
        """The losses of a known recipe on the first of these sample positions."""
        positions = {name: tuple(each[: self.num_compared]) for name, each in places.items()}
        point = tuple(float(known.configuration[parameter.name]) for parameter in parameters)
        return StepRequest(StepKind.LOSSES, f"trial {known.number}", point, positions, completions=completions)

    # -- the descents ----------------------------------------------------------------------------------------------

    def _descend(
        self,
        parameters: Parameters,
        number: int,
        point: int,
        seed: int,
        steps: Sequence[Step],
        setting: SearchSetting,
    ) -> StepRequest | dict[str, Any] | None:
        """A point of descent `number`, the next gradient on the way to it, or None if the descent has failed."""
        descent = _descents(setting)[number]
        wanted = descent.num_steps_to(point)
        done = _steps_of(number, steps)[:wanted]
        if any(step.result.failure is not None for step in done):
            return None
        reached = self._after(parameters, self._start(parameters, number, steps, setting), descent, done, setting)
        if len(done) == wanted:
            return dict(zip(parameters.names, reached.tolist(), strict=True))
        names = setting.objectives
        preference = dict(zip(names, descent.preference, strict=True))
        batch = _minibatch([name for name in names if preference[name] > 0], steps, seed, setting)
        return StepRequest(
            StepKind.GRADIENT,
            _label(number),
            tuple(reached.tolist()),
            batch,
            _weights(preference, steps),
            preference=preference if setting.preferences else {},
            completions=tuple(name for name in _completed(steps) or () if name in batch),
        )

    def _start(self, parameters: Parameters, number: int, steps: Sequence[Step], setting: SearchSetting) -> Point:
        """The end of the nearest earlier descent that has not failed; without one, the defaults."""
        if done := _steps_of(number, steps):
            return np.array(done[0].request.point)
        descents = _descents(setting)
        for neighbour in descents[number].neighbours:
            before = _steps_of(neighbour, steps)
            if before and all(step.result.failure is None for step in before):
                start = np.array(before[0].request.point)
                return self._after(parameters, start, descents[neighbour], before, setting)
        return np.array([parameter.default_value for parameter in _numbers(parameters)])

    def _after(
        self, parameters: Parameters, start: Point, descent: Descent, done: Sequence[Step], setting: SearchSetting
    ) -> Point:
        """The point after these steps: Adam's, each kept in the parameters' ranges."""
        numbers = _numbers(parameters)
        low, high = np.array([p.low for p in numbers]), np.array([p.high for p in numbers])
        point = start
        mean, square = np.zeros_like(point), np.zeros_like(point)
        for number, step in enumerate(done):
            gradient = np.array(step.result.gradient)
            mean = self.beta1 * mean + (1 - self.beta1) * gradient
            square = self.beta2 * square + (1 - self.beta2) * gradient**2
            rate = descent.learning_rate * (1 - number / descent.num_steps + self.last_rate)
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


def _comparisons(steps: Sequence[Step], *, on_completions: bool) -> list[Step]:
    found = [step for step in steps if step.request.kind is StepKind.LOSSES]
    return [step for step in found if bool(step.request.completions) is on_completions]


def _completed(steps: Sequence[Step]) -> Mapping[str, Sequence[tuple[int, int]]] | None:
    """The completions that were found, by objective: once there are descents, these are the references. None: they
    were not asked for."""
    found = [step.result.completions for step in steps if step.request.kind is StepKind.COMPLETIONS]
    return found[0] if found else None


def _correlations(known: Sequence[Observation], compared: Sequence[Step], setting: SearchSetting) -> dict[str, float]:
    """Of the objectives that were compared, how well losses go with costs."""
    found = {}
    for index, name in enumerate(setting.objectives):
        if name in compared[0].request.positions:
            pairs = [
                (step.result.losses[name], o.costs[index])
                for step, o in zip(compared, known, strict=True)
                if step.result.failure is None and o.costs is not None
            ]
            found[name] = rank_correlation([loss for loss, _ in pairs], [cost for _, cost in pairs])
    return found


def _listed(correlations: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in correlations.items())


def _refusal(reason: str, setting: SearchSetting) -> StepRequest:
    if setting.preferences:
        reason += "; it does not use the preference vectors"
    return StepRequest(StepKind.NOTE, f"gradients are not used, smac proposes: {reason}", decision=NOT_USED)


def _descents(setting: SearchSetting) -> tuple[Descent, ...]:
    return descents_of(setting.options, num_objectives=len(setting.objectives), preferences=setting.preferences)


def _label(number: int) -> str:
    return f"descent {number}"


def _steps_of(number: int, steps: Sequence[Step]) -> list[Step]:
    """The gradients of a descent."""
    label = _label(number)
    return [step for step in steps if step.request.kind is StepKind.GRADIENT and step.request.label == label]


def _numbers(parameters: Parameters) -> list[Float]:
    return [parameter for parameter in parameters if isinstance(parameter, Float)]


def _minibatch(
    names: Sequence[str], steps: Sequence[Step], seed: int, setting: SearchSetting
) -> dict[str, tuple[int, ...]]:
    """Equal shares of the objectives of these names, in ascending order. Every sample of an objective is drawn once, by
    whichever descents, before one is drawn again."""
    share = max(1, setting.options.batch // len(names))
    completed = _completed(steps) or {}
    batch = {}
    for place, name in enumerate(setting.objectives):
        if name not in names:
            continue
        places = [position for position, _ in completed[name]] if name in completed else setting.fitted(name)
        size = len(places)
        before = sum(len(s.request.positions.get(name, ())) for s in steps if s.request.kind is StepKind.GRADIENT)
        drawn: list[int] = []
        for position in range(before, before + share):
            epoch, offset = divmod(position, size)
            if not drawn or offset == 0:
                order = proposal_generator(seed=seed, number=BATCHES + epoch * 1000 + place).permutation(size)
            drawn.append(places[int(order[offset])])
        batch[name] = tuple(sorted(drawn))
    return batch


def _weights(preference: Mapping[str, float], steps: Sequence[Step]) -> dict[str, float]:
    """Of each objective's loss: its preference over its mean loss over the known recipes, so that equal preferences
    count alike. Objectives that do not matter are left out."""
    completed = _completed(steps) or {}
    weights = {}
    for name, share in preference.items():
        compared = [s for s in _comparisons(steps, on_completions=name in completed) if s.result.failure is None]
        scale = fmean(step.result.losses[name] for step in compared) if compared else 1.0
        if share > 0:
            weights[name] = share / max(scale, 1e-6)
    return weights


def _scalar(observations: Sequence[Observation], number: int, setting: SearchSetting) -> list[Observation]:
    """With one cost, the mean of the objectives'. With preference vectors, the mean weighted by the one whose turn it
    is; trials of the other vectors are known, and say nothing about the size of steps."""
    turn = _turn(number, setting)
    weights = _descents(setting)[turn].preference

    def scalar(o: Observation) -> Observation:
        is_ours = o.is_proposed and _turn(o.number, setting) == turn
        if o.costs is None:
            return replace(o, is_proposed=is_ours)
        weighted = math.fsum(w * c for w, c in zip(weights, o.costs, strict=True))
        cost = weighted if setting.preferences else fmean(o.costs)
        return replace(o, costs=(cost,), standard_errors=(None,), is_proposed=is_ours)

    return [scalar(observation) for observation in observations]


def _turn(number: int, setting: SearchSetting) -> int:
    """Which descent's preference vector a proposal is for; after the descents, one after the other."""
    descents = _descents(setting)
    index = number - setting.num_baselines
    place = place_of(index, descents)
    return place[0] if place is not None else (index - sum(d.num_points for d in descents)) % len(descents)
