"""Files that are replaced completely or not at all."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from workers import directories
from workers.directories import SCRATCH_MARGIN, appearing, replacing, scratch, turn, turn_if_writable, write_file


def test_a_file_is_written_to_a_new_directory_and_replaced(tmp_path: Path) -> None:
    file = tmp_path / "new" / "state.json"
    write_file(file, "ä")
    assert file.read_bytes() == "ä".encode()
    write_file(file, b"\x00")
    assert file.read_bytes() == b"\x00"
    assert list(file.parent.iterdir()) == [file]


def test_a_write_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    write_file(file, "old")

    def fail() -> None:
        with replacing(file) as new:
            new.write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_a_new_file_has_ordinary_permissions(tmp_path: Path) -> None:
    write_file(tmp_path / "replaced", "")
    (tmp_path / "plain").write_text("")
    assert (tmp_path / "replaced").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_directory_is_on_disk_with_all_that_is_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file and directory is synced once before the name appears, and the list of names after it."""
    synced: list[tuple[str, bool]] = []
    out = tmp_path / "out"
    monkeypatch.setattr(directories, "sync", lambda path: synced.append((path.name, out.exists())))
    with appearing(out, "key") as directory:
        (directory / "heads" / "shape").mkdir(parents=True)
        for name in ("config.json", "heads/weights", "heads/shape/labels"):
            (directory / name).write_text(name)
    names = ["config.json", "heads", "labels", directories.MODEL, "shape", "weights"]
    assert sorted(synced[:-1]) == [(name, False) for name in names]
    assert synced[-1] == (tmp_path.name, True)


HOLDER = """
import sys, time
from pathlib import Path
from workers.directories import turn
with turn(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


@contextmanager
def held(place: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the turn (the lock) of `place`."""
    command = [sys.executable, "-c", HOLDER, str(place)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_turn_has_a_time_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A wait ends after its limit, and says which process it waited for."""
    monkeypatch.setattr(directories, "TOLD_AFTER_S", 0.05)
    place = tmp_path / "index"
    with held(place) as process, caplog.at_level(logging.WARNING):
        with (
            pytest.raises(TimeoutError, match=rf"process {process.pid} works on .*index.*\.index\.lock"),
            turn(place, limit_s=0.2),
        ):
            pass
        assert [record.name for record in caplog.records].count(directories.__name__) == 1
        assert f"process {process.pid} works on {place}; this process waits" in caplog.text


@pytest.mark.parametrize("number", [errno.EACCES, errno.EPERM, errno.EROFS])
def test_what_cannot_be_locked_is_worked_on_without_a_lock(
    tmp_path: Path, number: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(Path, "open", refused)
    done = []
    with turn_if_writable(tmp_path / "index"):
        done.append(1)
    assert done == [1]
    assert f"other processes may work on {tmp_path / 'index'} at the same time" in caplog.text
    number = errno.ENOSPC
    with pytest.raises(OSError, match="No space left"), turn_if_writable(tmp_path / "index"):
        pass


def test_errors_of_the_work_are_those_of_the_work(tmp_path: Path) -> None:
    with pytest.raises(PermissionError, match="mine"), turn_if_writable(tmp_path / "index"):
        raise PermissionError("mine")
    with turn(tmp_path / "index", limit_s=0.0):
        pass


def test_a_killed_holder_holds_nobody_up(tmp_path: Path) -> None:
    """The turn of a process that was killed ends with it."""
    place = tmp_path / "index"
    with held(place) as process:
        process.kill()
        process.wait()
        with turn(place, limit_s=5):
            pass


def test_threads_take_turns(tmp_path: Path) -> None:
    """Threads of one process wait for each other, too."""
    place, inside = tmp_path / "index", []

    def work(number: int) -> None:
        with turn(place, limit_s=30):
            inside.append(number)
            assert len(inside) == 1
            inside.clear()

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(20)))


def test_temporary_files_go_where_they_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first directory whose disk has the space is used; without one, the error says what each has."""
    small, large = tmp_path / "small", tmp_path / "new" / "large"
    free = {small: 4 << 30, large: 8 << 30}
    monkeypatch.setattr(shutil, "disk_usage", lambda place: SimpleNamespace(free=free[place]))
    for num_bytes, expected in ((1 << 30, small), ((4 << 30) - SCRATCH_MARGIN, small), (4 << 30, large)):
        with scratch(num_bytes, name="export", places=[small, large]) as found:
            assert found.parent == expected
            (found / "weights").write_text("x")
        assert not found.exists()
    with (
        pytest.raises(
            OSError, match=r"9.2 GiB .* fit on no disk \(.*small: 4.0 GiB free; .*large: 8.0 GiB free\)"
        ) as caught,
        scratch(9 << 30, name="export", places=[small, large]),
    ):
        pass
    assert caught.value.errno == errno.ENOSPC
    assert not [*small.iterdir(), *large.iterdir()]


SCRATCH_HOLDER = """
import sys, time
from pathlib import Path
from workers.directories import scratch
with scratch(0, name="export", places=[Path(sys.argv[1])]) as found:
    print(found, flush=True)
    time.sleep(60)
"""


def test_temporary_files_of_a_killed_process_are_removed(tmp_path: Path) -> None:
    """The next process removes them, but not those of processes that work."""
    with subprocess.Popen(
        [sys.executable, "-c", SCRATCH_HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = Path(process.stdout.readline().strip())
        try:
            with scratch(0, name="export", places=[tmp_path]):
                assert other.exists()
        finally:
            process.kill()
    assert other.exists()
    with scratch(0, name="export", places=[tmp_path]) as own:
        assert list(tmp_path.iterdir()) == [own]
