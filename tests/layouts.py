"""One tiny model of every layout that merges are shown to work for, made by transformers with random weights.

Used by the tests (what needs no engine) and by the benchmark `layouts` (a live engine for each).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests.builders import byte_tokenizer, character_tokenizer, save, tiny_family, with_random_norms_and_biases
from workers.types import Family

__all__ = ["LAYOUTS", "layout_family"]

COMMON: Mapping[str, Any] = {
    "vocab_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
# Six experts of a size that no kernel's block divides.
MIXTURE = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72}

# Configuration fields of each model type besides the common ones; None removes a common field.
LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True, "head_dim": None, "vocab_size": 384},
    "qwen3": {},
    "mistral": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 16},
    "phi3": {"head_dim": None, "original_max_position_embeddings": 512},
    "gpt2": {"intermediate_size": None, "num_key_value_heads": None, "head_dim": None},
    "gpt_neox": {"num_key_value_heads": None, "head_dim": None},
    "mixtral": {"num_local_experts": 6},
    "qwen2_moe": {**MIXTURE, "shared_expert_intermediate_size": 96},
    "qwen3_moe": {**MIXTURE, "mlp_only_layers": [1]},
    "granitemoehybrid": {
        "head_dim": None,
        "num_local_experts": 0,
        "shared_intermediate_size": 96,
        "layer_types": ["mamba", "attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
}


def layout_family(directory: str | Path, model_type: str, *, hidden: int = 32, **settings: Any) -> Family:
    """A base of that layout and the experts "math" and "text"; `settings` override its configuration.

    vLLM's CPU attention has no kernel for heads of less than 32, which are those of `hidden` 128.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = {"hidden_size": hidden, "intermediate_size": 5 * hidden // 4, "head_dim": hidden // 4}
    fields = {**COMMON, **sizes, **LAYOUTS[model_type], **settings}
    config = AutoConfig.for_model(model_type, **{name: value for name, value in fields.items() if value is not None})

    def build(place: Path, seed: int) -> Path:
        torch.manual_seed(seed)
        model = with_random_norms_and_biases(AutoModelForCausalLM.from_config(config))
        # transformers reads whatever a Qwen2 folder holds as byte-level BPE.
        return save(model, byte_tokenizer() if model_type == "qwen2" else character_tokenizer(), place)

    return tiny_family(directory, build=build, experts=("math", "text"), noise=0.05)
