"""Reads that servers repeat every second: of jobs that have ended, they fetch only a count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sqlalchemy as sa

from service.api.metrics import Stored
from service.cluster.reconciler import RayCluster
from service.store import Store, jobs, records, schema
from service.store.exports import ExportStore
from service.types import EventKind, ExportRecord, ExportState, JobState
from tests.service.api.harness import stored_study

NUM_ENDED = 500


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    """A store with 500 jobs that ended long ago, each with an event of every kind, and a job that runs."""
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    states = (JobState.COMPLETE, JobState.FAILED)
    names = [f"{number:032x}" for number in range(NUM_ENDED)]
    common = {"name": "ended", "kind": "search", "document": {}, "facts": {}, "created_at": 1.0, "heartbeat_at": 2.0}
    with store.engine.begin() as connection:
        jobs = [{"id": name, "state": states[number % 2].value, **common} for number, name in enumerate(names)]
        connection.execute(sa.insert(schema.studies), jobs)
        events: list[dict[str, Any]] = [
            {"study": name, "time": 1.0, "kind": kind.value, "payload": {}} for name in names for kind in EventKind
        ]
        connection.execute(sa.insert(schema.events), events)
    store.record_submission(stored_study(store).id, 1)
    yield store
    store.close()


@contextmanager
def counted(store: Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Count the jobs that are read completely, and record the queries with their parameters."""
    seen = SimpleNamespace(jobs=0, queries=[])

    def counting(row: sa.RowMapping) -> Any:
        seen.jobs += 1
        return records.job_record(row)

    def keep(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("SELECT"):
            seen.queries.append((statement, parameters))

    sa.event.listen(store.engine, "before_cursor_execute", keep)
    monkeypatch.setattr(jobs, "job_record", counting)
    yield seen
    sa.event.remove(store.engine, "before_cursor_execute", keep)


def scans(store: Store, seen: SimpleNamespace) -> list[str]:
    """SQLite's plans for reading events in the recorded queries."""
    with store.engine.connect() as connection:
        plans = [
            connection.exec_driver_sql(f"EXPLAIN QUERY PLAN {statement}", parameters).all()
            for statement, parameters in seen.queries
        ]
    return [row[3] for plan in plans for row in plan if " events" in row[3]]


def test_a_scrape_reads_few_rows(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(store, monkeypatch) as seen:
        stored = Stored.read(store)
    assert seen.jobs == len(stored.shown) == 1
    assert len(seen.queries) <= 5
    assert stored.counts["search", JobState.COMPLETE] == NUM_ENDED // 2
    counts, waits = scans(store, seen)
    assert "USING COVERING INDEX events_by_kind" in counts
    assert "USING INDEX events_by_kind" in waits  # of the shown jobs alone; their times are in the rows


def test_a_round_over_the_jobs_reads_few_rows(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a round grows with the jobs that have not ended."""
    with store.engine.begin() as connection:
        connection.execute(sa.update(schema.studies).where(schema.studies.c.id < "f").values(state="CANCELLED"))
        connection.execute(sa.update(schema.studies).where(schema.studies.c.name != "ended").values(state="RUNNING"))
    cluster = RayCluster(store, tmp_path, dashboard_host="127.0.0.1", dashboard_port=None)
    info = SimpleNamespace(status=SimpleNamespace(value="RUNNING"), message=None)
    cluster._client = SimpleNamespace(get_job_info=lambda _: info)
    cluster._look_at_jobs(is_leader=True)  # once, cancelled jobs are looked at
    with counted(store, monkeypatch) as seen:
        cluster._look_at_jobs(is_leader=True)
    assert 1 <= seen.jobs <= 3
    assert len(seen.queries) <= 16
    found = scans(store, seen)
    assert found
    assert not [scan for scan in found if "SCAN" in scan]
    assert sum("events_by_kind" in scan for scan in found) >= len(jobs.RESULT_EVENTS)


def test_exports_are_found_by_their_ids(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server looks every two seconds for exports that have not ended, and reads no others."""
    states = [ExportState.COMPLETE] * 20 + [ExportState.WAITING]
    for number, state in enumerate(states):
        ExportStore(store).add_export(ExportRecord(f"e{number}", f"{0:032x}", number, "float32", state, float(number)))
    with counted(store, monkeypatch) as seen:
        assert [record.id for record in ExportStore(store).unfinished_exports()] == ["e20"]
        assert ExportStore(store).export("e7").trial == 7
    assert all("WHERE" in statement for statement, _ in seen.queries)
