"""Report section on held-out data: a forest plot for each objective and for their mean, and a table."""

from __future__ import annotations

from typing import Any

from service.results.format import sort_holdout, violation_text
from service.results.record import RunRecord
from service.results.report.charts import Interval, Legend, forest, legend
from service.results.report.scales import nice_scale
from service.results.report.texts import interval_text, row_name
from service.results.series.holdout import holdout
from service.types import Origin

__all__ = ["holdout_section"]


def holdout_section(run: RunRecord, *, best: int | None) -> dict[str, Any] | None:
    """Build the data of the report's section on results on holdout data; None before a trial has such results.

    The table and the charts mark the trial with number `best`, the best on search data.
    """
    rows = sort_holdout(holdout(run).rows)
    if not rows:
        return None
    reference = run.holdout_reference
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))

    def chart(name: str, *, is_mean: bool) -> dict[str, Any]:
        estimates = [(row, row["mean"] if is_mean else row["values"].get(name)) for row in rows]
        intervals = [
            Interval(
                row_name(row),
                estimate["value"],
                low=estimate["ci95"][0],
                high=estimate["ci95"][1],
                css="best" if row["trial"] == best else row["origin"],
                title=f"{row_name(row)}: {interval_text(estimate)}, {estimate['samples']} samples",
            )
            for row, estimate in estimates
            if estimate is not None
        ]
        ends = [end for interval in intervals for end in (interval.low, interval.high)]
        mine = next((estimate for row, estimate in estimates if estimate and row["trial"] == reference), None)
        drawn = forest(
            intervals,
            nice_scale(ends, bounds=_bounds(run, name)),
            label=f"{name} on held-out data with 95 % intervals, {len(intervals)} rows; values are in the table below",
            reference=mine["value"] if mine else None,
        )
        return {"name": name, "svg": drawn}

    has_mean = len(names) > 1 and any(row["mean"] for row in rows)
    depths = {len(trial.read_recipe().layers) for trial in run.compared}
    return {
        "names": names,
        "has_mean": has_mean,
        "has_baselines": any(row["origin"] in (Origin.SOURCE, Origin.PUBLISHED) for row in rows),
        "has_speed": len(depths) > 1 and any(row["tokens_per_second"] for row in rows),
        "rows": [
            {"name": row_name(row), "is_best": row["trial"] == best, "note": violation_text(row["violations"]), **row}
            for row in rows
        ],
        "difference_key": "mean" if has_mean else names[0],
        "reference": reference,
        "compared_with": "best" if reference in (None, best) else f"trial {reference}",
        "mean_chart": chart("mean", is_mean=True) if has_mean else None,
        "charts": [chart(name, is_mean=False) for name in names],
        "legend": legend(
            [
                Legend("best on search data", "dot best"),
                Legend("finalist", "dot search"),
                Legend("baseline: source model", "dot source"),
                Legend("baseline: published recipe", "dot published"),
            ]
        ),
    }


def _bounds(run: RunRecord, name: str) -> tuple[float, float] | None:
    if name == "mean":
        return (0.0, 1.0)
    return next((objective.range or (0.0, 1.0) for objective in run.objectives if objective.name == name), None)
