"""The server's metrics: what they say of jobs, when they leave, and how they are named."""

from __future__ import annotations

import subprocess
from pathlib import Path

import httpx
import pytest

import service.api.metrics
from service.api.metrics import METRICS
from service.jobs.heartbeat import ENGINE
from service.types import EventKind, JobState
from tests.postgresql import PostgreSQL
from tests.prometheus import program
from tests.service.api.harness import ApiServer, finished_study, stored_finetune, stored_study


def samples(http: httpx.Client) -> dict[str, float]:
    """The value of each series, by its name and labels, without the labels that all metrics of jobs have."""
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def of(job: str, *, kind: str = "search", name: str = "math-text-lookup", **labels: str) -> str:
    """The labels of a job's metrics, as they are written."""
    return ",".join(f'{key}="{value}"' for key, value in {"study": job, "name": name, "kind": kind, **labels}.items())


def test_metrics_tell_of_a_study(http: httpx.Client, server: ApiServer) -> None:
    job = finished_study(server.store)
    seen = samples(http)
    assert seen['mergesearch_jobs{kind="search",state="COMPLETE"}'] == 1
    assert seen[f"mergesearch_job_state{{{of(job.id, state='COMPLETE')}}}"] == 1
    assert seen[f"mergesearch_job_progress_timestamp_seconds{{{of(job.id)}}}"] == pytest.approx(job.created_at)
    assert seen[f"mergesearch_job_drivers_total{{{of(job.id)}}}"] == 1
    assert seen[f"mergesearch_job_wall_clock_seconds{{{of(job.id)}}}"] == 312.4
    assert seen[f"mergesearch_study_samples_scored_total{{{of(job.id)}}}"] == 100
    assert seen[f"mergesearch_study_samples_planned{{{of(job.id)}}}"] == 100
    assert seen[f"mergesearch_study_trials{{{of(job.id, state='COMPLETE')}}}"] == 21
    assert seen[f"mergesearch_study_trials_planned{{{of(job.id)}}}"] == 21


def test_gpu_seconds_count_all_gpus_of_all_engines(http: httpx.Client, server: ApiServer) -> None:
    """GPU seconds are wall-clock seconds times replicas times GPUs of each, as the limit counts them."""
    job = stored_study(server.store)
    writer = server.store.open_attempt(job.id)
    engine = {**job.document["engine"], "replicas": 3, "tensor_parallel_size": 2}
    writer.set_document({**job.document, "engine": engine})
    writer.heartbeat(wall_clock_s=50.0)
    assert samples(http)[f"mergesearch_study_gpu_seconds{{{of(job.id)}}}"] == 300


def test_setbacks_are_counted_by_their_event(http: httpx.Client, server: ApiServer) -> None:
    job = stored_study(server.store)
    writer = server.store.open_attempt(job.id)
    for kind in (EventKind.CRASH, EventKind.CRASH, EventKind.REPLICA):
        writer.add_event(kind, {})
    writer.set_waiting("models/base: does not exist")
    other = stored_finetune(server.store)
    seen = samples(http)
    assert {
        event: seen[f"mergesearch_job_setbacks_total{{{of(job.id, event=event)}}}"]
        for event in ("crash", "waiting", "database")
    } == {"crash": 2, "waiting": 1, "database": 0}
    assert seen[f"mergesearch_job_setbacks_total{{{of(other.id, kind='finetune', name='family', event='crash')}}}"] == 0
    assert not any(name.startswith("mergesearch_job_setbacks_total") and "replica" in name for name in seen)


def test_waiting_for_an_engine_ends_with_the_job(http: httpx.Client, server: ApiServer) -> None:
    writer = server.store.open_attempt(stored_study(server.store).id)
    name = f"mergesearch_job_waits_for_workers{{{of(writer.job_id)}}}"
    for waiting_for, value in (("its next driver: no disk", 0), (ENGINE, 1)):
        writer.heartbeat(wall_clock_s=1.0, idle_s=0.5, patience_s=300.0, waiting_for=waiting_for)
        assert samples(http)[name] == value
    progressed_at = pytest.approx(server.store.job(writer.job_id).progressed_at, abs=0.001)
    assert samples(http)[f"mergesearch_job_progress_timestamp_seconds{{{of(writer.job_id)}}}"] == progressed_at
    assert samples(http)[f"mergesearch_job_patience_seconds{{{of(writer.job_id)}}}"] == 300
    writer.set_state(JobState.CANCELLED)
    assert samples(http)[name] == 0


def test_a_failed_check_of_an_engine_is_counted(http: httpx.Client, server: ApiServer) -> None:
    writer = server.store.open_attempt(stored_study(server.store).id)
    assert samples(http)["mergesearch_engine_faults_total"] == 0
    writer.record_engine_fault("replica-1", 2, "the canary failed")
    assert samples(http)["mergesearch_engine_faults_total"] == 1


def test_ended_jobs_leave_an_hour_later(http: httpx.Client, server: ApiServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job that has ended keeps its metrics for an hour, one that has not keeps them; all jobs are counted."""
    ended, waits = finished_study(server.store), stored_study(server.store)
    assert any(ended.id in name for name in samples(http))
    monkeypatch.setattr(service.api.metrics, "SHOWN_AFTER_END_S", 0.0)
    seen = samples(http)
    assert not any(ended.id in name for name in seen)
    assert any(waits.id in name for name in seen)
    assert seen['mergesearch_jobs{kind="search",state="COMPLETE"}'] == 1


def test_the_disk_is_that_of_the_data_directory(http: httpx.Client) -> None:
    seen = samples(http)
    assert 0 < seen["mergesearch_data_free_bytes"] < seen["mergesearch_data_size_bytes"]


def test_without_the_database_the_rest_is_told(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """While the database is away, metrics are answered without those of jobs, and say so."""
    url = postgresql.migrated()
    with ApiServer(tmp_path, database=url) as server, httpx.Client(base_url=server.url, timeout=60) as http:
        assert samples(http)["mergesearch_database_up"] == 1
        postgresql.kill()
        seen = samples(http)
        assert seen["mergesearch_database_up"] == 0
        assert "mergesearch_data_free_bytes" in seen
        assert not any(name.startswith(("mergesearch_job", "mergesearch_engine")) for name in seen)
        postgresql.start()
        assert samples(http)["mergesearch_database_up"] == 1
    postgresql.drop(url)


def test_names_follow_prometheus_conventions(http: httpx.Client, server: ApiServer) -> None:
    """Promtool has nothing to say against the names, and says something against a wrong one."""
    finished_study(server.store)
    text = http.get("/metrics").text
    assert {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")} == {m.name for m in METRICS}
    assert said_against(text) == ""
    wrong = text.replace("mergesearch_job_drivers_total", "mergesearch_job_drivers")
    assert 'counter metrics should have "_total" suffix' in said_against(wrong)


def said_against(text: str) -> str:
    checked = subprocess.run([program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True)
    return checked.stdout + checked.stderr
