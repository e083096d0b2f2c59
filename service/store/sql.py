"""The store: jobs, trials, rungs, samples and events in SQL (SQLite or PostgreSQL, through SQLAlchemy).

Every process may read. Only a job's driver writes its trials, rungs, samples and events, through a `JobWriter` that
checks its attempt number inside every transaction: a driver that was replaced can no longer write.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import sqlalchemy as sa

from service.errors import Conflict, NotFound, StaleAttempt
from service.store import schema
from service.store.attempt_writer import JobWriter, insert, insert_event
from service.store.connection import connect
from service.store.records import (
    BracketRecord,
    EngineFaultRecord,
    EventRecord,
    EvidenceRecord,
    VoidSample,
    job_record,
    num_tokens,
    sample_result,
    trial_record,
)
from service.store.steps import Step, read_step
from service.store.upgrade import upgrade
from service.store.void import void_samples
from service.types import (
    EventKind,
    ExportRecord,
    ExportState,
    JobRecord,
    JobState,
    RungRecord,
    TrialRecord,
)
from workers.types import SampleResult, Split

__all__ = ["Store"]

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

# Events that drivers without a result store.
SETBACK_EVENTS = (EventKind.ATTEMPT, EventKind.JOB_REFUSED, EventKind.WAITING)


class Store:
    """All jobs of one database; thread-safe, to be closed after use.

    Creates or migrates the database. Raises Conflict if it is not a database, or one of a newer version.
    """

    def __init__(self, url: str) -> None:
        self._engine = connect(url)
        self._reads = self._engine.execution_options(read_only=True)
        try:
            upgrade(self._engine)
        except sa.exc.DatabaseError as error:
            raise Conflict(f"database {self._engine.url.render_as_string()}: cannot be used: {error.orig}") from error

    def close(self) -> None:
        self._engine.dispose()

    @property
    def engine(self) -> sa.Engine:
        """SQLAlchemy's engine, for other stores in the same database.

        Its execution option `read_only` makes reads faster.
        """
        return self._engine

    @property
    def url(self) -> str:
        """URL with which another process opens the database."""
        return self._engine.url.render_as_string(hide_password=False)

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
    ) -> JobRecord:
        """Store a new job, or return the one that was created with the same `idempotency_key`."""
        job_id = uuid.uuid4().hex
        row = {
            "id": job_id,
            "name": name,
            "state": JobState.CREATED.value,
            "kind": kind,
            "document": dict(document),
            "facts": dict(accepted),
            "created_at": time.time(),
            "idempotency_key": idempotency_key,
            "request_digest": request_digest,
        }
        with self._engine.begin() as connection:
            added = connection.execute(insert(connection, schema.studies).on_conflict_do_nothing(), row)
            if added.rowcount == 1:
                insert_event(connection, job_id, EventKind.CREATED, {"name": name})
        if idempotency_key is None:
            return self.job(job_id)
        record = self.job_of_key(idempotency_key)
        assert record is not None
        return record

    def job(self, job_id: str) -> JobRecord:
        """The job with this id. Raises NotFound."""
        found = self._jobs(schema.studies.c.id == job_id)
        if not found:
            raise NotFound(f"job {job_id!r}: no such job in {self._engine.url.render_as_string()}")
        return found[0]

    def jobs(self, kind: str | None = None) -> tuple[JobRecord, ...]:
        """Every job, or those of one kind, oldest first."""
        return self._jobs(sa.true() if kind is None else schema.studies.c.kind == kind)

    def job_of_key(self, idempotency_key: str) -> JobRecord | None:
        """The job that was created with this idempotency key; None if there is none."""
        return next(iter(self._jobs(schema.studies.c.idempotency_key == idempotency_key)), None)

    def _jobs(self, where: sa.ColumnElement[bool]) -> tuple[JobRecord, ...]:
        table = schema.studies
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(job_record(row) for row in rows.mappings())

    def open_attempt(self, job_id: str, *, because: str | None = None) -> JobWriter:
        """Start a new attempt at a job and return its writer, which alone may write to the job from now on.

        `because` says why another attempt was needed. Raises NotFound, and StaleAttempt for a cancelled job.
        """
        table = schema.studies
        with self._engine.begin() as connection:
            found = connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(attempt=table.c.attempt + 1)
                .returning(table.c.attempt, table.c.state)
            ).one_or_none()
            if found is None:
                raise NotFound(f"job {job_id!r}: no such job in {self._engine.url.render_as_string()}")
            if found.state == JobState.CANCELLED.value:
                raise StaleAttempt(f"job {job_id}: was cancelled")
            insert_event(connection, job_id, EventKind.ATTEMPT, {"attempt": found.attempt, "because": because})
        return JobWriter(self._engine, job_id, found.attempt)

    def delete_job(self, job_id: str, *, noun: str = "job") -> None:
        """Delete a job that has ended, with everything that is stored of it.

        Messages call the job `noun`. Raises NotFound, and Conflict if the job has not ended.
        """
        table = schema.studies
        with self._engine.begin() as connection:
            found = connection.execute(
                sa.select(table.c.state).where(table.c.id == job_id).with_for_update()
            ).one_or_none()
            if found is None:
                raise NotFound(f"job {job_id!r}: no such job in {self._engine.url.render_as_string()}")
            if not JobState(found.state).is_finished:
                raise Conflict(
                    f"{noun} {job_id} is {found.state}; only a {noun} that has ended can be deleted: cancel it first"
                )
            for part in reversed(schema.metadata.sorted_tables):
                if "study" in part.c:
                    connection.execute(sa.delete(part).where(part.c.study == job_id))
            connection.execute(sa.delete(table).where(table.c.id == job_id))

    def record_submission(self, job_id: str, number: int) -> None:
        """Store that driver `number` (1 for the first) is about to be submitted."""
        table = schema.studies
        with self._engine.begin() as connection:
            connection.execute(
                sa.update(table)
                .where(table.c.id == job_id)
                .values(submissions=number, submitted_at=time.time(), submitted_after=table.c.attempt)
            )

    def record_refusal(self, job_id: str, reason: str) -> None:
        """Store that the cluster refused the Ray Job of the last submission."""
        with self._engine.begin() as connection:
            insert_event(connection, job_id, EventKind.JOB_REFUSED, {"reason": reason})

    def resume(self, job_id: str, *, reason: str) -> JobRecord:
        """Allow a job to continue that is FAILED or STOPPED, or COMPLETE with void samples.

        The job becomes STOPPED, and its failed drivers are counted from zero again; other jobs stay as they are.
        Returns the job. Raises NotFound.
        """
        table = schema.studies
        has_void = void_samples(schema.samples.c.study).where(schema.samples.c.study == job_id).exists()
        is_resumable = table.c.state.in_((JobState.FAILED.value, JobState.STOPPED.value)) | (
            (table.c.state == JobState.COMPLETE.value) & has_void
        )
        state = JobState.STOPPED.value
        # The difference of these two numbers is the number of drivers that were submitted and never started.
        has_absent = (table.c.state == JobState.FAILED.value) & (table.c.submissions > table.c.attempt)
        attempt = sa.case((has_absent, table.c.submissions), else_=table.c.attempt)
        with self._engine.begin() as connection:
            changed = connection.execute(
                sa.update(table)
                .where((table.c.id == job_id) & is_resumable)
                .values(state=state, reason=reason, attempt=attempt)
            )
            if changed.rowcount == 1:
                insert_event(connection, job_id, EventKind.RESUMED, {})
                insert_event(connection, job_id, EventKind.STATE, {"state": state, "reason": reason})
        return self.job(job_id)

    def consecutive_failures(self, study_id: str) -> int:
        """Number of the latest drivers, in a row, that ended or failed to start without storing a result.

        A stored chunk or step is a result. Drivers that only waited are not counted (`consecutive_waits`).
        """
        setbacks = self._setbacks(study_id)
        failures = [kind for kind, then in pairwise([*setbacks, ""]) if EventKind.WAITING not in (kind, then)]
        study = self.job(study_id)
        return max(len(failures), study.submissions - study.attempt)

    def consecutive_waits(self, study_id: str) -> int:
        """Number of drivers since the last result that stopped to wait for something that was missing.

        The number is 0 if the last driver did not stop to wait.
        """
        setbacks = self._setbacks(study_id)
        return setbacks.count(EventKind.WAITING) if setbacks[-1:] == [EventKind.WAITING] else 0

    def _setbacks(self, study_id: str) -> list[str]:
        """Kinds of the SETBACK_EVENTS since the last result, in order."""
        events, evidence, steps = schema.events, schema.evidence, schema.search_steps
        of_study = events.c.study == study_id
        last_result = (
            sa.select(sa.func.coalesce(sa.func.max(events.c.id), 0))
            .where(of_study & events.c.kind.in_(RESULT_EVENTS))
            .scalar_subquery()
        )
        chunk = sa.select(evidence.c.finished_at).where(evidence.c.study == study_id).order_by(evidence.c.id.desc())
        step = sa.select(steps.c.time).where(steps.c.study == study_id).order_by(steps.c.number.desc())
        with self._reads.connect() as connection:
            stored_at = max(connection.execute(of.limit(1)).scalar() or 0.0 for of in (chunk, step))
            since = of_study & (events.c.id > last_result) & (events.c.time > stored_at)
            kinds = sa.select(events.c.kind).where(since & events.c.kind.in_(SETBACK_EVENTS)).order_by(events.c.id)
            return list(connection.execute(kinds).scalars())

    def trial_counts(self, study_id: str | None = None) -> dict[str, dict[str, int]]:
        """Numbers of trials by state, of one study or of all: study id -> state -> number."""
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
        """Store an export and return it; an existing one with the same id stays as it is and is returned."""
        with self._engine.begin() as connection:
            row = {**asdict(record), "state": record.state.value}
            connection.execute(insert(connection, schema.exports).on_conflict_do_nothing(), row)
        return self.export(record.id)

    def set_export_state(self, export_id: str, state: ExportState, reason: str | None = None) -> None:
        table = schema.exports
        with self._engine.begin() as connection:
            connection.execute(sa.update(table).where(table.c.id == export_id).values(state=state.value, reason=reason))

    def delete_export(self, export_id: str) -> None:
        """Delete the record of an export; nothing happens if there is none."""
        with self._engine.begin() as connection:
            connection.execute(sa.delete(schema.exports).where(schema.exports.c.id == export_id))

    def export(self, export_id: str) -> ExportRecord:
        """The export with this id. Raises NotFound."""
        for record in self.exports():
            if record.id == export_id:
                return record
        raise NotFound(f"export {export_id!r}: no such export")

    def exports(self, study_id: str | None = None) -> tuple[ExportRecord, ...]:
        """Exports of a study, or of all studies, oldest first."""
        table = schema.exports
        where = sa.true() if study_id is None else table.c.study == study_id
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.created_at, table.c.id))
            return tuple(ExportRecord(**{**row, "state": ExportState(row["state"])}) for row in rows.mappings())

    # -- one study --------------------------------------------------------------------------------

    def trials(self, study_id: str, *, start: int = 0, stop: int | None = None) -> tuple[TrialRecord, ...]:
        """Trials of a study by number, from `start` up to but not including `stop`."""
        rungs: dict[int, list[RungRecord]] = defaultdict(list)

        def between(table: sa.Table, number: sa.Column[int]) -> sa.Select[Any]:
            query = sa.select(table).where((table.c.study == study_id) & (number >= start)).order_by(number)
            return query if stop is None else query.where(number < stop)

        with self._reads.connect() as connection:
            query = between(schema.rungs, schema.rungs.c.trial).order_by(schema.rungs.c.rung)
            for row in connection.execute(query).mappings():
                rungs[row["trial"]].append(
                    RungRecord(row["rung"], row["samples"], row["values"], row["standard_errors"])
                )
            rows = connection.execute(between(schema.trials, schema.trials.c.number)).mappings()
            return tuple(trial_record(row, tuple(rungs[row["number"]])) for row in rows)

    def trial(self, study_id: str, number: int) -> TrialRecord:
        """The study's trial with this number. Raises NotFound."""
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
        self, study_id: str, split: Split, *, recipes: Collection[str] | None = None
    ) -> dict[str, dict[str, dict[int, float]]]:
        """Values of all scored samples, or of those of `recipes`: recipe digest -> objective -> position -> value."""
        table = schema.samples
        found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        query = sa.select(table.c.recipe_digest, table.c.objective, table.c.position, table.c.value)
        with self._reads.connect() as connection:
            where = (table.c.study == study_id) & (table.c.split == split)
            if recipes is not None:
                where &= table.c.recipe_digest.in_(list(recipes))
            for digest, objective, position, value in connection.execute(query.where(where)):
                found[digest][objective][position] = value
        return {digest: dict(by_objective) for digest, by_objective in found.items()}

    def num_tokens(self, study_id: str, split: Split) -> dict[str, int]:
        """Number of tokens in all completions by recipe digest, for recipes whose scored samples all have tokens."""
        table = schema.samples
        where = (table.c.study == study_id) & (table.c.split == split)
        query = sa.select(table.c.recipe_digest, sa.func.sum(num_tokens(table.c.tokens))).where(where)
        complete = query.group_by(table.c.recipe_digest).having(sa.func.count() == sa.func.count(table.c.tokens))
        with self._reads.connect() as connection:
            return {row[0]: int(row[1]) for row in connection.execute(complete)}

    def samples(self, study_id: str, recipe_digest: str, split: Split) -> tuple[SampleResult, ...]:
        """Scored samples of one recipe, ordered by objective and position."""
        table = schema.samples
        where = (table.c.study == study_id) & (table.c.recipe_digest == recipe_digest) & (table.c.split == split)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.objective, table.c.position))
            return tuple(map(sample_result, rows))

    def evidence(self, study_id: str) -> tuple[EvidenceRecord, ...]:
        """Evidence of what a study's engines held, one record for each scored chunk, in order."""
        table = schema.evidence
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.id))
            return tuple(EvidenceRecord(**row) for row in rows.mappings())

    def steps(self, study_id: str) -> tuple[Step, ...]:
        """Steps of a study's searcher, in order."""
        table = schema.search_steps
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.number))
            return tuple(read_step(row.number, row.proposal, row.document) for row in rows)

    def num_charged(self, study_id: str) -> int:
        """Number of samples that the steps of a study's searcher are charged as."""
        table = schema.search_steps
        with self._reads.connect() as connection:
            charged = sa.select(sa.func.coalesce(sa.func.sum(table.c.charged), 0)).where(table.c.study == study_id)
            return int(connection.execute(charged).scalar_one())

    def engine_faults(self, *, after: int = 0) -> tuple[EngineFaultRecord, ...]:
        """Engine faults (failed checks) of all studies with an id greater than `after`, in order."""
        table = schema.engine_faults
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.id > after).order_by(table.c.id))
            return tuple(EngineFaultRecord(**row) for row in rows.mappings())

    def void_samples(self, study_id: str) -> tuple[VoidSample, ...]:
        """Void samples of a study, scored after the last canary that the engine passed and before it failed a check."""
        samples = schema.samples
        query = void_samples(samples, schema.evidence.c.replica)
        query = query.where(samples.c.study == study_id).order_by(*samples.primary_key)
        with self._reads.connect() as connection:
            return tuple(
                VoidSample(row.recipe_digest, Split(row.split), row.objective, row.position, row.value, row.replica)
                for row in connection.execute(query)
            )

    def num_unchecked(self, study_id: str, passed: Mapping[str, int]) -> int:
        """Number of a study's samples that are not followed by a passed canary of their engine yet.

        `passed` are numbers of passed canaries by replica, besides those that the evidence of all studies has.
        """
        samples, table = schema.samples, schema.evidence
        scored = (
            sa.select(table.c.replica, table.c.canaries, sa.func.count())
            .join(samples, samples.c.evidence == table.c.id)
            .where(samples.c.study == study_id)
            .group_by(table.c.replica, table.c.canaries)
        )
        latest = sa.select(table.c.replica, sa.func.max(table.c.canaries)).group_by(table.c.replica)
        with self._reads.connect() as connection:
            known = {replica: max(count or 0, passed.get(replica, 0)) for replica, count in connection.execute(latest)}
            rows = connection.execute(scored).all()
        return sum(count for replica, canaries, count in rows if canaries is None or canaries >= known[replica])

    def events(
        self, study_id: str, *, after: int = 0, limit: int | None = None, kinds: Collection[EventKind] | None = None
    ) -> tuple[EventRecord, ...]:
        """Events of a job with an id greater than `after`, all or those of `kinds`, in order, at most `limit`."""
        table = schema.events
        where = (table.c.study == study_id) & (table.c.id > after)
        if kinds is not None:
            where &= table.c.kind.in_([kind.value for kind in kinds])
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.id).limit(limit))
            return tuple(EventRecord(row.id, row.time, row.kind, row.payload) for row in rows)

    def last_event_id(self, study_id: str) -> int:
        """Id of a job's latest event; 0 before the first."""
        table = schema.events
        with self._reads.connect() as connection:
            found: int | None = connection.execute(
                sa.select(sa.func.max(table.c.id)).where(table.c.study == study_id)
            ).scalar()
            return found or 0

    def document(self, study_id: str, name: str) -> Any | None:
        """Stored document of a study, such as the result of a closing stage; None if it is not stored yet."""
        table = schema.documents
        with self._reads.connect() as connection:
            return connection.execute(
                sa.select(table.c.document).where((table.c.study == study_id) & (table.c.name == name))
            ).scalar()
