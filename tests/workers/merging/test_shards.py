"""Shards of merges against whole merges: the same bits, for every method and every way of dividing a tensor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.workers.merging.kernels.test_kernels import bits, fused, given_to, merges, operands
from workers.merging.kernels import exact_rule, merge_shard
from workers.merging.shards import Shard

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def divided(whole: torch.Tensor, ranks: int) -> Iterator[torch.Tensor]:
    """Rows, columns and both parts of a fused tensor, each divided over ranks as evenly as its size allows."""
    for dim in range(whole.dim()):
        yield from (part for part in torch.tensor_split(whole, ranks, dim=dim) if part.numel())


def shards(shape: tuple[int, ...], ranks: int) -> list[Shard]:
    whole = torch.empty(shape)
    found = [Shard.of(part, whole) for part in divided(whole, ranks)]
    assert None not in found
    return [shard for shard in found if shard is not None]


@pytest.mark.parametrize("shape", [(7,), (5, 9), (3, 4, 10), (1, 6), (6, 1)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_a_shard_has_the_elements_of_its_view(shape: tuple[int, ...], ranks: int) -> None:
    """A shard describes the elements of a view; those of all ranks are each element once a dimension."""
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(whole.numel(), dtype=torch.int64)
    for part in divided(whole, ranks):
        shard = Shard.of(part, whole)
        assert shard is not None
        assert torch.equal(shard.view(whole).reshape(-1), part.reshape(-1))
        assert torch.equal(shard.indices(torch.arange(shard.num_elements)), part.reshape(-1))
        assert shard.shape == tuple(part.shape)
        assert shard.is_whole(shape) == (part.numel() == whole.numel())
        seen[part.reshape(-1)] += 1
    assert (seen == len(shape)).all()


def test_other_views_are_no_shards() -> None:
    whole = torch.arange(60.0).view(3, 4, 5)
    others = (
        whole.transpose(0, 1),
        whole[:, 1:3, 1:3],
        whole.clone(),
        whole[:0],
        whole.expand(3, 4, 5).flip(0),
        whole.view(torch.int32),
    )
    assert [Shard.of(view, whole) for view in others] == [None] * len(others)
    assert Shard.of(whole[1:2], whole.transpose(0, 1)) is None


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_shards_have_the_bits_of_the_whole_merge(ranks: int) -> None:
    """Each kernel computes the elements of every rank as in the whole tensor, and reads no others."""
    given = operands((19, 37), (FLOAT32,) * 3)
    parts = shards((19, 37), ranks)
    cases = list(merges(2)) if ranks == 3 else [case for case in merges(2) if case.method in SOME]
    for merge in cases:
        check_shards(merge, given, parts, FLOAT32)


SOME = ("linear", "ties", "breadcrumbs", "dare_ties_l1", "della", "sce", "arcee_fusion")


def check_shards(merge, given, parts, dtype):  # type: ignore[no-untyped-def]
    own = given_to(merge, given)
    whole = fused(merge, given, dtype)
    rule = exact_rule(merge, own)
    for shard in parts:
        memory = torch.full((shard.num_elements + 2,), 7.0, dtype=dtype)
        merge_shard(rule, own.tensors, own.base, memory[1:-1].view(shard.shape), shard)
        assert torch.equal(bits(memory[1:-1]), bits(shard.view(whole).reshape(-1))), (merge, shard)
        assert memory[0] == memory[-1] == 7
