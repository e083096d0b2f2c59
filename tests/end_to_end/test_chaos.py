"""Studies end with the trials of an undisturbed run, whatever is killed or stopped, and however users steer.

`make bench ONLY=chaos` kills more often, without users.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.team_chaos import OWNERS, run_team_chaos
from tests.postgresql import PostgreSQL

KILLS = ("server", "driver", "replica", "Serve controller", "Ray head", "database")
STOPS = ("driver", "replica")


@pytest.mark.timeout(900)
def test_teams_steer_while_parts_are_killed(postgresql: PostgreSQL, tmp_path: Path) -> None:
    """Three studies of two teams have their undisturbed trials, and their events tell who paused, edited and resumed.

    Server, driver, replica, Serve's controller, Ray's head and PostgreSQL are killed meanwhile; a driver and a replica
    are stopped until they are replaced.
    """
    found = run_team_chaos(tmp_path, postgresql, kills=KILLS, stops=STOPS, max_trials=10)
    assert found["states"] == ["COMPLETE"] * len(OWNERS), found
    assert found["differing"] == [], found
    assert found["scored_twice"] == [], found
    assert sum(found["done"].get(part, 0) for part in KILLS) >= len(KILLS) - 1, found
    assert sorted(stop["part"] for stop in found["stopped"]) == sorted(STOPS), found
    assert all(stop["stopped"] and stop["told_after_s"] is not None for stop in found["stopped"]), found
    for owner in OWNERS:
        assert sorted(found["done_by"][owner]) == ["edit", "pause", "resume"], found
        assert found["told"][owner] == found["done_by"][owner], found
        assert len(found["attempts"][owner]) >= 2, "a driver was replaced, for a reason"
        assert all(found["attempts"][owner][1:]), found
