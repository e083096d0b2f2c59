"""Prometheus and its promtool, for tests: programs of Debian's package `prometheus`, and a server that scrapes."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

__all__ = ["Prometheus", "program", "running_prometheus"]

START_S = 60.0


def program(name: str) -> str:
    """Path of a program of the package. The test is skipped where it is not installed, and fails there in CI."""
    if (found := shutil.which(name)) is not None:
        return found
    missing = f"{name} is not installed (Debian: apt-get install prometheus)"
    if os.environ.get("CI"):
        pytest.fail(missing)
    pytest.skip(missing)


class Prometheus:
    """A client of the Prometheus at `url`."""

    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=url, timeout=120)

    def num_series(self, expression: str, *, last_s: float) -> int:
        """Number of series that an expression gave within the last seconds, as a graph shows them.

        Raises AssertionError with what Prometheus says if it refuses the expression.
        """
        now = time.time()
        params: dict[str, str | float] = {"query": expression, "start": now - last_s, "end": now, "step": 1}
        answer = self._http.get("/api/v1/query_range", params=params).json()
        assert answer["status"] == "success", f"{expression}: {answer['error']}"
        return len(answer["data"]["result"])

    def is_ready(self) -> bool:
        try:
            return self._http.get("/-/ready").status_code == 200
        except httpx.TransportError:
            return False


@contextmanager
def running_prometheus(directory: Path, configuration: Mapping[str, Any]) -> Iterator[Prometheus]:
    """A Prometheus with its configuration and data in `directory`, on a free port of this machine."""
    file, log_file = directory / "prometheus.yml", directory / "prometheus.log"
    file.write_text(yaml.safe_dump(dict(configuration)))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [
        program("prometheus"),
        f"--config.file={file}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address={address}",
    ]
    with log_file.open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log) as process:
        try:
            found, deadline = Prometheus(f"http://{address}"), time.monotonic() + START_S
            while not found.is_ready():
                assert process.poll() is None, log_file.read_text()
                assert time.monotonic() < deadline, log_file.read_text()
                time.sleep(0.05)
            yield found
        finally:
            process.send_signal(signal.SIGKILL)
