"""Test tiers: which tests start Ray or an engine, and the check that the others do not.

`make test-fast` runs what is marked neither `slow` nor `heavy`. Tests that start Ray or an engine are `heavy`,
by what they use; tests that only take long (more than about 2 s) are marked `slow` where they are.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = [
    "APART",
    "HEAVY",
    "LANES",
    "MAX_ENGINE_STARTS",
    "heavy_arguments",
    "lane",
    "misplaced",
    "needs_ray_or_engine",
    "starts_nothing",
]

# Fixtures of tests/conftest.py that start Ray or an engine; fixtures made from them count too.
STARTERS = frozenset({"engine", "path_engine", "ray_cluster", "scorer"})

# Fixtures that take long to make: the tests of one run in one process, one after the other. The longest come first.
LANES = ("shipped", "scorer", "engine", "fake_server")

# A session that starts more engines fails: each start takes 10 to 40 s of a core.
MAX_ENGINE_STARTS = 16

# All heavy tests are below these directories, so that `make test-heavy` need not collect the others, which takes long.
HEAVY = (
    "tests/end_to_end",
    "tests/service/jobs/search",
    "tests/service/tune",
    "tests/workers/engines/vllm",
    "tests/workers/serving",
)

# Directories of heavy tests that have commands of their own: `make test-cluster` and `make test-gpu`.
APART = ("tests/cluster", "tests/gpu/engines")

# Their tests start the commands that users start, on one or several Ray nodes, or engines.
COMMANDS = tuple(Path(__file__).parents[1] / name for name in ("tests/end_to_end", *APART))


def needs_ray_or_engine(file: Path, fixtures: Collection[str]) -> bool:
    """Whether a test in `file` starts Ray or an engine; `fixtures` are all that it uses, directly or not."""
    return not STARTERS.isdisjoint(fixtures) or any(directory in file.parents for directory in COMMANDS)


def misplaced(files: Collection[Path]) -> list[Path]:
    """The files of heavy tests, among `files`, that neither `make test-heavy` nor a command of their own collects."""
    root = Path(__file__).parents[1]
    places = [root / directory for directory in (*HEAVY, *APART)]
    return sorted(file for file in set(files) if not any(place in file.parents for place in places))


def lane(fixtures: Collection[str]) -> str | None:
    """Name of the lane of tests with these fixtures, which run in one process; None if each may run in any process."""
    if "path_engine" in fixtures:
        return "engine"  # where vLLM is imported already
    return next((name for name in LANES if name in fixtures), None)


@contextmanager
def starts_nothing() -> Iterator[None]:
    """Context that raises AssertionError if Ray is started or vLLM is imported in it, which takes 10 to 40 s.

    Earlier starts by other tests of the session do not count. Importing Ray is allowed.
    """
    before = _started()
    yield
    started = _started() - before
    assert not started, (
        f"a test that is not marked heavy started {' and '.join(sorted(started))}; use a fixture "
        f"({', '.join(sorted(STARTERS))}), or mark it (pytest.mark.heavy)"
    )


def _started() -> frozenset[str]:
    ray = sys.modules.get("ray")
    state = {"vLLM": "vllm" in sys.modules, "Ray": ray is not None and ray.is_initialized()}
    return frozenset(name for name, is_there in state.items() if is_there)


def heavy_arguments() -> list[str]:
    """Arguments of pytest for the heavy tests: the number of processes, and the directories.

    Where PyTorch finds a GPU, there is one process: an engine takes most of a GPU's memory.
    """
    import torch

    return ["--numprocesses", "1" if torch.cuda.is_available() else "2", *HEAVY]


if __name__ == "__main__":
    print(*heavy_arguments())
