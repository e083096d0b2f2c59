"""Data of the chart on successive halving: the outcomes of the trials at each rung of each bracket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import TrialResult, TrialState

__all__ = ["RungPlace", "RungsPlot", "rungs"]

End = Literal["promoted", "finished", "stopped", "failed", "running"]
ENDS: dict[TrialState, End] = {TrialState.COMPLETE: "finished", TrialState.PRUNED: "stopped"}


@dataclass(frozen=True)
class RungPlace:
    """Numbers of trials of one bracket that reached one rung, by their outcome at this rung.

    `entered` is the sum of `promoted`, `finished`, `stopped`, `failed` and `running`.
    """

    bracket: Number
    rung: Number
    samples: Annotated[int | None, Field(description="Samples of each objective; null before a trial has finished it.")]
    entered: Annotated[int, Field(description="Trials that were scored at the rung.")]
    promoted: Annotated[int, Field(description="Trials that went on to the next rung.")]
    finished: Annotated[int, Field(description="Trials that are COMPLETE with this rung.")]
    stopped: Annotated[int, Field(description="Trials that were stopped after the rung.")]
    failed: Annotated[int, Field(description="Trials that failed while they were scored at the rung.")]
    running: Annotated[int, Field(description="Trials that are scored at the rung, or wait for its decision.")]


@dataclass(frozen=True)
class RungsPlot:
    """Trials at each rung of each bracket; trials outside of brackets, such as baselines, are left out.

    A rung is a number of samples at which trials are compared, and a bracket is a ladder of rungs.
    """

    plot: Literal["rungs"]
    places: tuple[RungPlace, ...]


@chart(place=14)
def rungs(run: RunRecord) -> RungsPlot:
    """Trials that were promoted, stopped or failed at each rung of each bracket."""
    first: dict[int, int] = {}
    for trial in run.trials:
        if trial.bracket is not None and trial.rungs:
            first[trial.bracket] = min(first.get(trial.bracket, trial.rungs[0].rung), trial.rungs[0].rung)
    counts = Counter(
        (trial.bracket, rung, end)
        for trial in run.trials
        if trial.bracket is not None
        for rung, end in _ends(trial, first.get(trial.bracket, 0))
    )
    sizes = {rung: max(samples.values(), default=0) for rung, samples in run.rung_sizes.items()}
    places = []
    for bracket, rung in sorted({(bracket, rung) for bracket, rung, _ in counts}):
        by_end = {end: counts[bracket, rung, end] for end in ("promoted", "finished", "stopped", "failed", "running")}
        places.append(RungPlace(bracket, rung, sizes.get(rung), sum(by_end.values()), **by_end))
    return RungsPlot("rungs", tuple(places))


def _ends(trial: TrialResult, first: int) -> Iterator[tuple[int, End]]:
    """Yield each rung that a trial has reached, with the outcome of the trial there, such as "promoted" or "failed".

    `first` is the rung at which the trial began.
    """
    done = [rung.rung for rung in trial.rungs]
    has_failed = trial.state is TrialState.FAIL
    for rung in done if has_failed else done[:-1]:
        yield rung, "promoted"
    if has_failed:
        yield (done[-1] + 1 if done else first), "failed"
    elif done:
        yield done[-1], ENDS.get(trial.state, "running")
    elif trial.state is TrialState.RUNNING:
        yield first, "running"
