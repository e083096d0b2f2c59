"""Batches in which transformers generates completions: how many texts, and the memory that they take on a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from workers.engines.kv_cache import kv_token_bytes

__all__ = ["BATCH", "TEXTS_READ", "batch_bytes", "fitting_batch"]

BATCH = 64  # texts that are completed at once, at most
TEXTS_READ = 8  # per objective: prompts with completions whose tokens' log-probabilities are compared

VALUE_BYTES = 4  # transformers computes in float32

# Values of the attention scores of two tokens that are in memory at once: before and after the softmax.
SCORES = 2


def batch_bytes(config: Mapping[str, Any], lengths: Iterable[tuple[int, int]], *, most: int = BATCH) -> int:
    """Bytes that the largest batch takes on a device beside the model's weights; 0 without texts.

    `config` is the model's configuration. `lengths` has, for each text, the number of tokens of its prompt and the
    largest number of tokens that are generated. Texts are sorted by the length of their prompts, and then divided into
    batches of at most `most`; in a batch, prompts are padded to the longest.
    """
    ordered = sorted(lengths)
    batches = (ordered[start : start + most] for start in range(0, len(ordered), most))
    return max((_bytes(config, batch) for batch in batches), default=0)


def fitting_batch(config: Mapping[str, Any], lengths: Sequence[tuple[int, int]], room: int) -> int:
    """Number of texts of the batches that are generated in `room` bytes, from 1 to BATCH.

    As at run time, batches have BATCH texts, or all texts if these are fewer, and are halved while they do not fit. The
    arguments are as in `batch_bytes`.
    """
    most = max(1, min(BATCH, len(lengths)))
    while most > 1 and batch_bytes(config, lengths, most=most) > room:
        most = (most + 1) // 2
    return most


def _bytes(config: Mapping[str, Any], batch: Sequence[tuple[int, int]]) -> int:
    """Bytes of keys and values of all tokens of a batch, and of the activations of one layer that reads its prompts."""
    heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
    width = batch[-1][0]
    tokens = width + max(generated for _, generated in batch)
    of_token = 3 * int(config.get("intermediate_size") or 4 * hidden) + 4 * hidden + SCORES * heads * width
    return len(batch) * (tokens * kv_token_bytes(config, "float32") + width * of_token * VALUE_BYTES)
