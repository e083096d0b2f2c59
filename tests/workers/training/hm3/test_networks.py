"""From paths to states and steps: Wolpertinger by hand, episodes within the limits, and gradients of all networks."""

from __future__ import annotations

import io

import pytest
import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.episodes import Episode, Role, play
from workers.training.hm3.first_learner import FirstLearner
from workers.training.hm3.learner import BaseLearner, EpisodeBatch, Learner, LearnerOptions
from workers.training.hm3.networks import NetworkOptions, Networks
from workers.training.hm3.pool import allowed_steps, stop_of
from workers.training.hm3.ppo import log_density
from workers.training.hm3.wolpertinger import choose, nearest

PATHS = LayerPaths(("a", "b"), num_layers=4, min_length=3, max_length=6, max_jump=1)
SQUARE = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0], [1.0, 1.0], [3.0, 0.0]])
EVERY = torch.ones(5, dtype=torch.bool)


def networks(paths: LayerPaths = PATHS, seed: int = 0, **options: object) -> Networks:
    torch.manual_seed(seed)
    return Networks(paths, NetworkOptions(**options))  # type: ignore[arg-type]


def played(number: int, net: Networks | None = None, **options: object) -> Episode:
    chosen: dict[str, object] = {"exploration": 0.5, "preference": (1.0,), **options}
    seed, k = int(str(chosen.pop("seed", 1))), int(str(chosen.pop("k", 3)))
    return play(net or networks(), [Role(number=number, **chosen)], seed=seed, k=k)[0]  # type: ignore[arg-type]


# Wolpertinger.


def neighbours(proto: Tensor, allowed: Tensor, *, k: int) -> list[int]:
    numbers, is_candidate = nearest(proto[None], SQUARE, allowed[None], k=k)
    return [int(number) for number in numbers[is_candidate]]


def test_nearest_allowed_steps_come_first() -> None:
    """The nearest steps come first, and those that are not allowed are absent."""
    proto = torch.tensor([0.9, 0.2])
    # Distances: 0.92, 0.22, 1.20, 0.81, 2.11.
    assert neighbours(proto, EVERY, k=3) == [1, 3, 0]
    allowed = torch.tensor([True, False, True, True, False])
    assert neighbours(proto, allowed, k=2) == [3, 0]
    assert neighbours(proto, allowed, k=9) == [3, 0, 2]


def test_of_steps_at_equal_distance_the_first_comes_first() -> None:
    assert neighbours(torch.tensor([0.5, 0.5]), EVERY, k=4) == [0, 1, 2, 3]


def test_every_episode_has_neighbours_of_its_own() -> None:
    allowed = torch.tensor([[True] * 5, [False, False, True, False, False]])
    numbers, is_candidate = nearest(torch.tensor([[0.9, 0.2], [0.9, 0.2]]), SQUARE, allowed, k=2)
    assert numbers[0].tolist() == [1, 3]
    assert numbers[1, 0] == 2
    assert is_candidate.tolist() == [[True, True], [True, False]]


def test_best_neighbour_or_exploration() -> None:
    """The neighbour with the best outcome is chosen, or one is explored."""
    outcomes = torch.tensor([[0.1, 0.4, 0.4, 0.9]])
    is_candidate = torch.tensor([[True, True, True, False]])  # the last one, though best, is none

    def place(draw: float, *, explores: bool) -> int:
        return int(choose(outcomes, is_candidate, explores_B=torch.tensor([explores]), draws_B=torch.tensor([draw])))

    assert place(0.9, explores=False) == 1
    # A third of the draws for each of the three.
    assert [place(draw, explores=True) for draw in (0.0, 0.33, 0.34, 0.66, 0.67, 0.9999999)] == [0, 0, 1, 1, 2, 2]


# What is allowed.


def test_steps_follow_the_geometry_and_the_lengths() -> None:
    assert allowed_steps(PATHS, ()).nonzero().flatten().tolist() == [0, 1, 4, 5]
    assert allowed_steps(PATHS, (0, 1, 3)).nonzero().flatten().tolist() == [3, 7, stop_of(PATHS)]
    assert allowed_steps(PATHS, (0, 1, 2, 3, 3, 3)).nonzero().flatten().tolist() == [stop_of(PATHS)]


@pytest.mark.parametrize(
    "paths",
    [
        PATHS,
        LayerPaths(("a", "b", "c"), 5, 5, 5, 0),
        LayerPaths(("a", "b"), 9, 1, 4, 2),
        LayerPaths(("a",), 3, 1, 5, None),
    ],
)
def test_every_episode_is_a_path_of_the_space(paths: LayerPaths) -> None:
    net = networks(paths)
    found = [played(number, net, k=9, exploration=1.0) for number in range(40)]
    assert all(paths.contains(episode.path) for episode in found)
    assert len({episode.path for episode in found}) > 5
    for episode in found:
        has_end = episode.steps[-1] == stop_of(paths)
        assert len(episode.steps) == len(episode.path) + has_end
        assert has_end == (len(episode.path) < paths.longest)
        assert episode.log_densities.shape == episode.steps.shape


def test_an_episode_is_a_function_of_seed_number_and_networks() -> None:
    torch.manual_seed(1)
    before = played(3)
    torch.manual_seed(2)
    again = played(3)
    assert before.path == again.path
    assert torch.equal(before.protos, again.protos)
    assert any(played(3).path != played(number).path for number in range(4, 8))
    assert any(played(number).path != played(number, seed=2).path for number in range(4))


def test_episodes_together_equal_single_ones() -> None:
    """Episodes played together equal those of each alone."""
    net = networks()
    roles = [Role(number, (1.0,), exploration=0.5) for number in range(8)]
    for episode in play(net, roles, seed=1, k=3):
        alone = played(episode.number, net)
        assert episode.path == alone.path
        assert torch.equal(episode.steps, alone.steps)
        assert torch.allclose(episode.protos, alone.protos, atol=1e-5)
        assert torch.allclose(episode.log_densities, alone.log_densities, atol=1e-4)


def test_proto_actions_of_a_path() -> None:
    """The proto-actions of a given path are the embeddings of its steps."""
    net = networks()
    free = played(3, net)
    other = next(played(number, net) for number in range(4, 40) if played(number, net).path != free.path)
    given, beside = play(net, [Role(3, (1.0,), 0.5, path=other.path), Role(7, (1.0,), 0.5)], seed=1, k=3)
    assert given.path == other.path
    with torch.no_grad():
        embedded = net.embeddings()[given.steps]
        means = net.proto(net.states(given.steps[None])[0, :-1], torch.tensor([1.0]))
        densities = log_density(embedded, means, net.log_std)
    assert torch.equal(given.protos, embedded)
    assert torch.allclose(given.log_densities, densities, atol=1e-5)
    assert torch.allclose(beside.protos, played(7, net).protos, atol=1e-5)


# Networks.


def test_a_state_after_some_steps_is_that_of_the_episode() -> None:
    net = networks()
    episode = played(5, net)
    with torch.no_grad():
        states = net.states(episode.steps[None])
        shorter = net.states(episode.steps[None, :2])
        means = net.proto(states[0, :-1], torch.ones(1))
    assert torch.allclose(states[:, :3], shorter, atol=1e-6)
    z = (episode.protos - means) / net.log_std.exp()
    assert z.abs().max() < 6
    densities = torch.distributions.Normal(means, net.log_std.exp()).log_prob(episode.protos).sum(dim=1)
    assert torch.allclose(densities, episode.log_densities, atol=1e-5)


def test_descriptors_alone_can_tell_models_apart() -> None:
    descriptors = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    net = Networks(PATHS, NetworkOptions(num_statistics=3, by_index=False), descriptors)
    table = net.embeddings().detach()
    assert table.shape == (9, 16)
    assert (table[:4] - table[4:8]).norm(dim=1).min() > 0.01
    other = LayerPaths(("x", "y", "z"), 4, 3, 6, 1)
    moved = Networks(other, NetworkOptions(num_statistics=3, by_index=False), torch.randn(3, 4, 3))
    moved.load_state_dict(net.state_dict())
    assert other.contains(played(0, moved).path)
    with pytest.raises(ValueError, match=r"descriptors of shape \(2, 4, 3\); the pool and options need \(3, 4, 3\)"):
        Networks(other, NetworkOptions(num_statistics=3), descriptors)


def test_a_preference_is_seen_only_where_it_is_an_input() -> None:
    for sees, same in ((True, False), (False, True)):
        net = networks(num_objectives=2, sees_preference=sees)
        states = net.states(torch.tensor([[0, 1]]))
        protos = [net.proto(states, torch.tensor(vector)) for vector in ([1.0, 0.0], [0.0, 1.0])]
        assert torch.equal(*protos) is same


# The learner.


@pytest.fixture(params=[FirstLearner, Learner])
def kind(request: pytest.FixtureRequest) -> type[BaseLearner]:
    """The learner of the searcher's version 1, and the learner of new studies."""
    found: type[BaseLearner] = request.param
    return found


def learner(kind: type[BaseLearner] = Learner, **options: object) -> BaseLearner:
    networks = NetworkOptions(num_objectives=2)
    return kind(PATHS, networks, LearnerOptions(**options), seed=3)  # type: ignore[arg-type]


def some_episodes(of: BaseLearner, num: int = 8) -> list[Episode]:
    return [played(number, of.networks, preference=(0.25, 0.75)) for number in range(num)]


def test_gradients_reach_encoder_policy_and_value_network(kind: type[BaseLearner]) -> None:
    own = learner(kind)
    before = {name: value.clone() for name, value in own.networks.state_dict().items()}
    own.update(some_episodes(own), torch.rand(8, 2, generator=torch.Generator().manual_seed(0)))
    after = own.networks.state_dict()
    same = [name for name in before if torch.equal(before[name], after[name])]
    assert same == []
    assert {name.split(".")[0] for name in before} == {
        "models",
        "layers",
        "stop",
        "start",
        "gru",
        "policy",
        "value",
        "centre",
        "spread",
        "log_std",
    }


def test_encoder_and_policy_learn() -> None:
    """The encoder learns from outcomes, and the policy from its states."""
    own = learner(FirstLearner)
    assert isinstance(own, FirstLearner)
    batch = EpisodeBatch.of(some_episodes(own), torch.rand(8, 2))
    reached = {}
    for name in ("policy", "value"):
        own.networks.zero_grad()
        losses = own.losses(batch, torch.randn(batch.steps.shape), batch.remembered)
        getattr(losses, name).backward()
        reached[name] = {
            n.split(".")[0] for n, p in own.networks.named_parameters() if p.grad is not None and p.grad.any()
        }
    assert reached["value"] == {"models", "layers", "stop", "start", "gru", "value"}
    assert reached["policy"] == {"policy", "log_std"}


def test_the_value_network_learns_from_earlier_iterations_too(kind: type[BaseLearner]) -> None:
    own = learner(kind)
    first = some_episodes(own)
    seen = {episode.path for episode in first}
    later = [played(number, own.networks, preference=(0.25, 0.75)) for number in range(8, 40)]
    second = [episode for episode in later if episode.path not in seen][:8]
    assert len(second) == 8
    own.update(first, torch.zeros(8, 2) + torch.tensor([1.0, 0.0]))
    for _ in range(3):
        own.update(second, torch.zeros(8, 2) + torch.tensor([0.0, 1.0]))
    batch = EpisodeBatch.of(first, torch.zeros(8, 2))
    with torch.no_grad():
        found = own.networks.outcomes(own.networks.states(batch.steps), batch.preferences[:, None])
    after_the_end = torch.stack([found[row, length] for row, length in enumerate(batch.lengths)])
    assert after_the_end[:, 0].mean() > 0.7
    assert after_the_end[:, 1].mean() < 0.3


def test_learner_without_episodes(kind: type[BaseLearner]) -> None:
    """A learner without the episodes of another search has only its networks."""
    own = learner(kind)
    episodes, outcomes = some_episodes(own), torch.rand(8, 2, generator=torch.Generator().manual_seed(1))
    own.update(episodes, outcomes)
    begun = learner(kind)
    begun.restore(own.to_bytes(), remembers=False)
    assert begun.num_remembered == 0
    again = learner(kind)
    again.restore(own.to_bytes())
    assert again.num_remembered == 8
    for name, value in own.networks.state_dict().items():
        assert torch.equal(value, begun.networks.state_dict()[name])


def test_earlier_checkpoint_has_no_episodes(kind: type[BaseLearner]) -> None:
    """A checkpoint of an earlier version has no episodes and continues."""
    own = learner(kind)
    episodes, outcomes = some_episodes(own), torch.rand(8, 2, generator=torch.Generator().manual_seed(1))
    own.update(episodes, outcomes)
    state = torch.load(io.BytesIO(own.to_bytes()), weights_only=True)
    del state["memory"]
    buffer = io.BytesIO()
    torch.save(state, buffer)
    again = learner(kind)
    again.restore(buffer.getvalue())
    again.update(episodes, outcomes)
    assert again.num_remembered == 8


def test_losses_before_the_first_update() -> None:
    """Before the first update, the ratio is one and the losses are known."""
    own = learner(FirstLearner)
    assert isinstance(own, FirstLearner)
    batch = EpisodeBatch.of(some_episodes(own), torch.full((8, 2), 0.5))
    advantages = torch.ones(batch.steps.shape)
    losses = own.losses(batch, advantages, batch.remembered)
    assert float(losses.policy) == pytest.approx(-1.0, abs=1e-5)
    assert float(losses.kl) == pytest.approx(0.0, abs=1e-5)
    with torch.no_grad():
        found = own.networks.outcomes(own.networks.states(batch.steps), batch.preferences[:, None])
    expected = torch.cat([(found[row, : n + 1] - 0.5).flatten() ** 2 for row, n in enumerate(batch.lengths)]).mean()
    assert float(losses.value) == pytest.approx(float(expected), rel=1e-5)
    # Normal distributions of standard deviation 0.5 in 16 dimensions: 16 * (ln 0.5 + (1 + ln 2 pi) / 2).
    assert float(losses.entropy) == pytest.approx(16 * (-0.693147 + 1.418939), rel=1e-5)
    options = own.options
    total = losses.policy + options.value_coefficient * losses.value - options.entropy_coefficient * losses.entropy
    assert float(losses.total) == pytest.approx(float(total))


def test_saved_learner_continues_equally(kind: type[BaseLearner]) -> None:
    """A saved learner continues as one that was not saved."""
    episodes, outcomes = some_episodes(learner(kind)), torch.rand(8, 2, generator=torch.Generator().manual_seed(1))
    own = learner(kind)
    own.update(episodes, outcomes)
    saved = own.to_bytes()
    again = learner(kind)
    again.restore(saved)
    assert own.update(episodes, outcomes) == again.update(episodes, outcomes)
    for name, value in own.networks.state_dict().items():
        assert torch.equal(value, again.networks.state_dict()[name])


def test_a_learner_does_not_touch_the_random_state_of_others(kind: type[BaseLearner]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    own = learner(kind)
    own.update(some_episodes(own), torch.rand(8, 2, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(torch.rand(3), expected)
