"""The number of layers that an engine for layer paths keeps in its pool, computed from sizes in bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from workers.errors import EngineUnavailable
from workers.models.family import ResolvedFamily

__all__ = ["alignment_bytes", "outside_bytes", "pool_size", "widest_layer_bytes"]

GB = 1e9


def pool_size(*, room: int, layer_bytes: int, num_sources: int, max_layers: int, of: str) -> int:
    """Number of layers that an engine for layer paths keeps in memory (its pool of layers).

    A layer path names the layers of a merge in the order in which they are computed. `num_sources` is the number of
    layers of all source models, and `max_layers` is the number of layers of the longest merge; these layers may all be
    different. A layer takes `layer_bytes`, and `room` bytes are free. The pool has room for all source layers and one
    longest merge, if they fit. Otherwise it has as many layers as fit, and a source's layer that was overwritten is
    written again when it is needed. `of` names the memory in messages. Raises EngineUnavailable if the layers of the
    longest merge do not fit.
    """
    fitting = max(room, 0) // layer_bytes
    if fitting < max_layers:
        advice = f"lower limits.max_layers to at most {fitting}" if fitting else "use a larger machine"
        raise EngineUnavailable(
            f"paths of up to {max_layers} layers: one layer takes {layer_bytes / GB:.3g} GB, and {of} has room for "
            f"{fitting}, {max(room, 0) / GB:.3g} GB; {advice}"
        )
    return min(num_sources + max_layers, fitting)


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
