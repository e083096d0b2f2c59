"""The runner: one episode, that is one path, played with given networks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.training.hm3.networks import Networks
from workers.training.hm3.pool import allowed_steps, stop_of
from workers.training.hm3.ppo import log_density
from workers.training.hm3.wolpertinger import choose, nearest

__all__ = ["Episode", "generator_of", "play"]


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
def play(
    networks: Networks,
    *,
    seed: int,
    number: int,
    preference: tuple[float, ...],
    k: int,
    exploration: float,
    noise: float = 1.0,
) -> Episode:
    """The path of episode `number`. A step is explored with probability `exploration`, and proto-actions have `noise`
    times the policy's deviation: with neither, the path is that which the policy holds best. Where one step alone is
    allowed it is taken without the policy; the end of a path of maximal length is such a step and no part of the
    episode."""
    paths = networks.paths
    generator = generator_of(seed, number)
    weights = torch.tensor(preference, dtype=torch.float32)
    table = networks.embeddings()
    std = networks.log_std.exp()
    state, hidden = networks.gru(torch.nn.functional.normalize(networks.start, dim=0)[None, None])
    steps: list[int] = []
    protos: list[Tensor] = []
    densities: list[Tensor] = []
    path: list[int] = []
    while not steps or steps[-1] != stop_of(paths):
        allowed = allowed_steps(paths, path)
        if len(path) == paths.longest:
            break
        mean = networks.proto(state[0, 0], weights)
        proto = mean + noise * std * torch.randn(mean.shape, generator=generator)
        candidates = nearest(proto, table, allowed, k=k)
        after, hiddens = networks.gru(table[candidates][:, None], hidden.expand(-1, len(candidates), -1).contiguous())
        outcomes = networks.outcomes(after[:, 0], weights) @ weights
        explores = bool(torch.rand((), generator=generator) < exploration)
        step = choose(candidates, outcomes, explores=explores, generator=generator)
        place = int((candidates == step).nonzero()[0, 0])
        state, hidden = after[place : place + 1], hiddens[:, place : place + 1].contiguous()
        steps.append(step)
        protos.append(proto)
        densities.append(log_density(proto, mean, networks.log_std))
        if step != stop_of(paths):
            path.append(step)
    return Episode(number, preference, torch.tensor(steps), torch.stack(protos), torch.stack(densities), tuple(path))
