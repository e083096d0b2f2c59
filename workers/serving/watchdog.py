"""Time limits for the work of a replica; a replica that exceeds them is regarded as hung.

Nothing can interrupt the engine's thread. A replica whose work is overdue fails its health checks, and Serve replaces
it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from workers.types import ScoreRequest

__all__ = ["TIME_LIMITS", "TimeLimits", "Watchdog"]


@dataclass(frozen=True)
class TimeLimits:
    """Time limits, in seconds, for the work of a replica.

    - `start_s`: the start of the replica's worker, with downloads and compilation
    - `first_chunk_s`: scoring a chunk (the samples of one request) with a task or a merge method that is new to
      the replica, for which data are prepared and kernels compiled
    - `chunk_factor`, `chunk_s`: any other chunk may take `chunk_factor` times the time expected from the chunks
      measured so far, and at least `chunk_s`
    - `other_s`: other work, such as describing tasks and verification
    """

    start_s: float = 1800.0
    first_chunk_s: float = 1800.0
    chunk_s: float = 60.0
    chunk_factor: float = 10.0
    other_s: float = 7200.0


TIME_LIMITS = TimeLimits()


class Watchdog:
    """Timer of a replica's work, which reports work beyond its time limit.

    The engine's thread enters the context `chunk` when it scores a chunk (the samples of one request), and the context
    `work` for other work. Any thread may call the method `overdue`. `limits` are the time limits. `start_s` is the
    number of seconds that the start of the replica's worker took. A chunk may always take at least this long, because
    it may include a comparison with transformers, as the start does.
    """

    def __init__(self, limits: TimeLimits, *, start_s: float) -> None:
        self._limits = limits
        self._chunk_s = max(limits.chunk_s, start_s)
        self._known: set[str] = set()
        self._slowest_s = 0.0
        self._slowest_sample_s = 0.0
        self._current: tuple[float, float, str] | None = None

    @contextmanager
    def chunk(self, request: ScoreRequest) -> Iterator[None]:
        kinds = {span.task.digest for span in request.spans} | {merge.method for merge in request.recipe.merges()}
        expected_s = max(self._slowest_s, request.num_samples * self._slowest_sample_s)
        limit_s = max(self._chunk_s, self._limits.chunk_factor * expected_s)
        if not kinds <= self._known:
            limit_s = max(limit_s, self._limits.first_chunk_s)
        started = time.monotonic()
        with self.work(limit_s, f"a chunk of {request.num_samples} samples"):
            yield
        elapsed_s = time.monotonic() - started
        self._known |= kinds
        self._slowest_s = max(self._slowest_s, elapsed_s)
        self._slowest_sample_s = max(self._slowest_sample_s, elapsed_s / max(request.num_samples, 1))

    @contextmanager
    def work(self, limit_s: float, what: str) -> Iterator[None]:
        self._current = (time.monotonic(), limit_s, what)
        try:
            yield
        finally:
            self._current = None

    def overdue(self) -> str | None:
        """Describe the running work that exceeded its time limit; None if there is no such work."""
        if (current := self._current) is None:
            return None
        started, limit_s, what = current
        elapsed_s = time.monotonic() - started
        if elapsed_s <= limit_s:
            return None
        return f"it has worked on {what} for {elapsed_s:.0f} s; expected: at most {limit_s:.0f} s"
