"""Phases of the starts of replicas, such as downloads, as records in Ray's key-value store.

A replica answers no request before its engine runs, and the start of the engine may take minutes. Therefore drivers
read the phase of its start from the record.
"""

from __future__ import annotations

import json
import logging
from collections import Counter

__all__ = ["forget_starts", "note_phase", "note_ready", "start_text", "summary"]

log = logging.getLogger(__name__)

NAMESPACE = "mergesearch"
KEY = "start of replica "


def note_phase(text: str) -> None:
    """Record that the start of this replica has reached the phase `text`, such as "downloads owner/name".

    The function is called in the replica's process. Nothing is recorded without Ray, or while Ray's head does not
    answer.
    """
    _put(json.dumps({"phase": text}))


def note_ready() -> None:
    """Remove the record of this replica's start, because it is ready."""
    _put(None)


def start_text(app_name: str) -> str:
    """Text with the start phases of those replicas of the application `app_name` that are not ready; "" if unknown.

    `app_name` is the name of a Serve application.
    """
    import ray
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_get, _internal_kv_list

    if not ray.is_initialized():
        return ""
    try:
        keys = _internal_kv_list(f"{KEY}{app_name} ", namespace=NAMESPACE)
        notes = [note for key in keys if (note := _internal_kv_get(key, namespace=NAMESPACE))]
    except RayError as error:
        log.warning("the phases of starts were not read: %s", error)
        return ""
    return summary([json.loads(note)["phase"] for note in notes])


def summary(phases: list[str]) -> str:
    """Text with the start phases of several replicas, for example "2 of 3: starts vLLM; 1 of 3: downloads X".

    `phases` has the phase of each replica. The most frequent phase comes first.
    """
    if not phases:
        return ""
    if len(phases) == 1:
        return f"it {phases[0]}"
    each = [f"{count} of {len(phases)}: {phase}" for phase, count in Counter(sorted(phases)).most_common()]
    return "; ".join(each)


def forget_starts(app_name: str) -> None:
    """Remove the records of all starts of replicas of the Serve application `app_name`.

    Replicas that ended before they were ready leave such records behind.
    """
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_list

    try:
        for key in _internal_kv_list(f"{KEY}{app_name} ", namespace=NAMESPACE):
            _internal_kv_del(key, namespace=NAMESPACE)
    except RayError as error:
        log.warning("old phases of starts were not removed: %s", error)


def _put(note: str | None) -> None:
    """Store `note`, the record of this process's replica, in Ray's key-value store; None removes the record."""
    import ray
    from ray import serve
    from ray.exceptions import RayError
    from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_put
    from ray.serve.exceptions import RayServeException

    if not ray.is_initialized():
        return
    try:
        key = f"{KEY}{serve.get_replica_context().app_name} {ray.get_runtime_context().get_actor_id()}"
        if note is None:
            _internal_kv_del(key, namespace=NAMESPACE)
        else:
            _internal_kv_put(key, note, namespace=NAMESPACE)
    except (RayError, RayServeException) as error:  # the latter outside of a replica
        log.warning("the phase of the start was not noted: %s", error)
