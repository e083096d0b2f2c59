"""Report section on the Pareto front: a chart for each pair of objectives, or bars for a single objective."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from markupsafe import Markup

from search_spaces.objectives import Costs, Objective, dominates
from service.results.record import RunRecord
from service.results.report.charts import Interval, Legend, Plot, forest, legend
from service.results.report.marks import MAX_POINTS, MAX_ROWS, SHAPES, evenly
from service.results.report.scales import nice_scale
from service.results.report.texts import number_text, point_name
from service.results.selection import costs_of_values
from service.results.series.front import FrontPoint, front
from service.types import Origin

__all__ = ["front_section"]

# Maximum number of pairs of objectives that have a chart.
MAX_PAIRS = 10


def front_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on the Pareto front; None before a trial is scored on all samples."""
    plot = front(run)
    if not plot.points:
        return None
    on_front = sorted((point for point in plot.points if point.is_on_front), key=lambda point: point.trial)
    rows = sorted(on_front, key=lambda point: statistics.fmean(costs_of_values(point.values, run.objectives)))
    digests = {trial.number: trial.recipe.digest for trial in run.trials}
    if len(run.objectives) == 1:
        charts = [{"name": run.objectives[0].name, "svg": _ranking_chart(plot.points, run.objectives[0])}]
        entries = []
    else:
        pairs = list(itertools.combinations(run.objectives, 2))[:MAX_PAIRS]
        charts = [{"name": f"{y.name} against {x.name}", "svg": _pair_chart(plot.points, x, y)} for x, y in pairs]
        entries = [
            Legend("on the front", "mark front"),
            Legend("dominated", "mark dominated"),
            Legend("baseline: source model", "mark source", "diamond"),
            Legend("baseline: published recipe", "mark published", "square"),
            Legend("front of this pair", "frontline", "line"),
        ]
    return {
        "charts": charts,
        "legend": legend(entries) if entries else "",
        "names": [objective.name for objective in run.objectives],
        "rows": [{"name": point_name(row), "point": row, "digest": digests[row.trial]} for row in rows[:MAX_ROWS]],
        "hypervolume": plot.hypervolume,
        "holdout_hypervolume": plot.holdout_hypervolume,
        "reference": plot.reference_point[0],
        "num_trials": len(plot.points),
    }


def _ranking_chart(points: Sequence[FrontPoint], objective: Objective) -> Markup:
    """Draw bars with intervals for a study of a single objective: the ten best proposals, and every baseline.

    `points` are the trials that were scored on all samples. Bars are in the order of the objective's values, the best
    first.
    """
    ranked = sorted(points, key=lambda point: (objective.cost_of_stored(point.values[objective.name]), point.trial))
    proposed = [point.trial for point in ranked if Origin(point.origin).is_searched][:10]
    low, high = objective.bounds
    intervals = []
    for point in ranked:
        if not Origin(point.origin).is_searched or point.trial in proposed:
            css = "best" if point.is_best else point.origin
            ends = point.intervals[objective.name]
            intervals.append(Interval(point_name(point), point.values[objective.name], ends[0], ends[1], css=css))
    scale = nice_scale([low, *(interval.high for interval in intervals)], bounds=(low, high))
    label = f"{objective.name} of the best trials and the baselines, with 95 % intervals"
    return forest(intervals, scale, label=label, with_bars=True)


def _pair_chart(points: Sequence[FrontPoint], x: Objective, y: Objective) -> Markup:
    shown = _thinned(points)
    # The scales hold the intervals of the front only: wide intervals of other points would shrink the rest.
    scales = [
        nice_scale(
            [point.values[o.name] for point in shown]
            + [end for point in points if point.is_on_front for end in point.intervals[o.name]],
            bounds=o.bounds,
        )
        for o in (x, y)
    ]
    plot = Plot(
        *scales,
        label=f"{y.name} against {x.name} of the trials at full budget; those on the front with 95 % intervals",
        x_title=f"{x.name} {'→' if x.direction == 'maximize' else '←'}",
        y_title=f"{'↑' if y.direction == 'maximize' else '↓'} {y.name}",
        height=320,
    )
    plot.steps(_pair_front(shown, x, y), css="frontline")
    for point in sorted(shown, key=lambda point: (point.is_on_front, not Origin(point.origin).is_searched)):
        values = point.values[x.name], point.values[y.name]
        if point.is_on_front:
            (left, right), (bottom, top) = point.intervals[x.name], point.intervals[y.name]
            plot.line(left, values[1], right, values[1], css="error")
            plot.line(values[0], bottom, values[0], top, css="error")
        css = point.origin if not Origin(point.origin).is_searched else "front" if point.is_on_front else "dominated"
        title = f"{point_name(point)}: {x.name} {number_text(values[0])}, {y.name} {number_text(values[1])}"
        shape = SHAPES[Origin(point.origin)]
        plot.point(*values, css=f"mark {css}", shape=shape, title=title, size=6 if point.is_best else 4)
        if point.origin == Origin.SOURCE:
            plot.text(*values, point.label.removeprefix("expert:"), dy=-11, is_movable=True)
        elif point.is_best:
            plot.text(*values, f"best, {point_name(point)}", css="note strong", dy=-11, is_movable=True)
    return plot.render()


def _thinned(points: Sequence[FrontPoint]) -> list[FrontPoint]:
    special = [point for point in points if point.is_on_front or not Origin(point.origin).is_searched]
    rest = [point for point in points if not point.is_on_front and Origin(point.origin).is_searched]
    return special + evenly(rest, max(0, MAX_POINTS - len(special)))


def _pair_front(points: Sequence[FrontPoint], x: Objective, y: Objective) -> list[tuple[float, float]]:
    """Pareto front of `points` for the two objectives `x` and `y` alone, as pairs (value of `x`, value of `y`).

    The pairs are sorted by `x`, the best value first. The report draws them as a staircase.
    """
    costs: dict[Costs, tuple[float, float]] = {}
    for point in points:
        values = point.values[x.name], point.values[y.name]
        costs[(x.cost_of_stored(values[0]), y.cost_of_stored(values[1]))] = values
    stairs: list[Costs] = []
    for pair in sorted(costs):
        if not stairs or not dominates(stairs[-1], pair):
            stairs.append(pair)
    return [costs[pair] for pair in stairs]
