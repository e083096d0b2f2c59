"""The chunk in a dead replica: the conclusions about it, without Ray's processes."""

from __future__ import annotations

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError

from tests.workers.serving.test_replica_faults import request
from workers.errors import CrashKind, EngineCrashed
from workers.serving import serve_scorer
from workers.serving.current_chunk import CurrentChunk, chunk_id
from workers.serving.serve_scorer import _raise_if_scoring

CHUNK = request(0.3, crashes=0)
NOTE = CurrentChunk(chunk_id(CHUNK), "replica", scored_others=True, log_file="/log")


def test_lack_of_memory_is_a_crash_without_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that Ray's memory monitor ended counts as a crash with the chunk that it scored, and with no other."""
    monkeypatch.setattr(serve_scorer, "scored_last", {chunk_id(CHUNK): NOTE}.get)
    error = OutOfMemoryError("the node was low on memory")
    with pytest.raises(EngineCrashed, match="replica was ended by Ray for lack of memory on its node") as caught:
        _raise_if_scoring(CHUNK, error)
    assert (caught.value.kind, caught.value.scored_others) == (CrashKind.EXIT, True)
    _raise_if_scoring(request(0.4, crashes=0), error)


def test_preempted_node_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that died with its preempted node does not count as a crash; one that died alone does."""
    monkeypatch.setattr(serve_scorer, "current_chunk", {"a1": NOTE}.get)
    _raise_if_scoring(CHUNK, RayActorError("a1", "the node was preempted", preempted=True))
    with pytest.raises(EngineCrashed, match="replica ended while it scored the chunk"):
        _raise_if_scoring(CHUNK, RayActorError("a1", "the actor died"))
