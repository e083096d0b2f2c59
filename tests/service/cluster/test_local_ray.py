"""The stop of a local Ray ends all its processes and no other; real processes stand in for Ray's and a user's."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
import ray

from service.cluster.local_ray import HostRecord, end_children, stop_processes
from workers.merging.node import SharedDirectory

# Starts another process as Ray's supervisor starts a job, says which, and waits.
SCRIPT = "sleep 120 & echo $!; wait"


class Processes:
    """Processes of a test; the fixture ends them all."""

    def __init__(self, session_dir: Path) -> None:
        self.session_dir = session_dir
        self.log = session_dir / "logs" / "worker.log"
        self._all: list[psutil.Process] = []

    def start(self, *command: str, log: Path | None = None) -> psutil.Process:
        """Start a program called `command[0]`, with the other words as arguments; its errors go to `log`."""
        with (log or Path("/dev/null")).open("a") as errors:
            process = subprocess.Popen(
                [command[0], "-c", SCRIPT, *command[1:]],
                executable="/bin/sh",
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        assert process.stdout is not None
        self._all += [psutil.Process(process.pid), psutil.Process(int(process.stdout.readline()))]
        return self._all[-2]

    def started_by(self, process: psutil.Process) -> psutil.Process:
        return self._all[self._all.index(process) + 1]

    def read(self) -> psutil.Process:
        """Start a process that follows the log, as a user may do."""
        self._all.append(psutil.Process(subprocess.Popen(["tail", "-f", self.log], stdout=subprocess.DEVNULL).pid))
        return self._all[-1]

    def end(self) -> None:
        for process in self._all:
            with suppress(psutil.NoSuchProcess):
                process.kill()


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "session_1" / "logs").mkdir(parents=True)
    processes = Processes(tmp_path / "session_1")
    processes.log.touch()
    yield processes
    processes.end()


def is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait_until_ended(*processes: psutil.Process) -> None:
    deadline = time.monotonic() + 10
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline, [process for process in processes if is_running(process)]
        time.sleep(0.01)


def test_only_rays_own_processes_are_killed(processes: Processes) -> None:
    session, rays_dir = str(processes.session_dir), Path(ray.__file__).parent
    raylet = processes.start(f"{rays_dir}/core/src/ray/raylet/raylet", f"--session={session}/sockets")
    worker = processes.start("ray::IDLE", log=processes.log)
    part = processes.start("ray-dashboard-JobHead-0", log=processes.log)
    users = [
        processes.read(),
        processes.start("python", f"--session={session}", log=processes.log),
        processes.start("ray::IDLE"),
        processes.start(f"{rays_dir}/core/src/ray/raylet/raylet", f"--session={session}2/sockets"),
    ]
    stop_processes(HostRecord(2**22 + 1, 0.0, "127.0.0.1:1", "http://127.0.0.1:2", session))
    wait_until_ended(raylet, worker, part, processes.started_by(raylet), processes.started_by(worker))
    assert [is_running(process) for process in users] == [True] * len(users)


def test_end_removes_what_killed_engines_left(
    processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of Ray's host removes memory of the processes that it kills, but none that another process uses."""
    monkeypatch.setattr("workers.merging.node.SHARED_MEMORY", tmp_path)
    used = SharedDirectory("used")
    left = used.path.parent / "left"
    left.mkdir()
    (left / "users").touch()
    host = processes.start("ray")
    end_children(host)
    assert not is_running(processes.started_by(host))
    assert [each.name for each in used.path.parent.iterdir()] == ["used"]
    used.close()


def test_a_host_that_still_runs_ends_with_all_that_it_started(processes: Processes) -> None:
    host = processes.start("python")
    session = str(processes.session_dir)
    stop_processes(HostRecord(host.pid, host.create_time(), "127.0.0.1:1", "http://127.0.0.1:2", session))
    wait_until_ended(host, processes.started_by(host))
