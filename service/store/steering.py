"""Steering: users' requests that change a job after it was created, such as to pause it or to evaluate a merge.

A request is stored together with an event that says who asked, and why. Drivers (the processes that work on jobs) read
and carry out the requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from service.errors import Conflict, NotFound
from service.store import schema
from service.store.attempt_writer import insert_event, lock_job
from service.store.availability import repeated
from service.store.connection import clock_time, reading, transaction
from service.store.documents import RESPONSES
from service.store.jobs import FINISHED
from service.store.records import EvaluationRequest, job_record
from service.store.samples import holdings, void_holdings
from service.store.sql import Store
from service.types import EventKind, JobRecord, JobState, Steering

__all__ = ["SteeringStore"]

# Reason of a STOPPED job whose driver was asked to give its place up.
YIELDED = "it gave up its place"


@repeated
class SteeringStore:
    """Store of users' requests to pause, resume, stop or edit jobs, and to evaluate merges or mark trials as invalid.

    The requests are in the database of `store`, which must not be a snapshot. Thread-safe.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._engine = store.engine
        self._reads = reading(self._engine)

    # -- any job -------------------------------------------------------------------------------------------------------

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
                raise NotFound(f"job {job_id!r}: no such job in {self._store.place}")
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
        # The difference of these two numbers is the number of drivers that were submitted and never started. A STOPPED
        # job may have a driver that is starting.
        is_at_rest = table.c.state.in_((JobState.FAILED.value, JobState.PAUSED.value))
        has_absent = is_at_rest & (table.c.submissions > table.c.attempt)
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
        return self._store.job(job_id)

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

    # -- studies -------------------------------------------------------------------------------------------------------

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
        return self._store.job(study.id)

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
                return self._store.job(study.id)
            connection.execute(sa.update(table).where(is_this).values(invalid=invalid))
            insert_event(connection, study.id, EventKind.STEERED, replace(steering, trial=number).payload)
            connection.execute(sa.update(jobs).where(jobs.c.id == study.id).values(edited_after=jobs.c.attempt))
            reason = f"trial {number} was marked as {'in' * (invalid is not None)}valid"
            if not _has_removed_responses(connection, study.id):
                _reopen(connection, study.id, reason)
        return self._store.job(study.id)

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
                return self._store.job(study.id), False
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
        return self._store.job(study.id), True

    def evaluation_requests(self, study_id: str) -> tuple[EvaluationRequest, ...]:
        """Read users' requests to evaluate merges of a study on all samples of the search, the oldest request first."""
        with self._reads.connect() as connection:
            return tuple(EvaluationRequest(**row) for row in connection.execute(_requests_of(study_id)).mappings())


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
