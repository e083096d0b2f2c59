"""The README and the command of the benchmarks name every benchmark."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from tests.benchmarks import __main__ as command

HERE = Path(__file__).parent
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
