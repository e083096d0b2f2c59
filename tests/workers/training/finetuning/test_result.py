"""The expert as a model directory: its files besides the weights are those of the base."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.builders import tiny_llama
from workers.training.finetuning.result import write_expert
from workers.training.finetuning.spec import parse_spec


@pytest.mark.parametrize("is_sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize(
    "given", [None, {"eos_token_id": 2, "temperature": 0.9, "top_p": 0.6}], ids=["none", "Llama 2"]
)
def test_expert_has_the_generation_config_of_its_base(
    tmp_path: Path, is_sharded: bool, given: dict[str, float] | None
) -> None:
    """Also a file that transformers reads but refuses to write, with a temperature and without `do_sample`."""
    base = tiny_llama(tmp_path / "base")
    file = base / "generation_config.json"
    file.unlink(missing_ok=True)
    if given is not None:
        file.write_text(json.dumps(given))
    (tmp_path / "a.jsonl").write_text("{}\n")
    document = {"name": "a", "base": "base", "data": {"file": "a.jsonl"}, "training": {"steps": 1}, "dtype": "float32"}
    spec = parse_spec(document, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    weights = dict(model.state_dict()) if is_sharded else None
    out = write_expert(
        spec, base, model, tmp_path / "model", sources={}, facts={"steps": 1, "loss": 0.5}, values={}, weights=weights
    )
    written = out / file.name
    assert (written.read_bytes() if written.exists() else None) == (file.read_bytes() if given else None)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
