"""Report section on the search history: the trials' values at the rungs that they finished, and the best so far."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from service.results.feasibility import violations
from service.results.format import sample_count, violation_text
from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import MAX_POINTS, MAX_ROWS, SHAPES, evenly
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text, point_name
from service.results.selection import full_budget_trials
from service.results.series.history import HistoryPoint, HistorySeries, history
from service.types import Origin

__all__ = ["history_section"]

# A chart paints at most this many crosses for failed trials.
MAX_FAILED = 300


def history_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on the search: each trial's values, and the best trial so far.

    Returns None before any trial has finished a rung (a number of samples at which trials are compared).
    """
    plot = history(run)
    num_rungs = max((rung.rung for trial in run.trials for rung in trial.rungs), default=-1) + 1
    if num_rungs == 0:
        return None
    # The mean, where there is one, comes before the objectives.
    ranges = [objective.range or (0.0, 1.0) for objective in run.objectives]
    ranges = [(0.0, 1.0)] * (len(plot.series) - len(ranges)) + ranges
    charts: list[dict[str, Any]] = []
    for series, bounds in zip(plot.series, ranges, strict=True):
        drawn = _history_chart(series, plot.failed, bounds, num_rungs, height=210 if charts else 300)
        charts.append({"name": series.name, "svg": drawn})
    sizes = {rung: sample_count(samples) for rung, samples in run.rung_sizes.items()}
    entries = [
        Legend(f"rung of {sizes.get(rung, 0)} samples", "mark", style=_rung_style(rung, num_rungs))
        for rung in range(num_rungs)
    ]
    entries += [
        Legend("baseline: source model", "mark source", "diamond"),
        Legend("baseline: published recipe", "mark published", "square"),
        Legend("best so far at full budget", "record", "line"),
    ]
    if run.has_refined:
        entries.append(Legend("refined path", "mark refined"))
    if plot.failed:
        entries.append(Legend("failed", "failed", "cross"))
    trials = sorted(full_budget_trials(run.trials), key=lambda trial: trial.number)
    return {
        "charts": charts,
        "legend": legend(entries),
        "names": [objective.name for objective in run.objectives],
        "rows": trials[:MAX_ROWS],
        "violations": {
            trial.number: violation_text(violations(trial.values, run.objectives, run.sources))
            for trial in trials[:MAX_ROWS]
        },
        "num_rows_left": max(0, len(trials) - MAX_ROWS),
        "num_left_out": max(0, sum(len(trial.rungs) for trial in run.trials) - MAX_POINTS),
    }


def _history_chart(
    series: HistorySeries, failed: Sequence[int], bounds: tuple[float, float], num_rungs: int, height: int
) -> Markup:
    last = max(itertools.chain((point.trial for point in series.points), failed), default=1)
    plot = Plot(
        _integer_scale(last),
        nice_scale((point.value for point in series.points), bounds=bounds),
        label=f"{series.name} of every trial by number, one point per finished rung, "
        "with the best so far at full budget",
        x_title="trial",
        height=height,
    )
    for number in failed[:: len(failed) // MAX_FAILED + 1]:
        plot.point(number, plot.y.low, css="failed", shape="cross", title=f"trial {number} failed")
    searched = [point for point in series.points if point.origin == Origin.SEARCH]
    special = [point for point in series.points if point.origin != Origin.SEARCH]
    shown = _thinned(searched, plot, MAX_POINTS - min(len(special), MAX_POINTS // 2))
    for point in sorted(shown, key=lambda point: point.rung):
        style = _rung_style(point.rung, num_rungs)
        plot.point(point.trial, point.value, css="mark", style=style, title=_point_title(point), size=3.5)
    if series.record:
        record = [(best.trial, best.value) for best in series.record]
        plot.steps([*record, (last, record[-1][1])], css="record")
    for point in special[: MAX_POINTS // 2]:
        shape = SHAPES[Origin(point.origin)]
        plot.point(point.trial, point.value, css=f"mark {point.origin}", shape=shape, title=_point_title(point))
    return plot.render()


def _point_title(point: HistoryPoint) -> str:
    return f"{point_name(point)}: {number_text(point.value)} on {point.most_samples} samples"


def _thinned(points: Sequence[HistoryPoint], plot: Plot, limit: int) -> list[HistoryPoint]:
    """Choose at most `limit` points of a chart so that the chart looks as it does with all points.

    If there are more than `limit` points, one point is kept in each cell of a fine grid over `plot`. If the kept points
    are still too many, they are thinned evenly.
    """
    if len(points) <= limit:
        return list(points)
    columns = np.rint(plot.x.at_each([point.trial for point in points]) * 300)
    rows = np.rint(plot.y.at_each([point.value for point in points]) * 100)
    cells = (np.array([point.rung for point in points]) * 1000 + columns) * 1000 + rows
    _, first = np.unique(cells, return_index=True)
    return evenly([points[index] for index in np.sort(first).tolist()], limit)


def _integer_scale(last: int) -> Scale:
    scale = nice_scale((0, max(last, 1)), count=8)
    return Scale(0, max(last, 1), max(1.0, scale.step))


def _rung_style(rung: int, num_rungs: int) -> str:
    share = 100 if num_rungs == 1 else round(100 * rung / (num_rungs - 1))
    return f"--rung:{share}%"
