"""Transient faults end no study: a model that is away, a stopped driver, trial actors that hang.

Server, Ray, its jobs, Serve and the store are real; fakes score.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from search_spaces.study.file import load_study
from service.disk import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.studies.preflight.examine import examine
from service.types import JobState
from tests.deploy.dashboards import DASHBOARDS, load, scraping, without_series
from tests.end_to_end.processes import started
from tests.end_to_end.ray_dashboard import check_ray_dashboard
from tests.end_to_end.server import Server, processes_of_ray, serving
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.otlp_receiver import OtlpReceiver, ReceivedSpan, otlp_receiver
from tests.prometheus import Prometheus
from tests.service.tune.harness import trial_list

ATTEMPT_S = 240.0
# A driver whose actors hang is replaced after 8 s, or after twice the time of its longest chunk.
PATIENCE = {"SCORING_PATIENCE_S": 8.0, "PATIENCE_FACTOR": 0.1, "PATIENCE_CHUNKS": 2, "ENGINE_CHECK_S": 3.0}


@pytest.fixture
def study_file(tmp_path: Path) -> Path:
    directory = tmp_path / "study"
    directory.mkdir()
    return write_small_study(directory, name="faults", rungs=[12, 36], max_trials=9)


def until(condition: Callable[[], Any], *, timeout_s: float = ATTEMPT_S, story: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, story()
        time.sleep(0.05)
    return found


@pytest.mark.timeout(900)
def test_replaced_driver_writes_nothing(
    study_file: Path, tmp_path: Path, ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A driver that was stopped and replaced ends when it continues, and writes nothing."""
    monkeypatch.setenv("FAKE_SCORER", json.dumps({"sample_delay_s": 0.004}))
    monkeypatch.setenv("FAKE_IN_FLIGHT", "1")
    data = tmp_path / "data"
    data.mkdir()
    store = Store(f"sqlite:///{data / DATABASE}")
    study = load_study(study_file)
    record = store.create_job(
        kind="search", name=study.name, document=study.canonical(), accepted=examine(study).resolved().to_json()
    )
    command: list[str | Path] = [sys.executable, "-m", "tests.benchmarks.fake_job", "--data", data, "--job", record.id]
    command += ["--ray-address", ray_address]
    with started(command, directory=tmp_path / "first", ray_address=ray_address) as first:
        until(lambda: len(store.evidence(record.id)) >= 3, story=lambda: first.log)
        stop_outside_transactions(first.pid, data / DATABASE)
        with started(command, directory=tmp_path / "second", ray_address=ray_address) as second:
            assert second.wait(timeout_s=ATTEMPT_S) == 0, second.log
        ended = store.job(record.id), store.events(record.id), store.evidence(record.id)
        assert ended[0].state is JobState.COMPLETE
        os.kill(first.pid, signal.SIGCONT)
        assert first.wait(timeout_s=60.0) == 0, first.log
        assert "attempt 1 may not write, attempt 2 has taken over" in first.log
    assert (store.job(record.id), store.events(record.id), store.evidence(record.id)) == ended
    assert trial_list(store, record.id) == undisturbed(
        study_file, tmp_path / "alone", resolved=ResolvedStudy.of(record)
    )
    store.close()


@pytest.mark.timeout(900)
def test_hanging_actors_and_absent_model(study_file: Path, tmp_path: Path) -> None:
    """A study survives hanging actors and an absent model; events, dashboards, traces and logs show it.

    Then Ray's own dashboard is at the server, and changes nothing.
    """
    environment = {
        "FAKE_SCORER": json.dumps({"sample_delay_s": 0.02, "swap_delay_s": 0.01}),
        "FAKE_HEARTBEAT": json.dumps(PATIENCE),
        "FAKE_TUNE": json.dumps({"CHUNK_GRACE_S": 5.0}),  # the driver is asked to end while its actors hang
        "FAKE_IN_FLIGHT": "2",
        "FAKE_LATE_CHECKS": "1",
        "RAY_metrics_report_interval_ms": "2000",
        "MERGESEARCH_LOG_FORMAT": "json",
    }
    study = load_study(study_file)
    base = Path(study.models.base)
    with (
        otlp_receiver() as receiver,
        serving(
            ["tests.benchmarks.fake_serve"],
            tmp_path / "data",
            environment={**environment, "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url, "OTEL_BSP_SCHEDULE_DELAY": "500"},
        ) as server,
    ):
        name = server.submit(study.canonical())
        rungs(server, name, 1)
        receiver.wait(lambda: complete_phases(receiver))  # actors that are killed send no spans any more
        with scraping(server, tmp_path / "prometheus") as prometheus:
            started_at = time.monotonic()
            for actor in processes_of_ray(server, "ray::EvaluationTrainable"):
                actor.suspend()
            shutil.move(base, tmp_path / "unmounted")
            server.wait_for_events(name, 1, "waiting", timeout_s=ATTEMPT_S)
            waits = server.get(f"/v1/studies/{name}")
            assert waits["waiting_for"].startswith(("its next driver", "its driver to start"))
            assert f"{base}: does not exist" in waits["reason"]
            shutil.move(tmp_path / "unmounted", base)

            ended = server.wait_until_ended(name, timeout_s=ATTEMPT_S)
            dashboards_show_all(prometheus, last_s=time.monotonic() - started_at)
        assert ended["state"] == "COMPLETE", server.story(name)
        assert ended["waiting_for"] is None
        check_ray_dashboard(server, name, tmp_path / "browser")
        reasons = [str(event["payload"]["because"]) for event in server.events(name) if event["kind"] == "attempt"]
        check_traces(receiver, name, num_drivers=len(reasons))
        check_logs(server, name)
        assert server.stop() == 0
    assert "made no progress" in reasons[1]
    assert "does not exist" in reasons[-1]
    store = Store(f"sqlite:///{tmp_path / 'data' / DATABASE}")
    record = store.job(name)
    assert trial_list(store, name) == undisturbed(study_file, tmp_path / "alone", resolved=ResolvedStudy.of(record))
    store.close()


def complete_phases(receiver: OtlpReceiver) -> list[list[ReceivedSpan]]:
    """The three nearest ancestors of each scored chunk of which all were received."""
    ancestors = [receiver.parents(phase, 3) for phase in receiver.named("generate and score")]
    return [found for found in ancestors if len(found) == 3]


def check_traces(receiver: OtlpReceiver, study: str, *, num_drivers: int) -> None:
    """Check that each span of a replica leads to the study's submission, through chunk, trial and a driver."""
    (request,) = receiver.named("POST /v1/studies")
    assert request.attributes["mergesearch.job"] == study
    drivers = receiver.named("driver")
    attempts = sorted(int(driver.attributes["mergesearch.attempt"]) for driver in drivers)
    assert attempts == sorted(set(attempts)), "one span a driver"
    # On a busy machine a driver may be replaced before its imports end; its span then never began.
    assert {1, num_drivers} <= set(attempts) <= {*range(1, num_drivers + 1)}
    assert {receiver.parent_of(driver) for driver in drivers} == {request}
    assert {receiver.parent_of(span) for span in receiver.named("submit driver")} == {request}
    complete = complete_phases(receiver)
    assert len(complete) > 10
    used = set()
    for found in complete:
        assert [span.name for span in found] == ["score", "chunk", "trial"]
        assert [span.process["mergesearch.process"] for span in found] == ["replica", "trial actor", "driver"]
        assert {span.attributes["mergesearch.job"] for span in found} == {study}
        used.add(receiver.linked_by(found[-1]))
    assert used <= set(drivers)
    assert len(used) >= 2


def check_logs(server: Server, study: str) -> None:
    """Check the logs: lines are JSON and name the job; those of replicas name the trial."""
    for line in server.log.splitlines():
        assert json.loads(line)["logger"], line
    written = httpx.get(f"{server.url}/v1/studies/{study}/log", timeout=60).text.splitlines()
    of_drivers = [json.loads(line) for line in written if line.startswith("{")]
    prepared = [line for line in of_drivers if line["message"].startswith("The models are unchanged")]
    assert {line["job"] for line in prepared} == {study}
    assert len({line["attempt"] for line in prepared}) == len(prepared) >= 2
    assert all(line["trace"] for line in prepared)
    found = [
        json.loads(line)
        for file in (Path(server.host.session_dir) / "logs").glob("worker-*.err")
        for line in file.read_text(errors="replace").splitlines()
        if '"workers.serving.replica"' in line
    ]
    assert found
    assert all(line["job"] == study and isinstance(line["trial"], int) for line in found)


def dashboards_show_all(prometheus: Prometheus, *, last_s: float) -> None:
    """Check that every query of every dashboard gives a series, and that a wrong metric's name is noticed.

    Those of steps give none: the study's searcher makes no steps.
    """
    for file in DASHBOARDS:
        missing = without_series(prometheus, load(file), last_s=last_s)
        assert [query for query in missing if "mergesearch_study_steps_" not in query.expression] == []
    dashboard = load(DASHBOARDS[0])
    target = dashboard["panels"][-1]["targets"][0]
    target["expr"] = target["expr"].replace("DCGM_FI_DEV_", "DCGM_FI_DEVICE_")
    (missed,) = without_series(prometheus, dashboard, last_s=last_s)
    assert "DCGM_FI_DEVICE_" in missed.expression
    target["expr"] += " )"
    with pytest.raises(AssertionError, match="parse error"):
        without_series(prometheus, dashboard, last_s=last_s)


def stop_outside_transactions(process: int, database: Path) -> None:
    """Stop a process while it holds no transaction of the SQLite database, which would block all writers."""
    connection = sqlite3.connect(database, timeout=0.0, isolation_level=None)
    is_stopped = False
    while not is_stopped:
        os.kill(process, signal.SIGSTOP)
        try:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")
            is_stopped = True
        except sqlite3.OperationalError:
            os.kill(process, signal.SIGCONT)
            time.sleep(0.01)
    connection.close()


def rungs(server: Server, study: str, number: int) -> None:
    """Wait until the study has finished `number` more rungs."""
    before = sum(event["kind"] == "rung" for event in server.events(study))
    server.wait_for_events(study, before + number, "rung", timeout_s=ATTEMPT_S)
