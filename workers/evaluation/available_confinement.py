"""Choice of the sandbox for processes on this machine: bubblewrap if it works, else Landlock."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

from workers.evaluation.bubblewrap import Bubblewrap
from workers.evaluation.confinement import Confinement
from workers.evaluation.landlock import Landlock
from workers.evaluation.system_calls import ConfinementUnavailable

__all__ = ["MEANS", "available_confinement", "lack_of", "without_packages"]

# In the order of preference. Under bubblewrap a process does not even find out which files and processes there are, and
# a mistake in the filter of system calls opens neither files nor networks. Landlock works where no namespaces may be
# created, as in most containers.
MEANS: tuple[type[Confinement], ...] = (Bubblewrap, Landlock)

# The folder with this project's packages. A Python without the module `site` does not find an editable installation.
OWN_PACKAGES = str(Path(__file__).parents[2])

LIMIT_S = 60.0
PROBE = """import pickle
from workers.evaluation.system_calls import ConfinementUnavailable
try:
    print(pickle.load(sys.stdin.buffer).apply())
except ConfinementUnavailable as error:
    sys.exit(str(error))
"""


@lru_cache(maxsize=1)
def available_confinement() -> type[Confinement]:
    """Find the sandbox class that works on this machine: bubblewrap if possible, else Landlock.

    The classes in MEANS are tried in this order, once per process. Raises ConfinementUnavailable if no class works,
    with a reason for each of them.
    """
    lacks = []
    for means in MEANS:
        if (lack := lack_of(means().of_program(0))) is None:
            return means
        lacks.append(f"{means.__name__}: {lack}")
    raise ConfinementUnavailable("; ".join(lacks))


def without_packages(code: str) -> list[str]:
    """Command line of a new Python process that runs `code` with the `sys.path` of this process.

    The new process does not load the module `site`; the module would run code of installed packages at its start.
    """
    places = [*map(os.path.abspath, sys.path), OWN_PACKAGES]
    return [sys.executable, "-P", "-s", "-S", "-c", f"import sys; sys.path[:] = {places!r}\n{code}"]


def lack_of(confinement: Confinement) -> str | None:
    """Reason why the sandbox `confinement` cannot restrict a process on this machine; None if it can restrict one."""
    try:
        command, environment = confinement.command(without_packages(PROBE), {})
        found = subprocess.run(
            command,
            env=environment,
            input=pickle.dumps(confinement),
            capture_output=True,
            check=False,
            timeout=LIMIT_S,
        )
    except (ConfinementUnavailable, OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return None if found.returncode == 0 else found.stderr.decode(errors="replace").strip()[-500:] or "no reason"
