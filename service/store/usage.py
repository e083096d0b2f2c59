"""GPU-hours that the jobs of each team have used, stored by day: additions, and sums over days.

The rows belong to teams, not to jobs, so that they stay when jobs are deleted.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import UTC, datetime

import sqlalchemy as sa

from service.store import schema
from service.store.connection import clock, insert
from service.types import TeamUsage

__all__ = ["DAY_S", "HALF_LIFE_DAYS", "add_usage", "read_usage"]

DAY_S = 86_400

# Days after which a used GPU-hour counts half as much for the share of a team.
HALF_LIFE_DAYS = 7.0

# Days after which hours no longer count for the share of a team: less than 0.2 % of them would.
MAX_DAYS = 64

# The name in the table of jobs without a team.
NO_TEAM = ""


def add_usage(connection: sa.Connection, team: str | None, gpu_s: float) -> None:
    """Add GPU-seconds to the present day of a team; `team` None stands for jobs without a team.

    A negative number takes back seconds that were added before.
    """
    table = schema.team_usage
    now = clock(connection)
    day = int(now // DAY_S) if isinstance(now, float) else sa.cast(sa.func.floor(now / DAY_S), sa.Integer)
    added = insert(connection, table).values(team=team or NO_TEAM, day=day, gpu_s=gpu_s)
    connection.execute(
        added.on_conflict_do_update(
            index_elements=[table.c.team, table.c.day], set_={"gpu_s": table.c.gpu_s + added.excluded.gpu_s}
        )
    )


def read_usage(connection: sa.Connection, *, now: float) -> dict[str | None, TeamUsage]:
    """Read the GPU-hours of each team; jobs without a team count under the key None.

    `now` is the present time in seconds since the epoch. In `TeamUsage.recent`, an hour that was used a half-life ago
    counts half. Usage is stored by day, so all hours of one day count alike. Teams that have used nothing are left out.
    """
    table = schema.team_usage
    today = int(now // DAY_S)
    month = int(datetime.fromtimestamp(now, UTC).replace(day=1, hour=0, minute=0, second=0).timestamp() // DAY_S)
    recent: dict[str, float] = defaultdict(float)
    in_month: dict[str, float] = defaultdict(float)
    query = sa.select(table.c.team, table.c.day, table.c.gpu_s).where(table.c.day > today - MAX_DAYS)
    for team, day, gpu_s in connection.execute(query):
        recent[team] += gpu_s / 3600 * 0.5 ** (max(today - day, 0) / HALF_LIFE_DAYS)
        in_month[team] += gpu_s / 3600 if day >= month else 0.0
    return {team or None: TeamUsage(max(recent[team], 0.0), max(in_month[team], 0.0)) for team in recent}
