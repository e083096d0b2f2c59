"""Two processes (gloo): data-parallel replicas and shards of parameters get the draw of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.spawn import spawn

from tests.workers.training.mergopt.test_optimizer import loss_of, network
from workers.training.mergopt.noise import Laplace
from workers.training.mergopt.optimizer import MergOPT

STEPS = 3
KINDS = ("ddp", "fsdp2")
# Sums of gradients in another order: a few units in the last place of float32, over three steps.
RTOL, ATOL = 1e-5, 1e-6

ROWS = torch.arange(40).view(8, 5) % 11


def trained(model: nn.Module, inner: nn.Module, rows: torch.Tensor, *, offsets: list[torch.Tensor]) -> None:
    """Train for STEPS updates on `rows` by the loss of `model`; `offsets` gets the parameters during the first draw."""
    optimizer = MergOPT(torch.optim.AdamW(inner.parameters(), lr=1e-2), noise=Laplace(0.05), seed=4)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with optimizer.offset():
            if not offsets:
                offsets += [whole(p) for p in inner.parameters()]
            loss_of(model, rows).backward()
        optimizer.step()


def whole(parameter: torch.Tensor) -> torch.Tensor:
    full = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return full.detach().clone()


def of_one_process() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = network()
    offsets: list[Any] = []
    trained(model, model, ROWS, offsets=offsets)
    return offsets, [whole(p) for p in model.parameters()]


def rank_of(rank: int, place: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{place}/meet", rank=rank, world_size=2)
    for kind in KINDS:
        inner = network()
        offsets: list[torch.Tensor] = []
        trained(parallel(inner, kind), inner, ROWS[rank::2], offsets=offsets)
        torch.save((offsets, [whole(p) for p in inner.parameters()]), f"{place}/{kind}{rank}.pt")
    torch.distributed.destroy_process_group()


def parallel(inner: nn.Sequential, kind: str) -> nn.Module:
    if kind == "ddp":
        return nn.parallel.DistributedDataParallel(inner)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in (inner[2], inner[4]):
        fully_shard(layer, mesh=mesh)
    fully_shard(inner, mesh=mesh)
    return inner


@pytest.mark.slow
def test_two_ranks_draw_and_train_as_one_process(tmp_path: Path) -> None:
    spawn(rank_of, (str(tmp_path),), nprocs=2)
    offsets, weights = of_one_process()
    assert not any(
        torch.allclose(w, p, rtol=RTOL, atol=ATOL) for w, p in zip(weights, network().parameters(), strict=True)
    )
    for kind in KINDS:
        for rank in range(2):
            found_offsets, found = torch.load(tmp_path / f"{kind}{rank}.pt")
            for one, other in zip(found_offsets, offsets, strict=True):
                assert torch.equal(one, other)  # the draw: bit for bit
            for one, other in zip(found, weights, strict=True):
                assert torch.allclose(one, other, rtol=RTOL, atol=ATOL)
