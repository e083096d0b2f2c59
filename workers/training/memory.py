"""Memory of training steps: the bytes of activations, and a setting with which a process keeps freed memory."""

from __future__ import annotations

import bisect
import ctypes
import math
import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from search_spaces.methods import METHODS
from workers.merging.methods.peaks import BLOCK_BYTES, GPU_BLOCK_BYTES, Peak
from workers.models.headers import TensorInfo

if TYPE_CHECKING:
    from workers.models.family import ResolvedFamily

__all__ = [
    "LOGITS",
    "activation_bytes",
    "divided_layers",
    "keep_freed_memory",
    "pass_bytes",
    "reduction_bytes",
    "tokens_within",
]

# mallopt's parameters in glibc's malloc.h, and the environment variables that set them.
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")

KEPT = 128 << 20  # bytes of free heap that the process keeps
MAPPED = 32 << 20  # bytes above which an allocation is a separate mapping, which is returned when it is freed

# Activations beside those of the layers, such as embeddings and copies, as a share of them.
OTHER_ACTIVATIONS = 0.25

# Logits of a pass of gradients that are in memory at once (`workers.training.losses`), and the bytes of each, with its
# copies in float32 and its gradients.
LOGITS = 1 << 25
LOGIT_BYTES = 16

# Bytes of the float32 copies of a chunk of gradient, base, expert and difference (`workers.training.reduction.CHUNK`).
REDUCTION_CHUNK_BYTES = 6 * 4 * (1 << 22)


# Methods whose derivatives are inner products, computed without tensors of the merged tensor's size.
BY_PRODUCTS = frozenset({"linear", "passthrough", "task_arithmetic"})

# Memory that PyTorch takes to differentiate a method's function, besides the float32 operands and gradient: measured on
# CPU with the coefficients of tests. Ranks of elements (DELLA) are counted. `UNKNOWN` is for methods not listed.
UNKNOWN = Peak(12, 60)
PEAKS: Mapping[str, Peak] = {
    "breadcrumbs": Peak(8, 12),
    "breadcrumbs_l1": Peak(8, 10),
    "breadcrumbs_ties": Peak(11, 29),
    "breadcrumbs_ties_l1": Peak(9, 12),
    "consensus_ta": Peak(4, 17),
    "consensus_ties": Peak(4, 17),
    "dare_linear": Peak(4, 8),
    "dare_linear_l1": Peak(4, 14),
    "dare_ties": Peak(4, 12),
    "dare_ties_l1": Peak(9, 12),
    "della": Peak(8, 22),
    "della_l1": Peak(15, 29),
    "della_linear": Peak(8, 25),
    "della_linear_l1": Peak(8, 24),
    "karcher": Peak(0, 8),
    "m3_dare": Peak(4, 8),
    "m3_dare_ties": Peak(8, 28),
    "m3_ties": Peak(8, 34),
    "m3_ties_majority": Peak(8, 28),
    "multislerp": Peak(0, 8),
    "multislerp_task_vectors": Peak(4, 8),
    "multislerp_unscaled": Peak(0, 8),
    "multislerp_unscaled_task_vectors": Peak(4, 8),
    "nearswap": Peak(0, 24),
    "nuslerp": Peak(0, 8),
    "nuslerp_columns": Peak(0, 25, more_on_gpu=16),
    "nuslerp_columns_task_vectors": Peak(4, 25, more_on_gpu=16),
    "nuslerp_rows": Peak(0, 25),
    "nuslerp_rows_task_vectors": Peak(4, 25),
    "nuslerp_task_vectors": Peak(4, 8),
    "pcb": Peak(8, 16),
    "pcb_tanh": Peak(12, 24),
    "slerp": Peak(0, 8),
    "ties": Peak(4, 13),
    "ties_majority": Peak(4, 13),
    "ties_peft": Peak(8, 10),
    "ties_sum": Peak(4, 8),
    "ties_weighted": Peak(11, 29),
    "ties_weighted_l1": Peak(11, 29),
    "weighted_sum": Peak(0, 8),
    "wudi": Peak(4, 40, 12),
}


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


def activation_bytes(
    config: Mapping[str, Any], tokens: int, value_bytes: int, *, recomputes: bool, layers: int | None = None
) -> int:
    """Bytes of the activations that are kept for a backward pass over `tokens` tokens.

    `config` is the model's configuration, and `value_bytes` is the number of bytes of a value. For each token, a layer
    of a Llama keeps 8 h + 4 d + 4 f values, as measured with PyTorch's allocator on CPU: h is the size of the residual
    stream, d is the size of all keys of a token, and f is the size of the MLP. With `recomputes`, only the activations
    of one layer and the inputs of all layers are kept. `layers` is the number of layers on the device; None means all
    layers.
    """
    hidden, heads = int(config["hidden_size"]), int(config.get("num_attention_heads") or 1)
    head_size = int(config.get("head_dim") or hidden // heads)
    keys = int(config.get("num_key_value_heads") or heads) * head_size
    layers = int(config["num_hidden_layers"]) if layers is None else layers
    of_layer = 8 * hidden + 4 * keys + 4 * int(config.get("intermediate_size") or 4 * hidden)
    kept = of_layer + layers * hidden if recomputes else layers * of_layer
    return int((1 + OTHER_ACTIVATIONS) * kept * tokens * value_bytes)


def pass_bytes(
    config: Mapping[str, Any], tokens: int, value_bytes: int, *, recomputes: bool, layers: int | None = None
) -> int:
    """Bytes of memory of a pass of gradients over `tokens` tokens, besides the model and one gradient.

    The bytes are those of the activations (function `activation_bytes`) and of the logits of at most `tokens` tokens.
    If these are more than LOGITS, they are computed in chunks, and the gradients of two chunks with respect to the
    output head are in memory together. Models without a vocabulary have no logits.
    """
    vocabulary = int(config.get("vocab_size") or 0)
    logits = tokens * vocabulary
    of_head = vocabulary * int(config["hidden_size"]) * value_bytes if logits > LOGITS else 0
    activations = activation_bytes(config, tokens, value_bytes, recomputes=recomputes, layers=layers)
    return activations + LOGIT_BYTES * min(logits, LOGITS) + of_head


def reduction_bytes(sources: ResolvedFamily, methods: Iterable[str] = (), *, on_gpu: bool = True) -> int:
    """Peak memory, in bytes, to convert the gradient of one merged tensor into derivatives of its coefficients.

    `methods` are the merge methods of which coefficients have gradients. The estimate is for the tensor that takes the
    most. With `on_gpu`, the tensors of all `sources` from which it is merged are copied to the GPU, in their stored
    dtypes; a CPU reads them where they are. A tensor that an adapter changes is computed. By inner products,
    differences are computed in float32, a part of the tensor at a time. Other methods are differentiated through their
    function, which takes float32 operands and the memory of `PEAKS` (a table).
    """
    through = [method for method in methods if method not in BY_PRODUCTS and METHODS[method].gradients_by]
    block = (GPU_BLOCK_BYTES if on_gpu else BLOCK_BYTES) if through else 0
    most, is_adapted = 0, False
    for name, header in sources.base.tensors.items():
        shape, count = tuple(header.shape), math.prod(header.shape)
        copied = converted = 0
        for source in (view.tensors.get(name) for view in sources.views.values()):
            if isinstance(source, TensorInfo):
                copied += source.num_bytes if on_gpu else 0
                converted += 0 if source.dtype == "F32" else 4 * count
            elif source is not None:
                copied += 8 * count  # in float32, as the product of which it is the sum
                is_adapted = True
        taken = 0
        for method in through:
            number = len(sources.views) - METHODS[method].needs_base
            taken = max(taken, PEAKS.get(method, UNKNOWN).num_bytes(shape, number, on_gpu=on_gpu))
        most = max(most, copied + (converted + 4 * count + taken if through else 0))
    return most + block + (REDUCTION_CHUNK_BYTES if on_gpu or is_adapted else 0)


def tokens_within(
    room_bytes: int, config: Mapping[str, Any], value_bytes: int, *, recomputes: bool, layers: int | None = None
) -> int:
    """Largest number of tokens of a pass whose activations and logits fit into `room_bytes` bytes; at least 0.

    The other arguments are as in the function `pass_bytes`.
    """

    def taken(tokens: int) -> int:
        return pass_bytes(config, tokens, value_bytes, recomputes=recomputes, layers=layers)

    # Every token takes at least one byte.
    return max(0, bisect.bisect_right(range(max(0, room_bytes) + 1), room_bytes, key=taken) - 1)


def divided_layers(layer_bytes: int, num_layers: int, outside_bytes: int, num_devices: int) -> tuple[int, ...]:
    """Divide a model's layers over devices; returns the number of layers on each of `num_devices` devices.

    The first device also has everything outside layers (embedding, final norm and head), which takes `outside_bytes`
    bytes; a layer takes `layer_bytes`. Each of the `num_layers` layers in turn is given to the device with the fewest
    bytes. Therefore the bytes on two devices differ by at most one layer, unless the tensors outside layers alone
    exceed the other devices' shares.
    """
    held, counts = [outside_bytes, *[0] * (num_devices - 1)], [0] * num_devices
    for _ in range(num_layers):
        least = min(range(num_devices), key=lambda device: (held[device], device))
        held[least] += layer_bytes
        counts[least] += 1
    return tuple(counts)
