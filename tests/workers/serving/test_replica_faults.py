"""Errors that end a replica, and errors that only fail the request; without Ray."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.errors import CrashKind, EngineCrashed, EngineUnavailable, NodeDraining, TrialFailed, WorkerError
from workers.serving.fake import FakeScorer
from workers.serving.replica import ScoringReplica
from workers.serving.watchdog import TimeLimits, Watchdog
from workers.types import SampleResult, ScoreRequest, ScoreResult, Span, TaskSpec, VerificationReport

TASK = TaskSpec("anything", "exact_match")


def recipe(weight: float) -> Recipe:
    merge = Merge("linear", (Source("base"), Source("math")), {"weight": (1 - weight, weight)})
    at = Merge("linear", (Source("base", 0), Source("math", 0)), {"weight": (1 - weight, weight)})
    return Recipe({"base": "b0", "math": "m1"}, "base", (LayerRecipe(at, at, at),), embedding=merge, head=merge)


def request(weight: float, stop: int = 5, **changes: Any) -> ScoreRequest:
    return ScoreRequest("study", recipe(weight), (Span("x", TASK, 0, stop),), **changes)


def is_healthy(replica: ScoringReplica) -> bool:
    try:
        asyncio.run(replica.check_health())
    except RuntimeError:
        return False
    return True


@dataclass
class FullDisk(FakeScorer):
    """A fake scorer on a full disk: verification cannot export."""

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        raise OSError(errno.ENOSPC, "No space left on device", "model.safetensors")


@dataclass
class WrongAnswers(FakeScorer):
    """A fake scorer that raises `error` after the engine's answers."""

    error: Exception | None = None

    def score(self, request: ScoreRequest) -> ScoreResult:
        assert self.error is not None
        raise self.error


@dataclass
class NoDeepModels(FakeScorer):
    """A fake scorer whose models have one layer: it refuses a model with more, but not a merge of their layers."""

    def score(self, request: ScoreRequest) -> ScoreResult:
        if len(request.recipe.layers) > 1 and request.recipe.layers[0].mlp.method == "passthrough":
            raise TrialFailed("the model has one layer")
        return super().score(request)


def test_full_disk_fails_the_request() -> None:
    """A full disk during verification fails the request, and the engine continues."""
    replica = ScoringReplica(FullDisk)
    with pytest.raises(WorkerError, match=r"fake-\d+: OSError: .*No space left on device"):
        asyncio.run(replica.verify(recipe(0.3), (), ()))
    assert is_healthy(replica)
    assert asyncio.run(replica.score(request(0.3))).samples


@pytest.mark.parametrize("error", [KeyError("answer"), ValueError("no number"), TrialFailed("NaN"), MemoryError()])
def test_an_error_outside_the_engine_leaves_it_in_service(error: Exception) -> None:
    replica = ScoringReplica(lambda: WrongAnswers(error=error))
    with pytest.raises(WorkerError):
        asyncio.run(replica.score(request(0.3)))
    assert is_healthy(replica)


def test_engine_error_ends_the_replica() -> None:
    """An error of the engine ends the replica, and later requests do not reach it."""
    replica = ScoringReplica(lambda: FakeScorer(crashing=[recipe(0.3).digest]))
    with pytest.raises(EngineCrashed, match=r"this recipe crashes the engine; its log is ") as caught:
        asyncio.run(replica.score(request(0.3)))
    assert caught.value.kind is CrashKind.ERROR
    assert not caught.value.scored_others
    assert not is_healthy(replica)
    with pytest.raises(EngineUnavailable, match="this recipe crashes the engine") as later:
        asyncio.run(replica.score(request(0.5)))
    assert not isinstance(later.value, EngineCrashed), "it is not the cause"


@pytest.mark.parametrize(("before", "crashes", "proven"), [(None, 0, False), (0.5, 0, True), (None, 1, True)])
def test_crash_says_what_was_scored_before(before: float | None, crashes: int, proven: bool) -> None:
    """A crash says whether the engine had scored another recipe.

    After a first crash, the base is scored for that if nothing else was.
    """
    replica = ScoringReplica(lambda: FakeScorer(crashing=[recipe(0.3).digest]))
    if before is not None:
        asyncio.run(replica.score(request(before)))
    with pytest.raises(EngineCrashed) as caught:
        asyncio.run(replica.score(request(0.3, crashes=crashes)))
    assert caught.value.scored_others == proven


def test_base_is_tested_with_its_own_layers() -> None:
    """The crash of a merge with more layers than the base is attributed to the merge, as the base can be scored."""
    deep = replace(recipe(0.3), layers=recipe(0.3).layers * 2)
    replica = ScoringReplica(lambda: NoDeepModels(crashing=[deep.digest]))
    with pytest.raises(EngineCrashed) as caught:
        asyncio.run(replica.score(replace(request(0.3, crashes=1), recipe=deep)))
    assert caught.value.scored_others


def test_broken_engine_is_not_the_candidate() -> None:
    """The candidate is not at fault where the engine cannot score the base."""
    replica = ScoringReplica(lambda: WrongAnswers(error=EngineCrashed("no device")))
    with pytest.raises(EngineUnavailable, match="no device") as caught:
        asyncio.run(replica.score(request(0.3, crashes=1)))
    assert not isinstance(caught.value, EngineCrashed)
    assert not is_healthy(replica)


def test_moved_replica_begins_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica that Serve moves off a drained node refuses its next chunk, and stays healthy."""
    replica = ScoringReplica(FakeScorer)
    assert asyncio.run(replica.score(request(0.3))).samples
    monkeypatch.setattr("workers.serving.replica.is_being_moved", lambda: True)
    with pytest.raises(NodeDraining, match=r"fake-\d+ begins no chunk: its node is drained"):
        asyncio.run(replica.score(request(0.3)))
    assert is_healthy(replica)


@dataclass
class Closes(FakeScorer):
    """A fake scorer that notes the thread in which it is closed, after waiting for `may_close`."""

    may_close: threading.Event = field(default_factory=threading.Event)
    closed_in: list[str] = field(default_factory=list)

    def close(self) -> None:
        self.may_close.wait(10.0)
        self.closed_in.append(threading.current_thread().name)


def test_stopped_replica_closes_its_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica closes its worker in the engine's thread, and does not wait for one that hangs."""
    worker = Closes()
    worker.may_close.set()
    ScoringReplica(lambda: worker).close()
    assert worker.closed_in[0].startswith("engine")
    monkeypatch.setattr("workers.serving.replica.CLOSE_S", 0.05)
    hanging = Closes()
    replica = ScoringReplica(lambda: hanging)
    replica.close()
    assert hanging.closed_in == []
    hanging.may_close.set()


def test_an_engine_that_does_not_start_in_time_is_given_up() -> None:
    def start() -> FakeScorer:
        time.sleep(1.0)
        return FakeScorer()

    with pytest.raises(EngineUnavailable, match="no engine within 0 s"):
        ScoringReplica(start, TimeLimits(start_s=0.1))


def seconds_until_unhealthy(replica: ScoringReplica, wanted: ScoreRequest) -> float:
    """Seconds until the health check fails during the request's scoring; infinity if it never fails."""

    async def watch() -> float:
        started = time.monotonic()
        work = asyncio.ensure_future(replica.score(wanted))
        while not work.done():
            try:
                await replica.check_health()
            except RuntimeError:
                elapsed = time.monotonic() - started
                await work
                return elapsed
            await asyncio.sleep(0.02)
        return float("inf")

    return asyncio.run(watch())


@pytest.mark.slow
def test_slow_chunk_counts_as_hung() -> None:
    """A chunk that takes many times the measured ones counts as hung."""
    limits = TimeLimits(first_chunk_s=60.0, chunk_s=0.2, chunk_factor=2.0)
    replica = ScoringReplica(lambda: FakeScorer(sample_delay_s=0.01), limits)
    assert seconds_until_unhealthy(replica, request(0.3, stop=25)) == float("inf"), "the first one may prepare its data"
    assert seconds_until_unhealthy(replica, request(0.4, stop=50)) == float("inf"), "twice the samples"
    worker = replica._worker
    assert isinstance(worker, FakeScorer)
    worker.sample_delay_s = 0.2
    noticed_s = seconds_until_unhealthy(replica, request(0.5, stop=10))
    assert 0.7 < noticed_s < 2.0, "after the limit of about 1 s, and before the chunk's end"
    assert is_healthy(replica), "it has finished after all"


@pytest.mark.parametrize(
    ("change", "is_overdue"),
    [
        (lambda r: r, True),
        (lambda r: replace(r, spans=(replace(r.spans[0], stop=1000),)), False),
        (lambda r: replace(r, spans=(replace(r.spans[0], task=TaskSpec("new", "exact_match")),)), False),
        (lambda r: replace(r, recipe=r.recipe.rewritten(lambda m: Merge("passthrough", m.sources[:1]))), False),
    ],
)
def test_more_samples_a_new_task_and_a_new_method_have_more_time(
    change: Callable[[ScoreRequest], ScoreRequest], is_overdue: bool
) -> None:
    watchdog = Watchdog(TimeLimits(chunk_s=0.01, chunk_factor=2.0), start_s=0.0)
    with watchdog.chunk(request(0.3)):
        time.sleep(0.02)
    with watchdog.chunk(change(request(0.3))):
        time.sleep(0.1)
        assert (watchdog.overdue() is not None) == is_overdue
    assert watchdog.overdue() is None


def test_no_chunk_has_less_time_than_the_start_took() -> None:
    watchdog = Watchdog(TimeLimits(chunk_s=0.01, first_chunk_s=0.01), start_s=60.0)
    with watchdog.chunk(request(0.3)):
        time.sleep(0.1)
        assert watchdog.overdue() is None
