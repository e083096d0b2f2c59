"""Memory of an engine for layer paths, and the number of layers that it keeps in its pool, computed from sizes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from workers.engines.kv_cache import value_bytes
from workers.engines.vllm.memory import (
    FEW_TEXTS,
    MANY_TEXTS,
    MemoryRequirements,
    memory_requirements,
    usable_gpu_bytes,
)
from workers.errors import EngineUnavailable
from workers.models.family import ResolvedFamily

__all__ = ["alignment_bytes", "outside_bytes", "path_requirements", "pool_size", "widest_layer_bytes"]

GB = 1e9


def pool_size(*, room: int, layer_bytes: int, num_sources: int, num_layers: int, max_layers: int, of: str) -> int:
    """Number of layers that an engine for layer paths keeps in memory (its pool of layers).

    A layer path names the layers of a merge in the order in which they are computed. `num_sources` is the number of
    layers of all source models, and `max_layers` is the number of layers of the longest merge; these layers may all be
    different. Each source has `num_layers` layers, which no longest merge may be below, because the sources are scored
    too. A layer takes `layer_bytes`, and `room` bytes are free. The pool has room for all source layers and one
    longest merge, if they fit. Otherwise it has as many layers as fit, and a source's layer that was overwritten is
    written again when it is needed. `of` names the memory in messages. Raises EngineUnavailable if the layers of the
    longest merge do not fit.
    """
    fitting = max(room, 0) // layer_bytes
    if fitting < max_layers:
        lower = f"lower limits.max_layers to at most {fitting}"
        advice = lower if fitting >= num_layers else f"the sources have {num_layers}; use a larger machine"
        raise EngineUnavailable(
            f"paths of up to {max_layers} layers: one layer takes {layer_bytes / GB:.3g} GB, and {of} has room for "
            f"{fitting}, {max(room, 0) / GB:.3g} GB; {advice}"
        )
    return min(num_sources + max_layers, fitting)


def path_requirements(
    sources: ResolvedFamily,
    *,
    config: Mapping[str, Any],
    dtype: str,
    max_length: int,
    ranks: int,
    max_layers: int,
    aligns: bool,
    gpu_free: int,
    gpu_total: int,
    merges_parts: bool = False,
) -> tuple[MemoryRequirements, int]:
    """The memory that an engine for layer paths needs on each GPU, and the number of layers in its pool.

    The pool is as large as the GPU's memory allows beside the merging of one tensor and the keys and values of many
    texts (`pool_size`): with fewer texts at once, decoding is so much slower that writing layers again costs less. If
    the longest merge fits only beside few texts, the memory is planned for few. `config` is the configuration of the
    models, and `max_layers` is the number of layers of the longest merge. `aligns` says whether merges may have
    alignments. Each GPU has `gpu_total` bytes, of which `gpu_free` are free. The other arguments are as in
    `memory_requirements`. Raises EngineUnavailable if the longest merge does not fit.
    """
    size = value_bytes(dtype)
    config = {**config, "num_hidden_layers": max_layers}
    needs = memory_requirements(
        sources, config=config, dtype=dtype, max_length=max_length, ranks=ranks, merges_parts=merges_parts
    )
    # Every rank has the whole residual stream, and therefore whole alignments.
    aligned = alignment_bytes(config, max_layers, size) if aligns else 0
    outside = outside_bytes(sources, size) // ranks + aligned
    without = replace(needs, weights=outside)
    usable = usable_gpu_bytes(gpu_free, gpu_total) - needs.beside
    layer = widest_layer_bytes(sources, size)
    beside_many, beside_few = (ranks * (usable - without.engine(texts)) for texts in (MANY_TEXTS, FEW_TEXTS))
    held = pool_size(
        room=beside_many if beside_many >= max_layers * layer else beside_few,
        layer_bytes=layer,
        num_sources=len(sources.views) * sources.layout.num_layers,
        num_layers=sources.layout.num_layers,
        max_layers=max_layers,
        of="the GPU" if ranks == 1 else "the GPUs",
    )
    return replace(needs, weights=outside + held * layer // ranks), held


def widest_layer_bytes(sources: ResolvedFamily, value_bytes: int) -> int:
    """Bytes of the base model's largest layer, at `value_bytes` bytes for each element.

    `sources` are the base model and its experts.
    """
    layout = sources.layout
    names = ([name for name, place in layout.places.items() if place.layer == i] for i in range(layout.num_layers))
    return max(_bytes(sources, of_layer, value_bytes) for of_layer in names)


def outside_bytes(sources: ResolvedFamily, value_bytes: int) -> int:
    """Bytes of the base model's parameters outside layers: embedding, final norm and output head.

    `sources` are the base model and its experts. Each element takes `value_bytes` bytes.
    """
    return _bytes(sources, (n for n, place in sources.layout.places.items() if place.layer is None), value_bytes)


def alignment_bytes(config: Mapping[str, Any], max_layers: int, value_bytes: int) -> int:
    """Bytes of the alignments of the longest merge, if each of its `max_layers` layers has an alignment.

    An alignment is a map of the residual stream: a matrix [hidden, hidden] of values of `value_bytes` bytes. `config`
    is the model's configuration, which has the hidden size.
    """
    return max_layers * int(config["hidden_size"]) ** 2 * value_bytes


def _bytes(sources: ResolvedFamily, names: Iterable[str], value_bytes: int) -> int:
    return value_bytes * sum(math.prod(sources.base.tensors[name].shape) for name in names)
