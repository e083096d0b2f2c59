"""Scales of layers, which a policy draws and learns together with the path (the actor in HM3's equation 16)."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest
import torch

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.episodes import Role, play
from workers.training.hm3.learner import LearnerOptions
from workers.training.hm3.networks import NetworkOptions, Networks
from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

PLAIN = LayerPaths(("a", "b"), num_layers=3, min_length=2, max_length=4, max_jump=1)
QUICK = LearnerOptions(epochs=1, mini_batches=1, recalled=4)

# Sum of the numbers in new networks with the seed 0, from a version without scales of policies.
FIRST_SUM = -10.3084

SCALED = replace(PLAIN, scale_range=(0.8, 1.5))


def networks(paths: LayerPaths, *, scales: bool) -> Networks:
    torch.manual_seed(0)
    return Networks(paths, NetworkOptions(hidden_size=8, scales=scales))


def roles(**given: object) -> list[Role]:
    return [Role(number, (1.0,), 0.1, **given) for number in range(12)]  # type: ignore[arg-type]


def test_a_policy_draws_a_scale_for_each_layer_but_the_last() -> None:
    own = networks(SCALED, scales=True)
    played = play(own, roles(), seed=1, k=3)
    for each in played:
        assert len(each.scales) == len(each.path) - 1
        assert all(0.8 <= scale <= 1.5 for scale in each.scales)
        drawn = each.protos[1 : len(each.path), -1].tolist()
        assert list(each.scales) == [SCALED.scale_of(place) for place in drawn]
    assert [each.scales for each in play(own, roles(), seed=1, k=3)] == [each.scales for each in played]
    # Before anything is learned, layers without noise stay as they are.
    (quiet,) = play(own, [Role(0, (1.0,), 0.0, noise=0.0)], seed=1, k=3)
    assert quiet.scales == pytest.approx((1.0,) * (len(quiet.path) - 1), abs=0.1)


def test_given_paths_have_given_scales_or_those_of_the_policy() -> None:
    own = networks(SCALED, scales=True)
    path, scales = (0, 4, 5), (0.9, 1.25)
    for each in play(own, roles(path=path, scales=scales), seed=1, k=3):
        assert each.path == path
        assert each.scales == pytest.approx(scales, abs=1e-5)
        places = [SCALED.place_of(scale) for scale in scales]
        assert each.protos[1:3, -1].tolist() == pytest.approx(places, abs=1e-5)
    drawn = {each.scales for each in play(own, roles(path=path), seed=1, k=3)}
    assert len(drawn) == 12


def test_networks_without_scales_are_those_of_earlier_versions() -> None:
    """The policy network has no output more, and its random numbers are the same."""
    own = networks(PLAIN, scales=False)
    assert own.log_std.shape == (16,)
    assert own.policy[-1].out_features == 16
    assert all(each.scales == () for each in play(own, roles(), seed=1, k=3))
    numbers = dict(own.named_parameters())
    total = float((numbers["log_std"].sum() + numbers["policy.0.weight"].sum()).detach())
    assert total == pytest.approx(FIRST_SUM, abs=1e-4)


def test_scales_are_learned_with_the_path() -> None:
    """A policy learns to draw small scales if small scales have the best outcomes for every path."""
    options = PolicyTrainingOptions(
        episodes=16,
        explored=0,
        exploration=0.1,
        learner=LearnerOptions(learning_rate=3e-2, epochs=4, mini_batches=2, recalled=8, target_kl=0.1),
        networks=NetworkOptions(hidden_size=8, scales=True),
    )
    training = PolicyTraining(SCALED, options, seed=0, preferences=((1.0,),))
    means = []
    for iteration in range(16):
        played = [training.play(number) for number in training.numbers_in(iteration)]
        means.append(statistics.fmean(scale for each in played for scale in each.scales))
        outcomes = torch.tensor([[1.5 - statistics.fmean(each.scales)] for each in played])
        training.learn(iteration, outcomes)
    assert statistics.fmean(means[-3:]) < statistics.fmean(means[:3]) - 0.1


def test_scales_that_had_the_outcomes_are_learned_from() -> None:
    """An episode that was scored with other scales teaches these, not those that the policy drew."""
    options = PolicyTrainingOptions(episodes=4, learner=QUICK, networks=NetworkOptions(hidden_size=8, scales=True))

    def learned(**given: object) -> bytes:
        training = PolicyTraining(SCALED, options, seed=0, preferences=((1.0,),))
        for iteration in (0, 1):
            played = [training.play(number) for number in training.numbers_in(iteration)]
            paths, scales = [each.path for each in played], [each.scales for each in played]
            changed = {"paths": paths, "scales": scales, **(given if iteration else {})}
            training.learn(iteration, torch.arange(4.0)[:, None] / 4, **changed)  # type: ignore[arg-type]
        return training.saved[1]

    paths = [(0, 4, 5)] * 4
    ones, others = ([(scale,) * 2] * 4 for scale in (1.0, 0.9))
    assert learned() == learned()
    assert learned(paths=paths, scales=ones) == learned(paths=paths, scales=ones)
    assert learned(paths=paths, scales=ones) != learned(paths=paths, scales=others)
