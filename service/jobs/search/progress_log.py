"""Progress of a driver as lines in the log of its job."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

from service.jobs.search.progress import PaceMeter, ProgressSnapshot, as_line

__all__ = ["ProgressLog"]

INTERVAL_S = 30.0


class ProgressLog:
    """Progress reporter that writes a line to standard error every 30 s, at each stage's start, and at the end.

    Use it as a context manager.
    """

    def __init__(self) -> None:
        self._meter = PaceMeter()
        self._latest: ProgressSnapshot | None = None
        self._written: ProgressSnapshot | None = None
        self._written_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._latest is not self._written:
            self._write_latest()

    def update(self, snapshot: ProgressSnapshot) -> None:
        is_new_stage = self._meter.add(snapshot)
        self._latest = snapshot
        if is_new_stage or time.monotonic() - self._written_at >= INTERVAL_S:
            self._write_latest()

    def note(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def _write_latest(self) -> None:
        if self._latest is not None:
            self.note(as_line(self._latest, self._meter.pace()))
            self._written, self._written_at = self._latest, time.monotonic()
