"""Memory of training steps: the bytes of activations, and a setting with which a process keeps freed memory."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from typing import Any

__all__ = ["activation_bytes", "keep_freed_memory"]

# mallopt's parameters in glibc's malloc.h, and the environment variables that set them.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

KEPT = 128 << 20  # bytes of free heap that the process keeps
MAPPED = 32 << 20  # bytes above which an allocation is a separate mapping, which is returned when it is freed

# Activations beside those of the layers, such as logits and losses, as a share of them.
OTHER_ACTIVATIONS = 0.25


def keep_freed_memory() -> bool:
    """Make glibc keep up to 128 MB of this process's freed memory for later use; return whether it does.

    If a training step frees each gradient after its use, no memory is in use at the end of the heap after the step.
    glibc then returns the memory of the step's activations to the system, and in the next step every page causes a page
    fault. The page faults take about a tenth of a step of a model with 1M parameters. Allocations larger than 32 MB are
    always returned. Without glibc, or if environment variables already set its limits, the function changes nothing and
    returns False.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(variable in os.environ for variable in VARIABLES):
        return False
    return bool(mallopt(MMAP_THRESHOLD, MAPPED) and mallopt(TRIM_THRESHOLD, KEPT))


def activation_bytes(config: Mapping[str, Any], tokens: int, value_bytes: int, *, recomputes: bool) -> int:
    """Bytes of the activations that are kept for a backward pass over `tokens` tokens.

    `config` is the model's configuration, and `value_bytes` the number of bytes of a value. For each token, a layer of
    a Llama keeps 8 h + 4 d + 4 f values, as measured with PyTorch's allocator on CPU. h is the size of the residual
    stream, d the size of all keys of a token, and f the size of the MLP. With `recomputes`, only the activations of one
    layer and the inputs of all layers are kept.
    """
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_size = int(config.get("head_dim") or hidden // heads)
    keys = int(config.get("num_key_value_heads") or heads) * head_size
    layers = int(config["num_hidden_layers"])
    of_layer = 8 * hidden + 4 * keys + 4 * int(config.get("intermediate_size") or 4 * hidden)
    kept = of_layer + layers * hidden if recomputes else layers * of_layer
    return int((1 + OTHER_ACTIVATIONS) * kept * tokens * value_bytes)
