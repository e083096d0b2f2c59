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
    """Estimates of each objective with 95 % intervals, for each trial that was scored on holdout data."""

    plot: Literal["holdout"]
    rows: list[HoldoutDocument]


@chart(place=3)
def holdout(run: RunRecord) -> HoldoutPlot:
    """Estimates on held-out data with 95 % intervals; no estimates exist before trials are scored on held-out data."""
    return HoldoutPlot("holdout", holdout_documents(run))
