"""LoRA with a base in 4 bits: memory, trained weights, and refused settings. Needs bitsandbytes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from search_spaces.errors import InvalidStudy
from tests.builders import tiny_llama
from workers.errors import InvalidModel
from workers.models.checkpoints import open_checkpoint
from workers.training.finetuning.history import EXPERT, METRICS, read_history
from workers.training.finetuning.memory_plan import training_memory
from workers.training.finetuning.models import load_model
from workers.training.finetuning.spec import FinetuneSpec, parse_spec
from workers.training.finetuning.trainer import train

pytestmark = pytest.mark.slow  # models are trained

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("four_bits")
    tiny_llama(directory / "base", hidden=128)
    lines = [json.dumps({"prompt": f"{i}+1=", "completion": str(i + 1)}) for i in range(40)]
    (directory / "data.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def spec_of(place: Path, *, base_precision: str = "nf4", **changes: Any) -> FinetuneSpec:
    document: dict[str, Any] = {
        "name": "sums",
        "base": "base",
        "data": {"file": "data.jsonl", "max_length": 64},
        "method": {"kind": "adamw"},
        "adapter": {"rank": 4, "base_precision": base_precision},
        "training": {"steps": 12, "batch": 4, "learning_rate": 0.01, "checkpoint_every": 6},
        **changes,
    }
    return parse_spec(document, place)


def test_the_base_takes_the_planned_bytes(place: Path) -> None:
    pytest.importorskip("bitsandbytes")
    spec = spec_of(place)
    model = load_model(spec, place / "base", CPU)
    linear = [module for name, module in model.module.named_modules() if name.endswith(".base_layer")]
    assert len(linear) == 14, "all linear layers of two layers"
    elements = 0
    for module in linear:
        assert module.weight.dtype == torch.uint8
        elements += 2 * module.weight.numel()
    stored = open_checkpoint(place / "base").tensors
    assert elements == sum(math.prod(t.shape) for name, t in stored.items() if "proj" in name)
    scales = sum(
        sum(t.nbytes for t in (state.absmax, state.state2.absmax))
        for state in (module.weight.quant_state for module in linear)
    )
    others = sum(p.nbytes for name, p in model.module.named_parameters() if ".base_layer." not in name)
    plan = training_memory(spec, open_checkpoint(place / "base"), is_bfloat16=False)
    assert elements // 2 + scales + others == pytest.approx(plan.weights, rel=0.02)
    full = training_memory(
        spec_of(place, base_precision="activations"), open_checkpoint(place / "base"), is_bfloat16=False
    )
    assert plan.weights < 0.4 * full.weights
    assert {name.rsplit(".", 2)[-2] for name in model.trained} <= {"default"}


def test_it_learns_and_continues_and_is_an_adapter_to_the_base(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    train(spec_of(place), whole)
    losses = [line["loss"] for line in read_history(whole / METRICS)]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    train(spec_of(place, training={**spec_of(place).training.model_dump(exclude_none=True), "steps": 12}), parts)
    ours, theirs = (load_file(each / EXPERT / "adapter_model.safetensors") for each in (whole, parts))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    configuration = json.loads((whole / EXPERT / "adapter_config.json").read_text())
    assert configuration["r"] == 4
    assert not any("absmax" in name or "quant" in name for name in ours)
    assert sum(float(t.abs().sum()) for name, t in ours.items() if "lora_B" in name) > 0


def test_losses_are_near_those_over_the_base_in_full(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    found = {}
    for precision in ("nf4", "activations"):
        (tmp_path / precision).mkdir()
        train(spec_of(place, base_precision=precision), tmp_path / precision)
        found[precision] = [line["loss"] for line in read_history(tmp_path / precision / METRICS)]
    assert found["nf4"][0] != found["activations"][0]
    assert found["nf4"][0] == pytest.approx(found["activations"][0], rel=0.2)


def test_what_does_not_work_over_four_bits_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidStudy, match=r"adapter.base_precision: nf4 has no weights to which mergopt could add"):
        spec_of(place, method={"kind": "mergopt"})
    with pytest.raises(InvalidStudy, match=r"adapter.base_precision: nf4 is not sharded; give workers: 1, not 2"):
        spec_of(place, workers=2)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InvalidModel, match="needs the package bitsandbytes; install mergesearch with the extra nf4"):
        load_model(spec_of(place), place / "base", CPU)
