"""Events of jobs, in the order of their ids, and numbers and times that are computed from events."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import sqlalchemy as sa

from service.store import schema
from service.store.availability import repeated
from service.store.connection import clock
from service.store.database import Database
from service.store.jobs import readable
from service.store.records import EventRecord, JobEventRecord
from service.types import Account, DriverWait, EventKind

__all__ = ["EventStore"]


@repeated
class EventStore(Database):
    """Store that reads the events of one job or of all jobs.

    The events are written by the `JobWriter` of the job's driver, and by stores that change jobs, such as `JobStore`
    and `SteeringStore`, each in the transaction of the change.
    """

    def events(
        self,
        job_id: str,
        *,
        after: int = 0,
        limit: int | None = None,
        kinds: Collection[str] | None = None,
        newest_first: bool = False,
        offset: int = 0,
    ) -> tuple[EventRecord, ...]:
        """Read the events of a job with ids above `after`, in the order of ids, at most `limit` (None: all).

        `kinds` has the kinds of events to read; None reads all kinds. With `newest_first`, the largest id is first. The
        first `offset` events in this order are left out.
        """
        table = schema.events
        order = table.c.id.desc() if newest_first else table.c.id
        columns = (table.c.id, table.c.time, table.c.kind, table.c.payload)
        query = sa.select(*columns).where(_chosen_events(job_id, after, kinds)).order_by(order)
        with self._reads.connect() as connection:
            rows = connection.execute(query.limit(limit).offset(offset or None))
            return tuple(EventRecord(*row) for row in rows)

    def num_events(self, job_id: str, *, after: int = 0, kinds: Collection[str] | None = None) -> int:
        """Count the events of a job with ids above `after`; if `kinds` is not None, only events of these kinds."""
        query = sa.select(sa.func.count()).select_from(schema.events).where(_chosen_events(job_id, after, kinds))
        with self._reads.connect() as connection:
            return connection.execute(query).scalar_one()

    def job_events(
        self, *, after: int, kinds: Collection[EventKind], reader: Account | None = None, limit: int
    ) -> tuple[JobEventRecord, ...]:
        """Read the events of all jobs with ids above `after`, in the order of ids, at most `limit`.

        `kinds` has the kinds of events to read. If `reader` is not None, only events of jobs that this account may read
        are returned. On PostgreSQL, an event may become visible only after a later event, with a larger id, of another
        job.
        """
        table, jobs = schema.events, schema.studies
        columns = (table, jobs.c.kind.label("job_kind"), jobs.c.name)
        where = (table.c.id > after) & table.c.kind.in_([kind.value for kind in kinds]) & readable(reader)
        query = sa.select(*columns).join(jobs, jobs.c.id == table.c.study).where(where).order_by(table.c.id)
        with self._reads.connect() as connection:
            return tuple(
                JobEventRecord(EventRecord(row.id, row.time, row.kind, row.payload), row.study, row.job_kind, row.name)
                for row in connection.execute(query.limit(limit))
            )

    def event_counts(self, job_ids: Collection[str], *, kinds: Collection[EventKind]) -> dict[str, dict[str, int]]:
        """Number of events of the given jobs and kinds, as job id -> kind -> number; zeros are left out."""
        table = schema.events
        where = table.c.study.in_(job_ids) & table.c.kind.in_([kind.value for kind in kinds])
        query = sa.select(table.c.study, table.c.kind, sa.func.count()).where(where)
        counts: dict[str, dict[str, int]] = defaultdict(dict)
        with self._reads.connect() as connection:
            for job_id, kind, count in connection.execute(query.group_by(table.c.study, table.c.kind)):
                counts[job_id][kind] = count
        return dict(counts)

    def driver_waits(self, job_ids: Collection[str]) -> dict[str, DriverWait]:
        """Find when each of the given jobs last waited for a driver (a process that works on the job), keyed by job id.

        A wait begins when a job is created or resumed, and ends when a driver begins.
        """
        table = schema.events
        kinds = [kind.value for kind in (EventKind.CREATED, EventKind.RESUMED, EventKind.ATTEMPT)]
        where = table.c.study.in_(job_ids) & table.c.kind.in_(kinds)
        query = sa.select(table.c.id, table.c.study, table.c.kind, table.c.time).where(where)
        found: dict[str, DriverWait] = {}
        with self._reads.connect() as connection:
            # Sorted here: in the query, the order would make SQLite read all events of the jobs.
            for _, job_id, kind, time_s in sorted(connection.execute(query), key=lambda row: row.id):
                if kind != EventKind.ATTEMPT.value:
                    found[job_id] = DriverWait(time_s)
                elif (wait := found.get(job_id)) is not None and wait.until is None:
                    found[job_id] = replace(wait, until=time_s)
        return found

    def last_event_id(self, job_id: str | None = None) -> int:
        """Id of the latest event of a job, or of all jobs; 0 if there is no event yet."""
        table = schema.events
        query = sa.select(sa.func.max(table.c.id))
        with self._reads.connect() as connection:
            found: int | None = connection.execute(
                query if job_id is None else query.where(table.c.study == job_id)
            ).scalar()
            return found or 0

    def settled_event_id(self, age_s: float) -> int:
        """Id of the latest event that was added at least `age_s` seconds ago; 0 if there is no such event.

        A reader that begins after this event misses none, although younger events may become visible in another order
        than that of their ids.
        """
        table = schema.events
        with self._reads.connect() as connection:
            query = sa.select(table.c.id).where(table.c.time <= clock(connection) - age_s)
            return connection.execute(query.order_by(table.c.id.desc()).limit(1)).scalar() or 0


def _chosen_events(job_id: str, after: int, kinds: Collection[str] | None) -> sa.ColumnElement[bool]:
    """Condition on events: they belong to the job, have ids above `after`, and are of `kinds` (None: of any kind)."""
    table = schema.events
    chosen = (table.c.study == job_id) & (table.c.id > after)
    return chosen if kinds is None else chosen & table.c.kind.in_([str(kind) for kind in kinds])
