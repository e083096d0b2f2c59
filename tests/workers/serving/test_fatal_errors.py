"""The log of a dead replica: it is searched on the replica's node, and may be unreadable or late."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.serving.current_chunk import CurrentChunk
from workers.serving.fatal_errors import MAX_BYTES, fatal_error, find_report


def ended_by(fatal: signal.Signals, log: Path) -> None:
    """Write the log of a process that this signal ends."""
    code = f"import faulthandler, os, sys; faulthandler.enable(); os.kill(os.getpid(), {fatal:d})"
    with log.open("wb") as file:
        assert subprocess.run([sys.executable, "-c", code], stderr=file, check=False).returncode == -fatal


@pytest.mark.parametrize(
    ("fatal", "report"),
    [
        (signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
        (signal.SIGABRT, "Fatal Python error: Aborted"),
        (signal.SIGKILL, None),
    ],
)
def test_the_report_of_a_fatal_signal_is_found(tmp_path: Path, fatal: signal.Signals, report: str | None) -> None:
    log = tmp_path / "worker.err"
    ended_by(fatal, log)
    assert find_report(str(log), 0.0) == report


def test_fatal_error_at_the_end_of_a_log(tmp_path: Path) -> None:
    """A fatal error is found at the end of a long log and not far before it."""
    log = tmp_path / "worker.err"
    padding = b"\xff" + b"a warning\n" * (MAX_BYTES // 10)
    log.write_bytes(padding + b"Fatal Python error: Bus error\n\nCurrent thread\n")
    assert find_report(str(log), 0.0) == "Fatal Python error: Bus error"
    log.write_bytes(b"Fatal Python error: Bus error\n" + padding)
    assert find_report(str(log), 0.0) is None


def test_rays_report_of_a_signal(tmp_path: Path) -> None:
    """Ray's report suffices except for a signal from outside."""
    log = tmp_path / "worker.err"
    log.write_text("*** SIGSEGV received at time=1795367522 on cpu 0 ***\nPC: @     0x7f16b9f85ad8  (unknown)\n")
    assert find_report(str(log), 0.0) == "SIGSEGV received"
    log.write_text("*** SIGTERM received at time=1795367522 on cpu 0 ***\nPC: @     0x7f16b9f85ad8  (unknown)\n")
    assert find_report(str(log), 0.0) is None


def test_a_report_that_is_written_late_is_waited_for(tmp_path: Path) -> None:
    log = tmp_path / "worker.err"
    log.touch()
    writer = threading.Timer(0.3, log.write_text, ["Fatal Python error: Bus error\n"])
    writer.start()
    started = time.monotonic()
    assert find_report(str(log), 30.0) == "Fatal Python error: Bus error"
    assert time.monotonic() - started < 20
    writer.join()


def noted(**where: str) -> CurrentChunk:
    return CurrentChunk("chunk", "replica", scored_others=True, log_file="worker.out", **where)


def test_a_note_of_an_earlier_version_says_no_file(tmp_path: Path) -> None:
    assert fatal_error(noted()) is None


@pytest.mark.slow
def test_a_log_that_is_gone_or_on_a_lost_node_tells_nothing(ray_cluster: None, tmp_path: Path) -> None:
    import ray

    log = tmp_path / "worker.err"
    here = ray.get_runtime_context().get_node_id()
    log.write_text("Fatal Python error: Bus error\n")
    assert fatal_error(noted(error_log=str(log), node=here)) == "Fatal Python error: Bus error"
    assert fatal_error(noted(error_log=str(tmp_path / "gone.err"), node=here)) is None
    assert fatal_error(noted(error_log=str(log), node=here[::-1])) is None
