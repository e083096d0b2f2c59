"""`mergesearch serve` as a process of its own, and the processes that its studies have on Ray."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.cluster.local_ray import HostRecord, read_host, stop_processes

ROOT = Path(__file__).parents[2]

# Seconds between two requests for `healthz`, for events and for the state: each one costs the server time.
STARTED_POLL_S, EVENTS_POLL_S, ENDED_POLL_S = 0.025, 0.2, 0.3


class Server:
    """A server on a data directory. `start` may be called again after `kill`, and keeps the address."""

    def __init__(
        self,
        command: Sequence[str],
        data_dir: Path,
        *,
        environment: Mapping[str, str] | None = None,
        launcher: Sequence[str] = (),
    ) -> None:
        self.data_dir = data_dir
        self.log_file = data_dir.with_suffix(".log")
        self.url = ""
        self.seconds_to_healthz = 0.0
        # One client for all requests: making one reads the certificates, 30 ms of a core for every poll.
        self._http = httpx.Client(timeout=120)
        # Studies of tests are of the shipped family, with data beside the data directory.
        allowed = [word for directory in (ROOT, data_dir.parent) for word in ("--allow-dir", str(directory))]
        self._command = [*launcher, sys.executable, "-m", *command, "--data", str(data_dir), *allowed]
        outer = {name: os.environ[name] for name in os.environ if name not in ("RAY_ADDRESS", "RAY_AUTH_MODE")}
        self._environment = {**outer, "PYTHONPATH": str(ROOT), **(environment or {})}

    def start(self, *, timeout_s: float = 60.0) -> None:
        """Start the server, and wait until it answers `/healthz`."""
        started = time.monotonic()
        told = len(self.log) if self.log_file.exists() else 0
        with self.log_file.open("a") as log:
            self._process = subprocess.Popen(
                [*self._command, "--port", str(httpx.URL(self.url).port or 0)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self._environment,
            )
        while True:
            assert self._process.poll() is None, self.log
            assert time.monotonic() - started < timeout_s, self.log
            if found := re.search(r"mergesearch: (http://\S+),", self.log[told:]):
                self.url = found[1]
                try:
                    if self._http.get(f"{self.url}/healthz").status_code == 200:
                        break
                except httpx.TransportError:
                    pass
            time.sleep(STARTED_POLL_S)
        self.seconds_to_healthz = time.monotonic() - started

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    @property
    def host(self) -> HostRecord:
        record = read_host(self.data_dir)
        assert record is not None
        return record

    def get(self, path: str) -> Any:
        response = self._http.get(self.url + path)
        assert response.status_code == 200, response.text
        return response.json()

    def submit(self, document: Mapping[str, Any]) -> str:
        """Submit a study, and return its id."""
        response = self._http.post(f"{self.url}/v1/studies", json=document)
        assert response.status_code == 201, response.text
        return str(response.json()["id"])

    def cancel(self, study: str) -> None:
        """Cancel a study; one that has ended stays as it is."""
        self._http.post(f"{self.url}/v1/studies/{study}:cancel")

    def events(self, study: str) -> list[dict[str, Any]]:
        response = self._http.get(f"{self.url}/v1/studies/{study}/events", headers={"Accept": "application/json"})
        assert response.status_code == 200, response.text
        events: list[dict[str, Any]] = response.json()["events"]
        return events

    def wait_for_events(self, study: str, number: int, kind: str, *, timeout_s: float) -> None:
        """Wait until the study has `number` events of that kind."""
        deadline = time.monotonic() + timeout_s
        while sum(event["kind"] == kind for event in self.events(study)) < number:
            assert time.monotonic() < deadline, f"not {number} x {kind} in {timeout_s} s: {self.story(study)}"
            time.sleep(EVENTS_POLL_S)

    def wait_until_ended(self, study: str, *, timeout_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (document := self.get(f"/v1/studies/{study}"))["state"] not in ("COMPLETE", "FAILED", "CANCELLED"):
            assert time.monotonic() < deadline, f"not ended in {timeout_s} s: {self.story(study)}"
            time.sleep(ENDED_POLL_S)
        return dict(document)

    def story(self, study: str) -> str:
        """Events and logs as text, for the message of a failing test."""
        shown = [event for event in self.events(study) if event["kind"] not in ("rung", "trial", "trial_state")]
        ray_log_file = self.data_dir / "ray_host.log"  # of a Ray that the server started
        ray_log = ray_log_file.read_text() if ray_log_file.exists() else ""
        return f"{json.dumps(shown, indent=1)}\n{self.log[-5000:]}\n{ray_log[-3000:]}"

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self, *, timeout_s: float = 60.0) -> int:
        """Stop the server by SIGTERM, and return its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(timeout_s)

    def end(self) -> None:
        """Kill the server and its Ray, if they still run."""
        self._http.close()
        if self._process.poll() is None:
            self.kill()
        record = read_host(self.data_dir)
        if record is not None:
            if record.is_alive():
                psutil.Process(record.process).kill()
            stop_processes(record)


@contextmanager
def serving(
    command: Sequence[str],
    data_dir: Path,
    *,
    environment: Mapping[str, str] | None = None,
    launcher: Sequence[str] = (),
) -> Iterator[Server]:
    """A server that runs until the end of the context; `launcher` are words before its command, such as `nice`."""
    server = Server(command, data_dir, environment=environment, launcher=launcher)
    try:
        server.start()
        yield server
    finally:
        server.end()


@contextmanager
def cancelled_on_failure(server: Server, study: str) -> Iterator[None]:
    """Context that cancels the study if it raises, so that other tests on the same server get the study's place."""
    try:
        yield
    except BaseException:  # those of pytest, such as that of a time limit, are no Exception
        with suppress(httpx.HTTPError):  # the failure is what counts
            server.cancel(study)
        raise


def drivers(study: str) -> list[psutil.Process]:
    """The processes that drive the study."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if study in (line := list(process.info["cmdline"] or ()))
        and any(argument.startswith("service.jobs.") or "fake_job" in argument for argument in line)
        and "python" in Path(line[0]).name
    ]


def processes_of_ray(server: Server, name: str = "") -> list[psutil.Process]:
    """The processes of this server's Ray, those whose command begins with `name`. Others may end meanwhile."""
    found = []
    for child in psutil.Process(server.host.process).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            command = child.cmdline()
            if not name or (command and Path(command[0]).name.startswith(name)):
                found.append(child)
    return found


def replicas(server: Server) -> list[psutil.Process]:
    """The scoring replicas of this server's Ray."""
    return processes_of_ray(server, "ray::ServeReplica")
