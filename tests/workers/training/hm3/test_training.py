"""Whole trainings of HM3's policy: the networks that play each episode, and any number of runners.

Some are on the toy environment with its deceptive optimum.
"""

from __future__ import annotations

import hashlib
import io
import itertools
import random
import statistics
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from search_spaces.spaces.layer_paths import LayerPaths
from tests.benchmarks.bench_hm3_toy import LURE, NUM_ACTIONS, NUM_STEPS, Toy, episodes
from workers.training.hm3.episodes import Role
from workers.training.hm3.learner import LearnerOptions
from workers.training.hm3.networks import NetworkOptions
from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

PATHS = LayerPaths(("a", "b"), num_layers=3, min_length=2, max_length=4, max_jump=1)
OTHER = (3, 4, 5)  # no path that the policy plays first
VECTORS = ((1.0, 0.0), (0.5, 0.5), (0.0, 1.0))


def training(
    *,
    saved: dict[int, bytes] | None = None,
    episodes: int = 4,
    explored: int = 2,
    draws_paths: bool = False,
    is_conditioned: bool = False,
    learns: bool = True,
    version: int = 3,
    **learner: Any,
) -> PolicyTraining:
    """A training in a small space; `learner` as for `LearnerOptions`."""
    options = PolicyTrainingOptions(
        episodes=episodes,
        warm_up=1,
        explored=explored,
        exploration=0.1,
        draws_paths=draws_paths,
        is_conditioned=is_conditioned,
        learns=learns,
        version=version,
        learner=LearnerOptions(gamma=0.99 if version == 1 else 1.0, **learner),
        networks=NetworkOptions(num_objectives=2, hidden_size=8, sees_preference=is_conditioned),
    )
    return PolicyTraining(PATHS, options, seed=7, preferences=VECTORS, saved=saved)


def outcome(path: tuple[int, ...]) -> list[float]:
    return [sum(step < 3 for step in path) / len(path), 1 / len(path)]


def paths_of(own: PolicyTraining, num: int, *, runners: int = 1, restarts: bool = False) -> list[tuple[int, ...]]:
    """The paths of a search whose episodes arrive in random order, as from several runners."""
    found: dict[int, tuple[int, ...]] = {}
    num_finished = 0
    draw = random.Random(runners)
    waiting: list[int] = []
    number = 0
    while len(found) < num:
        while len(waiting) < runners and number < num:
            while num_finished < own.num_needed(number) and set(own.numbers_in(num_finished)) <= set(found):
                outcomes = torch.tensor([outcome(found[each]) for each in own.numbers_in(num_finished)])
                own.learn(num_finished, outcomes)
                num_finished += 1
                if restarts:
                    own = PolicyTraining(PATHS, own.options, seed=7, preferences=VECTORS, saved=own.saved)
            if num_finished < own.num_needed(number):
                break
            waiting.append(number)
            number += 1
        chosen = waiting.pop(draw.randrange(len(waiting)))
        found[chosen] = own.play(chosen).path
    return [found[each] for each in range(num)]


@pytest.mark.slow
@pytest.mark.parametrize("is_conditioned", [False, True])
def test_runners_and_restarts_change_nothing(is_conditioned: bool) -> None:
    """A search is the same with any number of runners and after restarts."""
    num = 48 if not is_conditioned else 28
    for draws_paths in (False, True):
        # Few mini-batches: what an update begins with and leaves behind does not depend on their number.
        new = partial(
            training, is_conditioned=is_conditioned, draws_paths=draws_paths, epochs=2, mini_batches=2, recalled=4
        )
        expected = paths_of(new(), num)
        assert paths_of(new(), num, runners=2) == expected
        assert paths_of(new(), num, runners=4, restarts=True) == expected


# The paths of each kind of search, as the last program with version 1 alone built them.
PATHS_OF_VERSION_1 = {
    (False, False): "0f571948daf9f1f5",
    (False, True): "a9ab47a0b0f95663",
    (True, False): "8cb3b2d74fc12ef2",
    (True, True): "3468a69aef5946ea",
}


@pytest.mark.parametrize("is_conditioned", [False, True])
def test_searches_of_version_1_continue_as_they_began(is_conditioned: bool) -> None:
    for draws_paths in (False, True):
        own = training(is_conditioned=is_conditioned, draws_paths=draws_paths, version=1)
        found = hashlib.sha256(repr(paths_of(own, 36)).encode()).hexdigest()[:16]
        assert found == PATHS_OF_VERSION_1[is_conditioned, draws_paths]


def first_numbers(*, seed: int, policy: int, version: int = 3) -> tuple[float, ...]:
    """The first random numbers of a policy's networks, of its episodes and of its drawn paths."""
    own = training(draws_paths=True, version=version)
    own = PolicyTraining(PATHS, own.options, seed=seed, preferences=VECTORS)
    built = own._new(policy).networks.start[0].item()
    noise = own._built(own._new(0), [Role(0, VECTORS[0], 1.0)], k=9)[0].protos[0, 0].item()
    proposed = own._built(own._new(0), [Role(0, VECTORS[0], 1.0)], k=9, stream="proposals")[0]
    return built, noise, proposed.protos[0, 0].item()


def test_random_numbers_of_policies_and_studies_differ() -> None:
    """In version 1, policy 1 of the seed 0 began with the networks of policy 0 of the seed 1."""
    assert first_numbers(seed=0, policy=1, version=1)[0] == first_numbers(seed=1, policy=0, version=1)[0]
    streams = [first_numbers(seed=seed, policy=policy) for seed in range(3) for policy in range(3)]
    assert len({built for built, *_ in streams}) == 9
    assert len({number for _, *numbers in streams for number in numbers}) == 6  # episodes and proposals of three seeds
    old = training(is_conditioned=True, draws_paths=True, version=1)
    new = training(is_conditioned=True, draws_paths=True)
    assert [old._learning(n) for n in range(8)] != [new._learning(n) for n in range(8)]


def test_policies_take_turns() -> None:
    """Policies take turns, and a conditioned one plays every preference vector."""
    own = training()
    assert [own.preference_of(n) for n in (0, 3, 4, 8, 12)] == [*VECTORS[:1] * 2, VECTORS[1], VECTORS[2], VECTORS[0]]
    assert (own.num_policies, own.policy_of(4), own.turn_of(4)) == (3, 1, 1)
    # Each policy has learned from all its iterations: the last one of it ended before the one that runs.
    assert [own.source_of(iteration, newest=iteration - 2) for iteration in (2, 5, 6, 7)] == [None, None, 3, 4]
    conditioned = training(is_conditioned=True)
    assert [conditioned.preference_of(n) for n in range(4)] == [*VECTORS, VECTORS[0]]
    assert conditioned.num_policies == 1
    assert [conditioned.source_of(i, newest=i - 2) for i in range(5)] == [None, None, None, 1, 2]


def test_at_first_whole_paths_are_drawn_as_the_space_draws() -> None:
    """All in the warm-up, half of them halfway to the end of the exploration, none after it."""
    own = training(is_conditioned=True, draws_paths=True, episodes=40, explored=4)
    roles = [own._learning(number) for number in range(240)]
    drawn = [sum(role.path is not None for role in roles[40 * i : 40 * (i + 1)]) for i in range(6)]
    assert drawn[0] == drawn[1] == 40
    assert 10 <= drawn[3] <= 30
    assert drawn[5] == 0
    assert {role.exploration for role in roles} == {own.options.exploration}
    paths = [role.path for role in roles if role.path is not None]
    assert len(set(paths)) > 10
    assert all(PATHS.contains(path) for path in paths)
    assert [own.play(number).path for number in range(40)] == paths[:40]
    again = training(is_conditioned=True, draws_paths=True, episodes=40, explored=4)
    assert [again._learning(number) for number in range(240)] == roles


def test_what_is_saved_is_what_is_needed() -> None:
    own = training(is_conditioned=True)
    paths_of(own, 28)
    assert sorted(own.saved) == [3, 4]
    with pytest.raises(KeyError):
        training(is_conditioned=True).play(27)


def test_a_saved_policy_proposes_paths_for_any_preference() -> None:
    own = training(is_conditioned=True)
    paths_of(own, 16)
    content = own.saved[max(own.saved)]
    found = own.proposals(content, preference=(0.3, 0.7), count=4)
    assert len(found) == len(set(found)) == 4
    assert all(PATHS.contains(path) for path in found)
    assert training(is_conditioned=True).proposals(content, preference=(0.3, 0.7), count=2) == found[:2]


def test_nothing_is_learned_in_the_warm_up() -> None:
    own = training()
    assert [own.learn(i, torch.zeros(4, 2)) is None for i in range(4)] == [True, True, True, False]


def test_scored_episodes_are_learned_from() -> None:
    """A scored episode is learned from where another one is played."""
    outcomes = torch.tensor([[0.1, 0.4], [0.2, 0.3], [0.3, 0.2], [0.4, 0.1]])
    saved = []
    for has_others in (False, True):
        own = training(is_conditioned=True)
        played = [own.play(number).path for number in own.numbers_in(1)]
        others = [OTHER, *played[1:]] if has_others else played
        own.learn(1, outcomes, paths=others)
        saved.append(own.saved[1])
        first = own._play(1, None, paths=others)[4]
        assert first.path == others[0]
        assert len(first.protos) == len(first.steps) == len(first.path) + (len(first.path) < PATHS.longest)
    assert saved[0] != saved[1]
    plain = training(is_conditioned=True)
    plain.learn(1, outcomes)
    assert plain.saved[1] == saved[0]


def test_conditioned_policy_learns_for_the_vector_of_the_path() -> None:
    """A path may have been scored for another vector than that of its episode; the value network learns it for that."""
    own = training(is_conditioned=True)
    paths = [OTHER, *(own.play(number).path for number in own.numbers_in(1)[1:])]
    own.learn(1, torch.zeros(4, 2), paths=paths, vectors=[2, None, None, None])
    memory = torch.load(io.BytesIO(own.saved[1]), weights_only=True)["memory"]
    expected = [VECTORS[2], *(own.preference_of(number) for number in own.numbers_in(1)[1:])]
    assert expected[0] != own.preference_of(own.numbers_in(1)[0])
    assert list(map(tuple, memory["preferences"].tolist())) == expected


def test_the_same_path_may_be_merged_for_another_vector() -> None:
    """A mutant may have the path that the policy built, with merged layers of another vector."""
    own = training(is_conditioned=True)
    paths = [own.play(number).path for number in own.numbers_in(1)]
    own.learn(1, torch.zeros(4, 2), paths=paths, vectors=[2, None, None, None])
    memory = torch.load(io.BytesIO(own.saved[1]), weights_only=True)["memory"]
    assert tuple(memory["preferences"][0].tolist()) == VECTORS[2] != own.preference_of(own.numbers_in(1)[0])


# The toy environment.


def test_the_optimum_of_the_toy_deceives() -> None:
    toy = Toy(0)
    assert toy.table.shape == (NUM_ACTIONS,) * NUM_STEPS
    assert toy.score(toy.best) == 1.0
    assert int((toy.table == 1.0).sum()) == 1
    for lure in toy.paths[1:]:
        assert toy.score(lure) == pytest.approx(LURE)
        # No one exchanged step leads on.
        for at in range(NUM_STEPS):
            neighbours = toy.table[(*lure[:at], slice(None), *lure[at + 1 :])]
            assert neighbours.max() == pytest.approx(LURE)


@pytest.mark.slow
def test_a_policy_learns_in_a_small_toy() -> None:
    toy = Toy(0, num_steps=4, num_actions=6, num_lures=2)
    options = PolicyTrainingOptions(episodes=16, explored=8)
    # The policy has learned after the 8 iterations of exploration.
    paths = list(itertools.islice(episodes(toy, seed=0, num_models=2, options=options), 14 * 16))
    scores = [toy.score(path) for path in paths]
    assert statistics.fmean(scores[-48:]) > statistics.fmean(scores[:48]) + 0.1


def trained() -> bytes:
    """A conditioned policy after two iterations."""
    own = training(is_conditioned=True)
    paths_of(own, 16)
    return own.saved[max(own.saved)]


def begun(start: bytes, *, saved: dict[int, bytes] | None = None, learns: bool = True) -> PolicyTraining:
    options = replace(training(is_conditioned=True).options, learns=learns)
    return PolicyTraining(PATHS, options, seed=7, preferences=VECTORS, saved=saved, start=(start,))


def test_given_policies_play_from_the_start() -> None:
    """Given policies play and learn from the first iteration on."""
    start = trained()
    own = begun(start)
    assert own.is_learned_from(0)
    first = [own.play(number).path for number in range(4)]
    assert first != [training(is_conditioned=True).play(number).path for number in range(4)]
    own.learn(0, torch.tensor([outcome(path) for path in first]))
    # What it has learned comes on top of what it was given, and is the same after a restart.
    assert own.saved[0] != start
    assert paths_of(begun(start), 12) == paths_of(begun(start), 12, runners=3)
    again = begun(start, saved=own.saved)
    assert again.play(8).path == begun(start, saved=own.saved).play(8).path


def test_fixed_policies_propose_best_first() -> None:
    """Policies that do not learn propose the best path of each vector first."""
    start = trained()
    own = begun(start, learns=False)
    assert [own.num_needed(number) for number in (0, 50)] == [0, 0]
    best = [own.proposals(start, preference=vector, count=1)[0] for vector in VECTORS]
    assert [own.play(number).path for number in range(3)] == best
    assert [own.preference_of(number) for number in range(4)] == [*VECTORS, VECTORS[0]]
    assert not own.is_learned_from(5)
    assert len({own.play(number).path for number in range(3, 40)}) > 1  # then with noise


def test_unfit_policies_are_refused() -> None:
    """Policies of another shape or number are refused with their sizes."""
    start = trained()
    other = LayerPaths(("a", "b", "c"), num_layers=3, min_length=2, max_length=4, max_jump=1)
    options = training(is_conditioned=True).options
    own = PolicyTraining(other, options, seed=7, preferences=VECTORS, start=(start,))
    with pytest.raises(ValueError, match=r"networks of other shapes: models\.weight \[2, 16\] instead of \[3, 16\]"):
        own.play(0)
    with pytest.raises(ValueError, match="1 policies to begin with; expected 3"):
        PolicyTraining(PATHS, training().options, seed=7, preferences=VECTORS, start=(start,))
    with pytest.raises(ValueError, match="0 policies to begin with; expected 1"):
        training(is_conditioned=True, learns=False)
