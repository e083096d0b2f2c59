"""Tests of the RLlib benchmark: its message where RLlib is missing, and the count of code lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks import bench_hm3_rllib


def test_without_rllib_its_arms_are_skipped_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def kept(_: str, name: str, __: Any, measure: Any, **___: Any) -> Any:
        return {} if name.startswith("own-learner") else measure()

    monkeypatch.setattr(bench_hm3_rllib, "kept", kept)
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    monkeypatch.delitem(sys.modules, "tests.benchmarks.rllib_learner", raising=False)
    found = bench_hm3_rllib.run()
    assert set(found) == {"skipped"}
    bench_hm3_rllib.show(found)
    said = capsys.readouterr().out
    assert said.startswith("skipped: the arms of RLlib need ray[rllib], which is not installed: ")
    assert "gymnasium" in said


def test_lines_are_those_of_code(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    one = 'def one(a, b):\n    """Text.\n\n    More text.\n    """\n    # a comment\n\n    return a + b\n'
    two = 'class Two:\n    """Text."""\n'
    file.write_text(f'"""Head."""\n\n\n{one}\n\n{two}\n\nthree = 3\n')
    assert bench_hm3_rllib.lines(file, ["one"]) == 2
    assert bench_hm3_rllib.lines(file, ["one", "Two"]) == 4
