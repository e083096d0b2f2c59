"""Merges with alignments, exported as checkpoints with their own model class."""

from __future__ import annotations

import ast
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Recipe
from tests.workers.recipes import aligned, path, random_alignment
from workers.alignments.export import CLASSES, MODELING_FILE
from workers.alignments.files import write_alignment
from workers.alignments.recipes import unaligned
from workers.engines.transformers.merged_models import merged_model
from workers.engines.vllm.paths.geometry import PATH_TYPES
from workers.export.checkpoint import export, is_written
from workers.merging.bank import Bank

TOKENS = torch.arange(1, 13)[None]


@pytest.fixture(scope="module", params=["untied Llama", "tied Qwen2"])
def bank(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    family = request.getfixturevalue("tied_family" if request.param == "tied Qwen2" else "untied_family")
    place = tmp_path_factory.mktemp("alignments")
    return Bank(replace(family, alignments_dir=str(place)), cache=place)


def recipe_of(bank: Bank, scales: Sequence[float] = (1.0,)) -> Recipe:
    """A path of four layers, with a projection before the second layer and moments before the fourth."""
    steps: list[tuple[str, int] | Merge] = [("math", 0), ("text", 0), ("text", 1), ("math", 1)]
    hidden = int(bank.base.config["hidden_size"])
    kinds = ("projection", "moments")
    digests = [write_alignment(bank.alignments_dir, random_alignment(kind, hidden)) for kind in kinds]
    return aligned(path(bank.family, steps, scales), digests[0], None, digests[1])


@torch.inference_mode()
def logits(model: torch.nn.Module) -> torch.Tensor:
    found: torch.Tensor = model(TOKENS).logits
    return found


def loaded(directory: Path, **options: object) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    found: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, **options)
    return found.eval()


@pytest.mark.parametrize("scales", [(1.0,), (1.25, 0.5)])
def test_plain_transformers_gives_the_logits_of_the_reference(
    bank: Bank, tmp_path: Path, scales: Sequence[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    recipe = recipe_of(bank, scales)
    out = export(recipe, bank, tmp_path / "out", max_shard_bytes=100_000)
    model = loaded(out, trust_remote_code=True)
    expected = logits(merged_model(recipe, bank, dtype="float32"))
    assert torch.allclose(logits(model), expected, rtol=0, atol=1e-5)
    other = logits(merged_model(unaligned(recipe), bank, dtype="float32"))
    assert (other - expected).abs().max() > 0.01, "the alignments matter"
    # What transformers writes is such a checkpoint again.
    model.save_pretrained(tmp_path / "again")  # type: ignore[operator]
    assert torch.allclose(logits(loaded(tmp_path / "again", trust_remote_code=True)), expected, rtol=0, atol=1e-5)


def test_it_is_not_loaded_without_its_own_code(bank: Bank, tmp_path: Path) -> None:
    out = export(recipe_of(bank), bank, tmp_path / "out")
    with pytest.raises(ValueError, match="trust_remote_code"):
        loaded(out, trust_remote_code=False)
    card = (out / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert "There is no mergekit configuration: it has no alignments between layers." in card
    config = json.loads((out / "config.json").read_text())
    kind = bank.base.config["model_type"]
    assert config["model_type"] == f"aligned_{kind}"
    assert {*config["alignments"]} == {"1", "3"}
    assert (out / MODELING_FILE.name).read_bytes() == MODELING_FILE.read_bytes()


def test_aligned_export_keeps_its_dtype(bank: Bank, tmp_path: Path) -> None:
    """The alignment tensors have the export's dtype, which is read back."""
    recipe = recipe_of(bank)
    out = export(recipe, bank, tmp_path / "out", dtype=torch.bfloat16)
    tensors = load_file(out / "model.safetensors")
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert "model.layers.1.alignment.projection" in tensors
    assert is_written(recipe, out, torch.bfloat16)
    assert export(recipe, bank, out, dtype=torch.bfloat16) == out
    (out / MODELING_FILE.name).unlink()
    with pytest.raises(FileExistsError, match="exists and is not an export of recipe"):
        is_written(recipe, out, torch.bfloat16)


def test_alignments_that_are_gone_are_named(bank: Bank, tmp_path: Path) -> None:
    recipe = aligned(recipe_of(bank), "0" * 64, None, None)
    with pytest.raises(InvalidRecipe, match=r"layer 0: alignment '000000000000': .* cannot be read"):
        export(recipe, bank, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_shipped_file_needs_transformers() -> None:
    """The shipped file needs only torch and transformers and has a class for every path."""
    assert {*CLASSES} == {*PATH_TYPES}
    tree = ast.parse(MODELING_FILE.read_text())
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = [alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in imports if isinstance(node, ast.ImportFrom)]
    assert {name.split(".")[0] for name in names} <= {"__future__", "typing", "torch", "transformers"}
    defined = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    assert {f"{name}{kind}" for name in CLASSES.values() for kind in ("Config", "ForCausalLM")} <= defined
