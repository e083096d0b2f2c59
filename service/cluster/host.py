"""Supervision of the Ray cluster of this machine, which runs in a separate process (`service.cluster.local_ray`)."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from service.cluster.local_ray import HOST_FILE, read_host, stop_processes
from service.store.database_url import VARIABLE

__all__ = ["Host"]

logger = logging.getLogger(__name__)


class Host:
    """Starts and supervises the Ray cluster that the server runs on its own machine.

    The cluster runs in a process of its own, which is started again if it dies. The cluster continues when the server
    ends, and the next server uses it. `data_dir` is the server's directory, in which the cluster's address is stored.
    `dashboard_host` and `dashboard_port` are the address and the port of Ray's dashboard; the port None means 8265, or
    the next free port.
    """

    def __init__(self, data_dir: Path, dashboard_host: str, dashboard_port: int | None) -> None:
        self._data_dir = data_dir
        self._arguments = ["--dashboard-host", dashboard_host]
        if dashboard_port is not None:
            self._arguments += ["--dashboard-port", str(dashboard_port)]
        self._process: subprocess.Popen[bytes] | None = None
        self._failures = 0
        self._started_at = 0.0

    @property
    def address(self) -> str | None:
        record = read_host(self._data_dir)
        return record.address if record is not None else None

    @property
    def dashboard_url(self) -> str | None:
        record = read_host(self._data_dir)
        return record.dashboard_url if record is not None else None

    def not_ready(self, *, may_start: bool = True) -> str | None:
        """Start Ray if it is not running, and return the reason why Ray is not ready yet; None if Ray is ready.

        If `may_start` is False, this method does not start Ray, because another server on the machine starts Ray.
        """
        record = read_host(self._data_dir)
        started = self._process.pid if self._process is not None else None
        if record is not None and record.is_alive() and started in (None, record.process):
            self._failures = 0
            return None
        if self._process is not None and self._process.poll() is None:
            return "Ray is being started"
        if not may_start:
            return "Ray is being started by the server that is the leader"
        log_file = self._data_dir / "ray_host.log"
        if self._process is not None:
            self._failures += 1
            wait_s = min(2.0**self._failures, 60.0) - (time.monotonic() - self._started_at)
            if wait_s > 0:
                self._failures -= 1
                return f"Ray ended and is started again in {wait_s:.0f} s; its log is {log_file}"
        if record is not None:
            logger.warning("Ray (process %d) is gone; starting it again", record.process)
            stop_processes(record)
            (self._data_dir / HOST_FILE).unlink(missing_ok=True)
        self._started_at = time.monotonic()
        with log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "service.cluster.local_ray", str(self._data_dir), *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Drivers there find the database in the data directory, also that of a later server.
                env={name: value for name, value in os.environ.items() if name != VARIABLE},
                start_new_session=True,  # Ctrl-C goes to the server, which stops Ray when it shuts down
            )
        return "Ray is being started"

    def stop(self) -> None:
        import psutil

        record = read_host(self._data_dir)
        processes = [record.process] if record is not None and record.is_alive() else []
        if self._process is not None and self._process.poll() is None:
            processes.append(self._process.pid)
        for number in set(processes):
            try:
                process = psutil.Process(number)
                process.terminate()
                process.wait(timeout=20)
            except psutil.TimeoutExpired:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        if record is not None:
            stop_processes(record)
