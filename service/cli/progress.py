"""Live progress of a study: a redrawn panel in a terminal, plain lines elsewhere, or JSON lines for programs.

The driver may report its state at any rate. This module decides which reports are shown, and how often.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.jobs.search.progress import Pace, PaceMeter, ProgressSnapshot, as_line, speed_text
from service.results.format import duration
from service.types import TrialState

__all__ = ["ProgressStyle", "ProgressView"]

REFRESHES_PER_S = 4
PANEL_WIDTH = 96


class ProgressStyle(StrEnum):
    """Style in which progress is shown: a redrawn panel, plain lines or JSON lines.

    AUTO is PANEL in a terminal and LINES elsewhere.
    """

    AUTO = "auto"
    PANEL = "panel"
    LINES = "lines"
    JSON = "json"


class ProgressView:
    """Display of a study's progress on `stream` (default: standard error), in the given `style`.

    Use it as a context manager; it is thread-safe. Its method `update` is cheap enough to be called for every scored
    sample. Lines appear every `interval_s` seconds, at each new stage, and at the end. `worked_s` is the number of
    seconds that was spent on the study before, in earlier runs. `clock` returns a time in seconds; tests replace it.
    """

    def __init__(
        self,
        style: ProgressStyle = ProgressStyle.AUTO,
        *,
        stream: TextIO | None = None,
        interval_s: float = 10.0,
        worked_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = stream or sys.stderr
        self._console = Console(file=self._stream, highlight=False)
        if style is ProgressStyle.AUTO:
            style = ProgressStyle.PANEL if self._console.is_terminal else ProgressStyle.LINES
        self.style = style
        self._interval_s = interval_s
        self._clock = clock
        self._lock = threading.RLock()
        self._meter = PaceMeter(worked_s=worked_s, clock=clock)
        self._snapshot: ProgressSnapshot | None = None
        self._shown: ProgressSnapshot | None = None
        self._shown_at = -float("inf")
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self.style is ProgressStyle.PANEL:
            # Other printing to standard output and error appears above the panel.
            self._live = Live(self, console=self._console, refresh_per_second=REFRESHES_PER_S)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def update(self, snapshot: ProgressSnapshot) -> None:
        with self._lock:
            now = self._clock()
            is_new_stage = self._meter.add(snapshot)
            self._snapshot = snapshot
            if self._live is None and (is_new_stage or now - self._shown_at >= self._interval_s):
                self._show_line()

    def note(self, text: str) -> None:
        """Print a message that stays visible above the progress, such as a failed trial or the report's location."""
        if (live := self._live) is not None:
            # Without `self._lock`: the thread that redraws holds rich's lock while it acquires this one.
            live.console.print(Text(text))
            return
        if self.style is ProgressStyle.JSON:
            text = json.dumps({"event": "note", "elapsed_s": self._meter.elapsed_s, "text": text})
        with self._lock:
            self._write(text)

    def close(self) -> None:
        """Show the latest progress if it is not shown yet, and end the redrawing of the panel; may be called twice."""
        with self._lock:
            if self._live is None and self._snapshot is not self._shown:
                self._show_line()
            live, self._live = self._live, None
        # Outside the lock: stopping waits for the thread that redraws, which acquires the lock.
        if live is not None:
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            if self._snapshot is not None:
                yield _panel(self._snapshot, self._meter.pace(), width=min(PANEL_WIDTH, options.max_width))

    def _show_line(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        pace = self._meter.pace()
        self._write(
            json.dumps(_as_json(snapshot, pace)) if self.style is ProgressStyle.JSON else as_line(snapshot, pace)
        )
        self._shown, self._shown_at = snapshot, self._clock()

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


def _as_json(snapshot: ProgressSnapshot, pace: Pace) -> dict[str, Any]:
    rate, time_left_s = pace.samples_per_second, pace.time_left_s
    return {
        "event": "progress",
        "study": snapshot.study,
        "stage": snapshot.stage,
        "elapsed_s": pace.elapsed_s,
        "trials": {TrialState(state).value: count for state, count in snapshot.trials.items()},
        "max_trials": snapshot.max_trials,
        "bracket": snapshot.bracket,
        "rung": snapshot.rung,
        "best_trial": snapshot.best_trial,
        "best": dict(snapshot.best),
        "samples_scored": snapshot.samples_scored,
        "samples_planned": snapshot.samples_planned,
        "samples_used": snapshot.samples_used,
        "max_samples": snapshot.max_samples,
        "steps": snapshot.steps,
        "steps_planned": snapshot.steps_planned,
        "samples_per_second": None if rate is None else round(rate, 2),
        "steps_per_second": None if pace.steps_per_second is None else round(pace.steps_per_second, 3),
        "time_left_s": None if time_left_s is None else round(time_left_s, 1),
    }


STATE_STYLES = {
    TrialState.COMPLETE: "green",
    TrialState.PRUNED: "dim",
    TrialState.RUNNING: "cyan",
    TrialState.WAITING: "dim",
    TrialState.FAIL: "red",
}


def _panel(snapshot: ProgressSnapshot, pace: Pace, *, width: int) -> RenderableType:
    """Draw a study's progress as a panel: trials by state, rungs, the best trial, and samples.

    A rung is one of the increasing numbers of samples on which trials are compared. `snapshot` is the progress at one
    moment. `pace` has the speed and the time left. `width` is the width of the panel in characters.
    """
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()

    states = Text(f"{snapshot.num_finished}/{snapshot.max_trials}")
    for state, style in STATE_STYLES.items():
        if count := snapshot.trials.get(state, 0):
            states.append(f"  {count} {state.value.lower()}", style=style)
    rows.add_row("trials", states)

    if snapshot.rungs:
        where = Text()
        if snapshot.bracket is not None:
            of = f" of {snapshot.num_brackets}" if snapshot.num_brackets else ""
            where.append(f"{snapshot.bracket + 1}{of}   ")
        for index, samples in enumerate(snapshot.rungs):
            where.append(f"{' → ' if index else ''}{samples}", style="bold" if index == snapshot.rung else "dim")
        rows.add_row("rungs" if snapshot.bracket is None else "bracket", where)

    if snapshot.best:
        best = Text()
        for name, value in snapshot.best.items():
            best.append(f"{name} ", style="dim").append(f"{value:.4g}   ", style="bold")
        rows.add_row(f"best #{snapshot.best_trial}", best)

    if snapshot.steps_planned:
        rows.add_row("steps", f"{snapshot.steps:,} of {snapshot.steps_planned:,}")
    rows.add_row("samples", f"{snapshot.samples_scored:,} of {snapshot.samples_planned:,}{speed_text(pace, '   ')}")
    if snapshot.max_samples is not None:
        rows.add_row("sample limit", f"{snapshot.samples_used:,} of {snapshot.max_samples:,} used")
    planned = max(snapshot.samples_planned, 1)
    bar = ProgressBar(total=planned, completed=min(snapshot.samples_scored, planned))
    return Panel(
        Group(rows, bar),
        title=Text.assemble((snapshot.study, "bold"), f"  {snapshot.stage}  ", (duration(pace.elapsed_s), "dim")),
        title_align="left",
        border_style="dim",
        width=width,
    )
