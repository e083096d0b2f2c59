from __future__ import annotations

from pathlib import Path

import pytest

from workers.cache import cached


def records(cache: Path) -> list[Path]:
    return [file for file in cache.rglob("*") if file.is_file()]


def test_findings_are_remembered_by_key(tmp_path: Path) -> None:
    assert cached("one", cache=tmp_path) is None
    assert cached("one", "value", cache=tmp_path) == "value"
    cached("two", "", cache=tmp_path)
    assert cached("one", cache=tmp_path) == "value"
    assert cached("two", cache=tmp_path) == ""


def test_findings_are_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "chosen"))
    cached("key", "value")
    assert cached("key", cache=tmp_path / "chosen") == "value"
    monkeypatch.delenv("MERGESEARCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    cached("key", "other")
    assert cached("key", cache=tmp_path / "xdg" / "mergesearch") == "other"


@pytest.mark.parametrize("value", ["", "value", "two\nlines\n"])
def test_a_damaged_record_is_not_there(tmp_path: Path, value: str) -> None:
    cached("key", value, cache=tmp_path)
    assert cached("key", cache=tmp_path) == value
    (record,) = records(tmp_path)
    whole = record.read_bytes()
    for damaged in (*(whole[:size] for size in range(len(whole))), whole + b"x", bytes(len(whole)), whole[::-1]):
        record.write_bytes(damaged)
        assert cached("key", cache=tmp_path) is None, damaged
    cached("key", value, cache=tmp_path)
    assert cached("key", cache=tmp_path) == value


def test_a_record_of_another_key_is_not_there(tmp_path: Path) -> None:
    cached("key", "value", cache=tmp_path)
    (record,) = records(tmp_path)
    cached("other", "other", cache=tmp_path)
    (other,) = set(records(tmp_path)) - {record}
    other.write_bytes(record.read_bytes())
    assert cached("other", cache=tmp_path) is None
