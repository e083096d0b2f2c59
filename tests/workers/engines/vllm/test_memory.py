"""The places of models in memory, on machines given only by numbers."""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.study.engine import EngineOptions
from workers.engines.kv_cache import kv_token_bytes
from workers.engines.vllm.memory import (
    FEW_TEXTS,
    MANY_TEXTS,
    TEXT_TOKENS,
    USABLE_SHARE,
    EngineMemory,
    MemoryRequirements,
    batched_tokens,
    divide_memory,
    free_for_engine,
    kv_cache_bytes,
    memory_requirements,
)
from workers.engines.vllm.startup import contents
from workers.engines.vllm.startup.contents import WeightContents
from workers.errors import EngineUnavailable
from workers.merging import bank, node
from workers.merging.bank import Bank
from workers.models.config import read_config
from workers.models.family import open_sources
from workers.types import Family, Placement

GB = 10**9
LLAMA_2_7B = {"num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 32}
MISTRAL_7B = {**LLAMA_2_7B, "num_key_value_heads": 8}
A100 = 85 * GB
H200 = 150 * GB


def four(config: dict[str, int], *, ranks: int = 1) -> MemoryRequirements:
    """Four models of 7 billion parameters in bfloat16, the base among them."""
    return MemoryRequirements(
        bank=4 * 14 * GB,
        weights=14 * GB // ranks,
        kv_token=kv_token_bytes(config, "bfloat16", ranks),
        scratch=5 * GB // 4,
        max_length=2048,
        ranks=ranks,
    )


def divided(
    needs: MemoryRequirements,
    total: int,
    *,
    free: int | None = None,
    host: int = 256 * GB,
    processes: int | None = None,
    is_shared: bool = False,
) -> EngineMemory:
    free = total - GB // 2 if free is None else free
    processes = processes or needs.ranks
    return divide_memory(
        needs, gpu_free=free, gpu_total=total, host_free=host, processes=processes, is_shared=is_shared
    )


def test_what_is_given_out_fits_into_the_gpu() -> None:
    for config in (LLAMA_2_7B, MISTRAL_7B):
        for gigabytes in range(20, 200):
            for host in (16 * GB, 256 * GB):
                total, needs = gigabytes * GB, four(config)
                found = divided(needs, total, host=host)
                bank = needs.bank if found.placements[0] == "gpu" else 0
                assert found.gpu_share * total >= needs.engine(FEW_TEXTS if bank else 1)
                # Where an engine hardly fits, it comes before memory to merge in: then the CPU merges.
                scratch = needs.scratch if found.gpu_share * total > needs.engine(FEW_TEXTS) else 0
                assert found.gpu_share * total + bank + scratch <= USABLE_SHARE * total
                assert found.placements[-1] == "mapped", "there is always a place left"


def test_memory_left_to_gradients_stays_free() -> None:
    """An engine leaves a share of its GPU, and takes the same if gradients use their share already when it starts."""
    needs = four(MISTRAL_7B)
    for total in (48 * GB, A100, H200):
        for share in (0.1, 0.3, 0.4):
            fresh = total - GB // 2
            found = divided(needs, total, free=free_for_engine(fresh, total, share))
            bank = needs.bank if found.placements[0] == "gpu" else 0
            assert found.gpu_share * total + bank + needs.scratch <= (USABLE_SHARE - share) * total
            later = free_for_engine(fresh - int(share * total) - GB // 2, total, share)
            assert divided(needs, total, free=later) == found
    assert free_for_engine(GB, A100, 0.0) == GB
    with pytest.raises(EngineUnavailable):
        divided(needs, 24 * GB, free=free_for_engine(24 * GB, 24 * GB, 0.5))


def test_placement_of_four_7b_models() -> None:
    """Four 7B models are in host memory beside an 80 GB engine, and on a GPU of 141 GB."""
    found = divided(four(LLAMA_2_7B), A100)
    assert found == EngineMemory(
        (Placement.HOST, Placement.MAPPED),
        0.9052,
        "next to 56.0 GB of sources the GPU's 85.0 GB have too little room for an engine",
    )
    found = divided(four(MISTRAL_7B), H200)
    assert found.placements == ("gpu", "host", "mapped")
    assert found.gpu_share * H200 == pytest.approx(USABLE_SHARE * H200 - 57.25 * GB, abs=H200 / 1e4)
    assert found.reason == "56.0 GB of sources leave 64.6 GB of the GPU's 150.0 GB for keys and values"


def test_logprobs_of_long_prompts_have_memory() -> None:
    """Memory for the log-probabilities that vLLM takes beside its share is left free if merging a tensor takes less."""
    one = four(MISTRAL_7B)
    for gigabytes in range(24, 200):
        total = gigabytes * GB
        for logprobs in (GB, 4 * GB):
            needs = replace(one, logprobs=logprobs)
            found = divided(needs, total)
            bank = needs.bank if found.placements[0] == "gpu" else 0
            # Memory for merging is free while log-probabilities are computed.
            assert total - GB // 2 - found.gpu_share * total - bank - (1 << 30) >= logprobs
            if logprobs < needs.scratch:
                assert found.gpu_share == divided(one, total).gpu_share
    with pytest.raises(EngineUnavailable, match=r"the engine needs 21\.5 GB, 14\.0 GB of them for weights"):
        divided(replace(one, logprobs=4 * GB), 21 * GB)


def test_long_texts_are_read_in_passes_on_a_gpu(untied_family: Family) -> None:
    """A pass on a GPU has a limited number of tokens, for whose log-probabilities memory is planned."""
    assert batched_tokens(2048, is_cpu=False) == batched_tokens(32768, is_cpu=False) == 4096
    assert (batched_tokens(2048, is_cpu=True), batched_tokens(32768, is_cpu=True)) == (4096, 32768)
    config = read_config(untied_family.base.directory)
    long = memory_requirements(open_sources(untied_family), config=config, dtype="bfloat16", max_length=32768)
    assert long.logprobs == 4096 * config["vocab_size"] * 10  # the logit, its copy in float32, and its log-softmax
    half = memory_requirements(open_sources(untied_family), config=config, dtype="bfloat16", max_length=2048)
    assert half.logprobs == 2048 * config["vocab_size"] * 14, "the log-softmax of the text before is kept"
    assert replace(long, scratch=1).beside == long.logprobs
    assert replace(long, logprobs=1).beside == long.scratch


def test_crowded_gpu_beats_mapped_files() -> None:
    """A GPU with room for few texts is preferred to mapped files, not to host memory."""
    needs = four(MISTRAL_7B)
    num_bytes = needs.bank + needs.scratch + needs.engine(2 * FEW_TEXTS)
    assert 2 * FEW_TEXTS < MANY_TEXTS
    total = int(num_bytes / USABLE_SHARE) + 1
    assert divided(needs, total).placements == ("host", "mapped")
    found = divided(needs, total, host=needs.bank)
    assert found.placements == ("gpu", "mapped")
    tokens = (found.gpu_share * total - needs.weights - (2 << 30)) / needs.kv_token
    assert tokens == pytest.approx(2 * FEW_TEXTS * TEXT_TOKENS, rel=0.01)


def test_host_memory_counts_every_gpu() -> None:
    """Every GPU of a machine may bring a copy into host memory, unless they share one; each has its statistics."""
    needs = replace(four(LLAMA_2_7B), bank=70 * GB)
    assert divided(needs, A100, host=140 * GB).placements == ("host", "mapped")
    assert divided(needs, A100, host=140 * GB, processes=8, is_shared=True).placements == ("host", "mapped")
    found = divided(replace(needs, statistics=GB), A100, host=140 * GB, processes=8, is_shared=True)
    assert found.placements == ("mapped",)
    assert "and a copy that 8 GPUs share, with statistics for each, would be more than half" in found.reason
    found = divided(needs, A100, host=140 * GB, processes=2)
    assert found.placements == ("mapped",)
    assert found.reason.endswith(
        "and 2 copies (one for each GPU) would be more than half of the 140.0 GB free on the host"
    )


def test_statistics_are_in_host_memory_beside_the_sources() -> None:
    needs = four(LLAMA_2_7B)
    host = 2 * (needs.bank + 3 * GB)
    assert "host" in divided(replace(needs, statistics=3 * GB), A100, host=host).placements
    assert "host" not in divided(replace(needs, statistics=3 * GB + 1), A100, host=host).placements


def test_droppable_statistics_do_not_displace_the_sources() -> None:
    """Sources stay in host memory where tables of several sources would not fit beside them: these get what is left."""
    needs = replace(four(LLAMA_2_7B), statistics=10 * GB, recent=8 * GB)
    host = 2 * (needs.bank + 8 * 2 * GB)  # the tables of single experts of 8 processes
    found = divided(needs, A100, host=host, processes=8, is_shared=True)
    assert (found.placements[0], found.recent) == ("host", 0)
    assert "host" not in divided(needs, A100, host=host - 2, processes=8, is_shared=True).placements
    assert divided(needs, A100, host=host + 16 * GB, processes=8, is_shared=True).recent == GB
    assert divided(needs, A100, host=4 * host, processes=8, is_shared=True).recent == 8 * GB
    # Of one engine, that on the same machine, only its own processes count.
    assert divided(needs, A100, host=host, processes=1, is_shared=True).recent == 8 * GB


def test_memory_of_one_rank() -> None:
    """One rank of several has its part of the weights and all sources."""
    one, two = four(MISTRAL_7B), four(MISTRAL_7B, ranks=2)
    assert (two.weights, two.kv_token, two.bank, two.scratch) == (
        one.weights // 2,
        one.kv_token // 2,
        one.bank,
        one.scratch,
    )
    assert kv_token_bytes(MISTRAL_7B, "bfloat16", 16) == kv_token_bytes(MISTRAL_7B, "bfloat16", 8), "heads are whole"
    total = int((two.bank + two.scratch + two.engine(MANY_TEXTS)) / USABLE_SHARE) + 1
    assert divided(two, total).placements[0] == "gpu"
    assert divided(one, total).placements[0] == "host"


def test_ranks_that_merge_parts_need_less_memory(untied_family: Family) -> None:
    """A GPU has memory for its part of all operands of the largest tensor, and at least for a whole result."""
    options: dict[str, Any] = {
        "config": read_config(untied_family.base.directory),
        "dtype": "bfloat16",
        "max_length": 64,
    }
    sources = open_sources(untied_family)
    whole = memory_requirements(sources, **options, ranks=2).scratch
    assert memory_requirements(sources, **options, ranks=2, merges_parts=True).scratch == -(-whole // 2)
    largest = max(math.prod(tensor.shape) for tensor in sources.base.tensors.values())
    assert memory_requirements(sources, **options, ranks=64, merges_parts=True).scratch == 2 * largest


def test_memory_that_others_use_is_not_given_out() -> None:
    needs = four(MISTRAL_7B)
    found = divided(needs, A100, free=60 * GB)
    assert found.gpu_share * A100 <= 60 * GB - (1 << 30) - needs.scratch
    with pytest.raises(
        EngineUnavailable,
        match=r"has 85\.0 GB, of which 17\.0 GB are free; the engine needs 17\.5 GB, 14\.0 GB of them",
    ):
        divided(needs, A100, free=17 * GB)


def test_needs_are_those_of_the_files(untied_family: Family, tmp_path: Path) -> None:
    config = read_config(untied_family.base.directory)
    bank = Bank(untied_family, cache=tmp_path)
    needs = memory_requirements(open_sources(untied_family), config=config, dtype="bfloat16", max_length=64)
    models = len(untied_family.models)
    largest = max(stored.num_bytes for tensor in bank.base.tensors.values() for stored in tensor.stored())
    assert needs == MemoryRequirements(
        bank.num_bytes,
        bank.num_bytes // models,
        needs.kv_token,
        (models + 1) * largest,
        64,
        statistics=needs.statistics,
        recent=needs.recent,
        logprobs=64 * config["vocab_size"] * 14,
    )
    assert needs.recent == bank.num_bytes // 8
    # Statistics of one expert have 9 bytes for 128 elements, and one more place for each tensor.
    sources = [expert.alias for expert in untied_family.experts]
    for name in bank.base.tensors:
        bank.magnitudes([(alias, name) for alias in sources], ("base", name))
    made = bank.summary()["statistics_bytes"] - 20 * len(sources) * len(bank.base.tensors)
    assert made <= needs.statistics - bank.num_bytes // 8 <= 1.2 * made
    assert needs.kv_token == kv_token_bytes(config, "float32") // 2
    assert (
        memory_requirements(open_sources(untied_family), config=config, dtype="float32", max_length=64, ranks=2).weights
        == needs.weights
    )
    assert needs.engine(1000) - replace(needs, kv_token=0).engine(1000) == 1000 * 64 * needs.kv_token


def test_kv_cache_holds_one_whole_text_and_no_more_than_needed() -> None:
    tiny = {"num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 4}
    large = {"num_attention_heads": 32, "hidden_size": 4096, "num_hidden_layers": 32, "num_key_value_heads": 8}
    assert kv_cache_bytes(tiny, 256, "float32") == 256 * 384 * 2 * 4 * 128 * 4
    assert kv_cache_bytes(large, 2048, "bfloat16") == 1 << 30
    assert kv_cache_bytes(large, 32768, "bfloat16") >= 32768 * 2 * 32 * 8 * 128 * 2


def test_an_engine_beside_gradients_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values have the bytes that were planned, because vLLM's measurement would count other processes."""
    needs = four(MISTRAL_7B)
    engine = object.__new__(WeightContents)  # the constructor asks vLLM about this machine
    engine.is_cpu, engine.most_engines = False, None
    monkeypatch.setattr(engine, "sources", SimpleNamespace(family=None), raising=False)
    monkeypatch.setattr(engine, "requirements", lambda **_: needs)
    monkeypatch.setattr(contents, "free_gpu_bytes", lambda ranks, share_left: (A100 - GB // 2, A100))
    monkeypatch.setattr(contents, "gpus_of_this_machine", lambda: 1)
    monkeypatch.setattr(contents, "free_host_bytes", lambda: 140 * GB)
    monkeypatch.setattr(bank, "content_name", lambda family, device: f"sources on {device}")
    monkeypatch.setattr(contents, "shared_bytes", lambda name: 0)
    monkeypatch.setattr(contents, "free_shared_bytes", lambda: 100 * GB)
    engine.options = EngineOptions()
    alone, _ = engine.options_by_device()
    assert "kv_cache_memory_bytes" not in alone
    engine.options = EngineOptions(gpu_share_left=0.4)
    beside, _ = engine.options_by_device()
    assert beside["gpu_memory_utilization"] <= USABLE_SHARE - 0.4
    held = beside["gpu_memory_utilization"] * A100
    assert beside["kv_cache_memory_bytes"] == pytest.approx(held - needs.weights - (2 << 30), abs=1)
    assert beside["kv_cache_memory_bytes"] >= FEW_TEXTS * TEXT_TOKENS * needs.kv_token


@pytest.mark.parametrize(("already", "placement"), [(0, "mapped"), (70 * GB, "host")])
def test_a_later_engine_uses_the_shared_copy(already: int, placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine keeps its sources in the copy of an earlier one, although there is no room for a second."""
    needs = replace(four(LLAMA_2_7B), bank=70 * GB)
    engine = object.__new__(WeightContents)  # the constructor asks vLLM about this machine
    engine.options, engine.is_cpu, engine.most_engines = EngineOptions(), False, None
    monkeypatch.setattr(engine, "sources", SimpleNamespace(family=None), raising=False)
    monkeypatch.setattr(engine, "requirements", lambda **_: needs)
    monkeypatch.setattr(contents, "free_gpu_bytes", lambda ranks, share_left: (A100 - GB // 2, A100))
    monkeypatch.setattr(contents, "gpus_of_this_machine", lambda: 8)
    monkeypatch.setattr(contents, "free_host_bytes", lambda: 140 * GB - already)
    monkeypatch.setattr(bank, "content_name", lambda family, device: f"sources on {device}")
    monkeypatch.setattr(contents, "shared_bytes", {"sources on cuda": already}.get)
    monkeypatch.setattr(contents, "free_shared_bytes", lambda: 10 * GB)
    assert engine.options_by_device()[1]["placements"][0] == placement


@pytest.mark.parametrize(("name", "placement"), [("sources on cuda", "mapped"), ("others", "host")])
def test_memory_that_a_killed_engine_left_is_free(
    name: str, placement: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of a killed engine of another family in shared memory are removed before the next engine is planned."""
    left = tmp_path / f"mergesearch-{os.getuid()}" / name
    left.mkdir(parents=True)
    (left / "users").touch()
    needs = replace(four(LLAMA_2_7B), bank=70 * GB)
    engine = object.__new__(WeightContents)  # the constructor asks vLLM about this machine
    engine.options, engine.is_cpu, engine.most_engines = EngineOptions(), False, None
    monkeypatch.setattr(engine, "sources", SimpleNamespace(family=None), raising=False)
    monkeypatch.setattr(engine, "requirements", lambda **_: needs)
    monkeypatch.setattr(contents, "free_gpu_bytes", lambda ranks, share_left: (A100 - GB // 2, A100))
    monkeypatch.setattr(contents, "gpus_of_this_machine", lambda: 8)
    monkeypatch.setattr(contents, "free_host_bytes", lambda: 140 * GB)
    monkeypatch.setattr(bank, "content_name", lambda family, device: f"sources on {device}")
    monkeypatch.setattr(node, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(contents, "free_shared_bytes", lambda: 10 * GB if left.exists() else 80 * GB)
    assert engine.options_by_device()[1]["placements"][0] == placement


def test_engines_that_run_are_counted_and_no_other_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and statistics are planned for the engines that a study runs, not for every GPU of the machine."""
    engine = object.__new__(WeightContents)  # the constructor asks vLLM about this machine
    monkeypatch.setattr(contents, "gpus_of_this_machine", lambda: 8)
    for ranks, most, processes in ((1, None, 8), (1, 2, 2), (2, 3, 6), (4, 4, 8), (1, 16, 8)):
        engine.options = EngineOptions(tensor_parallel_size=ranks)
        engine.most_engines = most
        assert engine._num_processes() == processes
