"""Logs of a server and of a driver: each line is a JSON object, and no line contains a secret."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.cluster.reconciler import submission_id
from service.disk import DATABASE
from service.errors import Conflict
from service.server import serve
from service.store import Store
from tests.end_to_end.server import Server
from tests.service.api.harness import stored_study
from tests.service.cluster.test_reconciler import Dashboard
from workers.telemetry.logs import VARIABLE

SECRET = "mst_" + "s3cr3t" * 5


def lines_of(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.slow
def test_a_server_logs_json_lines_without_secrets(tmp_path: Path) -> None:
    """A server's whole output is JSON lines, with the job, requests without queries, and no token of a request."""
    (tmp_path / "data").mkdir()
    store, dashboard = Store(f"sqlite:///{tmp_path / 'data' / DATABASE}"), Dashboard()
    job = stored_study(store, name="logged")
    with dashboard.serving() as address:
        environment = {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled", "FAKE_LATE_CHECKS": "1"}
        command = ["tests.benchmarks.fake_serve", "--log-format", "json", "--access-log"]
        server = Server(command, tmp_path / "data", environment=environment)
        try:
            server.start()
            headers = {"Authorization": f"Bearer {SECRET}"}
            httpx.get(f"{server.url}/v1/studies?token={SECRET}", headers=headers, timeout=60)
            deadline = time.monotonic() + 60
            while submission_id(job, 1) not in dashboard.jobs:
                assert time.monotonic() < deadline, server.log
                time.sleep(0.05)
        finally:
            server.end()
            store.close()
    lines = lines_of(server.log)
    (submitted,) = (line for line in lines if line["message"].startswith(f"job {job.id}: submitting"))
    assert (submitted["job"], submitted["level"], submitted["logger"]) == (job.id, "INFO", "service.cluster.reconciler")
    accesses = [line for line in lines if line["logger"] == "uvicorn.access" and line["path"] == "/v1/studies"]
    assert [(line["method"], line["status"]) for line in accesses] == [("GET", 200)]
    assert SECRET not in server.log
    (asked,) = map(json.loads, dashboard.asked)
    assert asked["runtime_env"] == {"env_vars": {VARIABLE: "json"}}


def test_a_driver_logs_json_lines_with_its_job(tmp_path: Path) -> None:
    """A driver's lines have its job; the error with which one ends is a line too."""

    def driver(exit_code: int) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-m", "service.jobs.driver", "--data", str(tmp_path), "--job", "nope"],
            capture_output=True,
            text=True,
            env={**os.environ, VARIABLE: "json"},
        )
        assert done.returncode == exit_code, done.stderr
        return lines_of(done.stderr)[-1]

    ended = driver(1)
    assert ended["message"].startswith("Conflict: database sqlite:///")
    assert "Traceback" in ended["exception"]
    Store(f"sqlite:///{tmp_path / DATABASE}").close()
    refused = driver(0)
    assert refused["job"] == "nope"
    assert "job 'nope': no such job" in refused["message"]


def test_an_unknown_format_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "yaml")
    with pytest.raises(Conflict, match=f"^{VARIABLE}=yaml: no such format of logs; use text or json$"):
        serve(tmp_path)
