"""Files that are replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from workers.directories import replacing, write_file


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
