"""Options of engines on CPU, for vLLM's own reading of each kind of model."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from tests.layouts import COMMON, LAYOUTS
from workers.engines.vllm.memory import kv_cache_bytes
from workers.engines.vllm.startup.cpus import cpu_options

pytestmark = pytest.mark.heavy  # vLLM is imported

LATENT: dict[str, Any] = {
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
}


@pytest.mark.parametrize(
    ("model_type", "architecture", "settings", "shares", "block"),
    [
        ("llama", "LlamaForCausalLM", {}, True, 32),
        ("deepseek_v2", "DeepseekV2ForCausalLM", LATENT, True, None),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM", LAYOUTS["granitemoehybrid"], False, None),
    ],
)
def test_short_prefixes_are_shared_where_kernels_allow_it(
    tmp_path: Path, model_type: str, architecture: str, settings: dict[str, Any], shares: bool, block: int | None
) -> None:
    """Attention has small blocks; latent attention and state-space layers keep the blocks of their kernels."""
    sizes = {"hidden_size": 128, "intermediate_size": 160, "architectures": [architecture]}
    AutoConfig.for_model(model_type, **{**COMMON, **sizes, **settings}).save_pretrained(tmp_path)
    prompts: Any = SimpleNamespace(directory=str(tmp_path), max_length=64)
    config = {"num_attention_heads": 4, "hidden_size": 128, "num_hidden_layers": 9}
    options = cpu_options(prompts, config, "float32")
    assert options["enable_prefix_caching"] is shares
    assert options.get("block_size") == block
    assert options["kv_cache_memory_bytes"] == kv_cache_bytes(config, 64, "float32")
