"""Progress of an export: one line that is rewritten on a terminal, or a new line every few seconds elsewhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self, TextIO

from service.results.format import duration

if TYPE_CHECKING:
    from workers.export.shards import Progress

__all__ = ["ExportView"]

# Exports that take less time than this show no progress.
PATIENCE_S = 2.0


class ExportView:
    """Progress display of the export of a merged model on `stream` (default: standard error).

    An export that takes less than 2 s shows nothing. Use the display as a context manager, and pass its method `update`
    to the export as the progress callback. `update` is cheap enough to be called for every tensor.
    """

    def __init__(self, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream or sys.stderr
        self._clock = clock
        self._is_terminal = self._stream.isatty()
        self._interval_s = 0.2 if self._is_terminal else 10.0
        self._started_at: float | None = None
        self._shown_at = -float("inf")
        self._is_line_open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_line_open:
            self._stream.write("\n")
            self._stream.flush()

    def update(self, progress: Progress) -> None:
        now = self._clock()
        if self._started_at is None:
            self._started_at = now
        elapsed_s = now - self._started_at
        if elapsed_s < PATIENCE_S or now - self._shown_at < self._interval_s:
            return
        self._shown_at = now
        line = _line(progress, elapsed_s)
        self._is_line_open = self._is_terminal
        # A line that wraps cannot be rewritten.
        shortened = line[: shutil.get_terminal_size().columns - 1]
        self._stream.write(f"\r\x1b[K{shortened}" if self._is_terminal else f"{line}\n")
        self._stream.flush()


def _line(progress: Progress, elapsed_s: float) -> str:
    """Format the progress of an export as one line of text.

    An example is `[42s] writing: 1.4 of 13.5 GiB (0.9 GiB already there), 250 MiB/s, 49s left`.
    """
    size, unit = (2**30, "GiB") if progress.total >= 2**30 else (2**20, "MiB")
    there = f" ({progress.kept / size:.1f} {unit} already there)" if progress.kept else ""
    rate = (progress.written - progress.kept) / elapsed_s
    speed = f"{rate / 2**20:.0f} MiB/s" if rate >= 2**20 else f"{rate / 2**10:.0f} KiB/s"
    left = f", {duration((progress.total - progress.written) / rate)} left" if rate else ""
    return (
        f"[{duration(elapsed_s)}] writing: {progress.written / size:.1f} of {progress.total / size:.1f} {unit}{there}, "
        f"{speed}{left}"
    )
