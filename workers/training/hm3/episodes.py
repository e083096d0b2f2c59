"""Runner of HM3's policies, which builds layer paths with given networks; each path is an episode.

Axes: B episodes, T steps, A possible steps (the pool's layers and the end), C candidates, D dimensions of an embedding,
H numbers of a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.actions import Action, followed, given_places, step_logits
from workers.training.hm3.networks import Networks
from workers.training.hm3.pool import allowed_steps, stop_of
from workers.training.hm3.ppo import log_density
from workers.training.hm3.scalarisation import scalarised
from workers.training.hm3.wolpertinger import choose, nearest

__all__ = ["Episode", "Role", "generator_of", "play"]


@dataclass(frozen=True)
class Role:
    """Settings of one episode, in which a policy builds a layer path (a sequence of layers of several models).

    - `number`: the episode's number
    - `preference`: the preference vector, which has the weights of the objectives
    - `exploration`: the probability, in [0, 1], that the next layer of the path is drawn at random
    - `noise`: a factor on the randomness of the policy's draws; for an action that is a point among the embeddings of
      layers, it multiplies the standard deviation of the point
    - `path`: a given path to follow; None if the policy chooses the path
    - `scales`: given scales of the path's layers; None if the policy chooses the scales
    """

    number: int
    preference: tuple[float, ...]
    exploration: float
    noise: float = 1.0
    path: tuple[int, ...] | None = None
    scales: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Episode:
    """An episode: a layer path that a policy built step by step, with the data from which the policy learns.

    A layer path is a sequence of layers of several models; each of them is a step. The fields are:

    - `number`: the number of the episode in the study
    - `preference`: the preference vector (weights of the objectives) for which the path was built
    - `steps`: [T], the indices of the T steps, including the end of the path if the policy chose it
    - `protos`: [T, D], the proto-actions. Every possible step has an embedding, a point in D dimensions. For each step
      of the path the policy drew a point, and could choose between the steps with the nearest embeddings. If layers
      have scales, a proto-action has one more number: the scale of the layer before the step, as a number from -1
      (lowest scale) to 1 (highest scale).
    - `log_densities`: [T], the log densities of these points under the policy that built the episode
    - `path`: the steps without the end
    - `scales`: the scales of all layers but the last, if layers have scales
    """

    number: int
    preference: tuple[float, ...]
    steps: Tensor
    protos: Tensor
    log_densities: Tensor
    path: tuple[int, ...]
    scales: tuple[float, ...] = ()


def generator_of(seed: int | str, number: int) -> torch.Generator:
    """The random number generator of an episode, which depends only on `seed` and the episode's `number`.

    In an episode, a policy builds one layer path (the sequence of layers of a new model). `seed` is a number, or a text
    that identifies a stream of random numbers.
    """
    digest = hashlib.sha256(f"hm3:{seed}:{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def play(
    networks: Networks,
    roles: Sequence[Role],
    *,
    seed: int | str,
    k: int,
    action: Action = Action.WOLPERTINGER,
    ideal: Tensor | None = None,
) -> list[Episode]:
    """Build several layer paths with a policy, as one batch.

    A layer path is a sequence of steps, each of which is a layer of a source model. `networks` are the networks of the
    policy. Each path is an episode with its own settings, which are its role in `roles`.

    With the action WOLPERTINGER the policy draws, for each step, a proto-action: a point in the space of the steps'
    embeddings. The `k` nearest allowed steps are the candidates, and the candidate with the best expected outcome is
    taken. Expected outcomes of several objectives are compared by their weighted sum or, if the point `ideal` is given,
    by Tchebycheff's function (module `scalarisation`). With the probability `exploration` of the role a candidate is
    drawn at random instead. The role's `noise` multiplies the deviation of proto-actions. If `exploration` and `noise`
    are 0, the path is the one that the policy prefers.

    With CATEGORICAL the policy draws one of the allowed steps. With the role's probability `exploration`, all allowed
    steps have the same probability. The role's `noise` is the temperature, and `k` is not used.

    If only one step is allowed, the step is taken without the policy. For example, after a path of maximal length only
    the end can follow; this end is no part of the episode. If a role gives the path, the policy later learns from it as
    if the policy had chosen it: the embeddings of the path's steps are the proto-actions.

    The random numbers of an episode are determined by `seed` and the episode's number. Rounding in an episode depends
    on all episodes of the batch. Therefore an episode is repeated exactly only in the same batch.
    """
    paths = networks.paths
    noise_BTD, draws_BTE, gumbel_BTA = _random_numbers(networks, roles, seed=seed, action=action)
    weights = torch.tensor([role.preference for role in roles], dtype=torch.float32)
    exploration = torch.tensor([role.exploration for role in roles])
    is_given = torch.tensor([role.path is not None for role in roles])
    places_BT = given_places(paths, [role.scales or () for role in roles], paths.longest)
    table = networks.embeddings()
    size = table.shape[1]
    std = networks.log_std.exp()
    begun = torch.nn.functional.normalize(networks.start, dim=0).expand(len(roles), 1, -1)
    state, hidden = networks.gru(begun)
    found: list[list[int]] = [[] for _ in roles]
    rows = torch.arange(len(roles))
    protos: list[Tensor] = []
    densities: list[Tensor] = []
    for at in range(paths.longest):
        allowed = torch.stack([_allowed(paths, steps) for steps in found])
        mean = networks.proto(state[:, 0], weights)
        proto = mean + noise_BTD[:, at] * std
        explores = draws_BTE[:, at, 0] < exploration
        if action is Action.CATEGORICAL:
            # The largest of the logits with Gumbel noise is a draw from their distribution; equal logits explore.
            logits = step_logits(mean.masked_fill(explores[:, None], 0.0), table, allowed) + gumbel_BTA[:, at]
            candidates = logits.argmax(dim=1, keepdim=True)
            is_candidate = torch.ones_like(candidates, dtype=torch.bool)
        else:
            candidates, is_candidate = nearest(proto[:, :size], table, allowed, k=k)
        for row, role in enumerate(roles):
            if role.path is not None:
                candidates[row] = [*role.path, stop_of(paths)][min(at, len(role.path))]
        after, hiddens = _after(networks, hidden, table[candidates])
        outcomes = scalarised(networks.outcomes(after, weights[:, None]), weights[:, None], ideal)
        places = choose(outcomes, is_candidate, explores_B=explores, draws_B=draws_BTE[:, at, 1])
        taken = table[candidates[rows, places]]
        proto = torch.where(is_given[:, None], followed(proto, taken, places_BT[:, at]), proto)
        state, hidden = after[rows, places][:, None], hiddens[rows, places][None]
        protos.append(proto)
        densities.append(log_density(proto, mean, networks.log_std))
        for steps, step in zip(found, candidates[rows, places].tolist(), strict=True):
            if not steps or steps[-1] != stop_of(paths):
                steps.append(step)
        if all(steps[-1] == stop_of(paths) for steps in found):
            break
    protos_BTD, densities_BT = torch.stack(protos, dim=1), torch.stack(densities, dim=1)
    return [
        Episode(
            role.number,
            role.preference,
            torch.tensor(steps),
            protos_BTD[row, : len(steps)],
            densities_BT[row, : len(steps)],
            path := tuple(step for step in steps if step != stop_of(paths)),
            tuple(map(paths.scale_of, protos_BTD[row, 1 : len(path), size:].flatten().tolist())),
        )
        for row, (role, steps) in enumerate(zip(roles, found, strict=True))
    ]


def _random_numbers(
    networks: Networks, roles: Sequence[Role], *, seed: int | str, action: Action
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw all random numbers for building B episodes, as three tensors.

    `roles` has the settings of each episode, and `seed` determines all numbers. T is the largest number of steps of an
    episode. `networks` has T, and the number D of coordinates of a proto-action, a point that the policy draws among
    the embeddings of steps.

    - The first tensor, [B, T, D], displaces proto-actions. Its numbers are normally distributed, and multiplied by the
      role's `noise`.
    - The second tensor, [B, T, 2], has two uniform numbers for each step: one decides whether the step is drawn at
      random, and the other decides which step is drawn.
    - The third tensor, [B, T, A], has numbers of a Gumbel distribution, multiplied by the role's `noise`. A is the
      number of possible steps if `action` is CATEGORICAL, and 0 otherwise.
    """
    longest, size = networks.paths.longest, len(networks.log_std)
    num_steps = stop_of(networks.paths) + 1 if action is Action.CATEGORICAL else 0
    noise, draws, gumbel = [], [], []
    for role in roles:
        generator = generator_of(seed, role.number)
        noise.append(role.noise * torch.randn(longest, size, generator=generator))
        draws.append(torch.rand(longest, 2, generator=generator))
        gumbel.append(-role.noise * torch.rand(longest, num_steps, generator=generator).log().neg().log())
    return torch.stack(noise), torch.stack(draws), torch.stack(gumbel)


def _allowed(paths: LayerPaths, steps: Sequence[int]) -> Tensor:
    """Say which steps may follow the beginning `steps` of a layer path: bool [paths.num_steps + 1].

    A step is a layer of one of the models. `steps` are the steps at the beginning of the path. The last element of the
    result stands for the end of the path. If `steps` already has the end, only the end is allowed, and repeating it has
    no effect on the path.
    """
    if steps and steps[-1] == stop_of(paths):
        return torch.arange(paths.num_steps + 1) == stop_of(paths)
    return allowed_steps(paths, steps)


def _after(networks: Networks, hidden_1BH: Tensor, steps_BCD: Tensor) -> tuple[Tensor, Tensor]:
    """The encoder's states and memory after each candidate for the next step of several layer paths: [B, C, H] each.

    `networks` has the encoder, a GRU that reads the steps of a path. A step is the next layer of a new model. There are
    B paths, with C candidates each. A state (an output of the GRU) and a memory have H numbers. `hidden_1BH` is the
    memory before the step. `steps_BCD` are the embeddings of the candidates.
    """
    count, num = steps_BCD.shape[:2]
    before = hidden_1BH.repeat_interleave(num, dim=1)
    states, hiddens = networks.gru(steps_BCD.reshape(count * num, 1, -1), before)
    return states.reshape(count, num, -1), hiddens.reshape(count, num, -1)
