"""The commands of the tutorial have the results that it shows, if they need no engine."""

from __future__ import annotations

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from service.cli.main import main
from tests.docs.pages import ROOT, Page

TUTORIAL = Page.read(ROOT / "docs" / "tutorial.md")

# Lines of a plan that depend on the machine.
OF_THE_MACHINE = ("time ", "memory ", "disk ")


@pytest.fixture
def mymodels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory that the tutorial makes, with the study file that it shows."""
    (tmp_path / "workers").symlink_to(ROOT / "workers")
    copying, printed = blocks_below("## Collect models and tasks")
    ran = subprocess.run(["bash", "-ec", copying], cwd=tmp_path, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr, ran.stdout) == (0, "", printed)
    (tmp_path / "mymodels" / "study.yaml").write_text(blocks_below("## Write the study")[0])
    monkeypatch.chdir(tmp_path / "mymodels")
    return tmp_path / "mymodels"


def blocks_below(heading: str) -> list[str]:
    """The code blocks of a section, in their order."""
    (text,) = re.findall(rf"^{re.escape(heading)}$.*?(?=^## |\Z)", TUTORIAL.text, re.MULTILINE | re.DOTALL)
    return [content for _, content in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)]


def ran(command: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(shlex.split(command)[1:])
    return code, *capsys.readouterr()


def of_the_study(plan: str) -> list[str]:
    return [line for line in plan.splitlines() if not line.startswith(OF_THE_MACHINE)]


@pytest.mark.slow
def test_the_tutorial_checks_its_study(mymodels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The plan is that of the page."""
    command, _, plan = blocks_below("## Check it")
    code, printed, errors = ran(command, capsys)
    assert (code, errors, of_the_study(printed)) == (0, "", of_the_study(plan))
    assert len(of_the_study(plan)) == 8


def test_the_tutorial_shows_two_mistakes(mymodels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both mistakes are reported as on the page."""
    file = mymodels / "study.yaml"
    file.write_text(file.read_text().replace("seed: 0", "sed: 0").replace("max_samples: 270", "max_samples: 27"))
    command, messages, _ = blocks_below("## Check it")
    assert ran(command, capsys) == (2, "", messages)
