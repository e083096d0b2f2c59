"""Paths through a Llama and a Qwen2 with other rotary embeddings, biases and sizes, in a live engine."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.builders import character_tokenizer, tiny_llama
from tests.conftest import OPTIONS, record_engine_start
from tests.workers.export.expansion.test_expansion import build
from tests.workers.recipes import aligned, path, random_alignment
from workers.alignments.files import write_alignment
from workers.engines.source_recipes import source_recipe
from workers.engines.transformers.backend import logprobs
from workers.engines.transformers.merged_models import merged_model
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.worker_extension import family_to_json, open_bank
from workers.export.expansion.files import expand
from workers.models.family import open_family

pytestmark = pytest.mark.heavy  # starts an engine

TEXT = "a Llama and a Qwen"


def test_an_engine_has_a_llama_and_a_qwen2_in_one_path(tmp_path: Path) -> None:
    """The engine computes each model as it was before it was expanded, and paths as transformers does."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2}
    qwen = {**sizes, "num_key_value_heads": 1, "vocab_size": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-2}
    models = {
        "base": tiny_llama(tmp_path / "llama", 1, hidden=64, rms_norm_eps=1e-3),
        "qwen": build(
            tmp_path / "qwen",
            "qwen2",
            qwen,
            tokenizer=character_tokenizer(),
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        ),
    }
    found = expand(models, tmp_path / "out")
    assert found.form.shape.head_size == 64
    family = open_family(found.directories["base"], {"qwen": found.directories["qwen"]})
    family = replace(family, alignments_dir=str(tmp_path / "alignments"))
    started = time.perf_counter()
    with Engine(family, OPTIONS.model_copy(update={"max_layers": 6})) as engine:
        record_engine_start("Llama and Qwen2, paths, in the tests' process", time.perf_counter() - started)
        prompt = engine.prompts.encode(TEXT)
        for alias, given in models.items():
            engine.swap(source_recipe(family, alias, num_layers=found.form.shape.layers), check=True)
            own = AutoModelForCausalLM.from_pretrained(given, dtype="float32").eval()
            assert engine.logprobs([prompt]) == [pytest.approx(logprobs(own, prompt), abs=1e-3)]
        digest = write_alignment(tmp_path / "alignments", random_alignment("projection", found.form.shape.hidden, 3))
        recipe = aligned(path(family, [("base", 0), ("qwen", 1), ("qwen", 2), ("base", 1)]), digest)
        engine.swap(recipe, check=True)
        merged = merged_model(recipe, open_bank(family_to_json(family)), dtype="float32")
        assert engine.logprobs([prompt]) == [pytest.approx(logprobs(merged, prompt), abs=1e-3)]
