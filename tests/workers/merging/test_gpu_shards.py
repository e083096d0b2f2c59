"""Shards of merges on a GPU, by two ranks in Triton's interpreter: one rank's bits, and each element read once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from search_spaces.methods import METHODS
from tests.builders import tiny_family
from tests.workers.merging.gpu_ranks import NAMES
from tests.workers.merging.kernels.test_kernels import bits
from tests.workers.merging.test_devices import all_of
from tests.workers.merging.test_shards import halves, recipe_by
from workers.engines.vllm.worker_extension import family_to_json
from workers.merging.bank import Bank
from workers.merging.devices import bank_for, devices_of, peak_bytes
from workers.merging.materialize import merge_into, merged_tensors
from workers.merging.methods.plain import PLAIN
from workers.merging.plan import merged_names, plan_tensors
from workers.merging.shards import Shard
from workers.types import Family

FLOAT32 = torch.float32


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    # Half of the embedding has two blocks of elements, each of which takes the interpreter a while.
    return tiny_family(tmp_path_factory.mktemp("family"), experts=("math", "text"), layers=1, hidden=32)


@pytest.fixture(scope="module")
def ranks(family: Family, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """The values that two ranks held, read and merged, by every method with a CUDA kernel."""
    directory = tmp_path_factory.mktemp("ranks")
    (directory / "family.json").write_text(family_to_json(family))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}  # read when Triton is imported
    command = [sys.executable, "-m", "tests.workers.merging.gpu_ranks", str(directory / "family.json"), str(directory)]
    running = [
        subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True, env=environment) for rank in range(2)
    ]
    errors = [process.communicate(timeout=600)[1] for process in running]
    for process, error in zip(running, errors, strict=True):
        assert process.returncode == 0, error[-3000:]
    return [torch.load(directory / f"{rank}.pt") for rank in range(2)]


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter replaces the device")
def test_two_ranks_on_gpus_hold_the_bits_of_one(family: Family, ranks: list[Mapping[str, Any]]) -> None:
    """Two ranks on GPUs hold the bits of one rank, merge nothing whole, and read each element of the sources once."""
    bank = Bank(family)
    shapes = merged_names(recipe_by(family, "linear"), bank)
    twice = sum(torch.Size(shape).numel() for shape in shapes.values() if len(shape) == 1)  # each rank holds all
    for name in NAMES:
        of_one = ranks[0][name]["of one rank"]
        by_cpu = dict(merged_tensors(recipe_by(family, name), bank, FLOAT32))
        for key, tensor in of_one["tensors"].items():
            # A GPU adds the terms of inner products in another order; the interpreter is a CPU.
            assert torch.equal(bits(tensor), bits(by_cpu[key])), (name, key)
            for rank, found in enumerate(ranks):
                part = found[name]["tensors"][key]
                assert torch.equal(bits(part), bits(halves(key, tensor, rank).contiguous())), (name, key, rank)
        assert ranks[0][name]["why"] == ranks[1][name]["why"] == {}, name
        read = sum(found[name]["read"] for found in ranks)
        num_operands = len(recipe_by(family, name).head.sources) + METHODS[name].needs_base
        elements = sum(torch.Size(shape).numel() for shape in shapes.values())
        in_parts = (elements + twice) * num_operands
        if not PLAIN[name].uses:
            assert read == in_parts, name
            assert ranks[0][name]["made"] + ranks[1][name]["made"] == 0
        else:
            # One of the ranks computes statistics of whole tensors and, for TIES, the rule: the other reads them.
            made = [found[name]["made"] for found in ranks]
            assert sum(made) > 0, name
            assert read >= in_parts, name
            # Tables, and one pass for thresholds: never once for each rank.
            assert read <= in_parts + 3 * elements * num_operands, (name, read, in_parts)


def test_methods_without_a_kernel_for_cuda_are_merged_whole(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that only CPUs have a kernel for is merged whole by each rank of a GPU engine, which is named."""
    monkeypatch.setattr("workers.merging.kernels.backend", lambda device: "cuda")
    monkeypatch.setattr("workers.merging.materialize.is_fused", lambda *_: False)  # nothing is computed by kernels here
    bank = Bank(family)
    recipe = recipe_by(family, "breadcrumbs")
    (name, shape), *_ = ((name, shape) for name, shape in merged_names(recipe, bank).items() if len(shape) == 2)
    half = torch.empty(shape)[: shape[0] // 2]
    found = torch.full(half.shape, 7.0)
    shard = Shard.of(half, half._base if half._base is not None else half)
    assert shard is not None
    assert merge_into(recipe, bank, {name: found}, {name: shard}) == {name: "breadcrumbs has no kernel for CUDA"}
    assert torch.equal(bits(found), bits(dict(merged_tensors(recipe, bank, FLOAT32))[name][: shape[0] // 2]))


def test_a_part_needs_less_room_than_the_whole(family: Family, tmp_path: Path) -> None:
    """A GPU whose memory holds a part of a merged tensor, and not all of it, merges the part."""
    bank = Bank(family, cache=tmp_path)
    bank.device = torch.device("cuda", 0)  # nothing is computed on it
    recipe = all_of(family, "task_arithmetic", {"lambda": 0.5})
    plan = plan_tensors(recipe, bank)
    tensor = max(plan.tensors, key=lambda each: torch.Size(each.shape).numel())
    half = torch.Size(tensor.shape).numel() // 2
    bank.room_bytes = peak_bytes(tensor, plan, bank, FLOAT32, half)
    assert bank_for(tensor, plan, bank, FLOAT32, half) is bank
    assert bank_for(tensor, plan, bank, FLOAT32).device.type == "cpu"
    assert devices_of(plan, bank, FLOAT32, {tensor.name: half})[tensor.name] == "cuda"
    bank.room_bytes -= 1
    assert devices_of(plan, bank, FLOAT32, {tensor.name: half})[tensor.name] == "cpu"
