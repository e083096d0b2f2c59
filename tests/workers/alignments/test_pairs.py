"""Alignments in the cache, stored by pair of layers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from workers.alignments.alignment import Alignment
from workers.alignments.fitting import FittedAlignment
from workers.alignments.pairs import AlignmentInputs, alignment_file, find_alignment, keep_alignment
from workers.cache import CACHE_VARIABLE


def test_damaged_alignment_is_missing(inputs: AlignmentInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stored alignment is found, and a damaged one counts as missing."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    pair = (("math", 1), ("text", 2))
    assert find_alignment(inputs, pair) is None
    content = FittedAlignment(Alignment(scale=torch.tensor([2.0, 0.5])), before=3.0, moments=1.0, after=1.0).to_bytes()
    name = keep_alignment(inputs, pair, content)
    known = find_alignment(inputs, pair)
    assert known is not None
    assert known[0] == name
    assert known[1].alignment.tensors()["scale"].tolist() == [2.0, 0.5]
    # Another kind, other texts and another pair are others.
    assert find_alignment(replace(inputs, kind="mlp"), pair) is None
    assert find_alignment(replace(inputs, positions={"sums": range(13)}), pair) is None
    assert find_alignment(inputs, (("math", 1), ("text", 3))) is None
    # So are prompts with a system prompt.
    options = inputs.options.model_copy(update={"system_prompt": "Count."})
    assert find_alignment(replace(inputs, options=options), pair) is None
    # The same models under other names are the same.
    renamed = {alias.upper(): recipe for alias, recipe in inputs.pool.items()}
    assert find_alignment(replace(inputs, pool=renamed), (("MATH", 1), ("TEXT", 2))) is not None
    exchanged = {"math": inputs.pool["text"], "text": inputs.pool["math"]}
    assert find_alignment(replace(inputs, pool=exchanged), pair) is None
    alignment_file(name).write_bytes(content[:-1] + b"x")
    assert find_alignment(inputs, pair) is None
