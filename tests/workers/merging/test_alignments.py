"""Alignments: what they compute, which files are accepted, and where a recipe may have them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Source
from tests.workers.recipes import aligned, path, random_alignment
from workers.engines.transformers.backend import logprobs, merged_model
from workers.merging.alignments import (
    Alignment,
    alignments_before,
    read_alignment,
    unaligned,
    write_alignment,
)
from workers.merging.bank import Bank
from workers.merging.plan import check_recipe
from workers.types import Family

TOKENS = [7919 * i % 100 for i in range(40)]


def test_what_an_alignment_computes() -> None:
    stream = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    moments = Alignment(scale=torch.tensor([2.0, 0.5]), shift=torch.tensor([1.0, -1.0]))
    assert moments(stream).tolist() == [[3.0, 0.0], [7.0, 1.0]]
    assert moments(stream, 0.5).tolist() == [[2.5, 0.5], [6.5, 1.5]]
    projection = Alignment(projection=torch.tensor([[0.0, 1.0], [2.0, 0.0]]), shift=torch.tensor([1.0, 0.0]))
    assert projection(stream).tolist() == [[3.0, 2.0], [5.0, 6.0]]
    assert replace(projection, shift=None)(stream, 0.5).tolist() == [[2.0, 2.0], [4.0, 6.0]]


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


def test_alignments_where_none_is_needed_are_refused(untied_family: Family) -> None:
    recipe = path(untied_family, [("math", 0), ("math", 1), ("text", 1), ("text", 1)])
    assert alignments_before(aligned(recipe, None, "a", "b")) == (None, None, "a", "b")
    with pytest.raises(InvalidRecipe, match="layer 0: alignment 'a': layers 0 and 1 follow each other in their own"):
        alignments_before(aligned(recipe, "a"))
    with pytest.raises(InvalidRecipe, match="layer 3: alignment 'a': no layer follows; expected none"):
        alignments_before(aligned(recipe, None, None, None, "a"))

    def merged(layer: int, weight: float) -> Merge:
        return Merge("task_arithmetic", (Source("math", layer), Source("text", layer)), {"lambda": (weight, 0.5)})

    same = path(untied_family, [merged(0, 0.4), merged(1, 0.4)])
    with pytest.raises(InvalidRecipe, match="layers 0 and 1 follow each other in their own models"):
        alignments_before(aligned(same, "a"))
    assert alignments_before(aligned(path(untied_family, [merged(0, 0.4), merged(1, 0.6)]), "a")) == (None, "a")


@pytest.fixture
def bank(untied_family: Family, tmp_path: Path) -> Bank:
    return Bank(replace(untied_family, alignments_dir=str(tmp_path / "alignments")), cache=tmp_path)


STEPS: list[tuple[str, int] | Merge] = [("math", 0), ("text", 1), ("text", 2), ("math", 1)]


@pytest.mark.slow
def test_transformers_computes_what_the_recipe_says(bank: Bank) -> None:
    """With scales the folded model, whose shifts are divided, is the model whose stream is multiplied and aligned."""
    hidden = int(bank.base.config["hidden_size"])
    modules = [random_alignment("projection", hidden), random_alignment("moments", hidden)]
    digests = [write_alignment(bank.alignments_dir, module) for module in modules]
    scales = (0.6, 1.4, 0.8, 1.2)
    plain = path(bank.family, STEPS)
    recipe = aligned(path(bank.family, STEPS, scales), digests[0], None, digests[1])
    stated = merged_model(plain, bank, dtype="float32")

    def hook(scale: float, module: Alignment | None) -> Callable[..., torch.Tensor]:
        def change(_: Any, __: Any, output: torch.Tensor) -> torch.Tensor:
            return output * scale if module is None else module(output * scale)

        return change

    for layer, scale, module in zip(stated.model.layers, scales, (modules[0], None, modules[1], None), strict=True):
        layer.register_forward_hook(hook(scale, module))
    theirs = logprobs(stated, TOKENS)
    assert logprobs(merged_model(recipe, bank, dtype="float32"), TOKENS) == pytest.approx(theirs, abs=1e-4)
    for other in (unaligned(recipe), aligned(recipe, digests[0]), aligned(recipe, digests[1], None, digests[0])):
        found = logprobs(merged_model(other, bank, dtype="float32"), TOKENS)
        assert max(abs(a - b) for a, b in zip(found, theirs, strict=True)) > 0.01, "the alignments matter"


def test_the_weights_of_an_ordinary_checkpoint_refuse_alignments(bank: Bank) -> None:
    digest = write_alignment(bank.alignments_dir, random_alignment("moments", int(bank.base.config["hidden_size"])))
    recipe = aligned(path(bank.family, STEPS), digest)
    message = rf"layer 0: alignment '{digest[:12]}': a module between layers cannot be folded into the weights"
    with pytest.raises(InvalidRecipe, match=message):
        check_recipe(recipe, bank)
    check_recipe(unaligned(recipe), bank)
