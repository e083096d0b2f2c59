"""A driver's heartbeat continues while the driver hangs, and tells for how long it has been hanging."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from service.errors import StaleAttempt
from service.jobs.heartbeat import PATIENCE_CHUNKS, PREPARING_PATIENCE_S, SCORING_PATIENCE_S, Heartbeat
from service.jobs.search import attempt
from service.store import JobWriter, Store
from service.types import JobState
from tests.service.tune.harness import coordinator_of, new_study, score
from workers.serving.fake import FakeScorer
from workers.types import ScoreResult, Split


class Clock:
    """Monotonic clock that only the test advances, so that no limit depends on the machine's load."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store, _ = new_study(tmp_path)
    yield store
    store.close()


@pytest.fixture
def writer(store: Store) -> JobWriter:
    return store.open_attempt(store.jobs()[0].id)


def idle_s(store: Store) -> float:
    """Idle time in seconds according to the last heartbeat."""
    study = store.jobs()[0]
    assert study.heartbeat_at is not None
    assert study.progressed_at is not None
    return study.heartbeat_at - study.progressed_at


def wait_for_heartbeats(store: Store) -> None:
    """Wait for two heartbeats: the first one may not include the last change yet."""
    for _ in range(2):
        before = store.jobs()[0].heartbeat_at
        while store.jobs()[0].heartbeat_at == before:
            time.sleep(0.01)


def test_a_driver_that_hangs_stays_alive_and_is_idle(store: Store, writer: JobWriter, clock: Clock) -> None:
    with Heartbeat(writer, 0.0, interval_s=0.02) as heartbeat:
        clock.advance(60)
        wait_for_heartbeats(store)
        assert idle_s(store) == pytest.approx(60, abs=0.01)
        writer.set_state(JobState.RUNNING)
        wait_for_heartbeats(store)
        assert idle_s(store) == pytest.approx(0, abs=0.01), "something was stored"
        clock.advance(30)
        heartbeat.progressed()
        wait_for_heartbeats(store)
        assert idle_s(store) == pytest.approx(0, abs=0.01), "it said so"


def test_idle_limit_follows_chunks(store: Store, writer: JobWriter) -> None:
    """The time that a driver may be idle follows from the time of its chunks."""
    heartbeat = Heartbeat(writer, 0.0)
    assert heartbeat.patience_s == PREPARING_PATIENCE_S
    heartbeat.min_patience_s = SCORING_PATIENCE_S
    assert heartbeat.patience_s == SCORING_PATIENCE_S
    study, coordinator = writer.job_id, coordinator_of(store, writer.job_id)
    evaluation = coordinator.next_evaluation()
    assert evaluation is not None
    result = score(FakeScorer(), evaluation, 0)
    assert isinstance(result, ScoreResult)
    writer = store.open_attempt(study)
    heartbeat = Heartbeat(writer, 0.0)
    heartbeat.min_patience_s = SCORING_PATIENCE_S
    for timings_s, longest_s in (({"score": 90.0, "wait": 30.0}, 120.0), ({"score": 2.0}, 120.0)):
        writer.record_chunk(evaluation.trial, Split.SEARCH, replace(result, timings_s=timings_s))
        assert heartbeat.patience_s == PATIENCE_CHUNKS * longest_s
    heartbeat.send()
    assert store.job(study).patience_s == PATIENCE_CHUNKS * 120.0


def test_waiting_time_is_not_counted(store: Store, writer: JobWriter, clock: Clock) -> None:
    """Time without a chunk is not counted while the driver only waits."""
    heartbeat = Heartbeat(writer, 100.0)
    clock.advance(20)
    writer.set_state(JobState.RUNNING)
    heartbeat.send()
    assert store.jobs()[0].wall_clock_s == 120.0
    heartbeat.discount()
    assert store.jobs()[0].wall_clock_s == 100.0


class Starting(FakeScorer):
    is_up = False

    def is_starting(self) -> bool:
        return not self.is_up


def test_driver_reports_waiting_for_engine(store: Store, writer: JobWriter, clock: Clock) -> None:
    """A driver that waits for an engine says so until it receives results."""

    def waits_for() -> str | None:
        watch.look()
        return store.jobs()[0].waiting_for

    scorer = Starting()
    heartbeat = Heartbeat(writer, 0.0)
    watch = attempt._WaitWatch(scorer, lambda: (), writer, heartbeat, patience_s=SCORING_PATIENCE_S)
    assert waits_for() is None
    for _ in range(3):
        clock.advance(attempt.ENGINE_CHECK_S)
        assert waits_for() == "an engine to start"
        assert heartbeat.idle_s == 0, "the start of an engine is progress"
    writer.set_state(JobState.RUNNING)
    assert waits_for() is None
    scorer.is_up = True
    clock.advance(attempt.ENGINE_CHECK_S)
    assert waits_for() is None
    assert heartbeat.idle_s == attempt.ENGINE_CHECK_S


def test_driver_reports_waiting_for_judge(store: Store, writer: JobWriter, clock: Clock) -> None:
    """A driver that waits for a judge says so, and is not replaced meanwhile."""
    judges = ["http://judge/v1"]
    heartbeat = Heartbeat(writer, 0.0)
    watch = attempt._WaitWatch(FakeScorer(), lambda: judges, writer, heartbeat, patience_s=SCORING_PATIENCE_S)
    clock.advance(attempt.ENGINE_CHECK_S)
    watch.look()
    assert store.jobs()[0].waiting_for == "the judge at http://judge/v1"
    assert heartbeat.idle_s == 0
    judges.clear()
    clock.advance(attempt.ENGINE_CHECK_S)
    watch.look()
    assert store.jobs()[0].waiting_for is None
    assert heartbeat.idle_s == attempt.ENGINE_CHECK_S


def test_driver_reports_waiting_for_gpus(store: Store, writer: JobWriter, clock: Clock) -> None:
    """A driver whose gradients wait for a machine with GPUs says so, and is not replaced meanwhile."""
    waits = [True]
    heartbeat = Heartbeat(writer, 0.0)
    watch = attempt._WaitWatch(
        FakeScorer(), lambda: (), writer, heartbeat, patience_s=60.0, awaits_gpus=lambda: waits[0]
    )
    clock.advance(attempt.ENGINE_CHECK_S)
    watch.look()
    assert (store.jobs()[0].waiting_for, heartbeat.idle_s) == ("GPUs for gradients", 0)
    waits[0] = False
    clock.advance(attempt.ENGINE_CHECK_S)
    watch.look()
    assert (store.jobs()[0].waiting_for, heartbeat.idle_s) == (None, attempt.ENGINE_CHECK_S)


def test_heartbeat_reports_a_takeover(store: Store, writer: JobWriter) -> None:
    """The heartbeat tells a driver that another has taken over."""
    with Heartbeat(writer, 0.0, interval_s=0.02) as heartbeat:
        heartbeat.check()
        store.open_attempt(writer.job_id)
        heartbeat._thread.join(30)  # it ends with the first refusal
        with pytest.raises(StaleAttempt, match=r"attempt 1 may not write, attempt 2 has taken over"):
            heartbeat.check()


def test_worked_time_counts_for_each_gpu(store: Store, writer: JobWriter, clock: Clock) -> None:
    """The usage is that of the GPUs that the driver has at the time; a command counts for nobody."""
    heartbeat = Heartbeat(writer, 0.0, num_gpus=2)
    clock.advance(3600)
    heartbeat.send()
    heartbeat.num_gpus = 1
    clock.advance(1800)
    heartbeat.send()
    assert store.team_usage()[None].month == pytest.approx(2.5)
    alone = Heartbeat(writer, heartbeat.wall_clock_s)
    clock.advance(3600)
    alone.send()
    assert store.team_usage()[None].month == pytest.approx(2.5)
