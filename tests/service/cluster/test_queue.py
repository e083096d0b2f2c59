"""The choice of jobs that get places, and the reasons why others wait: single decisions, and a simulation."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from service.cluster.queue import (
    KEEPS_PLACE_S,
    MIN_CHARGE_H,
    Choice,
    Entry,
    Reason,
    TeamState,
    Waiting,
    Yielding,
    choose,
    estimated_starts,
)
from service.store.usage import HALF_LIFE_DAYS
from service.types import Demand, TeamLimits, TeamUsage

NOW = 1_000_000.0
HOUR = 3600.0


def waiting(job: str, team: str | None = None, *, priority: int = 0, **changes: Any) -> Entry:
    """A waiting job; of two jobs, the one with the smaller id is older."""
    return Entry(job, team, priority, NOW - 1000 + ord(job[0]), **changes)


def running(job: str, team: str | None = None, *, priority: int = 0, held_s: float = 4000, **changes: Any) -> Entry:
    return replace(
        waiting(job, team, priority=priority),
        has_place=True,
        placed_at=NOW - held_s,
        **{"may_yield": True, **changes},
    )


def chosen(*entries: Entry, places: int = 1, **teams: TeamState) -> Choice:
    return choose(entries, {name: state for name, state in teams.items()}, places=places, now=NOW)  # noqa: C416


def state(*, used: float = 0.0, month: float = 0.0, **limits: Any) -> TeamState:
    return TeamState(TeamLimits(**limits), TeamUsage(used, month))


def test_places_go_to_priority_then_to_age() -> None:
    """The largest priority comes first, then the oldest job; the others have positions."""
    choice = chosen(waiting("c"), waiting("b"), waiting("d", priority=1), places=2)
    assert choice.starts == ("d", "b")
    assert choice.waiting == {"c": Waiting(1, Reason.PLACE)}


def test_the_team_with_the_least_usage_is_next() -> None:
    """Usage counts by weight, and jobs without a team are a team."""
    entries = [waiting("a", "red"), waiting("b", "blue"), waiting("c")]
    teams: dict[str | None, TeamState] = {"red": state(used=10), "blue": state(used=12, weight=2), None: state(used=7)}
    assert choose(entries, teams, places=1, now=NOW).starts == ("b",)
    teams["blue"] = state(used=16, weight=2)
    assert choose(entries, teams, places=1, now=NOW).starts == ("c",)


def test_jobs_without_a_place_start_at_once() -> None:
    """A job that takes no place waits for nothing but the GPU-hours of its team, at which a running one stops."""
    served = waiting("s", "red", takes_place=False, needs_driver=True)
    choice = chosen(running("a"), waiting("b"), served)
    assert (choice.starts, list(choice.waiting)) == (("s",), ["b"])
    red = state(month=5, gpu_hours=5)
    held_back = chosen(running("a"), waiting("b"), served, red=red)
    assert (held_back.starts, list(held_back.waiting)) == ((), ["b", "s"])
    assert held_back.waiting["s"] == Waiting(2, Reason.QUOTA, red.used_up())
    runs = running("s", "red", takes_place=False)
    assert chosen(running("a"), runs, red=red).yielding == {"s": Yielding(shortage=red.used_up())}
    assert chosen(running("a"), replace(runs, is_leaving=True), red=red).yielding == {}
    assert chosen(running("s", takes_place=False), waiting("b")).starts == ("b",), "it has no place"


def test_a_burst_does_not_take_all_places() -> None:
    """Jobs that were just started count, so that teams without usage take turns."""
    burst = [waiting(job, "red") for job in "abcd"]
    choice = chosen(*burst, waiting("x", "blue"), waiting("y", "blue"), places=4)
    assert choice.starts == ("a", "x", "b", "y")
    begun = [running(job, "red", held_s=1) for job in "ab"]
    assert chosen(*begun, waiting("c", "red"), waiting("x", "blue"), places=3).starts == ("x",)


@pytest.mark.parametrize("place", ["", "b"])
def test_a_moved_job_comes_where_it_was_moved(place: str) -> None:
    entries = [waiting("a"), waiting("b"), waiting("c", moved_before=place, moved_at=1.0)]
    order = [*chosen(*entries, running("r"), running("s"), places=2).waiting]
    assert order == (["c", "a", "b"] if place == "" else ["a", "c", "b"])


def test_moves_hold_among_equal_priorities() -> None:
    """The latest move wins; a job moved to the front stays behind larger priorities."""
    first = waiting("b", moved_before="", moved_at=1.0)
    last = waiting("c", moved_before="", moved_at=2.0)
    gone = waiting("d", moved_before="z", moved_at=3.0)
    entries = [waiting("a"), first, last, gone, waiting("e", priority=1)]
    assert [*chosen(*entries, running("r", priority=9)).waiting] == ["e", "c", "b", "a", "d"]


def test_quotas_hold_jobs_back_and_say_so() -> None:
    """A job that would exceed a quota lets others pass, and says which quota, with both numbers."""
    red = state(max_running=1)
    entries = [running("r", "red"), waiting("a", "red"), waiting("b", "blue")]
    choice = chosen(*entries, places=3, red=red)
    assert choice.starts == ("b",)
    found = choice.waiting["a"]
    assert found.reason is Reason.QUOTA
    assert found.shortage is not None
    assert found.shortage.text("red") == "quota max_running of team red: 1 of 1 are used"
    entries = [running("r", "red", demand=Demand(3, 6)), waiting("a", "red", demand=Demand(2, 2))]
    found = chosen(*entries, places=3, red=state(max_replicas=4)).waiting["a"]
    assert found.shortage is not None
    assert found.shortage.text("red") == "quota max_replicas of team red: 3 of 4 are used, and the job needs 2"
    found = chosen(waiting("a", "red"), places=3, red=state(month=8.25, gpu_hours=8)).waiting["a"]
    assert found.shortage is not None
    assert found.shortage.text("red") == "quota gpu_hours of team red: 8.2 of 8 are used this month (UTC)"


def test_small_jobs_do_not_pass_one_that_needs_more_replicas() -> None:
    """Jobs of the same team that come later wait too, unless the quota can never hold the job before them."""
    red = state(max_replicas=2)
    entries = [running("r", "red"), waiting("a", "red", demand=Demand(2, 2)), waiting("b", "red"), waiting("c", "blue")]
    choice = chosen(*entries, places=4, red=red)
    assert choice.starts == ("c",)
    found = choice.waiting["b"].shortage
    assert found is not None
    assert found.text("red") == (
        "quota max_replicas of team red: 1 of 2 are used, and the rest is kept for a job before it"
    )
    assert chosen(*entries[1:], places=4, red=red).starts[0] == "a"
    never = replace(entries[1], demand=Demand(3, 3))
    assert set(chosen(entries[0], never, *entries[2:], places=4, red=red).starts) == {"b", "c"}


def test_used_up_gpu_hours_end_running_jobs() -> None:
    """A running job gives its place up once; a driver that has not begun is left until it has."""
    red, entry = state(month=8, gpu_hours=8), running("r", "red")
    assert chosen(entry, red=red).yielding["r"].shortage is not None
    assert chosen(replace(entry, is_leaving=True), red=red).yielding == {}
    assert chosen(replace(entry, may_yield=False), red=red).yielding == {}
    assert chosen(replace(entry, needs_driver=True), red=red) == Choice(
        waiting=chosen(waiting("r", "red"), red=red).waiting
    )
    assert chosen(entry, red=state(month=7.9, gpu_hours=8)) == Choice()


def test_a_larger_priority_takes_the_smallest_one() -> None:
    """The running job of the smallest priority gives its place up, of several the one that got its place last."""
    entries = [running("a"), running("b", priority=-1), running("c", priority=-1, held_s=3000)]
    choice = chosen(*entries, waiting("x"), places=3)
    assert choice.yielding == {"c": Yielding(to="x")}
    assert choice.waiting == {"x": Waiting(1, Reason.ROOM)}


def test_equal_priorities_never_take_a_place() -> None:
    assert chosen(running("a"), waiting("x")).yielding == {}
    assert chosen(running("a", held_s=1e9, priority=5), waiting("x", priority=5)).yielding == {}


def test_a_place_is_kept_for_a_time() -> None:
    """A job that just got its place, or whose driver has not begun, is not preempted."""
    urgent = waiting("x", priority=1)
    for kept in (running("a", held_s=KEEPS_PLACE_S - 1), running("a", may_yield=False)):
        choice = chosen(kept, urgent)
        assert choice.yielding == {}
        assert choice.waiting["x"].reason is Reason.PLACE
    assert chosen(running("a", held_s=KEEPS_PLACE_S), urgent).yielding


def test_one_job_is_preempted_for_each_urgent_one() -> None:
    """While a job leaves, its place is kept for the first job that waits."""
    leaving = running("a", is_leaving=True)
    choice = chosen(leaving, running("b"), waiting("x", priority=1), places=2)
    assert choice.yielding == {}
    assert choice.waiting == {"x": Waiting(1, Reason.ROOM)}
    choice = chosen(leaving, running("b"), waiting("x", priority=1), waiting("y", priority=1), places=2)
    assert choice.yielding == {"b": Yielding(to="y")}


def test_a_lost_driver_is_replaced_in_its_place() -> None:
    """A job keeps its place although others wait, unless fewer places are left or it exceeds a quota now."""
    entry = running("r", "red", needs_driver=True)
    assert chosen(entry, waiting("a", priority=9)).starts == ("r",)
    assert chosen(entry, running("s"), places=1).starts == ()
    edited = replace(entry, demand=Demand(5, 5))
    assert chosen(edited, places=1, red=state(max_replicas=4)).waiting["r"].reason is Reason.QUOTA


def test_estimates_come_from_running_jobs_alone() -> None:
    """The first job gets the place that is free first; nothing is estimated beyond what is known."""
    entries = [running(job) for job in "rst"]
    choice = chosen(*entries, waiting("a"), waiting("b"), waiting("c"), places=3)
    assert estimated_starts(choice, {"r": None, "s": NOW + 50, "t": NOW + 20}) == {"a": NOW + 20, "b": NOW + 50}
    assert estimated_starts(choice, {"r": None, "s": None, "t": None}) == {}
    taken = chosen(*entries, waiting("a", priority=1), waiting("b"), places=3)
    (leaving,) = taken.yielding
    assert estimated_starts(taken, {"r": NOW + 1, "s": NOW + 2, "t": NOW + 3, leaving: NOW}) == {
        "b": min({"r": NOW + 1, "s": NOW + 2, "t": NOW + 3}[job] for job in "rst" if job != leaving)
    }


# -- simulation --------------------------------------------------------------------------------------------------------

STEP_S = 900.0
LONGEST_H = 6.0
PLACES = 4
DECAY = 0.5 ** (STEP_S / 86_400 / HALF_LIFE_DAYS)


@dataclass
class Job:
    """A job of the simulation. Its driver stores its working time at the end of each step."""

    id: str
    team: str
    priority: int
    created_at: float
    work_h: float
    demand: Demand
    stored_h: float = 0.0
    placed_at: float | None = None
    is_leaving: bool = False
    ended_at: float | None = None
    preemptions: int = 0
    bound_at: float | None = None  # the time until which it must have a place

    def entry(self) -> Entry:
        has_place = self.placed_at is not None
        return Entry(
            self.id,
            self.team,
            self.priority,
            self.created_at,
            demand=self.demand,
            has_place=has_place,
            placed_at=self.placed_at,
            may_yield=has_place,
            is_leaving=self.is_leaving,
        )


@dataclass
class Simulation:
    """Teams that submit jobs to a server with PLACES places, under a fake clock.

    `backlogs` has the jobs that each team keeps waiting; 0 is a team that submits at random. `choose` is the function
    under test. Months are left out: a quota of GPU-hours is for the whole simulation.
    """

    seed: int
    limits: Mapping[str, TeamLimits]
    backlogs: Mapping[str, int]
    priorities: tuple[int, ...] = (0,)
    choose: Callable[..., Choice] = choose
    now: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    open: list[Job] = field(default_factory=list)  # those of `jobs` that have not ended
    recent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    used: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    over: set[str] = field(default_factory=set)  # teams that were seen beyond a quota
    late: list[str] = field(default_factory=list)  # jobs that waited beyond their bound
    num_jobs: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def run(self, days: float) -> None:
        until = self.now + days * 86_400
        while self.now < until:
            self.step(submits=True)

    def drain(self) -> None:
        """Submit no more jobs, until all have ended."""
        steps = 0
        while self.open:
            self.step(submits=False)
            steps += 1
            assert steps < 200_000, "jobs never end"

    def step(self, *, submits: bool) -> None:
        if submits:
            self.submit()
        self.decide()
        self.now += STEP_S
        for team in self.recent:
            self.recent[team] *= DECAY
        for job in self.open:
            if job.placed_at is None:
                continue
            worked_h = min(STEP_S / HOUR, job.work_h - job.stored_h)
            job.stored_h += worked_h
            self.used[job.team] += worked_h * job.demand.num_gpus
            self.recent[job.team] += worked_h * job.demand.num_gpus
            if job.stored_h >= job.work_h - 1e-9:
                job.ended_at, job.placed_at = self.now, None
            elif job.is_leaving:  # at the border of a chunk
                job.placed_at, job.is_leaving = None, False
        self.open = [job for job in self.open if job.ended_at is None]

    def submit(self) -> None:
        for team, backlog in self.backlogs.items():
            number = backlog - sum(job.team == team and job.placed_at is None for job in self.open)
            if backlog == 0:
                number = self.random.choice((1, 2, 10)) if self.random.random() < 0.01 else 0
            for _ in range(number):
                self.num_jobs += 1
                replicas = self.random.choice((1, 1, 2))
                demand = Demand(replicas, replicas * self.random.choice((1, 2)))
                hours = self.random.uniform(0.2, LONGEST_H)
                priority = self.random.choice(self.priorities)
                job = Job(f"{self.num_jobs:06}", team, priority, self.now, hours, demand)
                self.jobs.append(job)
                self.open.append(job)

    def decide(self) -> None:
        found = list(self.open)
        teams = {
            team: TeamState(limits, TeamUsage(self.recent[team], self.used[team]))
            for team, limits in self.limits.items()
        }
        choice = self.choose([job.entry() for job in found], teams, places=PLACES, now=self.now)
        by_id = {job.id: job for job in found}
        for job in choice.starts:
            by_id[job].placed_at, by_id[job].bound_at = self.now, None
        for job in choice.yielding:
            assert by_id[job].placed_at is not None, "only a running job gives its place up"
            by_id[job].is_leaving = True
            by_id[job].preemptions += 1
        self.check(found, choice)

    def check(self, found: list[Job], choice: Choice) -> None:
        placed = [job for job in found if job.placed_at is not None]
        assert len(placed) <= PLACES
        assert {job.id for job in found if job.placed_at is None} == set(choice.waiting), "each job has a reason"
        assert [each.position for each in choice.waiting.values()] == [*range(1, len(choice.waiting) + 1)]
        if len(placed) < PLACES:
            assert all(each.reason is Reason.QUOTA for each in choice.waiting.values()), "a place is left free"
        for team, limits in self.limits.items():
            own = [job for job in placed if job.team == team]
            if limits.max_running is not None and len(own) > limits.max_running:
                self.over.add(team)
            if limits.max_replicas is not None and sum(job.demand.replicas for job in own) > limits.max_replicas:
                self.over.add(team)
            # Running jobs take a step to end after the one in which the last hours were used, with 4 GPUs at most.
            slack_h = 2 * STEP_S / HOUR * 4 * PLACES
            if limits.gpu_hours is not None and self.used[team] > limits.gpu_hours + slack_h:
                self.over.add(team)
        self.check_bounds(found)

    def check_bounds(self, found: list[Job]) -> None:
        """Set the bound of each job that is the oldest of its team, and note the jobs that wait beyond theirs."""
        heads: dict[str, Job] = {}
        for job in sorted(found, key=lambda job: (job.created_at, job.id)):
            if job.placed_at is None:
                heads.setdefault(job.team, job)
        for job in heads.values():
            if job.bound_at is None:
                job.bound_at = self.now + self.bound_h(job, found) * HOUR
            if self.now > job.bound_at:
                self.late.append(job.id)

    def bound_h(self, head: Job, found: list[Job]) -> float:
        """Hours that the oldest waiting job of a team waits at most, if all jobs have equal priorities.

        First, other teams get places until their usage relative to their weights equals the team's: `excess` GPU-hours
        on all places. Then the job waits for jobs that are still running.
        """
        own = sum(
            max(MIN_CHARGE_H, job.work_h - job.stored_h) * job.demand.num_gpus
            for job in found
            if job.team == head.team and job.placed_at is not None
        )
        level = (self.recent[head.team] + own) / self.limits[head.team].weight
        excess = sum(
            max(0.0, level * limits.weight - self.recent[team])
            for team, limits in self.limits.items()
            if team != head.team
        )
        return excess / PLACES + 2 * LONGEST_H + STEP_S / HOUR

    def shares(self) -> dict[str, float]:
        total = sum(self.used.values())
        return {team: self.used[team] / total for team in self.limits}


WEIGHTS = {"red": TeamLimits(weight=1), "blue": TeamLimits(weight=2), "green": TeamLimits(weight=3)}


def check_shares(simulation: Simulation) -> None:
    """Teams that always have jobs get GPU-hours within 10 % of their weights."""
    simulation.run(45)
    total = sum(limits.weight for limits in simulation.limits.values())
    for team, share in simulation.shares().items():
        fair = simulation.limits[team].weight / total
        assert abs(share - fair) < 0.1 * fair, (team, share, fair)


def check_starvation(simulation: Simulation) -> None:
    """No job waits beyond its bound, and all jobs end."""
    for _ in range(10):
        simulation.run(1)
        assert simulation.late == []
    simulation.drain()
    assert simulation.late == []
    assert all(job.ended_at is not None for job in simulation.jobs)


def check_quotas(simulation: Simulation) -> None:
    for _ in range(20):
        simulation.run(1)
        assert simulation.over == set()
    assert simulation.num_jobs > 100


def check_preemption(simulation: Simulation) -> None:
    """Every job works as long as it has to, however often it is preempted, and each time for a while."""

    def check_stays() -> None:
        for job in simulation.jobs:
            assert job.preemptions * KEEPS_PLACE_S <= job.work_h * HOUR, "each stay is long enough"

    for _ in range(15):
        simulation.run(1)
        check_stays()
    assert sum(job.preemptions > 0 for job in simulation.jobs) > 20
    simulation.drain()
    check_stays()
    for job in simulation.jobs:
        assert job.stored_h == pytest.approx(job.work_h)
    assert not [job for job in simulation.jobs if job.preemptions and job.priority == max(simulation.priorities)]


def fair(seed: int = 0, **options: Any) -> Simulation:
    return Simulation(seed, WEIGHTS, dict.fromkeys(WEIGHTS, 3), **options)


def busy(seed: int = 0, **options: Any) -> Simulation:
    """Two teams submit at random, in bursts, and one always has jobs."""
    return Simulation(seed, WEIGHTS, {"red": 0, "blue": 0, "green": 3}, **options)


def limited(seed: int = 0, **options: Any) -> Simulation:
    limits = {
        "red": TeamLimits(max_running=1),
        "blue": TeamLimits(max_replicas=2),
        "green": TeamLimits(gpu_hours=200.0),
        "free": TeamLimits(),
    }
    return Simulation(seed, limits, {"red": 3, "blue": 3, "green": 3, "free": 0}, priorities=(-1, 0, 0, 2), **options)


def urgent(seed: int = 0, **options: Any) -> Simulation:
    return Simulation(seed, WEIGHTS, {"red": 0, "blue": 0, "green": 1}, priorities=(-5, 0, 0, 0, 5), **options)


def wide(seed: int = 0, **options: Any) -> Simulation:
    """A team always has jobs of one replica and of as many as its quota permits."""
    return Simulation(seed, {"blue": TeamLimits(max_replicas=2)}, {"blue": 3}, **options)


CHECKS: dict[str, tuple[Callable[..., Simulation], Callable[[Simulation], None]]] = {
    "shares": (fair, check_shares),
    "starvation": (busy, check_starvation),
    "replicas": (wide, check_starvation),
    "quotas": (limited, check_quotas),
    "preemption": (urgent, check_preemption),
}


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CHECKS)
def test_random_loads_keep_the_rules(name: str, seed: int) -> None:
    """Shares are those of the weights, no job starves, no quota is exceeded, and preemption loses nothing."""
    simulation, check = CHECKS[name]
    check(simulation(seed))


def changed(
    entries: Callable[[Entry], Entry] = lambda entry: entry, teams: Callable[[TeamState], TeamState] = lambda team: team
) -> Callable[..., Choice]:
    """`choose` with a mistake: it sees jobs or teams after a wrong change."""

    def choose_wrongly(found: list[Entry], states: Mapping[str | None, TeamState], **options: Any) -> Choice:
        known = {name: teams(state) for name, state in states.items()}
        return choose([entries(entry) for entry in found], known, **options)

    return choose_wrongly


MISTAKES: dict[str, tuple[str, Callable[..., Choice]]] = {
    "weights do not count": (
        "shares",
        changed(teams=lambda team: replace(team, limits=replace(team.limits, weight=1.0))),
    ),
    "usage does not count": ("shares", changed(teams=lambda team: replace(team, usage=TeamUsage()))),
    "the youngest job is first": (
        "starvation",
        changed(lambda entry: replace(entry, created_at=-entry.created_at)),
    ),
    "teams are one queue": ("shares", changed(lambda entry: replace(entry, team=None))),
    "a quota of jobs is off by one": (
        "quotas",
        changed(teams=lambda team: replace(team, limits=replace(team.limits, max_running=2))),
    ),
    "replicas do not count": ("quotas", changed(lambda entry: replace(entry, demand=Demand(0, 1)))),
    "jobs with few replicas pass": (
        "replicas",
        changed(lambda entry: replace(entry, priority=-entry.demand.replicas)),
    ),
    "GPU-hours have no end": (
        "quotas",
        changed(teams=lambda team: replace(team, limits=replace(team.limits, gpu_hours=None))),
    ),
    "equal priorities preempt": (
        "preemption",
        changed(lambda entry: replace(entry, priority=entry.priority + (not entry.has_place))),
    ),
    "nothing is preempted": ("preemption", changed(lambda entry: replace(entry, may_yield=False))),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_simulation_finds_mistakes(mistake: str) -> None:
    """Each check fails for a choice that breaks its rule."""
    name, wrong = MISTAKES[mistake]
    simulation, check = CHECKS[name]
    with pytest.raises(AssertionError):
        check(simulation(choose=wrong))
