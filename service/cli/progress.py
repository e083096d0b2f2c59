"""Live progress of a run in the terminal: a panel that redraws itself, plain lines where there is no terminal, or JSON
lines for programs.

The driver reports what is so, as often as it likes; how and how often that is shown is decided here.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import StrEnum
from types import TracebackType
from typing import Any, Self, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from service.types import TrialState

__all__ = ["ProgressSnapshot", "ProgressStyle", "ProgressView"]

# Samples per second and time left are measured over this window: long enough to hold several chunks and swaps.
RATE_WINDOW_S = 60.0

REFRESHES_PER_S = 4
PANEL_WIDTH = 96


class ProgressStyle(StrEnum):
    """`auto` is `panel` on a terminal and `lines` elsewhere."""

    AUTO = "auto"
    PANEL = "panel"
    LINES = "lines"
    JSON = "json"


@dataclass(frozen=True)
class ProgressSnapshot:
    """Where a run stands. Counts are of the whole study, work of earlier attempts included.

    `stage` is what is being done now ("searching", "held-out"); `max_trials` counts all trials there will be, sources
    and published included. `bracket` and `rung` are 0-based, and None where the search is at no single one; `rungs` are
    the sample counts of the objective that has most. `best` holds the values of the best full-budget trial so far, by
    objective, in the metric's unit. `samples_planned` is what is still expected for the stages known, those scored
    included.
    """

    study: str
    stage: str
    trials: Mapping[TrialState, int] = field(default_factory=dict)
    max_trials: int = 0
    bracket: int | None = None
    num_brackets: int | None = None
    rung: int | None = None
    rungs: tuple[int, ...] = ()
    best_trial: int | None = None
    best: Mapping[str, float] = field(default_factory=dict)
    samples_scored: int = 0
    samples_planned: int = 0

    @property
    def num_finished(self) -> int:
        return sum(count for state, count in self.trials.items() if TrialState(state).is_finished)

    def to_json(self) -> dict[str, Any]:
        """As documents.ProgressDocument."""
        return {**asdict(self), "trials": {state.value: count for state, count in self.trials.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Keys of later versions are left out."""
        known = {part.name: document[part.name] for part in fields(cls) if part.name in document}
        trials = {TrialState(state): count for state, count in document["trials"].items()}
        return cls(**{**known, "trials": trials, "rungs": tuple(document["rungs"])})


class ProgressView:
    """Shows snapshots on `stream` (standard error unless given) until it is closed. Use as a context manager.

    Thread-safe. `update` only keeps the snapshot unless a line is due: it may be called for every sample. Lines appear
    every `interval_s` seconds, at a new stage, and once more when the view closes. `worked_s` is how long the study had
    been worked on before.
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
        self._started_at = clock() - worked_s
        self._snapshot: ProgressSnapshot | None = None
        self._shown: ProgressSnapshot | None = None
        self._shown_at = -float("inf")
        self._rate = _Rate()
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
            is_new_stage = self._snapshot is None or snapshot.stage != self._snapshot.stage
            if is_new_stage:
                # Stages differ in speed, and what an earlier attempt scored came in no time.
                self._rate = _Rate()
            self._rate.add(now, snapshot.samples_scored)
            self._snapshot = snapshot
            if self._live is None and (is_new_stage or now - self._shown_at >= self._interval_s):
                self._show_line()

    def note(self, text: str) -> None:
        """Print a message that stays: a failure, a resumed run, where the report is."""
        if (live := self._live) is not None:
            # Without our lock: the thread that redraws holds rich's lock while it asks for ours.
            live.console.print(Text(text))
            return
        if self.style is ProgressStyle.JSON:
            text = json.dumps({"event": "note", "elapsed_s": self._elapsed_s(), "text": text})
        with self._lock:
            self._write(text)

    def close(self) -> None:
        """Show the last snapshot once more and give the terminal back. May be called twice."""
        with self._lock:
            if self._live is None and self._snapshot is not self._shown:
                self._show_line()
            live, self._live = self._live, None
        # Outside the lock: stopping waits for the thread that redraws, which asks for the lock.
        if live is not None:
            live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        with self._lock:
            if self._snapshot is not None:
                yield _panel(self._snapshot, self._pace(), width=min(PANEL_WIDTH, options.max_width))

    def _show_line(self) -> None:
        snapshot = self._snapshot
        if snapshot is None:
            return
        pace = self._pace()
        self._write(
            json.dumps(_as_json(snapshot, pace)) if self.style is ProgressStyle.JSON else _as_line(snapshot, pace)
        )
        self._shown, self._shown_at = snapshot, self._clock()

    def _pace(self) -> _Pace:
        rate, snapshot = self._rate.per_second(self._clock()), self._snapshot
        samples_left = snapshot.samples_planned - snapshot.samples_scored if snapshot else 0
        return _Pace(
            elapsed_s=self._elapsed_s(),
            samples_per_second=rate,
            time_left_s=max(0, samples_left) / rate if rate else None,
        )

    def _elapsed_s(self) -> float:
        return round(self._clock() - self._started_at, 1)

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


@dataclass(frozen=True)
class _Pace:
    elapsed_s: float
    samples_per_second: float | None
    time_left_s: float | None


class _Rate:
    """Samples per second over the last RATE_WINDOW_S."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, samples: int) -> None:
        # Two points in one second tell little more than one and would fill the window.
        if len(self._points) > 1 and now - self._points[-2][0] < 1.0:
            self._points.pop()
        self._points.append((now, samples))
        while len(self._points) > 2 and now - self._points[1][0] > RATE_WINDOW_S:
            self._points.popleft()

    def per_second(self, now: float) -> float | None:
        """None until two seconds were seen: before that a first chunk would look like a record. Falls while nothing
        is reported."""
        if not self._points or now - self._points[0][0] < 2.0:
            return None
        (first, before), (_, after) = self._points[0], self._points[-1]
        return max(0.0, (after - before) / (now - first))


def _as_json(snapshot: ProgressSnapshot, pace: _Pace) -> dict[str, Any]:
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
        "samples_per_second": None if rate is None else round(rate, 2),
        "time_left_s": None if time_left_s is None else round(time_left_s, 1),
    }


def _as_line(snapshot: ProgressSnapshot, pace: _Pace) -> str:
    """One line: `[4m10s] searching: 31/67 trials (2 failed), bracket 2/3 rung 90, best #12: math 0.61, ...`."""
    trials = f"{snapshot.num_finished}/{snapshot.max_trials} trials"
    if failed := snapshot.trials.get(TrialState.FAIL, 0):
        trials += f" ({failed} failed)"
    parts = [trials]
    if where := _where(snapshot):
        parts.append(where)
    if snapshot.best:
        values = " ".join(f"{name} {value:.4g}" for name, value in snapshot.best.items())
        parts.append(f"best #{snapshot.best_trial}: {values}")
    parts.append(f"{snapshot.samples_scored}/{snapshot.samples_planned} samples{_speed(pace, ', ')}")
    return f"[{duration(pace.elapsed_s)}] {snapshot.stage}: " + ", ".join(parts)


def _speed(pace: _Pace, separator: str) -> str:
    text = ""
    if pace.samples_per_second is not None:
        text += f"{separator}{pace.samples_per_second:.3g}/s"
    if pace.time_left_s is not None:
        text += f"{separator}{duration(pace.time_left_s)} left"
    return text


def _where(snapshot: ProgressSnapshot) -> str:
    parts = []
    if snapshot.bracket is not None:
        of = f"/{snapshot.num_brackets}" if snapshot.num_brackets else ""
        parts.append(f"bracket {snapshot.bracket + 1}{of}")
    if snapshot.rung is not None:
        parts.append(f"rung {snapshot.rungs[snapshot.rung] if snapshot.rungs else snapshot.rung}")
    return " ".join(parts)


STATE_STYLES = {
    TrialState.COMPLETE: "green",
    TrialState.PRUNED: "dim",
    TrialState.RUNNING: "cyan",
    TrialState.WAITING: "dim",
    TrialState.FAIL: "red",
}


def _panel(snapshot: ProgressSnapshot, pace: _Pace, *, width: int) -> RenderableType:
    """The panel: what is done, how far it is, and the best so far."""
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

    rows.add_row("samples", f"{snapshot.samples_scored:,} of {snapshot.samples_planned:,}{_speed(pace, '   ')}")
    planned = max(snapshot.samples_planned, 1)
    bar = ProgressBar(total=planned, completed=min(snapshot.samples_scored, planned))
    return Panel(
        Group(rows, bar),
        title=Text.assemble((snapshot.study, "bold"), f"  {snapshot.stage}  ", (duration(pace.elapsed_s), "dim")),
        title_align="left",
        border_style="dim",
        width=width,
    )


def duration(seconds: float) -> str:
    """Seconds as people say them: 42s, 4m10s, 2h05m."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
