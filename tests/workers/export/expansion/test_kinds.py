"""Models of different types, rotary embeddings and constants of norms in one form: each computes what it did."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.export.expansion.test_expansion import WIDE, build, logits
from workers.engines.vllm.paths.geometry import path_problems
from workers.errors import InvalidModel
from workers.export.expansion.files import expand
from workers.export.expansion.form import Form, common_form
from workers.export.expansion.rotary import Rotary, common_rotary
from workers.models.checkpoints import open_checkpoint
from workers.models.family import resolve_family

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "tie_word_embeddings": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}


def same(before: Path, after: Path) -> None:
    """Compare logits; a wrong factor on queries or on the residual stream changes them by more than 1 %."""
    one, other = logits(before), logits(after)
    assert (other - one).abs().max() < 1e-4 * one.abs().max()
    assert torch.equal(other.argmax(-1), one.argmax(-1))


def test_llama_mistral_and_qwen2_become_one_family(tmp_path: Path) -> None:
    """They differ in types, biases, sizes of heads, frequencies of rotary embeddings, and `rms_norm_eps`."""
    models = {
        "llama": build(tmp_path / "llama", "llama", {**SIZES, "rms_norm_eps": 1e-3}, rope_parameters=LLAMA3),
        "qwen": build(
            tmp_path / "qwen",
            "qwen2",
            {**SIZES, "num_attention_heads": 2, "rms_norm_eps": 1e-2},
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
        "mistral": build(
            tmp_path / "mistral", "mistral", {**SIZES, "rms_norm_eps": 1e-3}, sliding_window=None, rope_parameters=YARN
        ),
    }
    found = expand(models, tmp_path / "out")
    # 8 + 16 + 8 frequencies, of which each model has the frequency 1.
    assert (found.form.kind, found.form.shape.head_size, found.form.rotary.kind) == ("llama", 64, "longrope")
    assert found.form.rms_norm_eps == 1e-3
    assert "self_attn.o_proj.bias" in found.form.in_layer
    for name, directory in models.items():
        same(directory, found.directories[name])
        assert Form.of(open_checkpoint(found.directories[name])) == found.form
    base, *others = found.directories
    family = resolve_family(
        found.directories[base], {name: found.directories[name] for name in others}, base_alias=base
    )
    assert path_problems(family) == []
    again = expand({**found.directories, "first": models["llama"]}, tmp_path / "more")
    assert {name: again.directories[name] for name in found.directories} == found.directories


def test_untied_heads_are_not_multiplied(tmp_path: Path) -> None:
    """The residual stream of one model is multiplied by a factor; its logits stay, also beside an untied model."""
    models = {
        "tied": build(tmp_path / "tied", "llama", {**SIZES, "rms_norm_eps": 1e-2}),
        "untied": build(tmp_path / "untied", "llama", {**SIZES, "tie_word_embeddings": False, "rms_norm_eps": 1e-3}),
    }
    for first, second in (("tied", "untied"), ("untied", "tied")):
        found = expand({name: models[name] for name in (first, second)}, tmp_path / first)
        assert not found.form.shape.is_tied
        for name, directory in found.directories.items():
            same(models[name], directory)


def test_larger_heads_hold_the_frequencies_of_smaller_ones(tmp_path: Path) -> None:
    """With one base, every second pair of a head that is twice as large has the frequency of a pair."""
    models = {
        "small": build(tmp_path / "small", "llama", SIZES),
        "large": build(tmp_path / "large", "llama", {**SIZES, "num_attention_heads": 4, "head_dim": 32}),
    }
    found = expand(models, tmp_path / "out")
    assert (found.form.rotary.kind, found.form.shape.head_size) == ("default", 32)
    assert found.directories["large"] == models["large"]
    same(models["small"], found.directories["small"])


def test_models_of_the_type_qwen2_stay_of_it(tmp_path: Path) -> None:
    """VLLM computes the size of their heads from the number of channels, which grows with the heads."""
    models = {
        "first": build(tmp_path / "first", "qwen2", {**WIDE, "num_key_value_heads": 6}),
        "second": build(
            tmp_path / "second", "qwen2", SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e6}
        ),
    }
    found = expand(models, tmp_path / "out")
    shape = found.form.shape
    assert (found.form.kind, shape.head_size, shape.hidden) == ("qwen2", 32, 6 * 32)
    for name, directory in models.items():
        before, after = logits(directory), logits(found.directories[name])
        assert (after - before).abs().max() < 2e-3 * before.abs().max()  # rms_norm_eps beside zeros among the channels


def test_too_many_frequencies_are_refused(tmp_path: Path) -> None:
    sizes = {**SIZES, "head_dim": 128}
    models = {
        f"theta-{theta:g}": build(
            tmp_path / f"{theta:g}", "llama", sizes, rope_parameters={"rope_type": "default", "rope_theta": theta}
        )
        for theta in (1e4, 3e5, 7e6)
    }
    with pytest.raises(InvalidModel, match="have 190 different frequencies; expected at most 128, for heads of 256"):
        expand(models, tmp_path / "out")
    two = {name: open_checkpoint(models[name]) for name in ("theta-10000", "theta-7e+06")}
    assert common_form(two).shape.head_size == 256


def test_frequencies_are_those_that_transformers_computes(tmp_path: Path) -> None:
    """The common embedding has each frequency, to float32's precision once it is read from its configuration."""
    models = [
        open_checkpoint(build(tmp_path / str(theta), "llama", SIZES, rope_parameters={"rope_theta": theta, **kind}))
        for theta, kind in ((1e4, {"rope_type": "default"}), (7e5, {"rope_type": "linear", "factor": 3.0}))
    ]
    common = common_rotary(models)
    for model in models:
        own = Rotary.of(model)
        assert [common.frequencies[common.places[frequency]] for frequency in own.frequencies] == [*own.frequencies]
    found = expand({str(place): model.directory for place, model in enumerate(models)}, tmp_path / "out")
    read = Rotary.of(open_checkpoint(found.directories["0"]))
    assert read.frequencies == pytest.approx(common.frequencies, rel=1.2e-7)
    assert read.scale == 1
