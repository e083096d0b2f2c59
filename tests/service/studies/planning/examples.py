"""Studies of models of 7B to 70B for plans: configurations alone, in the shapes of the published models."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from search_spaces.study.file import Study, parse_study
from tests.builders import byte_tokenizer

__all__ = ["EXAMPLES", "Example", "example_study"]

MODELS = Path(__file__).parent / "models"
EXPERTS = ("math", "code", "chat")
RANK = 16  # of LoRA adapters, on queries and values


class Example(NamedTuple):
    """A study of one family, and the profile of the machines for it."""

    model: str
    profile: str
    lora: bool = False
    engine: Mapping[str, Any] = {}


EXAMPLES: dict[str, Example] = {
    "Llama-3-8B, 3 full experts": Example("llama-3-8b", "h100x8", engine={"replicas": 7}),
    "Llama-3-8B, 3 LoRA experts": Example("llama-3-8b", "h100x8", lora=True, engine={"replicas": 7}),
    "Qwen2.5-7B, 3 full experts": Example("qwen2.5-7b", "a100x1"),
    "Llama-2-13B, 3 full experts": Example("llama-2-13b", "a100x8", engine={"replicas": 8, "dtype": "bfloat16"}),
    "70B, tensor parallel 8": Example("llama-3-70b", "h100x8", engine={"tensor_parallel_size": 8}),
    "70B on one GPU": Example("llama-3-70b", "h100x1"),
}


@cache
def _tokenizer() -> Any:
    return byte_tokenizer()


def example_study(directory: Path, example: Example, **sections: Any) -> Study:
    """Write the models of an example to `directory`, without weights, and return its study."""
    for name in ("base", *(() if example.lora else EXPERTS)):
        (directory / name).mkdir(parents=True)
        shutil.copy(MODELS / example.model / "config.json", directory / name)
        _tokenizer().save_pretrained(directory / name)
    if example.lora:
        config = json.loads((MODELS / example.model / "config.json").read_text())
        for name in EXPERTS:
            _adapter(directory / name, directory / "base", config)
    rows = [{"prompt": f"{i} and {i} make " * 12, "answer": f"{2 * i}, as told " * 3} for i in range(1000)]
    (directory / "tasks.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = {"file": "tasks.jsonl", "max_tokens": 256}
    document: dict[str, Any] = {
        "name": example.model,
        "models": {"base": "base", "experts": {name: name for name in EXPERTS}},
        "search_space": {"kind": "layerwise"},
        "search": {"algorithm": "auto", "max_trials": 4},
        "fidelity": {"scheduler": "none", "max_samples": 500},
        "objectives": [{"name": name, "task": task, "metric": "exact_match"} for name in ("sums", "words")],
        "engine": {"max_model_len": 2048, **example.engine},
    }
    return parse_study(document | sections, directory)


def _adapter(directory: Path, base: Path, config: Mapping[str, Any]) -> None:
    """A LoRA adapter of zeros on queries and values, as a sparse file."""
    directory.mkdir()
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    keys = hidden // config["num_attention_heads"] * config["num_key_value_heads"]
    header: dict[str, Any] = {}
    offset = 0
    for layer in range(layers):
        for module, width in (("q_proj", hidden), ("v_proj", keys)):
            for part, shape in (("lora_A", [RANK, hidden]), ("lora_B", [width, RANK])):
                end = offset + 2 * shape[0] * shape[1]
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.{part}.weight"
                header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
                offset = end
    text = json.dumps(header).encode()
    with (directory / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + offset)
    settings = {
        "peft_type": "LORA",
        "base_model_name_or_path": str(base),
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": ["q_proj", "v_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (directory / "adapter_config.json").write_text(json.dumps(settings))
