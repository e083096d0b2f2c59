"""The driver's work on a served study: it answers requests until no request has come for some time."""

from __future__ import annotations

import errno
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from service.cluster.session import RaySession
from service.disk import data_dir_of
from service.engine_machines import gpu_need
from service.errors import Conflict, NotFound
from service.jobs.base import Attempt
from service.jobs.completers import Completers, Place
from service.jobs.heartbeat import ENGINE, PATIENCE_FACTOR
from service.jobs.serving.endpoint import PORTS
from service.jobs.serving.engines import Choice, IdleTimer, Situation, choose, searches
from service.jobs.serving.models import engine_models
from service.jobs.serving.openai import Gate, openai_app
from service.jobs.serving.request import ServingRequest
from service.jobs.serving.trials import ServedTrials
from service.resolved_study import ResolvedStudy
from service.store.documents import ENDPOINT
from service.studies.preflight.dtype import with_stored_dtype
from service.types import EventKind, JobRecord, JobState
from workers.errors import EngineUnavailable, InvalidModel
from workers.serving.deployment import runs_on_gpus
from workers.serving.watchdog import TimeLimits

__all__ = ["work"]

POLL_S = 1.0
STOP_S = 5.0


def work(attempt: Attempt) -> None:
    """Complete prompts with the merges of a study until no request has come for some time, or the study is deleted.

    `attempt` is this driver's work on the job that serves the study. Raises Conflict if the study was deleted before
    this driver started, or if its models have changed. Raises EngineUnavailable if no engine starts, or if the models
    cannot be read now.
    """
    job = attempt.job
    request = ServingRequest.model_validate(dict(job.document))
    try:
        study = attempt.store.job(request.study)
    except NotFound as error:
        raise Conflict(f"study {request.study}: was deleted") from error
    attempt.writer.set_state(JobState.RUNNING)
    try:
        family, options = engine_models(
            study, artifacts=attempt.artifacts, data_dir=data_dir_of(attempt.work_dir), note=attempt.progressed
        )
    except InvalidModel as error:  # it may be on a disk that is not there now
        raise EngineUnavailable(str(error)) from error
    attempt.heartbeat.min_patience_s = PATIENCE_FACTOR * TimeLimits.of_family(family).start_s
    idle_s = 60.0 * request.idle_minutes
    timer, gate, secret = IdleTimer(idle_s), Gate(), secrets.token_urlsafe(32)
    app = openai_app(ServedTrials(attempt.store, study.id), gate, secret=secret, timer=timer)
    stored = ResolvedStudy.of(study).dtype
    with (
        attempt.resources.ray() as session,
        _interruptible(),
        attempt.resources.completers(
            family,
            with_stored_dtype(options, stored, on_gpus=runs_on_gpus(family, gpu_need())),
            job.id,
            idle_s,
        ) as completers,
        _listening(app, session) as url,
    ):
        attempt.writer.set_document_named(ENDPOINT, {"url": url, "secret": secret, "attempt": attempt.writer.attempt})
        serving = _Serving(attempt, study, completers, gate, timer, shares=request.shares_engines)
        serving.needed_gpus = options.tensor_parallel_size
        reason = serving.run()
    attempt.heartbeat.send()
    attempt.writer.set_state(JobState.COMPLETE, reason)


class _Serving:
    """The main loop of a job that serves a study: it selects the engine that completes prompts, until serving ends."""

    needed_gpus = 1

    def __init__(
        self,
        attempt: Attempt,
        study: JobRecord,
        completers: Completers,
        gate: Gate,
        timer: IdleTimer,
        *,
        shares: bool,
    ) -> None:
        self._attempt = attempt
        self._study = study
        self._completers = completers
        self._gate = gate
        self._timer = timer
        self._shares = shares
        self._choice = Choice(None)
        self._is_noted = False

    def run(self) -> str:
        """Select the engine that completes prompts, every POLL_S seconds; return the reason why serving ended."""
        while (remaining_s := self._timer.remaining_s) > 0:
            self._attempt.heartbeat.check()
            try:
                self._attempt.store.job(self._study.id)
            except NotFound:
                self._gate.close("nothing: its study was deleted")
                return "its study was deleted"
            self._follow(self._situation())
            if self._timer.has_answered and not self._is_noted:
                self._is_noted = True
                self._attempt.writer.add_event(EventKind.ANSWERED, {})
            self._attempt.heartbeat.progress = {
                "engine": None if self._choice.place is None else self._choice.place.value,
                "requests": self._timer.num_requests,
                "ends_in_s": round(remaining_s),
            }
            self._attempt.heartbeat.progressed()
            time.sleep(POLL_S)
        self._gate.close("nothing: serving has ended")
        return "no request came for the time after which serving ends"

    def _situation(self) -> Situation:
        store = self._attempt.store
        num_gpus, free_gpus = self._completers.num_gpus()
        return Situation(
            shares=self._shares,
            running=tuple(self._completers.running()),
            num_gpus=num_gpus,
            free_gpus=free_gpus,
            needed_gpus=self.needed_gpus,
            **searches(store.unfinished_jobs(), fingerprints=self._study.accepted.get("fingerprints"), now=store.now()),
        )

    def _follow(self, situation: Situation) -> None:
        """Choose the engine for `situation`; if the choice has changed, replace the current engine.

        Engines that also score samples for searches stay open, unless another job waits for their GPUs and no search
        uses them.
        """
        before, self._choice = self._choice, choose(situation)
        place = self._choice.place
        if place is None:
            self._gate.close(str(self._choice.waits_for))
        self._attempt.heartbeat.wait_for(self._choice.waits_for)
        if self._choice == before:
            return
        is_left = before.place is not None and before.place is not place
        # Replicas of searches stay, unless another job waits for the GPUs and no search uses them.
        if before.place is Place.OWN and is_left:
            self._completers.close(Place.OWN)
        elif is_left and situation.starting and not situation.users:
            self._completers.close(Place.SCORER)
        if place is not None:
            self._gate.close(ENGINE)
            self._attempt.heartbeat.wait_for(ENGINE)
            self._attempt.note(f"opening an engine: {place.value}")
            completer = self._completers.open(place)
            self._gate.open(completer, yields=self._choice.yields)
            self._attempt.heartbeat.wait_for(None)


@contextmanager
def _interruptible() -> Iterator[None]:
    """Context in which SIGTERM raises KeyboardInterrupt, so that a started engine is stopped before this process."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def _listening(app: Any, session: RaySession) -> Iterator[str]:
    """Context manager that serves the ASGI application `app` over HTTP in a thread, and yields its URL.

    The application listens on the host of Ray's dashboard, because the mergesearch server can reach this host.
    """
    import uvicorn

    with _bound(session.dashboard_host or "127.0.0.1") as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=int(STOP_S)))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name="completions", daemon=True)
        thread.start()
        try:
            address, port = listener.getsockname()[:2]
            yield f"http://[{address}]:{port}" if ":" in address else f"http://{address}:{port}"
        finally:
            server.should_exit = True
            thread.join(2 * STOP_S)


def _bound(host: str) -> socket.socket:
    """Make a socket that listens on `host`, at the first free port of PORTS.

    Raises EngineUnavailable if no port is free.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for port in PORTS:
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind((host, port))
            listener.listen(128)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRINUSE:
                raise
    raise EngineUnavailable(f"{host}: no port from {PORTS.start} to {PORTS.stop - 1} is free, for the chat of a study")
