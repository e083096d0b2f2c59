"""Record of the samples that each replica scores; it is in Ray's key-value store, and outlives the replica.

When a replica's process has ended, the callers of all its requests get the same error. From the record, each caller
learns whether its own chunk was being scored, or only waited.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, replace

from workers.types import ScoreRequest, digest_of

__all__ = ["CurrentChunk", "chunk_id", "current_chunk", "note_chunk", "scored_last"]

log = logging.getLogger(__name__)

NAMESPACE = "mergesearch"
KEY = "chunk of replica "


@dataclass(frozen=True)
class CurrentChunk:
    """Record of the samples that a replica scored last; clients read it after a failed request.

    - `chunk`: the id of these samples, which belong to one request
    - `replica`, `log_file`: the replica's name, and the path of its log
    - `scored_others`: whether the replica had scored another recipe before
    - `overdue`: the reason why the replica is regarded as hung (module `watchdog`); None if it is not
    - `error_log`, `node`: a file with the process's errors, and the Ray node (hex) that has it; both are "" if unknown
    """

    chunk: str
    replica: str
    scored_others: bool
    log_file: str
    overdue: str | None = None
    error_log: str = ""
    node: str = ""


def chunk_id(request: ScoreRequest) -> str:
    """Id of the chunk, the samples that one scoring request asks for; equal requests of a study have equal ids."""
    spans = [[span.objective, span.task.digest, span.start, span.stop] for span in request.spans]
    return digest_of([request.study, request.recipe.digest, spans])


def note_chunk(current: CurrentChunk) -> None:
    """Record in Ray's key-value store that this replica begins to score the samples of one request (a chunk).

    `current` is the record; the Ray node is filled in here. The function is called in the replica's process. Nothing is
    recorded without Ray, or while Ray's head node does not answer.
    """
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
    """Read which samples (chunk) a replica began to score last, as the replica stored it; None if unknown.

    `actor` is the Ray actor id (hex) of the replica.
    """
    return _read(f"{KEY}{actor}")


def scored_last(chunk: str) -> CurrentChunk | None:
    """Record of the replica that began to score the chunk `chunk` and no other chunk since; None if there is none.

    A chunk has the samples of one request, and `chunk` is its id (function `chunk_id`). A replica stores the record
    when it begins to score a chunk.
    """
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_list

    try:
        notes = [_read(key.decode()) for key in _internal_kv_list(KEY, namespace=NAMESPACE)]
    except RayError as error:
        log.warning("the current chunks were not read: %s", error)
        return None
    return next((note for note in notes if note is not None and note.chunk == chunk), None)


def _read(key: str) -> CurrentChunk | None:
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_get

    try:
        found = _internal_kv_get(key, namespace=NAMESPACE)
    except RayError as error:
        log.warning("%r was not read: %s", key, error)
        return None
    return CurrentChunk(**json.loads(found)) if found else None
