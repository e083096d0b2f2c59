"""Division of a machine's memory between an engine, the source weights, and the computation of merges.

The module only does arithmetic on bytes: the sizes of free memory are arguments, and nothing is allocated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from workers.engines.kv_cache import kv_token_bytes, value_bytes
from workers.errors import EngineUnavailable
from workers.merging.recent import recent_bytes, statistics_bytes
from workers.models.family import ResolvedFamily
from workers.models.headers import DTYPE_BYTES
from workers.types import Placement

__all__ = [
    "CONTEXT_BYTES",
    "FEW_TEXTS",
    "HOST_SHARE",
    "MANY_TEXTS",
    "MAX_NUM_BATCHED_TOKENS",
    "MAX_NUM_SEQS",
    "EngineMemory",
    "MemoryRequirements",
    "batched_tokens",
    "divide_memory",
    "free_for_engine",
    "kv_cache_bytes",
    "logprobs_bytes",
    "memory_requirements",
    "usable_gpu_bytes",
]

GB = 1e9

MAX_NUM_SEQS = 256  # texts that an engine serves at once, at most
MAX_NUM_BATCHED_TOKENS = 4096  # tokens of one forward pass

# vLLM's default. vLLM reserves this share of a GPU's total memory, and fails if less is free. The rest is for uses that
# vLLM does not count: the context and communication.
USABLE_SHARE = 0.92
CONTEXT_BYTES = 1 << 30
# Memory of an engine besides weights, keys and values: activations of a full batch, captured graphs.
ACTIVATION_BYTES = 2 << 30
# Bytes of each logit of a prompt, besides the logit itself, while vLLM's model runner V1 computes log-probabilities:
# its copy in float32, which PyTorch makes of bfloat16 and of vocabularies that vLLM has padded, and its log-softmax.
# The log-softmax of the text before in the same pass is kept meanwhile. vLLM does not count them. V2 takes less.
FLOAT32_LOGITS_BYTES, LOG_SOFTMAX_BYTES = 4, 4
# The number of texts of TEXT_TOKENS tokens that an engine should serve at once. With fewer than MANY_TEXTS, decoding is
# so much slower that swapping from host memory costs less; with fewer than FEW_TEXTS, even swapping from mapped files
# costs less.
TEXT_TOKENS = 512
MANY_TEXTS, FEW_TEXTS = 128, 16
# The largest share of the free host memory for all copies of a bank on a machine, with their statistics.
HOST_SHARE = 0.5


@dataclass(frozen=True)
class MemoryRequirements:
    """Bytes that an engine and its source weights need on each GPU.

    - `bank`: the size of the sources as they are stored
    - `weights`: the size of the merged model; with several GPUs (`ranks`), the part of one GPU
    - `kv_token`: the size of one token's keys and values; with several GPUs, the part of one GPU
    - `scratch`: the memory for merging the largest tensor; with several GPUs that merge parts, the memory of one GPU
    - `max_length`: the number of tokens of the longest text (not bytes)
    - `ranks`: the number of GPUs
    - `statistics`: the size of the statistics of source weights that merging caches, always in host memory
    - `recent`: the part of `statistics` that may be dropped and computed again, if there is less memory
    - `logprobs`: the memory for the log-probabilities of all tokens of one pass over a prompt
    """

    bank: int
    weights: int
    kv_token: int
    scratch: int
    max_length: int
    ranks: int = 1
    statistics: int = 0
    recent: int = 0
    logprobs: int = 0

    @property
    def beside(self) -> int:
        """Bytes on each GPU beside the engine's share and the source weights: for merging, or for log-probabilities.

        No log-probabilities are computed during a merge, so the larger of both is enough.
        """
        return max(self.scratch, self.logprobs)

    def engine(self, num_texts: int) -> int:
        """Bytes on each GPU for an engine that processes `num_texts` texts at once, without the source weights."""
        num_tokens = max(self.max_length, num_texts * min(TEXT_TOKENS, self.max_length))
        return self.weights + ACTIVATION_BYTES + num_tokens * self.kv_token


@dataclass(frozen=True)
class EngineMemory:
    """The division of memory between an engine and its source weights.

    The sources' weights go to the first of `placements` (GPU, host memory or mapped files) that has enough free memory
    once the engine runs. `gpu_share` is the engine's share of a GPU's memory. `reason` explains the choice for users.
    `recent` is the host memory of each process for statistics that may be dropped and computed again.
    """

    placements: tuple[Placement, ...]
    gpu_share: float
    reason: str
    recent: int = 0


def divide_memory(
    needs: MemoryRequirements, *, gpu_free: int, gpu_total: int, host_free: int, processes: int, is_shared: bool
) -> EngineMemory:
    """Divide the memory of GPUs and host between engine and source weights.

    - `needs`: the memory that engine and source weights need
    - `gpu_free`, `gpu_total`: the free bytes and all bytes of each GPU
    - `host_free`: the free bytes of the host
    - `processes`: the number of processes of engines that may run on the host at once, each of which keeps statistics
      of the sources
    - `is_shared`: whether these processes share one copy of the sources; otherwise each has a copy

    The sources are kept in the first of these places that is possible:

    - on the GPU, if enough GPU memory remains for keys and values of many texts at once; if the host has too little
      memory for the sources, memory for a few texts is enough
    - in host memory, if the sources and statistics of all processes fit into a part of it
    - in files mapped into memory

    Statistics that may be dropped get the host memory that the sources leave, so that they never displace the sources.

    Raises EngineUnavailable if the merged model does not fit into the GPU.
    """
    usable = usable_gpu_bytes(gpu_free, gpu_total)
    most = min(usable, gpu_free - CONTEXT_BYTES - needs.logprobs)  # for the engine, if tensors are merged on the CPU
    if most < needs.engine(1):
        needed = needs.engine(1) + CONTEXT_BYTES + needs.logprobs
        raise EngineUnavailable(
            f"the GPU has {gpu_total / GB:.1f} GB, of which {gpu_free / GB:.1f} GB are free; the engine needs "
            f"{needed / GB:.1f} GB, {needs.weights / GB:.1f} GB of them for weights; "
            "free the GPU, use a larger one, or more of them (engine.tensor_parallel_size)"
        )
    room = usable - needs.beside
    left = room - needs.bank
    copies = 1 if is_shared else processes
    spare = int(HOST_SHARE * host_free) - copies * needs.bank - processes * (needs.statistics - needs.recent)
    in_host = spare >= 0
    recent = max(0, min(needs.recent, (spare if in_host else spare + copies * needs.bank) // processes))
    off_gpu = (Placement.HOST, Placement.MAPPED) if in_host else (Placement.MAPPED,)
    sizes = f"{needs.bank / GB:.1f} GB of sources"
    if left >= needs.engine(MANY_TEXTS if in_host else FEW_TEXTS):
        for_texts = (left - needs.weights - ACTIVATION_BYTES) / GB
        reason = f"{sizes} leave {for_texts:.1f} GB of the GPU's {gpu_total / GB:.1f} GB for keys and values"
        return EngineMemory((Placement.GPU, *off_gpu), _share(left, gpu_total), reason, recent)
    reason = f"next to {sizes} the GPU's {gpu_total / GB:.1f} GB have too little room for an engine"
    if not in_host:
        number = "a copy" if copies == 1 else f"{copies} copies (one for each GPU)"
        if is_shared and processes > 1:
            number = f"a copy that {processes} GPUs share, with statistics for each,"
        reason += f", and {number} would be more than half of the {host_free / GB:.1f} GB free on the host"
    return EngineMemory(off_gpu, _share(max(room, min(most, needs.engine(FEW_TEXTS))), gpu_total), reason, recent)


def usable_gpu_bytes(gpu_free: int, gpu_total: int) -> int:
    """Bytes of a GPU that an engine, its source weights and merging may use together.

    The result is `gpu_free`, the free bytes of the GPU, minus the size of CUDA's context, but at most USABLE_SHARE of
    `gpu_total`.
    """
    return min(int(USABLE_SHARE * gpu_total), gpu_free - CONTEXT_BYTES)


def free_for_engine(gpu_free: int, gpu_total: int, share_left: float) -> int:
    """Bytes of a GPU that count as free for an engine, if it leaves the share `share_left` of the GPU to other uses.

    The other uses may have begun or not: `gpu_free` is the number of bytes that are free now, of `gpu_total` bytes. The
    part of a GPU that nobody plans for (1 - USABLE_SHARE) stays free.
    """
    return min(gpu_free, int((USABLE_SHARE - share_left) * gpu_total) + CONTEXT_BYTES) if share_left else gpu_free


def _share(num_bytes: int, total: int) -> float:
    return math.floor(1e4 * num_bytes / total) / 1e4


def memory_requirements(
    sources: ResolvedFamily,
    *,
    config: Mapping[str, Any],
    dtype: str,
    max_length: int,
    ranks: int = 1,
    merges_parts: bool = False,
) -> MemoryRequirements:
    """The memory that an engine for the models in `sources` needs on each GPU.

    `dtype` is the engine's dtype ("float32", ...), `config` is the configuration of the merged model, `max_length` is
    the number of tokens of the longest text, and `ranks` is the number of GPUs. With `merges_parts`, a GPU merges only
    the part of a tensor that it holds. It has memory for a whole result nevertheless, because vLLM's loader gets whole
    tensors when it is asked which part that is.
    """
    models = sources.views
    size_of_value = value_bytes(dtype)
    heads = sources.base.layout.task_heads  # which other models need not have, and which are not merged
    sizes = {name: math.prod(tensor.shape) for name, tensor in sources.base.tensors.items() if name not in heads}
    operands = (
        num_elements * (size_of_value + sum(DTYPE_BYTES[model.tensors[name].dtype] for model in models.values()))
        for name, num_elements in sizes.items()
    )
    scratch = max(operands, default=0)
    if merges_parts:
        scratch = max(-(-scratch // ranks), max(sizes.values(), default=0) * size_of_value)
    return MemoryRequirements(
        bank=sources.stored_bytes,
        weights=sum(sizes.values()) * size_of_value // ranks,
        kv_token=kv_token_bytes(config, dtype, ranks),
        scratch=scratch,
        max_length=max_length,
        ranks=ranks,
        statistics=statistics_bytes(sources),
        recent=recent_bytes(sources),
        logprobs=logprobs_bytes(int(config.get("vocab_size") or 0), dtype, max_length),
    )


def logprobs_bytes(vocabulary: int, dtype: str, max_length: int) -> int:
    """Bytes that vLLM takes on a GPU for the log-probabilities of the prompts of one pass, one prompt after the other.

    `vocabulary` is the number of token ids, `dtype` is the engine's dtype, and `max_length` is the number of tokens of
    the longest text.
    """
    tokens = min(max_length, MAX_NUM_BATCHED_TOKENS)
    before = min(max_length, MAX_NUM_BATCHED_TOKENS - tokens)
    of_logit = value_bytes(dtype) + FLOAT32_LOGITS_BYTES + LOG_SOFTMAX_BYTES
    return vocabulary * (tokens * of_logit + before * LOG_SOFTMAX_BYTES)


def batched_tokens(max_length: int, *, is_cpu: bool) -> int:
    """The largest number of tokens of one forward pass of an engine.

    `max_length` is the number of tokens of the longest text. On a GPU, a text with more tokens than
    MAX_NUM_BATCHED_TOKENS is read in several passes, because vLLM computes the log-probabilities of all tokens of a
    pass at once: for 32,768 tokens and a vocabulary of 128,256 they would take 42 GB in bfloat16.
    """
    return max(MAX_NUM_BATCHED_TOKENS, max_length) if is_cpu else MAX_NUM_BATCHED_TOKENS


def kv_cache_bytes(config: Mapping[str, Any], max_length: int, dtype: str) -> int:
    """Bytes that an engine on CPU reserves for its KV cache.

    `config` is the model's configuration, `max_length` is the number of tokens of the longest text, and `dtype` is the
    engine's dtype. The result is what a full batch of texts of TEXT_TOKENS tokens needs, but at most 1 GiB. Only if one
    text of `max_length` tokens needs more, the result is what this text needs.
    """
    per_token = kv_token_bytes(config, dtype)
    block = 128  # tokens, the largest block on CPU
    one_text = (max_length // block + 2) * block * per_token
    return max(one_text, min(1 << 30, MAX_NUM_SEQS * min(TEXT_TOKENS, max_length + block) * per_token))
