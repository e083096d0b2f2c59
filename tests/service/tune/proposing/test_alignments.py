"""Alignments learned by Ray tasks: once for each pair of layers, and equal to the formulas' result in this process."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from search_spaces.spaces.base import LayerPair
from service.errors import StudyFailed
from service.tune.proposing.alignments import _read, alignments_in, learn_alignments
from tests.conftest import OPTIONS
from tests.workers.recipes import whole_model
from workers.alignments.activations import read_activations
from workers.alignments.files import is_stored
from workers.alignments.fitting import fit_alignment
from workers.alignments.pairs import AlignmentInputs, alignment_file, find_alignment
from workers.alignments.samples import prompts_of
from workers.cache import CACHE_VARIABLE
from workers.errors import InvalidTask
from workers.merging.bank import Bank
from workers.types import Family, TaskSpec

GB = 10**9
PAIRS: tuple[LayerPair, ...] = ((("math", 1), ("text", 2)), (("text", 4), ("math", 0)))


def test_activations_are_read_on_the_given_device(
    untied_family: Family, sums: TaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that reserved no GPU reads activations on the CPU, also where a GPU is visible: it may be an engine's."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    pool = {"math": whole_model(untied_family, "math")}
    inputs = AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(6)}, "moments")
    (rows, first), is_held_out = _read(inputs, "math", [1], "cpu")
    assert len(rows) == len(is_held_out) > 0
    assert len(first) == 6


@pytest.mark.parametrize(
    ("gpu_bytes", "expected"), [(80 * GB, "cuda"), (24 * GB, "cpu"), (None, "cuda")], ids=["80 GB", "24 GB", "unknown"]
)
def test_models_that_no_gpu_holds_are_read_on_the_cpu(
    untied_family: Family,
    sums: TaskSpec,
    monkeypatch: pytest.MonkeyPatch,
    gpu_bytes: int | None,
    expected: str,
) -> None:
    """A model of 8B parameters takes 32 GB in float32, and its activations more: not on a GPU of 24 GB."""
    config = {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14_336}
    large = SimpleNamespace(num_parameters=8_000_000_000, base=SimpleNamespace(settings=config))
    monkeypatch.setattr("service.tune.proposing.alignments.open_sources", lambda _: large)
    free = {"one": {"GPU": 2.0}}
    monkeypatch.setattr("service.tune.proposing.alignments.available_resources_per_node", lambda: free)
    devices = []

    def start(_: Any, pairs: Any, *, device: str) -> dict[LayerPair, Any]:
        devices.append(device)
        return {}

    monkeypatch.setattr("service.tune.proposing.alignments._start_tasks", start)
    monkeypatch.setattr("service.tune.proposing.alignments.find_alignment", lambda *_: None)
    inputs = AlignmentInputs(untied_family, {}, OPTIONS, {"sums": sums}, {"sums": range(500)}, "moments")
    notes: list[str] = []
    learn_alignments(inputs, PAIRS, gpu_bytes=gpu_bytes, note=notes.append)
    assert devices == [expected]
    if expected == "cpu":
        needed = r"The CPU computes the activations for alignments: .* needs \d+\.\d GiB of a GPU, which has 22\.4 GiB"
        assert re.match(needed, notes[1])
    free["one"]["GPU"] = 0.9  # an engine has a part of it
    learn_alignments(inputs, PAIRS, gpu_bytes=None)
    assert devices == [expected, "cpu"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 224.00 MiB.\nIt has"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
    ids=["memory", "cublas"],
)
def test_the_cpu_reads_after_a_gpu_was_full(
    untied_family: Family,
    sums: TaskSpec,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: RuntimeError,
) -> None:
    pool = {"math": whole_model(untied_family, "math")}
    inputs = AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(6)}, "moments")
    (expected, _), *_ = _read(inputs, "math", [1], "cpu")
    real, devices = Bank.__init__, []

    def full(bank: Bank, *arguments: Any, device: str, **options: Any) -> None:
        devices.append(device)
        if device == "cuda":
            raise error
        real(bank, *arguments, device=device, **options)

    monkeypatch.setattr(Bank, "__init__", full)
    (rows, _), *_ = _read(inputs, "math", [1], "cuda")
    assert devices == ["cuda", "cpu"]
    assert (rows == expected).all()
    first_line = str(error).splitlines()[0]
    assert caplog.messages == [
        f"math: the CPU computes the activations for alignments, because a GPU failed: {first_line}"
    ]


def test_other_errors_of_a_model_are_not_computed_again(
    untied_family: Family, sums: TaskSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("size mismatch")

    monkeypatch.setattr(Bank, "__init__", broken)
    pool = {"math": whole_model(untied_family, "math")}
    inputs = AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(6)}, "moments")
    with pytest.raises(RuntimeError, match="size mismatch"):
        _read(inputs, "math", [1], "cuda")


def test_pairs_are_learned_in_parallel_and_only_once(
    ray_cluster: None, untied_family: Family, sums: TaskSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    pool = {alias: whole_model(untied_family, alias) for alias in ("math", "text")}
    inputs = AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(12)}, "moments")
    notes: list[str] = []
    names = learn_alignments(inputs, PAIRS, gpu_bytes=None, note=notes.append)
    assert notes[0] == "Learning 2 alignments between layers ..."
    assert set(names) == set(PAIRS)
    assert all(alignment_file(name).is_file() for name in names.values())
    prompts = prompts_of(untied_family.base.directory, inputs.options, inputs.tasks, inputs.positions)
    sources = {model.alias: model.directory for model in untied_family.models}
    experts = [AutoModelForCausalLM.from_pretrained(sources[alias], dtype=torch.float32) for alias in ("math", "text")]
    math, text = (read_activations(expert, prompts) for expert in experts)
    first = math.first[2], text.first[2]
    expected = fit_alignment("moments", math.after(1), text.before[2], math.is_held_out, first=first)
    known = find_alignment(inputs, PAIRS[0])
    assert known is not None
    scale, expected_scale = (aligned.alignment.tensors()["scale"] for aligned in (known[1], expected))
    assert torch.allclose(scale, expected_scale, rtol=1e-3, atol=1e-4)
    assert known[1].after < known[1].before

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("a pair that is known is not learned again")

    monkeypatch.setattr("ray.remote", refuse)
    assert learn_alignments(inputs, PAIRS[:1], gpu_bytes=None) == {PAIRS[0]: names[PAIRS[0]]}
    # A study's own copies need no cache. One that was lost is learned again: an equal one is as good.
    study, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    assert alignments_in(study, inputs, PAIRS, before={}, gpu_bytes=None) == names
    monkeypatch.setenv(CACHE_VARIABLE, str(elsewhere))
    assert alignments_in(study, inputs, PAIRS, before=names, gpu_bytes=None) == names
    (study / f"{names[PAIRS[1]]}.safetensors").write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_VARIABLE, str(elsewhere))
    assert alignments_in(study, inputs, PAIRS, before=names, gpu_bytes=None) == names
    assert is_stored(study, names[PAIRS[1]])
    (study / f"{names[PAIRS[0]]}.safetensors").unlink()
    lost_one = {**names, PAIRS[0]: "0" * 64}
    with pytest.raises(StudyFailed, match=r"1 of 2 alignments were lost, .* from math 1 to text 2: .* a new study"):
        alignments_in(study, inputs, PAIRS, before=lost_one, gpu_bytes=None)
    gone = TaskSpec({"file": str(tmp_path / "gone.jsonl")}, "exact_match")
    lost = AlignmentInputs(untied_family, pool, OPTIONS, {"gone": gone}, {"gone": range(2)}, "moments")
    with pytest.raises(InvalidTask, match=r"gone\.jsonl"):
        learn_alignments(lost, PAIRS[:1], gpu_bytes=None)
