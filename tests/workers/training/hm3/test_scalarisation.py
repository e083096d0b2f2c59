"""Scalarisations of outcomes by objective, and policies that learn with the Tchebycheff function."""

from __future__ import annotations

import pytest
import torch

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.learner import Learner, LearnerOptions
from workers.training.hm3.networks import NetworkOptions
from workers.training.hm3.scalarisation import Scalarisation, scalarised
from workers.training.hm3.training import PolicyTraining, PolicyTrainingOptions

PATHS = LayerPaths(("a", "b"), num_layers=3, min_length=2, max_length=4, max_jump=1)


def test_weighted_sums_and_tchebycheffs_function() -> None:
    outcomes = torch.tensor([[0.9, 0.1], [0.4, 0.4], [0.1, 0.8]])
    preference = torch.tensor([0.25, 0.75])
    torch.testing.assert_close(scalarised(outcomes, preference, None), torch.tensor([0.3, 0.4, 0.625]))
    found = scalarised(outcomes, preference, torch.tensor([0.9, 0.8]))
    torch.testing.assert_close(found, torch.tensor([-0.75 * 0.7, -0.75 * 0.4, -0.25 * 0.8]))


def test_an_objective_of_weight_0_breaks_ties() -> None:
    found = scalarised(torch.tensor([[0.5, 0.1], [0.5, 0.3]]), torch.tensor([1.0, 0.0]), torch.tensor([0.5, 0.9]))
    assert found[0] < found[1]


def training(scalarisation: Scalarisation) -> PolicyTraining:
    options = PolicyTrainingOptions(
        episodes=8,
        is_conditioned=True,
        learner=LearnerOptions(scalarisation=scalarisation),
        networks=NetworkOptions(num_objectives=2, hidden_size=8, sees_preference=True),
    )
    return PolicyTraining(PATHS, options, seed=7, preferences=((0.5, 0.5),))


@pytest.mark.parametrize("scalarisation", Scalarisation)
def test_the_ideal_point_is_the_best_known_outcome(scalarisation: Scalarisation) -> None:
    own = training(scalarisation)
    episodes = [own.play(number) for number in own.numbers_in(1)]
    outcomes = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
    learner = Learner(PATHS, own.options.networks, own.options.learner, seed=0)
    before = learner.ideal
    learner.update(episodes, outcomes)
    if scalarisation is Scalarisation.WEIGHTED_SUM:
        assert before is None
        assert learner.ideal is None
    else:
        assert before is not None
        assert before.tolist() == [1.0, 1.0]
        assert learner.ideal is not None
        assert learner.ideal.tolist() == outcomes.amax(dim=0).tolist()


def test_policies_learn_otherwise_by_tchebycheffs_function() -> None:
    outcomes = torch.rand(8, 2, generator=torch.Generator().manual_seed(0))
    saved = []
    for scalarisation in Scalarisation:
        own = training(scalarisation)
        own.learn(1, outcomes)
        saved.append(own.saved[1])
    assert saved[0] != saved[1]
