"""The interface of a searcher: a pure function from the known results to the next configuration.

Searchers keep no state between proposals. Proposal n depends only on its context, so a resumed search makes the same
proposals as an uninterrupted one. A searcher that needs more than scores, such as gradients, returns a request for a
step instead of a configuration. The searcher finds the result of the step in the context of its next call.
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
    """The result of a trial at one rung (a number of samples at which trials are compared), as searchers receive it.

    - `configuration`: the trial's point in the search space, a mapping from parameters to values.
    - `fidelity`: the rung's share of all samples of the search, in (0, 1]. A failed trial has the fidelity of the last
      rung.
    - `costs`: one cost per objective, smaller is better. None if the trial failed.
    - `number`, `rung`: the trial's number, and the index of the rung.
    - `standard_errors`: the standard error of each cost; None if it is not known.
    - `constraints`: one value per constraint. The constraint holds if its value is at most 0.
    - `is_proposed`: False for baselines and for trials of an earlier study.
    """

    configuration: Mapping[str, Any]
    fidelity: float
    costs: tuple[float, ...] | None
    number: int = field(kw_only=True)
    """Number of the trial."""
    rung: int = field(kw_only=True)
    standard_errors: tuple[float | None, ...] = field(default=(), kw_only=True)
    constraints: tuple[float, ...] = field(default=(), kw_only=True)
    is_proposed: bool = field(default=True, kw_only=True)


@dataclass(frozen=True)
class SearchSetting:
    """Facts about a study that some searchers need in addition to its parameters and results.

    - `objectives`: the names of the objectives, in order
    - `num_samples`: the number of search samples of each objective
    - `num_baselines`: the number of trials before the first proposal
    - `options`: the section `search` of the study file, which has the options of each searcher
    - `preferences`: the study's preference vectors (importances of the objectives); empty if the study has none
    - `first_fitted`: maps the name of an objective to the first sample position that losses and gradients may use.
      Trials are scored on the positions before it. For an objective without an entry, trials are scored on all samples,
      and losses and gradients may use all of them too.
    - `family`: the models whose weights describe the layers to a policy (a network that builds layer paths); None if
      layers are described by their positions alone
    - `start`: the checkpoints from which policies start; empty for new policies
    - `batch`: the number of consecutive proposals that are made from the same results
    - `observed`: results of an earlier study, which come before the results of the study's own trials; trials of the
      earlier study have negative numbers and count as not proposed
    - `version`: the version of the searcher that the study was created with; None for the newest version
    - `experts`: the aliases of the experts whose coefficients are parameters of the search space; the alias is the role
      (common meaning) of all parameters for the expert's coefficients
    - `has_completions`: whether models answer by completions, which may serve as reference answers
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
    observed: tuple[Observation, ...] = ()
    version: int | None = None
    experts: tuple[str, ...] = ()
    has_completions: bool = True

    @property
    def vectors(self) -> tuple[tuple[float, ...], ...]:
        """The study's preference vectors (weights of the objectives); by default, one vector of equal weights."""
        return self.preferences or (equal_preference(len(self.objectives)),)

    def first_in_batch(self, number: int) -> int:
        """The number of the first trial in the batch of trial `number`.

        A batch is a number of consecutive proposals that are made from the same results.
        """
        return number - (number - self.num_baselines) % self.batch

    def num_left_in_batch(self, number: int) -> int:
        """Number of proposals that follow the proposal of trial `number` in the same batch.

        A batch is a number of consecutive proposals that are made from the same results.
        """
        return self.first_in_batch(number) + self.batch - 1 - number

    def fitted(self, name: str) -> range:
        """Positions of the samples of objective `name` that losses and gradients may use.

        A position is a sample's index in the order in which the objective's samples are scored.
        """
        return range(self.first_fitted.get(name, 0), self.num_samples[name])


@dataclass(frozen=True)
class ProposalContext:
    """All that a searcher may use to propose the configuration of trial `number`.

    - `parameters`, `seed`: the parameters of the search space, and the seed of the search
    - `observations`: the result of each trial at each of its rungs (numbers of samples at which trials are compared)
    - `pending`: the configurations of earlier proposals whose results may not be used for this proposal; there may be
      any number of them
    - `steps`: the results of all computations, such as gradients, that the searcher has requested in this study, in
      order
    - `setting`: further facts about the study
    - `checkpoints`: for a searcher that trains policies, the checkpoints of the last two iterations of each policy,
      keyed by iteration
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
        """A new random generator that depends only on the seed and the trial number."""
        return proposal_generator(seed=self.seed, number=self.number)

    def known_configurations(self) -> list[Mapping[str, Any]]:
        """Configurations that need not be proposed again: configurations of trials with results, then pending ones.

        A pending configuration was proposed earlier, and its result may not be used yet.
        """
        return [*{o.number: o.configuration for o in self.observations}.values(), *self.pending]

    def sample_unseen(self, rng: np.random.Generator) -> dict[str, Any]:
        """A random configuration, drawn with `rng`, that has not been proposed yet.

        The configuration is drawn from the space's own distribution. If a few draws give only known configurations, a
        known configuration is returned.
        """
        known = self.known_configurations()
        for _ in range(_MAX_DRAWS):
            configuration = self.parameters.sample(rng)
            if configuration not in known:
                break
        return configuration


class Searcher(Protocol):
    """The interface of a search algorithm, which proposes configurations."""

    def advance(self, context: ProposalContext, /) -> StepRequest | dict[str, Any]:
        """Return the configuration of trial `context.number`, or a request for a computation that is needed first.

        Such a computation is called a step, for example the gradients of a recipe. The caller computes the step, stores
        its result and calls `advance` again. The configuration is valid in `context.parameters` and has no inactive
        parameters. Most searchers need no steps and return a configuration at once.
        """
        ...


@runtime_checkable
class LearningSearcher(Searcher, Protocol):
    """Interface of a search algorithm that trains policies (networks that build configurations) between proposals.

    A policy is updated after each iteration, a fixed number of trials. The searcher computes the updates itself. The
    checkpoint of iteration i depends only on the seed and on the trials' results up to that iteration, so a lost
    checkpoint can be computed again.
    """

    def learn(self, context: ProposalContext, /, *, iteration: int) -> tuple[UpdateResult, bytes | None]:
        """Compute the policy update of iteration `iteration`; return its result and the policy's new checkpoint.

        An iteration is a fixed number of trials, after which a policy is updated. `context` has the trials' results,
        from which the policy learns. The checkpoint is None if nothing is learned in this iteration.
        """
        ...

    def learned_from(self, context: ProposalContext, /, *, iteration: int) -> Sequence[Observation] | None:
        """The results in `context` from which the policy update of `iteration` learns; None if a result is missing."""
        ...

    def num_policies(self, setting: SearchSetting) -> int:
        """Number of policies (networks that build configurations) that are trained in a study with this `setting`.

        The policies are trained in turn, each after a fixed number of trials: training iteration i updates the policy
        with number i modulo this number.
        """
        ...


def proposal_generator(*, seed: int, number: int) -> np.random.Generator:
    """The random generator with which trial `number` is proposed.

    The generator is a function of `seed` and `number` alone, and gives the same numbers on every machine.
    """
    digest = hashlib.sha256(f"{seed}:{number}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest))
