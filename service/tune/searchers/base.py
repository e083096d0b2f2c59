"""The interface of a searcher: a pure function from what is known to the next configuration.

Searchers keep no state between proposals. Proposal n depends only on its context, so a resumed search proposes what an
uninterrupted one would have proposed. A searcher that needs more than scores is such a function too: it answers with a
step to compute, and finds the result in the context of its next call, until it has a configuration.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from search_spaces.parameters import Parameters
from search_spaces.preferences import equal_preference
from search_spaces.study.search import Search
from service.store.steps import Step, StepRequest, UpdateResult
from workers.types import Family

__all__ = [
    "LearningSearcher",
    "Observation",
    "ProposalContext",
    "SearchSetting",
    "Searcher",
    "proposal_generator",
]

# In a small space most draws are known configurations; after this many draws, a known one is proposed.
_MAX_DRAWS = 64


@dataclass(frozen=True)
class Observation:
    """The result of a trial at one rung.

    `costs` has one cost per objective, smaller is better; None if the candidate failed. `fidelity` is the rung's share
    of the full budget, in (0, 1]; a failure has that of the last rung. `standard_errors` are those of the costs, None
    where unknown. A constraint holds where its value is at most 0. `is_proposed` is False for baselines.
    """

    configuration: Mapping[str, Any]
    fidelity: float
    costs: tuple[float, ...] | None
    number: int = field(kw_only=True)
    """Trial number."""
    rung: int = field(kw_only=True)
    standard_errors: tuple[float | None, ...] = field(default=(), kw_only=True)
    constraints: tuple[float, ...] = field(default=(), kw_only=True)
    is_proposed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class SearchSetting:
    """The parts of a study that searchers with options of their own read.

    `objectives` are the names in order, `num_samples` the search samples of each, `num_baselines` the number of trials
    before the first proposal. `options` is the section `search` of the study file, which has the options of each
    searcher. `preferences` are the study's preference vectors, empty where it has none. `first_fitted`: for each
    objective, the first sample position that losses and gradients may use, where trials are scored on the positions
    before it. `family` and `start` are for searchers that train a policy: the models whose weights describe the layers
    (None: layers are described by their positions alone), and the checkpoint from which each policy starts (empty: new
    policies). `batch` is the number of proposals in a row that know the same results.
    """

    objectives: tuple[str, ...] = ()
    num_samples: Mapping[str, int] = field(default_factory=dict)
    num_baselines: int = 0
    options: Search = field(default_factory=Search)
    preferences: tuple[tuple[float, ...], ...] = ()
    first_fitted: Mapping[str, int] = field(default_factory=dict)
    family: Family | None = None
    start: tuple[bytes, ...] = ()
    batch: int = 1

    @property
    def vectors(self) -> tuple[tuple[float, ...], ...]:
        """The study's preference vectors; one of equal weights where it has none."""
        return self.preferences or (equal_preference(len(self.objectives)),)

    def first_in_batch(self, number: int) -> int:
        """The first trial of the batch to which the proposal of trial `number` belongs."""
        return number - (number - self.num_baselines) % self.batch

    def num_left_in_batch(self, number: int) -> int:
        """The number of proposals after that of trial `number` in its batch."""
        return self.first_in_batch(number) + self.batch - 1 - number

    def fitted(self, name: str) -> range:
        """The positions of the objective's samples that losses and gradients may use."""
        return range(self.first_fitted.get(name, 0), self.num_samples[name])


@dataclass(frozen=True)
class ProposalContext:
    """All that a searcher may use to propose the configuration of trial `number`.

    `observations` have each trial at each of its rungs. `pending` are earlier proposals whose results this one must not
    know; any number of them may be outstanding. `steps` are all steps of the study, in order. `checkpoints` are those
    of the last two iterations of each policy, by iteration, for a searcher that learns.
    """

    parameters: Parameters
    number: int = field(kw_only=True)
    seed: int = field(kw_only=True)
    observations: Sequence[Observation] = field(default=(), kw_only=True)
    pending: Sequence[Mapping[str, Any]] = field(default=(), kw_only=True)
    steps: Sequence[Step] = field(default=(), kw_only=True)
    setting: SearchSetting = field(default_factory=SearchSetting, kw_only=True)
    checkpoints: Mapping[int, bytes] = field(default_factory=dict, kw_only=True)

    def generator(self) -> np.random.Generator:
        """A new random generator: a function of the seed and the trial number alone."""
        return proposal_generator(seed=self.seed, number=self.number)

    def known_configurations(self) -> list[Mapping[str, Any]]:
        """Configurations that need not be proposed again: those of all trials, once each, then the pending ones."""
        return [*{o.number: o.configuration for o in self.observations}.values(), *self.pending]

    def sample_unseen(self, rng: np.random.Generator) -> dict[str, Any]:
        """A configuration drawn uniformly; a known one only where no unknown one is found in a few draws."""
        known = self.known_configurations()
        for _ in range(_MAX_DRAWS):
            configuration = self.parameters.sample(rng)
            if configuration not in known:
                break
        return configuration


class Searcher(Protocol):
    """One search algorithm."""

    def advance(self, context: ProposalContext, /) -> StepRequest | dict[str, Any]:
        """The configuration of trial `context.number`, or the next step to compute before it can be proposed.

        A configuration is valid in `context.parameters`, with inactive parameters left out. Most searchers need no
        steps and answer with a configuration at once.
        """
        ...


@runtime_checkable
class LearningSearcher(Searcher, Protocol):
    """A search algorithm that trains policies between proposals.

    It computes its update steps itself. The checkpoint of iteration i is a function of the seed and of the results of
    the trials up to that iteration, so a lost checkpoint can be computed again.
    """

    def learn(self, context: ProposalContext, /, *, iteration: int) -> tuple[UpdateResult, bytes | None]:
        """The update of `iteration`, and its checkpoint; None where nothing is learned from it."""
        ...

    def learned_from(self, context: ProposalContext, /, *, iteration: int) -> Sequence[Observation] | None:
        """The observations that the update of `iteration` depends on; None while some of them are not known."""
        ...

    def num_policies(self, setting: SearchSetting) -> int:
        """The number of policies, which take turns: iteration i trains policy i modulo this number."""
        ...


def proposal_generator(*, seed: int, number: int) -> np.random.Generator:
    """The random generator of proposal `number`: a function of the two numbers alone, on every machine."""
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest))
