"""Report section on the directions and scales of merges in the search space m3.

In this section, p is the exponent of a p-series: the k-th expert has a share proportional to k^-p.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from markupsafe import Markup

from service.results.record import RunRecord
from service.results.report.charts import Legend, Plot, legend
from service.results.report.marks import MAX_POINTS, MAX_ROWS, NUM_COLOURS, evenly
from service.results.report.scales import nice_scale
from service.results.report.texts import number_text
from service.results.series.directions import DirectionPoint, directions
from service.types import Origin

__all__ = ["directions_section"]


def directions_section(run: RunRecord) -> dict[str, Any] | None:
    """Build the data of the report's section on the directions and scales of merges.

    The direction of a merge is each expert's share of the sum of task vectors; the scale is the factor of this sum. The
    section is for search spaces such as m3, which give each expert one share for the whole model. Returns None in other
    spaces, and before a merge has been scored on all samples.
    """
    plot = directions(run)
    if not plot.points:
        return None
    names = [objective.name for objective in run.objectives]
    colours = {name: f"var(--c{index % NUM_COLOURS})" for index, name in enumerate(names)}
    rows = [_row(point, plot.experts, names) for point in plot.points[:MAX_ROWS]]
    over_p = [(point.p, point) for point in plot.points if point.p is not None]
    over_scale = [(point.scale, point) for point in plot.points if point.scale is not None]
    charts = [
        ("exponent p of the p-series", over_p),
        ("scale of the task vectors", over_scale),
    ]
    return {
        "experts": plot.experts,
        "names": names,
        "methods": [_row(point, plot.experts, names) for point in plot.best],
        "orders": [_row(point, plot.experts, names) for point in plot.best_of_orders],
        "rows": rows,
        "num_rows_left": max(0, len(plot.points) - MAX_ROWS),
        "legend": legend(
            [Legend(name, "swatch", style=f"fill:{colour}") for name, colour in colours.items()]
            + [Legend("mean of all merges there", "loss", "line", style="stroke:var(--soft)")]
        ),
        "charts": [
            {"name": name, "svg": _chart(name, found, colours)} for name, found in charts if len(dict(found)) > 1
        ],
    }


def _chart(name: str, found: Sequence[tuple[float, DirectionPoint]], colours: Mapping[str, str]) -> Markup:
    """Scatter plot of each objective's value (y) over a property of merges (x), such as the scale of task vectors.

    `name` is the name of the property. `found` has pairs (value of the property, merge), and `colours` has the colour
    of each objective. Where several merges have the same value of the property, a line passes through the mean of their
    objective values.
    """
    plot = Plot(
        nice_scale([at for at, _ in found]),
        nice_scale([value for _, point in found for value in point.values.values()]),
        label=f"value of each objective over the {name}",
        x_title=name,
        height=240,
    )
    for objective, colour in colours.items():
        by_number: dict[float, list[float]] = {}
        for at, point in found:
            by_number.setdefault(at, []).append(point.values[objective])
        shared = [(at, fmean(values)) for at, values in sorted(by_number.items()) if len(values) > 1]
        plot.curve(shared, css="loss", style=f"stroke:{colour}")
        for at, point in evenly(found, MAX_POINTS // len(colours)):
            title = f"{_name(point)}, {point.method}: {objective} {number_text(point.values[objective])}"
            plot.point(at, point.values[objective], css="swatch", style=f"fill:{colour}", title=title, size=3)
    return plot.render()


def _row(point: DirectionPoint, experts: Sequence[str], names: Sequence[str]) -> dict[str, Any]:
    return {
        "method": point.method.replace("_", " "),
        "order": point.order,
        "name": _name(point),
        "shares": [point.shares.get(expert, 0.0) for expert in experts],
        "scale": point.scale,
        "kept": ", ".join(f"{name} {value:g}" for name, value in point.coefficients.items()),
        "values": [point.values[name] for name in names],
    }


def _name(point: DirectionPoint) -> str:
    return f"trial {point.trial}" if point.origin == Origin.SEARCH else point.label
