"""Store of jobs, trials, rungs, samples and events: SQLite or PostgreSQL through SQLAlchemy.

Every process may read. Only a job's driver writes its trials, rungs, samples and events, through a `JobWriter` that
checks its attempt number in every transaction, so a driver that was replaced can no longer write.
"""

from __future__ import annotations

import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from service.store.attempt_writer import JobWriter, insert, insert_event, lock_job
from service.store.availability import availability_of, is_away, is_waiting, repeated, waiting
from service.store.connection import clock, connect, reading, transaction
from service.store.database_url import parse_url, shown
from service.store.documents import RESPONSES, RemovedResponses
from service.store.records import (
    BracketRecord,
    EngineFaultRecord,
    EvaluationRequest,
    EventRecord,
    EvidenceRecord,
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
from service.types import (
    Account,
    EventKind,
    ExportRecord,
    ExportState,
    JobRecord,
    JobState,
    Role,
    RungRecord,
    Sharing,
    Steering,
    TrialRecord,
    TrialResult,
    TrialState,
)
from workers.types import SampleResult, Split

__all__ = ["Store"]

# Seconds until a store that waits tries again to open a database that does not answer.
RETRY_S = 1.0

# In PostgreSQL's refusals of a connection, which have no error code.
REFUSALS = ("does not exist", "authentication failed", "no password supplied", "no pg_hba.conf entry")

# Events after which drivers without a result are counted from zero: stored results, and a request to resume.
RESULT_EVENTS = (
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

# The largest number of trials that a query names one by one; beyond it, it reads all between the first and the last.
MAX_NAMED = 1001

# Events that drivers without a result store.
SETBACK_EVENTS = (EventKind.ATTEMPT, EventKind.JOB_REFUSED, EventKind.WAITING)


class _Connections(Protocol):
    """Interface that opens connections for reads: an SQLAlchemy engine, or `_OneConnection`."""

    def connect(self) -> AbstractContextManager[sa.Connection]: ...


@dataclass(frozen=True)
class _OneConnection:
    """Provider of one connection for all reads of a store, so that all reads see the same state of the database.

    The transaction of this connection stays open.
    """

    connection: sa.Connection

    def connect(self) -> AbstractContextManager[sa.Connection]:
        return nullcontext(self.connection)


@repeated
class Store:
    """Store of all jobs in one database; thread-safe, and must be closed after use.

    Creates or migrates the database at `url`, the URL of an SQLite file or of a PostgreSQL database. `waits` says what
    happens while the database does not answer. If it is True, calls of the store and of its writers wait, and are then
    repeated. Otherwise they raise the error.

    Raises:
        Conflict: `url` is not a database, is a database of a newer version, or may not be used by this user.
        DatabaseUnavailable: The database does not answer, and `waits` is False.
    """

    def __init__(self, url: str | sa.URL, *, waits: bool = False) -> None:
        self._engine = waiting(connect(parse_url(url)), waits=waits)
        self._reads: _Connections = reading(self._engine)
        while not self._is_open():
            time.sleep(RETRY_S)

    def _is_open(self) -> bool:
        """Open the database, with its tables created or migrated, and return whether it answered.

        Returns False if the database does not answer and the store waits for it. Raises DatabaseUnavailable if the
        store does not wait, and Conflict if the database cannot be used.
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
        """Whether only processes of one machine can open the database, as an SQLite file requires."""
        return self._engine.dialect.name == "sqlite"

    @property
    def url(self) -> str:
        """URL with which another process opens the database; it may hold a password."""
        return self._engine.url.render_as_string(hide_password=False)

    def reading(self) -> AbstractContextManager[sa.Connection]:
        """Context with a connection whose transaction only reads, for other code that reads the database.

        A store that `snapshot` has yielded gives the connection of the snapshot.
        """
        return self._reads.connect()

    def waiting(self) -> Self:
        """Copy of this store whose calls, and its writers' calls, wait while the database does not answer."""
        return self._with(waiting(self._engine))

    def _with(self, engine: sa.Engine) -> Self:
        other = copy(self)
        other._engine, other._reads = engine, reading(engine)
        return other

    def problem(self) -> str | None:
        """Message for users that the database does not answer, and since when; None if it answered last time."""
        return availability_of(self._engine).problem()

    def now(self) -> float:
        """Current time in seconds since the epoch, by the database's clock, which all stored times use."""
        with self._reads.connect() as connection:
            return _now(connection)

    @property
    def place(self) -> str:
        """URL of the database without a password, for messages."""
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
    ) -> JobRecord:
        """Store a new job and return it, or return the job created with the same `idempotency_key`.

        - `document`: the submitted document
        - `accepted`: the findings of the document's checks, as JSON
        - `request_digest`: a hash of the request; a later request with the same key is compared with it
        - `keeps`: the digests of other jobs' artifacts, by the name that they get in the new job. They become artifacts
          of the new job too, so that their files stay when the other jobs are deleted.
        - `owner`: the name of the user who creates the job, if the server has accounts
        - `team`, `sharing`: who else may read the job

        Raises Conflict, and stores nothing, if no job has one of the artifacts in `keeps`.
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
        """Read the job with the given id. Raises NotFound if there is none."""
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
        """Read all jobs, oldest first, or only those of one kind, state or name.

        With `reader`, only the jobs that this user may read are returned.
        """
        table = schema.studies.c
        wanted = ((table.kind, kind), (table.state, None if state is None else state.value), (table.name, name))
        return self._jobs(
            sa.and_(_readable(reader), *(column == value for column, value in wanted if value is not None))
        )

    def unfinished_jobs(self, *, heard_since: float = math.inf) -> tuple[JobRecord, ...]:
        """Read the jobs that have not ended, or that had a sign of life since `heard_since`, oldest first.

        Signs of life are the creation of the job, the submission of a driver, and a driver's heartbeats. `heard_since`
        is in seconds since the epoch; by default, no job that has ended is returned.
        """
        table = schema.studies
        times = (table.c.heartbeat_at, table.c.submitted_at, table.c.created_at)
        is_recent = sa.or_(*(time > heard_since for time in times)) if heard_since < math.inf else sa.false()
        return self._jobs(table.c.state.not_in(FINISHED) | is_recent)

    def job_ids(self, state: JobState) -> tuple[str, ...]:
        """Ids of all jobs in one state, oldest job first; no other data are read."""
        table = schema.studies
        query = sa.select(table.c.id).where(table.c.state == state.value).order_by(table.c.created_at, table.c.id)
        with self._reads.connect() as connection:
            return tuple(connection.execute(query).scalars())

    def job_counts(self) -> dict[tuple[str, JobState], int]:
        """Number of jobs by kind and state; zeros are left out."""
        table = schema.studies
        query = sa.select(table.c.kind, table.c.state, sa.func.count()).group_by(table.c.kind, table.c.state)
        with self._reads.connect() as connection:
            return {(kind, JobState(state)): count for kind, state, count in connection.execute(query)}

    def job_of_key(self, idempotency_key: str) -> JobRecord | None:
        """Find the job created with the given idempotency key; None if there is none."""
        return next(iter(self._jobs(schema.studies.c.idempotency_key == idempotency_key)), None)

    def _jobs(self, where: sa.ColumnElement[bool]) -> tuple[JobRecord, ...]:
        table = schema.studies
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(job_record(row) for row in rows.mappings())

    def is_drained(self) -> bool:
        """Whether the servers are draining for maintenance: they accept no jobs, and no driver starts."""
        with self._reads.connect() as connection:
            return _is_drained(connection)

    def set_drained(self, *, drained: bool) -> None:
        """Start or end draining, during which the servers of this database accept no jobs and start no drivers.

        Once the drain has begun, no further driver begins, and `JobRecord.has_driver` is True for every job that a
        driver works on.
        """
        with transaction(self._engine) as connection:
            _lock_drains(connection)
            if not drained:
                connection.execute(sa.delete(schema.drains))
            elif not _is_drained(connection):
                connection.execute(sa.insert(schema.drains).values(since=clock(connection)))

    def open_attempt(self, job_id: str, *, because: str | None = None, as_driver: bool = False) -> JobWriter:
        """Start a new attempt at a job, and return the writer that alone may write to the job from now on.

        `because` says why another attempt was needed; None states no reason. If `as_driver` is True, the attempt counts
        as a driver's heartbeat, and is refused while the servers are drained or the job is paused. Raises NotFound if
        there is no such job. Raises StaleAttempt if the job was cancelled, or if a driver may not begin now.
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
        """Delete a job that has ended, with all its stored data.

        `noun` is the word for the job in messages. Raises NotFound if there is no such job, and Conflict if the job has
        not ended.
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
        """Store that a driver of the job is about to be submitted to the Ray cluster.

        `number` counts the job's drivers from 1.
        """
        table = schema.studies
        with transaction(self._engine) as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(submissions=number, submitted_at=clock(connection), submitted_after=table.c.attempt)
            )

    def record_refusal(self, job_id: str, reason: str) -> None:
        """Store the reason why the Ray cluster refused the last submitted driver of a job."""
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            insert_event(connection, job_id, EventKind.JOB_REFUSED, {"reason": reason})

    def refusal(self, job_id: str) -> str | None:
        """Reason why the Ray cluster refused the last submitted driver of a job; None if it was accepted."""
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

        The job becomes PAUSED at once if no driver works on it; otherwise it becomes PAUSED when its driver has ended.
        A job that has ended, or that was asked to pause before, is not changed. An event says who asked, and why.
        Raises NotFound if there is no such job.
        """
        because = steering.describe("paused")
        return self._steered(job_id, steering, because, lambda job: job.is_paused, is_paused=True)

    def stop_search(self, job_id: str, *, steering: Steering) -> JobRecord:
        """Ask a study to end its search early, and return it.

        A PAUSED study continues, so that it reaches its end. A study that has ended, or that was asked to stop before,
        is not changed. An event says who asked, and why. Raises NotFound if there is no such job.
        """
        because = steering.describe("stopped")

        def is_done(job: JobRecord) -> bool:
            return job.stop_reason is not None and not job.is_paused

        return self._steered(job_id, steering, because, is_done, is_paused=False, stop_reason=because)

    def _steered(
        self, job_id: str, steering: Steering, because: str, is_done: Callable[[JobRecord], bool], **changes: Any
    ) -> JobRecord:
        """Apply a user's request to a job, and return the job.

        Nothing changes if the job has ended, or if `is_done(job)` is True. `steering` says who asked, and why; it is
        stored as an event. `changes` has the new values of columns, among them `is_paused`. A job without a driver
        becomes PAUSED if `is_paused` is True. A PAUSED job becomes STOPPED if `is_paused` is False. `because` is stored
        as the reason of the new state. Raises NotFound if there is no such job.
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
            if changes["is_paused"] and not job.has_driver(now=_now(connection)):
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
        """Edit a job, and return the edited job; return None if the job has changed since it was read as `job`.

        `labels` has the new values of those columns that change, among `name`, `description`, `tags`, `notes` and
        `priority`. `document` is the submitted document with the edited options; None leaves the document unchanged. If
        `restarts` is True, a driver that works on the job is replaced by one that reads the new document. `steering`
        says who asked, and why; it is stored as an event. A job has changed if another edit has changed its version.
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
        """Mark a trial as invalid, with the reason, or as valid again (None), and return the study as it is then.

        Its samples stay. If a driver works on the study, it is replaced by one that selects trials anew. A COMPLETE
        study continues, so that finalists that were not chosen before are scored on held-out data, unless its
        responses were removed. A mark that is there already changes nothing. Raises NotFound if there is no such trial.
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

    def request_evaluation(self, study: JobRecord, trial: int, *, steering: Steering) -> JobRecord:
        """Store a request to evaluate the recipe of a trial at the full budget, and return the study as it is then.

        If a driver works on the study, it is replaced by one that adds the trial. A COMPLETE study continues. A request
        for a trial that has one already changes nothing. Raises Conflict if the responses of a COMPLETE study were
        removed.
        """
        table, jobs = schema.evaluation_requests, schema.studies
        with transaction(self._engine) as connection:
            lock_job(connection, study.id)
            of_study = table.c.study == study.id
            known = connection.execute(sa.select(table.c.trial).where(of_study)).scalars().all()
            if trial not in known:
                this_job = jobs.c.id == study.id
                is_complete = this_job & (jobs.c.state == JobState.COMPLETE.value)
                if (
                    _has_removed_responses(connection, study.id)
                    and connection.execute(sa.select(jobs.c.id).where(is_complete)).scalar() is not None
                ):
                    raise Conflict(f"study {study.name!r}: its responses were removed, so it cannot continue")
                _reopen(connection, study.id, f"trial {trial} is evaluated at the full budget")
                connection.execute(sa.insert(table).values(study=study.id, number=len(known), trial=trial))
                connection.execute(sa.update(jobs).where(this_job).values(edited_after=jobs.c.attempt))
                insert_event(connection, study.id, EventKind.STEERED, replace(steering, trial=trial).payload)
        return self.job(study.id)

    def evaluation_requests(self, study_id: str) -> tuple[EvaluationRequest, ...]:
        """Read the requests to evaluate trials of a study at the full budget, in the order in which they were sent."""
        table = schema.evaluation_requests
        query = sa.select(table.c.number, table.c.trial, table.c.added).where(table.c.study == study_id)
        with self._reads.connect() as connection:
            rows = connection.execute(query.order_by(table.c.number)).mappings()
            return tuple(EvaluationRequest(**row) for row in rows)

    def settle_pause(self, job_id: str) -> None:
        """Set a job to PAUSED that was asked to pause, and whose driver ended without storing its state.

        A job that has ended, or that was not asked to pause, is not changed.
        """
        table, paused = schema.studies, JobState.PAUSED.value
        with transaction(self._engine) as connection:
            lock_job(connection, job_id)
            where = (table.c.id == job_id) & table.c.is_paused & table.c.state.not_in([*FINISHED, paused])
            changed = sa.update(table).where(where).values(state=paused, attempt=table.c.attempt + 1)
            if connection.execute(changed).rowcount == 1:
                insert_event(connection, job_id, EventKind.STATE, {"state": paused, "reason": "its driver has ended"})

    def resume(self, job_id: str, *, reason: str, steering: Steering | None = None) -> JobRecord:
        """Let a job continue, and return it.

        These jobs can continue: FAILED, STOPPED and PAUSED jobs, and COMPLETE jobs with void samples (samples whose
        engine failed a check after it scored them) whose responses were not removed. Such a job becomes STOPPED with
        the given `reason`, so that the server starts a driver, and the number of its failed drivers becomes zero. A
        request to pause that has not been carried out yet is withdrawn. Other jobs are not changed. If the job is
        changed and `steering` is given, an event says who asked, and why. Raises NotFound if there is no such job.
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
        """Replace the study file of a COMPLETE study by one with more benchmarks, and reopen the study.

        `study` is the study as it was read before. `document` is the new study file. `names` are the names of the added
        benchmarks, for the event. Raises Conflict if the study is not COMPLETE any more, or was continued since it was
        read, because `document` may then lack benchmarks that were added in the meantime.
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
        """Numbers of the trials of a study."""
        table = schema.trials
        with self._reads.connect() as connection:
            query = sa.select(table.c.number).where(table.c.study == study_id)
            return frozenset(connection.execute(query).scalars())

    def consecutive_failures(self, job_id: str) -> int:
        """Number of a job's latest drivers in a row that ended, or failed to start, without a result.

        A result is a finished rung or trial, a stored chunk or step, or another event in RESULT_EVENTS. A request to
        resume the job counts as a result. Drivers that ended because something was missing are counted by the method
        `consecutive_waits` instead.
        """
        setbacks = self._setbacks(job_id)
        failures = [kind for kind, then in pairwise([*setbacks, ""]) if EventKind.WAITING not in (kind, then)]
        job = self.job(job_id)
        return max(len(failures), job.submissions - job.attempt)

    def consecutive_waits(self, job_id: str) -> int:
        """Number of drivers that ended because something was missing, since the job's last result.

        The method `consecutive_failures` defines results. The number is 0 if the last driver ended for another reason.
        """
        setbacks = self._setbacks(job_id)
        return setbacks.count(EventKind.WAITING) if setbacks[-1:] == [EventKind.WAITING] else 0

    def _setbacks(self, job_id: str) -> list[str]:
        """The kinds of the events that report an ended driver or a failed start, since the job's last result.

        The kinds are in the order of the events, oldest first. SETBACK_EVENTS lists these kinds. A result is an event
        of a kind in RESULT_EVENTS, a stored chunk or a stored step.
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
        """Number of trials in each state, as study id -> state -> number.

        With `study_id` None, the trials of all studies are counted.
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
        """Store an export and return it, or return the stored export with the same id unchanged."""
        with transaction(self._engine) as connection:
            row = {**asdict(record), "state": record.state.value}
            connection.execute(insert(connection, schema.exports).on_conflict_do_nothing(), row)
        return self.export(record.id)

    def set_export_state(self, export_id: str, state: ExportState, reason: str | None = None) -> None:
        table = schema.exports
        with transaction(self._engine) as connection:
            connection.execute(sa.update(table).where(table.c.id == export_id).values(state=state.value, reason=reason))

    def delete_export(self, export_id: str) -> None:
        """Delete the record of an export; does nothing if there is none."""
        with transaction(self._engine) as connection:
            connection.execute(sa.delete(schema.exports).where(schema.exports.c.id == export_id))

    def export(self, export_id: str) -> ExportRecord:
        """Read the export with the given id. Raises NotFound if there is none."""
        found = self._exports(schema.exports.c.id == export_id)
        if not found:
            raise NotFound(f"export {export_id!r}: no such export")
        return found[0]

    def exports(self, study_id: str | None = None) -> tuple[ExportRecord, ...]:
        """Read the exports of the study `study_id`, or of all studies if it is None, oldest first."""
        return self._exports(sa.true() if study_id is None else schema.exports.c.study == study_id)

    def unfinished_exports(self) -> tuple[ExportRecord, ...]:
        """Read the exports that are WAITING or RUNNING, oldest first."""
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
        """Read the trials of a study with numbers from `start` up to but not including `stop` (None: to the last).

        If `state` is not None, trials in other states are left out. Only the first `limit` trials are returned, or all
        if `limit` is None.
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

    def trial_results(self, study_id: str, numbers: Collection[int] | None = None) -> tuple[TrialResult, ...]:
        """Read the results of the trials with the given `numbers` (None: all) of a study, ordered by number.

        Neither recipes nor configurations are read, because they are most of a trial's data.
        """
        table = schema.trials
        query = sa.select(*RESULT_COLUMNS).where(table.c.study == study_id).order_by(table.c.number)
        if numbers is not None:
            query = query.where(table.c.number.in_(list(numbers)))
        with self._reads.connect() as connection:
            rows = connection.execute(query).mappings().all()
            rungs = self._rungs(connection, study_id, [row["number"] for row in rows])
        return tuple(trial_result(row, rungs.get(row["number"], ())) for row in rows)

    def _rungs(
        self, connection: sa.Connection, study_id: str, trials: Sequence[int]
    ) -> dict[int, tuple[RungRecord, ...]]:
        """Read the finished rungs of the trials with the numbers in `trials`, by trial number.

        If `trials` has many numbers, rungs of other trials between the first and the last may be included.
        """
        table = schema.rungs
        where = table.c.study == study_id
        if len(trials) <= MAX_NAMED:
            where &= table.c.trial.in_(trials)
        else:
            where &= table.c.trial.between(min(trials), max(trials))
        columns = (table.c.trial, table.c.rung, table.c.samples, table.c["values"], table.c.standard_errors)
        found: dict[int, list[RungRecord]] = defaultdict(list)
        for trial, *fields in connection.execute(sa.select(*columns).where(where).order_by(*table.primary_key)):
            found[trial].append(RungRecord(*fields))
        return {trial: tuple(rungs) for trial, rungs in found.items()}

    def trial(self, study_id: str, number: int) -> TrialRecord:
        """Read the study's trial with the given number. Raises NotFound if there is none."""
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
        """Read the values of a study's scored samples, as arrays by recipe digest and objective.

        `recipes` has the digests of the recipes to read, and `objectives` the names; None reads all. An array has the
        value of the sample at each position, or NaN if no value is stored. A position is a sample's index in the order
        in which the objective's samples are scored.
        """
        found: dict[str, dict[str, NDArray[np.float64]]] = defaultdict(dict)
        with self._reads.connect() as connection:
            for chunk in read_chunks(connection, study_id, split, recipes=recipes, objectives=objectives):
                of_recipe, stop = found[chunk.recipe_digest], chunk.start + len(chunk.values)
                values = of_recipe[chunk.objective] = with_room(of_recipe.get(chunk.objective), stop)
                values[chunk.start : stop] = chunk.values
        return dict(found)

    def num_tokens(self, study_id: str, split: Split) -> dict[str, int]:
        """Number of tokens that a study's merges generated on one split, by recipe digest.

        Recipes with a scored sample whose tokens are not stored are left out.
        """
        with self._reads.connect() as connection:
            return num_tokens(connection, study_id, split)

    def samples(self, study_id: str, recipe_digest: str, split: Split) -> tuple[SampleResult, ...]:
        """Read the scored samples of one recipe on `split`, ordered by objective and position."""
        with self._reads.connect() as connection:
            return read_samples(connection, study_id, recipe_digest, split)

    def move_old_samples(self) -> int:
        """Convert one recipe's samples of an earlier version to the form of the current tables.

        Returns the number of moved samples; 0 if none is left. Earlier versions stored a row for each sample, which
        takes ten times the space. The study stays readable meanwhile, and its driver may write.
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
        """Number of samples with stored responses, and the bytes of the responses, by study.

        The keys are ids of studies. A study is left out as long as some of its samples are in the table of earlier
        versions.
        """
        with self._reads.connect() as connection:
            return text_sizes(connection)

    def remove_texts(self, job_id: str, *, num_samples: int, num_bytes: int) -> None:
        """Remove the model responses and tokens of a study's samples; values and flags are kept.

        `num_samples` and `num_bytes` are the numbers of samples and bytes that are removed, for the record of the
        removal. This record is stored first; from then on the study cannot be resumed. Responses are removed a recipe
        at a time, so that drivers of other jobs may write in between. An interrupted removal is completed by the next
        call. Raises NotFound if there is no such study, and Conflict if the study is neither COMPLETE nor CANCELLED.
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
        """Whether a study has void samples, whose engine failed a check after it scored them."""
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

    def evidence(self, study_id: str, *, after: int = 0, limit: int | None = None) -> tuple[EvidenceRecord, ...]:
        """Read the evidence of a study's scored chunks, which says which weights the engine held.

        There is one record for each chunk of samples. Only records with an id above `after` are returned, and at most
        `limit` (None: all).
        """
        table = schema.evidence
        where = (table.c.study == study_id) & (table.c.id > after)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.id).limit(limit))
            return tuple(EvidenceRecord(**row) for row in rows.mappings())

    def steps(self, study_id: str, *, start: int = 0) -> tuple[Step, ...]:
        """Read the steps (such as gradients) of a study's searcher, ordered by number, from the number `start`."""
        table = schema.search_steps
        where = (table.c.study == study_id) & (table.c.number >= start)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.number))
            return tuple(read_step(row.number, row.proposal, row.document) for row in rows)

    def prompt_templates(self, study_id: str) -> dict[str, tuple[str, str]]:
        """Read the prompt templates that attacks on a study's benchmarks scored: sample name -> (benchmark, text)."""
        table = schema.prompt_templates
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.name))
            return {row.name: (row.benchmark, row.template) for row in rows}

    def judgments(
        self, study_id: str, *, benchmark: str | None = None, recipe_digest: str | None = None
    ) -> tuple[JudgmentRecord, ...]:
        """Read the judgments of a study's completions, ordered by benchmark, recipe, position and order of the answers.

        If a benchmark's name or a recipe's digest is given, only its judgments are read.
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
        """Number of samples of a study's limit that its steps (computations such as gradients) have used."""
        table = schema.search_steps
        with self._reads.connect() as connection:
            charged = sa.select(sa.func.coalesce(sa.func.sum(table.c.charged), 0)).where(table.c.study == study_id)
            return int(connection.execute(charged).scalar_one())

    def engine_faults(self, *, after: int = 0) -> tuple[EngineFaultRecord, ...]:
        """Read the records of engines' first failed checks, with ids above `after`, ordered by id."""
        table = schema.engine_faults
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.id > after).order_by(table.c.id))
            return tuple(EngineFaultRecord(**row) for row in rows.mappings())

    def num_engine_faults(self) -> int:
        """Number of engines that have failed a check, over all studies."""
        with self._reads.connect() as connection:
            return int(connection.execute(sa.select(sa.func.count()).select_from(schema.engine_faults)).scalar_one())

    def void_samples(self, study_id: str) -> tuple[VoidSample, ...]:
        """Read a study's void samples, which must be scored again.

        The engine that scored such a sample failed its next check.
        """
        with self._reads.connect() as connection:
            return read_void_samples(connection, study_id)

    def num_unchecked(self, study_id: str, passed: Mapping[str, int]) -> int:
        """The number of a study's samples that no later canary (a check of their engine with fixed prompts) confirms.

        A sample is confirmed once its engine has passed a canary after scoring it. The store has the number of canaries
        that each engine had passed at its last stored chunk, over all studies. `passed` has newer numbers, by replica.
        The larger of both numbers counts.
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
        self, job_id: str, *, after: int = 0, limit: int | None = None, kinds: Collection[EventKind] | None = None
    ) -> tuple[EventRecord, ...]:
        """Read the events of a job with ids above `after`, in the order of ids, at most `limit` (None: all).

        `kinds` has the kinds of events to read; None reads all kinds.
        """
        table = schema.events
        where = (table.c.study == job_id) & (table.c.id > after)
        if kinds is not None:
            where &= table.c.kind.in_([kind.value for kind in kinds])
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.id).limit(limit))
            return tuple(EventRecord(row.id, row.time, row.kind, row.payload) for row in rows)

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

    def last_event_id(self, job_id: str) -> int:
        """Id of the latest event of a job; 0 if the job has no event yet."""
        table = schema.events
        with self._reads.connect() as connection:
            found: int | None = connection.execute(
                sa.select(sa.func.max(table.c.id)).where(table.c.study == job_id)
            ).scalar()
            return found or 0

    def document(self, job_id: str, name: str) -> Any | None:
        """Read the document stored for a job under `name`, such as the report of a verification.

        Returns None if there is none yet.
        """
        table = schema.documents
        with self._reads.connect() as connection:
            return connection.execute(
                sa.select(table.c.document).where((table.c.study == job_id) & (table.c.name == name))
            ).scalar()


def _has_removed_responses(connection: sa.Connection, job_id: str) -> bool:
    """Whether the responses of a study were removed to save space, so that the study cannot continue."""
    named = schema.documents
    query = sa.select(named.c.study).where((named.c.study == job_id) & (named.c.name == RESPONSES))
    return connection.execute(query).first() is not None


def _reopen(connection: sa.Connection, job_id: str, reason: str) -> None:
    """Let a job continue if it is COMPLETE, for this reason; jobs in other states are not changed."""
    jobs, state = schema.studies, JobState.STOPPED.value
    is_complete = (jobs.c.id == job_id) & (jobs.c.state == JobState.COMPLETE.value)
    if connection.execute(sa.update(jobs).where(is_complete).values(state=state, reason=reason)).rowcount == 1:
        insert_event(connection, job_id, EventKind.RESUMED, {})
        insert_event(connection, job_id, EventKind.STATE, {"state": state, "reason": reason})


def _now(connection: sa.Connection) -> float:
    time_s = clock(connection)
    return time_s if isinstance(time_s, float) else float(connection.execute(sa.select(time_s)).scalar_one())


def _readable(reader: Account | None) -> sa.ColumnElement[bool]:
    """SQL condition for the jobs that the user `reader` may read (`Account.may_read`); for None, all jobs."""
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
    """Register an artifact, possibly of another job, as an artifact of the job `job_id` too.

    The artifact has the given digest. Its name in this job is `name`. The other job cannot be deleted until the
    transaction ends. Raises Conflict if no job has the artifact.
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


# Any number, as long as every process uses the same (PostgreSQL).
DRAINS_LOCK = 0x6D65726A


def _lock_drains(connection: sa.Connection, *, is_shared: bool = False) -> None:
    """Lock, until the transaction ends, the information whether the servers are draining.

    A transaction that changes the information waits until no other transaction holds the lock. If `is_shared` is True,
    the transaction only reads the information, and several such transactions may hold the lock at once. On SQLite no
    lock is needed, because transactions that write wait for each other anyway.
    """
    if connection.dialect.name == "postgresql":
        name = "pg_advisory_xact_lock_shared" if is_shared else "pg_advisory_xact_lock"
        connection.execute(sa.text(f"SELECT {name}(:key)"), {"key": DRAINS_LOCK})


def _is_drained(connection: sa.Connection) -> bool:
    return connection.execute(sa.select(schema.drains.c.since).limit(1)).first() is not None
