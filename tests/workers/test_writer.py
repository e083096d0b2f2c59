from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from search_spaces.recipe import Recipe
from tests.workers.recipes import arithmetic, slerp
from workers.bank import Bank
from workers.checkpoints import check_tokenizer, open_checkpoint
from workers.merging import merged_tensors
from workers.types import Family
from workers.writer import export


@dataclass(frozen=True)
class Held:
    value: float
    ci95: tuple[float, float]
    samples: int


@pytest.fixture(scope="module")
def untied(untied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(untied_family, cache=tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tied(tied_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Bank:
    return Bank(tied_family, cache=tmp_path_factory.mktemp("cache"))


def stored(directory: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_shard_bytes", [2 * 10**9, 100_000])
def test_the_files_hold_the_stream_bit_for_bit(
    untied: Bank, tmp_path: Path, dtype: torch.dtype, max_shard_bytes: int
) -> None:
    recipe = arithmetic(untied.family, 0.31, 0.47)
    out = export(recipe, untied, tmp_path / "out", dtype=dtype, max_shard_bytes=max_shard_bytes)
    expected, found = dict(merged_tensors(recipe, untied, dtype)), stored(out)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) and found[name].dtype == dtype for name, tensor in expected.items())
    assert (out / "model.safetensors").exists() == (max_shard_bytes > 10**9)
    assert open_checkpoint(out).tensors.keys() == expected.keys()


def test_shards_stay_under_their_limit_and_are_indexed(untied: Bank, tmp_path: Path) -> None:
    out = export(arithmetic(untied.family, 0.5, 0.5), untied, tmp_path / "out", max_shard_bytes=300_000)
    files = sorted(out.glob("*.safetensors"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert [file.name for file in files] == sorted(set(index["weight_map"].values()))
    assert files[0].name == f"model-00001-of-{len(files):05}.safetensors"
    assert len(files) > 1
    for file in files:
        tensors = load_file(file)
        assert sum(tensor.nbytes for tensor in tensors.values()) <= 300_000 or len(tensors) == 1
        assert all(index["weight_map"][name] == file.name for name in tensors)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored(out).values())


def test_transformers_computes_with_the_merged_weights(untied: Bank, tied: Bank, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    for bank in (untied, tied):
        recipe = slerp(bank.family, 0.4)
        out = export(recipe, bank, tmp_path / bank.base.config["model_type"])
        model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
        expected = dict(merged_tensors(recipe, bank, torch.float32))
        parameters = dict(model.named_parameters())
        assert expected.keys() == parameters.keys()  # a tied head is no parameter of its own
        assert all(torch.equal(parameters[name], tensor) for name, tensor in expected.items())
        if bank.layout.is_tied:
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight


def test_an_export_is_a_whole_model_folder(tied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(tied.family, 0.3, 0.3)
    out = export(recipe, tied, tmp_path / "new" / "out", dtype=torch.bfloat16, study="demo")
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert {**config, "dtype": "float32"} == tied.base.config
    base_dir = tied.base.directory
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (out / name).read_bytes() == (base_dir / name).read_bytes()
    check_tokenizer(out)
    document = json.loads((out / "recipe.json").read_text())
    assert Recipe.from_json(document) == recipe
    assert (document["digest"], document["dtype"], document["study"]) == (recipe.digest, "bfloat16", "demo")
    assert oct(out.stat().st_mode & 0o777) == oct(base_dir.stat().st_mode & 0o777)
    assert [file.name for file in out.parent.iterdir()] == ["out"]


def test_another_depth_is_written_to_the_configuration(tied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(tied.family, 0.3, 0.3)
    out = export(replace(recipe, layers=recipe.layers[:2]), tied, tmp_path / "out")
    config = json.loads((out / "config.json").read_text())
    assert config["num_hidden_layers"] == 2
    assert len(config["layer_types"]) == 2
    assert open_checkpoint(out).layout.num_layers == 2


def test_the_model_card_tells_sources_recipe_scores_and_licences(untied_family: Family, tmp_path: Path) -> None:
    experts = []
    for expert, licence in zip(untied_family.experts, ("apache-2.0", "mit"), strict=True):
        copy = shutil.copytree(expert.directory, tmp_path / expert.alias)
        (copy / "README.md").write_text(f"---\nlicense: {licence}\n---\n# Model\n")
        experts.append(replace(expert, directory=str(copy)))
    bank = Bank(replace(untied_family, experts=tuple(experts)), cache=tmp_path / "cache")
    recipe = slerp(bank.family, 0.25)
    scores = {"math": Held(0.61234, (0.55, 0.67), 200)}
    card = (export(recipe, bank, tmp_path / "out", scores=scores, study="demo") / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {"library_name": "transformers", "tags": ["merge", "mergesearch"], "license": "other"}
    assert f"| math | expert | math | apache-2.0 | `{recipe.models['math']}` |" in card
    assert f"| base | base | base | not stated | `{recipe.models['base']}` |" in card
    assert "| math | 0.6123 | 0.5500 to 0.6700 | 200 |" in card
    assert 'by the study "demo"' in card
    assert re.search(r"\| 0-4 \| attention \| slerp \| (math, text|text, math) \| t = 0\.[27]5 \|", card)
    assert "| 0-4 | norm | passthrough | base |  |" in card
    assert recipe.digest in card
    assert str(tmp_path) not in card


def test_layers_that_differ_have_rows_of_their_own(untied: Bank, tmp_path: Path) -> None:
    one, other = arithmetic(untied.family, 0.3, 0.4), arithmetic(untied.family, 0.5, 0.6)
    mixed = replace(one, layers=(*one.layers[:2], other.layers[2], *one.layers[3:]))
    card = (export(mixed, untied, tmp_path / "out") / "README.md").read_text()
    assert re.findall(r"^\| ([-\d]+) \| mlp ", card, re.MULTILINE) == ["0-1", "2", "3-4"]


def test_the_same_export_again_changes_nothing(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    out = export(recipe, untied, tmp_path / "out")
    before = {file.name: file.stat().st_mtime_ns for file in out.iterdir()}
    assert export(recipe, untied, out) == out
    assert {file.name: file.stat().st_mtime_ns for file in out.iterdir()} == before


def test_a_directory_with_anything_else_is_refused(untied: Bank, tmp_path: Path) -> None:
    recipe = arithmetic(untied.family, 0.3, 0.4)
    out = export(recipe, untied, tmp_path / "out")
    for attempt in (
        lambda: export(arithmetic(untied.family, 0.3, 0.5), untied, out),
        lambda: export(recipe, untied, out, dtype=torch.bfloat16),
    ):
        with pytest.raises(FileExistsError, match=r"out: exists and is not an export of recipe [0-9a-f]{12} in \w+; "):
            attempt()
    (out / "model.safetensors").write_bytes(b"")  # no longer whole
    with pytest.raises(FileExistsError, match="expected a new or empty directory"):
        export(recipe, untied, out)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(FileExistsError, match="file: exists and is not an export"):
        export(recipe, untied, tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert export(recipe, untied, tmp_path / "empty") == tmp_path / "empty"


def test_an_unknown_dtype_is_refused(untied: Bank, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype float64; expected one of float32, bfloat16, float16"):
        export(arithmetic(untied.family, 0.3, 0.4), untied, tmp_path / "out", dtype=torch.float64)


def test_a_failed_export_leaves_nothing(untied: Bank, tmp_path: Path) -> None:
    class Unfinished(Bank):
        def __init__(self) -> None:
            self.__dict__.update(untied.__dict__)

        def get(self, alias: str, name: str) -> torch.Tensor:
            if name == "model.norm.weight":
                raise OSError("no space left on device")
            return super().get(alias, name)

    with pytest.raises(OSError, match="no space left"):
        export(arithmetic(untied.family, 0.3, 0.4), Unfinished(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_a_killed_export_is_swept_by_the_next_and_a_running_one_is_not(untied: Bank, tmp_path: Path) -> None:
    code = (
        "import fcntl, os, sys, time; d = os.open(sys.argv[1], os.O_RDONLY); fcntl.flock(d, fcntl.LOCK_EX); "
        "print('locked', flush=True); time.sleep(600)"
    )
    partial = tmp_path / ".out.0badf00d.partial"
    partial.mkdir()
    (partial / "model.safetensors").write_bytes(b"half")
    with subprocess.Popen([sys.executable, "-c", code, str(partial)], stdout=subprocess.PIPE) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"locked\n"
        recipe = arithmetic(untied.family, 0.3, 0.4)
        out = export(recipe, untied, tmp_path / "out")
        assert partial.exists()
        os.kill(running.pid, signal.SIGKILL)
    shutil.rmtree(out)
    export(recipe, untied, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
