"""Reconciler: keeps a driver running for every unfinished job. A driver runs as a Ray Job.

A thread of the server restarts Ray if the server runs its own, submits a driver for every job that needs one, and
replaces lost drivers. It relies only on SQL (results and heartbeats) and on the states of Ray Jobs that the cluster
reports, so it may be killed at any moment. Drivers are submitted over HTTP: the server itself is not a Ray driver and
survives the cluster.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
import threading
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from service.cluster.host import Host
from service.cluster.job_client import job_client
from service.cluster.node_calls import NodeCalls, nodes_of
from service.cluster.session import prepare_environment
from service.disk import DRAINED, sign_lock
from service.errors import NotFound
from service.schemas.api import RayJobDocument
from service.store import Store
from service.store.servers import Leadership
from service.types import HEARTBEAT_S, RESUMED_BY_REQUEST, JobRecord, JobState

__all__ = ["MAX_CONSECUTIVE_FAILURES", "Action", "Decision", "RayCluster", "decide", "submission_id"]

logger = logging.getLogger(__name__)

POLL_S = 1.0

# Module that a job's driver runs.
JOB_MODULE = "service.jobs.driver"

# Seconds without a heartbeat after which a driver is considered dead.
LOST_AFTER_S = 6 * HEARTBEAT_S

# Seconds from a submission to the driver's first heartbeat: Ray starts a supervisor, and the driver imports torch.
START_GRACE_S = 300.0

# Seconds from storing a submission until the cluster knows its Ray Job.
SUBMISSION_GRACE_S = 5.0

# Drivers in a row that stored no result, after which the job fails. Drivers that found something missing for now, such
# as a model on an unmounted disk, only delay the next one.
MAX_CONSECUTIVE_FAILURES = 5
BACK_OFF_S, MAX_BACK_OFF_S = 2.0, 300.0
MAX_DOUBLINGS = 20

# Characters of a refusal that are kept: Ray sends a traceback, whose end says why.
MAX_REFUSAL = 400

# Seconds between counts of the cluster's machines.
NODES_S = 15.0

# Jobs with a driver at the same time; others wait. A driver takes some hundred MB of memory; engines are shared.
MAX_RUNNING = 4


class Action(StrEnum):
    """Next action of the reconciler, which keeps a driver running, for an unfinished job.

    - WAIT: do nothing
    - SUBMIT: submit a driver
    - STOP: stop the current driver, so that another can be submitted
    - GIVE_UP: end the job as FAILED
    - INTERRUPT: ask the driver to end after the samples that are being scored, because the job is to pause or was
      edited
    - SETTLE: store that the job is PAUSED, because it is to pause and its driver has ended
    """

    WAIT = "wait"
    INTERRUPT = "interrupt"
    SETTLE = "settle"
    SUBMIT = "submit"
    STOP = "stop"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Decision:
    """Next action of the reconciler for an unfinished job, with its reason `because`.

    If `again` is True, the last driver is submitted again under the same number, because the cluster never received it.
    `until` is the time at which the next driver is submitted, in seconds since the epoch; None means at once.
    """

    action: Action
    because: str | None = None
    again: bool = False
    until: float | None = None


def submission_id(job: JobRecord, number: int) -> str:
    """Id of the Ray Job in which the driver with the given number works on `job`.

    The id is always the same for a driver, so that Ray refuses to start the driver twice.
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
    """Decide what the reconciler does next for an unfinished job.

    While the job's Ray Job is pending or running, the reconciler waits, or stops the Ray Job if the driver makes no
    progress. After a driver has ended, the reconciler submits another one, after a pause that grows with the number of
    drivers in a row that stored no result. After too many such drivers the reconciler ends the job as FAILED, unless
    the last driver ended only because something was missing. A driver that the cluster did not receive is submitted
    again. A job that was asked to pause gets no driver.

    Args:
        job: The stored job.
        ray_job: State of the Ray Job of the job's last driver; None if the cluster does not know the Ray Job.
        consecutive_failures: Number of the last drivers in a row that ended without a result.
        now: The current time in seconds since the epoch, by the clock of the stored times.
        watched_since: Time since which the database has answered, by the same clock.
        message: The cluster's explanation of the state; None if it gives none.
        consecutive_waits: Number of the last drivers in a row that ended because something was missing for now.
        refusal: Reason why the cluster did not accept the last driver; None if the driver was accepted.
    """
    has_ray_job = ray_job in ("PENDING", "RUNNING")
    if job.is_paused and not has_ray_job:
        return Decision(Action.WAIT if job.state is JobState.PAUSED else Action.SETTLE)
    if job.submissions == 0:
        return Decision(Action.SUBMIT)
    has_begun = job.attempt > job.submitted_after
    if has_ray_job:
        reason = _reason_to_stop(job, now=now, watched_since=watched_since)
        if reason is None and has_begun and (job.is_paused or job.is_outdated):
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
    """Reason to replace the running driver of `job`; None if the driver may continue.

    A driver is replaced if it does not start, sends no heartbeats, or makes no progress for too long. `now` is the
    current time, and `watched_since` the time since which the database has answered, both in seconds since the epoch.
    Only the time after `watched_since` counts, because before it the driver could not store heartbeats.
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
    """Thread of the server that keeps a driver running, on a Ray cluster, for every unfinished job.

    If several servers use the database, one of them is the leader. Only the leader starts and stops drivers, and runs
    Ray. The other servers compute the same decisions from the stored state, so that all servers give the same answers.
    If the leader ends, another server becomes the leader.

    The cluster is the one that RAY_ADDRESS names, or one that the server runs on this machine, with Ray's dashboard at
    `dashboard_host` and `dashboard_port`. `files` is the location of artifacts; None is a directory in `data_dir`. The
    method `start` returns at once. The method `not_ready` says why no job can continue yet.
    """

    def __init__(
        self,
        store: Store,
        data_dir: Path,
        *,
        files: str | None = None,
        dashboard_host: str,
        dashboard_port: int | None,
    ) -> None:
        self._store = store
        self._leadership = Leadership(store)
        self._clock_s = 0.0  # what to add to this machine's clock for that of the stored times
        self._data_dir = data_dir
        self._files = files
        self._host: Host | None = None
        if "RAY_ADDRESS" not in os.environ:
            # Ray asks for a token by default, but decides so where it is started; server and Ray must agree.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            self._host = Host(data_dir, dashboard_host, dashboard_port)
        self._client: Any = None
        self._dashboard_url: str | None = None
        self._not_ready: str | None = "Ray is being started"
        self._is_drained = False  # when it was last looked up
        self._quiet: set[str] = set()  # cancelled jobs whose Ray Job has ended
        self._queued: set[str] = set()  # jobs that wait for another to end
        self._placed: set[str] = set()  # jobs with one of the places of running jobs
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
        """Remote function calls on the cluster's nodes; None if the server itself runs Ray, on its own machine."""
        if self._host is not None:
            return None
        return NodeCalls(lambda: (self._client, self._dashboard_url), self._data_dir, self._files)

    # -- for the server --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, and stop Ray if the server runs it. Jobs continue when a server is started again."""
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

    def waiting_for(self, job: JobRecord) -> str | None:
        """Reason why `job` waits; None if a driver works on the job, or if the job has ended."""
        if job.state.is_finished:
            return None
        if job.is_paused:
            return "a request to resume it" if job.state is JobState.PAUSED else "its driver to end; then it is PAUSED"
        if (reason := self.not_ready()) is not None:
            return reason if reason in (self._store.problem(), DRAINED) else f"Ray: {reason}"
        pause = self._delayed.get(job.id)
        if pause is not None and pause.until is not None:
            return f"its next driver, in {max(pause.until - time.time() - self._clock_s, 0.0):.0f} s: {pause.because}"
        if job.id in self._queued:
            return f"one of the {MAX_RUNNING} jobs before it to end"
        return job.waiting_for if job.attempt > job.submitted_after else "its driver to start"

    def ray_job(self, job: JobRecord) -> RayJobDocument | None:
        if job.submissions == 0:
            return None
        name = submission_id(job, job.submissions)
        url = self._dashboard_url
        return {"submission_id": name, "dashboard_url": url and f"{url}/#/jobs/{name}"}

    def log(self, job: JobRecord) -> str:
        """Output of all drivers that worked on `job`. Raises ConnectionError while Ray does not answer."""
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
            if self._not_ready not in (None, before):
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
                logger.exception("a round over the jobs failed")
                self._not_ready = f"database: {error}"
        except OSError as error:
            self._lose(error)
        except Exception as error:  # the next round starts from the same stored state
            logger.exception("a round over the jobs failed")
            self._lose(error)

    def _connect(self, is_leader: bool) -> str | None:
        """Connect to the Ray cluster, and return the reason why it cannot be used; None if it can be used.

        If the server is the leader (`is_leader`) and runs the cluster itself, the cluster is started first if
        necessary.
        """
        if self._host is not None and (reason := self._host.not_ready(may_start=is_leader)) is not None:
            self._disconnect(reason)
            return reason
        url = self._host.dashboard_url if self._host is not None else None
        if self._client is not None and url in (None, self._dashboard_url):
            return self._too_many_machines()
        prepare_environment()
        from ray.dashboard.utils import get_address_for_submission_client

        try:
            url = url or get_address_for_submission_client(None)
            self._client = job_client(url)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError or ValueError, depending on the cause
            return f"Ray's dashboard does not answer: {error}"
        self._dashboard_url = url
        logger.info("Ray's dashboard: %s", url)
        return self._too_many_machines()

    def _too_many_machines(self) -> str | None:
        """Reason why no driver may start, if Ray has several machines and the database is a file on one of them.

        Such a database is an SQLite file. Returns None if drivers may start. The machines are counted again every
        NODES_S seconds.
        """
        if self._host is not None or not self._store.is_on_one_machine:
            return None
        now = time.monotonic()
        if self._nodes_at is None or now - self._nodes_at > NODES_S:
            self._nodes, self._nodes_at = _machines(self._dashboard_url), now
        if len(self._nodes) < 2:
            return None
        return (
            f"Ray has {len(self._nodes)} machines ({', '.join(sorted(self._nodes))}), and SQLite is a file of one: "
            "several machines need PostgreSQL (`mergesearch serve --database postgresql://USER@HOST/NAME`; "
            "`mergesearch database move` copies this database)"
        )

    def _lose(self, error: Exception) -> None:
        logger.warning("Ray's dashboard does not answer (%s)", type(error).__name__)
        self._disconnect(f"Ray's dashboard does not answer: {error}")

    def _disconnect(self, reason: str) -> None:
        self._client, self._dashboard_url, self._not_ready = None, None, reason

    def _look_at_jobs(self, is_leader: bool) -> None:
        jobs = self._store.unfinished_jobs()
        now = self._store.now()
        self._clock_s = now - time.time()
        if self._watched_since is None:
            self._watched_since = now
        num_running = 0
        queued: set[str] = set()
        # Jobs that have a place keep it; the others follow by priority, the oldest first.
        placed = {job.id for job in jobs if job.id in self._placed or job.has_driver(now=now)}
        for job in sorted(jobs, key=lambda job: (job.id not in placed, -job.priority)):
            has_driver = self._look_at(job, now=now, may_start=num_running < MAX_RUNNING, acts=is_leader)
            num_running += has_driver
            placed = placed | {job.id} if has_driver else placed - {job.id}
            queued |= set() if has_driver or job.is_paused else {job.id}
        self._queued, self._placed = queued, placed
        names = {job.id for job in jobs}
        self._delayed = {name: pause for name, pause in self._delayed.items() if name in names}
        current = {submission_id(job, job.submissions) for job in jobs if job.is_paused or job.is_outdated}
        self._at_rest &= {submission_id(job, job.submissions) for job in jobs if job.state is JobState.PAUSED}
        self._interrupted &= current  # a job that is resumed meanwhile may be paused again
        if is_leader:
            self._stop_cancelled()

    def _stop_drivers(self) -> None:
        """Ask the driver of every unfinished job to end after the samples that are being scored.

        Each driver is asked only once.
        """
        for job in self._store.unfinished_jobs():
            name = submission_id(job, job.submissions)
            if name in self._asked_to_stop:
                continue
            if self._ray_job(job)[0] in ("PENDING", "RUNNING"):
                logger.info("job %s: stopping %s: %s", job.id, name, DRAINED)
                self._client.stop_job(name)
                self._asked_to_stop.add(name)

    def _look_at(self, job: JobRecord, *, now: float, may_start: bool, acts: bool) -> bool:
        """Choose and take the next action for an unfinished job: wait, start a driver, stop a driver, or fail the job.

        The action is taken only if `acts` is True, as it is for the leader. A driver is submitted only if `may_start`
        is True. `now` is in seconds since the epoch. Returns whether the job has a driver, or will have one soon.
        """
        if job.state is JobState.PAUSED and submission_id(job, job.submissions) in self._at_rest:
            return False
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
        if decision.until is not None:
            self._delayed[job.id] = decision
            return False
        self._delayed.pop(job.id, None)
        is_idle = job.is_paused and ray_job not in ("PENDING", "RUNNING")
        if is_idle and job.state is JobState.PAUSED:
            self._at_rest.add(submission_id(job, job.submissions))
        if not acts:
            return (
                not is_idle
                and decision.action is not Action.GIVE_UP
                and (decision.action is not Action.SUBMIT or may_start)
            )
        if job.attempt > job.submitted_after and decision.action is Action.WAIT:
            self._losses.pop(job.id, None)
        if decision.action is Action.STOP:
            self._lose_driver(job, decision.because)
            self._client.stop_job(submission_id(job, job.submissions))
        elif decision.action is Action.INTERRUPT:
            self._interrupt(job)
        elif decision.action is Action.SETTLE:
            self._store.settle_pause(job.id)
        elif decision.action is Action.GIVE_UP:
            logger.error("job %s: given up: %s", job.id, decision.because)
            self._store.open_attempt(job.id, because="giving up").set_state(JobState.FAILED, decision.because)
            return False
        elif decision.action is Action.SUBMIT:
            if not may_start:
                return False
            self._lose_driver(job, decision.because)
            # A Ray Job that never reached the cluster is submitted again under the same id.
            because = "; then ".join(self._losses.get(job.id, {}).values()) or None
            return self._submit(job, job.submissions + (not decision.again), because)
        return not is_idle

    def _interrupt(self, job: JobRecord) -> None:
        """Ask the driver of a job to end after the samples that are being scored.

        Each driver is asked only once.
        """
        name = submission_id(job, job.submissions)
        if name not in self._interrupted:
            logger.info("job %s: stopping %s: the job %s", job.id, name, "pauses" if job.is_paused else "was edited")
            self._client.stop_job(name)
            self._interrupted.add(name)

    def _lose_driver(self, job: JobRecord, because: str | None) -> None:
        """Remember why the last driver of a job is replaced, because the next driver receives this reason.

        Later reasons for the same driver are ignored. If `because` is None, nothing is remembered.
        """
        if because is not None:
            self._losses.setdefault(job.id, {}).setdefault(job.submissions, because)

    def _submit(self, job: JobRecord, number: int, because: str | None) -> bool:
        """Submit the driver with the given number for `job`, and return whether the Ray cluster accepted it.

        `because` says why the previous driver was replaced; None if there is no reason to state.
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
        try:
            self._client.submit_job(
                entrypoint=shlex.join([*command, *(["--because", because] if because else [])]),
                submission_id=name,
                metadata={"job_name": job.name, "study_id": job.id},  # the dashboard lists them by "job_name"
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
        """State of the Ray Job that ran the last driver of a job, and Ray's message about it on one line.

        The message is None if there is none. Both are None if the cluster does not know the Ray Job.
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
    """Whether `error` from a submission says that the Ray cluster does not accept Ray Jobs yet.

    A new cluster answers other requests some time before its agents, which receive Ray Jobs, can be reached.
    """
    return any(sign in str(error) for sign in ("No available agent", "aiohttp.client_exceptions", "TimeoutError"))


def _is_unknown(error: Exception) -> bool:
    """Whether `error` says that the Ray cluster does not know a Ray Job.

    The text of the error is searched, because Ray's client raises the same class for every refusal.
    """
    return "does not exist" in str(error) or "status code 404" in str(error)
