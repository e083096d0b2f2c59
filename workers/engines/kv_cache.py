"""Bytes of the attention keys and values of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["kv_token_bytes", "value_bytes"]


def kv_token_bytes(config: Mapping[str, Any], dtype: str, ranks: int = 1) -> int:
    """Bytes of one token's attention keys and values on each of an engine's `ranks` GPUs.

    `config` is the model's configuration (config.json), and `dtype` is the engine's dtype.
    """
    heads = int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or config["hidden_size"] // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    return 2 * int(config["num_hidden_layers"]) * -(-kv_heads // ranks) * head_size * value_bytes(dtype)


def value_bytes(dtype: str) -> int:
    """Bytes of one value of an engine's dtype: 4 for "float32", else 2."""
    return 4 if dtype == "float32" else 2
