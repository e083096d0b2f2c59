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
from service.store.connection import clock, insert, transaction
from service.store.prompts import SampleText, write_prompts
from service.store.records import BracketRecord, JudgmentRecord
from service.store.samples import (
    delete_texts,
    has_old_samples,
    holdings,
    move_old_samples,
    not_stored,
    remove_samples,
    store_samples,
    void_holdings,
)
from service.store.steps import Step, step_document
from service.store.usage import add_usage
from service.types import EventKind, JobState, NoticeKind, RungRecord, TrialRecord, TrialState
from workers.types import ScoreResult, Split

__all__ = ["CHANNEL", "JobWriter", "insert_event", "lock_job"]

# Reason of a job that had no work left when it was changed.
EDITED = "it was changed when it was about to end"

# PostgreSQL announces the ids of jobs with new events on this channel.
CHANNEL = "mergesearch_events"


@repeated
class JobWriter:
    """Writer of the results of a driver, the process that works on a job, to the database.

    An attempt is the work of one driver on the job. Every method is one transaction, and raises StaleAttempt if a later
    attempt has begun, so that a driver that was replaced cannot write.

    A driver may repeat a write after a crash: to write the same samples or results again changes nothing. If a write
    had to wait because the database did not answer, the next write also stores an event with the length of the wait.

    `stored_at` is the time at which this writer last stored anything except a heartbeat, and `scored_at` is the time at
    which it last stored samples. Both are values of time.monotonic(), or 0 if nothing was stored. `longest_chunk_s` is
    the longest time in seconds that an engine took for one request to score samples, including the time that the
    request waited at the engine.
    """

    def __init__(self, engine: sa.Engine, job_id: str, attempt: int) -> None:
        self._engine = engine
        self.job_id = job_id
        self.attempt = attempt
        self.stored_at = 0.0
        self.scored_at = 0.0
        self.longest_chunk_s = 0.0
        self._has_old_samples: bool | None = None  # rows of earlier versions, which no version writes any more

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
        num_gpus: int = 0,
        progress: Mapping[str, Any] | None = None,
        idle_s: float | None = None,
        patience_s: float | None = None,
        waiting_for: str | None = None,
    ) -> str | None:
        """Store a heartbeat of the driver (the process that works on the job), with the job's progress.

        Returns the reason why the job's search was asked to end early; None if nobody asked for this.

        `wall_clock_s` is the number of seconds that all drivers have worked on the job so far. The seconds since the
        last heartbeat, times `num_gpus`, are added to the GPU-hours that the job's team has used. `idle_s` is the
        number of seconds since the driver last made progress; None stores that no progress is known. `patience_s` is
        the number of seconds without progress after which the driver is replaced; None stores that it is not known.
        `progress` is shown to users, as JSON; None leaves the stored progress unchanged. `waiting_for` is what the
        driver waits for; None stores that it does not wait.
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
            table = schema.studies
            if num_gpus:
                query = sa.select(table.c.wall_clock_s, table.c.team).where(table.c.id == self.job_id)
                worked_s, team = connection.execute(query).one()
                add_usage(connection, team, (wall_clock_s - worked_s) * num_gpus)
            self._update_job(connection, heartbeat_at=now, progressed_at=progressed_at, **changes)
            asked: str | None = connection.execute(
                sa.select(table.c.stop_reason).where(table.c.id == self.job_id)
            ).scalar_one()
            return asked

    def set_state(self, state: JobState, reason: str | None = None) -> None:
        """Store the job's new state, and the reason for it (None: no reason).

        A job that was asked to pause becomes PAUSED instead of STOPPED. A job becomes STOPPED instead of COMPLETE if it
        was edited, or got a request for a trial, after its driver had read it; another driver then sees the change.
        Raises StaleAttempt if `state` is RUNNING and the job was asked to pause.
        """
        with self._transaction() as connection:
            self._set_state(connection, state, reason)

    def set_waiting(self, reason: str) -> None:
        """Store that the job is STOPPED until something that it needs is available; `reason` names what is missing.

        The server starts another driver (a process that works on the job) later.
        """
        with self._transaction() as connection:
            self._set_state(connection, JobState.STOPPED, reason)
            self._add_event(connection, EventKind.WAITING, {"reason": reason})

    def set_document(self, document: Mapping[str, Any], *, reopened: str | None = None) -> None:
        """Replace the stored study file by `document`, which may have other limits or more benchmarks.

        If `reopened` is not None, it is the reason why a study that has ended continues: the job becomes STOPPED in the
        same transaction, and the server then starts another process to work on it. None leaves the job's state
        unchanged.
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
        """Store that the Hyperband bracket with the index `bracket` has only `size` configurations.

        The bracket has fewer configurations than planned if the search ends before the bracket is full.
        """
        table = schema.brackets
        with self._transaction() as connection:
            where = (table.c.study == self.job_id) & (table.c.bracket == bracket)
            connection.execute(sa.update(table).where(where).values(size=size))

    def add_trial(self, trial: TrialRecord, *, request: int | None = None) -> None:
        """Store a new trial.

        If the trial was added because a user asked to evaluate its recipe (merge), `request` is the number of the
        user's request, which is marked as answered. Otherwise, `request` is None.
        """
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
        """Store scored samples of a trial, and the evidence of which weights the engine held when it scored them.

        `trial` is the trial's number. `split` is the data that the samples belong to: search data, holdout data or
        benchmarks. `result` is an engine's answer to one chunk (up to 512 samples sent together). `again` has the
        samples, as (objective, position), that were scored again because their engine had failed a check: they replace
        the stored samples. Other samples that are stored already are ignored, and if no sample is left, nothing is
        stored.

        The timings of the chunk are added to the timings of the trial. The number of new samples of search data is
        added to the trial's `samples_scored`, without those in `again`.
        """
        evidence = result.evidence
        with self._transaction() as connection:
            digest = evidence.recipe_digest
            if self._has_old_samples is None:
                self._has_old_samples = has_old_samples(connection, self.job_id)
            if self._has_old_samples:
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
            key = {"of_study": self.job_id, "of_trial": trial}
            timings = _added(connection.execute(_TIMINGS, key).scalar_one(), result.timings_s)
            num_scored = len(samples) - len(again) if split == Split.SEARCH else 0
            connection.execute(_SCORED, {**key, "num_scored": num_scored, "timings_s": timings})
        self.scored_at = self.stored_at
        self.longest_chunk_s = max(self.longest_chunk_s, sum(result.timings_s.values()))

    def delete_texts(self, *, keep: Collection[str]) -> None:
        """Delete the study's stored model responses and tokens, except for the recipes (merges) in `keep`.

        `keep` has the digests of these recipes.
        """
        with self._transaction() as connection:
            delete_texts(connection, self.job_id, keep=keep)
            self._add_event(connection, EventKind.TEXTS_DELETED, {"recipes_kept": len(keep)})

    def finish_rung(
        self, trial: int, rung: RungRecord, *, samples_reused: int, state: TrialState | None = None
    ) -> None:
        """Store that a trial has finished a rung (a number of samples at which trials are compared).

        `trial` is the trial's number. `rung` has the values on these samples. `samples_reused` counts samples of the
        trial that had been scored earlier, at a lower rung or for a trial with an equal recipe (merge). `state` is the
        trial's final state; None means that the trial continues.
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

    def finish_trials(
        self, trials: Sequence[int], state: TrialState, reason: str | None = None, *, rival: int | None = None
    ) -> None:
        """Store that trials have ended in `state` (PRUNED or FAIL) without another finished rung.

        A rung is one of the numbers of samples at which trials are compared. `trials` has the numbers of the trials, at
        most some thousands, because each number is a parameter of one statement. `reason` says why they ended; None
        stores no reason. `rival` is the number of the better trial because of which a scheduler has stopped them; None
        if no scheduler has stopped them.
        """
        table = schema.trials
        with self._transaction() as connection:
            connection.execute(
                sa.update(table)
                .where((table.c.study == self.job_id) & table.c.number.in_(list(trials)))
                .values(state=state.value, reason=reason, rival=rival)
            )
            ended = [{"trial": trial, "state": state.value, "reason": reason} for trial in trials]
            _insert_events(connection, self.job_id, EventKind.TRIAL_STATE, ended)

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
        """Store adversarial prompt templates that an attack on a benchmark has found.

        `templates` has the text of each template by the name under which the samples with this template are stored.
        Stored templates are not replaced.
        """
        rows = [
            {"study": self.job_id, "name": name, "benchmark": benchmark, "template": template}
            for name, template in templates.items()
        ]
        with self._transaction() as connection:
            connection.execute(insert(connection, schema.prompt_templates).on_conflict_do_nothing(), rows)

    def add_prompts(self, split: Split, objective: str, texts: Sequence[SampleText]) -> None:
        """Store prompts, references and pictures of an objective's samples, in the order in which they are scored.

        `split` says whether the samples are of search data, held-out data or benchmarks. Texts that are stored already
        are not replaced.
        """
        with self._transaction() as connection:
            write_prompts(connection, self.job_id, split, objective, texts)

    def add_judgments(self, judgments: Iterable[JudgmentRecord]) -> None:
        """Store judgments: whether a language model found a merge's completion or the reference answer better.

        Benchmarks can have such a model as their judge. Judgments that are stored already are not changed.
        """
        rows = [{"study": self.job_id, **asdict(judgment)} for judgment in judgments]
        with self._transaction() as connection:
            connection.execute(insert(connection, schema.judgments).on_conflict_do_nothing(), rows)

    def set_document_named(self, name: str, document: Any) -> None:
        """Store a JSON document of the job under `name`, such as "verification".

        The document replaces an earlier document of the same name. An event with `name` as its kind is added.
        """
        table = schema.documents
        with self._transaction() as connection:
            connection.execute(sa.delete(table).where((table.c.study == self.job_id) & (table.c.name == name)))
            connection.execute(sa.insert(table).values(study=self.job_id, name=name, document=document))
            self._add_event(connection, name, {})

    def record_engine_fault(self, replica: str, canaries: int, reason: str) -> None:
        """Store that an inference engine failed a check after it had passed `canaries` checks with fixed prompts.

        `replica` is the id of the engine's replica (the Ray Serve process that hosts it), and `reason` says how the
        check failed. Only the first fault of a replica is stored. Samples that the engine scored after its last passed
        check become void in all studies: they must be scored again. Each COMPLETE study with void samples gets an
        event, and the number of its void samples is added to the reason of its state. Unfinished studies find the
        stored fault themselves.
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
        table = schema.studies.c
        asked = sa.select(table.is_paused, table.edited_after).where(table.id == self.job_id)
        is_paused, edited_after = connection.execute(asked).one()
        if state is JobState.COMPLETE and edited_after == self.attempt:
            state, reason = JobState.STOPPED, EDITED
        if is_paused and state is JobState.RUNNING:
            raise StaleAttempt(f"job {self.job_id}: is paused")
        if is_paused and state is JobState.STOPPED:
            state = JobState.PAUSED
        self._update_job(connection, state=state.value, reason=reason, is_paused=is_paused and not state.is_finished)
        self._add_event(connection, EventKind.STATE, {"state": state.value, "reason": reason})

    def _notify_complete_studies(self, connection: sa.Connection, replica: str, reason: str) -> None:
        """Add an event about an engine's failed check to each COMPLETE study that now has void samples.

        Void samples are samples that must be scored again: the engine scored them after the last check with fixed
        prompts that it passed. `replica` is the id of the engine's replica, and `reason` says how the check failed. The
        number of a study's void samples and `reason` are also added to the reason of the study's state.
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
        """Insert the `rows` whose keys are not stored yet into `table`; stored rows are not changed.

        The id of this writer's job is added to each row.
        """
        if not rows:
            return
        statement = insert(connection, table).on_conflict_do_nothing()
        connection.execute(statement, [{"study": self.job_id, **row} for row in rows])


def lock_job(connection: sa.Connection, job_id: str) -> int | None:
    """Lock a job's row until the transaction ends, and return how many drivers have taken over the job so far.

    A driver is a process that works on the job. The number identifies the last driver, which alone may write results.
    Returns None if there is no such job.
    """
    attempt: int | None = connection.execute(_ATTEMPT, {"job": job_id}).scalar()
    return attempt


# Statements of every transaction are built once: to build one takes as long as to execute it.
_ATTEMPT = (
    sa.select(schema.studies.c.attempt)
    .where(schema.studies.c.id == sa.bindparam("job"))
    .with_for_update(key_share=True)
)
_OF_TRIAL = (schema.trials.c.study == sa.bindparam("of_study")) & (schema.trials.c.number == sa.bindparam("of_trial"))
_TIMINGS = sa.select(schema.trials.c.timings_s).where(_OF_TRIAL)
_SCORED = (
    sa.update(schema.trials)
    .where(_OF_TRIAL)
    .values(
        samples_scored=schema.trials.c.samples_scored + sa.bindparam("num_scored", type_=sa.Integer),
        timings_s=sa.bindparam("timings_s"),
        state=sa.case(
            (schema.trials.c.state == TrialState.WAITING.value, TrialState.RUNNING.value),
            else_=schema.trials.c.state,
        ),
    )
)


def insert_event(connection: sa.Connection, job_id: str, kind: str, payload: Mapping[str, Any]) -> None:
    """Insert an event of a job, whose row must be locked or changed in the same transaction.

    `kind` is the kind of the event, and `payload` has its details as JSON. Because of the lock, transactions that add
    events of the same job end one after another, in the order of the events' ids. A reader that continues after the
    last id that it has read therefore misses no event.

    If users can be notified of a change of the job's state, the change is also stored as a notice.
    """
    _insert_events(connection, job_id, kind, [payload])
    if kind == EventKind.STATE and (notice := NoticeKind.of_state(payload.get("state"))) is not None:
        row = {"study": job_id, "kind": notice.value, "state": payload["state"], "reason": payload.get("reason")}
        connection.execute(sa.insert(schema.notices).values(**row, time=clock(connection)))


def _insert_events(connection: sa.Connection, job_id: str, kind: str, payloads: Sequence[Mapping[str, Any]]) -> None:
    """Insert an event of one kind for each of `payloads`, in their order, by one statement; without notices."""
    if not payloads:
        return
    statement = sa.insert(schema.events).values(study=job_id, time=clock(connection), kind=str(kind))
    rows = [{"payload": dict(payload)} for payload in payloads]
    connection.execute(statement, rows if len(rows) > 1 else rows[0])
    if connection.dialect.name == "postgresql":  # announced when the transaction ends
        connection.execute(sa.select(sa.func.pg_notify(CHANNEL, job_id)))


def _lock_faults(connection: sa.Connection) -> None:
    """Make transactions that store faults of inference engines wait for each other.

    Faults therefore become visible in the order of their ids, and a reader that remembers the last id misses no fault.
    On SQLite nothing needs to be done, because only one transaction writes at a time.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(sa.text("LOCK TABLE engine_faults IN SHARE ROW EXCLUSIVE MODE"))


def _added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in sorted({*left, *right})}
