"""Event streams that follow all jobs which the reader may see: state changes and progress.

The server looks for new events once for all streams. Each stream then reads its events with the present rights of the
user who requested it, so that the stream stops showing a job as soon as this user may no longer read the job.

On PostgreSQL, events of different jobs may become visible in another order than the order of their ids, because each
transaction takes its ids before it ends. A stream therefore reads the events of the last seconds again. The id that it
sends with an event is at most the largest id below which no event is missing. Clients that reconnect may get events of
the last seconds twice, but miss no event.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from service.api import sse
from service.api.presenters import job_event_document
from service.api.protocols import Principal
from service.api.sse import KEEP_ALIVE, RETRY, frame
from service.schemas.api import JobProgressDocument, JobReferenceDocument, StreamStartDocument
from service.store import Store
from service.store.availability import is_away
from service.store.records import JobEventRecord
from service.types import Account, EventKind

__all__ = ["STATE_KINDS", "JobFeed"]

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Events that change what lists of jobs show.
STATE_KINDS = frozenset(
    {
        EventKind.CREATED,
        EventKind.ATTEMPT,
        EventKind.STATE,
        EventKind.WAITING,
        EventKind.RESUMED,
        EventKind.STEERED,
        EventKind.STOPPING,
        EventKind.PREEMPTED,
        EventKind.JOB_REFUSED,
    }
)

# Seconds between reads of the sender's rights in a quiet stream.
RIGHTS_S = 2.0
# Seconds that a transaction may take until its events are visible.
OVERLAP_S = 10.0
BATCH = 500


class JobFeed:
    """Source of the streams that follow all jobs: it wakes them when there are events, and knows every job's progress.

    `pause_s` returns the number of seconds to wait between two reads. `threads` limits the number of threads in which
    the database is read. The feed is bound to one asyncio event loop, and reads only while somebody watches.
    """

    def __init__(self, store: Store, pause_s: Callable[[], float], threads: anyio.CapacityLimiter) -> None:
        self.announced = asyncio.Event()  # set when the database has announced new events
        self._store = store
        self._pause_s = pause_s
        self._threads = threads
        self._overlap_s = OVERLAP_S if store.engine.dialect.name == "postgresql" else 0.0
        self._watchers = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._last: int | None = None
        self._progress: Mapping[str, tuple[str, Mapping[str, Any]]] = {}

    async def watch(
        self, *, after: int | None, renewal: Callable[[], Awaitable[Principal | None]]
    ) -> AsyncGenerator[bytes, None]:
        """Yield events and progress of all jobs that the sender may read, as encoded server-sent events, without end.

        The stream begins with the first event whose id is above `after`. If `after` is None, only new events are
        yielded. `renewal` returns the sender of the request with its present rights; the stream ends when `renewal`
        returns None.
        """
        self._watchers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._poll(), name="events of all jobs")
        try:
            async for chunk in self._follow(after, renewal):
                yield chunk
        finally:
            self._watchers -= 1
            if self._watchers == 0 and self._task is not None:
                self._task.cancel()
                self._task, self._last, self._progress = None, None, {}

    async def _follow(
        self, after: int | None, renewal: Callable[[], Awaitable[Principal | None]]
    ) -> AsyncGenerator[bytes, None]:
        yield RETRY
        chunk = b""
        cursor: _Cursor | None = None
        shown: frozenset[str] | None = None
        told: dict[str, Mapping[str, Any]] = {}
        seen, read_at = self._last, -math.inf
        next_batch: int | None = None  # where the next batch begins, if the last one was full
        sent_at = time.monotonic()
        while (sender := await renewal()) is not None:
            changed, last = self._changed, self._last  # taken before reading: anything stored later changes them
            now, account = time.monotonic(), sender.account
            try:
                if cursor is None:
                    cursor = (
                        await self._in_thread(self._new_cursor) if after is None else _Cursor(after, self._overlap_s)
                    )
                    start = cursor.position
                    chunk += frame(StreamStartDocument(after=start), event="start", id=start)
                if shown is None or next_batch is not None or last != seen or now - read_at >= RIGHTS_S:
                    readable = await self._in_thread(self._store.readable_jobs, account)
                    if shown is not None:
                        chunk += b"".join(_reference("added", job) for job in sorted(readable - shown))
                        chunk += b"".join(_reference("removed", job) for job in sorted(shown - readable))
                    shown = readable
                    batch = await self._in_thread(self._read, next_batch or cursor.position, account)
                    next_batch = batch[-1].event.id if len(batch) == BATCH else None
                    chunk += b"".join(
                        frame(job_event_document(record), event=record.event.kind, id=cursor.id_of(record))
                        for record in cursor.unsent(batch)
                    )
                    seen, read_at = last, now
            except Exception as error:  # the next round retries
                if not is_away(error):  # which the store logs itself, once
                    logger.error("events of all jobs could not be read", exc_info=error)
                await asyncio.sleep(self._pause_s())
                continue
            for job, (kind, progress) in self._progress.items():
                if job in shown and told.get(job) != progress:
                    told[job] = progress
                    chunk += frame(
                        JobProgressDocument(job=job, job_kind=kind, progress=dict(progress)), event="progress"
                    )
            told = {job: progress for job, progress in told.items() if job in self._progress}
            if chunk or time.monotonic() - sent_at >= sse.KEEP_ALIVE_S:
                yield chunk or KEEP_ALIVE
                chunk, sent_at = b"", time.monotonic()
            if next_batch is None:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RIGHTS_S):
                        await changed.wait()

    def _new_cursor(self) -> _Cursor:
        """Make the cursor of a stream of new events: all events that are visible now count as sent."""
        if self._overlap_s == 0:
            return _Cursor(self._store.last_event_id(), 0.0)
        cursor = _Cursor(self._store.settled_event_id(self._overlap_s), self._overlap_s)
        after = cursor.position
        while batch := self._read(after, None):
            cursor.unsent(batch)
            after = batch[-1].event.id
        return cursor

    def _read(self, after: int, account: Account | None) -> Sequence[JobEventRecord]:
        return self._store.job_events(after=after, kinds=STATE_KINDS, reader=account, limit=BATCH)

    async def _poll(self) -> None:
        while True:
            self.announced.clear()  # before reading: what is announced from now on is read next time
            try:
                last, progress = await self._in_thread(self._look)
                if (last, progress) != (self._last, self._progress):
                    self._last, self._progress = last, progress
                    before, self._changed = self._changed, asyncio.Event()
                    before.set()
            except Exception as error:  # the next round retries
                if not is_away(error):
                    logger.error("jobs could not be read", exc_info=error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self.announced.wait()

    def _look(self) -> tuple[int, Mapping[str, tuple[str, Mapping[str, Any]]]]:
        return self._store.last_event_id(), self._store.progress_of_jobs()

    async def _in_thread(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)


class _Cursor:
    """Position of one stream in the events of all jobs, and the ids of later events that the client has already.

    No event up to the position can be missing, so the stream reads only events with larger ids. The position moves to
    an event `overlap_s` seconds after the event was read, or as soon as the stream has read another event that happened
    at least `overlap_s` seconds later.
    """

    def __init__(self, position: int, overlap_s: float) -> None:
        self.position = position
        self._overlap_s = overlap_s
        self._sent: set[int] = set()
        self._read: deque[tuple[float, int]] = deque()
        self._latest = -math.inf  # time of the latest event that was read, by the clock of the database

    def unsent(self, records: Sequence[JobEventRecord]) -> list[JobEventRecord]:
        """Return the events among `records` that this stream has not sent yet, and mark them as sent."""
        now = time.monotonic()
        new = [record for record in records if record.event.id not in self._sent]
        if new:
            self._sent |= {record.event.id for record in new}
            self._read.append((now, max(record.event.id for record in new)))
            self._latest = max(self._latest, max(record.event.time for record in new))
            settled = [r.event.id for r in new if r.event.time <= self._latest - self._overlap_s]
            self.position = max([self.position, *settled])
        while self._read and now - self._read[0][0] >= self._overlap_s:
            self.position = max(self.position, self._read.popleft()[1])
        self._sent = {id_ for id_ in self._sent if id_ > self.position}
        return new

    def id_of(self, record: JobEventRecord) -> int:
        """Id to send with the event `record`; a client that resumes its stream after this id misses no event."""
        return min(self.position, record.event.id)


def _reference(event: str, job: str) -> bytes:
    return frame(JobReferenceDocument(job=job), event=event)
