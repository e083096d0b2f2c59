"""Keeps a driver running for every unfinished study: one Ray Job per study, submitted and watched from the server.

A thread of the server restarts Ray if the server runs its own, submits a driver for every study that needs one, and
replaces lost drivers. It relies only on SQL (results and heartbeats) and on the job states that the cluster reports, so
it may be killed at any moment. Jobs are submitted over HTTP: the server is not a Ray driver and survives the cluster.
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

from service.cluster.host import Host
from service.cluster.session import prepare_environment
from service.schemas.api import JobDocument
from service.store import Store
from service.types import HEARTBEAT_S, RESUMED_BY_REQUEST, JobRecord, JobState

__all__ = ["MAX_CONSECUTIVE_FAILURES", "Action", "RayCluster", "Step", "next_step", "submission_id"]

logger = logging.getLogger(__name__)

POLL_S = 1.0

# What a study's job runs.
JOB_MODULE = "service.jobs.driver"

# A driver without a heartbeat for this long is considered dead.
LOST_AFTER_S = 6 * HEARTBEAT_S

# From a job's submission to its driver's first heartbeat: Ray starts a supervisor, and the driver imports torch.
START_GRACE_S = 300.0

# From storing a submission until the cluster knows its job.
SUBMISSION_GRACE_S = 5.0

# Drivers in a row that stored no result; after this many the study fails. Those that found that something is not there
# now, as a model on a disk that is unmounted, only delay the next one.
MAX_CONSECUTIVE_FAILURES = 5
BACK_OFF_S, MAX_BACK_OFF_S = 2.0, 300.0
MAX_DOUBLINGS = 20

# Ray explains a refusal with a traceback, whose end is what matters.
MAX_REFUSAL = 400

# Studies with a driver at the same time; others wait. A driver takes some hundred MB; engines are shared.
MAX_RUNNING = 4


class Action(StrEnum):
    """WAIT; SUBMIT a driver; STOP the current job, after which another is submitted; GIVE_UP: the study fails."""

    WAIT = "wait"
    SUBMIT = "submit"
    STOP = "stop"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class Step:
    """What to do for a study, and why. `again`: submit the same driver again, because the cluster never received it.

    `until`: WAIT without a driver, until then (seconds since the epoch)."""

    action: Action
    because: str | None = None
    again: bool = False
    until: float | None = None


def submission_id(study: JobRecord, number: int) -> str:
    """The id of the Ray Job of a study's `number`-th driver. It is fixed, so Ray refuses a second submission."""
    return f"{study.name}-{study.id[:8]}-{number}"


def next_step(
    study: JobRecord,
    job: str | None,
    *,
    consecutive_failures: int,
    now: float,
    message: str | None = None,
    consecutive_waits: int = 0,
    refusal: str | None = None,
) -> Step:
    """The next step for an unfinished study.

    `job` is the cluster's state of the last driver's job (None: the cluster does not know the job) and `message` its
    explanation; `refusal` is why it did not accept the job; `consecutive_failures` and `consecutive_waits` count the
    drivers in a row that ended without a result, and that only waited; `now` is in seconds since the epoch."""
    if study.submissions == 0:
        return Step(Action.SUBMIT)
    has_begun = study.attempt > study.submitted_after
    if job in ("PENDING", "RUNNING"):
        reason = _reason_to_stop(study, now=now)
        return Step(Action.STOP, reason) if reason else Step(Action.WAIT)
    is_refused = job is None and not has_begun and refusal is not None
    if job is None and not has_begun and not is_refused:
        is_under_way = now - study.submitted_at < SUBMISSION_GRACE_S
        return Step(Action.WAIT) if is_under_way else Step(Action.SUBMIT, again=True)
    because = (
        f"Ray refused its driver's job: {refusal}"
        if is_refused
        else _end_of_driver(job, (has_begun and study.reason) or message or "no reason given")
    )
    if consecutive_failures >= MAX_CONSECUTIVE_FAILURES and not consecutive_waits:
        return Step(
            Action.GIVE_UP, f"{consecutive_failures} drivers in a row ended without a result; the last one: {because}"
        )
    setbacks = min(consecutive_failures + consecutive_waits, MAX_DOUBLINGS)
    until = study.submitted_at + min(BACK_OFF_S * 2**setbacks, MAX_BACK_OFF_S)
    return Step(Action.WAIT, because, until=until) if now < until else Step(Action.SUBMIT, because, again=is_refused)


def _end_of_driver(job: str | None, reason: str) -> str:
    if reason == RESUMED_BY_REQUEST:
        return reason
    if job is None:
        return "the cluster does not know its driver's job: Ray was restarted"
    return f"its driver ended (Ray job {job}): {' '.join(reason.split())}"


def _reason_to_stop(study: JobRecord, *, now: float) -> str | None:
    """Why the driver, whose job has not ended, is replaced; None: it is not."""
    heard_at = study.heartbeat_at or 0.0
    if study.attempt <= study.submitted_after or heard_at < study.submitted_at:  # the heartbeat is the last driver's
        is_late = now - study.submitted_at > START_GRACE_S
        return f"its driver did not start within {START_GRACE_S:.0f} s" if is_late else None
    if now - heard_at > LOST_AFTER_S:
        return f"its driver sent no heartbeat for {now - heard_at:.0f} s"
    if study.progressed_at is None or study.patience_s is None:
        return None
    idle_s = heard_at - study.progressed_at
    return f"its driver made no progress for {idle_s:.0f} s" if idle_s > study.patience_s else None


class RayCluster:
    """The cluster that RAY_ADDRESS names, or one that the server runs on this machine, and the drivers on it.

    `start` returns at once; `not_ready` says why no study can continue yet."""

    def __init__(self, store: Store, data_dir: Path, *, dashboard_host: str, dashboard_port: int | None) -> None:
        self._store = store
        self._data_dir = data_dir
        self._host: Host | None = None
        if "RAY_ADDRESS" not in os.environ:
            # Ray asks for a token by default, but decides so where it is started; server and Ray must agree.
            os.environ.setdefault("RAY_AUTH_MODE", "token")
            self._host = Host(data_dir, dashboard_host, dashboard_port)
        self._client: Any = None
        self._dashboard_url: str | None = None
        self._not_ready: str | None = "Ray is being started"
        self._quiet: set[str] = set()  # cancelled studies whose job has ended
        self._queued: set[str] = set()  # studies that wait for another to end
        self._paused: dict[str, Step] = {}  # studies whose next driver comes later
        self._refusals: dict[str, str] = {}  # why the cluster did not accept a study's last job
        self._losses: dict[str, dict[int, str]] = {}  # why a study's drivers were lost, since one last worked
        self._stopping = threading.Event()
        self._waking = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)

    # -- for the server --------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, and stop Ray if the server runs it. Studies continue when a server is started again."""
        self._stopping.set()
        self._waking.set()
        self._thread.join(timeout=30)
        if self._host is not None:
            self._host.stop()

    def wake(self) -> None:
        self._waking.set()

    def not_ready(self) -> str | None:
        return self._not_ready

    def waiting_for(self, study: JobRecord) -> str | None:
        """What must happen before the study goes on; None: a driver works on it, or it has ended."""
        if study.state.is_finished:
            return None
        if self._not_ready is not None:
            return f"Ray: {self._not_ready}"
        pause = self._paused.get(study.id)
        if pause is not None and pause.until is not None:
            return f"its next driver, in {max(pause.until - time.time(), 0.0):.0f} s: {pause.because}"
        if study.id in self._queued:
            return f"one of the {MAX_RUNNING} studies before it to end"
        return study.waiting_for if study.attempt > study.submitted_after else "its driver to start"

    def job(self, study: JobRecord) -> JobDocument | None:
        if study.submissions == 0:
            return None
        name = submission_id(study, study.submissions)
        url = self._dashboard_url
        return {"submission_id": name, "dashboard_url": url and f"{url}/#/jobs/{name}"}

    def log(self, study: JobRecord) -> str:
        """The output of the study's drivers. Raises ConnectionError while Ray does not answer."""
        client = self._client
        if client is None:
            raise ConnectionError(self._not_ready or "Ray is not running")
        parts = []
        for number in range(1, study.submissions + 1):
            name = submission_id(study, number)
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
            self._not_ready = self._connect()
            if self._not_ready is None:
                self._look_at_studies()
        except OSError as error:
            self._lose(error)
        except Exception as error:  # the next round starts from the same stored state
            logger.exception("a round over the studies failed")
            self._lose(error)

    def _connect(self) -> str | None:
        """Why the cluster cannot be used; None: it can."""
        if self._host is not None and (reason := self._host.not_ready()) is not None:
            self._disconnect(reason)
            return reason
        url = self._host.dashboard_url if self._host is not None else None
        if self._client is not None and url in (None, self._dashboard_url):
            return None
        prepare_environment()
        from ray.dashboard.utils import get_address_for_submission_client
        from ray.job_submission import JobSubmissionClient

        try:
            url = url or get_address_for_submission_client(None)
            self._client = JobSubmissionClient(url)
        except Exception as error:  # Ray raises RuntimeError, ConnectionError or ValueError, depending on the cause
            return f"Ray's dashboard does not answer: {error}"
        self._dashboard_url = url
        logger.info("Ray's dashboard: %s", url)
        return None

    def _lose(self, error: Exception) -> None:
        logger.warning("Ray's dashboard does not answer (%s)", type(error).__name__)
        self._disconnect(f"Ray's dashboard does not answer: {error}")

    def _disconnect(self, reason: str) -> None:
        self._client, self._dashboard_url, self._not_ready = None, None, reason

    def _look_at_studies(self) -> None:
        studies = self._store.jobs()
        num_running = 0
        queued: set[str] = set()
        for study in studies:
            if study.state.is_finished:
                self._paused.pop(study.id, None)
            if study.state is JobState.CANCELLED:
                self._stop_cancelled(study)
            elif not study.state.is_finished:
                has_driver = self._look_at(study, may_start=num_running < MAX_RUNNING)
                num_running += has_driver
                queued |= set() if has_driver else {study.id}
        self._queued = queued

    def _look_at(self, study: JobRecord, *, may_start: bool) -> bool:
        """Take the study's next step. Returns True if it has a driver, or will have one soon."""
        job, message = self._job(study)
        step = next_step(
            study,
            job,
            consecutive_failures=self._store.consecutive_failures(study.id),
            consecutive_waits=self._store.consecutive_waits(study.id),
            refusal=self._refusals.get(study.id),
            now=time.time(),
            message=message,
        )
        if step.until is not None:
            self._paused[study.id] = step
            return False
        self._paused.pop(study.id, None)
        if study.attempt > study.submitted_after and step.action is Action.WAIT:
            self._losses.pop(study.id, None)
        if step.action is Action.STOP:
            self._lose_driver(study, step.because)
            self._client.stop_job(submission_id(study, study.submissions))
        elif step.action is Action.GIVE_UP:
            logger.error("study %s: given up: %s", study.id, step.because)
            self._store.open_attempt(study.id, because="giving up").set_state(JobState.FAILED, step.because)
            return False
        elif step.action is Action.SUBMIT:
            if not may_start:
                return False
            self._lose_driver(study, step.because)
            # A job that never reached the cluster is submitted again under the same id.
            because = "; then ".join(self._losses.get(study.id, {}).values()) or None
            return self._submit(study, study.submissions + (not step.again), because)
        return True

    def _lose_driver(self, study: JobRecord, because: str | None) -> None:
        """Note why the last driver is replaced. Only the first reason is kept: later ones are its consequences."""
        if because is not None:
            self._losses.setdefault(study.id, {}).setdefault(study.submissions, because)

    def _submit(self, study: JobRecord, number: int, because: str | None) -> bool:
        """Submit the study's `number`-th driver. Returns whether the cluster accepted it."""
        self._store.record_submission(study.id, number)
        name = submission_id(study, number)
        logger.info("study %s: submitting %s%s", study.id, name, f" ({because})" if because else "")
        # On other machines this interpreter's path does not exist.
        python = sys.executable if self._host is not None else "python"
        command = [python, "-m", JOB_MODULE, "--data", str(self._data_dir), "--study", study.id]
        if self._host is not None and (address := self._host.address) is not None:
            command += ["--ray-address", address]
        try:
            self._client.submit_job(
                entrypoint=shlex.join([*command, *(["--because", because] if because else [])]),
                submission_id=name,
                metadata={"job_name": study.name, "study_id": study.id},  # the dashboard lists jobs by "job_name"
            )
        except RuntimeError as error:
            if _accepts_no_jobs(error):
                raise ConnectionError(f"Ray accepts no jobs yet: {error}") from error
            self._refusals[study.id] = " ".join(str(error).split())[-MAX_REFUSAL:]
            logger.error("study %s: Ray refused %s: %s", study.id, name, error)
            self._store.record_refusal(study.id, self._refusals[study.id])
            return False
        self._refusals.pop(study.id, None)
        return True

    def _stop_cancelled(self, study: JobRecord) -> None:
        if study.id in self._quiet:
            return
        if self._job(study)[0] in ("PENDING", "RUNNING"):
            self._client.stop_job(submission_id(study, study.submissions))
        else:
            self._quiet.add(study.id)

    def _job(self, study: JobRecord) -> tuple[str | None, str | None]:
        """The state of the last driver's job and the cluster's message on one line; (None, None): no such job."""
        if study.submissions == 0:
            return None, None
        try:
            info = self._client.get_job_info(submission_id(study, study.submissions))
        except RuntimeError as error:
            if _is_unknown(error):
                return None, None
            raise
        message, _, _ = (info.message or "").partition(", last available logs")
        return str(info.status.value), message.partition("\n")[0] or None


def _accepts_no_jobs(error: Exception) -> bool:
    """Whether no job at all would be accepted: a starting cluster answers before its agents can be reached."""
    return any(sign in str(error) for sign in ("No available agent", "aiohttp.client_exceptions", "TimeoutError"))


def _is_unknown(error: Exception) -> bool:
    """Whether Ray's client says that there is no such job; it raises one class for every refusal."""
    return "does not exist" in str(error) or "status code 404" in str(error)
