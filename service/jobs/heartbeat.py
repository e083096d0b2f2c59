"""Heartbeat of a driver: reports that the driver is alive, and how long it has made no progress with its job.

A separate thread sends the heartbeats, so they continue even if the driver hangs. Each heartbeat therefore contains the
number of seconds since the driver last made progress, and the limit above which the reconciler replaces the driver.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections.abc import Mapping
from typing import Any, Self

from service.errors import StaleAttempt
from service.store import JobWriter
from service.types import HEARTBEAT_S

__all__ = ["ENGINE", "PATIENCE_FACTOR", "SCORING_PATIENCE_S", "WORKERS", "Heartbeat", "waits_for_start"]

logger = logging.getLogger(__name__)

# Seconds for which a driver may store and report nothing. Before the first chunk it reads every weight. Afterwards the
# limit is a multiple of the longest time of a chunk, at least SCORING_PATIENCE_S. While it waits for a replica whose
# own limits are longer, such as one that starts or verifies, the limit is PATIENCE_FACTOR times the replica's.
PREPARING_PATIENCE_S = 3600.0
SCORING_PATIENCE_S = 300.0
PATIENCE_CHUNKS = 10
PATIENCE_FACTOR = 2.0

# Texts of what a driver waits for: engines, whose phase may follow, or the workers of a training.
ENGINE = "an engine to start"
WORKERS = "its workers to start"


def waits_for_start(waiting_for: str | None) -> bool:
    """Whether `waiting_for`, the text of what a driver waits for, means that engines or workers have not started."""
    return waiting_for is not None and waiting_for.startswith((ENGINE, WORKERS))


class Heartbeat:
    """Sender of a driver's heartbeat, which a separate thread stores every `interval_s` seconds.

    A heartbeat has the driver's `progress` (as JSON), the seconds that all attempts have worked on the job, the seconds
    without progress, and what the driver waits for. The driver makes progress when it stores data with `writer`, or
    when it calls the method `progressed`. `worked_s` is the number of seconds that earlier attempts worked on the job.
    `num_gpus` is the number of GPUs that count for the usage of the job's team; 0 counts no usage. `stop_reason` is the
    reason why the job's search was asked to end early, as of the last heartbeat; None if nobody asked for this.
    """

    def __init__(
        self, writer: JobWriter, worked_s: float, *, num_gpus: int = 0, interval_s: float = HEARTBEAT_S
    ) -> None:
        self.num_gpus = num_gpus
        self.progress: Mapping[str, Any] | None = None
        self.stop_reason: str | None = None
        self.min_patience_s = PREPARING_PATIENCE_S
        self._writer = writer
        self._worked_s = worked_s
        self._interval_s = interval_s
        self._started_at = self._progressed_at = time.monotonic()
        self._waiting_for: str | None = None
        self._stale: StaleAttempt | None = None
        self._stop = threading.Event()
        context = contextvars.copy_context()  # with the fields of log lines
        self._thread = threading.Thread(target=context.run, args=(self._send_regularly,), name="heartbeat", daemon=True)

    @property
    def wall_clock_s(self) -> float:
        return self._worked_s + time.monotonic() - self._started_at

    @property
    def idle_s(self) -> float:
        """Seconds since the driver, the process that works on the job, last made progress."""
        return time.monotonic() - max(self._progressed_at, self._writer.stored_at)

    @property
    def patience_s(self) -> float:
        """Longest time in seconds without progress before the driver (the process that works on the job) is replaced.

        The time is `min_patience_s`, or ten times the longest time that one request to an engine took, whichever is
        larger.
        """
        return max(self.min_patience_s, PATIENCE_CHUNKS * self._writer.longest_chunk_s)

    def progressed(self) -> None:
        """Record that the driver (this process) made progress without storing a result, for example with a download."""
        self._progressed_at = time.monotonic()

    def wait_for(self, what: str | None) -> None:
        """Report what the driver, the process that works on the job, waits for, such as "an engine to start".

        If `what` is None, report that the driver does not wait.
        """
        if what != self._waiting_for:
            self._waiting_for = what
            self.send()

    def send(self) -> None:
        self._send(self.wall_clock_s)

    def discount(self) -> None:
        """Store a heartbeat whose working time leaves out the seconds since the driver last stored scored samples.

        A driver (the process that works on the job) that has waited without scoring calls this method, so that the wait
        does not count towards the limits of the job's working time.
        """
        self._send(self._worked_s + max(self._writer.scored_at - self._started_at, 0.0))

    def check(self) -> None:
        """Raise StaleAttempt if the database has refused a heartbeat, because another driver works on the job now."""
        if self._stale is not None:
            raise StaleAttempt(*self._stale.args)

    def __enter__(self) -> Self:
        self.send()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self, wall_clock_s: float) -> None:
        self.stop_reason = self._writer.heartbeat(
            wall_clock_s=wall_clock_s,
            num_gpus=self.num_gpus,
            progress=self.progress,
            idle_s=self.idle_s,
            patience_s=self.patience_s,
            waiting_for=self._waiting_for,
        )

    def _send_regularly(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.send()
            except StaleAttempt as error:
                self._stale = error
                return
            except Exception:  # one heartbeat may be missed; without any the driver is replaced
                logger.exception("a heartbeat was not stored")
