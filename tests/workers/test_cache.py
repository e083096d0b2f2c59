from __future__ import annotations

from pathlib import Path

import pytest

from workers.cache import remembered


def test_findings_are_remembered_by_key(tmp_path: Path) -> None:
    assert remembered("one", cache=tmp_path) is None
    assert remembered("one", "value", cache=tmp_path) == "value"
    remembered("two", "", cache=tmp_path)
    assert remembered("one", cache=tmp_path) == "value"
    assert remembered("two", cache=tmp_path) == ""


def test_findings_are_kept_where_the_environment_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MERGESEARCH_CACHE", str(tmp_path / "chosen"))
    remembered("key", "value")
    assert remembered("key", cache=tmp_path / "chosen") == "value"
    monkeypatch.delenv("MERGESEARCH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    remembered("key", "other")
    assert remembered("key", cache=tmp_path / "xdg" / "mergesearch") == "other"
