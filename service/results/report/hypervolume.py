"""Report chart of the hypervolume over the samples spent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import MAX_POINTS, MAX_ROWS, SHAPES, evenly
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.results.series.hypervolume import HypervolumePoint, hypervolume
from service.types import Origin

__all__ = ["hypervolume_picture"]


def hypervolume_picture(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's chart of the Pareto front's hypervolume over the number of samples used so far.

    Returns None in a study of one objective, and before a trial has been scored on all samples.
    """
    plot = hypervolume(run)
    if not plot.points:
        return None
    news = [point for before, point in zip((None, *plot.points), plot.points, strict=False) if _is_new(point, before)]
    entries = [
        Legend("hypervolume so far", "record", "line"),
        Legend("a trial that is new on the front", "mark front"),
        Legend("baseline: source model", "mark source", "diamond"),
        Legend("baseline: published recipe", "mark published", "square"),
        Legend("baselines are scored", "reference", "line"),
    ]
    return {
        "chart": _chart(plot.points, news, plot.baselines_spent),
        "rows": news[:MAX_ROWS],
        "num_rows_left": max(0, len(news) - MAX_ROWS),
        "legend": legend(entries),
        "baselines": max((p.hypervolume for p in plot.points if not Origin(p.origin).is_searched), default=None),
        "last": plot.points[-1].hypervolume,
        "spent": plot.points[-1].spent,
        "baselines_spent": plot.baselines_spent,
        "reference": plot.reference_point[0],
    }


def _chart(points: Sequence[HypervolumePoint], news: Sequence[HypervolumePoint], baselines_spent: int) -> Markup:
    last = points[-1].spent
    plot = Plot(
        Scale(0, max(last, 1), max(1.0, nice_scale((0, last), count=8).step)),
        nice_scale(point.hypervolume for point in points),
        label="hypervolume of the front on search data over the samples spent",
        x_title="samples spent, gradients included",
        height=260,
    )
    if 0 < baselines_spent < last:
        plot.line(baselines_spent, plot.y.low, baselines_spent, plot.y.high, css="reference")
    plot.steps([(point.spent, point.hypervolume) for point in (*news, points[-1])], css="record")
    for point in evenly(news, MAX_POINTS):
        origin = Origin(point.origin)
        css = "mark front" if origin.is_searched else f"mark {point.origin}"
        title = f"{point.label}: {number_text(point.hypervolume)} after {point.spent:,} samples"
        plot.point(point.spent, point.hypervolume, css=css, shape=SHAPES[origin], title=title, size=3.5)
    return plot.render()


def _is_new(point: HypervolumePoint, before: HypervolumePoint | None) -> bool:
    return before is None or point.hypervolume != before.hypervolume
