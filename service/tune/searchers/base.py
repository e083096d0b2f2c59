"""The interface of a searcher: a pure function from results to the next configuration.

Searchers keep no state between proposals. Proposal n depends only on the seed, n and the observations, so a resumed
search proposes what an uninterrupted one would have proposed. A searcher that needs more than scores is such a function
too: it asks for a step, whose result is stored and given to it in the next call, until it has a configuration.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from search_spaces.parameters import Parameters
from search_spaces.study.search import GradientOptions, PolicyOptions
from service.tune.steps import Step, StepRequest, StepResult
from workers.types import Family

__all__ = ["LearningSearcher", "Observation", "SearchSetting", "Searcher", "SteppingSearcher"]


@dataclass(frozen=True)
class Observation:
    """What is known of a trial at one rung.

    `costs` has one cost per objective, smaller is better; None if the candidate failed. `fidelity` is the rung's share
    of the full budget, in (0, 1]; a failure has that of the last rung. `standard_errors` are those of the costs, None
    where unknown. A constraint holds where its value is at most 0. `is_proposed` is False for sources and published
    recipes."""

    configuration: Mapping[str, Any]
    fidelity: float
    costs: tuple[float, ...] | None
    number: int = field(kw_only=True)
    """The trial's."""
    rung: int = field(kw_only=True)
    standard_errors: tuple[float | None, ...] = field(default=(), kw_only=True)
    constraints: tuple[float, ...] = field(default=(), kw_only=True)
    is_proposed: bool = field(default=True, kw_only=True)


class Searcher(Protocol):
    """One search algorithm."""

    def propose(
        self,
        parameters: Parameters,
        *,
        number: int,
        seed: int,
        observations: Sequence[Observation],
        pending: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """The configuration of trial `number`: valid in `parameters`, with inactive parameters left out.

        `observations` have each trial at each of its rungs. `pending` are earlier proposals whose results this one must
        not know; any number of them may be outstanding."""
        ...


@dataclass(frozen=True)
class SearchSetting:
    """What a stepping searcher knows of its study: the objectives in order, how many search samples each has, how many
    trials came before the first proposal, its options, and the study's preference vectors (weights of the objectives
    that sum to one; none: they are equal). `first_fitted`: by objective the first of the sample positions to fit, where
    these are not all; trials are scored on those before. `policy` and `family` are for searchers that train a policy:
    its options, and the models whose layers' weights describe them (None: they are described by their places alone).
    `start`: the checkpoint that each of its policies begins with; none: new ones."""

    objectives: tuple[str, ...]
    num_samples: Mapping[str, int]
    num_baselines: int
    options: GradientOptions
    preferences: tuple[tuple[float, ...], ...] = ()
    first_fitted: Mapping[str, int] = field(default_factory=dict)
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    family: Family | None = None
    start: tuple[bytes, ...] = ()

    def fitted(self, name: str) -> range:
        """The positions of the objective's samples that losses and gradients may be of."""
        return range(self.first_fitted.get(name, 0), self.num_samples[name])


@runtime_checkable
class SteppingSearcher(Protocol):
    """A search algorithm that computes steps for its proposals."""

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
        """The next step to compute for the proposal of trial `number`, or its configuration.

        `steps` are all that the study has, in order. All else is as in `Searcher.propose`."""
        ...


@runtime_checkable
class LearningSearcher(Protocol):
    """A search algorithm that improves networks between proposals. Its UPDATE steps are computed by itself: what it has
    learned after iteration i is a checkpoint, a function of the seed and of the results of the trials up to that
    iteration. So a checkpoint that is lost can be made again."""

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
        checkpoints: Mapping[int, bytes],
    ) -> StepRequest | dict[str, Any]:
        """As `SteppingSearcher.advance`. `checkpoints` are those that `kept` names, by iteration."""
        ...

    def learn(
        self,
        parameters: Parameters,
        *,
        iteration: int,
        seed: int,
        observations: Sequence[Observation],
        setting: SearchSetting,
        checkpoints: Mapping[int, bytes],
    ) -> tuple[StepResult, bytes | None]:
        """The UPDATE of `iteration`, and its checkpoint; None where nothing is learned from it."""
        ...

    def learned_from(
        self, *, iteration: int, observations: Sequence[Observation], setting: SearchSetting
    ) -> Sequence[Observation] | None:
        """The observations that the UPDATE of `iteration` depends on; None while some of them are not known."""
        ...

    def slot(self, iteration: int, *, setting: SearchSetting) -> str:
        """The name of the artifact that holds the checkpoint of an iteration until it is no longer needed."""
        ...

    def kept(self, num_finished: int, *, setting: SearchSetting) -> range:
        """The iterations whose checkpoints are needed once `num_finished` are finished."""
        ...
