from __future__ import annotations

from pathlib import Path

import pytest

from workers.cache import cached


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
