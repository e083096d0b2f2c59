"""Jobs in the database: creates, lists and deletes jobs, and records the drivers that work on them.

A driver is a process that works on a job. Before the server starts one, it reads here which jobs have not ended,
whether the servers are drained, and how often drivers have failed.
"""

from __future__ import annotations

import math
import time
import uuid
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from service.disk import DRAINED
from service.errors import Conflict, NotFound, StaleAttempt
from service.store import schema
from service.store.attempt_writer import JobWriter, insert_event, lock_job
from service.store.availability import repeated
from service.store.column_types import LosslessText
from service.store.connection import clock, clock_time, insert, transaction
from service.store.database import Database
from service.store.records import job_record
from service.store.usage import read_usage
from service.types import Account, EventKind, JobRecord, JobState, Role, Sharing, TeamUsage

__all__ = ["FINISHED", "JOB_SORTS", "JobStore", "readable"]

# States of jobs that have ended.
FINISHED = tuple(state.value for state in JobState if state.is_finished)

# Fields by which lists of jobs can be sorted.
JOB_SORTS: Mapping[str, sa.ColumnElement[Any]] = {
    "created": schema.studies.c.created_at,
    "name": schema.studies.c.name,
    "state": schema.studies.c.state,
    "owner": sa.func.coalesce(schema.studies.c.owner, ""),
    "priority": schema.studies.c.priority,
}

# Events after which drivers without a result are counted from zero: stored results, answers of a served study, users'
# requests, for which drivers end, and drivers that were asked to give their place up.
RESULT_EVENTS = (
    EventKind.PREEMPTED,
    EventKind.STEERED,
    EventKind.ANSWERED,
    EventKind.RUNG,
    EventKind.TRIAL_STATE,
    EventKind.HOLDOUT_SCORED,
    EventKind.VERIFICATION,
    EventKind.RESUMED,
    EventKind.TRAINING,
    EventKind.ANALYSIS,
)

# Events that drivers without a result store.
SETBACK_EVENTS = (EventKind.ATTEMPT, EventKind.JOB_REFUSED, EventKind.WAITING)

# Any number, as long as every process uses the same (PostgreSQL).
DRAINS_LOCK = 0x6D65726A


@repeated
class JobStore(Database):
    """Store of jobs: their submitted documents, states and owners, and the drivers that were submitted for them.

    A driver is a process that works on a job. It writes its results with a `JobWriter`, which `open_attempt` makes.
    """

    # -- jobs ----------------------------------------------------------------------------------------------------------

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
            sa.and_(readable(reader), *(column == value for column, value in wanted if value is not None))
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
        where = [readable(reader), table.c.kind == kind]
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
            return frozenset(connection.execute(sa.select(schema.studies.c.id).where(readable(reader))).scalars())

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

    def state_since(self, job_id: str) -> float:
        """Time at which the job got its current state, in seconds since the epoch."""
        events = schema.events
        is_state = (events.c.study == job_id) & (events.c.kind == EventKind.STATE.value)
        query = sa.select(events.c.time).where(is_state).order_by(events.c.id.desc()).limit(1)
        with self._reads.connect() as connection:
            time = connection.execute(query).scalar()
        return self.job(job_id).created_at if time is None else float(time)

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

    # -- drivers -------------------------------------------------------------------------------------------------------

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
        is paused. The number of a driver's attempt is at least that of its submission, so that drivers which were
        submitted before and never began are no longer counted. Raises NotFound if there is no such job. Raises
        StaleAttempt if the job was cancelled, or if a driver may not begin now.
        """
        table = schema.studies
        values: dict[str, Any] = {"attempt": table.c.attempt + 1}
        with transaction(self._engine) as connection:
            if as_driver:
                _lock_drains(connection, is_shared=True)
                if _is_drained(connection):
                    raise StaleAttempt(f"job {job_id}: {DRAINED}")
                has_absent = table.c.submissions > table.c.attempt + 1
                values["attempt"] = sa.case((has_absent, table.c.submissions), else_=table.c.attempt + 1)
                values["heartbeat_at"] = clock(connection)
            found = connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(values)
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

    def consecutive_failures(self, job_id: str) -> int:
        """Number of a job's latest drivers in a row that ended, or failed to start, before they stored any result.

        A driver is a process that works on the job. Results are, for example, scored samples and finished trials; a
        user's request that changes the job counts as a result too. Drivers that ended because a model, an engine or Ray
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

    def team_usage(self) -> dict[str | None, TeamUsage]:
        """Read the GPU-hours that the jobs of each team have used; jobs without a team count under the key None."""
        with self._reads.connect() as connection:
            return read_usage(connection, now=clock_time(connection))


def readable(reader: Account | None) -> sa.ColumnElement[bool]:
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
