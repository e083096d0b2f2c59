"""The server's metrics: their values for jobs, their removal, and their names."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import httpx
import pytest
import sqlalchemy as sa
from fastapi import APIRouter

import service.api.metrics
from service.api.metrics import METRICS
from service.api.permissions import open_to_all
from service.api.request_counter import BOUNDS_S, Histogram
from service.cluster.queue import Choice, Reason, Waiting
from service.cluster.reconciler import QueueState
from service.jobs.heartbeat import ENGINE
from service.store import Store, schema
from service.store.steering import SteeringStore
from service.types import EventKind, JobState, Steering
from tests.postgresql import PostgreSQL
from tests.prometheus import program
from tests.service.api.harness import ApiServer, finished_study, snapshot, stored_finetune, stored_study
from tests.service.synthetic_run import run_record


def samples(http: httpx.Client) -> dict[str, float]:
    """The value of each series, by its name and labels, without the labels that all metrics of jobs have."""
    lines = [line.rpartition(" ") for line in http.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def of(job: str, *, kind: str = "search", name: str = "math-text-lookup", **labels: str) -> str:
    """Labels of a job's metrics, in Prometheus's text format."""
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


def test_steps_are_counted_where_a_searcher_makes_some(http: httpx.Client, server: ApiServer) -> None:
    """A study without steps has no series of them, nor has one of an earlier version, which reported none."""
    writers = [server.store.open_attempt(stored_study(server.store).id) for _ in range(3)]
    progress = snapshot(run_record(num_trials=4)).to_json()
    without = {key: value for key, value in progress.items() if not key.startswith("steps")}
    for writer, steps in zip(writers, ({"steps": 12, "steps_planned": 60}, {}, None), strict=True):
        writer.heartbeat(wall_clock_s=1.0, progress=without if steps is None else {**progress, **steps})
    seen = {name: value for name, value in samples(http).items() if "_study_steps_" in name}
    of_first = of(writers[0].job_id)
    assert seen == {
        f"mergesearch_study_steps_total{{{of_first}}}": 12,
        f"mergesearch_study_steps_planned{{{of_first}}}": 60,
    }


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


def test_the_queue_is_counted_by_what_jobs_wait_for(http: httpx.Client, server: ApiServer) -> None:
    """Running jobs wait for nothing; reasons that no job has are 0."""
    waiting = {"a": Waiting(1, Reason.PLACE), "b": Waiting(2, Reason.QUOTA), "c": Waiting(3, Reason.PLACE)}
    server.cluster.state = QueueState(3, ("d", "e", "f"), Choice(waiting=waiting))
    seen = samples(http)
    assert seen["mergesearch_queue_places"] == 3
    reasons = ("nothing", "place", "room", "quota")
    assert [seen[f'mergesearch_queue_jobs{{waits_for="{reason}"}}'] for reason in reasons] == [3, 2, 0, 1]


def test_latencies_are_counted_by_route_and_status_class(http: httpx.Client, server: ApiServer) -> None:
    """Each request is in one histogram of its route's template, method and class of status; 404 and 422 are one."""
    job = stored_study(server.store)
    for path in (job.id, job.id, "nowhere", "other"):
        http.get(f"/v1/studies/{path}")
    http.get(f"/v1/studies/{job.id}/trials?limit=no")
    seen = samples(http)
    name, route = "mergesearch_http_request_seconds", "/v1/studies/{study_id}"
    of_route = {key: value for key, value in seen.items() if key.startswith(name) and f'route="{route}"' in key}
    labels = {status: f'method="GET",route="{route}",status="{status}"' for status in ("2xx", "4xx")}
    assert of_route[f"{name}_count{{{labels['2xx']}}}"] == 2
    assert of_route[f"{name}_count{{{labels['4xx']}}}"] == 2
    assert of_route[f'{name}_bucket{{{labels["2xx"]},le="+Inf"}}'] == 2
    buckets = [of_route[f'{name}_bucket{{{labels["2xx"]},le="{bound}"}}'] for bound in BOUNDS_S]
    assert buckets == sorted(buckets)
    assert 0 < of_route[f"{name}_sum{{{labels['2xx']}}}"] < 60
    assert len(of_route) == 2 * (len(BOUNDS_S) + 3), "a path is not a label"


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert (histogram.cumulative, histogram.sum) == ((2, 3, 4), 12.0)


def test_an_event_stream_has_no_latency(http: httpx.Client, server: ApiServer) -> None:
    """An open stream is counted while it is open, as a request, and in no histogram of latencies."""
    job = stored_study(server.store)
    route = 'route="/v1/studies/{study_id}/events"'
    with httpx.stream("GET", f"{server.url}/v1/studies/{job.id}/events", timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        seen = samples(http)
        assert seen["mergesearch_http_streams"] == 1
        assert seen[f'mergesearch_http_requests_total{{method="GET",{route},status="200"}}'] == 1
        server.store.open_attempt(job.id).set_state(JobState.COMPLETE)
        assert "event: end" in list(lines)
    seen = samples(http)
    assert seen["mergesearch_http_streams"] == 0
    assert not any(name.startswith("mergesearch_http_request_seconds") and route in name for name in seen)


def test_an_unexpected_error_counts_as_500(server: ApiServer) -> None:
    """A route that raises something unforeseen is counted, although its answer is sent outside of the middleware."""
    router = APIRouter()

    @router.get("/broken", dependencies=[open_to_all()])
    def broken() -> None:
        raise AssertionError("planned")

    server.app.include_router(router)
    with httpx.Client(base_url=server.url, timeout=60) as http:
        broken_answer = http.get("/broken")
        assert broken_answer.status_code == 500
        assert broken_answer.headers["connection"] == "close", "the server closes it: clients open another one"
        seen = samples(http)
    assert seen['mergesearch_http_requests_total{method="GET",route="/broken",status="500"}'] == 1
    assert seen['mergesearch_http_request_seconds_count{method="GET",route="/broken",status="5xx"}'] == 1


def test_jobs_wait_until_a_driver_has_them(http: httpx.Client, server: ApiServer) -> None:
    """A job waits from its creation to its driver, and again after it was resumed; a paused one does not wait."""
    store, job = server.store, stored_study(server.store)
    own = f"mergesearch_job_wait_seconds{{{of(job.id)}}}"

    def waiting() -> tuple[float, float]:
        seen = samples(http)
        kind = 'kind="search"'
        return seen[f"mergesearch_jobs_waiting{{{kind}}}"], seen[f"mergesearch_jobs_oldest_wait_seconds{{{kind}}}"]

    assert samples(http)['mergesearch_jobs_waiting{kind="finetune"}'] == 0
    pause(0.1)
    number, oldest_s = waiting()
    assert number == 1
    assert oldest_s >= 0.1
    assert samples(http)[own] >= oldest_s
    writer = store.open_attempt(job.id, as_driver=True)
    waited_s = samples(http)[own]
    assert waiting() == (0, 0.0)
    assert samples(http)[own] == waited_s >= 0.1, "the wait has ended"
    store.open_attempt(job.id, as_driver=True)
    assert samples(http)[own] == waited_s, "a driver that replaces another does not count"

    SteeringStore(store).pause(job.id, steering=Steering("pause"))
    SteeringStore(store).settle(job.id)
    set_heartbeat(store, job.id, 0.0)
    assert waiting() == (0, 0.0)
    SteeringStore(store).resume(job.id, reason="resumed by request")
    number, oldest_s = waiting()
    assert number == 1
    assert oldest_s < 60
    assert samples(http)[own] < 60
    writer = store.open_attempt(job.id, as_driver=True)
    writer.set_state(JobState.FAILED)
    assert waiting() == (0, 0.0)


def test_a_job_without_its_driver_waits_since_its_heartbeat(http: httpx.Client, server: ApiServer) -> None:
    job = stored_study(server.store)
    server.store.open_attempt(job.id, as_driver=True)
    set_heartbeat(server.store, job.id, server.store.now() - 100)
    assert samples(http)['mergesearch_jobs_oldest_wait_seconds{kind="search"}'] < 100
    with server.store._engine.begin() as connection:
        connection.execute(sa.update(schema.studies).values(created_at=0.0))
        connection.execute(sa.update(schema.events).values(time=0.0))
    assert samples(http)['mergesearch_jobs_oldest_wait_seconds{kind="search"}'] == pytest.approx(100, abs=50)


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def set_heartbeat(store: Store, job_id: str, time_s: float) -> None:
    with store._engine.begin() as connection:
        connection.execute(sa.update(schema.studies).where(schema.studies.c.id == job_id).values(heartbeat_at=time_s))


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
