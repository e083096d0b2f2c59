"""The list of shipped tasks, on terminals of any width."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from service.cli.main import main
from workers.evaluation.shipped_tasks import shipped_tasks


def listed(capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    capsys.readouterr()
    assert main(["tasks", *options]) == 0
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes standard output a terminal with the given number of columns."""

    def of(width: int) -> None:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", str(width))

    return of


@pytest.mark.parametrize("width", [80, 110, 160, 300])
def test_each_task_is_one_line(capsys: pytest.CaptureFixture[str], terminal: Any, width: int) -> None:
    """A terminal of 80 columns has a line for each task, with its samples and whether its data are here."""
    terminal(width)
    heading, *lines = listed(capsys)
    tasks = shipped_tasks()
    assert heading.split()[:3] == ["task", "samples", "data"]
    assert max(map(len, lines)) <= width
    for task, line in zip(tasks, lines, strict=False):
        assert line.split()[0] == task.name
        assert ("not here" in line) == (not task.is_here)
        assert all(f"{split} " in line for split in task.sizes)
    left_out = lines[len(tasks) :]
    assert len(left_out) == (0 if width == 300 else 1)
    for name, is_shown in (("metric", width >= 110), ("paper", width == 300)):
        assert (name in heading.split()) == is_shown
        assert any(name in line for line in left_out) != is_shown


def test_a_file_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    heading, *lines = listed(capsys)
    documents = json.loads("\n".join(listed(capsys, "--json")))
    assert heading.split() == ["task", "samples", "data", "metric", "licence", "paper", "missing", "data"]
    assert len(lines) == len(documents)
    for line, document in zip(lines, documents, strict=True):
        for name in ("name", "paper", "licence", "metric"):
            assert document[name] in line
