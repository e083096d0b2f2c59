"""The limit on the server's open files is raised, and a hard limit that is low is reported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from service.open_files import ENOUGH, FEW

PROGRAM = """
import resource, sys
from service.open_files import raise_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
print(raise_limit() or "", resource.getrlimit(resource.RLIMIT_NOFILE)[0], sep="|")
"""


def raised(soft: int, hard: int) -> tuple[str, int]:
    """The report and the soft limit of a process that starts with these limits."""
    command = [sys.executable, "-c", PROGRAM, str(soft), str(hard)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told, _, limit = done.stdout.strip().partition("|")
    return told, int(limit)


@pytest.mark.parametrize(("soft", "hard"), [(1024, FEW), (FEW - 1, FEW + 1), (FEW, FEW)])
def test_the_soft_limit_becomes_the_hard_one(soft: int, hard: int) -> None:
    assert raised(soft, hard) == ("", min(hard, ENOUGH))


def test_a_low_hard_limit_is_reported() -> None:
    """The soft limit is raised as far as possible, and the report has the limit and what to change."""
    told, limit = raised(256, 1024)
    assert limit == 1024
    assert "may open 1024 files" in told
    assert f"raise the hard limit to {FEW}" in told
