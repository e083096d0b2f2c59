"""Events over HTTP: each arrives once, for any number of watchers and reconnections."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from sqlalchemy import event as sql_event

from service.api import event_stream, sse
from service.api.event_stream import EventHub
from service.store import JobWriter, Store
from service.types import JobState
from tests.service.api.harness import ApiServer, finished_study, snapshot, stored_study
from tests.service.synthetic_run import run_record

pytestmark = pytest.mark.slow  # each watches a running study over HTTP

Frame = tuple[int | None, str, dict[str, Any]]

NO_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None)


@contextmanager
def driving(writer: JobWriter, *, num_events: int, pause_s: float) -> Iterator[None]:
    """A driver in a thread that stores `num_events` events one after another, and then ends the study."""

    def drive() -> None:
        for number in range(num_events):
            time.sleep(pause_s)
            writer.add_event("tick", {"number": number})
        writer.set_state(JobState.FAILED, "the end")

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        thread.join()


async def frames(lines: AsyncIterator[str]) -> AsyncIterator[Frame]:
    """Frames of an event stream, parsed as a browser parses them."""
    number: int | None = None
    kind, data = "message", ""
    async for line in lines:
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "id":
            number = int(value)
        elif name == "event":
            kind = value
        elif name == "data":
            data += value
        elif not line:
            if data:
                yield number, kind, json.loads(data)
            number, kind, data = None, "message", ""


async def watch(client: httpx.AsyncClient, study: str, *, after: int = 0, at_most: int | None = None) -> list[Frame]:
    """Frames until the stream ends by itself or `at_most` events were read."""
    seen: list[Frame] = []
    headers = {"Last-Event-ID": str(after)} if after else {}
    async with client.stream("GET", f"/v1/studies/{study}/events", headers=headers) as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/event-stream")
        async for frame in frames(answer.aiter_lines()):
            seen.append(frame)
            if at_most is not None and sum(number is not None for number, _, _ in seen) >= at_most:
                break
    return seen


def ids(seen: list[Frame]) -> list[int]:
    return [number for number, _, _ in seen if number is not None]


def running_study(store: Store) -> JobWriter:
    writer = store.open_attempt(stored_study(store).id)
    writer.set_state(JobState.RUNNING)
    return writer


def test_a_finished_study_is_told_whole_and_the_stream_ends(server: ApiServer) -> None:
    record = finished_study(server.store)

    async def scenario() -> list[Frame]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await watch(client, record.id)

    seen = asyncio.run(scenario())
    events = server.store.events(record.id)
    assert ids(seen) == [event.id for event in events]
    assert [kind for _, kind, _ in seen] == [*(event.kind for event in events), "progress", "end"]
    assert seen[-1] == (None, "end", {"state": "COMPLETE", "reason": None})
    assert seen[-2][2] == record.progress
    number, kind, data = seen[0]
    assert (data["id"], data["kind"], data["payload"]) == (number, kind, {"name": "math-text-lookup"})


def test_events_are_a_list_for_those_who_ask_for_json(server: ApiServer, http: httpx.Client) -> None:
    record = finished_study(server.store)
    path, headers = f"/v1/studies/{record.id}/events", {"Accept": "application/json"}
    every = http.get(path, headers=headers).json()["events"]
    assert [event["id"] for event in every] == [event.id for event in server.store.events(record.id)]
    assert http.get(path, headers=headers, params={"after": every[4]["id"], "limit": 3}).json()["events"] == every[5:8]


@pytest.mark.parametrize("where", ["header", "query"])
def test_a_stream_goes_on_after_the_id_it_is_given(server: ApiServer, http: httpx.Client, where: str) -> None:
    record = finished_study(server.store)
    last = server.store.events(record.id)[-3].id
    given: dict[str, Any] = (
        {"headers": {"Last-Event-ID": str(last)}, "params": {"after": 0}}
        if where == "header"
        else {"params": {"after": last}}
    )
    text = http.get(f"/v1/studies/{record.id}/events", **given).text
    assert text.count("\nid: ") == 2
    assert text.endswith('event: end\ndata: {"state":"COMPLETE","reason":null}\n\n')


def test_an_id_of_the_future_gets_the_end_only(server: ApiServer, http: httpx.Client) -> None:
    record = finished_study(server.store)
    text = http.get(f"/v1/studies/{record.id}/events", params={"after": 2**63 - 1}).text
    assert "id:" not in text
    assert "event: end" in text


def test_reconnecting_client_misses_nothing(server: ApiServer) -> None:
    """A client that reconnects with its last id misses no event and reads none twice."""
    writer = running_study(server.store)

    async def scenario() -> list[Frame]:
        seen: list[Frame] = []
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            for at_most in itertools.cycle((1, 1, 2, 7, 30, 3)):
                seen += await watch(client, writer.job_id, after=max(ids(seen), default=0), at_most=at_most)
                if seen[-1][1] == "end":
                    return seen
                await asyncio.sleep(0.03)
        raise AssertionError

    with driving(writer, num_events=150, pause_s=0.01):
        seen = asyncio.run(scenario())
    assert ids(seen) == [event.id for event in server.store.events(writer.job_id)]
    assert seen[-1] == (None, "end", {"state": "FAILED", "reason": "the end"})


def test_a_hundred_watchers_lose_nothing(server: ApiServer) -> None:
    writer = running_study(server.store)

    async def scenario() -> list[list[Frame]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=NO_LIMITS) as client:
            return await asyncio.gather(*(watch(client, writer.job_id) for _ in range(100)))

    with driving(writer, num_events=80, pause_s=0.03):
        everything = asyncio.run(scenario())
    stored = [event.id for event in server.store.events(writer.job_id)]
    assert len(stored) > 80
    for seen in everything:
        assert ids(seen) == stored
        assert seen[-1][1] == "end"


def test_progress_is_told_when_it_changes_and_only_then(server: ApiServer) -> None:
    writer = running_study(server.store)
    progress = snapshot(run_record(num_trials=3)).to_json()
    steps = [{**progress, "samples_scored": scored} for scored in (1, 2, 2, 2, 3)]

    async def scenario() -> list[Frame]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            watching = asyncio.create_task(watch(client, writer.job_id))
            for step in steps:
                writer.heartbeat(wall_clock_s=1.0, progress=step)
                await asyncio.sleep(3 * event_stream.POLL_S)
            writer.set_state(JobState.COMPLETE)
            return await watching

    seen = asyncio.run(scenario())
    assert [data["samples_scored"] for _, kind, data in seen if kind == "progress"] == [1, 2, 3]


def test_a_quiet_stream_is_kept_alive(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    writer = running_study(server.store)
    comments = 0
    with httpx.stream("GET", f"{server.url}/v1/studies/{writer.job_id}/events", timeout=60) as answer:
        for line in answer.iter_lines():
            comments += line.startswith(":")
            if comments == 3:
                break


# Without HTTP: what it costs.


def count_statements(store: Store) -> list[str]:
    statements: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    sql_event.listen(store._engine, "before_cursor_execute", count)
    return statements


@pytest.fixture
def store(tmp_path: Any) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'm.db'}")
    yield store
    store.close()


async def read(hub: EventHub, study: str, *, after: int = 0, pause_s: float = 0.0) -> list[int]:
    numbers = []
    async for chunk in hub.watch(study, after=after):
        numbers += [int(line[4:]) for line in chunk.decode().splitlines() if line.startswith("id: ")]
        if pause_s:
            await asyncio.sleep(pause_s)
    return numbers


def test_a_hundred_watchers_read_the_database_like_one(store: Store) -> None:
    def statements_of(num_watchers: int) -> int:
        writer = running_study(store)
        hub = EventHub(store, poll_s=0.05)

        async def scenario() -> None:
            watching = [asyncio.create_task(read(hub, writer.job_id)) for _ in range(num_watchers)]
            while hub._feeds[writer.job_id]._floor is None if hub._feeds else True:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.5)
            for number in range(30):
                await asyncio.to_thread(writer.add_event, "tick", {"number": number})
            await asyncio.to_thread(writer.set_state, JobState.COMPLETE)
            expected = [event.id for event in store.events(writer.job_id)]
            assert await asyncio.gather(*watching) == [expected] * num_watchers
            assert not hub._feeds

        statements = count_statements(store)
        asyncio.run(scenario())
        return sum("FROM events" in statement for statement in statements)

    alone, crowd = statements_of(1), statements_of(100)
    # Everyone reads once what was there before they came.
    assert crowd - 100 <= 2 * alone + 20


def test_slow_watcher_reads_everything(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow watcher reads every event and occupies no memory for them."""
    monkeypatch.setattr(event_stream, "WINDOW", 10)
    monkeypatch.setattr(event_stream, "BATCH", 7)
    writer = running_study(store)
    hub = EventHub(store, poll_s=0.01)

    async def scenario() -> None:
        slow = asyncio.create_task(read(hub, writer.job_id, pause_s=0.03))
        fast = asyncio.create_task(read(hub, writer.job_id))
        seen = False
        for number in range(200):
            await asyncio.to_thread(writer.add_event, "tick", {"number": number})
            assert all(len(feed._window) <= 10 for feed in hub._feeds.values())
            seen |= bool(hub._feeds)
        assert seen
        await asyncio.to_thread(writer.set_state, JobState.COMPLETE)
        late = asyncio.create_task(read(hub, writer.job_id, after=100))
        expected = [event.id for event in store.events(writer.job_id)]
        assert await slow == await fast == expected
        assert await late == [number for number in expected if number > 100]

    asyncio.run(scenario())


def test_watcher_of_the_future_hides_nothing(store: Store) -> None:
    """A watcher of future ids hides no present event from others."""
    writer = running_study(store)
    hub = EventHub(store, poll_s=0.01)

    async def scenario() -> None:
        ahead = asyncio.create_task(read(hub, writer.job_id, after=10_000))
        await asyncio.sleep(0.1)
        present = asyncio.create_task(read(hub, writer.job_id))
        await asyncio.to_thread(writer.add_event, "tick", {})
        await asyncio.to_thread(writer.set_state, JobState.COMPLETE)
        assert await present == [event.id for event in store.events(writer.job_id)]
        assert await ahead == []

    asyncio.run(scenario())


def test_studies_do_not_hear_of_each_other(store: Store) -> None:
    writers = [running_study(store) for _ in range(3)]
    hub = EventHub(store, poll_s=0.01)

    async def scenario() -> None:
        watching = [asyncio.create_task(read(hub, writer.job_id)) for writer in writers]
        for number in range(60):
            await asyncio.to_thread(writers[number % 3].add_event, "tick", {"number": number})
        for writer in writers:
            await asyncio.to_thread(writer.set_state, JobState.COMPLETE)
        for writer, seen in zip(writers, await asyncio.gather(*watching), strict=True):
            assert seen == [event.id for event in store.events(writer.job_id)]

    asyncio.run(scenario())


@pytest.mark.parametrize("is_at_once", [True, False], ids=["while it begins", "later"])
def test_a_database_that_fails_for_a_while_costs_no_event(
    store: Store, monkeypatch: pytest.MonkeyPatch, is_at_once: bool
) -> None:
    writer = running_study(store)
    hub = EventHub(store, poll_s=0.01)
    events, failures = store.events, iter(range(5))

    def failing(*arguments: Any, **named: Any) -> Any:
        if next(failures, None) is not None:
            raise sa.exc.OperationalError("SELECT", {}, Exception("database is locked"))
        return events(*arguments, **named)

    async def scenario() -> None:
        watching = asyncio.create_task(read(hub, writer.job_id))
        await asyncio.sleep(0.0 if is_at_once else 0.05)
        monkeypatch.setattr(store, "events", failing)
        writer.add_event("tick", {})
        writer.set_state(JobState.COMPLETE)
        assert await watching == [event.id for event in events(writer.job_id)]

    asyncio.run(scenario())


def test_events_go_on_while_the_applications_threads_wait(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = running_study(server.store)
    is_over = threading.Event()
    monkeypatch.setattr(server.cluster, "log", lambda study: str(is_over.wait(60)))

    async def scenario() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=NO_LIMITS) as client:
            watching = asyncio.create_task(watch(client, writer.job_id))
            await asyncio.sleep(0.5)
            logs = [asyncio.create_task(client.get(f"/v1/studies/{writer.job_id}/log")) for _ in range(60)]
            await asyncio.sleep(0.5)
            assert (await client.get("/healthz")).status_code == 200
            writer.set_state(JobState.COMPLETE)
            seen = await watching
            assert not any(log.done() for log in logs)
            is_over.set()
            await asyncio.gather(*logs)
            return ids(seen)

    try:
        assert asyncio.run(scenario()) == [event.id for event in server.store.events(writer.job_id)]
    finally:
        is_over.set()
