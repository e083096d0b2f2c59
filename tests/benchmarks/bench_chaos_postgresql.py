"""Survival of studies whose server and drivers use PostgreSQL: 100 kills, also of PostgreSQL itself.

The faults are those of `bench_chaos` without stops. A kill of the database is a SIGKILL of all its processes; the
database is started again after two seconds.
"""

from __future__ import annotations

import random
import tempfile
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_chaos import NUM_KILLS, SEED, SETTINGS, show
from tests.end_to_end.chaos import KILLS, run_chaos
from tests.postgresql import postgresql_server

__all__ = ["run", "show"]


def run() -> dict[str, Any]:
    kills = random.Random(SEED).choices((*KILLS, "database"), k=NUM_KILLS)
    with (
        tempfile.TemporaryDirectory(prefix="mergesearch-bench-") as directory,
        contextmanager(postgresql_server)() as postgresql,
    ):
        result = run_chaos(Path(directory), kills=kills, seed=SEED, postgresql=postgresql, FAKE_SCORER=SETTINGS)
    return {**result, "met": not result["differing"] and sum(result["kills"].values()) >= 0.9 * NUM_KILLS}
