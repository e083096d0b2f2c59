"""Races: how far each proposed trial came, and what stopped it."""

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
from service.types import Origin, TrialRecord, TrialState

__all__ = ["RaceEntry", "RaceLook", "RacesPlot", "races"]

End = Literal["finished", "stopped", "failed", "running"]

ENDS: dict[TrialState, End] = {
    TrialState.COMPLETE: "finished",
    TrialState.PRUNED: "stopped",
    TrialState.FAIL: "failed",
}

# Where a reason names the rung: the look is a field of its own.
AT_RUNG = re.compile(r" (?:from|at) rung \d+")

# The rule that a scheduler stops by, where the stored reason does not name one of several.
NOT_PROMOTED = "not promoted"
RULES = {
    "racing": "behind one of the best on the same samples",
    "hyperband": "not among the best of its bracket",
    "asha": "not among the best of the rung",
}


@dataclass(frozen=True)
class RaceLook:
    rung: Number
    samples: Annotated[int, Field(description="Of each objective.")]
    value: Annotated[float | None, Field(description="The mean of the accuracy objectives; null without any.")]


@dataclass(frozen=True)
class RaceEntry:
    trial: Number
    end: Annotated[End, Field(description="finished: scored at the full budget.")]
    rule: Annotated[str | None, Field(description="What stopped it, or why it failed.")]
    looks: tuple[RaceLook, ...]


@dataclass(frozen=True)
class RacesPlot:
    """The proposed trials of a search with several rungs."""

    plot: Literal["races"]
    scheduler: str | None
    samples: Annotated[tuple[int, ...], Field(description="Of each objective, at each rung.")]
    trials: tuple[RaceEntry, ...]


@chart(place=8)
def races(run: RunRecord) -> RacesPlot:
    """How far each proposed trial came, who was stopped when, and by which rule."""
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


def _entry(trial: TrialRecord, names: tuple[str, ...], scheduler: str | None) -> RaceEntry:
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
            value=statistics.fmean(rung.values[name] for name in names) if names else None,
        )
        for rung in trial.rungs
    )
    return RaceEntry(trial.number, end, rule, looks)
