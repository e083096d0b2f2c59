from __future__ import annotations

import os
from pathlib import Path

import pytest

from service.disk import MARGIN_BYTES, free_bytes, lack_of_space


def disk_of(free: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every disk have `free` bytes left."""
    usage = type("Usage", (), {"free": free})()
    monkeypatch.setattr("service.disk.shutil.disk_usage", lambda _: usage)


def test_what_is_free_is_that_of_the_disk_a_directory_will_be_on(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    found = free_bytes(tmp_path / "not" / "there" / "yet")
    assert abs(found - status.f_bavail * status.f_frsize) < 2**30  # others write meanwhile


def test_too_little_space_is_told_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    disk_of(3 * 2**30 + MARGIN_BYTES, monkeypatch)
    assert lack_of_space(out, 3 * 2**30) is None
    assert lack_of_space(out, 5 * 2**30) == (
        f"{out}: the disk has 3.1 GiB free, the merged model needs 5.1 GiB; make room or give a directory on another "
        "disk"
    )


def test_nothing_is_needed_where_something_is_already(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk_of(0, monkeypatch)
    assert lack_of_space(tmp_path, 1)
    (tmp_path / "model.safetensors").touch()
    assert lack_of_space(tmp_path, 1) is None
    assert lack_of_space(tmp_path / "model.safetensors", 1) is None
