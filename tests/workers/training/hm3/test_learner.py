"""A policy's trust region: ratios that begin at one, the end of its epochs, and the effect of the encoder's learning.

The learner of version 1, which has none of these, is beside it where it differs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.distributions import kl_divergence

from search_spaces.spaces.layer_paths import LayerPaths
from workers.errors import TrainingFailed
from workers.training.hm3.actions import Action, LegalSteps, distribution
from workers.training.hm3.episodes import Episode, Role, play
from workers.training.hm3.first_learner import FirstLearner
from workers.training.hm3.learner import BaseLearner, EpisodeBatch, Learner, LearnerOptions, action_in
from workers.training.hm3.networks import NetworkOptions
from workers.training.hm3.pool import allowed_steps, stop_of

PATHS = LayerPaths(("a", "b"), num_layers=4, min_length=3, max_length=6, max_jump=1)
ACTIONS = list(Action)
SMALL = NetworkOptions(hidden_size=16)
SHORT = {"epochs": 4, "recalled": 16}


def learner(action: Action = Action.WOLPERTINGER, **options: object) -> Learner:
    given = LearnerOptions(**{"action": action, **SHORT, **options})  # type: ignore[arg-type]
    return Learner(PATHS, SMALL, given, seed=3)


def episodes_of(own: BaseLearner, *, first: int = 0, num: int = 12) -> list[Episode]:
    roles = [Role(number, (1.0,), 0.2) for number in range(first, first + num)]
    return play(own.networks, roles, seed=1, k=4, action=own.options.action)


def outcomes_of(episodes: list[Episode]) -> torch.Tensor:
    return torch.tensor([[sum(step < 4 for step in episode.path) / len(episode.path)] for episode in episodes])


def updated(own: BaseLearner, times: int) -> list[Episode]:
    """Let a learner learn as in a search: from episodes built by the networks before the last update."""
    waiting = episodes_of(own)
    for turn in range(1, times + 1):
        following = episodes_of(own, first=12 * turn)
        own.update(waiting, outcomes_of(waiting))
        waiting = following
    return waiting


def actions_of(own: Learner, episodes: list[Episode]) -> torch.distributions.Distribution:
    batch = EpisodeBatch.of(episodes, outcomes_of(episodes))
    with torch.no_grad():
        states = own.networks.states(batch.steps)[:, :-1]
        legal = LegalSteps(PATHS).before(batch.steps)
        return distribution(own.networks, states, batch.preferences[:, None], legal, own.options.action)


@pytest.mark.parametrize("action", ACTIONS)
def test_ratios_begin_at_one(action: Action) -> None:
    """The ratios of an update refer to the policy at its start, not to the one that built the episodes.

    With a clip and a learning rate near 0, the policy's mean loss is that of the ratio 1: minus the mean advantage, 0.
    """
    own = learner(action)
    waiting = updated(own, 3)
    own.options = replace(own.options, clip=1e-6, epochs=1, mini_batches=1)
    for optimizer in own._optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] = 1e-9
    found = own.update(waiting, outcomes_of(waiting))
    assert found.policy_loss == pytest.approx(0.0, abs=1e-5)
    assert found.kl == pytest.approx(0.0, abs=1e-6)


def test_ratios_of_version_1_did_not() -> None:
    """The episodes of version 1 are of other networks, and the encoder moves under their policy."""
    own = FirstLearner(PATHS, SMALL, LearnerOptions(), seed=3)
    waiting = updated(own, 4)
    batch = EpisodeBatch.of(waiting, outcomes_of(waiting))
    ones = torch.ones(batch.steps.shape)
    assert own.losses(batch, ones, batch.remembered).kl.item() > 0.1


@pytest.mark.parametrize("action", ACTIONS)
def test_the_policy_stops_at_the_target(action: Action) -> None:
    """The epochs end with the first step after which the KL divergence is above the target."""
    steps = {}
    for target in (1e-6, 0.02, 1e6):
        own = learner(action, target_kl=target)
        waiting = updated(own, 2)
        before = actions_of(own, waiting)
        keeps_encoder = own._improve_value
        own._improve_value = lambda *_: ([torch.zeros(())], 0.0)  # type: ignore[method-assign]
        found = own.update(waiting, outcomes_of(waiting))
        own._improve_value = keeps_encoder  # type: ignore[method-assign]
        assert found.policy_steps is not None
        steps[target] = found.policy_steps
        is_step = EpisodeBatch.of(waiting, outcomes_of(waiting)).is_step
        kl = float(kl_divergence(before, actions_of(own, waiting))[is_step].mean())
        assert found.kl == pytest.approx(kl, rel=1e-3, abs=1e-6)
        assert found.clipped is not None
        assert 0 <= found.clipped <= 1
        if target == 0.02:
            assert found.kl < 3 * target
    assert steps[1e-6] == 1
    assert steps[1e-6] <= steps[0.02] <= steps[1e6] == 16


@pytest.mark.parametrize("action", ACTIONS)
def test_the_policy_keeps_its_actions_while_the_encoder_learns(action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the steps that keep its actions, the encoder's learning moves a policy several times as far."""

    def drift(*, keeps: bool) -> float:
        own = learner(action, target_kl=1e-6, epochs=12)
        torch.nn.init.normal_(own.networks.policy[2].weight, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
        waiting = episodes_of(own)
        if not keeps:
            descend = own._descend
            monkeypatch.setattr(own, "_descend", lambda o, loss, what: "drift" in what or descend(o, loss, what))
        found = own.update(waiting, outcomes_of(waiting)).drift
        assert found is not None
        return found

    assert drift(keeps=False) > 3 * drift(keeps=True)


def test_the_policy_phase_leaves_encoder_and_value_network_alone() -> None:
    """Policy network and value network have optimizers of their own, which share no number."""
    own = learner()
    parts = [{id(p) for group in o.param_groups for p in group["params"]} for o in own._optimizers.values()]
    assert not parts[0] & parts[1]
    assert parts[0] | parts[1] == {id(parameter) for parameter in own.networks.parameters()}
    assert parts[0] == {id(own.networks.log_std), *map(id, own.networks.policy.parameters())}


def test_a_restart_is_one_of_the_policy_network_alone() -> None:
    own = learner()
    updated(own, 2)
    before = {name: value.clone() for name, value in own.networks.state_dict().items()}
    own.restart()
    after = own.networks.state_dict()
    changed = {name for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed
    assert all(name == "log_std" or name.startswith("policy.") for name in changed)
    assert torch.equal(after["log_std"], torch.full_like(after["log_std"], own.networks.options.first_std).log())
    updated(own, 1)  # its optimizer begins anew, too


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_values_are_outcomes_discounted_by_the_steps_left(gamma: float) -> None:
    """The value network learns the outcome times gamma to the power of the steps that are left."""
    paths = LayerPaths(("a", "b"), num_layers=4, min_length=4, max_length=4, max_jump=1)
    own = Learner(paths, SMALL, LearnerOptions(gamma=gamma, epochs=1, mini_batches=1), seed=3)
    torch.nn.init.zeros_(own.networks.value[2].weight)  # type: ignore[arg-type]
    found = own.update(episodes_of(own), torch.ones(12, 1))
    # It begins with the mean outcome, 1, in units of SMALLEST_SPREAD, 0.001.
    expected = sum(((1 - gamma**left) / 0.001) ** 2 for left in range(5)) / 5
    assert found.value_loss == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_an_advantage_does_not_depend_on_the_length_of_the_path() -> None:
    """The outcome is paid at the end without discount; where a value says nothing, all steps have equal advantages."""
    own = learner(gae_lambda=1.0)
    torch.nn.init.zeros_(own.networks.value[2].weight)  # type: ignore[arg-type]
    episodes = episodes_of(own)
    assert len({len(episode.steps) for episode in episodes}) > 1
    batch = EpisodeBatch.of(episodes, torch.arange(12.0)[:, None])
    found = own._advantages(batch)
    spread = torch.tensor([float(found[row, :length].std(unbiased=False)) for row, length in enumerate(batch.lengths)])
    assert spread.max() < 1e-5
    assert found[:, 0].diff().allclose(found[1, 0] - found[0, 0], atol=1e-5)


@pytest.mark.parametrize("discounts_end", [True, False])
def test_outcome_that_was_expected_is_no_advantage(discounts_end: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """No step has an advantage if the value network knows the outcome; in version 3 the last step had one."""
    gamma = 0.9
    own = Learner(PATHS, SMALL, LearnerOptions(gamma=gamma), seed=3, discounts_end=discounts_end)
    batch = EpisodeBatch.of(episodes_of(own), torch.full((12, 1), 0.5))
    expected = 0.5 * gamma ** batch.remembered.num_left.clamp(min=0)
    monkeypatch.setattr(own.networks, "outcomes", lambda *_: expected[:, :, None])
    monkeypatch.setattr("workers.training.hm3.learner.normalised", lambda advantages, _: advantages)
    found = own._advantages(batch)
    last = found[range(12), [length - 1 for length in batch.lengths]]
    assert torch.allclose(last, torch.tensor(0.0 if discounts_end else 0.5 * (1 - gamma)), atol=1e-6)
    assert discounts_end == bool(found.abs().max() < 1e-6)


# Categorical policies.


def test_legal_steps_are_those_of_each_path() -> None:
    for paths in (PATHS, LayerPaths(("a", "b"), 9, 1, 4, 2), LayerPaths(("a",), 3, 1, 5, None)):
        own = Learner(paths, NetworkOptions(), LearnerOptions(), seed=0)
        roles = [Role(number, (1.0,), 1.0) for number in range(20)]
        episodes = play(own.networks, roles, seed=1, k=99)
        steps = EpisodeBatch.of(episodes, torch.zeros(20, 1)).steps
        found = LegalSteps(paths).before(steps)
        for row, episode in enumerate(episodes):
            for at in range(len(episode.steps)):
                assert torch.equal(found[row, at], allowed_steps(paths, episode.steps[:at].tolist()))
    assert LegalSteps(PATHS).most == 6  # three layers of two models; at the last layer two, and the end


def test_a_categorical_policy_draws_by_its_probabilities() -> None:
    own = learner(Action.CATEGORICAL)
    torch.nn.init.normal_(own.networks.policy[2].bias, generator=torch.Generator().manual_seed(0))  # type: ignore[arg-type]
    roles = [Role(number, (1.0,), 0.0) for number in range(4000)]
    episodes = play(own.networks, roles, seed=1, k=4, action=Action.CATEGORICAL)
    assert all(PATHS.contains(episode.path) for episode in episodes)
    counts = torch.bincount(torch.stack([episode.steps[0] for episode in episodes]), minlength=stop_of(PATHS) + 1)
    (expected,) = actions_of(own, episodes[:1]).probs[:, 0]  # type: ignore[attr-defined]
    assert expected.max() > 0.3
    assert torch.allclose(counts / 4000, expected, atol=0.03)
    greedy = play(own.networks, [Role(0, (1.0,), 0.0, noise=0.0)], seed=1, k=4, action=Action.CATEGORICAL)
    assert int(greedy[0].steps[0]) == int(expected.argmax())
    explored = play(own.networks, [replace(r, exploration=1.0) for r in roles], seed=1, k=4, action=Action.CATEGORICAL)
    counts = torch.bincount(torch.stack([episode.steps[0] for episode in explored]), minlength=stop_of(PATHS) + 1)
    assert torch.allclose(counts[counts > 0] / 4000, torch.tensor(0.25), atol=0.03)


@pytest.mark.parametrize("action", ACTIONS)
def test_an_update_makes_what_scored_more_likely(action: Action, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy network learns, not only the value network, which chooses among the neighbours of Wolpertinger."""
    own = learner(action, target_kl=0.1)
    episodes = episodes_of(own, num=48)
    outcomes = outcomes_of(episodes)
    batch = EpisodeBatch.of(episodes, outcomes)
    taken = batch.steps if action is Action.CATEGORICAL else batch.protos
    before = actions_of(own, episodes).log_prob(taken)
    monkeypatch.setattr(own, "_improve_value", lambda *_: ([torch.zeros(())], 0.0))  # the states stay
    own.update(episodes, outcomes)
    changes = torch.where(batch.is_step, actions_of(own, episodes).log_prob(taken) - before, 0.0)
    changes_per_step = changes.sum(dim=1) / batch.is_step.sum(dim=1)
    is_better = outcomes[:, 0] > outcomes[:, 0].median()
    assert is_better.any()
    assert changes_per_step[is_better].mean() > changes_per_step[~is_better].mean() + 0.01


@pytest.mark.parametrize("action", ACTIONS)
def test_a_policy_learns_what_scores(action: Action) -> None:
    own = learner(action)
    updated(own, 12)
    new = learner(action)
    scores = [float(outcomes_of(episodes_of(each, first=9000)).mean()) for each in (new, own)]
    assert scores[1] > scores[0] + 0.2


def test_policies_of_another_action_are_refused() -> None:
    own = learner(Action.CATEGORICAL)
    content = own.to_bytes()
    assert action_in(content) is Action.CATEGORICAL
    with pytest.raises(ValueError, match="a policy with action: categorical; this study's has action: wolpertinger"):
        learner().restore(content)
    first = FirstLearner(PATHS, SMALL, LearnerOptions(), seed=3)
    assert action_in(first.to_bytes()) is Action.WOLPERTINGER
    again = learner()
    again.restore(first.to_bytes())
    assert torch.equal(again.networks.stop, first.networks.stop)


# Numbers that are not finite.


@pytest.mark.parametrize("kind", [FirstLearner, Learner])
def test_numbers_that_are_not_finite_end_the_learning(kind: type[BaseLearner]) -> None:
    def new() -> BaseLearner:
        return kind(PATHS, NetworkOptions(), LearnerOptions(), seed=3)

    own = new()
    waiting = episodes_of(own)
    outcomes = outcomes_of(waiting)
    outcomes[3] = torch.nan
    with pytest.raises(TrainingFailed, match="hm3: an outcome is nan in update 1 of a policy"):
        own.update(waiting, outcomes)
    own = new()
    with torch.no_grad():
        own.networks.policy[2].bias[0] = torch.inf  # type: ignore[operator]
    message = r"hm3: .*loss is nan in update 1 .*below search.hm3.learning_rate=0.003"
    with pytest.raises(TrainingFailed, match=message):
        own.update(waiting, outcomes_of(waiting))
    with pytest.raises(TrainingFailed, match=r"a number of the networks \(.*\) is (inf|nan) in update 1"):
        new().restore(own.to_bytes())
