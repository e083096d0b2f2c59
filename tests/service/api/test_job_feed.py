"""The stream of all jobs: state changes and progress of the jobs that its reader may read, and of no other."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import anyio
import httpx
import pytest
import sqlalchemy as sa

from service.api import job_feed, sse
from service.api.job_feed import JobFeed
from service.api.protocols import Principal
from service.client import Client
from service.store import Store, schema
from service.store.records import EventRecord, JobEventRecord
from service.types import Account, JobState, Sharing
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer, finished_study, snapshot, stored_study
from tests.service.synthetic_run import run_record

pytestmark = pytest.mark.slow  # each starts a server

Frame = tuple[int | None, str, dict[str, Any]]
JSON = {"Accept": "application/json"}


class Watcher:
    """The frames of a stream, read in a thread. `opened` has those whose connections `ending` ends."""

    opened: ClassVar[list[Watcher]] = []

    def __init__(self, http: httpx.Client, **query: int) -> None:
        self.frames: list[Frame] = []
        self.has_ended = threading.Event()
        self._socket: socket.socket | None = None
        self.opened.append(self)
        self._http, self._query = http, query
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        self.wait(lambda: any(kind == "start" for _, kind, _ in self.frames))

    def _read(self) -> None:
        with suppress(httpx.HTTPError):  # the test has closed the client
            self._parse()
        self.has_ended.set()

    def _parse(self) -> None:
        with self._http.stream("GET", "/v1/events", params=self._query) as answer:
            self._socket = answer.extensions["network_stream"].get_extra_info("socket")
            fields: dict[str, str] = {}
            for line in answer.iter_lines():
                name, _, value = line.partition(": ")
                if line:
                    fields[name] = value
                elif "data" in fields:
                    number = int(fields["id"]) if "id" in fields else None
                    self.frames.append((number, fields["event"], json.loads(fields["data"])))
                    fields = {}

    @classmethod
    @contextmanager
    def ending(cls) -> Iterator[None]:
        """Context at whose end the connections of all watchers end, for which a server would wait until it stops."""
        try:
            yield
        finally:
            for watcher in cls.opened:
                if watcher._socket is not None:
                    with suppress(OSError):  # it has ended
                        watcher._socket.shutdown(socket.SHUT_RDWR)
            cls.opened.clear()

    def wait(self, is_done: Callable[[], bool], seconds: float = 20.0) -> None:
        until = time.monotonic() + seconds
        while not is_done():
            assert time.monotonic() < until, self.frames
            time.sleep(0.02)

    def wait_for(self, kind: str, job: str, **payload: Any) -> None:
        def is_there() -> bool:
            return any(
                seen == kind and data["job"] == job and payload.items() <= data.get("payload", {}).items()
                for _, seen, data in self.frames
            )

        self.wait(is_there)

    def of(self, job: str) -> list[str]:
        return [kind for _, kind, data in self.frames if data.get("job") == job]


@pytest.fixture
def stored_server(tmp_path: Path, database: str) -> Iterator[ApiServer]:
    with ApiServer(tmp_path, database=database) as server, Watcher.ending():
        yield server


@pytest.fixture
def server(server: ApiServer) -> Iterator[ApiServer]:
    with Watcher.ending():
        yield server


@pytest.fixture
def stored(database: str) -> Iterator[Store]:
    store = Store(database)
    yield store
    store.close()


@contextmanager
def client_of(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def test_state_and_progress_of_all_jobs_are_told(stored_server: ApiServer) -> None:
    """States and progress of several jobs come in one stream, without what happens within a job."""
    before = finished_study(stored_server.store, num_trials=5)
    with client_of(stored_server) as http:
        watcher = Watcher(http)
        one, other = (stored_server.store.open_attempt(stored_study(stored_server.store).id) for _ in range(2))
        one.set_state(JobState.RUNNING)
        one.add_event("note", {"text": "of no interest to a list"})
        progress = json.loads(json.dumps({**snapshot(run_record()).to_json(), "samples_scored": 77}))
        one.heartbeat(wall_clock_s=1.0, progress=progress)
        watcher.wait_for("progress", one.job_id)
        other.set_state(JobState.FAILED, "no engine")
        watcher.wait_for("state", other.job_id, state="FAILED", reason="no engine")
        assert {"added", "created", "attempt", "state", "progress"} >= {*watcher.of(one.job_id)} > {"created", "state"}
        told = [data for _, kind, data in watcher.frames if kind == "progress" and data["job"] == one.job_id]
        assert told == [{"job": one.job_id, "job_kind": "search", "progress": progress}]
        (created,) = (data for _, kind, data in watcher.frames if kind == "created" and data["job"] == one.job_id)
        assert (created["job_kind"], created["name"]) == ("search", "math-text-lookup")
        assert watcher.of(before.id) == [], "without after, only new events are sent"
        every = http.get("/v1/events", headers=JSON).json()["events"]
        assert {event["job"] for event in every} == {before.id, one.job_id, other.job_id}
        assert {event["kind"] for event in every} <= {kind.value for kind in job_feed.STATE_KINDS}
        assert http.get("/v1/events", headers=JSON, params={"after": every[1]["id"], "limit": 2}).json() == {
            "events": every[2:4]
        }


def test_a_stream_continues_after_an_id(stored_server: ApiServer) -> None:
    """With `after` or Last-Event-ID, a stream begins with the events after it."""
    study = finished_study(stored_server.store, num_trials=5)
    with client_of(stored_server) as http:
        every = [event["id"] for event in http.get("/v1/events", headers=JSON).json()["events"]]
        watcher = Watcher(http, after=every[0])
        watcher.wait_for("state", study.id, state="COMPLETE")
        numbered = [data for number, kind, data in watcher.frames if number is not None and kind != "start"]
        assert [data["id"] for data in numbered] == every[1:]


def test_an_event_that_appears_late_is_not_missed(stored_server: ApiServer) -> None:
    """On PostgreSQL, an event may appear after one with a larger id: it is sent, and a resumed stream has it too."""
    if stored_server.store.engine.dialect.name != "postgresql":
        pytest.skip("SQLite has one writer at a time, so ids appear in order")
    early, late = stored_study(stored_server.store), stored_study(stored_server.store)
    with client_of(stored_server) as http:
        watcher = Watcher(http)
        row = {"time": time.time(), "kind": "waiting", "payload": {"reason": "late"}}
        with stored_server.store.engine.connect() as connection:
            connection.execute(
                sa.insert(schema.events).values(study=late.id, **row)
            )  # its id is taken, but not visible
            writer = stored_server.store.open_attempt(early.id)
            writer.set_state(JobState.RUNNING)
            watcher.wait_for("state", early.id, state="RUNNING")
            resumed = Watcher(http, after=next(n for n, kind, _ in reversed(watcher.frames) if n is not None))
            fresh = Watcher(http)
            connection.commit()
        for each in (watcher, resumed, fresh):
            each.wait_for("waiting", late.id, reason="late")
            assert each.of(late.id).count("waiting") == 1, "one stream sends nothing twice"
        assert fresh.of(early.id) == [], "what was visible is not new"


Watch = Callable[..., AsyncGenerator[bytes, None]]


def followed(store: Store, follow: Callable[[Watch], Awaitable[None]], *, pause_s: float = 0.02) -> None:
    """Call `follow` with a function that opens streams of one feed, whose reader may read everything."""

    async def everything() -> Principal:
        return Principal("reader", "127.0.0.1")

    async def run() -> None:
        feed = JobFeed(store, lambda: pause_s, anyio.CapacityLimiter(4))
        async with asyncio.timeout(60):
            await follow(partial(feed.watch, renewal=everything))

    asyncio.run(run())


def test_a_long_history_comes_in_parts(stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that begins long ago sends each batch of events before it reads the next one."""
    monkeypatch.setattr(job_feed, "BATCH", 3)
    for _ in range(5):
        finished_study(stored, num_trials=3)
    expected = [each.event.id for each in stored.job_events(after=0, kinds=job_feed.STATE_KINDS, limit=1000)]

    async def follow(watch: Watch) -> None:
        found: list[int] = []
        async for chunk in watch(after=0):
            ids = [json.loads(line[6:])["id"] for line in chunk.decode().splitlines() if line.startswith('data: {"id"')]
            assert len(ids) <= 3
            found += ids
            if len(found) >= len(expected):
                break
        assert found == expected

    followed(stored, follow)
    assert len(expected) > 10


def test_old_events_are_not_read_again() -> None:
    """A position follows events that are much older than the latest one at once, and later ones after the overlap."""
    cursor = job_feed._Cursor(0, 10.0)
    records = [
        JobEventRecord(EventRecord(id_, time_s, "created", {}), "a" * 32, "search", "x")
        for id_, time_s in ((1, 100.0), (2, 500.0), (3, 985.0), (4, 995.0), (5, 1000.0))
    ]
    assert cursor.unsent(records) == records
    assert cursor.position == 3
    assert [cursor.id_of(record) for record in records] == [1, 2, 3, 3, 3]
    assert cursor.unsent(records[3:]) == []


def test_progress_alone_reads_no_rights(stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """If only progress has changed, a stream reads neither the readable jobs nor events again before RIGHTS_S."""
    monkeypatch.setattr(job_feed, "RIGHTS_S", 60.0)
    writer, reads = stored.open_attempt(stored_study(stored).id), 0
    read = stored.readable_jobs

    def counted(reader: Account | None) -> frozenset[str]:
        nonlocal reads
        reads += 1
        return read(reader)

    monkeypatch.setattr(stored, "readable_jobs", counted)

    async def follow(watch: Watch) -> None:
        told = 0
        stream = watch(after=None)
        async for chunk in stream:
            told += chunk.count(b"event: progress")
            if told == 8:
                break
            if told or b"event: start" in chunk:
                writer.heartbeat(wall_clock_s=1.0, progress={"n": told})
        await stream.aclose()

    followed(stored, follow)
    assert reads <= 2, "at the start, and once after the first look at the database"


def test_a_new_watcher_gets_no_stale_progress(stored: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """The progress of the time before a pause without watchers is not sent after it."""
    writer = stored.open_attempt(stored_study(stored).id)
    read = stored.progress_of_jobs

    def slow() -> Any:
        time.sleep(0.5)
        return read()

    async def first(watch: Watch, number: int) -> None:
        writer.heartbeat(wall_clock_s=1.0, progress={"n": number})
        stream = watch(after=None)
        async for chunk in stream:
            if b"event: progress" in chunk:
                assert f'"n":{number}' in chunk.decode().replace(" ", "")
                break
        await stream.aclose()

    async def follow(watch: Watch) -> None:
        await first(watch, 1)
        monkeypatch.setattr(stored, "progress_of_jobs", slow)
        await first(watch, 2)

    followed(stored, follow)


def test_rights_are_checked_as_they_change(server: ApiServer) -> None:
    """A job that is made private disappears with all that happens to it; one that is shared appears."""
    company = Company.on(server)
    record = company.own(stored_study(server.store))
    writer = server.store.open_attempt(record.id)
    hidden = company.own(stored_study(server.store), sharing=Sharing.PRIVATE)
    with company.http("viewer") as viewer, company.http("stranger") as stranger:
        member, outsider = Watcher(viewer), Watcher(stranger)
        writer.set_state(JobState.RUNNING)
        member.wait_for("state", record.id, state="RUNNING")
        company.own(record, sharing=Sharing.PRIVATE)
        company.own(hidden, sharing=Sharing.TEAM)
        member.wait_for("removed", record.id)
        member.wait_for("added", hidden.id)
        writer.heartbeat(wall_clock_s=1.0, progress={"secret": 1})
        writer.set_state(JobState.FAILED, "a secret of the owner")
        other = server.store.open_attempt(hidden.id)
        other.set_state(JobState.RUNNING)
        member.wait_for("state", hidden.id, state="RUNNING")
        assert "secret" not in str(member.frames)
        assert [kind for _, kind, _ in outsider.frames] == ["start"], "nothing of another team is sent"
        assert record.id not in viewer.get("/v1/events", headers=JSON).text
        assert stranger.get("/v1/events", headers=JSON).json() == {"events": []}
        other.set_state(JobState.CANCELLED)
        server.store.delete_job(hidden.id)
        member.wait_for("removed", hidden.id)


def test_the_stream_ends_with_its_token(server: ApiServer) -> None:
    """A stream ends within seconds after its token is revoked, even if nothing happens."""
    company = Company.on(server)
    with company.http("viewer") as viewer:
        watcher = Watcher(viewer)
        for token in company.accounts.tokens("viewer"):
            company.accounts.revoke_token(token.id, actor=OPERATOR)
        assert watcher.has_ended.wait(20)


def test_a_quiet_stream_of_all_jobs_is_kept_alive(server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments are sent while nothing happens."""
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.05)
    monkeypatch.setattr(job_feed, "RIGHTS_S", 0.05)
    comments = 0
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=60) as answer:
        for line in answer.iter_lines():
            comments += line.startswith(":")
            if comments == 3:
                break


def test_clients_yield_the_events_of_all_jobs(server: ApiServer) -> None:
    """The client's method resumes after an id, and names the job of each event."""
    study = finished_study(server.store, num_trials=5)
    with Client(server.url) as client:
        stream = client.all_events(after=0)
        found = []
        for event in stream:
            found.append((event.kind, event.job))
            if event.kind == "state" and event.payload["state"] == "COMPLETE":
                break
    assert found[0] == ("created", study.id)
    ids = [event["id"] for event in httpx.get(f"{server.url}/v1/events", headers=JSON).json()["events"]]
    assert len(found) == len(ids)


def test_nothing_is_read_without_watchers(server: ApiServer) -> None:
    """The reading of the database ends with the last watcher."""
    with httpx.stream("GET", f"{server.url}/v1/events", timeout=60) as answer:
        lines = answer.iter_lines()  # the connection ends with the last reference to it
        assert any("start" in line for line in lines)
        assert is_reading(server)
    until = time.monotonic() + 10
    while is_reading(server):
        assert time.monotonic() < until
        time.sleep(0.02)


def is_reading(server: ApiServer) -> bool:
    loop = server.app.state.services.hub._loop
    assert loop is not None
    return any(task.get_name() == "events of all jobs" for task in asyncio.all_tasks(loop))
