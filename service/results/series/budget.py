"""Data of the chart on the cost of a search: the rungs that trials reached, and the samples scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.documents import samples_document
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import Number
from service.types import Origin

__all__ = ["BudgetPlot", "BudgetRung", "budget"]


@dataclass(frozen=True)
class BudgetRung:
    rung: Number
    samples: Annotated[int, Field(description="Samples of each objective.")]
    trials: Annotated[int, Field(description="Number of searched trials that reached the rung.")]


@dataclass(frozen=True)
class BudgetPlot:
    """Number of samples `scored` in the search, and for each rung the number of trials that reached it.

    A rung is a number of samples at which trials are compared. For comparison, `full_budget` is the number of samples
    that it would take to score every recipe in full.
    """

    plot: Literal["budget"]
    scored: Number
    full_budget: Number
    rungs: tuple[BudgetRung, ...]


@chart(place=5)
def budget(run: RunRecord) -> BudgetPlot:
    """Searched trials that reached each rung, and samples scored, compared with scoring all recipes in full."""
    sizes: dict[int, list[int]] = {}
    for trial in run.trials:
        if trial.origin is Origin.SEARCH:
            for rung in trial.rungs:
                sizes.setdefault(rung.rung, []).append(max(rung.num_samples.values(), default=0))
    samples = samples_document(run)
    rungs = tuple(BudgetRung(rung, max(sizes[rung]), len(sizes[rung])) for rung in sorted(sizes))
    return BudgetPlot("budget", samples["scored"], samples["full_budget"], rungs)
