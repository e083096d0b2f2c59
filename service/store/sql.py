"""Store of jobs, trials, rungs, samples and events: SQLite or PostgreSQL through SQLAlchemy.

Every process may read. Only a job's driver writes its trials, rungs, samples and events, through a `JobWriter` that
checks its attempt number in every transaction, so a driver that was replaced can no longer write.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any, Protocol, Self

import numpy as np
import sqlalchemy as sa
from numpy.typing import NDArray

from service.disk import DRAINED
from service.errors import Conflict, DatabaseUnavailable, NotFound, StaleAttempt
from service.store import schema
from service.store.attempt_writer import JobWriter, insert_event, lock_job
from service.store.availability import availability_of, is_away, is_waiting, repeated, waiting
from service.store.column_types import LosslessText
from service.store.connection import clock, clock_time, connect, insert, one_of, reading, transaction, unit_of_work
from service.store.database_url import parse_url, shown
from service.store.documents import RESPONSES, RemovedResponses
from service.store.prompts import SampleText, picture_positions, read_picture, read_prompts, stored_prompts
from service.store.records import (
    BracketRecord,
    ChunkWork,
    EngineFaultRecord,
    EvaluationRequest,
    EventRecord,
    EvidenceRecord,
    JobEventRecord,
    JudgmentRecord,
    job_record,
    trial_record,
    trial_result,
)
from service.store.samples import (
    VoidSample,
    holdings,
    move_old_samples,
    num_tokens,
    read_chunks,
    read_samples,
    read_void_samples,
    remove_texts,
    text_sizes,
    void_holdings,
    with_room,
)
from service.store.steps import Step, read_step
from service.store.upgrade import upgrade
from service.store.usage import read_usage
from service.types import (
    Account,
    DriverWait,
    EventKind,
    ExportRecord,
    ExportState,
    JobRecord,
    JobState,
    Role,
    RungRecord,
    Sharing,
    Steering,
    TeamUsage,
    TrialRecord,
    TrialResult,
    TrialState,
)
from workers.types import SampleResult, Split

__all__ = ["RELOAD_EVENTS", "Store"]

# Seconds until a store that waits tries again to open a database that does not answer.
RETRY_S = 1.0

# Texts in PostgreSQL's refusals of a connection, which have no error code.
REFUSALS = ("does not exist", "authentication failed", "no password supplied", "no pg_hba.conf entry")

# Events after which drivers without a result are counted from zero: stored results, a request to resume, and drivers
# that were asked to give their place up.
RESULT_EVENTS = (
    EventKind.PREEMPTED,
    EventKind.RUNG,
    EventKind.TRIAL_STATE,
    EventKind.HOLDOUT_SCORED,
    EventKind.VERIFICATION,
    EventKind.RESUMED,
    EventKind.TRAINING,
    EventKind.ANALYSIS,
)

# States of jobs that have ended.
FINISHED = tuple(state.value for state in JobState if state.is_finished)

# Columns of the table of trials: those of results, and those of whole trials. Recipes are read as text.
RESULT_COLUMNS = tuple(c for c in schema.trials.c if c.name not in ("study", "configuration", "recipe"))
TRIAL_COLUMNS = (
    *RESULT_COLUMNS,
    schema.trials.c.configuration,
    sa.cast(schema.trials.c.recipe, sa.Text).label("recipe"),
)

# Fields by which lists of jobs can be sorted.
JOB_SORTS: Mapping[str, sa.ColumnElement[Any]] = {
    "created": schema.studies.c.created_at,
    "name": schema.studies.c.name,
    "state": schema.studies.c.state,
    "owner": sa.func.coalesce(schema.studies.c.owner, ""),
    "priority": schema.studies.c.priority,
}

# Reason of a STOPPED job whose driver was asked to give its place up.
YIELDED = "it gave up its place"

# Events that drivers without a result store.
SETBACK_EVENTS = (EventKind.ATTEMPT, EventKind.JOB_REFUSED, EventKind.WAITING)

# Events that name the trial whose result they change, and events after which trials may have changed that no event
# names: a new driver may have taken over, or samples are scored again.
TRIAL_EVENTS = (EventKind.TRIAL, EventKind.RUNG, EventKind.TRIAL_STATE, EventKind.STEERED)
RELOAD_EVENTS = (EventKind.ATTEMPT, EventKind.ENGINE_FAULT, EventKind.SCORED_AGAIN)

# Seconds by which the clock of stored times may be set back without a chunk of samples being overlooked, and the rows
# of chunks that are read at once.
CLOCK_STEP_S = 10.0
CHUNKS_AT_ONCE = 100


class _Connections(Protocol):
    """Interface that opens connections for reading the database.

    An SQLAlchemy engine opens a new connection at each call. A snapshot, which shows the database at one moment,
    returns the same connection at each call.
    """

    def connect(self) -> AbstractContextManager[sa.Connection]: ...


@dataclass(frozen=True)
class _OneConnection:
    """Gives all reads of a store the same connection, whose transaction stays open.

    All reads therefore see the same state of the database.
    """

    connection: sa.Connection

    def connect(self) -> AbstractContextManager[sa.Connection]:
        return nullcontext(self.connection)


@repeated
class Store:
    """Store of all jobs and their results in one database; thread-safe, and must be closed after use.

    The constructor creates or migrates the database at `url`, the URL of an SQLite file or of a PostgreSQL database.
    `waits` says what happens while the database does not answer: if it is True, calls wait and are then repeated;
    otherwise they raise the error.

    Raises:
        Conflict: `url` names no database or a database of a newer version, or this user may not use the database.
        DatabaseUnavailable: The database does not answer, and `waits` is False.
    """

    def __init__(self, url: str | sa.URL, *, waits: bool = False) -> None:
        self._engine = waiting(connect(parse_url(url)), waits=waits)
        self._reads: _Connections = reading(self._engine)
        self._admissions = threading.RLock()
        while not self._is_open():
            time.sleep(RETRY_S)

    def _is_open(self) -> bool:
        """Try to open the database, and create or migrate its tables; return whether the database answered.

        If the database does not answer, the result is False in a store that waits for its database, and the caller
        tries again. Any other store raises DatabaseUnavailable. Raises Conflict if the database cannot be used.
        """
        try:
            upgrade(self._engine)
        except sa.exc.DatabaseError as error:
            reason = " ".join(str(error.orig).split())
            is_refusal = not is_away(error) or any(sign in reason for sign in REFUSALS)
            if is_waiting(self._engine) and not is_refusal:
                return False
            self._engine.dispose()
            if is_refusal:
                raise Conflict(f"database {self.place}: cannot be used: {reason}") from error
            raise DatabaseUnavailable(f"database {self.place}: does not answer: {reason}") from error
        return True

    def close(self) -> None:
        self._engine.dispose()

    @property
    def engine(self) -> sa.Engine:
        """SQLAlchemy engine of the database, for other stores in the same database, such as `ArtifactStore`."""
        return self._engine

    @property
    def is_on_one_machine(self) -> bool:
        """Whether only processes of this machine can open the database, because it is an SQLite file."""
        return self._engine.dialect.name == "sqlite"

    @property
    def url(self) -> str:
        """URL with which another process opens the database; it may hold a password."""
        return self._engine.url.render_as_string(hide_password=False)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Context with a connection for reading, for code outside this class that reads the same database.

        All queries in the context see the same state of the database. In a store that `snapshot` has made, this is the
        state at the beginning of the snapshot.
        """
        return self._reads.connect()

    def waiting(self) -> Self:
        """Copy of this store whose calls wait for an unavailable database instead of raising an error."""
        return self._with(waiting(self._engine))

    def _with(self, engine: sa.Engine) -> Self:
        other = copy(self)
        other._engine, other._reads = engine, reading(engine)
        return other

    def problem(self) -> str | None:
        """Message for users that says since when the database does not answer; None if it answered the last call."""
        return availability_of(self._engine).problem()

    def now(self) -> float:
        """Current time in seconds since the epoch, by the database's clock, which all stored times use."""
        with self._reads.connect() as connection:
            return clock_time(connection)

    @property
    def place(self) -> str:
        """URL, without a password, that names the database in messages."""
        return shown(self._engine.url)

    @contextmanager
    def snapshot(self) -> Iterator[Self]:
        """Context with a copy of this store that reads the database in its current state, without later changes.

        The copy must not be used to write.
        """
        with self._reads.connect() as connection:
            frozen = self._with(waiting(self._engine, waits=False))
            frozen._reads = _OneConnection(connection)
            yield frozen

    def unit_of_work(self) -> AbstractContextManager[sa.Connection]:
        """Context in which all calls of stores of this database, made by this thread, are one transaction.

        The transaction is committed when the context ends without an error; otherwise nothing is stored. It serves to
        store a change together with its entry in the audit log.
        """
        return unit_of_work(self._engine)

    @contextmanager
    def admission(self) -> Iterator[None]:
        """Context in which the caller checks quotas and then stores the jobs or files that fit, in one transaction.

        Only one such context is open at a time, among all servers with this database. Otherwise two callers together
        could exceed a quota.
        """
        with self._admissions, unit_of_work(self._engine) as connection:  # who waits for the lock has no connection
            if connection.dialect.name == "postgresql":  # on SQLite, the transaction has the only write lock
                connection.execute(sa.text("SELECT pg_advisory_xact_lock(:key)"), {"key": ADMISSIONS_LOCK})
            yield

    # -- jobs ------------------------------------------------------------------------------------------------------

    def create_job(
        self,
        *,
        kind: str,
        name: str,
        document: Mapping[str, Any],
        accepted: Mapping[str, Any],
        idempotency_key: str | None = None,
        request_digest: str | None = None,
        keeps: Mapping[str, str] | None = None,
        owner: str | None = None,
        team: str | None = None,
        sharing: Sharing = Sharing.TEAM,
        traceparent: str | None = None,
    ) -> JobRecord:
        """Store a new job and return it, or return the job that was created with the same `idempotency_key`.

        Args:
            kind: Name of the kind of job, such as "search" for a study.
            name: The job's name, which need not be unique.
            document: The submitted document, such as the study file.
            accepted: Findings of the checks of the document, as JSON.
            idempotency_key: Text by which a repeated request is recognized; None always stores a new job.
            request_digest: Hash of the request; callers compare it with the hash of a later request that has the same
                key.
            keeps: The digests of artifacts (such as trained models) of other jobs that this job uses, keyed by the name
                that they get in this job. The artifacts become artifacts of this job too, so that their files stay when
                the other jobs are deleted.
            owner: Name of the user who creates the job; None if the server has no accounts.
            team: Name of the team that the job belongs to; None for no team.
            sharing: Who may read the job besides its owner and administrators.
            traceparent: OpenTelemetry trace and span of the request, in the form of the HTTP header `traceparent`; the
                work on the job continues this trace. None if the request is not traced.

        Raises:
            Conflict: No job has one of the artifacts in `keeps` any more; nothing is stored.
        """
        job_id = uuid.uuid4().hex
        row = {
            "id": job_id,
            "name": name,
            "state": JobState.CREATED.value,
            "kind": kind,
            "document": dict(document),
            "facts": dict(accepted),
            "idempotency_key": idempotency_key,
            "request_digest": request_digest,
            "owner": owner,
            "team": team,
            "sharing": sharing.value,
            "traceparent": traceparent,
        }
        with transaction(self._engine) as connection:
            row["created_at"] = clock(connection)
            added = insert(connection, schema.studies).values(row).on_conflict_do_nothing()
            if connection.execute(added.returning(schema.studies.c.id)).scalar() is not None:
                insert_event(connection, job_id, EventKind.CREATED, {"name": name})
                for artifact, digest in (keeps or {}).items():
                    _keep_artifact(connection, job_id, artifact, digest)
        if idempotency_key is None:
            return self.job(job_id)
        record = self.job_of_key(idempotency_key)
        assert record is not None
        return record

    def job(self, job_id: str) -> JobRecord:
        """Read the job with the given id. Raises NotFound if there is no such job."""
        found = self._jobs(schema.studies.c.id == job_id)
        if not found:
            raise NotFound(f"job {job_id!r}: no such job in {self.place}")
        return found[0]

    def jobs(
        self,
        kind: str | None = None,
        *,
        state: JobState | None = None,
        name: str | None = None,
        reader: Account | None = None,
    ) -> tuple[JobRecord, ...]:
        """Read all jobs, oldest first, or only the jobs of one kind, in one state or with one name.

        If `reader` is not None, only the jobs that this account may read are returned.
        """
        table = schema.studies.c
        wanted = ((table.kind, kind), (table.state, None if state is None else state.value), (table.name, name))
        return self._jobs(
            sa.and_(_readable(reader), *(column == value for column, value in wanted if value is not None))
        )

    def job_page(
        self,
        kind: str,
        *,
        state: JobState | None = None,
        name: str | None = None,
        text: str | None = None,
        reader: Account | None = None,
        sort: str = "created",
        offset: int = 0,
        limit: int | None = None,
    ) -> tuple[tuple[JobRecord, ...], int]:
        """Read one page of the jobs of a kind that satisfy all conditions, and count the jobs of all pages.

        Args:
            kind: Name of the kind of job.
            state: Only jobs in this state.
            name: Only jobs with this name.
            text: Only jobs whose name, description or owner has this text, or whose id begins with it; case is ignored.
            reader: Only jobs that this account may read.
            sort: Name of the field to sort by, a key of JOB_SORTS; with "-" before the name, the largest value is
                first. Equal jobs are sorted by age.
            offset: Number of jobs to leave out at the beginning.
            limit: Maximum number of jobs that are returned; None returns all.

        Returns:
            The jobs, and the number of all jobs that satisfy the conditions.
        """
        table = schema.studies
        where = [_readable(reader), table.c.kind == kind]
        if state is not None:
            where.append(table.c.state == state.value)
        if name is not None:
            where.append(table.c.name == name)
        if text is not None:
            # Of a type that accepts every character: a text may have characters that PostgreSQL cannot store.
            texts = [
                sa.type_coerce(column, LosslessText) for column in (table.c.name, table.c.description, table.c.owner)
            ]
            is_found = [column.icontains(text, autoescape=True) for column in texts]
            is_id = sa.type_coerce(table.c.id, LosslessText).istartswith(text, autoescape=True)
            where.append(sa.or_(*is_found, is_id))
        by = JOB_SORTS[sort.removeprefix("-")]
        order = [by.desc() if sort.startswith("-") else by, table.c.created_at, table.c.id]
        page = sa.select(table).where(*where).order_by(*order).offset(offset).limit(limit)
        count = sa.select(sa.func.count()).select_from(table).where(*where)
        with self._reads.connect() as connection:
            jobs = tuple(job_record(row) for row in connection.execute(page).mappings())
            return jobs, connection.execute(count).scalar_one()

    def unfinished_jobs(self, *, heard_since: float = math.inf) -> tuple[JobRecord, ...]:
        """Read the unfinished jobs, and ended jobs with a sign of life after `heard_since`, oldest first.

        Signs of life are the creation of the job, the submission of a driver (a process that works on it) and a
        driver's heartbeats. `heard_since` is in seconds since the epoch; by default, no job that has ended is returned.
        """
        table = schema.studies
        times = (table.c.heartbeat_at, table.c.submitted_at, table.c.created_at)
        is_recent = sa.or_(*(time > heard_since for time in times)) if heard_since < math.inf else sa.false()
        return self._jobs(table.c.state.not_in(FINISHED) | is_recent)

    def job_ids(self, state: JobState) -> tuple[str, ...]:
        """Ids of all jobs in one state, oldest job first."""
        table = schema.studies
        query = sa.select(table.c.id).where(table.c.state == state.value).order_by(table.c.created_at, table.c.id)
        with self._reads.connect() as connection:
            return tuple(connection.execute(query).scalars())

    def readable_jobs(self, reader: Account | None) -> frozenset[str]:
        """Ids of the jobs that the account `reader` may read; all jobs if `reader` is None."""
        with self._reads.connect() as connection:
            return frozenset(connection.execute(sa.select(schema.studies.c.id).where(_readable(reader))).scalars())

    def progress_of_jobs(self) -> dict[str, tuple[str, Mapping[str, Any]]]:
        """Kind and latest progress of each job that has not ended and has progress, keyed by job id."""
        table = schema.studies.c
        query = sa.select(table.id, table.kind, table.progress).where(table.state.not_in(FINISHED))
        with self._reads.connect() as connection:
            rows = connection.execute(query)
            return {job_id: (kind, progress) for job_id, kind, progress in rows if progress is not None}

    def job_counts(self) -> dict[tuple[str, JobState], int]:
        """Number of jobs by kind and state; zeros are left out."""
        table = schema.studies
        query = sa.select(table.c.kind, table.c.state, sa.func.count()).group_by(table.c.kind, table.c.state)
        with self._reads.connect() as connection:
            return {(kind, JobState(state)): count for kind, state, count in connection.execute(query)}

    def job_of_key(self, idempotency_key: str) -> JobRecord | None:
        """Find the job that a request with the given idempotency key has created; None if there is no such job.

        Clients send the key so that a repeated request creates no second job.
        """
        return next(iter(self._jobs(schema.studies.c.idempotency_key == idempotency_key)), None)

    def _jobs(self, where: sa.ColumnElement[bool]) -> tuple[JobRecord, ...]:
        table = schema.studies
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(job_record(row) for row in rows.mappings())

    def is_drained(self) -> bool:
        """Whether the servers of this database are drained for maintenance.

        Drained servers accept no jobs and start no drivers (the processes that work on jobs).
        """
        with self._reads.connect() as connection:
            return _is_drained(connection)

    def set_drained(self, *, drained: bool) -> None:
        """Begin a drain of the servers of this database if `drained` is True, else end it.

        During a drain, in which servers can be stopped for maintenance, they accept no jobs and start no drivers (the
        processes that work on jobs). After the call that begins the drain, no further driver begins, and
        `JobRecord.has_driver` is True for every job on which a driver still works.
        """
        with transaction(self._engine) as connection:
            _lock_drains(connection)
            if not drained:
                connection.execute(sa.delete(schema.drains))
            elif not _is_drained(connection):
                connection.execute(sa.insert(schema.drains).values(since=clock(connection)))

    def open_attempt(self, job_id: str, *, because: str | None = None, as_driver: bool = False) -> JobWriter:
        """Begin a new attempt at a job, and return the writer that alone may write to the job from now on.

        An attempt is the work of one driver (a process that works on the job); the writer of an earlier attempt can no
        longer write. `because` says why another attempt was needed; None states no reason. If `as_driver` is True, the
        caller is a driver: its heartbeat is stored, and the attempt is refused while the servers are drained or the job
        is paused. Raises NotFound if there is no such job. Raises StaleAttempt if the job was cancelled, or if a driver
        may not begin now.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            if as_driver:
                _lock_drains(connection, is_shared=True)
                if _is_drained(connection):
                    raise StaleAttempt(f"job {job_id}: {DRAINED}")
            found = connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(attempt=table.c.attempt + 1, **({"heartbeat_at": clock(connection)} if as_driver else {}))
                .returning(table.c.attempt, table.c.state, table.c.is_paused)
            ).one_or_none()
            if found is None:
                raise NotFound(f"job {job_id!r}: no such job in {self.place}")
            if as_driver and found.is_paused:
                raise StaleAttempt(f"job {job_id}: is paused")
            if found.state == JobState.CANCELLED.value:
                raise StaleAttempt(f"job {job_id}: was cancelled")
            insert_event(connection, job_id, EventKind.ATTEMPT, {"attempt": found.attempt, "because": because})
        return JobWriter(self._engine, job_id, found.attempt)

    def delete_job(self, job_id: str, *, noun: str = "job") -> None:
        """Delete a job that has ended, with all its data in the database.

        `noun` is the word for the job in messages, such as "study". Raises NotFound if there is no such job, and
        Conflict if the job has not ended.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            found = connection.execute(
                sa.select(table.c.state).where(table.c.id == job_id).with_for_update()
            ).one_or_none()
            if found is None:
                raise NotFound(f"job {job_id!r}: no such job in {self.place}")
            if not JobState(found.state).is_finished:
                raise Conflict(
                    f"{noun} {job_id} is {found.state}; only a {noun} that has ended can be deleted: cancel it first"
                )
            for part in reversed(schema.metadata.sorted_tables):
                if "study" in part.c:
                    connection.execute(sa.delete(part).where(part.c.study == job_id))
            connection.execute(sa.delete(table).where(table.c.id == job_id))

    def record_submission(self, job_id: str, number: int) -> None:
        """Store that a driver (a process that works on the job) will be submitted to the Ray cluster now.

        `number` is the driver's number among all drivers of the job, from 1.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(
                    submissions=number,
                    submitted_at=clock(connection),
                    submitted_after=table.c.attempt,
                    moved_before=None,
                    moved_at=None,
                )
            )

    def team_usage(self) -> dict[str | None, TeamUsage]:
        """Read the GPU-hours that the jobs of each team have used; jobs without a team count under the key None."""
        with self._reads.connect() as connection:
            return read_usage(connection, now=clock_time(connection))

    def record_refusal(self, job_id: str, reason: str) -> None:
        """Store the reason why the Ray cluster refused the job's last driver, the process that works on the job."""
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            insert_event(connection, job_id, EventKind.JOB_REFUSED, {"reason": reason})

    def refusal(self, job_id: str) -> str | None:
        """Reason why the Ray cluster refused the job's last driver, the process that works on the job.

        Returns None if the cluster did not refuse it.
        """
        events, jobs = schema.events, schema.studies
        query = (
            sa.select(events.c.payload)
            .join(jobs, jobs.c.id == events.c.study)
            .where((jobs.c.id == job_id) & (events.c.kind == EventKind.JOB_REFUSED.value))
            .where(events.c.time >= jobs.c.submitted_at)
            .order_by(events.c.id.desc())
            .limit(1)
        )
        with self._reads.connect() as connection:
            payload = connection.execute(query).scalar()
            return None if payload is None else str(payload["reason"])

    def pause(self, job_id: str, *, steering: Steering) -> JobRecord:
        """Ask a job to pause, and return it.

        `steering` says who asks, and why; it is stored as an event. The job becomes PAUSED at once if no driver (a
        process that works on it) runs; otherwise it becomes PAUSED when its driver has ended. A job that has ended, or
        that was asked to pause before, is not changed. Raises NotFound if there is no such job.
        """
        because = steering.describe("paused")
        return self._steered(job_id, steering, because, lambda job: job.is_paused, is_paused=True)

    def stop_search(self, job_id: str, *, steering: Steering) -> JobRecord:
        """Ask a study to end its search early, and return it.

        `steering` says who asks, and why; it is stored as an event. A PAUSED study continues, so that its held-out data
        and benchmarks are scored. A study that has ended, or that was asked to stop before, is not changed. Raises
        NotFound if there is no such job.
        """
        because = steering.describe("stopped")

        def is_done(job: JobRecord) -> bool:
            return job.stop_reason is not None and not job.is_paused

        return self._steered(job_id, steering, because, is_done, is_paused=False, stop_reason=because)

    def _steered(
        self, job_id: str, steering: Steering, because: str, is_done: Callable[[JobRecord], bool], **changes: Any
    ) -> JobRecord:
        """Apply a user's request to a job, such as a request to pause it, and return the job.

        Nothing changes if the job has ended, or if `is_done(job)` is True, because the request was carried out before.
        `steering` says who asks, and why; it is stored as an event. `changes` has the new values of the job's columns.
        The value of `is_paused`, which must be given, can also change the job's state:

        - True: a job without a driver (a process that works on it) becomes PAUSED
        - False: a PAUSED job becomes STOPPED, so that the server starts a driver

        `because` is stored as the reason of the new state. Raises NotFound if there is no such job.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            row = connection.execute(sa.select(table).where(table.c.id == job_id)).mappings().one_or_none()
            if row is None:
                raise NotFound(f"job {job_id!r}: no such job in {self.place}")
            job = job_record(row)
            if job.state.is_finished or is_done(job):
                return job
            insert_event(connection, job_id, EventKind.STEERED, steering.payload)
            state = job.state
            if changes["is_paused"] and not job.has_driver(now=clock_time(connection)):
                state = JobState.PAUSED
            elif state is JobState.PAUSED and not changes["is_paused"]:
                state = JobState.STOPPED
            if state is not job.state:
                changes |= {"state": state.value, "reason": because}
                insert_event(connection, job_id, EventKind.STATE, {"state": state.value, "reason": because})
            changed = sa.update(table).where(table.c.id == job_id).values(changes).returning(*table.c)
            return job_record(connection.execute(changed).mappings().one())

    def edit_job(
        self,
        job: JobRecord,
        labels: Mapping[str, Any],
        *,
        document: Mapping[str, Any] | None,
        restarts: bool,
        steering: Steering,
    ) -> JobRecord | None:
        """Edit a job and return it. If the job was edited after it was read as `job`, return None and change nothing.

        `labels` has the new values of the columns `name`, `description`, `tags`, `notes` and `priority`; a column that
        is left out keeps its value. `document` is the submitted document with the edited options; None leaves the
        document unchanged. If `restarts` is True, another driver replaces the driver (process) that works on the job,
        and reads the new document. `steering` says who asks, and why; it is stored as an event.
        """
        table = schema.studies
        values: dict[str, Any] = {**labels, "version": job.version + 1}
        if document is not None:
            values["document"] = dict(document)
        if "name" in labels:
            values["first_name"] = job.first_name or job.name
        if restarts:
            values["edited_after"] = table.c.attempt
        with transaction(self._engine) as connection:
            lock_job(connection, job.id)
            is_same = (table.c.id == job.id) & (table.c.version == job.version)
            row = connection.execute(sa.update(table).where(is_same).values(values).returning(*table.c)).mappings()
            found = row.one_or_none()
            if found is None:
                return None
            insert_event(connection, job.id, EventKind.STEERED, steering.payload)
            return job_record(found)

    def set_invalid(self, study: JobRecord, number: int, *, invalid: str | None, steering: Steering) -> JobRecord:
        """Mark a trial as invalid, or as valid again, and return the changed study.

        `number` is the trial's number. `invalid` is the reason why the trial is invalid; None marks it as valid.
        `steering` says who asks, and is stored as an event.

        The trial's samples stay stored. If a driver (a process that works on the study) runs, another driver replaces
        it and selects the best trials anew. A COMPLETE study whose responses are still stored continues, so that trials
        that are now among the best are scored on held-out data. If the same value of `invalid` is stored already,
        nothing changes. Raises NotFound if there is no such trial.
        """
        table, jobs = schema.trials, schema.studies
        is_this = (table.c.study == study.id) & (table.c.number == number)
        with transaction(self._engine) as connection:
            lock_job(connection, study.id)
            before = connection.execute(sa.select(table.c.invalid).where(is_this)).one_or_none()
            if before is None:
                raise NotFound(f"trial {number}: study {study.name!r} has no such trial (yet)")
            if before.invalid == invalid:
                return self.job(study.id)
            connection.execute(sa.update(table).where(is_this).values(invalid=invalid))
            insert_event(connection, study.id, EventKind.STEERED, replace(steering, trial=number).payload)
            connection.execute(sa.update(jobs).where(jobs.c.id == study.id).values(edited_after=jobs.c.attempt))
            reason = f"trial {number} was marked as {'in' * (invalid is not None)}valid"
            if not _has_removed_responses(connection, study.id):
                _reopen(connection, study.id, reason)
        return self.job(study.id)

    def request_evaluation(self, study: JobRecord, trial: int, *, steering: Steering) -> tuple[JobRecord, bool]:
        """Store a user's request to evaluate the recipe (merge) of a trial on all samples.

        Returns the changed study, and whether the request is new.

        `trial` is the trial's number. `steering` says who asks, and why; it is stored as an event. If a driver
        (process) works on the study, another driver replaces it and adds a trial with the recipe. If the study is
        COMPLETE, a driver is started again. A second request for the same trial changes nothing. Raises Conflict if the
        study is COMPLETE and its stored completions were removed.
        """
        steering = replace(steering, trial=trial)
        return self._request(study, f"trial {trial} is evaluated at the full budget", steering, {"trial": trial})

    def enqueue_trial(
        self,
        study: JobRecord,
        label: str,
        *,
        recipe: Mapping[str, Any] | None = None,
        configuration: Mapping[str, Any] | None = None,
        steering: Steering,
    ) -> tuple[JobRecord, bool]:
        """Store a user's request to evaluate a given merge on all samples of the search.

        Returns the changed study, and whether the request is new.

        Exactly one of `recipe` (the JSON document of a recipe) and `configuration` (a value for each parameter of the
        search space) describes the merge; `label` becomes the trial's label. `steering` says who asks, and why; it is
        stored as an event. If a driver (process) works on the study, another driver replaces it and adds the trial. If
        the study is COMPLETE, a driver is started again. A request that the study has already changes nothing. Raises
        Conflict if another merge was enqueued under the label, or if the study is COMPLETE and its stored completions
        were removed.
        """
        values = {"label": label, "recipe": recipe, "configuration": configuration}
        reason = f"a trial was enqueued: {label}"
        return self._request(study, reason, replace(steering, changes={"label": [None, label]}), values)

    def _request(
        self, study: JobRecord, reason: str, steering: Steering, values: Mapping[str, Any]
    ) -> tuple[JobRecord, bool]:
        """Store a request to evaluate a merge, unless the study has the same request already.

        Returns the changed study, and whether the request is new.

        `values` are the columns of the request. If the study is COMPLETE, it continues, and `reason` is stored as the
        reason of its new state. `steering` says who asks, and why; it is stored as an event. Raises Conflict if another
        merge was enqueued under the same label, or if the study is COMPLETE and its stored completions were removed.
        """
        table, jobs = schema.evaluation_requests, schema.studies
        with transaction(self._engine) as connection:
            lock_job(connection, study.id)
            known = [dict(row) for row in connection.execute(_requests_of(study.id)).mappings()]
            if same := [row for row in known if row.items() >= values.items()]:
                if same[0]["added"] is None:
                    _reopen(connection, study.id, reason)
                return self.job(study.id), False
            if (label := values.get("label")) is not None and label in [row["label"] for row in known]:
                raise Conflict(f"study {study.name!r}: another merge is enqueued as {label!r}; give another label")
            this_job = jobs.c.id == study.id
            is_complete = this_job & (jobs.c.state == JobState.COMPLETE.value)
            if (
                _has_removed_responses(connection, study.id)
                and connection.execute(sa.select(jobs.c.id).where(is_complete)).scalar() is not None
            ):
                raise Conflict(f"study {study.name!r}: its responses were removed, so it cannot continue")
            _reopen(connection, study.id, reason)
            given = {name: value for name, value in values.items() if value is not None}
            connection.execute(sa.insert(table).values(study=study.id, number=len(known), **given))
            connection.execute(sa.update(jobs).where(this_job).values(edited_after=jobs.c.attempt))
            insert_event(connection, study.id, EventKind.STEERED, steering.payload)
        return self.job(study.id), True

    def evaluation_requests(self, study_id: str) -> tuple[EvaluationRequest, ...]:
        """Read users' requests to evaluate merges of a study on all samples of the search, the oldest request first."""
        with self._reads.connect() as connection:
            return tuple(EvaluationRequest(**row) for row in connection.execute(_requests_of(study_id)).mappings())

    def settle(self, job_id: str) -> None:
        """Set the state of a job whose driver has ended on request: PAUSED after a pause, STOPPED for a preemption.

        A driver is a process that works on a job. In a preemption, a running job gives its place up and waits again,
        because another job must run first or a quota is used up. The job is not changed if it has ended, is PAUSED, or
        was asked neither to pause nor to give its place up.
        """
        table, paused, stopped = schema.studies, JobState.PAUSED.value, JobState.STOPPED.value
        of_job = (table.c.id == job_id) & table.c.state.not_in([*FINISHED, paused])
        yields = ~table.c.is_paused & (table.c.yields_after == table.c.attempt)
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            for where, state, reason in (
                (table.c.is_paused, paused, "its driver has ended"),
                (yields, stopped, YIELDED),
            ):
                values = {"state": state, "attempt": table.c.attempt + 1}
                if state == stopped:
                    values["reason"] = reason
                if connection.execute(sa.update(table).where(of_job & where).values(values)).rowcount == 1:
                    insert_event(connection, job_id, EventKind.STATE, {"state": state, "reason": reason})

    def resume(self, job_id: str, *, reason: str, steering: Steering | None = None) -> JobRecord:
        """Let a job that is FAILED, STOPPED or PAUSED continue, and return it.

        A COMPLETE job also continues if it has void samples, which must be scored again because their engine later
        failed a check, and if its responses were not removed. The job becomes STOPPED with the given `reason`, so that
        the server starts a driver (a process that works on it). The job's failed drivers are no longer counted.

        For a job in any state, a request to pause that has not been carried out yet is withdrawn. `steering` says who
        asked, and why; it is stored as an event if the job is changed (None stores no event). Raises NotFound if there
        is no such job.
        """
        table = schema.studies
        held = holdings()
        has_void = void_holdings(held.c.study, held=held).where(held.c.study == job_id).exists()
        named = schema.documents
        has_removed = sa.select(named.c.study).where((named.c.study == job_id) & (named.c.name == RESPONSES)).exists()
        waits = (JobState.FAILED.value, JobState.STOPPED.value, JobState.PAUSED.value)
        is_resumable = table.c.state.in_(waits) | ((table.c.state == JobState.COMPLETE.value) & has_void & ~has_removed)
        state = JobState.STOPPED.value
        # The difference of these two numbers is the number of drivers that were submitted and never started.
        has_absent = (table.c.state == JobState.FAILED.value) & (table.c.submissions > table.c.attempt)
        attempt = sa.case((has_absent, table.c.submissions), else_=table.c.attempt)
        with transaction(self._engine) as connection:
            changed = connection.execute(
                sa.update(table)
                .where((table.c.id == job_id) & is_resumable)
                .values(state=state, reason=reason, attempt=attempt)
            )
            is_asked = (table.c.id == job_id) & table.c.is_paused
            pauses = connection.execute(sa.update(table).where(is_asked).values(is_paused=False)).rowcount == 1
            if steering is not None and (pauses or changed.rowcount == 1):
                insert_event(connection, job_id, EventKind.STEERED, steering.payload)
            if changed.rowcount == 1:
                insert_event(connection, job_id, EventKind.RESUMED, {})
                insert_event(connection, job_id, EventKind.STATE, {"state": state, "reason": reason})
        return self.job(job_id)

    def add_benchmarks(self, study: JobRecord, document: Mapping[str, Any], *, names: Sequence[str]) -> JobRecord:
        """Add benchmarks to the study file of a COMPLETE study, and let the study continue.

        `study` is the study as it was read before. `document` is the new study file, with the benchmarks. `names` are
        the names of the added benchmarks, for the event in the study's history. Raises Conflict if the study is not
        COMPLETE any more, or was continued or edited since it was read, because `document` may then lack the changes
        that were made in the meantime.
        """
        table, reason = schema.studies, "benchmarks were added"
        with transaction(self._engine) as connection:
            changed = connection.execute(
                sa.update(table)
                .where(
                    (table.c.id == study.id)
                    & (table.c.state == JobState.COMPLETE.value)
                    & (table.c.attempt == study.attempt)
                    & (table.c.version == study.version)
                )
                .values(document=dict(document), state=JobState.STOPPED.value, reason=reason, version=study.version + 1)
            )
            if changed.rowcount != 1:
                raise Conflict(
                    f"study {study.name!r} has not ended, or was continued or edited meanwhile; write benchmarks into "
                    "its study file before, or add them when it is COMPLETE"
                )
            insert_event(connection, study.id, EventKind.BENCHMARKS_ADDED, {"benchmarks": list(names)})
            insert_event(connection, study.id, EventKind.RESUMED, {})
            insert_event(connection, study.id, EventKind.STATE, {"state": JobState.STOPPED.value, "reason": reason})
        return self.job(study.id)

    def trial_numbers(self, study_id: str) -> frozenset[int]:
        """Numbers of all trials of a study."""
        table = schema.trials
        with self._reads.connect() as connection:
            query = sa.select(table.c.number).where(table.c.study == study_id)
            return frozenset(connection.execute(query).scalars())

    def consecutive_failures(self, job_id: str) -> int:
        """Number of a job's latest drivers in a row that ended, or failed to start, before they stored any result.

        A driver is a process that works on the job. Results are, for example, scored samples and finished trials; a
        user's request to resume the job counts as a result too. Drivers that ended because a model, an engine or Ray
        was not available are not counted here but by the method `consecutive_waits`.
        """
        setbacks = self._setbacks(job_id)
        failures = [kind for kind, then in pairwise([*setbacks, ""]) if EventKind.WAITING not in (kind, then)]
        job = self.job(job_id)
        return max(len(failures), job.submissions - job.attempt)

    def consecutive_waits(self, job_id: str) -> int:
        """Number of a job's drivers that ended because something was not available, since the job last made progress.

        A driver is a process that works on the job. Drivers end for this reason, for example, if a model, an engine or
        Ray is not available. Stored results, such as scored samples, and a user's request to resume the job count as
        progress. The number is 0 if the last driver ended for another reason.
        """
        setbacks = self._setbacks(job_id)
        return setbacks.count(EventKind.WAITING) if setbacks[-1:] == [EventKind.WAITING] else 0

    def _setbacks(self, job_id: str) -> list[str]:
        """List the kinds of a job's setbacks since its last result, oldest first.

        A setback is an event which tells that a driver (a process that works on the job) has ended or could not start.
        A result is a scored chunk of samples, a computation that a searcher asked for, or an event of one of the kinds
        RESULT_EVENTS.
        """
        events, evidence, steps = schema.events, schema.evidence, schema.search_steps
        of_job = events.c.study == job_id
        # One by one, since the index has the last event of each kind: a study has thousands of some kinds.
        results = [
            sa.select(sa.func.max(events.c.id)).where(of_job & (events.c.kind == kind)).scalar_subquery()
            for kind in RESULT_EVENTS
        ]
        chunk = sa.select(evidence.c.finished_at).where(evidence.c.study == job_id).order_by(evidence.c.id.desc())
        step = sa.select(steps.c.time).where(steps.c.study == job_id).order_by(steps.c.number.desc())
        with self._reads.connect() as connection:
            last_result = max(found or 0 for found in connection.execute(sa.select(*results)).one())
            stored_at = max(connection.execute(of.limit(1)).scalar() or 0.0 for of in (chunk, step))
            since = of_job & (events.c.id > last_result) & (events.c.time > stored_at)
            kinds = sa.select(events.c.kind).where(since & events.c.kind.in_(SETBACK_EVENTS)).order_by(events.c.id)
            return list(connection.execute(kinds).scalars())

    def trial_counts(self, study_id: str | None = None) -> dict[str, dict[str, int]]:
        """Number of trials in each state, as study id -> state -> number; zeros are left out.

        If `study_id` is None, the trials of all studies are counted.
        """
        table = schema.trials
        counts: dict[str, dict[str, int]] = defaultdict(dict)
        query = sa.select(table.c.study, table.c.state, sa.func.count()).group_by(table.c.study, table.c.state)
        if study_id is not None:
            query = query.where(table.c.study == study_id)
        with self._reads.connect() as connection:
            for study, state, count in connection.execute(query):
                counts[study][state] = count
        return dict(counts)

    # -- exports ---------------------------------------------------------------------------------------------------

    def add_export(self, record: ExportRecord) -> ExportRecord:
        """Store a new export (a merged model for download), and return the stored export.

        If an export with the same id is stored already, it is not changed.
        """
        with transaction(self._engine) as connection:
            row = {**asdict(record), "state": record.state.value}
            connection.execute(insert(connection, schema.exports).on_conflict_do_nothing(), row)
        return self.export(record.id)

    def set_export_state(self, export_id: str, state: ExportState, reason: str | None = None) -> None:
        table = schema.exports
        with transaction(self._engine) as connection:
            connection.execute(sa.update(table).where(table.c.id == export_id).values(state=state.value, reason=reason))

    def delete_export(self, export_id: str) -> None:
        """Delete the database row of an export (a merged model for download) if the row exists, but not the files."""
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(schema.exports).where(schema.exports.c.id == export_id))

    def export(self, export_id: str) -> ExportRecord:
        """Read the export (a merged model for download) with the id `export_id`. Raises NotFound for an unknown id."""
        found = self._exports(schema.exports.c.id == export_id)
        if not found:
            raise NotFound(f"export {export_id!r}: no such export")
        return found[0]

    def exports(self, study_id: str | None = None) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) of a study, oldest first.

        If `study_id` is None, the exports of all studies are read.
        """
        return self._exports(sa.true() if study_id is None else schema.exports.c.study == study_id)

    def exports_of_team(self, team: str) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) of the jobs of a team, oldest first."""
        jobs = schema.studies
        return self._exports(schema.exports.c.study.in_(sa.select(jobs.c.id).where(jobs.c.team == team)))

    def unfinished_exports(self) -> tuple[ExportRecord, ...]:
        """Read the exports (merged models for download) that wait to be written or are being written, oldest first."""
        return self._exports(schema.exports.c.state.in_([ExportState.WAITING.value, ExportState.RUNNING.value]))

    def _exports(self, where: sa.ColumnElement[bool]) -> tuple[ExportRecord, ...]:
        table = schema.exports
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(ExportRecord(**{**row, "state": ExportState(row["state"])}) for row in rows.mappings())

    # -- one study --------------------------------------------------------------------------------

    def trials(
        self,
        study_id: str,
        *,
        start: int = 0,
        stop: int | None = None,
        state: TrialState | None = None,
        limit: int | None = None,
    ) -> tuple[TrialRecord, ...]:
        """Read the trials of a study with numbers from `start` to `stop` (exclusive; None: no end).

        If `state` is not None, only trials in this state are returned. At most `limit` trials are returned, in the
        order of their numbers; None means all.
        """
        table = schema.trials
        query = sa.select(*TRIAL_COLUMNS).where((table.c.study == study_id) & (table.c.number >= start))
        if stop is not None:
            query = query.where(table.c.number < stop)
        if state is not None:
            query = query.where(table.c.state == state.value)
        with self._reads.connect() as connection:
            rows = connection.execute(query.order_by(table.c.number).limit(limit)).mappings().all()
            rungs = self._rungs(connection, study_id, [row["number"] for row in rows])
        return tuple(trial_record(row, rungs.get(row["number"], ())) for row in rows)

    def named_trials(self, study_id: str, numbers: Sequence[int]) -> tuple[TrialRecord, ...]:
        """Read the trials of a study with the given numbers, in the order of `numbers`; missing trials are left out."""
        table = schema.trials
        query = sa.select(*TRIAL_COLUMNS).where((table.c.study == study_id) & table.c.number.in_(numbers))
        with self._reads.connect() as connection:
            rows = {row["number"]: row for row in connection.execute(query).mappings()}
            rungs = self._rungs(connection, study_id, list(rows))
        found = (rows[number] for number in numbers if number in rows)
        return tuple(trial_record(row, rungs.get(row["number"], ())) for row in found)

    def trial_results(self, study_id: str, numbers: Set[int] | None = None) -> tuple[TrialResult, ...]:
        """Read the results of trials of a study, ordered by number, without their recipes (merges) and configurations.

        `numbers` has the numbers of the trials; None reads all. Recipes and configurations are most of a trial's data.
        """
        table = schema.trials
        query = sa.select(*RESULT_COLUMNS).where(table.c.study == study_id).order_by(table.c.number)
        if numbers is not None:
            query = query.where(one_of(table.c.number, numbers))
        with self._reads.connect() as connection:
            every = connection.execute(query).mappings()
            rows = [row for row in every if numbers is None or row["number"] in numbers]
            rungs = self._rungs(connection, study_id, [row["number"] for row in rows])
        return tuple(trial_result(row, rungs.get(row["number"], ())) for row in rows)

    def changed_trials(self, study_id: str, *, after: int) -> frozenset[int] | None:
        """Numbers of the trials of a study whose results may have changed since the event with the id `after`.

        These are the trials that later events name, and the trials for which samples of search data were stored since:
        a stored chunk of samples changes a trial's number of samples and its state without an event. Returns None if
        any trial may have changed: after events of the kinds RELOAD_EVENTS, and if the study has no event with an id up
        to `after` or none from `after` on, as after its database was restored from a backup.
        """
        table = schema.events
        kinds = (*TRIAL_EVENTS, *RELOAD_EVENTS)
        upto = sa.select(table.c.time).where((table.c.study == study_id) & (table.c.id <= after))
        with self._reads.connect() as connection:
            time_s: float | None = connection.execute(upto.order_by(table.c.id.desc()).limit(1)).scalar()
        events = self.events(study_id, after=after, kinds=kinds)
        if time_s is None or after > self.last_event_id(study_id) or any(e.kind in RELOAD_EVENTS for e in events):
            return None
        named = {number for event in events if (number := event.payload.get("trial")) is not None}
        return frozenset(named | self._scored_trials(study_id, since=time_s - CLOCK_STEP_S))

    def _scored_trials(self, study_id: str, *, since: float) -> set[int]:
        """Numbers of the trials of a study for which samples of search data were stored after the time `since`.

        `since` is in seconds since the epoch. Only the newest chunks are read, from the last one back to `since`.
        """
        table = schema.evidence
        newest = sa.select(table.c.id, table.c.trial, table.c.prompts, table.c.finished_at)
        newest = newest.where(table.c.study == study_id).order_by(table.c.id.desc()).limit(CHUNKS_AT_ONCE)
        found: set[int] = set()
        with self._reads.connect() as connection:
            query = newest
            while rows := connection.execute(query).all():
                for _, trial, prompts, finished_at in rows:
                    if finished_at < since:
                        return found
                    if any(key.startswith(f"{Split.SEARCH} ") for key in prompts):
                        found.add(trial)
                query = newest.where(table.c.id < rows[-1].id)
        return found

    def configurations(self, study_id: str, numbers: Set[int] | None = None) -> dict[int, dict[str, Any]]:
        """Read the configurations of the trials of a study with the given numbers (None: all), keyed by trial number.

        Trials without a configuration, such as baselines, are left out.
        """
        table = schema.trials
        query = sa.select(table.c.number, table.c.configuration).where(table.c.study == study_id)
        if numbers is not None:
            query = query.where(one_of(table.c.number, numbers))
        with self._reads.connect() as connection:
            return {
                number: found
                for number, found in connection.execute(query)
                if found is not None and (numbers is None or number in numbers)
            }

    def _rungs(
        self, connection: sa.Connection, study_id: str, trials: Sequence[int]
    ) -> dict[int, tuple[RungRecord, ...]]:
        """Read the results of the rungs that some trials of a study have finished, keyed by trial number.

        A rung is one of the increasing numbers of samples on which trials are compared. `trials` are the numbers of the
        trials. If there are many numbers, the result may also have other trials with numbers in the same range.
        """
        table = schema.rungs
        where = (table.c.study == study_id) & one_of(table.c.trial, trials)
        columns = (table.c.trial, table.c.rung, table.c.samples, table.c["values"], table.c.standard_errors)
        found: dict[int, list[RungRecord]] = defaultdict(list)
        for trial, *fields in connection.execute(sa.select(*columns).where(where).order_by(*table.primary_key)):
            found[trial].append(RungRecord(*fields))
        return {trial: tuple(rungs) for trial, rungs in found.items()}

    def trial(self, study_id: str, number: int) -> TrialRecord:
        """Read the study's trial with the given number. Raises NotFound if there is no such trial."""
        found = self.trials(study_id, start=number, stop=number + 1)
        if not found:
            raise NotFound(f"trial {number}: study {study_id} has no such trial")
        return found[0]

    def brackets(self, study_id: str) -> tuple[BracketRecord, ...]:
        table = schema.brackets
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.bracket))
            return tuple(BracketRecord(row.bracket, row.first_rung, row.size) for row in rows)

    def sample_values(
        self,
        study_id: str,
        split: Split,
        *,
        recipes: Collection[str] | None = None,
        objectives: Collection[str] | None = None,
    ) -> dict[str, dict[str, NDArray[np.float64]]]:
        """Read the metric values of a study's scored samples as arrays: recipe digest -> objective -> array.

        `split` is the search data, the holdout data or the benchmarks. `recipes` has the digests of the recipes
        (merges) to read, and `objectives` has the names of the objectives; None reads all. An array has the value of
        the sample at each position, or NaN if no value is stored. A position is a sample's index in the order in which
        the objective's samples are scored.
        """
        found: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with self._reads.connect() as connection:
            for chunk in read_chunks(connection, study_id, split, recipes=recipes, objectives=objectives):
                of_recipe, stop = found[chunk.recipe_digest], chunk.start + len(chunk.values)
                values = of_recipe[chunk.objective] = with_room(of_recipe.get(chunk.objective), stop)
                values[chunk.start : stop] = chunk.values
        return dict(found)

    def num_tokens(self, study_id: str, split: Split) -> dict[str, int]:
        """Number of tokens that a study's merges generated, keyed by the digest of the merge's recipe.

        `split` is the data for which tokens are counted: the search data, the holdout data or the benchmarks. Recipes
        with a scored sample whose tokens are not stored are left out.
        """
        with self._reads.connect() as connection:
            return num_tokens(connection, study_id, split)

    def samples(
        self,
        study_id: str,
        recipe_digest: str,
        split: Split,
        *,
        objective: str | None = None,
        positions: Set[int] | None = None,
        has_tokens: bool = True,
    ) -> tuple[SampleResult, ...]:
        """Read the scored samples of one recipe (merge) of a study, ordered by objective and position.

        `split` is the search data, the holdout data or the benchmarks. The position of a sample is its index in the
        order in which the objective's samples are scored. If `objective` is not None, only samples of this objective
        are read. If `positions` is not None, only samples at these positions are read. If `has_tokens` is False, stored
        completions are returned without their token ids.
        """
        with self._reads.connect() as connection:
            return read_samples(
                connection,
                study_id,
                recipe_digest,
                split,
                objective=objective,
                positions=positions,
                has_tokens=has_tokens,
            )

    def prompts(self, study_id: str, split: Split, objective: str, positions: Collection[int]) -> dict[int, SampleText]:
        """Read the prompts and references of samples by position; positions without stored texts are left out.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name. A
        position is a sample's index in the order in which the objective's samples are scored.
        """
        with self._reads.connect() as connection:
            return read_prompts(connection, study_id, split, objective, positions)

    def picture(self, study_id: str, split: Split, objective: str, position: int) -> bytes | None:
        """Read the small picture of a sample, a WebP file; None if no picture is stored.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name. A
        position is a sample's index in the order in which the objective's samples are scored.
        """
        with self._reads.connect() as connection:
            return read_picture(connection, study_id, split, objective, position)

    def picture_positions(self, study_id: str, split: Split, objective: str, positions: Collection[int]) -> set[int]:
        """Select the `positions` at which a sample has a stored picture.

        `split` is the search data, the holdout data or the benchmarks, and `objective` is the objective's name.
        """
        with self._reads.connect() as connection:
            return picture_positions(connection, study_id, split, objective, positions)

    def stored_prompts(self, study_id: str) -> frozenset[tuple[Split, str]]:
        """Find the pairs of a split and an objective for which a study has stored prompts.

        A split is the search data, the holdout data or the benchmarks.
        """
        with self._reads.connect() as connection:
            return stored_prompts(connection, study_id)

    def move_old_samples(self) -> int:
        """Move old samples from the table of earlier program versions to the present tables, and return their number.

        A call moves the samples of one recipe (merge); the result is 0 if no old sample is left. The old table has a
        row for each sample, which takes ten times the space. The study stays readable meanwhile, and its driver (the
        process that works on it) may write.
        """
        old = schema.samples
        with self._reads.connect() as connection:
            found = connection.execute(sa.select(old.c.study, old.c.recipe_digest).limit(1)).one_or_none()
        if found is None:
            return 0
        with transaction(self._engine) as connection:
            lock_job(connection, found.study)
            return max(1, move_old_samples(connection, found.study, found.recipe_digest))

    def text_sizes(self) -> dict[str, tuple[int, int]]:
        """Number of samples with stored responses, and the number of bytes of the responses, by study id.

        Earlier versions stored responses in another table. Studies that still have samples in that table are left out.
        """
        with self._reads.connect() as connection:
            return text_sizes(connection)

    def remove_texts(self, job_id: str, *, num_samples: int, num_bytes: int) -> None:
        """Remove the model responses and tokens of a study's samples to save space; their metric values are kept.

        `num_samples` and `num_bytes` say how many samples and bytes are removed; they are stored in a record of the
        removal before anything is removed. From then on the study cannot be resumed. Each merge's responses are removed
        in a transaction of their own, so that other processes can write in between. An interrupted removal is completed
        by the next call. Raises NotFound if there is no such study, and Conflict if the study is neither COMPLETE nor
        CANCELLED.
        """
        table, documents = schema.studies, schema.documents
        removed = RemovedResponses(self.now(), num_samples, num_bytes)
        with transaction(self._engine) as connection:
            state = connection.execute(
                sa.select(table.c.state).where(table.c.id == job_id).with_for_update()
            ).scalar_one_or_none()
            if state is None:
                raise NotFound(f"job {job_id!r}: no such job in {self.place}")
            if JobState(state) not in (JobState.COMPLETE, JobState.CANCELLED):
                raise Conflict(f"job {job_id} is {state}; its responses are kept until it is COMPLETE or CANCELLED")
            row = {"study": job_id, "name": RESPONSES, "document": asdict(removed)}
            added = insert(connection, documents).values(row).on_conflict_do_nothing()
            if connection.execute(added.returning(documents.c.study)).scalar() is not None:  # else it was interrupted
                insert_event(connection, job_id, EventKind.RESPONSES_REMOVED, asdict(removed))
        while True:
            with transaction(self._engine) as connection:
                if not remove_texts(connection, job_id):
                    return

    def has_void(self, job_id: str) -> bool:
        """Whether a study has void samples: samples to score again because their engine later failed a check."""
        held = holdings()
        query = void_holdings(held.c.study, held=held).where(held.c.study == job_id).limit(1)
        with self._reads.connect() as connection:
            return connection.execute(query).first() is not None

    def state_since(self, job_id: str) -> float:
        """Time at which the job got its current state, in seconds since the epoch."""
        events = schema.events
        is_state = (events.c.study == job_id) & (events.c.kind == EventKind.STATE.value)
        query = sa.select(events.c.time).where(is_state).order_by(events.c.id.desc()).limit(1)
        with self._reads.connect() as connection:
            time = connection.execute(query).scalar()
        return self.job(job_id).created_at if time is None else float(time)

    def evidence(
        self, study_id: str, *, after: int = 0, limit: int | None = None, recipe_digest: str | None = None
    ) -> tuple[EvidenceRecord, ...]:
        """Read the evidence of a study's samples: which weights the engine held when it scored them.

        There is one record for each chunk (up to 512 samples scored together). At most `limit` records with an id above
        `after` are returned; the limit None returns all. If `recipe_digest` is not None, only records of this recipe
        (merge) are returned.
        """
        table = schema.evidence
        where = (table.c.study == study_id) & (table.c.id > after)
        if recipe_digest is not None:
            where &= table.c.recipe_digest == recipe_digest
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.id).limit(limit))
            return tuple(EvidenceRecord(**row) for row in rows.mappings())

    def chunk_work(self, study_id: str, *, since: float | None = None) -> tuple[ChunkWork, ...]:
        """Read how long replicas worked on a study's chunks of samples, one record a chunk, in the order of storing.

        A replica is a process with one inference engine. A chunk is a group of up to 512 samples that a replica scores
        together. If `since` is not None, only chunks that were stored after this time (seconds since the epoch) are
        read.
        """
        table = schema.evidence
        where = table.c.study == study_id
        if since is not None:
            where &= table.c.finished_at > since
        columns = (table.c.replica, table.c.trial, table.c.num_samples, table.c.timings_s, table.c.finished_at)
        with self._reads.connect() as connection:
            return tuple(
                ChunkWork(*row) for row in connection.execute(sa.select(*columns).where(where).order_by(table.c.id))
            )

    def steps(self, study_id: str, *, start: int = 0) -> tuple[Step, ...]:
        """Read the steps of a study's searcher with numbers from `start`, ordered by number.

        A step is a computation that the searcher asked for between proposals, such as a gradient.
        """
        table = schema.search_steps
        where = (table.c.study == study_id) & (table.c.number >= start)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.number))
            return tuple(read_step(row.number, row.proposal, row.document) for row in rows)

    def prompt_templates(self, study_id: str) -> dict[str, tuple[str, str]]:
        """Read the adversarial prompt templates that were scored in attacks on a study's benchmarks.

        Keys are the names under which the samples that were scored with a template are stored. Values are pairs of the
        benchmark's name and the template.
        """
        table = schema.prompt_templates
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.name))
            return {row.name: (row.benchmark, row.template) for row in rows}

    def judgments(
        self, study_id: str, *, benchmark: str | None = None, recipe_digest: str | None = None
    ) -> tuple[JudgmentRecord, ...]:
        """Read the verdicts of judges (models that compare answers) on completions by a study's merges.

        `benchmark` selects the judgments of one benchmark, and `recipe_digest` selects the judgments of one recipe;
        None selects all. The judgments are ordered by benchmark, recipe and position, and for one sample by the order
        of both answers in the judge's prompt.
        """
        table = schema.judgments
        query = sa.select(*(column for column in table.c if column.name != "study")).where(table.c.study == study_id)
        if benchmark is not None:
            query = query.where(table.c.benchmark == benchmark)
        if recipe_digest is not None:
            query = query.where(table.c.recipe_digest == recipe_digest)
        with self._reads.connect() as connection:
            rows = connection.execute(query.order_by(*table.primary_key))
            return tuple(JudgmentRecord(**row) for row in rows.mappings())

    def num_charged(self, study_id: str) -> int:
        """Number of samples that a study's gradients and similar computations take from the limit `max_samples`.

        Such computations, the steps of a study's searcher, are made between the searcher's proposals.
        """
        table = schema.search_steps
        with self._reads.connect() as connection:
            charged = sa.select(sa.func.coalesce(sa.func.sum(table.c.charged), 0)).where(table.c.study == study_id)
            return int(connection.execute(charged).scalar_one())

    def engine_faults(self, *, after: int = 0) -> tuple[EngineFaultRecord, ...]:
        """Read the records of the inference engines that have failed a check, with ids above `after`, ordered by id."""
        table = schema.engine_faults
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.id > after).order_by(table.c.id))
            return tuple(EngineFaultRecord(**row) for row in rows.mappings())

    def num_engine_faults(self) -> int:
        """Number of inference engines, of all studies, that have failed a check of their weights or outputs."""
        with self._reads.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(schema.engine_faults)).scalar_one())

    def void_samples(self, study_id: str) -> tuple[VoidSample, ...]:
        """Read a study's void samples, which must be scored again because their engine later failed a check."""
        with self._reads.connect() as connection:
            return read_void_samples(connection, study_id)

    def num_unchecked(self, study_id: str, passed: Mapping[str, int]) -> int:
        """Number of a study's samples that are not yet confirmed by a canary, a check of an engine with fixed prompts.

        A sample is confirmed if its engine has passed a canary after it scored the sample. Therefore each sample is
        stored with the number of canaries that its engine had passed before. `passed` contains the number of canaries
        that each engine has passed until now, keyed by replica (the process with the engine). If the database has a
        larger number for a replica, the larger number counts.
        """
        held, table = holdings(), schema.evidence
        scored = (
            sa.select(table.c.replica, table.c.canaries, sa.func.sum(held.c.num_samples))
            .join(held, held.c.evidence == table.c.id)
            .where(held.c.study == study_id)
            .group_by(table.c.replica, table.c.canaries)
        )
        latest = sa.select(table.c.replica, sa.func.max(table.c.canaries)).group_by(table.c.replica)
        with self._reads.connect() as connection:
            known = {replica: max(count or 0, passed.get(replica, 0)) for replica, count in connection.execute(latest)}
            rows = connection.execute(scored).all()
        return sum(count for replica, canaries, count in rows if canaries is None or canaries >= known[replica])

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
        where = (table.c.id > after) & table.c.kind.in_([kind.value for kind in kinds]) & _readable(reader)
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

    def result_version(self, study_id: str) -> tuple[int, int]:
        """Read a pair of numbers that changes whenever the study's results may have changed.

        The numbers are the number of the study's last attempt (the work of one driver) and the id of its last event.
        Raises NotFound if there is no such study.
        """
        jobs, events = schema.studies, schema.events
        last = sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0)).where(events.c.study == study_id)
        query = sa.select(jobs.c.attempt, last.scalar_subquery()).where(jobs.c.id == study_id)
        with self._reads.connect() as connection:
            found = connection.execute(query).one_or_none()
        if found is None:
            raise NotFound(f"job {study_id!r}: no such job in {self.place}")
        return found[0], found[1]

    def document(self, job_id: str, name: str) -> Any | None:
        """Read the JSON document of a job by `name`, such as "contamination"; None if there is no such document."""
        table = schema.documents
        with self._reads.connect() as connection:
            return connection.execute(
                sa.select(table.c.document).where((table.c.study == job_id) & (table.c.name == name))
            ).scalar()


def _chosen_events(job_id: str, after: int, kinds: Collection[str] | None) -> sa.ColumnElement[bool]:
    """Condition on events: they belong to the job, have ids above `after`, and are of `kinds` (None: of any kind)."""
    table = schema.events
    chosen = (table.c.study == job_id) & (table.c.id > after)
    return chosen if kinds is None else chosen & table.c.kind.in_([str(kind) for kind in kinds])


def _has_removed_responses(connection: sa.Connection, job_id: str) -> bool:
    """Whether a study's responses were removed to save space; such a study cannot continue."""
    named = schema.documents
    query = sa.select(named.c.study).where((named.c.study == job_id) & (named.c.name == RESPONSES))
    return connection.execute(query).first() is not None


def _requests_of(study_id: str) -> sa.Select[Any]:
    """Query that selects users' requests to evaluate merges of a study, ordered by number, the oldest first."""
    table = schema.evaluation_requests.c
    columns = (table.number, table.trial, table.added, table.label, table.recipe, table.configuration)
    return sa.select(*columns).where(table.study == study_id).order_by(table.number)


def _reopen(connection: sa.Connection, job_id: str, reason: str) -> None:
    """Let the job continue if it is COMPLETE; a job in another state is not changed.

    The job becomes STOPPED, so that the server starts a driver (a process that works on it). `reason` is stored as the
    reason of the new state.
    """
    jobs, state = schema.studies, JobState.STOPPED.value
    is_complete = (jobs.c.id == job_id) & (jobs.c.state == JobState.COMPLETE.value)
    if connection.execute(sa.update(jobs).where(is_complete).values(state=state, reason=reason)).rowcount == 1:
        insert_event(connection, job_id, EventKind.RESUMED, {})
        insert_event(connection, job_id, EventKind.STATE, {"state": state, "reason": reason})


def _readable(reader: Account | None) -> sa.ColumnElement[bool]:
    """SQL condition for the jobs that the account `reader` may read; if `reader` is None, for all jobs."""
    table = schema.studies.c
    if reader is None or reader.is_admin:
        return sa.true()
    managed = [team for team, role in reader.roles.items() if role is Role.ADMIN]
    return sa.or_(
        table.owner == reader.user,
        table.sharing == Sharing.ALL.value,
        (table.sharing == Sharing.TEAM.value) & table.team.in_(list(reader.roles)),
        table.team.in_(managed),
    )


def _keep_artifact(connection: sa.Connection, job_id: str, name: str, digest: str) -> None:
    """Give the job `job_id` an artifact, usually a trained model, that another job has stored.

    `digest` identifies the artifact's files, which cannot be deleted until the transaction ends. `name` is the name
    that the artifact gets in the job `job_id`. Raises Conflict if no job has the artifact.
    """
    table = schema.artifacts
    query = sa.select(table.c.num_bytes).where(table.c.digest == digest).limit(1).with_for_update(read=True)
    num_bytes = connection.execute(query).scalar()
    if num_bytes is None:
        raise Conflict(
            f"artifact {name!r}: the job that has it was deleted meanwhile, and with it a source of this job"
        )
    row = {"study": job_id, "name": name, "digest": digest, "num_bytes": num_bytes, "facts": {}}
    connection.execute(sa.insert(table).values(**row, created_at=time.time()))


# Any numbers, as long as every process uses the same (PostgreSQL).
DRAINS_LOCK, ADMISSIONS_LOCK = 0x6D65726A, 0x6D65726B


def _lock_drains(connection: sa.Connection, *, is_shared: bool = False) -> None:
    """Lock, until the transaction ends, the information whether the servers are drained for maintenance.

    A transaction that changes the information waits until no other transaction holds the lock. If `is_shared` is True,
    the transaction only reads the information, and several such transactions may hold the lock at once. On SQLite no
    lock is needed, because transactions that write wait for each other anyway.
    """
    if connection.dialect.name == "postgresql":
        name = "pg_advisory_xact_lock_shared" if is_shared else "pg_advisory_xact_lock"
        connection.execute(sa.text(f"SELECT {name}(:key)"), {"key": DRAINS_LOCK})


def _is_drained(connection: sa.Connection) -> bool:
    return connection.execute(sa.select(schema.drains.c.since).limit(1)).first() is not None
