"""The store: studies, trials, rungs, samples and events in SQL (SQLite or PostgreSQL, through SQLAlchemy).

Anyone may read. Only a study's driver writes its trials, rungs, samples and events, through a `StudyWriter` that
checks its attempt number inside every transaction: a driver that was taken for dead and replaced cannot write.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import event

from search_spaces.recipe import Recipe
from service.errors import Conflict, NotFound, StaleAttempt
from service.store import schema
from service.types import Origin, RungRecord, StudyRecord, StudyState, TrialRecord, TrialState
from workers.types import SampleResult, ScoreResult

__all__ = ["BracketRecord", "EventRecord", "Split", "Store", "StudyWriter"]

Split = str  # "search" or "holdout"

# How long a writer waits for another transaction on SQLite before it gives up.
BUSY_TIMEOUT_S = 60


@dataclass(frozen=True)
class BracketRecord:
    """A bracket as it was opened: its index, the rung it starts at, and how many configurations it takes."""

    bracket: int
    first_rung: int
    size: int


@dataclass(frozen=True)
class EventRecord:
    """One thing that happened. `id` grows with time and is never reused."""

    id: int
    time: float
    kind: str
    payload: Mapping[str, Any]


class Store:
    """All studies of one database. Thread-safe; close it when done.

    Raises Conflict if it is no database of ours, or one of another version's schema.
    """

    def __init__(self, url: str) -> None:
        self._engine = sa.create_engine(url, pool_pre_ping=True)
        if self._engine.dialect.name == "sqlite":
            event.listen(self._engine, "connect", _prepare_sqlite)
            event.listen(self._engine, "begin", _begin)
        self._reads = self._engine.execution_options(read_only=True)
        try:
            version = self._schema_version()
        except sa.exc.DatabaseError as error:
            raise Conflict(f"database {self._engine.url.render_as_string()}: cannot be used: {error.orig}") from error
        if version != schema.SCHEMA_VERSION:
            raise Conflict(
                f"database {self._engine.url.render_as_string()}: schema version {version}, this program reads "
                f"{schema.SCHEMA_VERSION}; use the program that wrote it, or another database"
            )

    def _schema_version(self) -> int:
        """The database's, after what it lacks has been created."""
        schema.metadata.create_all(self._engine)
        with self._engine.begin() as connection:
            version: int | None = connection.execute(sa.select(schema.schema_version.c.version)).scalar()
            if version is None:
                version = schema.SCHEMA_VERSION
                connection.execute(sa.insert(schema.schema_version).values(version=version))
            return version

    def close(self) -> None:
        self._engine.dispose()

    # -- studies ---------------------------------------------------------------------------------------------------

    def create_study(self, *, name: str, document: Mapping[str, Any], facts: Mapping[str, Any]) -> StudyRecord:
        record = StudyRecord(
            id=uuid.uuid4().hex,
            name=name,
            state=StudyState.CREATED,
            document=document,
            facts=facts,
            created_at=time.time(),
        )
        with self._engine.begin() as connection:
            connection.execute(
                sa.insert(schema.studies).values(
                    id=record.id,
                    name=name,
                    state=record.state.value,
                    document=dict(document),
                    facts=dict(facts),
                    created_at=record.created_at,
                    attempt=0,
                    wall_clock_s=0.0,
                )
            )
        return record

    def study(self, study_id: str) -> StudyRecord:
        """Raises NotFound."""
        for record in self.studies():
            if record.id == study_id:
                return record
        raise NotFound(f"study {study_id!r}: no such study in {self._engine.url.render_as_string()}")

    def studies(self) -> tuple[StudyRecord, ...]:
        """Every study, oldest first."""
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(schema.studies).order_by(schema.studies.c.created_at)).mappings()
            return tuple(
                StudyRecord(
                    id=row["id"],
                    name=row["name"],
                    state=StudyState(row["state"]),
                    document=row["document"],
                    facts=row["facts"],
                    created_at=row["created_at"],
                    reason=row["reason"],
                    wall_clock_s=row["wall_clock_s"],
                )
                for row in rows
            )

    def open_attempt(self, study_id: str) -> StudyWriter:
        """Take the study over: from now on only the returned writer may write. Raises NotFound."""
        table = schema.studies
        with self._engine.begin() as connection:
            attempt = connection.execute(
                sa.update(table)
                .where(table.c.id == study_id)
                .values(attempt=table.c.attempt + 1)
                .returning(table.c.attempt)
            ).scalar()
        if attempt is None:
            raise NotFound(f"study {study_id!r}: no such study in {self._engine.url.render_as_string()}")
        return StudyWriter(self._engine, study_id, attempt)

    # -- what is known of one study --------------------------------------------------------------------------------

    def trials(self, study_id: str) -> tuple[TrialRecord, ...]:
        """Every trial in order of its number."""
        rungs: dict[int, list[RungRecord]] = defaultdict(list)
        with self._reads.connect() as connection:
            in_order = sa.select(schema.rungs).where(schema.rungs.c.study == study_id)
            for row in connection.execute(in_order.order_by(schema.rungs.c.trial, schema.rungs.c.rung)).mappings():
                rungs[row["trial"]].append(
                    RungRecord(row["rung"], row["samples"], row["values"], row["standard_errors"])
                )
            rows = connection.execute(
                sa.select(schema.trials).where(schema.trials.c.study == study_id).order_by(schema.trials.c.number)
            ).mappings()
            return tuple(_trial_record(row, tuple(rungs[row["number"]])) for row in rows)

    def brackets(self, study_id: str) -> tuple[BracketRecord, ...]:
        table = schema.brackets
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.bracket))
            return tuple(BracketRecord(row.bracket, row.first_rung, row.size) for row in rows)

    def sample_values(self, study_id: str, split: Split) -> dict[str, dict[str, dict[int, float]]]:
        """Every scored sample's value: recipe digest -> objective -> position -> value."""
        table = schema.samples
        found: dict[str, dict[str, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
        query = sa.select(table.c.recipe_digest, table.c.objective, table.c.position, table.c.value)
        with self._reads.connect() as connection:
            where = (table.c.study == study_id) & (table.c.split == split)
            for digest, objective, position, value in connection.execute(query.where(where)):
                found[digest][objective][position] = value
        return {digest: dict(by_objective) for digest, by_objective in found.items()}

    def samples(self, study_id: str, recipe_digest: str, split: Split) -> tuple[SampleResult, ...]:
        """The scored samples of one recipe, by objective and position."""
        table = schema.samples
        where = (table.c.study == study_id) & (table.c.recipe_digest == recipe_digest) & (table.c.split == split)
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(where).order_by(table.c.objective, table.c.position))
            return tuple(
                SampleResult(row.objective, row.position, row.document, row.value, row.response, row.is_truncated)
                for row in rows
            )

    def evidence(self, study_id: str) -> tuple[Mapping[str, Any], ...]:
        """What the engines held, one row per scored chunk, in order."""
        table = schema.evidence
        with self._reads.connect() as connection:
            rows = connection.execute(sa.select(table).where(table.c.study == study_id).order_by(table.c.id))
            return tuple(dict(row) for row in rows.mappings())

    def events(self, study_id: str, *, after: int = 0) -> tuple[EventRecord, ...]:
        """Events with an id greater than `after`, in order."""
        table = schema.events
        with self._reads.connect() as connection:
            rows = connection.execute(
                sa.select(table).where((table.c.study == study_id) & (table.c.id > after)).order_by(table.c.id)
            )
            return tuple(EventRecord(row.id, row.time, row.kind, row.payload) for row in rows)

    def document(self, study_id: str, name: str) -> Any | None:
        """A closing stage's stored result, or None if that stage has not finished."""
        table = schema.documents
        with self._reads.connect() as connection:
            return connection.execute(
                sa.select(table.c.document).where((table.c.study == study_id) & (table.c.name == name))
            ).scalar()


class StudyWriter:
    """The one writer of a study. Every method is one transaction; all raise StaleAttempt once another has taken over.

    Writing the same chunk, rung or bracket again changes nothing, so that a driver may repeat what it cannot know
    was stored.
    """

    def __init__(self, engine: sa.Engine, study_id: str, attempt: int) -> None:
        self._engine = engine
        self.study_id = study_id
        self.attempt = attempt

    @contextmanager
    def _transaction(self) -> Iterator[sa.Connection]:
        table = schema.studies
        with self._engine.begin() as connection:
            current = connection.execute(
                sa.select(table.c.attempt).where(table.c.id == self.study_id).with_for_update()
            ).scalar()
            if current != self.attempt:
                raise StaleAttempt(
                    f"study {self.study_id}: attempt {self.attempt} may not write, attempt {current} has taken over"
                )
            yield connection

    def heartbeat(self, *, wall_clock_s: float) -> None:
        """The driver is alive, and all attempts together have worked this long."""
        with self._transaction() as connection:
            self._update_study(connection, heartbeat_at=time.time(), wall_clock_s=wall_clock_s)

    def set_state(self, state: StudyState, reason: str | None = None) -> None:
        with self._transaction() as connection:
            self._update_study(connection, state=state.value, reason=reason)
            self._add_event(connection, "state", {"state": state.value, "reason": reason})

    def set_document(self, document: Mapping[str, Any]) -> None:
        """Replace the study file: other limits, or more trials."""
        with self._transaction() as connection:
            self._update_study(connection, document=dict(document))

    def set_facts(self, facts: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            self._update_study(connection, facts=dict(facts))

    def open_bracket(self, record: BracketRecord) -> None:
        with self._transaction() as connection:
            self._insert_once(
                connection,
                schema.brackets,
                [{"bracket": record.bracket, "first_rung": record.first_rung, "size": record.size}],
            )

    def resize_bracket(self, bracket: int, size: int) -> None:
        """The search ended before the bracket was full."""
        table = schema.brackets
        with self._transaction() as connection:
            where = (table.c.study == self.study_id) & (table.c.bracket == bracket)
            connection.execute(sa.update(table).where(where).values(size=size))

    def add_trial(self, trial: TrialRecord) -> None:
        with self._transaction() as connection:
            connection.execute(
                sa.insert(schema.trials).values(
                    study=self.study_id,
                    number=trial.number,
                    origin=trial.origin.value,
                    label=trial.label,
                    state=trial.state.value,
                    reason=trial.reason,
                    bracket=trial.bracket,
                    configuration=None if trial.configuration is None else dict(trial.configuration),
                    recipe=trial.recipe.to_json(),
                    recipe_digest=trial.recipe.digest,
                    samples_scored=trial.samples_scored,
                    samples_reused=trial.samples_reused,
                    timings_s=dict(trial.timings_s),
                )
            )
            self._add_event(connection, "trial", {"trial": trial.number, "label": trial.label})

    def record_chunk(self, trial: int, split: Split, result: ScoreResult) -> None:
        """Store a chunk's samples with the evidence of what the engine held, and add its cost to the trial.

        `samples_scored` counts what the search cost; holdout samples are not part of it."""
        evidence = result.evidence
        table = schema.trials
        with self._transaction() as connection:
            evidence_id = connection.execute(
                sa.insert(schema.evidence)
                .values(
                    study=self.study_id,
                    trial=trial,
                    recipe_digest=evidence.recipe_digest,
                    bank_fingerprint=evidence.bank_fingerprint,
                    prompts=dict(evidence.prompts),
                    weights_checksum=evidence.weights_checksum,
                    replica=evidence.replica,
                    swap_count=evidence.swap_count,
                    engine=evidence.engine,
                    timings_s=dict(result.timings_s),
                    num_samples=len(result.samples),
                    finished_at=time.time(),
                )
                .returning(schema.evidence.c.id)
            ).scalar_one()
            self._insert_once(
                connection,
                schema.samples,
                [
                    {
                        "recipe_digest": evidence.recipe_digest,
                        "split": split,
                        "objective": sample.objective,
                        "position": sample.position,
                        "document": sample.document,
                        "value": sample.value,
                        "response": sample.response,
                        "is_truncated": sample.is_truncated,
                        "evidence": evidence_id,
                    }
                    for sample in result.samples
                ],
            )
            where = (table.c.study == self.study_id) & (table.c.number == trial)
            timings = connection.execute(sa.select(table.c.timings_s).where(where)).scalar_one()
            connection.execute(
                sa.update(table)
                .where(where)
                .values(
                    samples_scored=table.c.samples_scored + (len(result.samples) if split == "search" else 0),
                    timings_s=_added(timings, result.timings_s),
                    state=sa.case(
                        (table.c.state == TrialState.WAITING.value, TrialState.RUNNING.value), else_=table.c.state
                    ),
                )
            )

    def finish_rung(
        self, trial: int, rung: RungRecord, *, samples_reused: int, state: TrialState | None = None
    ) -> None:
        """Store a finished rung and the trial's count of reused samples; `state` also ends the trial."""
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
                sa.update(table).where((table.c.study == self.study_id) & (table.c.number == trial)).values(changes)
            )
            self._add_event(
                connection,
                "rung",
                {"trial": trial, "rung": rung.rung, "values": dict(rung.values), "state": state and state.value},
            )

    def finish_trials(self, trials: Sequence[int], state: TrialState, reason: str | None = None) -> None:
        """End trials that get no further rung: PRUNED by a promotion, or FAIL with its reason."""
        table = schema.trials
        with self._transaction() as connection:
            connection.execute(
                sa.update(table)
                .where((table.c.study == self.study_id) & table.c.number.in_(list(trials)))
                .values(state=state.value, reason=reason)
            )
            for trial in trials:
                self._add_event(connection, "trial_state", {"trial": trial, "state": state.value, "reason": reason})

    def set_document_named(self, name: str, document: Any) -> None:
        """Store a closing stage's result, replacing an earlier one."""
        table = schema.documents
        with self._transaction() as connection:
            connection.execute(sa.delete(table).where((table.c.study == self.study_id) & (table.c.name == name)))
            connection.execute(sa.insert(table).values(study=self.study_id, name=name, document=document))
            self._add_event(connection, name, {})

    def add_event(self, kind: str, payload: Mapping[str, Any]) -> None:
        with self._transaction() as connection:
            self._add_event(connection, kind, payload)

    # -- inside a transaction --------------------------------------------------------------------------------------

    def _add_event(self, connection: sa.Connection, kind: str, payload: Mapping[str, Any]) -> None:
        connection.execute(
            sa.insert(schema.events).values(study=self.study_id, time=time.time(), kind=kind, payload=dict(payload))
        )

    def _update_study(self, connection: sa.Connection, **changes: Any) -> None:
        connection.execute(sa.update(schema.studies).where(schema.studies.c.id == self.study_id).values(**changes))

    def _insert_once(self, connection: sa.Connection, table: sa.Table, rows: Sequence[Mapping[str, Any]]) -> None:
        """Insert rows, leaving those whose key is there already as they are."""
        if not rows:
            return
        if self._engine.dialect.name == "postgresql":
            from sqlalchemy.dialects.postgresql import insert
        else:
            from sqlalchemy.dialects.sqlite import insert  # type: ignore[assignment]
        statement = insert(table).on_conflict_do_nothing()
        connection.execute(statement, [{"study": self.study_id, **row} for row in rows])


def _trial_record(row: sa.RowMapping, rungs: tuple[RungRecord, ...]) -> TrialRecord:
    state = TrialState(row["state"])
    is_full = state is TrialState.COMPLETE and bool(rungs)
    return TrialRecord(
        number=row["number"],
        origin=Origin(row["origin"]),
        label=row["label"],
        state=state,
        recipe=Recipe.from_json(row["recipe"]),
        configuration=row["configuration"],
        bracket=row["bracket"],
        reason=row["reason"],
        rungs=rungs,
        samples_scored=row["samples_scored"],
        samples_reused=row["samples_reused"],
        timings_s=row["timings_s"],
        values=rungs[-1].values if is_full else {},
        standard_errors=rungs[-1].standard_errors if is_full else {},
    )


def _added(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    return {name: left.get(name, 0.0) + right.get(name, 0.0) for name in sorted({*left, *right})}


def _prepare_sqlite(connection: Any, _: Any) -> None:
    # Transactions are opened by `_begin`, not by the driver's own guess.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_S * 1000}")
    cursor.close()


def _begin(connection: sa.Connection) -> None:
    # A write transaction that begins by reading fails with "database is locked" when it comes to write, unless it
    # takes the write lock at once. Readers see one snapshot and wait for nobody.
    reads = connection.get_execution_options().get("read_only", False)
    connection.exec_driver_sql("BEGIN" if reads else "BEGIN IMMEDIATE")
