"""Options of vLLM for engines on CPU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.engines.vllm.memory import kv_cache_bytes
from workers.evaluation.prompts import Prompts

__all__ = ["CACHE_BLOCK", "cpu_options"]

# Tokens of a block of the prefix cache, which keeps whole blocks only. It is the smallest block of vLLM's CPU kernels;
# with their default, 128 tokens, texts that share a chat template's system prompt or a short instruction share nothing.
CACHE_BLOCK = 32


def cpu_options(prompts: Prompts, config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Options of vLLM's class `LLM` that depend on the CPU's memory and kernels.

    `prompts` are those of the engine's model, `config` is the configuration of the longest model that the engine can
    hold, and `dtype` is the engine's dtype: "float32", "bfloat16" or "float16".
    """
    from workers.engines.vllm.capabilities import model_config

    model = model_config(prompts.directory, dtype=dtype)
    # vLLM's CPU kernels for state-space layers fail with prefix caching. Those for state-space layers and for latent
    # attention have blocks of their own.
    has_own_blocks = model.has_inner_state or model.use_mla
    return {
        "kv_cache_memory_bytes": kv_cache_bytes(config, prompts.max_length, dtype),
        "enable_prefix_caching": not model.has_inner_state,
        **({} if has_own_blocks else {"block_size": CACHE_BLOCK}),
    }
