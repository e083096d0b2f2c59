"""A short version of `make bench ONLY=chaos`.

Whatever is killed or stopped, studies end with the trials of an undisturbed run.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.chaos import run_chaos
from tests.end_to_end.studies import DIS, LFS, SFS
from tests.postgresql import PostgreSQL

KILLS = ("replica", "Serve controller", "server", "driver", "Ray head")
PATIENCE_S = 30.0  # for a part that is being replaced


@pytest.mark.timeout(900)
def test_kills_with_the_database_change_no_trial(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """Kills of PostgreSQL, and of processes that use it, leave the undisturbed trials, and jobs say so."""
    result = run_chaos(
        tmp_path,
        kills=["database", "database", "driver"],
        rungs=[20, 60],
        max_trials=9,
        max_pause_s=0.3,
        postgresql=postgresql,
        FAKE_SCORER={"sample_delay_s": 0.02},
        FAKE_IN_FLIGHT=2,
        FAKE_SERVE={"LOST_AFTER_S": 8.0},
    )
    assert result["differing"] == [], result
    assert result["kills"]["database"] == 2, result


@pytest.mark.timeout(900)
def test_kills_and_stops_change_no_trial(tmp_path: Path) -> None:
    """Kills of five parts that work on studies, and stops of two, leave the undisturbed trials."""
    result = run_chaos(
        tmp_path,
        kills=KILLS,
        patience_s=PATIENCE_S,
        stops=["driver", "replica"],
        rungs=[20, 60],
        max_trials=20,
        max_pause_s=0.3,
        spaces=[DIS, SFS, LFS],
        FAKE_SCORER={"sample_delay_s": 0.02},
        FAKE_IN_FLIGHT=2,
        FAKE_SERVE={"LOST_AFTER_S": 8.0},
        FAKE_DEPLOY={"health_check_timeout_s": 1.0},
    )
    assert result["differing"] == [], result
    assert sum(result["kills"].values()) >= len(KILLS) - 1, result
    assert len(result["stops"]) == 2, result
    assert all(stop["stopped"] and stop["told_after_s"] is not None for stop in result["stops"]), result
