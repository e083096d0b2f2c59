"""Data of the chart on racing: the rungs that each proposed trial reached, and the rule that stopped it."""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import RunRecord
from service.results.selection import accuracy_objectives
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import Origin, TrialResult, TrialState

__all__ = ["RaceEntry", "RaceLook", "RacesPlot", "races"]

End = Literal["finished", "stopped", "failed", "running"]

ENDS: dict[TrialState, End] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
}

# Part of a reason that names the rung, which is a field of its own.
AT_RUNG = re.compile(r" (?:from|at) rung \d+")

# The stopping rule of each scheduler, for stored reasons that name no rule.
NOT_PROMOTED = "not promoted"
RULES = {
    "racing": "behind one of the best on the same samples",
    "hyperband": "not among the best of its bracket",
    "asha": "not among the best of the rung",
    "successive_halving": "not among the best of the rung",
}


@dataclass(slots=True)  # as history.HistoryPoint
class RaceLook:
    rung: Number
    samples: Annotated[int, Field(description="Samples of each objective.")]
    value: Annotated[float | None, Field(description="Mean of the accuracy objectives; null without any.")]


@dataclass(frozen=True)
class RaceEntry:
    trial: Number
    end: Annotated[End, Field(description='How the trial ended; "finished" is scored at the full budget.')]
    rule: Annotated[str | None, Field(description="Rule that stopped the trial, or reason of its failure.")]
    looks: tuple[RaceLook, ...]


@dataclass(frozen=True)
class RacesPlot:
    """Rungs that each trial of the search reached, and the reasons why trials were stopped.

    A rung is a number of samples at which trials are compared. `scheduler` is the name of the scheduler, such as
    racing, which stops a trial when others are better.
    """

    plot: Literal["races"]
    scheduler: str | None
    samples: Annotated[tuple[int, ...], Field(description="Samples of each objective at each rung.")]
    trials: tuple[RaceEntry, ...]


@chart(place=8)
def races(run: RunRecord) -> RacesPlot:
    """Numbers of samples that each searched trial reached, and the rule that stopped the trial."""
    scheduler = run.study.document.get("fidelity", {}).get("scheduler")
    names = accuracy_objectives(run.objectives)
    searched = sorted((t for t in run.trials if t.origin is Origin.SEARCH), key=lambda trial: trial.number)
    samples: dict[int, int] = {}
    for trial in run.trials:
        for rung in trial.rungs:
            samples[rung.rung] = max([samples.get(rung.rung, 0), *rung.num_samples.values()])
    return RacesPlot(
        plot="races",
        scheduler=scheduler,
        samples=tuple(samples[rung] for rung in sorted(samples)),
        trials=tuple(_entry(trial, names, scheduler) for trial in searched),
    )


def _entry(trial: TrialResult, names: tuple[str, ...], scheduler: str | None) -> RaceEntry:
    end = ENDS.get(trial.state, "running")
    rule = None
    if end == "stopped":
        rule = AT_RUNG.sub("", trial.reason or NOT_PROMOTED)
        rule = RULES.get(scheduler or "", rule) if rule == NOT_PROMOTED else rule
    elif end == "failed":
        rule = trial.reason
    looks = tuple(
        RaceLook(
            rung=rung.rung,
            samples=max(rung.num_samples.values(), default=0),
            value=statistics.fmean([rung.values[name] for name in names]) if names else None,
        )
        for rung in trial.rungs
    )
    return RaceEntry(trial.number, end, rule, looks)
