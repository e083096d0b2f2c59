"""Alignments learned by Ray tasks: once for each pair of layers, and equal to the formulas' result in this process."""

from __future__ import annotations

from pathlib import Path
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
from workers.types import Family, TaskSpec

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


def test_pairs_are_learned_in_parallel_and_only_once(
    ray_cluster: None, untied_family: Family, sums: TaskSpec, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    pool = {alias: whole_model(untied_family, alias) for alias in ("math", "text")}
    inputs = AlignmentInputs(untied_family, pool, OPTIONS, {"sums": sums}, {"sums": range(12)}, "moments")
    notes: list[str] = []
    names = learn_alignments(inputs, PAIRS, note=notes.append)
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
    assert learn_alignments(inputs, PAIRS[:1]) == {PAIRS[0]: names[PAIRS[0]]}
    # A study's own copies need no cache. One that was lost is learned again: an equal one is as good.
    study, elsewhere = tmp_path / "study", tmp_path / "elsewhere"
    assert alignments_in(study, inputs, PAIRS, before={}) == names
    monkeypatch.setenv(CACHE_VARIABLE, str(elsewhere))
    assert alignments_in(study, inputs, PAIRS, before=names) == names
    (study / f"{names[PAIRS[1]]}.safetensors").write_bytes(b"damaged")
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_VARIABLE, str(elsewhere))
    assert alignments_in(study, inputs, PAIRS, before=names) == names
    assert is_stored(study, names[PAIRS[1]])
    (study / f"{names[PAIRS[0]]}.safetensors").unlink()
    lost_one = {**names, PAIRS[0]: "0" * 64}
    with pytest.raises(StudyFailed, match=r"1 of 2 alignments were lost, .* from math 1 to text 2: .* a new study"):
        alignments_in(study, inputs, PAIRS, before=lost_one)
    gone = TaskSpec({"file": str(tmp_path / "gone.jsonl")}, "exact_match")
    lost = AlignmentInputs(untied_family, pool, OPTIONS, {"gone": gone}, {"gone": range(2)}, "moments")
    with pytest.raises(InvalidTask, match=r"gone\.jsonl"):
        learn_alignments(lost, PAIRS[:1])
