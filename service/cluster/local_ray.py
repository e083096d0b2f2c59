"""A Ray cluster of one machine in a separate process: `python -m service.cluster.local_ray DATA_DIR`.

`mergesearch serve` starts such a process if RAY_ADDRESS names no cluster. The cluster outlives a server that is killed,
so jobs continue, and the next server finds the cluster by a file in DATA_DIR. The cluster ends when no server has used
DATA_DIR for 600 s. If one of Ray's processes dies, the other processes are stopped at once, because an incomplete
cluster does no work and raises no error.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from service.cluster.session import start_ray
from service.disk import LOCK_FILE
from workers.merging.node import remove_leftovers
from workers.telemetry import logs

__all__ = ["HOST_FILE", "HostRecord", "end_children", "read_host", "stop_processes"]

HOST_FILE = "ray.json"
ORPHANED_AFTER_S = 600.0
POLL_S = 0.5

# Seconds within which killed processes have ended; the memory of an engine is returned in a few.
KILLED_S = 10.0

# Without these a cluster does no work. Jobs are submitted through the dashboard.
VITAL = ("gcs_server", "raylet", "dashboard")

# Ray's workers and agents are called ray::NAME, the parts of its dashboard ray-dashboard-NAME.
TITLES = ("ray::", "ray-dashboard-")

# Ray's programs are among the first words of a command: "gcs_server ...", "python -u dashboard/agent.py ...".
PROGRAM_ARGUMENTS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostRecord:
    """Record of a Ray cluster that runs on this machine for a server, as stored in the server's data directory.

    `process` is the id of the cluster's main process, and `started_at` is its start time in seconds since the epoch.
    `address` is the address to which Ray drivers connect. `dashboard_url` is the address for browsers and for the
    submission of Ray Jobs. `session_dir` is Ray's directory for the files of this cluster.
    """

    process: int
    started_at: float
    address: str
    dashboard_url: str
    session_dir: str

    def is_alive(self) -> bool:
        """Whether the cluster's main process still runs. A later process with the same id does not count."""
        try:
            process = psutil.Process(self.process)
            is_same = abs(process.create_time() - self.started_at) < 1.0
            return bool(is_same and process.status() != psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return False


def read_host(data_dir: Path) -> HostRecord | None:
    """Read the address and process of the Ray cluster last started for the server with the data directory `data_dir`.

    The cluster may have ended since. Returns None if the data directory has no readable file about it.
    """
    try:
        return HostRecord(**json.loads((data_dir / HOST_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def stop_processes(record: HostRecord) -> None:
    """Kill every process of the Ray cluster of this machine that `record` describes.

    These processes are killed:

    - the cluster's main process
    - Ray's programs whose command names the cluster's session directory
    - Ray's workers with open files in the session directory
    - all processes that any of these started, such as Ray Jobs

    Other processes that read files of the session, such as a user's `tail -f`, are not killed.
    """
    doomed = [
        process
        for process in psutil.process_iter()
        if _is_of_session(process, record.session_dir) or (process.pid == record.process and record.is_alive())
    ]
    for process in list(doomed):  # all are found before any is killed: children of a dead process cannot be found
        with contextlib.suppress(psutil.Error):
            doomed += process.children(recursive=True)
    for process in doomed:
        with contextlib.suppress(psutil.Error):
            process.kill()


def _is_of_session(process: psutil.Process, session_dir: str) -> bool:
    """Whether `process` belongs to the Ray cluster with the session directory `session_dir`.

    A worker of Ray, which is recognised by its title, belongs to the cluster if it has files in the directory open.
    Another program of Ray belongs to the cluster if its command names the directory.
    """
    try:
        command = process.cmdline()
        if command and command[0].startswith(TITLES):
            return any(Path(file.path).is_relative_to(session_dir) for file in process.open_files())
        is_rays = any(Path(argument).is_relative_to(_ray_dir()) for argument in command[:PROGRAM_ARGUMENTS])
        names = re.compile(re.escape(session_dir) + r"(?![\w.-])")
        return is_rays and any(names.search(argument) for argument in command)
    except psutil.Error:
        return False


@functools.cache
def _ray_dir() -> Path:
    """Directory of the installed Python package Ray, by which Ray's programs are recognised."""
    specification = importlib.util.find_spec("ray")
    assert specification is not None
    assert specification.origin is not None
    return Path(specification.origin).parent


def _let_agents_choose_ports() -> None:
    """Make Ray's dashboard agent, which receives jobs, listen at any free port instead of 52365.

    The default port may be taken by another Ray on the machine, perhaps one that is still shutting down. An agent whose
    port is taken receives no jobs and reports no error. `ray.init` has no argument for the port (Ray 2.60), so the
    default of Ray's own parameters is changed.
    """
    from ray._private.parameter import RayParams

    original = RayParams.__init__

    @functools.wraps(original)
    def with_any_port(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{"dashboard_agent_listen_port": 0, **kwargs})

    RayParams.__init__ = with_any_port


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m service.cluster.local_ray", description=__doc__)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--dashboard-host", default="127.0.0.1")
    parser.add_argument("--dashboard-port", type=int)
    options = parser.parse_args()
    logs.log_to_stderr()
    _let_agents_choose_ports()
    context = start_ray(dashboard_host=options.dashboard_host, dashboard_port=options.dashboard_port)
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):  # Ray's own handlers end this process at once
        signal.signal(number, lambda *_: stopping.set())
    me = psutil.Process()
    record = HostRecord(
        process=me.pid,
        started_at=me.create_time(),
        address=context.address_info["gcs_address"],
        dashboard_url=f"http://{context.dashboard_url}",
        session_dir=context.address_info["session_dir"],
    )
    temporary = options.data_dir / f"{HOST_FILE}.new"
    temporary.write_text(json.dumps(asdict(record)))
    temporary.replace(options.data_dir / HOST_FILE)
    logger.info("Ray at %s, dashboard %s", record.address, record.dashboard_url)
    vital = [child for child in me.children(recursive=True) if _is_vital(child)]
    reason = _watch(vital, stopping, options.data_dir)
    logger.info("stopping Ray: %s", reason)
    end_children(me)
    os._exit(0 if stopping.is_set() else 1)  # Ray's exit handlers would wait for processes that have ended


def end_children(process: psutil.Process) -> None:
    """Kill all that `process` has started, and remove the source weights that engines among it have left."""
    children = process.children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    deadline = time.monotonic() + KILLED_S
    while not all(map(_is_dead, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    remove_leftovers()


def _is_vital(process: psutil.Process) -> bool:
    try:
        return any(name in process.name() or name in " ".join(process.cmdline()[:3]) for name in VITAL)
    except psutil.NoSuchProcess:
        return False


def _is_dead(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _watch(vital: list[psutil.Process], stopping: threading.Event, data_dir: Path) -> str:
    """Wait until the Ray cluster of this process fails or is no longer needed, and return the reason.

    The cluster has failed if one of the processes `vital` has died. The cluster is no longer needed if `stopping` is
    set, or if no server has used `data_dir`, a server's data directory, for 600 s.
    """
    served_at = time.monotonic()
    while not stopping.wait(POLL_S):
        if dead := [process.pid for process in vital if _is_dead(process)]:
            return f"one of Ray's processes ({dead[0]}) has died"
        if _is_served(data_dir):
            served_at = time.monotonic()
        elif time.monotonic() - served_at > ORPHANED_AFTER_S:
            return f"no server has used {data_dir} for {ORPHANED_AFTER_S:.0f} s"
    return "asked to"


def _is_served(data_dir: Path) -> bool:
    """Whether a server uses the data directory `data_dir`.

    A server uses the directory if the process that last locked it still runs.
    """
    try:
        return bool(psutil.pid_exists(int((data_dir / LOCK_FILE).read_text())))
    except (OSError, ValueError):
        return False


if __name__ == "__main__":
    sys.exit(main())
