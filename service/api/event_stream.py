"""Streams of job events to any number of HTTP clients; each job's events are read from the database only once.

On PostgreSQL, new events are read as soon as the database announces them. On SQLite, and while there are no
announcements, the server polls for new events. Every watcher has its own cursor: the id of the last event that the
server sent to it. The events of a job are stored in the order of their ids (they are written under the job's row lock),
so a new event always has a larger id than every cursor. Watchers that are up to date share one buffer of the latest
encoded events. For a slower watcher, the server reads events from the database in batches, so that no backlog is held
in memory.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from service.api import sse
from service.api.job_feed import JobFeed
from service.api.presenters import event_document
from service.api.protocols import Principal
from service.api.sse import KEEP_ALIVE, RETRY, frame
from service.errors import NotFound
from service.schemas.api import EndDocument
from service.store import EventRecord, Store
from service.store.availability import is_away
from service.store.servers import Notifications
from service.types import JobRecord

__all__ = ["EventHub"]

from workers.telemetry import logs

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Seconds between reads of a watched job: as a rule, and where the database announces new events.
POLL_S = 0.2
ANNOUNCED_POLL_S = 1.0
MAX_THREADS = 8
# Events per read, and frames in the window that all watchers of a job share.
BATCH = 500
WINDOW = 1000


class EventHub:
    """Hub that sends the events of jobs to HTTP clients as streams. A hub is bound to one asyncio event loop.

    PostgreSQL notifies the hub of new events. Without notifications, as with SQLite, the hub asks `store` every
    `poll_s` seconds for new events of the jobs that clients follow.
    """

    def __init__(self, store: Store, *, poll_s: float = POLL_S) -> None:
        self._store = store
        self._poll_s = poll_s
        self._loop: asyncio.AbstractEventLoop | None = None
        self._notifications = Notifications(store, self._announced)
        self._feeds: dict[str, _Feed] = {}
        # A separate limiter: events continue while all of the application's threads are blocked.
        self._threads = anyio.CapacityLimiter(MAX_THREADS)
        self._all: JobFeed | None = None
        self._streams: Counter[str] = Counter()

    def start(self) -> None:
        """Start to listen to notifications of PostgreSQL, which come when any process has stored an event of a job.

        SQLite has no notifications; the hub then finds new events only because it reads the database regularly.
        """
        self._notifications.start()

    def stop(self) -> None:
        self._notifications.stop()

    def _announced(self, job_id: str) -> None:
        """Make the hub read a job's new events at once; called when the database notifies the server of a new event.

        The call has no effect if no HTTP client follows the job. The method is called in the thread that receives the
        notifications, not in the thread of the event loop.
        """

        def announce() -> None:
            if (feed := self._feeds.get(job_id)) is not None:
                feed.announced.set()
            if self._all is not None:
                self._all.announced.set()

        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(announce)

    def _pause_s(self) -> float:
        return max(self._poll_s, ANNOUNCED_POLL_S) if self._notifications.is_listening else self._poll_s

    def num_streams(self, user: str) -> int:
        """Number of the open streams of events that the user has requested."""
        return self._streams[user]

    async def counted(self, frames: AsyncGenerator[bytes, None], user: str) -> AsyncGenerator[bytes, None]:
        """Yield the encoded events `frames` of a stream, which counts as an open stream of `user` until it ends."""
        self._streams[user] += 1
        try:
            async with aclosing(frames):
                async for frame_ in frames:
                    yield frame_
        finally:
            self._streams[user] -= 1
            self._streams += Counter()  # drops users without a stream

    def job(self, job_id: str) -> JobRecord | None:
        """Return the job as it was when the hub last read it from the database for its streams.

        Returns None if no HTTP client follows the job, or if the hub has not read the job yet.
        """
        feed = self._feeds.get(job_id)
        return None if feed is None else feed.job

    async def watch(self, job_id: str, *, after: int) -> AsyncGenerator[bytes, None]:
        """Yield the job's events with ids above `after` as encoded server-sent events: past events first, then new.

        The stream ends when the job has ended and all its events were sent.
        """
        self._loop = asyncio.get_running_loop()
        feed = self._feeds.get(job_id)
        if feed is None:
            feed = self._feeds[job_id] = _Feed(self._store, job_id, self._pause_s, self._threads)
        feed.watchers += 1
        try:
            async for chunk in feed.follow(after):
                yield chunk
        finally:
            feed.watchers -= 1
            if feed.watchers == 0:
                feed.stop()
                if self._feeds.get(job_id) is feed:
                    del self._feeds[job_id]

    def watch_all(
        self, *, after: int | None, renewal: Callable[[], Awaitable[Principal | None]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield state changes and progress of all jobs that the sender of the request may read (`JobFeed.watch`)."""
        self._loop = asyncio.get_running_loop()
        if self._all is None:
            self._all = JobFeed(self._store, self._pause_s, self._threads)
        return self._all.watch(after=after, renewal=renewal)


class _Feed:
    """Reader of one job's events from the database, shared by all HTTP clients that follow the job.

    `pause_s` returns the number of seconds to wait between two reads. `threads` limits the number of threads in which
    the database is read.
    """

    def __init__(self, store: Store, job_id: str, pause_s: Callable[[], float], threads: anyio.CapacityLimiter) -> None:
        self.watchers = 0
        self.job: JobRecord | None = None
        self.announced = asyncio.Event()  # set when the database has announced new events
        self._store = store
        self._job_id = job_id
        self._pause_s = pause_s
        self._threads = threads
        # All events with ids from above `floor` up to `position` are in the window.
        self._window: deque[tuple[int, bytes]] = deque()
        self._floor: int | None = None
        self._position = 0
        self._progress: Mapping[str, Any] | None = None
        self._progress_frame = b""
        self._end = b""
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._poll(), name=f"events of {job_id}")

    def stop(self) -> None:
        self._task.cancel()

    async def follow(self, cursor: int) -> AsyncGenerator[bytes, None]:
        progress = b""
        yield RETRY
        while True:
            changed = self._changed  # taken before reading: anything stored later sets it
            chunk = b""
            if self._floor is not None and cursor < self._floor:
                floor = self._floor
                try:
                    events = await self._in_thread(self._read, cursor)
                except Exception as error:  # the next round retries
                    self._log(error)
                    await asyncio.sleep(self._pause_s())
                    continue
                cursor = events[-1].id if events else floor
                if events:
                    yield b"".join(map(_frame_of, events))
                continue
            if self._floor is not None:
                chunk, cursor = self._newer(cursor)
                if self._progress_frame != progress:
                    progress = self._progress_frame
                    chunk += progress
            if chunk:
                yield chunk
            elif self._end:
                yield self._end
                return
            else:
                try:
                    async with asyncio.timeout(sse.KEEP_ALIVE_S):
                        await changed.wait()
                except TimeoutError:
                    yield KEEP_ALIVE

    def _newer(self, cursor: int) -> tuple[bytes, int]:
        frames: list[bytes] = []
        last = cursor
        for number, data in reversed(self._window):
            if number <= cursor:
                break
            last = max(last, number)
            frames.append(data)
        return b"".join(reversed(frames)), last

    async def _poll(self) -> None:
        while not self._end:
            is_behind = False
            try:
                if self._floor is None:
                    position = await self._in_thread(self._store.last_event_id, self._job_id)
                    self._position = self._floor = position
                    self._wake()  # there are past events to send
                job, events = await self._in_thread(self._look)
                is_behind = len(events) == BATCH
                self._publish(job, events, is_last=job.state.is_finished and not is_behind)
            except NotFound:  # deleted: a watcher that connects again gets 404
                self._end = KEEP_ALIVE
                self._wake()
            except Exception as error:  # the next round retries
                self._log(error)
            if not is_behind:
                with suppress(TimeoutError):
                    async with asyncio.timeout(self._pause_s()):
                        await self.announced.wait()
            self.announced.clear()  # before reading: what is announced from now on is read next time

    def _log(self, error: Exception) -> None:
        if not is_away(error):  # which the store logs itself, once
            with logs.fields(job=self._job_id):
                logger.error("events of job %s could not be read", self._job_id, exc_info=error)

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)

    def _look(self) -> tuple[JobRecord, tuple[EventRecord, ...]]:
        # The state is read first: if the job has ended by then, all of its events are stored.
        job = self._store.job(self._job_id)
        return job, self._read(self._position)

    def _read(self, after: int) -> tuple[EventRecord, ...]:
        return self._store.events(self._job_id, after=after, limit=BATCH)

    def _publish(self, job: JobRecord, events: Iterable[EventRecord], *, is_last: bool) -> None:
        self.job = job
        is_changed = False
        for event in events:
            self._window.append((event.id, _frame_of(event)))
            self._position = event.id
            is_changed = True
            if len(self._window) > WINDOW:
                self._floor = self._window.popleft()[0]
        if job.progress is not None and job.progress != self._progress:
            self._progress = job.progress
            self._progress_frame = frame(job.progress, event="progress")
            is_changed = True
        if is_last:
            self._end = frame(EndDocument(state=job.state.value, reason=job.reason), event="end")
            is_changed = True
        if is_changed:
            self._wake()

    def _wake(self) -> None:
        before, self._changed = self._changed, asyncio.Event()
        before.set()


def _frame_of(event: EventRecord) -> bytes:
    return frame(event_document(event), event=event.kind, id=event.id)
