"""Memory that was freed and stays with the process, measured by page faults in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from workers.training.memory import VARIABLES

# Eight blocks of 4 MB, freed and allocated again: 8192 pages of 4 KiB each time.
PROGRAM = """
import resource
import numpy as np
from workers.training.memory import keep_freed_memory
def step():
    blocks = [np.ones(1 << 19) for _ in range(8)]
    del blocks
if {keeps}:
    print(keep_freed_memory())
else:
    print(False)
step()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def output(*, keeps: bool, **variables: str) -> tuple[bool, int]:
    """Whether memory is kept, and the page faults of four steps."""
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES} | variables
    command = [sys.executable, "-c", PROGRAM.format(keeps=keeps)]
    lines = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.split()
    return lines[0] == "True", int(lines[1])


@pytest.mark.skipif(sys.platform != "linux", reason="page faults are counted with glibc's allocator, on Linux")
def test_memory_that_was_freed_is_used_again_without_page_faults() -> None:
    is_kept, faults = output(keeps=True)
    _, without = output(keeps=False)
    assert is_kept
    assert faults < 1000 < without


def test_what_the_environment_sets_is_kept() -> None:
    assert output(keeps=True, MALLOC_TRIM_THRESHOLD_="65536")[0] is False
