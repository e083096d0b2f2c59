"""What comes back ends no study: a model that is away, a driver that is stopped, trial actors that hang.

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

import pytest

from search_spaces.study.file import load_study
from service.disk import DATABASE
from service.resolved_study import ResolvedStudy
from service.store import Store
from service.studies.preflight.examine import examine
from service.types import JobState
from tests.deploy.dashboards import DASHBOARDS, load, scraping, without_series
from tests.end_to_end.processes import started
from tests.end_to_end.server import Server, processes_of_ray, serving
from tests.end_to_end.studies import undisturbed, write_small_study
from tests.prometheus import Prometheus
from tests.service.tune.harness import trial_list

ATTEMPT_S = 240.0


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
    """A study survives hanging actors and an absent model; its events report both, and dashboards show them."""
    environment = {
        "FAKE_SCORER": json.dumps({"sample_delay_s": 0.02, "swap_delay_s": 0.01}),
        "FAKE_HEARTBEAT": json.dumps({"SCORING_PATIENCE_S": 8.0, "PATIENCE_CHUNKS": 2, "ENGINE_CHECK_S": 3.0}),
        "FAKE_IN_FLIGHT": "2",
        "RAY_metrics_report_interval_ms": "2000",
    }
    study = load_study(study_file)
    base = Path(study.models.base)
    with serving(["tests.benchmarks.fake_serve"], tmp_path / "data", environment=environment) as server:
        name = server.submit(study.canonical())
        rungs(server, name, 1)
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
        reasons = [str(event["payload"]["because"]) for event in server.events(name) if event["kind"] == "attempt"]
        assert server.stop() == 0
    assert "made no progress" in reasons[1]
    assert "does not exist" in reasons[-1]
    store = Store(f"sqlite:///{tmp_path / 'data' / DATABASE}")
    record = store.job(name)
    assert trial_list(store, name) == undisturbed(study_file, tmp_path / "alone", resolved=ResolvedStudy.of(record))
    store.close()


def dashboards_show_all(prometheus: Prometheus, *, last_s: float) -> None:
    """Every query of every dashboard gave a series, and one of a metric with a wrong name is noticed."""
    for file in DASHBOARDS:
        assert without_series(prometheus, load(file), last_s=last_s) == []
    dashboard = load(DASHBOARDS[0])
    target = dashboard["panels"][-1]["targets"][0]
    target["expr"] = target["expr"].replace("DCGM_FI_DEV_", "DCGM_FI_DEVICE_")
    (missed,) = without_series(prometheus, dashboard, last_s=last_s)
    assert "DCGM_FI_DEVICE_" in missed.expression
    target["expr"] += " )"
    with pytest.raises(AssertionError, match="parse error"):
        without_series(prometheus, dashboard, last_s=last_s)


def stop_outside_transactions(process: int, database: Path) -> None:
    """A process that is stopped in one keeps every writer of an SQLite database waiting until it is killed."""
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
    """Until the study has finished that many more."""
    before = sum(event["kind"] == "rung" for event in server.events(study))
    server.wait_for_events(study, before + number, "rung", timeout_s=ATTEMPT_S)
