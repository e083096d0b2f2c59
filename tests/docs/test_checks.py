"""The CI workflow, .ci/run and the hooks before a commit call the same commands as the Makefile."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from tests.docs.pages import ROOT


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_the_workflow_calls_the_two_commands_of_the_readme() -> None:
    job = read(".github/workflows/ci.yml")["jobs"]["make"]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    called = {
        command.replace("${{ matrix.command }}", name)
        for command in commands
        for name in job["strategy"]["matrix"]["command"]
    }
    assert called == {"make demo", "make test"}


def test_ci_runs_every_check() -> None:
    assert (ROOT / ".ci" / "run").read_text().splitlines()[-1] == "exec make test"


def test_the_hooks_are_the_linters_of_make_lint() -> None:
    lint = re.search(r"^lint:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert lint is not None
    expected = re.findall(r"\$\(BIN\)/(ruff \w+|[\w-]+)", lint[1])
    hooks = [hook["entry"] for repository in read(".pre-commit-config.yaml")["repos"] for hook in repository["hooks"]]
    found = [re.match(r"\.venv/bin/(ruff \w+|[\w-]+)", entry) for entry in hooks]
    assert [match and match[1] for match in found] == expected


@pytest.mark.parametrize("package", ["search_spaces", "workers", "service"])
def test_packages_ship_their_types(package: str) -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / package / "py.typed").is_file()
    assert "py.typed" in data[package]
