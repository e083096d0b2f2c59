"""Which chunk each replica scores, noted in Ray's key-value store, where it outlives the replica's process.

When a replica's process has ended, the callers of all its requests get the same error. Here each of them reads whether
its own chunk was being scored, or only waited.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace

from workers.types import ScoreRequest, digest_of

__all__ = ["CurrentChunk", "chunk_id", "current_chunk", "note_chunk"]

log = logging.getLogger(__name__)

NAMESPACE = "mergesearch"
KEY = "chunk of replica "


@dataclass(frozen=True)
class CurrentChunk:
    """The last chunk that a replica began. `scored_others`: the replica had scored another recipe before. `overdue`:
    why it counts as hung (`watchdog`). `error_log` is a file of the Ray node `node` (hex); both empty if not known."""

    chunk: str
    replica: str
    scored_others: bool
    log_file: str
    overdue: str | None = None
    error_log: str = ""
    node: str = ""


def chunk_id(request: ScoreRequest) -> str:
    """Equal for equal requests of a study."""
    spans = [[span.objective, span.task.digest, span.start, span.stop] for span in request.spans]
    return digest_of([request.study, request.recipe.digest, spans])


def note_chunk(current: CurrentChunk) -> None:
    """Notes the chunk with the node. Called in a replica; without Ray, or while its head is gone, nothing is noted."""
    import ray
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_put

    if not ray.is_initialized():
        return
    try:
        context = ray.get_runtime_context()
        note = json.dumps(asdict(replace(current, node=context.get_node_id())))
        _internal_kv_put(f"{KEY}{context.get_actor_id()}", note, namespace=NAMESPACE)
    except RayError as error:
        log.warning("the current chunk was not noted: %s", error)


def current_chunk(actor: str | None) -> CurrentChunk | None:
    """The last note of the replica that is this Ray actor (hex), or None."""
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        found = _internal_kv_get(f"{KEY}{actor}", namespace=NAMESPACE)
    except RayError as error:
        log.warning("the current chunk of %s was not read: %s", actor, error)
        return None
    return CurrentChunk(**json.loads(found)) if found else None
