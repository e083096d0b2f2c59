"""`mergesearch` as a process of its own, watched through the study's database and the table of processes."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from service.jobs.search.local_run import DATABASE

POLL_S = 0.05
WORKING_GONE_S = 30.0  # after a kill, processes that work
ALL_GONE_S = 90.0
REPLICA = "ray::ServeReplica"

# Processes that must end first: they hold an engine's memory, work on the study, or would start such processes again.
WORKING = (REPLICA, "ray::EvaluationTrainable", "ray::_ProposerActor", "raylet", "gcs_server")


@dataclass(frozen=True)
class Process:
    """One process, never mistaken for a later one of the same id. `group` is its process group."""

    pid: int
    created_at: float
    name: str
    group: int

    @property
    def is_working(self) -> bool:
        return self.name.startswith(WORKING)

    @property
    def is_gone(self) -> bool:
        try:
            process = psutil.Process(self.pid)
            return bool(process.create_time() != self.created_at or process.status() == psutil.STATUS_ZOMBIE)
        except psutil.NoSuchProcess:
            return True


class Run:
    """A command that works in `directory`, leading a session and process group of its own.

    `ray_address` is the Ray that it joins; None: it starts one.
    """

    def __init__(self, command: Sequence[str | Path], *, directory: Path, ray_address: str | None = None) -> None:
        self.directory = directory
        directory.parent.mkdir(parents=True, exist_ok=True)
        self.log_file = directory.with_suffix(".log")
        self.started_at = time.monotonic()
        environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        if ray_address is not None:
            environment["RAY_ADDRESS"] = ray_address
        with self.log_file.open("a") as log:
            self._process = subprocess.Popen(
                [str(argument) for argument in command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=environment,
            )
        self.pid = self._process.pid

    @property
    def log(self) -> str:
        """Output of this command, and of earlier ones in its directory."""
        return self.log_file.read_text()

    def wait(self, *, timeout_s: float) -> int:
        """Wait for the command's end, and return its exit code."""
        return self._process.wait(timeout_s)

    def wait_for_rows(self, num_rows: int, *, timeout_s: float) -> None:
        """Wait until at least `num_rows` chunks are stored. Raises AssertionError if the command ends before."""
        deadline = time.monotonic() + timeout_s
        while num_chunks(self.directory) < num_rows:
            assert self._process.poll() is None, f"it ended by itself:\n{self.log}"
            assert time.monotonic() < deadline, f"not {num_rows} chunks in {timeout_s} s:\n{self.log}"
            time.sleep(POLL_S)

    def processes(self) -> list[Process]:
        """All processes of this run except the command itself: its descendants, and Ray's processes of its session."""
        found = {process.pid: process for process in psutil.Process(self.pid).children(recursive=True)}
        session = f"_{self.pid}/"  # Ray names its session's directory after the process that starts it
        for process in psutil.process_iter():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if "/session_" in line and session in line:
                found[process.pid] = process
        return [known for process in found.values() if (known := _known(process)) is not None]

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def kill_group(self) -> None:
        os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()

    def interrupt(self) -> None:
        """Send SIGINT to the whole process group, as Ctrl-C does in a terminal."""
        os.killpg(self.pid, signal.SIGINT)

    def end(self) -> None:
        """Kill all processes of this run that are left, at any point of the run."""
        if self._process.poll() is None:
            left = self.processes()
            self.kill_group()
            for process in left:
                if not process.is_gone:
                    os.kill(process.pid, signal.SIGKILL)


@contextmanager
def started(command: Sequence[str | Path], *, directory: Path, ray_address: str | None = None) -> Iterator[Run]:
    run = Run(command, directory=directory, ray_address=ray_address)
    try:
        yield run
    finally:
        run.end()


def mergesearch(*arguments: str | Path) -> list[str | Path]:
    """The command line of the program that is tested."""
    return [sys.executable, "-m", "service.cli.main", *arguments]


def num_chunks(directory: Path) -> int:
    """Number of stored chunks, read from the database without disturbing the driver."""
    rows = query(directory, "SELECT count(*) FROM evidence")
    return int(rows[0][0]) if rows else 0


def query(directory: Path, statement: str) -> list[tuple[Any, ...]]:
    """Rows of the run's database; none if the database does not exist yet."""
    if not (directory / DATABASE).is_file():
        return []
    connection = sqlite3.connect(f"file:{directory / DATABASE}?mode=ro", uri=True, timeout=30)
    try:
        return connection.execute(statement).fetchall()
    except sqlite3.OperationalError as error:
        if "no such table" in str(error):
            return []
        raise
    finally:
        connection.close()


def check_gone(processes: Iterable[Process], *, since: float, timeout_s: float, working_only: bool = False) -> None:
    """Wait until all processes, or only those that work, are gone, and print how long each took.

    Raises AssertionError if some are left `timeout_s` after `since` (time.monotonic()).
    """
    seconds = dict.fromkeys((each for each in processes if each.is_working or not working_only), float("inf"))
    assert any(process.is_working for process in seconds)
    is_last = False  # all are looked at once, however late this is called
    while float("inf") in seconds.values() and not is_last:
        is_last = time.monotonic() - since > timeout_s
        for process in [process for process, gone in seconds.items() if gone == float("inf")]:
            if process.is_gone:
                seconds[process] = time.monotonic() - since
        time.sleep(0.2)
    slowest = sorted(((gone, process.name) for process, gone in seconds.items()), reverse=True)
    print(f"\n{', '.join(f'{name} {gone:.1f} s' for gone, name in dict.fromkeys(slowest))} after the kill")
    left = [process for process, gone in seconds.items() if gone == float("inf")]
    assert not left, f"{timeout_s:.0f} s after the kill these are left: {left}"


def _known(process: psutil.Process) -> Process | None:
    try:
        line = process.cmdline()
        title = line[0] if line and line[0].startswith("ray::") else process.name()
        return Process(process.pid, process.create_time(), title, os.getpgid(process.pid))
    except (psutil.NoSuchProcess, ProcessLookupError):
        return None
