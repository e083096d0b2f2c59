"""Database writes of a driver about its job. Every transaction checks that no other driver has taken over the job."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import sqlalchemy as sa

from service.errors import StaleAttempt
from service.store import schema
from service.store.availability import Outage, availability_of, is_waiting, repeated
from service.store.connection import clock, transaction
from service.store.records import BracketRecord, JudgmentRecord
from service.store.samples import (
    delete_texts,
    holdings,
    move_old_samples,
    not_stored,
    remove_samples,
    store_samples,
    void_holdings,
)
from service.store.steps import Step, step_document
from service.types import EventKind, JobState, RungRecord, TrialRecord, TrialState
from workers.types import ScoreResult, Split

__all__ = ["CHANNEL", "JobWriter", "insert", "insert_event", "lock_job"]

# PostgreSQL announces the ids of jobs with new events on this channel.
CHANNEL = "mergesearch_events"


@repeated
class JobWriter:
    """Writer of a driver's results to its job; only the writer of the job's latest attempt may write.

    Every method is one transaction, and raises StaleAttempt if a later attempt has begun.

    Writing the same chunk, rung or bracket again changes nothing, so a driver may repeat a write after a crash. If a
    write had to wait because the database did not answer, the next write also stores an event with the length of the
    wait. That next write counts as progress of the driver even if it is a heartbeat.

    `stored_at` is the time at which this writer last stored anything except a heartbeat, and `scored_at` the time at
    which it last stored a chunk. Both are values of time.monotonic(), or 0 if nothing was stored. `longest_chunk_s` is
    the longest time that a replica took for a chunk, including the time that the chunk waited in the replica.
    """

    def __init__(self, engine: sa.Engine, job_id: str, attempt: int) -> None:
        self._engine = engine
        self.job_id = job_id
        self.attempt = attempt
        self.stored_at = 0.0
        self.scored_at = 0.0
        self.longest_chunk_s = 0.0

    @contextmanager
    def _transaction(self, *, is_heartbeat: bool = False) -> Iterator[sa.Connection]:
        availability = availability_of(self._engine)
        outage: Outage | None = None
        try:
            with transaction(self._engine) as connection:
                outage = availability.take_ended() if is_waiting(self._engine) else None
                current = lock_job(connection, self.job_id)
                if current != self.attempt:
                    raise StaleAttempt(
                        f"job {self.job_id}: attempt {self.attempt} may not write, attempt {current} has taken over"
                    )
                if outage is not None:
                    self._add_event(connection, EventKind.DATABASE, {"away_s": outage.until - outage.since})
                yield connection
        except BaseException:
            if outage is not None:
                availability.put_back(outage)
            raise
        if outage is not None or not is_heartbeat:
            self.stored_at = time.monotonic()

    def heartbeat(
        self,
        *,
        wall_clock_s: float,
        progress: Mapping[str, Any] | None = None,
        idle_s: float | None = None,
        patience_s: float | None = None,
        waiting_for: str | None = None,
    ) -> str | None:
        """Store that the driver is alive, and how far it is.

        Returns the reason why the job's search was asked to end early; None if it was not.

        `wall_clock_s` is the number of seconds that all attempts have worked. `idle_s` is the number of seconds since
        the driver last made progress; None stores that no progress is known. `patience_s` is the number of seconds
        without progress after which the driver is replaced; None stores that it is not known. `progress` is shown to
        users, as JSON; None leaves the stored one unchanged. `waiting_for` is what the driver waits for; None stores
        that it does not wait.
        """
        changes: dict[str, Any] = {
            "wall_clock_s": wall_clock_s,
            "patience_s": patience_s,
            "waiting_for": waiting_for,
        }
        if progress is not None:
            changes["progress"] = dict(progress)
        with self._transaction(is_heartbeat=True) as connection:
            now = clock(connection)
            progressed_at = None if idle_s is None else now - idle_s
            self._update_job(connection, heartbeat_at=now, progressed_at=progressed_at, **changes)
            table = schema.studies
            asked: str | None = connection.execute(
                sa.select(table.c.stop_reason).where(table.c.id == self.job_id)
            ).scalar_one()
            return asked

    def set_state(self, state: JobState, reason: str | None = None) -> None:
        """Store the job's state. A job that was asked to pause becomes PAUSED instead of STOPPED.

        Raises StaleAttempt if `state` is RUNNING and the job was asked to pause.
        """
        with self._transaction() as connection:
            self._set_state(connection, state, reason)

    def set_waiting(self, reason: str) -> None:
        """Store that the job is STOPPED because something is missing for now; `reason` says what is missing.

        The server starts another driver for the job later.
        """
        with self._transaction() as connection:
            self._set_state(connection, JobState.STOPPED, reason)
            self._add_event(connection, EventKind.WAITING, {"reason": reason})

    def set_document(self, document: Mapping[str, Any], *, reopened: str | None = None) -> None:
        """Replace the stored study file by `document`, for example by one with other limits or more benchmarks.

        `reopened` is the reason why the study continues. If it is given, the job becomes STOPPED in the same
        transaction, so that the server starts another driver. None leaves the job's state unchanged.
        """
        with self._transaction() as connection:
            self._update_job(connection, document=dict(document))
            if reopened is not None:
                stopped = JobState.STOPPED.value
                self._update_job(connection, state=stopped, reason=reopened)
                self._add_event(connection, EventKind.STATE, {"state": stopped, "reason": reopened})

    def open_bracket(self, record: BracketRecord) -> None:
        with self._transaction() as connection:
            self._insert_once(
                connection,
                schema.brackets,
                [{"bracket": record.bracket, "first_rung": record.first_rung, "size": record.size}],
            )

    def resize_bracket(self, bracket: int, size: int) -> None:
        """Store that a bracket has `size` configurations, because the search ended before it was full."""
        table = schema.brackets
        with self._transaction() as connection:
            where = (table.c.study == self.job_id) & (table.c.bracket == bracket)
            connection.execute(sa.update(table).where(where).values(size=size))

    def add_trial(self, trial: TrialRecord, *, request: int | None = None) -> None:
        """Store a new trial. `request` is the number of the user's request that it answers, if any."""
        with self._transaction() as connection:
            connection.execute(
                sa.insert(schema.trials).values(
                    study=self.job_id,
                    number=trial.number,
                    origin=trial.origin.value,
                    label=trial.label,
                    state=trial.state.value,
                    reason=trial.reason,
                    bracket=trial.bracket,
                    configuration=None if trial.configuration is None else dict(trial.configuration),
                    recipe=trial.read_recipe().to_json(),
                    recipe_digest=trial.recipe.digest,
                    samples_scored=trial.samples_scored,
                    samples_reused=trial.samples_reused,
                    timings_s=dict(trial.timings_s),
                )
            )
            if request is not None:
                table = schema.evaluation_requests
                is_this = (table.c.study == self.job_id) & (table.c.number == request)
                connection.execute(sa.update(table).where(is_this).values(added=trial.number))
            self._add_event(connection, EventKind.TRIAL, {"trial": trial.number, "label": trial.label})

    def record_chunk(
        self, trial: int, split: Split, result: ScoreResult, *, again: Collection[tuple[str, int]] = ()
    ) -> None:
        """Store a chunk of scored samples with its evidence, and add its size and timings to the trial.

        Samples that are stored already are ignored; a chunk that has no other samples is not stored at all. `again` has
        the samples, as (objective, position), that replace void samples (samples of an engine that failed a check). The
        void samples are deleted first. The trial's `samples_scored` grows by the number of new samples of search data.
        It does not count samples that replace void samples, or samples of other data.
        """
        evidence = result.evidence
        table = schema.trials
        with self._transaction() as connection:
            digest = evidence.recipe_digest
            move_old_samples(connection, self.job_id, digest)
            remove_samples(connection, self.job_id, digest, split, again)
            samples = not_stored(connection, self.job_id, digest, split, result.samples)
            if not samples:
                return
            evidence_id = connection.execute(
                sa.insert(schema.evidence)
                .values(
                    study=self.job_id,
                    trial=trial,
                    recipe_digest=digest,
                    bank_fingerprint=evidence.bank_fingerprint,
                    prompts=dict(evidence.prompts),
                    weights_checksum=evidence.weights_checksum,
                    replica=evidence.replica,
                    swap_count=evidence.swap_count,
                    engine=evidence.engine,
                    canaries=evidence.canaries,
                    timings_s=dict(result.timings_s),
                    num_samples=len(samples),
                    finished_at=clock(connection),
                )
                .returning(schema.evidence.c.id)
            ).scalar_one()
            store_samples(connection, self.job_id, digest, split, evidence_id, samples)
            where = (table.c.study == self.job_id) & (table.c.number == trial)
            timings = connection.execute(sa.select(table.c.timings_s).where(where)).scalar_one()
            connection.execute(
                sa.update(table)
                .where(where)
                .values(
                    samples_scored=table.c.samples_scored + (len(samples) - len(again) if split == Split.SEARCH else 0),
                    timings_s=_added(timings, result.timings_s),
                    state=sa.case(
                        (table.c.state == TrialState.WAITING.value, TrialState.RUNNING.value), else_=table.c.state
                    ),
                )
            )
        self.scored_at = self.stored_at
        self.longest_chunk_s = max(self.longest_chunk_s, sum(result.timings_s.values()))

    def delete_texts(self, *, keep: Collection[str]) -> None:
        """Delete the model responses and tokens of all recipes except those with digests in `keep`."""
        with self._transaction() as connection:
            delete_texts(connection, self.job_id, keep=keep)
            self._add_event(connection, EventKind.TEXTS_DELETED, {"recipes_kept": len(keep)})

    def finish_rung(
        self, trial: int, rung: RungRecord, *, samples_reused: int, state: TrialState | None = None
    ) -> None:
        """Store a finished rung of a trial.

        `samples_reused` is a sum over the trial's finished rungs: the number of their samples that were scored earlier,
        at a lower rung or for a trial with an equal recipe. `state` is the trial's final state; None means that the
        trial continues.
        """
        table = schema.trials
        with self._transaction() as connection:
            self._insert_once(
                connection,
                schema.rungs,
                [
                    {
                        "trial": trial,
                        "rung": rung.rung,
                        "samples": dict(rung.num_samples),
                        "values": dict(rung.values),
                        "standard_errors": dict(rung.standard_errors),
                    }
                ],
            )
            changes: dict[str, Any] = {"samples_reused": samples_reused}
            if state is not None:
                changes["state"] = state.value
            connection.execute(
                sa.update(table).where((table.c.study == self.job_id) & (table.c.number == trial)).values(changes)
            )
            self._add_event(
                connection,
                EventKind.RUNG,
                {"trial": trial, "rung": rung.rung, "values": dict(rung.values), "state": state and state.value},
            )

    def finish_trials(self, trials: Sequence[int], state: TrialState, reason: str | None = None) -> None:
        """Store that trials have ended in `state` (PRUNED or FAIL) without another finished rung.

        `reason` says why.
        """
        table = schema.trials
        with self._transaction() as connection:
            connection.execute(
                sa.update(table)
                .where((table.c.study == self.job_id) & table.c.number.in_(list(trials)))
                .values(state=state.value, reason=reason)
            )
            for trial in trials:
                self._add_event(
                    connection, EventKind.TRIAL_STATE, {"trial": trial, "state": state.value, "reason": reason}
                )

    def add_step(self, step: Step) -> None:
        with self._transaction() as connection:
            row = {
                "study": self.job_id,
                "number": step.number,
                "proposal": step.proposal,
                "charged": step.request.num_charged,
                "document": step_document(step),
                "time": clock(connection),
            }
            connection.execute(insert(connection, schema.search_steps).values(row).on_conflict_do_nothing())

    def add_prompt_templates(self, benchmark: str, templates: Mapping[str, str]) -> None:
        """Store adversarial prompt templates of a benchmark, by sample name; stored templates are not replaced."""
        rows = [
            {"study": self.job_id, "name": name, "benchmark": benchmark, "template": template}
            for name, template in templates.items()
        ]
        with self._transaction() as connection:
            connection.execute(insert(connection, schema.prompt_templates).on_conflict_do_nothing(), rows)

    def add_judgments(self, judgments: Iterable[JudgmentRecord]) -> None:
        """Store judgments of completions; judgments that are stored already are not changed."""
        rows = [{"study": self.job_id, **asdict(judgment)} for judgment in judgments]
        with self._transaction() as connection:
            connection.execute(insert(connection, schema.judgments).on_conflict_do_nothing(), rows)

    def set_document_named(self, name: str, document: Any) -> None:
        """Store a document of the job under `name`, such as the report of a verification.

        An event of the kind `name` is added. The document replaces an earlier one of the same name.
        """
        table = schema.documents
        with self._transaction() as connection:
            connection.execute(sa.delete(table).where((table.c.study == self.job_id) & (table.c.name == name)))
            connection.execute(sa.insert(table).values(study=self.job_id, name=name, document=document))
            self._add_event(connection, name, {})

    def record_engine_fault(self, replica: str, canaries: int, reason: str) -> None:
        """Store that a replica's engine failed a check after it had passed `canaries` canary checks.

        The fault counts for all studies whose samples the engine scored. Only the first fault of a replica is stored.
        Drivers of unfinished studies read the stored faults themselves. If samples of a COMPLETE study are void now,
        this method stores an event of that study and adds the number of void samples to the reason of its state.
        """
        with self._transaction() as connection:
            _lock_faults(connection)
            row = {"replica": replica, "canaries": canaries, "reason": reason, "time": clock(connection)}
            added = insert(connection, schema.engine_faults).values(row).on_conflict_do_nothing()
            if connection.execute(added.returning(schema.engine_faults.c.id)).scalar() is not None:
                self._notify_complete_studies(connection, replica, reason)

    def add_event(self, kind: str, payload: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            self._add_event(connection, kind, payload)

    # -- inside a transaction --------------------------------------------------------------------------------------

    def _add_event(self, connection: sa.Connection, kind: str, payload: Mapping[str, Any]) -> None:
        insert_event(connection, self.job_id, kind, payload)

    def _update_job(self, connection: sa.Connection, **changes: Any) -> None:
        connection.execute(sa.update(schema.studies).where(schema.studies.c.id == self.job_id).values(**changes))

    def _set_state(self, connection: sa.Connection, state: JobState, reason: str | None) -> None:
        table = schema.studies
        is_paused = connection.execute(sa.select(table.c.is_paused).where(table.c.id == self.job_id)).scalar_one()
        if is_paused and state is JobState.RUNNING:
            raise StaleAttempt(f"job {self.job_id}: is paused")
        if is_paused and state is JobState.STOPPED:
            state = JobState.PAUSED
        self._update_job(connection, state=state.value, reason=reason, is_paused=is_paused and not state.is_finished)
        self._add_event(connection, EventKind.STATE, {"state": state.value, "reason": reason})

    def _notify_complete_studies(self, connection: sa.Connection, replica: str, reason: str) -> None:
        """Report a replica's failed check to each COMPLETE study that now has void samples.

        Void samples are those that the replica scored after its last passed canary (a check with fixed prompts). Each
        study with void samples receives an event. The number of its void samples and `reason` are added to the reason
        of its state.
        """
        studies, held = schema.studies, holdings()
        study = held.c.study
        query = void_holdings(study, studies.c.reason, sa.func.sum(held.c.num_samples), held=held)
        query = query.join(studies, studies.c.id == study)
        is_concerned = (schema.engine_faults.c.replica == replica) & (studies.c.state == JobState.COMPLETE.value)
        query = query.where(is_concerned).group_by(study, studies.c.reason)
        # In the order of their ids, so that no two writers wait for each other.
        for study_id, before, number in connection.execute(query.order_by(study)).all():
            notice = f"{number} samples are void: {reason}; resume the study to score them again"
            changes = {"reason": f"{before}; {notice}" if before else notice}
            is_complete = (studies.c.id == study_id) & (studies.c.state == JobState.COMPLETE.value)
            if connection.execute(sa.update(studies).where(is_complete).values(changes)).rowcount == 0:
                continue  # resumed meanwhile: its driver will find the fault
            payload = {"replicas": {replica: reason}, "samples": number}
            insert_event(connection, study_id, EventKind.ENGINE_FAULT, payload)

    def _insert_once(self, connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert `rows` of the job into a table; rows whose key exists are left unchanged."""
        if not rows:
            return
        statement = insert(connection, table).on_conflict_do_nothing()
        connection.execute(statement, [{"study": self.job_id, **row} for row in rows])


def insert(connection: sa.Connection, table: sa.Table) -> Any:
    """Start an INSERT statement for `table` that supports ON CONFLICT, in the dialect of the connection's database."""
    from sqlalchemy.dialects import postgresql, sqlite

    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def lock_job(connection: sa.Connection, job_id: str) -> int | None:
    """Lock the job's row until the transaction ends, and return the number of the job's latest driver attempt.

    Returns None if there is no such job.
    """
    table = schema.studies
    query = sa.select(table.c.attempt).where(table.c.id == job_id).with_for_update(key_share=True)
    attempt: int | None = connection.execute(query).scalar()
    return attempt


def insert_event(connection: sa.Connection, job_id: str, kind: str, payload: Mapping[str, Any]) -> None:
    """Insert an event of a job, whose row must be locked or changed in this transaction.

    `payload` has the event's details as JSON. Because of the lock, transactions that add events of the same job end one
    after another, in the order of the events' ids. A reader that continues after the last id that it has read therefore
    misses no event.
    """
    time_s = clock(connection)
    connection.execute(
        sa.insert(schema.events).values(study=job_id, time=time_s, kind=str(kind), payload=dict(payload))
    )
    if connection.dialect.name == "postgresql":  # announced when the transaction ends
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, job_id)))


def _lock_faults(connection: sa.Connection) -> None:
    """Serialize the transactions that store engine faults, so that faults appear in the order of their ids.

    On SQLite nothing needs to be done, because only one transaction writes at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("LOCK TABLE engine_faults IN SHARE ROW EXCLUSIVE MODE"))


def _added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in sorted({*left, *right})}
