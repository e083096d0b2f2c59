"""Quantised checkpoints: the content of their files, and the weights that transformers reads from them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama
from workers.engines.transformers.backend import logprobs
from workers.errors import InvalidModel
from workers.export import quantised
from workers.export.quantised import quantise
from workers.models.config import read_config
from workers.tiny_family import family_dir

TEXT = tuple(range(3, 60))


@pytest.fixture(scope="module")
def checkpoint() -> Path:
    return family_dir() / "base"


def test_weights_are_near_and_small(checkpoint: Path, tmp_path: Path) -> None:
    """Both schemes store the linear layers in a quarter and half of 16 bits, and transformers reads them."""
    exact = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    sums = {}
    for scheme, most_error, most_bytes in (("int4", 0.1, 0.30), ("int8", 0.01, 0.53)):
        found = quantise(checkpoint, tmp_path / scheme, scheme=scheme)
        assert found.num_layers == 56
        assert 0 < found.error < most_error
        assert found.bytes_after < most_bytes * found.bytes_before
        read = AutoModelForCausalLM.from_pretrained(tmp_path / scheme, dtype=torch.float32)
        apart = torch.tensor(logprobs(read, TEXT)) - torch.tensor(logprobs(exact, TEXT))
        sums[scheme] = float(apart.square().mean().sqrt())
        linear = {name for name, module in exact.named_modules() if isinstance(module, torch.nn.Linear)} - {"lm_head"}
        pairs = [(read.get_submodule(name).weight, exact.get_submodule(name).weight) for name in linear]
        squared = sum(float((ours - theirs).square().sum().detach()) for ours, theirs in pairs)
        squares = sum(float(theirs.square().sum().detach()) for _, theirs in pairs)
        assert found.error == pytest.approx((squared / squares) ** 0.5, rel=0.01)
    assert 0 < sums["int8"] < sums["int4"]
    assert (tmp_path / "int4" / "tokenizer.json").read_bytes() == (checkpoint / "tokenizer.json").read_bytes()


def test_scales_are_those_with_the_least_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = quantise(checkpoint, tmp_path / "least", scheme="int4").error
    monkeypatch.setattr(quantised, "SHARES", (1.0,))
    assert least < 0.98 * quantise(checkpoint, tmp_path / "whole", scheme="int4").error


def test_a_model_in_several_files_keeps_them(checkpoint: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model", max_shard_size="500KB")
    found = quantise(tmp_path / "model", tmp_path / "out", scheme="int8")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = {file.name: load_file(file) for file in (tmp_path / "out").glob("*.safetensors")}
    assert len(files) > 1
    assert {name: file for file, tensors in files.items() for name in tensors} == index["weight_map"]
    assert index["metadata"]["total_size"] == found.bytes_after
    first = files[index["weight_map"]["model.layers.0.mlp.up_proj.weight"]]["model.layers.0.mlp.up_proj.weight"]
    assert first.dtype == torch.int8


def test_a_layer_whose_weights_are_not_found_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    """A file with other names than transformers' modules would leave layers in 16 bits."""
    shutil.copytree(checkpoint, tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    tensors["decoder.layers.3.mlp.up_proj.weight"] = tensors.pop("model.layers.3.mlp.up_proj.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(InvalidModel, match=r"1 of 56 linear layers .* such as model\.layers\.3\.mlp\.up_proj;"):
        quantise(tmp_path / "model", tmp_path / "out", scheme="int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_what_cannot_be_quantised_is_refused(tmp_path: Path) -> None:
    tiny_llama(tmp_path / "odd", 0, hidden=24, heads=2)
    with pytest.raises(InvalidModel, match=r"linear layers have .*24.* inputs; int4 needs multiples of 32"):
        quantise(tmp_path / "odd", tmp_path / "out", scheme="int4")
    assert not (tmp_path / "out").exists()
    mixture = {**read_config(tmp_path / "odd"), "model_type": "mixtral", "architectures": ["MixtralForCausalLM"]}
    (tmp_path / "odd" / "config.json").write_text(json.dumps({**mixture, "num_local_experts": 2}))
    with pytest.raises(InvalidModel, match="a mixture of experts"):
        quantise(tmp_path / "odd", tmp_path / "out", scheme="int8")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("")
    with pytest.raises(FileExistsError, match="full: is not empty"):
        quantise(family_dir() / "base", tmp_path / "full", scheme="int8")
    with pytest.raises(ValueError, match="scheme 'int2'; expected one of int4, int8"):
        quantise(family_dir() / "base", tmp_path / "out", scheme="int2")
