"""Data of the chart on held-out results, with an interval for each trial and objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from service.results.documents import holdout_documents
from service.results.record import RunRecord
from service.results.series.base import chart
from service.schemas.files import HoldoutDocument

__all__ = ["HoldoutPlot", "holdout"]


@dataclass(frozen=True)
class HoldoutPlot:
    """Held-out estimates with 95 % intervals."""

    plot: Literal["holdout"]
    rows: list[HoldoutDocument]


@chart(place=3)
def holdout(run: RunRecord) -> HoldoutPlot:
    """Held-out estimates with 95 % intervals; no rows before the held-out stage."""
    return HoldoutPlot("holdout", holdout_documents(run))
