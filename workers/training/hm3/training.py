"""Training of HM3's policies: the policy and the preference vector of each episode, and the updates of policies.

Networks and preference vectors follow from the options, the seed and earlier outcomes alone. All iterations have the
same number of episodes. The networks that build iteration i have learned from the iterations up to i - 2. Therefore the
episodes of one iteration can be scored while the episodes of the next iteration are built. With one policy for each
preference vector, the policies take turns, one iteration each. A policy that is conditioned on the vector takes all
vectors in each iteration, one after the other.

A search may begin with given policies. Given policies have no warm-up. From the beginning, they explore as rarely as
other policies do at the end of a search. If given policies do not learn, the first episode of each preference vector is
the path that the policy prefers, without noise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths, Path
from workers.training.hm3.episodes import Episode, Role, generator_of, play
from workers.training.hm3.first_learner import FirstLearner
from workers.training.hm3.learner import BaseLearner, Learner, LearnerOptions, UpdateStatistics
from workers.training.hm3.networks import NetworkOptions

__all__ = ["PolicyTraining", "PolicyTrainingOptions"]

# Episodes that are played for a proposal, because a policy repeats paths.
TRIES = 16

# The first version of the searcher that discounts the outcome for the last step of a path, too.
FIRST_WITH_DISCOUNTED_END = 4


@dataclass(frozen=True)
class PolicyTrainingOptions:
    """Options of the training of a search's policies.

    - `episodes`: the number of episodes in an iteration
    - `warm_up`: the number of a policy's first iterations in which nothing is learned, and every step is drawn at
      random from all allowed steps
    - `k`: the number of candidates for each step of a layer path
    - `exploration`, `explored`: the probability of drawing a step at random decreases linearly from 1 to `exploration`
      over the `explored` iterations of a policy after its warm-up
    - `draws_paths`: whether random choices are made for whole paths. Then all paths of the warm-up are drawn at random
      from the search space; afterwards the share of such paths decreases to zero over the `explored` iterations. In all
      other paths, single steps are drawn at random with the probability `exploration`.
    - `is_conditioned`: whether a single policy has the preference vector (weights of the objectives) as an input;
      otherwise there is a policy for each vector
    - `learns`: whether policies learn; if not, the initial policies build all episodes
    - `version`: the version of the searcher `hm3` with which the search was begun. In version 1, policies learn by the
      class `FirstLearner`, and searches with different seeds may share random numbers.
    """

    episodes: int = 16
    warm_up: int = 1
    k: int = 6
    exploration: float = 0.03
    explored: int = 10
    draws_paths: bool = False
    is_conditioned: bool = False
    learns: bool = True
    version: int = 4
    learner: LearnerOptions = field(default_factory=LearnerOptions)
    networks: NetworkOptions = field(default_factory=NetworkOptions)


@dataclass(frozen=True)
class _Played:
    """The episodes of one iteration, keyed by number, and the policy that built them.

    `by` is the checkpoint of this policy, or None for the policy with which the search began.
    """

    by: bytes | None
    episodes: Mapping[int, Episode]


class PolicyTraining:
    """The policies of one search, which build episodes (layer paths) and learn from their outcomes.

    - `paths`: the models through which paths lead, and the limits of paths
    - `options`, `seed`: the options of the training, and the seed of all random numbers
    - `preferences`: the preference vectors, at least one; each has the weights of the objectives
    - `descriptors`: statistics of the layers' weights, or None
    - `saved`: the checkpoints that were saved after iterations of this search, keyed by iteration. Only the checkpoints
      of the last two iterations of each policy are needed.
    - `start`: the checkpoint that each policy begins with, or empty for new policies

    Raises ValueError if `start` has another number of checkpoints than there are policies.
    """

    def __init__(
        self,
        paths: LayerPaths,
        options: PolicyTrainingOptions,
        *,
        seed: int,
        preferences: Sequence[tuple[float, ...]],
        descriptors: Tensor | None = None,
        saved: Mapping[int, bytes] | None = None,
        start: Sequence[bytes] = (),
    ) -> None:
        self.paths = paths
        self.options = options
        self.preferences = tuple(preferences)
        self.saved = dict(saved or {})
        self._start = tuple(start)
        if len(self._start) not in ((0, self.num_policies) if options.learns else (self.num_policies,)):
            raise ValueError(f"{len(self._start)} policies to begin with; expected {self.num_policies}")
        self._seed = seed
        self._descriptors = descriptors
        self._played: dict[int, _Played] = {}

    # -- the plan of a search --------------------------------------------------------------------------------------

    @property
    def num_policies(self) -> int:
        """The number of policies in the search: 1, or the number of preference vectors.

        A preference vector has a weight for each objective. If the policy has the vector as an input, there is one
        policy; otherwise there is one policy for each preference vector.
        """
        return 1 if self.options.is_conditioned else len(self.preferences)

    def iteration_of(self, number: int) -> int:
        """Index of the iteration of episode `number`.

        An iteration is a group of episodes (sequences of layers that a policy builds) after which the policy is
        updated.
        """
        return number // self.options.episodes

    def numbers_in(self, iteration: int) -> range:
        """Numbers of the episodes in an iteration.

        An iteration is a group of episodes (sequences of layers that a policy builds) after which the policy is
        updated.
        """
        first = iteration * self.options.episodes
        return range(first, first + self.options.episodes)

    def num_needed(self, number: int) -> int:
        """Number of iterations whose outcomes must be known before episode `number` can be built.

        An iteration is a group of episodes (sequences of layers that a policy builds). With a single policy, the
        episodes of iteration i are built by the policy that has learned from all iterations up to i - 2. If several
        policies take turns, they are built by a policy that has learned from its own earlier iterations. The result is
        0 if policies do not learn.
        """
        if not self.options.learns:
            return 0
        return max(0, self.iteration_of(number) + 1 - max(2, self.num_policies))

    def policy_of(self, iteration: int) -> int:
        """Index of the policy that builds the episodes of an iteration.

        An iteration is a group of episodes (sequences of layers that a policy builds) after which the policy is
        updated. If there are several policies, they take turns, an iteration each.
        """
        return iteration % self.num_policies

    def turn_of(self, iteration: int) -> int:
        """Number of earlier iterations whose episodes were built by the policy of `iteration`.

        An iteration is a group of episodes (sequences of layers that a policy builds) after which the policy is updated
        with their scores. If there are several policies, they take turns, an iteration each.
        """
        return iteration // self.num_policies

    def preference_of(self, number: int) -> tuple[float, ...]:
        """Preference vector (weights of the objectives) of episode `number`."""
        takes_turns = self.options.is_conditioned or not self.options.learns
        place = number if takes_turns else self.iteration_of(number)
        return self.preferences[place % len(self.preferences)]

    def is_learned_from(self, iteration: int) -> bool:
        """Whether a policy learns from the outcomes of its episodes in an iteration.

        An iteration is a group of episodes (sequences of layers that the policy builds), and an outcome is the score of
        a sequence as a model. The result is False if learning is switched off, and in the first iterations (warm-up) of
        a policy that begins untrained.
        """
        return self.options.learns and (bool(self._start) or self.turn_of(iteration) >= self.options.warm_up)

    def source_of(self, iteration: int, *, newest: int) -> int | None:
        """Iteration after which the newest checkpoint of a policy was saved, among iterations up to `newest`.

        The policy is the one that builds the episodes of `iteration`. An iteration is a group of episodes (sequences of
        layers that a policy builds). After each of its iterations except the warm-up, the policy learns from the
        episodes and is saved as a checkpoint. Returns None if there is no checkpoint yet.
        """
        last = newest - (newest - iteration) % self.num_policies
        return last if last >= 0 and self.is_learned_from(last) else None

    def is_kept(self, iteration: int, *, num_finished: int) -> bool:
        """Whether the checkpoint of a policy that was saved after `iteration` must be kept.

        An iteration is a group of episodes (sequences of layers that a policy builds) after which the policy is
        updated. The checkpoints of each policy's last two iterations are kept. `num_finished` is the number of
        iterations that are finished.
        """
        return iteration >= num_finished - 2 * self.num_policies

    # -- episodes and updates --------------------------------------------------------------------------------------

    def play(self, number: int) -> Episode:
        """Build the layer path of episode `number`, in one batch with all other episodes of its iteration.

        In an episode, a policy builds one layer path, the sequence of layers of a new model. An iteration is a group of
        episodes after which the policy is updated. Raises KeyError if the policy's checkpoint that these episodes need
        is not saved.
        """
        iteration = self.iteration_of(number)
        source = self.source_of(iteration, newest=iteration - 2) if self.options.learns else None
        by = None if source is None else self.saved[source]
        played = self._played.get(iteration)
        if played is None or played.by != by:
            played = _Played(by, self._play(iteration, source))
            # Episodes are scored while those of the next iteration are played, or of the other policies.
            oldest = iteration - max(1, self.num_policies)
            kept = {each: old for each, old in self._played.items() if each >= oldest}
            self._played = {**kept, iteration: played}
        return played.episodes[number]

    def _play(
        self,
        iteration: int,
        source: int | None,
        *,
        paths: Sequence[Path] | None = None,
        scales: Sequence[tuple[float, ...]] = (),
        vectors: Sequence[int | None] = (),
    ) -> dict[int, Episode]:
        numbers = self.numbers_in(iteration)
        is_warm_up = not self._start and not self.is_learned_from(iteration)
        k = self.paths.num_steps + 1 if is_warm_up else self.options.k
        if self.options.learns:
            learner = self._learner(self.policy_of(iteration), source)
            roles = [self._learning(number) for number in numbers]
            if paths is not None:
                given: Sequence[tuple[float, ...] | None] = scales or (None,) * len(paths)
                roles = [replace(r, path=path, scales=s) for r, path, s in zip(roles, paths, given, strict=True)]
                own = [None if each is None else self.preferences[each] for each in vectors or [None] * len(paths)]
                roles = [replace(r, preference=each or r.preference) for r, each in zip(roles, own, strict=True)]
            return {each.number: each for each in self._built(learner, roles, k=k)}
        found: dict[int, Episode] = {}
        for policy in range(self.num_policies):
            roles = [self._without_learning(number) for number in numbers if number % self.num_policies == policy]
            if roles:
                learner = self._learner(policy, None)
                found |= {each.number: each for each in self._built(learner, roles, k=k)}
        return found

    def _learning(self, number: int) -> Role:
        exploration = self._exploration(self.turn_of(self.iteration_of(number)))
        preference, least = self.preference_of(number), self.options.exploration
        if not self.options.draws_paths:
            return Role(number, preference, exploration)
        first = (self._seed, number) if self.options.version == 1 else self.seed_of("drawn paths", number)
        rng = np.random.default_rng(first)
        is_drawn = rng.random() * (1 - least) < exploration - least
        return Role(number, preference, least, path=self.paths.path(self.paths.sample(rng)) if is_drawn else None)

    def _without_learning(self, number: int) -> Role:
        if number < len(self.preferences):
            return Role(number, self.preference_of(number), exploration=0.0, noise=0.0)
        return Role(number, self.preference_of(number), self.options.exploration)

    def learn(
        self,
        iteration: int,
        outcomes_BK: Tensor,
        *,
        paths: Sequence[Path] | None = None,
        scales: Sequence[tuple[float, ...]] = (),
        vectors: Sequence[int | None] = (),
        restarts: bool = False,
    ) -> UpdateStatistics | None:
        """Update the policy of an iteration with the outcomes of its episodes, and save the policy's checkpoint.

        `outcomes_BK` [episodes, objectives] are the outcomes, from which a price for the length of the path is already
        subtracted. `paths` has the layer path (sequence of layers) that was scored for each episode; None means the
        path that the episode built. A searcher may score another path, for example a mutant (a random change of the
        best path); the policy then learns from the scored path. `scales` has the scales of each path's layers, if
        layers have scales. `vectors` has, for each episode, the index of the preference vector (weights of the
        objectives) for which the policy learns from the scored path; None means the episode's own vector. Only a policy
        that has the vector as an input can learn for another vector. With `restarts`, the policy network is
        reinitialised before the update. Episodes that another process built are built again, with the same result.

        Returns None if the policy does not learn from this iteration, for example during the warm-up.
        """
        if not self.is_learned_from(iteration):
            return None
        episodes = [self.play(number) for number in self.numbers_in(iteration)]
        own = [(each.path, each.scales) for each in episodes]
        told = own if paths is None else [*zip(paths, scales or [()] * len(paths), strict=True)]
        # A scored path may be the one that the policy built, and yet be merged for another vector.
        moved = [
            index is not None and self.preferences[index] != each.preference
            for index, each in zip(vectors or [None] * len(episodes), episodes, strict=True)
        ]
        if own != told or any(moved):
            source = self.source_of(iteration, newest=iteration - 2)
            given = self._play(iteration, source, paths=paths, scales=scales, vectors=vectors).values()
            # From version 3 on, episodes with the path that the policy built keep their proto-actions.
            keeps = [
                self.options.version > 2 and each == other and not is_moved
                for each, other, is_moved in zip(own, told, moved, strict=True)
            ]
            episodes = [old if k else new for k, old, new in zip(keeps, episodes, given, strict=True)]
        learner = self._learner(iteration, self.source_of(iteration, newest=iteration - 1))
        if restarts:
            assert isinstance(learner, Learner), "policies of version 1 do not start anew"
            learner.restart()
        found = learner.update(episodes, outcomes_BK)
        self.saved[iteration] = learner.to_bytes()
        for old in [each for each in self.saved if not self.is_kept(each, num_finished=iteration + 1)]:
            del self.saved[old]
        return found

    def proposals(self, content: bytes, *, preference: tuple[float, ...], count: int) -> list[Path]:
        """Build up to `count` distinct layer paths with a saved policy for a preference vector, without learning.

        A layer path is the sequence of layers of a new model. `content` is the policy's checkpoint. `preference` has
        the weights of the objectives. The first path is the one that the policy prefers. In the other paths, some steps
        are drawn at random: each with the probability `exploration` of the options.
        """
        learner = self._new(0)
        learner.restore(content)
        found: dict[Path, None] = {}
        best = Role(0, preference, exploration=0.0, noise=0.0)
        others = [Role(number, preference, self.options.exploration) for number in range(1, TRIES * count)]
        for start in range(0, len(others) + 1, count):
            roles = [best, *others][start : start + count]
            for played in self._built(learner, roles, k=self.options.k, stream="proposals"):
                found[played.path] = None
            if len(found) >= count:
                break
        return list(found)[:count]

    def _built(self, learner: BaseLearner, roles: Sequence[Role], *, k: int, stream: str = "episodes") -> list[Episode]:
        seed, action = self._stream(stream), self.options.learner.action
        return play(learner.networks, roles, seed=seed, k=k, action=action, ideal=learner.ideal)

    def seed_of(self, stream: str, number: int) -> int:
        """Seed of the random numbers that episode `number` uses for one purpose, such as drawing its preference.

        `stream` is the name of the purpose. In an episode, a policy builds one layer path (the sequence of layers of a
        new model). The seed differs between episodes, purposes and searches. In version 1 of the searcher, it does not
        depend on the purpose.
        """
        return generator_of(self._stream(stream), number).initial_seed()

    def _stream(self, name: str) -> int | str:
        """Seed of the random numbers for the purpose called `name`.

        The seed differs between purposes and searches. In version 1 of the searcher, it is the seed of the search.
        """
        return self._seed if self.options.version == 1 else f"{self._seed} {name}"

    def _new(self, iteration: int) -> BaseLearner:
        """Make a new learner (networks and optimizers) for the policy that builds the episodes of `iteration`.

        An iteration is a group of episodes (sequences of layers that a policy builds). If there are several policies,
        they take turns, an iteration each.
        """
        options, policy = self.options, self.policy_of(iteration)
        given: dict[str, Any] = {"descriptors": self._descriptors}
        if options.version == 1:
            return FirstLearner(self.paths, options.networks, options.learner, seed=self._seed + policy, **given)
        seed = self._stream(f"policy {policy}")
        given |= {"discounts_end": options.version >= FIRST_WITH_DISCOUNTED_END}
        return Learner(self.paths, options.networks, options.learner, seed=seed, **given)

    def _learner(self, iteration: int, source: int | None) -> BaseLearner:
        """Make a learner (networks and optimizers) with the saved state of a policy after an iteration.

        The policy is the one that builds the episodes of `iteration`. `source` is the iteration after which the policy
        was saved. If `source` is None, the learner has the state with which the policy began the search: the state of a
        given checkpoint, or new networks.
        """
        learner = self._new(iteration)
        if source is not None:
            learner.restore(self.saved[source])
        elif self._start:
            learner.restore(self._start[self.policy_of(iteration)], remembers=False)
        return learner

    def _exploration(self, turn: int) -> float:
        options = self.options
        if self._start:
            return options.exploration
        passed = turn - options.warm_up
        if passed < 0:
            return 1.0
        return 1.0 + (options.exploration - 1.0) * min(1.0, passed / max(options.explored, 1))
