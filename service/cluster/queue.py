"""Decision about which jobs run: which jobs get a place, which jobs give up their place, and why jobs wait.

A place is the right to run: the number of places is the number of jobs that may run at the same time.

`choose` is a pure function of the jobs, the weights, quotas and usage of the teams, and the time. It uses neither SQL
nor Ray, so that a simulation can drive it. The rules, in this order:

1. A job that runs keeps its place, and gets another driver if its driver was lost.
2. Jobs whose team has used up its GPU-hours of the month give their places up. Jobs of the team that need no place,
   such as served studies, stop too. In all other cases, jobs that need no place start at once.
3. The next place goes to the job of the largest priority. Jobs of equal priority are ordered by fair share: the next
   job is the oldest job of the team with the smallest usage for its weight. Jobs that an administrator has moved are
   put where they were moved to.
4. A job is passed over as long as it would exceed a quota of its team. If the quota is `max_replicas`, the replicas
   that are left of it are kept for this job, so that later jobs of the team with fewer replicas cannot pass it forever.
5. If all places are taken, a waiting job gets the place of the running job of the smallest priority, if this priority
   is smaller than the priority of the waiting job. No job loses its place in this way before it has held the place for
   KEEPS_PLACE_S seconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from service.types import Demand, TeamLimits, TeamUsage

__all__ = [
    "KEEPS_PLACE_S",
    "MIN_CHARGE_H",
    "Choice",
    "Entry",
    "Reason",
    "Shortage",
    "TeamState",
    "Waiting",
    "Yielding",
    "choose",
    "estimated_starts",
]

# Seconds for which a job keeps its place even if jobs of larger priority wait: each preemption costs the start of a
# driver, and a job must make progress between two preemptions.
KEEPS_PLACE_S = 300.0

# Least number of hours that a running job counts for, for each of its GPUs. Otherwise, many jobs of one team that are
# submitted at once would get all places before their usage is known.
MIN_CHARGE_H = 1.0


class Reason(StrEnum):
    """Reason why a job waits in the queue.

    - PLACE: all places are taken, and no job gives up its place for the waiting job
    - ROOM: a running job is giving up its place, but has not ended yet
    - QUOTA: the job would exceed a quota of its team
    """

    PLACE = "place"
    ROOM = "room"
    QUOTA = "quota"


@dataclass(frozen=True)
class Entry:
    """An unfinished job that runs, or that waits for a place (the right to run).

    The number of places is the number of jobs that may run at the same time. A driver is the process that works on a
    job.

    - `has_place`: whether the job holds a place.
    - `needs_driver`: whether a driver must be started, because none works on the job.
    - `placed_at`: time at which the job got its place; None without a place.
    - `may_yield`: whether the job's driver has begun, so that it can end between two chunks of samples.
    - `is_leaving`: whether the driver was asked to end, so that the place becomes free soon.
    - `takes_place`: whether the job needs a place to run; served studies need none.
    - `moved_before`, `moved_at`: if an administrator moved this job, the id of the job before which it was moved (""
      for the front of the queue), and the time of the move; as in `JobRecord`.

    Times are in seconds since the epoch.
    """

    id: str
    team: str | None
    priority: int
    created_at: float
    demand: Demand = field(default_factory=Demand)
    has_place: bool = False
    needs_driver: bool = False
    placed_at: float | None = None
    may_yield: bool = False
    is_leaving: bool = False
    takes_place: bool = True
    moved_before: str | None = None
    moved_at: float | None = None


@dataclass(frozen=True)
class TeamState:
    """Weight and quotas of a team, and the GPU-hours that it has used."""

    limits: TeamLimits = field(default_factory=TeamLimits)
    usage: TeamUsage = field(default_factory=TeamUsage)

    def used_up(self) -> Shortage | None:
        """Return the team's quota of GPU-hours if the team has used it up, else None."""
        limit, used = self.limits.gpu_hours, self.usage.month
        return None if limit is None or used < limit else Shortage("gpu_hours", limit, used, 0)


@dataclass(frozen=True)
class Shortage:
    """A quota of a team that does not suffice for a job of the team.

    - `quota`: name of the quota in `TeamLimits`
    - `limit`: value of the quota
    - `used`: amount that the team's jobs use already
    - `needed`: further amount that the job needs; 0 if this amount is not known beforehand, as for GPU-hours
    - `is_kept`: whether the amount that is left is kept for a job of the team that comes first
    """

    quota: str
    limit: float
    used: float
    needed: float
    is_kept: bool = False

    def text(self, team: str | None) -> str:
        """Describe the shortage for users, such as "quota max_running of team red: 2 of 2 are used"."""
        used = f"{self.used:.1f}" if isinstance(self.used, float) else f"{self.used}"
        need = f", and the job needs {self.needed:g}" if self.needed > 1 else ""
        when = " this month (UTC)" if self.quota == "gpu_hours" else ""
        kept = ", and the rest is kept for a job before it" if self.is_kept else ""
        return f"quota {self.quota} of team {team}: {used} of {self.limit:g} are used{when}{need}{kept}"


@dataclass(frozen=True)
class Yielding:
    """Reason why a running job must stop for now: another job takes its place, or its team has used up a quota.

    If another job takes the place (the right to run), `to` is its id. Otherwise `shortage` is the quota that is used
    up.
    """

    to: str | None = None
    shortage: Shortage | None = None


@dataclass(frozen=True)
class Waiting:
    """Position of a waiting job in the queue, counted from 1, and the reason why it waits.

    If the reason is QUOTA, `shortage` is the quota that the job would exceed; otherwise it is None.
    """

    position: int
    reason: Reason
    shortage: Shortage | None = None


@dataclass(frozen=True)
class Choice:
    """Decision of the queue: the jobs that start, the jobs that give up their places, and the jobs that wait.

    - `starts`: ids of the jobs that get a driver (a process that works on the job) now, in this order.
    - `yielding`: maps the ids of jobs that must give up their places to the reasons.
    - `waiting`: maps the id of each waiting job to its position and its reason, in the order of the queue.
    """

    starts: tuple[str, ...] = ()
    yielding: Mapping[str, Yielding] = field(default_factory=dict)
    waiting: Mapping[str, Waiting] = field(default_factory=dict)


def choose(entries: Sequence[Entry], teams: Mapping[str | None, TeamState], *, places: int, now: float) -> Choice:
    """Decide which jobs start, which running jobs end in favour of other jobs, and what each waiting job waits for.

    A place is the right to run, which each running job holds.

    Args:
        entries: All unfinished jobs that run or may run.
        teams: State of each team that has a limit or has used GPU-hours. The key None is for jobs without a team, which
            have no quotas. Teams that are left out have used nothing and have no limits.
        places: Number of places, that is, of jobs that may run at the same time.
        now: The present time in seconds since the epoch.
    """
    placeless = [entry for entry in entries if not entry.takes_place]
    entries = [entry for entry in entries if entry.takes_place]
    held = [entry for entry in entries if entry.has_place and not entry.needs_driver]
    continuing = sorted(
        (entry for entry in entries if entry.has_place and entry.needs_driver),
        key=lambda entry: (-entry.priority, entry.placed_at or 0.0, entry.created_at),
    )
    books = _Books(teams, held)
    starts: list[str] = []
    waiting = [entry for entry in entries if not entry.has_place]
    for entry in continuing:
        if len(books.held) < places and books.shortage(entry) is None:
            books.add(entry)
            starts.append(entry.id)
        else:
            waiting.append(entry)
    yielding: dict[str, Yielding] = {}
    for entry in (*held, *(entry for entry in placeless if not entry.needs_driver)):
        if not entry.is_leaving and entry.may_yield and (shortage := books.used_up(entry.team)) is not None:
            yielding[entry.id] = Yielding(shortage=shortage)
    room = sum(entry.is_leaving or entry.id in yielding for entry in held)
    waits: dict[str, Waiting] = {}
    for entry in _order(waiting, tuple(books.held), teams, now=now):
        position = len(waits) + 1
        if (shortage := books.shortage(entry)) is not None:
            books.keep(entry, shortage)
            waits[entry.id] = Waiting(position, Reason.QUOTA, shortage)
        elif len(books.held) < places:
            books.add(entry)
            starts.append(entry.id)
        elif room > 0:
            room -= 1
            waits[entry.id] = Waiting(position, Reason.ROOM)
        elif (victim := _victim(held, yielding, priority=entry.priority, now=now)) is not None:
            yielding[victim.id] = Yielding(to=entry.id)
            waits[entry.id] = Waiting(position, Reason.ROOM)
        else:
            waits[entry.id] = Waiting(position, Reason.PLACE)
    for entry in placeless:
        if entry.needs_driver and (shortage := books.used_up(entry.team)) is not None:
            waits[entry.id] = Waiting(len(waits) + 1, Reason.QUOTA, shortage)
        elif entry.needs_driver:
            starts.append(entry.id)
    return Choice(tuple(starts), yielding, waits)


def estimated_starts(choice: Choice, ends: Mapping[str, float | None]) -> dict[str, float]:
    """Estimate when waiting jobs will get a place (the right to run), in seconds since the epoch.

    `choice` has the waiting jobs in the order of the queue. `ends` contains the expected end of each running job, keyed
    by the job's id; None if the end is not known. The first job that waits for a place gets the place that becomes free
    first, and so on. The running times of waiting jobs are not known. Therefore a waiting job has an estimate only if
    it will get the place of a running job with a known end; the result leaves the other waiting jobs out.
    """
    free_at = sorted(end for job, end in ends.items() if end is not None and job not in choice.yielding)
    for_place = [job for job, waiting in choice.waiting.items() if waiting.reason is Reason.PLACE]
    return dict(zip(for_place, free_at, strict=False))


class _Books:
    """Use of resources by the running jobs of each team, to check a waiting job against its team's quotas.

    `held` are the jobs that hold places, and `teams` has the limits and the usage of each team.
    """

    def __init__(self, teams: Mapping[str | None, TeamState], held: Iterable[Entry]) -> None:
        self._teams = teams
        self._kept: set[str | None] = set()
        self.held: list[Entry] = list(held)

    def add(self, entry: Entry) -> None:
        self.held.append(entry)

    def keep(self, entry: Entry, shortage: Shortage) -> None:
        """Keep the replicas that are left of a team's quota for the waiting job `entry`, which needs more replicas.

        `shortage` is the quota that the job would exceed. Nothing is kept for other quotas, or if the job needs more
        replicas than the whole quota.
        """
        if shortage.quota == "max_replicas" and entry.demand.replicas <= shortage.limit:
            self._kept.add(entry.team)

    def used_up(self, team: str | None) -> Shortage | None:
        return self._teams.get(team, TeamState()).used_up()

    def shortage(self, entry: Entry) -> Shortage | None:
        """Find a quota that the team of the job `entry` would exceed if the job ran too; None if there is none."""
        if (found := self.used_up(entry.team)) is not None:
            return found
        limits = self._teams.get(entry.team, TeamState()).limits
        own = [other for other in self.held if other.team == entry.team]
        replicas = sum(other.demand.replicas for other in own)
        for quota, limit, used, needed in (
            ("max_running", limits.max_running, len(own), 1),
            ("max_replicas", limits.max_replicas, replicas, entry.demand.replicas),
        ):
            if limit is not None and used + needed > limit:
                return Shortage(quota, limit, used, needed)
        if entry.team in self._kept and limits.max_replicas is not None and entry.demand.replicas > 0:
            return Shortage("max_replicas", limits.max_replicas, replicas, entry.demand.replicas, is_kept=True)
        return None


def _order(
    waiting: Iterable[Entry], running: Iterable[Entry], teams: Mapping[str | None, TeamState], *, now: float
) -> list[Entry]:
    """Sort waiting jobs in the order of getting places (the right to run), without regard to quotas.

    Jobs of a higher priority come first. Among jobs of equal priority, the jobs of the team with the fewest used
    GPU-hours for its weight come first. Jobs that an administrator moved are put where they were moved. `running` has
    the jobs that hold places, `teams` has the weight and usage of each team, and `now` is the time in seconds since the
    epoch.
    """
    used: dict[str | None, float] = defaultdict(float)
    used.update({team: state.usage.recent for team, state in teams.items()})
    for entry in running:
        held_h = max(now - (now if entry.placed_at is None else entry.placed_at), 0.0) / 3600
        used[entry.team] += max(MIN_CHARGE_H - held_h, 0.0) * entry.demand.num_gpus
    by_priority: dict[int, list[Entry]] = defaultdict(list)
    for entry in waiting:
        by_priority[entry.priority].append(entry)
    found: list[Entry] = []
    for _, group in sorted(by_priority.items(), reverse=True):
        found += _moved(_fair(group, teams, used))
    return found


def _fair(group: Iterable[Entry], teams: Mapping[str | None, TeamState], used: dict[str | None, float]) -> list[Entry]:
    """Order waiting jobs of equal priority so that each team gets GPU-hours in proportion to its weight.

    The next job is always the oldest job of the team with the fewest used GPU-hours divided by the team's weight.
    `group` has the jobs, `teams` has the weights, and `used` has the GPU-hours that each team has used. Each job that
    is ordered adds to `used` the GPU-hours that even a very short run of it is charged, so that the teams take turns.
    """
    lines: dict[str | None, list[Entry]] = defaultdict(list)
    for entry in sorted(group, key=lambda entry: (entry.created_at, entry.id), reverse=True):
        lines[entry.team].append(entry)

    def key(team: str | None) -> tuple[float, float, str]:
        weight = teams.get(team, TeamState()).limits.weight
        return used[team] / weight, lines[team][-1].created_at, team or ""

    found = []
    while lines:
        team = min(lines, key=key)
        found.append(lines[team].pop())
        used[team] += MIN_CHARGE_H * found[-1].demand.num_gpus
        if not lines[team]:
            del lines[team]
    return found


def _moved(order: list[Entry]) -> list[Entry]:
    """Apply the moves of administrators to the jobs in `order`, the earliest move first, and return the new order.

    All jobs in `order` have the same priority. A job is moved to the front or before another job. If the other job is
    not in `order`, the move has no effect.
    """
    moved = [entry for entry in order if entry.moved_before is not None]
    for entry in sorted(moved, key=lambda entry: entry.moved_at or 0.0):
        others = [other for other in order if other is not entry]
        ids = [other.id for other in others]
        if entry.moved_before == "":
            order = [entry, *others]
        elif entry.moved_before in ids:
            place = ids.index(entry.moved_before)
            order = [*others[:place], entry, *others[place:]]
    return order


def _victim(held: Iterable[Entry], yielding: Mapping[str, Yielding], *, priority: int, now: float) -> Entry | None:
    """Choose the running job that must give up its place to a waiting job of priority `priority`.

    The choice is the job of the smallest priority and, among equals, the job that got its place last. The chosen job
    has a smaller priority than `priority`, and has held its place for KEEPS_PLACE_S seconds.

    Args:
        held: The jobs that hold places.
        yielding: Jobs that must give up their places already, keyed by id; they are not chosen again.
        priority: Priority of the waiting job.
        now: The present time in seconds since the epoch.

    Returns:
        The chosen job, or None if no job must give up its place.
    """
    candidates = [
        entry
        for entry in held
        if entry.priority < priority
        and entry.may_yield
        and not entry.is_leaving
        and entry.id not in yielding
        and now - (now if entry.placed_at is None else entry.placed_at) >= KEEPS_PLACE_S
    ]
    return min(candidates, key=lambda entry: (entry.priority, -(entry.placed_at or 0.0)), default=None)
