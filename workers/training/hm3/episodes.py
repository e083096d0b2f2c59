"""The runner: episodes, each one path, played with given networks.

Axes: B episodes, T steps, A steps of the pool with the end, C candidates, D dimensions of an embedding, H of a state.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from search_spaces.spaces.layer_paths import LayerPaths
from workers.training.hm3.networks import Networks
from workers.training.hm3.pool import allowed_steps, stop_of
from workers.training.hm3.ppo import log_density
from workers.training.hm3.wolpertinger import choose, nearest

__all__ = ["Episode", "Role", "generator_of", "play"]


@dataclass(frozen=True)
class Role:
    """What an episode is played with. `exploration` is a probability in [0, 1]; `noise` is in deviations. `path`: the
    one that was taken, where it is known; None: the policy chooses."""

    number: int
    preference: tuple[float, ...]
    exploration: float
    noise: float = 1.0
    path: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Episode:
    """`steps` [T] are numbers of the pool's steps, the end included where the policy chose it; `path` is without it.
    `protos` [T, D] are the proto-actions, `log_densities` [T] those under the policy that played."""

    number: int
    preference: tuple[float, ...]
    steps: Tensor
    protos: Tensor
    log_densities: Tensor
    path: tuple[int, ...]


def generator_of(seed: int, number: int) -> torch.Generator:
    """The random numbers of episode `number`: a function of the two numbers alone."""
    digest = hashlib.sha256(f"hm3:{seed}:{number}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


@torch.no_grad()
def play(networks: Networks, roles: Sequence[Role], *, seed: int, k: int) -> list[Episode]:
    """The paths of some episodes, played side by side. A step is explored with probability `exploration`, and
    proto-actions have `noise` times the policy's deviation: with neither, the path is that which the policy holds best.
    Where one step alone is allowed it is taken without the policy; the end of a path of maximal length is such a step
    and no part of the episode. The proto-actions of a given path are the embeddings of its steps, to which they lead
    for certain: so the policy learns from it which steps were good.

    An episode's random numbers are its own. Its rounding is that of all episodes that are played with it, so whoever
    plays it again plays the same ones."""
    paths = networks.paths
    noise_BTD, draws_BTE = _random_numbers(networks, roles, seed=seed)
    weights = torch.tensor([role.preference for role in roles], dtype=torch.float32)
    exploration = torch.tensor([role.exploration for role in roles])
    is_given = torch.tensor([role.path is not None for role in roles])
    table = networks.embeddings()
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
        candidates, is_candidate = nearest(proto, table, allowed, k=k)
        for row, role in enumerate(roles):
            if role.path is not None:
                candidates[row] = [*role.path, stop_of(paths)][min(at, len(role.path))]
        after, hiddens = _after(networks, hidden, table[candidates])
        outcomes = (networks.outcomes(after, weights[:, None]) * weights[:, None]).sum(dim=2)
        explores = draws_BTE[:, at, 0] < exploration
        places = choose(outcomes, is_candidate, explores_B=explores, draws_B=draws_BTE[:, at, 1])
        taken = table[candidates[rows, places]]
        proto = torch.where(is_given[:, None], taken, proto)
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
            tuple(step for step in steps if step != stop_of(paths)),
        )
        for row, (role, steps) in enumerate(zip(roles, found, strict=True))
    ]


def _random_numbers(networks: Networks, roles: Sequence[Role], *, seed: int) -> tuple[Tensor, Tensor]:
    """[B, T, D] normal, times each episode's noise; [B, T, 2] uniform: whether a step is explored, and which."""
    longest, size = networks.paths.longest, len(networks.log_std)
    noise, draws = [], []
    for role in roles:
        generator = generator_of(seed, role.number)
        noise.append(role.noise * torch.randn(longest, size, generator=generator))
        draws.append(torch.rand(longest, 2, generator=generator))
    return torch.stack(noise), torch.stack(draws)


def _allowed(paths: LayerPaths, steps: Sequence[int]) -> Tensor:
    """After the end: the end, which is played no more."""
    if steps and steps[-1] == stop_of(paths):
        return torch.arange(paths.num_steps + 1) == stop_of(paths)
    return allowed_steps(paths, steps)


def _after(networks: Networks, hidden_1BH: Tensor, steps_BCD: Tensor) -> tuple[Tensor, Tensor]:
    """[B, C, H] each: the states after each candidate, and what the encoder remembers then."""
    count, num = steps_BCD.shape[:2]
    before = hidden_1BH.repeat_interleave(num, dim=1)
    states, hiddens = networks.gru(steps_BCD.reshape(count * num, 1, -1), before)
    return states.reshape(count, num, -1), hiddens.reshape(count, num, -1)
