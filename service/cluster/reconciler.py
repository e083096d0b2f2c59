"""Reconciler: keeps a driver running for every unfinished job. A driver runs as a Ray Job.

A thread of the server restarts Ray if the server runs its own Ray cluster, submits a driver for every job that needs
one, and replaces lost drivers. It relies only on SQL (results and heartbeats) and on the states of Ray Jobs that the
cluster reports, so it may be killed at any moment. Drivers are submitted over HTTP: the server itself is not a Ray
driver and survives the cluster.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from service.cluster.dashboard import RayDashboard
from service.cluster.host import Host
from service.cluster.job_client import job_client
from service.cluster.node_calls import NodeCalls, nodes_of
from service.cluster.queue import Choice, Entry, Reason, TeamState, Yielding, choose, estimated_starts
from service.cluster.repeats import Repeats
from service.cluster.session import prepare_environment
from service.disk import DRAINED, sign_lock
from service.errors import NotFound
from service.store import Store
from service.store.accounts import AccountStore, Actor
from service.store.servers import Leadership
from service.store.steering import SteeringStore
from service.types import (
    HEARTBEAT_S,
    RESUMED_BY_REQUEST,
    Account,
    Demand,
    JobRecord,
    JobState,
    TeamLimits,
    TeamUsage,
)
from workers.telemetry import logs, tracing
from workers.telemetry.environment import passed_on

__all__ = [
    "MAX_CONSECUTIVE_FAILURES",
    "MAX_RUNNING",
    "STARTING",
    "Action",
    "Decision",
    "QueueState",
    "RayCluster",
    "decide",
    "submission_id",
]

logger = logging.getLogger(__name__)

POLL_S = 1.0

# What a job waits for after its driver was submitted.
STARTING = "its driver to start"

# Module that a job's driver runs.
JOB_MODULE = "service.jobs.driver"

# Seconds without a heartbeat after which a driver is considered dead.
LOST_AFTER_S = 6 * HEARTBEAT_S

# Seconds from a submission to the driver's first heartbeat: Ray starts a supervisor, and the driver imports torch.
START_GRACE_S = 300.0

# Seconds from storing a submission until the cluster knows its Ray Job.
SUBMISSION_GRACE_S = 5.0

# Drivers in a row that stored no result, after which the job fails. Drivers that ended because a model or an engine was
# not available only delay the next driver.
MAX_CONSECUTIVE_FAILURES = 5
BACK_OFF_S, MAX_BACK_OFF_S = 2.0, 300.0
MAX_DOUBLINGS = 20

# Characters of a refusal that are kept: Ray sends a traceback, whose end says why.
MAX_REFUSAL = 400

# Seconds between counts of the cluster's machines.
NODES_S = 15.0

# Places by default: jobs with a driver at the same time. A driver takes some hundred MB of memory; engines are shared.
MAX_RUNNING = 4

# Who asks jobs to give up their places, in the audit log.
QUEUE = Actor(None, "queue")


class Action(StrEnum):
    """Next action of the reconciler, the server's thread that keeps drivers running, for an unfinished job.

    A driver is a process, in a Ray Job, that works on the job. A driver is asked to end early for one of these reasons:
    the job was asked to pause; the job must give up its place, for a job of larger priority (preemption) or because of
    a quota; or the job was edited.

    - WAIT: do nothing
    - SUBMIT: submit a driver
    - STOP: stop the current driver, so that another can be submitted
    - GIVE_UP: end the job as FAILED
    - INTERRUPT: ask the driver to end after the samples that are being scored, for one of the reasons above
    - SETTLE: store the job's new state after the driver has ended: PAUSED if the job was asked to pause, STOPPED if it
      gave up its place
    """

    WAIT = "wait"
    INTERRUPT = "interrupt"
    SETTLE = "settle"
    SUBMIT = "submit"
    STOP = "stop"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """Next action of the server for an unfinished job (`action`), with its reason (`because`).

    If `again` is True, the last driver (a process that works on the job) is submitted again under the same number,
    because the Ray cluster never received it. `until` is the time at which the next driver is submitted, in seconds
    since the epoch; None means at once.
    """

    action: Action
    because: str | None = None
    again: bool = False
    until: float | None = None


@dataclass(frozen=True)
class QueueState:
    """State of the queue after the server has last decided which jobs run.

    - `places`: number of jobs that may run at the same time
    - `running`: ids of the jobs that hold a place, ordered by the time at which their last driver was submitted
    - `choice`: the jobs that wait, in order, each with the reason why it waits
    - `estimates`: expected starts of waiting jobs in seconds since the epoch, keyed by job id; jobs without an estimate
      are left out
    """

    places: int = MAX_RUNNING
    running: tuple[str, ...] = ()
    choice: Choice = field(default_factory=Choice)
    estimates: Mapping[str, float] = field(default_factory=dict)


def submission_id(job: JobRecord, number: int) -> str:
    """Id of the Ray Job that runs one of the drivers (processes that work on a job) of `job`.

    `number` counts the job's drivers from 1. The id is always the same for a driver, so that Ray refuses to start the
    same driver twice.
    """
    return f"{job.first_name or job.name}-{job.id[:8]}-{number}"


def decide(
    job: JobRecord,
    ray_job: str | None,
    *,
    consecutive_failures: int,
    now: float,
    watched_since: float = 0.0,
    message: str | None = None,
    consecutive_waits: int = 0,
    refusal: str | None = None,
) -> Decision:
    """Decide the server's next action for an unfinished job.

    A driver is the process that works on the job; it runs as a Ray Job. While the Ray Job is pending or running, the
    server waits, or stops the Ray Job if the driver makes no progress. After a driver has ended, the server submits
    another driver, after a pause that grows with the number of drivers in a row that stored no result. After too many
    drivers in a row without a result, the server ends the job as FAILED. Drivers that ended because something that they
    need, such as a model or an engine, was not available do not count. A driver that the cluster did not receive is
    submitted again. A job that was asked to pause gets no driver. A job whose driver was asked to end for another job,
    or for a quota, is stored as STOPPED when the driver has ended; it is then a job that waits.

    Args:
        job: The stored job.
        ray_job: State of the Ray Job of the job's last driver; None if the cluster does not know the Ray Job.
        consecutive_failures: Number of the last drivers in a row that ended without a result.
        now: The current time in seconds since the epoch, by the clock of the stored times.
        watched_since: Time since which the database has answered, by the same clock.
        message: The cluster's explanation of `ray_job`; None without an explanation.
        consecutive_waits: Number of the last drivers in a row that ended because something that they need was not
            available.
        refusal: Reason why the cluster did not accept the last driver; None if the driver was accepted.
    """
    has_ray_job = ray_job in ("PENDING", "RUNNING")
    if job.is_paused and not has_ray_job:
        return Decision(Action.WAIT if job.state is JobState.PAUSED else Action.SETTLE)
    if job.yields and not has_ray_job:
        return Decision(Action.SETTLE)
    if job.submissions == 0:
        return Decision(Action.SUBMIT)
    has_begun = job.attempt > job.submitted_after
    if has_ray_job:
        reason = _reason_to_stop(job, now=now, watched_since=watched_since)
        if reason is None and has_begun and (job.is_paused or job.yields or job.is_outdated):
            return Decision(Action.INTERRUPT)
        return Decision(Action.STOP, reason) if reason else Decision(Action.WAIT)
    is_refused = ray_job is None and not has_begun and refusal is not None
    if ray_job is None and not has_begun and not is_refused:
        is_under_way = now - job.submitted_at < SUBMISSION_GRACE_S
        return Decision(Action.WAIT) if is_under_way else Decision(Action.SUBMIT, again=True)
    because = (
        f"Ray refused its driver's job: {refusal}"
        if is_refused
        else _end_of_driver(ray_job, (has_begun and job.reason) or message or "no reason given")
    )
    if consecutive_failures >= MAX_CONSECUTIVE_FAILURES and not consecutive_waits:
        return Decision(
            Action.GIVE_UP, f"{consecutive_failures} drivers in a row ended without a result; the last one: {because}"
        )
    setbacks = min(consecutive_failures + consecutive_waits, MAX_DOUBLINGS)
    until = job.submitted_at + min(BACK_OFF_S * 2**setbacks, MAX_BACK_OFF_S)
    return (
        Decision(Action.WAIT, because, until=until)
        if now < until
        else Decision(Action.SUBMIT, because, again=is_refused)
    )


def _end_of_driver(ray_job: str | None, reason: str) -> str:
    if reason == RESUMED_BY_REQUEST:
        return reason
    if ray_job is None:
        return "the cluster does not know its driver's job: Ray was restarted"
    return f"its driver ended (Ray job {ray_job}): {' '.join(reason.split())}"


def _reason_to_stop(job: JobRecord, *, now: float, watched_since: float) -> str | None:
    """Reason to replace the running driver, the process that works on `job`; None if the driver may continue.

    A driver is replaced if it does not start, sends no heartbeats, or makes no progress for too long. `now` is the
    current time, and `watched_since` is the time since which the database has answered, both in seconds since the
    epoch. Only the time after `watched_since` counts, because before it the driver could not store heartbeats.
    """
    heard_at = job.heartbeat_at or 0.0
    if job.attempt <= job.submitted_after or heard_at < job.submitted_at:  # the heartbeat is the previous driver's
        is_late = now - max(job.submitted_at, watched_since) > START_GRACE_S
        return f"its driver did not start within {START_GRACE_S:.0f} s" if is_late else None
    if now - max(heard_at, watched_since) > LOST_AFTER_S:
        return f"its driver sent no heartbeat for {now - heard_at:.0f} s"
    if job.progressed_at is None or job.patience_s is None:
        return None
    idle_s = heard_at - job.progressed_at
    return f"its driver made no progress for {idle_s:.0f} s" if idle_s > job.patience_s else None


class RayCluster:
    """Thread of the server that keeps a driver running for every unfinished job.

    A driver is a process, in a Ray Job, that works on a job. If several servers use the database, one of them is the
    leader. Only the leader starts and stops drivers, and runs Ray. The other servers compute the same decisions from
    the stored state, so that all servers give the same answers. If the leader ends, another server becomes the leader.

    The Ray cluster is the one that the environment variable RAY_ADDRESS names. Without this variable, the server runs a
    cluster on this machine, with Ray's dashboard at `dashboard_host` and `dashboard_port`. The method `start` returns
    at once. The method `not_ready` says why no job can continue yet.

    `files` is the location of artifacts; None is a directory in `data_dir`. At most `places` jobs have a driver at the
    same time; jobs whose kind is in `placeless` are not counted. `demand_of` returns the replicas and GPUs that a
    running job occupies. `time_left_of` returns the seconds that a job still takes, counted from its last heartbeat, or
    None if that is not known. `page_of` returns the URL of a job's page on the server, which Ray's dashboard shows
    among the metadata of the job's Ray Jobs; None if the server's URL is not known.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        *,
        files: str | None = None,
        dashboard_host: str,
        dashboard_port: int | None,
        places: int = MAX_RUNNING,
        demand_of: Callable[[JobRecord], Demand] = lambda _: Demand(),
        time_left_of: Callable[[JobRecord], float | None] = lambda _: None,
        placeless: Collection[str] = (),
        page_of: Callable[[JobRecord], str | None] = lambda _: None,
    ) -> None:
        self._store = store
        self._steering = SteeringStore(store)
        self._accounts = AccountStore(store)
        self._places, self._demand_of, self._time_left_of = places, demand_of, time_left_of
        self._leadership = Leadership(store)
        self._clock_s = 0.0  # seconds to add to this machine's clock to get the clock of stored times
        self._data_dir = data_dir
        self._files = files
        self._placeless = frozenset(placeless)
        self._page_of = page_of
        self._host: Host | None = None
        if "RAY_ADDRESS" not in os.environ:
            # Ray asks for a token by default, but decides so where it is started; server and Ray must agree.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            self._host = Host(data_dir, dashboard_host, dashboard_port)
        self._client: Any = None
        self._dashboard: RayDashboard | None = None
        self._not_ready: str | None = "Ray is being started"
        self._repeats = Repeats()
        self._is_drained = False  # when it was last looked up
        self._quiet: set[str] = set()  # cancelled jobs whose Ray Job has ended
        self._queue = QueueState(places)
        self._placed: frozenset[str] = frozenset()  # jobs with one of the places of running jobs
        self._asked_to_stop: set[str] = set()  # Ray Jobs of drivers that were asked to end by a drain
        self._interrupted: set[str] = set()  # Ray Jobs of drivers that were asked to end because their job pauses
        self._at_rest: set[str] = set()  # Ray Jobs of paused jobs that have ended
        self._delayed: dict[str, Decision] = {}  # jobs whose next driver starts later
        # Since when the database has answered, by the clock of the stored times; None before the first round.
        self._watched_since: float | None = None
        self._losses: dict[str, dict[int, str]] = {}  # why a job's drivers were lost since one last worked
        self._nodes: frozenset[str] = frozenset()  # addresses of the cluster's machines
        self._nodes_at: float | None = None  # when they were counted (time.monotonic())
        self._stopping = threading.Event()
        self._waking = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)

    @property
    def calls(self) -> NodeCalls | None:
        """Object that calls functions, such as checks of submitted jobs, on nodes of the Ray cluster.

        None if the server runs Ray itself, on its own machine.
        """
        if self._host is not None:
            return None
        return NodeCalls(lambda: (self._client, self._dashboard_url()), self._data_dir, self._files)

    # -- for the server --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the server's thread that starts and stops drivers, the processes that work on jobs.

        Ray is stopped too, if this server runs it and no other server uses it. Jobs continue when a server is started
        again.
        """
        self._stopping.set()
        self._waking.set()
        self._thread.join(timeout=30)
        if self._host is not None and self._leadership.is_leader and not self._leadership.has_others():
            self._host.stop()
        self._leadership.release()

    def is_leader(self) -> bool:
        return self._leadership.is_leader

    def wake(self) -> None:
        self._waking.set()

    def not_ready(self) -> str | None:
        return self._store.problem() or (DRAINED if self._is_drained else self._not_ready)

    def queue(self) -> QueueState:
        """The running jobs and the queue of waiting jobs, as of the server's last decision about which jobs run."""
        return self._queue

    def waiting_for(self, job: JobRecord, *, reader: Account | None = None) -> str | None:
        """Reason why `job` waits; None if a driver (process) works on the job, or if the job has ended.

        `reader` is the user who gets the text; None is a reader who may know everything. Only members of the team and
        administrators get texts with the numbers of a team's quota.
        """
        if job.state.is_finished:
            return None
        if job.is_paused:
            return "a request to resume it" if job.state is JobState.PAUSED else "its driver to end; then it is PAUSED"
        if job.yields:
            return "its driver to end; then it waits for a place"
        if (reason := self.not_ready()) is not None:
            return reason if reason in (self._store.problem(), DRAINED) else f"Ray: {reason}"
        pause = self._delayed.get(job.id)
        if pause is not None and pause.until is not None:
            return f"its next driver, in {max(pause.until - time.time() - self._clock_s, 0.0):.0f} s: {pause.because}"
        if (found := self._queue.choice.waiting.get(job.id)) is not None:
            if found.shortage is not None:
                is_insider = reader is None or reader.is_admin or job.team in reader.roles
                return found.shortage.text(job.team) if is_insider else "a quota of its team"
            if found.reason is Reason.ROOM:
                return "a running job to give up its place"
            return f"one of the {self._places} jobs before it to end"
        return job.waiting_for if job.attempt > job.submitted_after else STARTING

    def ray_job(self, job: JobRecord) -> str | None:
        return submission_id(job, job.submissions) if job.submissions else None

    def dashboard(self) -> RayDashboard | None:
        return self._dashboard

    def log(self, job: JobRecord) -> str:
        """Output of all drivers (processes) that worked on `job`. Raises ConnectionError while Ray does not answer."""
        client = self._client
        if client is None:
            raise ConnectionError(self._not_ready or "Ray is not running")
        parts = []
        for number in range(1, job.submissions + 1):
            name = submission_id(job, number)
            try:
                parts.append(f"==> {name} <==\n{client.get_job_logs(name)}")
            except (RuntimeError, OSError) as error:
                if not _is_unknown(error):
                    raise ConnectionError(f"Ray's dashboard does not answer: {error}") from error
                parts.append(f"==> {name} <==\n(its log was lost with the Ray cluster that it ran on)\n")
        return "\n".join(parts)

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._round()
            self._waking.wait(POLL_S)
            self._waking.clear()

    def _round(self) -> None:
        try:
            was_leader, is_leader = self._leadership.is_leader, self._leadership.is_held()
            if is_leader and not was_leader:
                sign_lock(self._data_dir)
                self._watched_since = None
            before, self._not_ready = self._not_ready, self._connect(is_leader)
            if self._not_ready not in (None, before) and self._repeats.is_new(f"jobs wait: {self._not_ready}"):
                logger.warning("jobs wait: %s", self._not_ready)
            self._is_drained = self._store.is_drained()
            if self._not_ready is None and not self._is_drained:
                self._asked_to_stop.clear()
                self._look_at_jobs(is_leader)
            elif self._not_ready is None and is_leader:
                self._stop_drivers()
        except SQLAlchemyError as error:
            self._not_ready = self._store.problem()
            self._watched_since = None
            if self._not_ready is None:
                self._log_failure(error)
                self._not_ready = f"database: {error}"
        except OSError as error:
            self._lose(error)
        except Exception as error:  # the next round starts from the same stored state
            self._log_failure(error)
            self._lose(error)

    def _connect(self, is_leader: bool) -> str | None:
        """Connect to the Ray cluster, and return the reason why it cannot be used; None if the cluster can be used.

        `is_leader` says whether this server is the leader: the only one of the servers with the same database that
        starts Ray. If the leader runs a Ray cluster of its own, and this cluster does not run, the cluster is started
        first.
        """
        if self._host is not None and (reason := self._host.not_ready(may_start=is_leader)) is not None:
            self._disconnect(reason)
            return reason
        url = self._host.dashboard_url if self._host is not None else None
        if self._client is not None and url in (None, self._dashboard_url()):
            return self._too_many_machines()
        prepare_environment()
        from ray.dashboard.utils import get_address_for_submission_client

        try:
            url = url or get_address_for_submission_client(None)
            self._client, self._dashboard = job_client(url), RayDashboard.at(url)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError or ValueError, depending on the cause
            return f"Ray's dashboard does not answer: {error}"
        if self._repeats.is_new(f"Ray's dashboard: {url}"):
            logger.info("Ray's dashboard: %s", url)
        return self._too_many_machines()

    def _too_many_machines(self) -> str | None:
        """Reason why no job may start: Ray has several machines, but the database is an SQLite file on one of them.

        Returns None otherwise. The machines are counted again every NODES_S seconds.
        """
        if self._host is not None or not self._store.is_on_one_machine:
            return None
        now = time.monotonic()
        if self._nodes_at is None or now - self._nodes_at > NODES_S:
            self._nodes, self._nodes_at = _machines(self._dashboard_url()), now
        if len(self._nodes) < 2:
            return None
        return (
            f"Ray has {len(self._nodes)} machines ({', '.join(sorted(self._nodes))}), and SQLite is a file of one: "
            "several machines need PostgreSQL (`mergesearch serve --database postgresql://USER@HOST/NAME`; "
            "`mergesearch database move` copies this database)"
        )

    def _log_failure(self, error: Exception) -> None:
        if self._repeats.is_new(f"failed: {type(error).__name__}: {error}"):
            logger.error("a round over the jobs failed", exc_info=error)

    def _lose(self, error: Exception) -> None:
        if self._repeats.is_new(f"lost: {type(error).__name__}"):
            logger.warning("Ray's dashboard does not answer (%s)", type(error).__name__)
        self._disconnect(f"Ray's dashboard does not answer: {error}")

    def _disconnect(self, reason: str) -> None:
        self._client, self._dashboard, self._not_ready = None, None, reason

    def _dashboard_url(self) -> str | None:
        return None if self._dashboard is None else self._dashboard.url

    def _look_at_jobs(self, is_leader: bool) -> None:
        jobs = self._store.unfinished_jobs()
        now = self._store.now()
        self._clock_s = now - time.time()
        if self._watched_since is None:
            self._watched_since = now
        seen = {job.id: found for job in jobs if (found := self._decision(job, now=now)) is not None}
        self._delayed = {job: found for job, (found, _) in seen.items() if found.until is not None}
        entries = [
            entry for job in jobs if job.id in seen if (entry := self._entry(job, *seen[job.id], now=now)) is not None
        ]
        choice = choose(entries, self._teams() if entries else {}, places=self._places, now=now)
        started = {*choice.starts}
        by_id = {job.id: job for job in jobs}
        if is_leader:
            for job, yielding in choice.yielding.items():
                with logs.fields(job=job):
                    self._make_room(by_id[job], yielding, by_id)
            for job, (decision, _) in seen.items():
                with logs.fields(job=job):
                    self._act(by_id[job], decision)
            started = set()
            for job in choice.starts:
                with logs.fields(job=job):
                    started |= {job} if self._start(by_id[job], seen[job][0]) else set()
        running = started.union(entry.id for entry in entries if entry.has_place and not entry.needs_driver)
        self._placed = frozenset(entry.id for entry in entries if entry.takes_place and entry.id in running)
        self._queue = self._state(choice, jobs)
        leaving = {
            submission_id(job, job.submissions) for job in jobs if job.is_paused or job.yields or job.is_outdated
        }
        self._at_rest &= {submission_id(job, job.submissions) for job in jobs if job.state is JobState.PAUSED}
        self._interrupted &= leaving  # a job that is resumed meanwhile may be paused again
        if is_leader:
            self._stop_cancelled()

    def _state(self, choice: Choice, jobs: Sequence[JobRecord]) -> QueueState:
        running = sorted((job for job in jobs if job.id in self._placed), key=lambda job: job.submitted_at)
        ends = {job.id: self._end_of(job) for job in running}
        return QueueState(self._places, tuple(ends), choice, estimated_starts(choice, ends))

    def _end_of(self, job: JobRecord) -> float | None:
        """Expected end of a running job; None if its progress allows no estimate.

        The time is in seconds since the epoch.
        """
        time_left_s = self._time_left_of(job)
        return None if time_left_s is None or job.heartbeat_at is None else job.heartbeat_at + time_left_s

    def _teams(self) -> dict[str | None, TeamState]:
        limits, usage = self._accounts.limits(), self._store.team_usage()
        return {
            team: TeamState(limits.get(team or "", TeamLimits()), usage.get(team, TeamUsage()))
            for team in {*limits, *usage}
        }

    def _stop_drivers(self) -> None:
        """Ask the drivers, which are the processes that work on unfinished jobs, to end.

        The server calls this method when an operator has drained the servers for maintenance. A driver first stores the
        samples that are being scored. Each driver is asked only once.
        """
        for job in self._store.unfinished_jobs():
            name = submission_id(job, job.submissions)
            if name in self._asked_to_stop:
                continue
            if self._ray_job(job)[0] in ("PENDING", "RUNNING"):
                logger.info("job %s: stopping %s: %s", job.id, name, DRAINED)
                self._client.stop_job(name)
                self._asked_to_stop.add(name)

    def _decision(self, job: JobRecord, *, now: float) -> tuple[Decision, bool] | None:
        """Decide the server's next action for an unfinished job, and find out whether the job's last Ray Job is active.

        Returns the decision, and whether the Ray Job is pending or running; or None for a PAUSED job whose Ray Job has
        ended. `now` is in seconds since the epoch.
        """
        name = submission_id(job, job.submissions)
        if job.state is JobState.PAUSED and name in self._at_rest:
            return None
        ray_job, message = self._ray_job(job)
        decision = decide(
            job,
            ray_job,
            consecutive_failures=self._store.consecutive_failures(job.id),
            consecutive_waits=self._store.consecutive_waits(job.id),
            refusal=self._store.refusal(job.id) if ray_job is None and job.attempt <= job.submitted_after else None,
            now=now,
            watched_since=self._watched_since or now,
            message=message,
        )
        has_ray_job = ray_job in ("PENDING", "RUNNING")
        if job.state is JobState.PAUSED and job.is_paused and not has_ray_job:
            self._at_rest.add(name)
        return decision, has_ray_job

    def _entry(self, job: JobRecord, decision: Decision, has_ray_job: bool, *, now: float) -> Entry | None:
        """Describe a job for the queue; None if the job neither runs nor may run now.

        `decision` is the server's next action for the job. `has_ray_job` says whether the Ray Job of the job's last
        driver (the process that works on it) is pending or running. `now` is in seconds since the epoch.
        """
        needs_driver = decision.action is Action.SUBMIT
        is_idle = not has_ray_job and (job.is_paused or job.yields)
        if is_idle or decision.until is not None or decision.action is Action.GIVE_UP:
            return None
        has_place = not needs_driver or job.id in self._placed or job.has_driver(now=now)
        return Entry(
            job.id,
            job.team,
            job.priority,
            job.created_at,
            demand=self._demand_of(job),
            has_place=has_place,
            needs_driver=needs_driver,
            placed_at=job.submitted_at if has_place else None,
            may_yield=has_ray_job and job.attempt > job.submitted_after,
            is_leaving=not needs_driver and (job.is_paused or job.yields),
            takes_place=job.kind not in self._placeless,
            moved_before=job.moved_before,
            moved_at=job.moved_at,
        )

    def _make_room(self, job: JobRecord, yielding: Yielding, jobs: Mapping[str, JobRecord]) -> None:
        """Store that a running job must end for now; its driver is asked to end in the reconciler's next round.

        A driver is the process that works on a job. `yielding` has the reason: another job that must run first, or a
        quota that is used up. `jobs` contains all jobs, keyed by id. Every reader of the job sees the stored reason.
        Therefore the reason does not name the other job; only the audit log names it.
        """
        if yielding.to is None:
            because = "quota gpu_hours: its team has used up its GPU-hours of this month"
            after = {"quota": "gpu_hours"}
        else:
            because = f"a job of priority {jobs[yielding.to].priority} needs its place"
            after = {"for": f"job {yielding.to}"}
        if self._accounts.preempt(job, because, actor=QUEUE, after=after):
            logger.info("job %s: gives its place up: %s", job.id, because)

    def _act(self, job: JobRecord, decision: Decision) -> None:
        """Carry out `decision` about an unfinished job, unless it is the decision to start a driver.

        A driver is a process that works on a job. The decision may be to stop the driver, to ask it to end, or to fail
        the job.
        """
        if job.attempt > job.submitted_after and decision.action is Action.WAIT and decision.until is None:
            self._losses.pop(job.id, None)
        if decision.action is Action.STOP:
            self._lose_driver(job, decision.because)
            self._client.stop_job(submission_id(job, job.submissions))
        elif decision.action is Action.INTERRUPT:
            self._interrupt(job)
        elif decision.action is Action.SETTLE:
            self._steering.settle(job.id)
        elif decision.action is Action.GIVE_UP:
            logger.error("job %s: given up: %s", job.id, decision.because)
            self._store.open_attempt(job.id, because="giving up").set_state(JobState.FAILED, decision.because)

    def _start(self, job: JobRecord, decision: Decision) -> bool:
        """Submit a driver, a process that works on a job, to the Ray cluster; return whether the cluster accepted it.

        `decision` has the reason why the last driver is replaced, and says whether the last submission is repeated.
        """
        self._lose_driver(job, decision.because)
        # A Ray Job that never reached the cluster is submitted again under the same id.
        because = "; then ".join(self._losses.get(job.id, {}).values()) or None
        return self._submit(job, job.submissions + (not decision.again), because)

    def _interrupt(self, job: JobRecord) -> None:
        """Ask the driver of a job, the process that works on it, to end because the job is to pause or was edited.

        The driver first stores the samples that are being scored. Each driver is asked only once.
        """
        name = submission_id(job, job.submissions)
        if name not in self._interrupted:
            because = "pauses" if job.is_paused else "makes room" if job.yields else "was edited"
            logger.info("job %s: stopping %s: the job %s", job.id, name, because)
            self._client.stop_job(name)
            self._interrupted.add(name)

    def _lose_driver(self, job: JobRecord, because: str | None) -> None:
        """Remember why the last driver of a job (the process that works on it) is replaced, to tell the next driver.

        Later reasons for the same driver are ignored. If `because` is None, nothing is remembered.
        """
        if because is not None:
            self._losses.setdefault(job.id, {}).setdefault(job.submissions, because)

    def _submit(self, job: JobRecord, number: int, because: str | None) -> bool:
        """Submit a driver (a process that works on `job`) as a Ray Job; return whether the Ray cluster accepted it.

        `number` counts the job's drivers from 1. `because` says why the previous driver was replaced; None if there is
        no reason to state.
        """
        self._store.record_submission(job.id, number)
        name = submission_id(job, number)
        logger.info("job %s: submitting %s%s", job.id, name, f" ({because})" if because else "")
        # On other machines this interpreter's path does not exist.
        python = sys.executable if self._host is not None else "python"
        command = [python, "-m", JOB_MODULE, "--data", str(self._data_dir), "--job", job.id]
        if self._files is not None:
            command += ["--files", self._files]
        if self._host is not None and (address := self._host.address) is not None:
            command += ["--ray-address", address]
        attributes: tracing.Attributes = {
            "mergesearch.job": job.id,
            "mergesearch.name": job.name,
            "mergesearch.submission": number,
        }
        # The dashboard lists jobs by "job_name".
        metadata = {"job_name": job.name, "study_id": job.id}
        if (page := self._page_of(job)) is not None:
            metadata["page"] = page
        try:
            with tracing.span("submit driver", attributes, parent=job.traceparent):
                self._client.submit_job(
                    entrypoint=shlex.join([*command, *(["--because", because] if because else [])]),
                    submission_id=name,
                    metadata=metadata,
                    **({"runtime_env": {"env_vars": variables}} if (variables := passed_on()) else {}),
                )
        except RuntimeError as error:
            if _accepts_no_jobs(error):
                raise ConnectionError(f"Ray accepts no jobs yet: {error}") from error
            logger.error("job %s: Ray refused %s: %s", job.id, name, error)
            self._store.record_refusal(job.id, " ".join(str(error).split())[-MAX_REFUSAL:])
            return False
        return True

    def _stop_cancelled(self) -> None:
        for name in self._store.job_ids(JobState.CANCELLED):
            if name in self._quiet:
                continue
            try:
                job = self._store.job(name)
            except NotFound:  # deleted at this moment
                continue
            if self._ray_job(job)[0] in ("PENDING", "RUNNING"):
                self._client.stop_job(submission_id(job, job.submissions))
            else:
                self._quiet.add(name)

    def _ray_job(self, job: JobRecord) -> tuple[str | None, str | None]:
        """State of the Ray Job that ran the last driver (process) of a job, and Ray's message about it on one line.

        The message is None if Ray has no message. State and message are None if the cluster does not know the Ray Job.
        """
        if job.submissions == 0:
            return None, None
        try:
            info = self._client.get_job_info(submission_id(job, job.submissions))
        except RuntimeError as error:
            if _is_unknown(error):
                return None, None
            raise
        message, _, _ = (info.message or "").partition(", last available logs")
        return str(info.status.value), message.partition("\n")[0] or None


def _machines(dashboard_url: str | None) -> frozenset[str]:
    """Addresses of the machines of the Ray cluster with the dashboard at `dashboard_url`.

    Raises ConnectionError if the dashboard does not answer.
    """
    return frozenset(node.address for node in nodes_of(dashboard_url))


def _accepts_no_jobs(error: Exception) -> bool:
    """Whether the error of a submission says that the Ray cluster does not accept Ray Jobs yet.

    A new cluster answers other requests some time before its agents, which receive Ray Jobs, can be reached.
    """
    return any(sign in str(error) for sign in ("No available agent", "aiohttp.client_exceptions", "TimeoutError"))


def _is_unknown(error: Exception) -> bool:
    """Whether an error of Ray's client means that the Ray cluster does not know the requested Ray Job.

    The text of the error is searched, because Ray's client raises the same class for every refusal.
    """
    return "does not exist" in str(error) or "status code 404" in str(error)
