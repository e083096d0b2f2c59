"""Progress of a study: snapshots, the interface of classes that display them, and the measured speed.

The module does not depend on terminals; `service.cli.progress` and `service.jobs.search.progress_log` display the
snapshots.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, Self

from service.results.format import duration
from service.types import TrialState

__all__ = ["SEARCHING", "Pace", "PaceMeter", "ProgressReporter", "ProgressSnapshot", "as_line", "speed_text"]

# Samples per second and time left are measured over this window: long enough to hold several chunks and swaps.
RATE_WINDOW_S = 60.0

# The stage of the search, and the stages in which steps are computed.
SEARCHING = "searching"
WITH_STEPS = (SEARCHING, "refining")


class ProgressReporter(Protocol):
    """Interface of classes that display or store a study's progress.

    The driver calls both methods from its main loop, so they must return quickly.
    """

    def update(self, snapshot: ProgressSnapshot) -> None:
        """Receive a snapshot of the study's progress, possibly after every scored sample.

        The reporter decides which snapshots it shows.
        """
        ...

    def note(self, text: str) -> None:
        """Receive a message, `text`, to show once, for example that an engine starts."""
        ...


@dataclass(frozen=True)
class ProgressSnapshot:
    """Snapshot of a study's progress, whose counts include the work of earlier drivers.

    - `stage`: the current stage, "searching", "refining", "held-out" or "benchmarks".
    - `trials`: the number of trials in each state; `max_trials`: the planned number of trials, baselines included.
    - `bracket`, `rung`: the current bracket (ladder of rungs) and rung (number of samples at which trials are
      compared), counted from 0; None while trials of several brackets or rungs are scored.
    - `num_brackets`: the number of brackets; None if it is not known.
    - `rungs`: the samples at each rung, of the objective with the most samples.
    - `best_trial`: the number of the best trial so far, among the trials scored on all samples; `best`: its values,
      keyed by objective; `best_ci95`: the 95 % intervals of these values, except of exact values.
    - `samples_planned`: the expected total number of samples, including the `samples_scored`.
    - `samples_used`: the number of samples that the search has scored, plus the number that computed losses and
      gradients count as.
    - `max_samples`: the limit of `samples_used`; None if the study has no limit.
    - `steps`: the gradient steps and policy updates that were made; `steps_planned`: their expected total number, in
      which those of a refinement are counted once the search has ended; 0 for a searcher without steps.
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
    best_ci95: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    samples_scored: int = 0
    samples_planned: int = 0
    samples_used: int = 0
    max_samples: int | None = None
    steps: int = 0
    steps_planned: int = 0

    @property
    def num_finished(self) -> int:
        return sum(count for state, count in self.trials.items() if TrialState(state).is_finished)

    def to_json(self) -> dict[str, Any]:
        """Convert the snapshot to JSON, in the form of `service.schemas.api.ProgressDocument`."""
        return {**asdict(self), "trials": {state.value: count for state, count in self.trials.items()}}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Create a snapshot from `document`, the JSON that `to_json` returns.

        Unknown keys, from later versions, are ignored.
        """
        known = {part.name: document[part.name] for part in fields(cls) if part.name in document}
        trials = {TrialState(state): count for state, count in document["trials"].items()}
        return cls(**{**known, "trials": trials, "rungs": tuple(document["rungs"])})


@dataclass(frozen=True)
class Pace:
    """Speed of a study: seconds worked so far, samples and steps per second, and the estimated seconds left.

    Steps are gradients and policy updates of the searcher. The speeds and `time_left_s` are None until they can be
    measured. `samples_per_second` is also None while the searcher makes steps and no sample is scored.
    `steps_per_second` is also None while the searcher makes no steps.
    """

    elapsed_s: float
    samples_per_second: float | None
    time_left_s: float | None
    steps_per_second: float | None = None


class PaceMeter:
    """Meter that computes a study's speed and remaining time (`Pace`), for displays of progress.

    Speeds are samples per second, and steps (gradients and policy updates) per second, over the last 60 s of the
    current stage (search or held-out scoring). The time left is the time for the remaining samples plus the time for
    the remaining steps, at the speeds that were last measured. A refinement scores few samples between its steps, so
    that the samples after it are expected at the speed of an earlier stage, if that was higher. `worked_s` is the
    number of seconds that earlier drivers worked on the study; it is included in the time worked. `clock` returns a
    time in seconds.
    """

    def __init__(self, *, worked_s: float = 0.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_at = clock() - worked_s
        self._snapshot: ProgressSnapshot | None = None
        self._samples, self._steps = _Speed(), _Speed()
        self._earlier = 0.0  # samples per second, the highest speed of earlier stages

    @property
    def elapsed_s(self) -> float:
        return round(self._clock() - self._started_at, 1)

    def add(self, snapshot: ProgressSnapshot) -> bool:
        """Add a progress snapshot, and return whether it is the first one of a stage of the study.

        The measurement starts again with each stage, because stages differ in speed.
        """
        is_new_stage = self._snapshot is None or snapshot.stage != self._snapshot.stage
        if is_new_stage:
            self._earlier = max(self._earlier, self._samples.busy or 0.0)
            self._samples, self._steps = _Speed(), _Speed()
        self._snapshot = snapshot
        now = self._clock()
        self._samples.add(now, snapshot.samples_scored)
        self._steps.add(now, snapshot.steps)
        return is_new_stage

    def pace(self) -> Pace:
        now, snapshot = self._clock(), self._snapshot
        samples, steps = self._samples.now(now), self._steps.now(now)
        time_left_s: float | None = None
        if snapshot is not None and (self._samples.busy or self._steps.busy):
            steps_left = snapshot.steps_planned - snapshot.steps if snapshot.stage in WITH_STEPS else 0
            earlier = self._earlier if snapshot.stage == "refining" else 0.0
            needed = (
                self._samples.seconds_for(snapshot.samples_planned - snapshot.samples_scored, at_least=earlier),
                self._steps.seconds_for(steps_left),
            )
            time_left_s = None if needed[0] is None or needed[1] is None else needed[0] + needed[1]
        return Pace(
            elapsed_s=self.elapsed_s,
            samples_per_second=None if steps and not samples else samples,
            time_left_s=time_left_s,
            steps_per_second=steps or None,
        )


class _Speed:
    """Meter of how fast a count, such as the number of scored samples, grows within one stage."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()
        self.busy: float | None = None
        """The speed when the count last grew, per second; None before."""

    def add(self, now: float, count: int) -> None:
        has_grown = bool(self._points) and count > self._points[-1][1]
        # Two points within a second are hardly more accurate than one and would fill the window.
        if len(self._points) > 1 and now - self._points[-2][0] < 1.0:
            self._points.pop()
        self._points.append((now, count))
        while len(self._points) > 2 and now - self._points[1][0] > RATE_WINDOW_S:
            self._points.popleft()
        if has_grown:
            self.busy = self.now(now)

    def now(self, now: float) -> float | None:
        """Speed at the time `now`: how much the count, such as the number of scored samples, grows per second.

        The growth is measured over the last 60 s of the study's present stage, or from its beginning if the stage is
        shorter. `now` is in seconds of the meter's clock. Returns None in the first two seconds of a stage, and before
        the count has grown in the stage.
        """
        if not self._points or now - self._points[0][0] < 2.0:
            return None
        (first, before), (_, after) = self._points[0], self._points[-1]
        if self.busy is None and before == after:  # samples are counted by chunk, of which the first may take minutes
            return None
        return max(0.0, (after - before) / (now - first))

    def seconds_for(self, count: int, *, at_least: float = 0.0) -> float | None:
        """Estimate the seconds until the count, such as the number of scored samples, has grown by `count`.

        The estimate assumes the speed that was measured when the count last grew, or the speed `at_least` if that is
        higher. Returns None if `count` is above 0 and there is no such speed.
        """
        if count <= 0:
            return 0.0
        speed = max(self.busy or 0.0, at_least)
        return count / speed if speed else None


def as_line(snapshot: ProgressSnapshot, pace: Pace) -> str:
    """One line of text that describes a progress snapshot and the study's speed (`pace`).

    An example is `[4m10s] searching: 31/67 trials, bracket 2/3 rung 90, best #12: math 0.61, ...`. A rung is a number
    of samples at which trials are compared, here 90. A bracket is a ladder of rungs.
    """
    trials = f"{snapshot.num_finished}/{snapshot.max_trials} trials"
    if failed := snapshot.trials.get(TrialState.FAIL, 0):
        trials += f" ({failed} failed)"
    parts = [trials]
    if where := _where(snapshot):
        parts.append(where)
    if snapshot.best:
        values = " ".join(f"{name} {value:.4g}" for name, value in snapshot.best.items())
        parts.append(f"best #{snapshot.best_trial}: {values}")
    if snapshot.steps_planned:
        parts.append(f"{snapshot.steps}/{snapshot.steps_planned} steps")
    parts.append(f"{snapshot.samples_scored}/{snapshot.samples_planned} samples{speed_text(pace, ', ')}")
    return f"[{duration(pace.elapsed_s)}] {snapshot.stage}: " + ", ".join(parts)


def speed_text(pace: Pace, separator: str) -> str:
    """Text of the speeds and the estimated time left in `pace`, each preceded by `separator`.

    With the separator ", ", an example is `, 50/s, 0.4 steps/s, 4m10s left`: samples per second, the searcher's steps
    (gradients and policy updates) per second, and the time left. Values that are not measured yet are left out.
    """
    text = ""
    if pace.samples_per_second is not None:
        text += f"{separator}{pace.samples_per_second:.3g}/s"
    if pace.steps_per_second is not None:
        text += f"{separator}{pace.steps_per_second:.2g} steps/s"
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
