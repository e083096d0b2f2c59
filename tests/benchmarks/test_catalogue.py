"""Tests that the README and the command of the benchmarks list every benchmark."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benchmarks import __main__ as command
from tests.benchmarks import bench_plan

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
NAMES = sorted(file.stem.removeprefix("bench_") for file in HERE.glob("bench_*.py"))


def test_the_readme_has_a_row_for_every_benchmark_and_no_other() -> None:
    rows = re.findall(r"^\| `(\w+)` \|(.*)\|$", (HERE / "README.md").read_text(), re.MULTILINE)
    assert [name for name, _ in rows] == NAMES
    for name, cells in rows:
        measures, _, _, takes, arms = map(str.strip, cells.split("|"))
        assert measures, name
        assert takes, name
        is_kept = re.search(r"tests\.benchmarks\.(arms|search_arms)", (HERE / f"bench_{name}.py").read_text())
        assert bool(arms) == bool(is_kept), name


def test_every_benchmark_says_on_one_line_what_it_measures() -> None:
    for name in NAMES:
        line = command.first_line(HERE / f"bench_{name}.py")
        assert line.endswith("."), f"{name}: {line}"


@pytest.mark.parametrize("name", NAMES)
def test_every_benchmark_is_imported_and_can_be_run(name: str) -> None:
    module = importlib.import_module(f"tests.benchmarks.bench_{name}")
    assert callable(module.run)
    assert callable(module.show)


@pytest.mark.parametrize(
    ("names", "said"), [([], "name at least one benchmark"), (["luck", "hm3"], "no benchmark luck")]
)
def test_no_or_a_wrong_name_lists_the_benchmarks(
    names: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.main(names) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first == said
    assert [line.split()[0] for line in lines if line.startswith("  ")] == NAMES


def test_several_names_run_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each writes its document; one that misses its must fails the command, and does not end it."""
    ran: list[str] = []

    def module(name: str, **result: Any) -> SimpleNamespace:
        return SimpleNamespace(run=lambda: ran.append(name) or result, show=lambda result: print(name, result))

    modules = {"merge": module("merge", met=False, rows=1), "swap": module("swap", rows=2)}
    monkeypatch.setattr(importlib, "import_module", lambda name: modules[name.removeprefix("tests.benchmarks.bench_")])
    monkeypatch.setattr(command, "OUT", tmp_path / "bench")
    assert command.main(["merge", "swap"]) == 1
    assert ran == ["merge", "swap"]
    assert json.loads((tmp_path / "bench" / "swap.json").read_text())["rows"] == 2
    assert json.loads((tmp_path / "bench" / "merge.json").read_text())["met"] is False
    assert command.main(["swap"]) == 0
    assert "written:" in capsys.readouterr().out


def test_the_makefile_passes_several_names_on() -> None:
    shown = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "bench", "ONLY=merge swap"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.splitlines()[-1].endswith("-m tests.benchmarks merge swap")


def test_the_plan_is_judged_on_a_model_of_its_own() -> None:
    rows = [{"family": "75M", "ratio": 9.0}, {"family": "135M", "ratio": 1.4}]
    assert bench_plan.judged(rows) == {"met": True}
    assert bench_plan.judged([*rows, {"family": "135M", "ratio": 0.6}]) == {"met": False}
    assert bench_plan.judged(rows[:1]) == {}
