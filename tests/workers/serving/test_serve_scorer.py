"""Replicas that died, without Ray's processes: the chunk in one of them, and how long a request is sent again."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
from ray.exceptions import OutOfMemoryError, RayActorError, RayError, RayTaskError

from tests.workers.serving.test_replica_faults import request
from workers.errors import CrashKind, EngineCrashed, EngineUnavailable
from workers.serving import serve_scorer
from workers.serving.current_chunk import CurrentChunk, chunk_id
from workers.serving.serve_scorer import ServeScorer, _raise_if_scoring

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


class Replicas:
    """Replicas on a clock of their own: each request waits as long as the next outcome says, and fails or succeeds.

    `outcomes` has the seconds and the error of each request; None is a success, which describes no task.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, outcomes: Iterator[tuple[float, RayError | None]]) -> None:
        self._outcomes = outcomes
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=self._pass)
        monkeypatch.setattr(serve_scorer, "time", clock)
        monkeypatch.setattr(serve_scorer, "application_state", lambda name: "RUNNING")
        monkeypatch.setattr(serve_scorer, "is_ready", lambda name: True)
        monkeypatch.setattr(serve_scorer, "_handle", self)

    def __call__(self, name: str) -> Replicas:
        return self

    def options(self, **_: str) -> Replicas:
        return self

    def cache_clear(self) -> None:
        pass

    def remote(self, *_: object) -> Replicas:
        self._left_s, self._error = next(self._outcomes)
        return self

    def result(self, *, timeout_s: float) -> tuple[()]:
        self._pass(min(timeout_s, self._left_s))
        if self._left_s > timeout_s:
            self._left_s -= timeout_s
            raise TimeoutError
        if self._error is not None:
            raise self._error
        return ()

    def _pass(self, seconds: float) -> None:
        self.now += seconds


DIED = RayActorError("a1", "the actor died")
CRASHED = RayTaskError("describe", "", EngineCrashed("no device"))


def test_waiting_behind_others_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that failed and then waited for hours is sent again after the next failure."""
    Replicas(monkeypatch, iter([(0.0, DIED), (9000.0, DIED), (9000.0, DIED), (1.0, None)]))
    assert ServeScorer("fake").describe(()) == ()


@pytest.mark.parametrize(("seconds", "error"), [(0.0, DIED), (600.0, CRASHED)])
def test_failing_requests_are_given_up(seconds: float, error: RayError, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that fails at once, or whose work crashes engines, is given up after `deadline_s` seconds."""
    replicas = Replicas(monkeypatch, iter([(seconds, error)] * 1000))
    with pytest.raises(EngineUnavailable, match="fake has failed for 1800 s: "):
        ServeScorer("fake").describe(())
    assert 1800 < replicas.now < 3600
