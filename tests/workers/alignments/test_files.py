"""Alignment files that are accepted, and those that are refused."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from search_spaces.errors import InvalidRecipe
from tests.workers.recipes import random_alignment
from workers.alignments.files import read_alignment, write_alignment


@pytest.mark.parametrize("kind", ["projection", "moments"])
def test_an_alignment_is_read_as_it_was_written(tmp_path: Path, kind: str) -> None:
    written = random_alignment(kind, 8)
    digest = write_alignment(tmp_path / "new", written)
    assert write_alignment(tmp_path / "new", written) == digest
    assert digest != write_alignment(tmp_path / "new", random_alignment(kind, 8, seed=1))
    assert len(list((tmp_path / "new").iterdir())) == 2
    read = read_alignment(tmp_path / "new", digest, layer=0, hidden_size=8).tensors()
    assert read.keys() == written.tensors().keys()
    assert all(torch.equal(read[name], tensor) for name, tensor in written.tensors().items())


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "expected a projection or a scale, and not both"),
        ({"projection": torch.eye(8), "scale": torch.ones(8)}, "expected a projection or a scale, and not both"),
        ({"projection": torch.ones(4, 8)}, r"projection is \[4, 8\]; expected \[8, 8\]"),
        ({"scale": torch.ones(8), "shift": torch.ones(1)}, r"shift is \[1\]; expected \[8\]"),
        ({"scale": torch.ones(8, 8)}, r"scale is \[8, 8\]; expected \[8\]"),
        ({"scale": torch.full((8,), float("nan"))}, "scale has values that are NaN or infinite"),
        ({"scale": torch.ones(8), "bias": torch.ones(8)}, "unexpected keyword argument 'bias'"),
        ({"scale": torch.ones(6)}, "it aligns 6 numbers; the models have 8"),
    ],
)
def test_other_tensors_are_refused(tmp_path: Path, tensors: dict[str, torch.Tensor], message: str) -> None:
    digest = hashlib.sha256(save(tensors)).hexdigest()
    save_file(tensors, tmp_path / f"{digest}.safetensors")
    with pytest.raises(InvalidRecipe, match=rf"layer 3: alignment '{digest[:12]}': {tmp_path}.*{message}"):
        read_alignment(tmp_path, digest, layer=3, hidden_size=8)


def test_files_that_are_not_what_their_names_say_are_refused(tmp_path: Path) -> None:
    digest = write_alignment(tmp_path, random_alignment("moments", 8))
    (tmp_path / f"{'0' * 64}.safetensors").write_bytes((tmp_path / f"{digest}.safetensors").read_bytes())
    for directory, name, message in (
        (tmp_path, "0" * 64, f"its contents have the digest {digest[:12]}"),
        (tmp_path, "1" * 64, "cannot be read: No such file or directory"),
        (tmp_path, "../secret", "expected the sha256 of a file, 64 hex digits"),
        ("", digest, r"without a directory of alignments \(Family.alignments_dir\)"),
    ):
        with pytest.raises(InvalidRecipe, match=message):
            read_alignment(directory, name, layer=0, hidden_size=8)
