"""Charts and table rows of the analysis of trained experts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from service.results.report.charts import Cell, Legend, Plot, heatmap, legend
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.schemas.api import (
    AnalysisDocument,
    FleetAnalysisDocument,
    LandscapeDocument,
    MergeLossDocument,
    TaskVectorDocument,
)

__all__ = ["analysis_context", "has_values", "merge_columns", "merge_rows", "merge_text", "vectors_of"]

# Height of a cell of a heatmap, in pixels.
CELL = 22
# Smaller losses get the colour of this one, since colours are by logarithms.
LEAST = 1e-6


def analysis_context(document: AnalysisDocument) -> dict[str, Any]:
    """Build the data of the report's section on trained experts from `document`, the analysis of the experts.

    The analysis has the distributions of the experts' task vectors, and the losses of merges.
    """
    fleets = document["fleets"]
    drawn = [(fleet["name"], found) for fleet in fleets for found in _landscapes(fleet)]
    every = [loss for _, found in drawn for row in found["losses"] for loss in row]
    losses = [max(loss, LEAST) for loss in every if loss is not None and math.isfinite(loss)] or [1.0]
    return {
        "samples": document["samples"],
        "histograms": [
            {"name": f"{vector['expert']}, {fleet['name']}", "svg": _histogram(vector)}
            for fleet in fleets
            for vector in vectors_of(fleet)
        ],
        "legend": legend(
            [
                Legend("task vector", "loss", "line", style="stroke:var(--c0)"),
                Legend("Laplace", "loss", "line", style="stroke:var(--c1)"),
                Legend("Gauss", "loss", "line", style="stroke:var(--c2)"),
            ]
        ),
        "fits": [
            {
                "name": f"{vector['expert']}, {fleet['name']}",
                "distribution": fitted["distribution"],
                **{key: number_text(fitted[key]) for key in ("distance", "log_likelihood", "zeros")},
                "scale": f"{fitted['scale']:.2e}",
            }
            for fleet in fleets
            for vector in vectors_of(fleet)
            for fitted in vector["fits"]
        ],
        "landscapes": [
            {
                "name": f"{' and '.join(found['experts'])}, {name}",
                "svg": _landscape(found, min(losses), max(losses)),
            }
            for name, found in drawn
        ],
        "low": number_text(min(losses)),
        "high": number_text(max(losses)),
        "columns": [name for name, _ in merge_columns(document)],
        "has_values": has_values(document),
        "curves": _curves(fleets),
        "curve_legend": legend(
            [
                Legend(fleet["name"], "loss", "line", style=f"stroke:var(--c{index})")
                for index, fleet in enumerate(fleets)
            ]
        ),
        "merges": [
            {"method": method, "experts": experts, "cells": cells} for method, experts, cells in merge_rows(document)
        ],
    }


def merge_columns(document: AnalysisDocument) -> list[tuple[str, list[MergeLossDocument | None]]]:
    """Columns of the table of merges in `document`: one for each fleet, and one for each mixture of two fleets.

    A fleet is the experts of one fine-tuning. Each row of the table is a merge method with a number of merged experts;
    the first fleet determines the rows. A mixture merges two experts, one of each fleet, so its column has None in rows
    for more experts.
    """
    first = document["fleets"][0]
    columns: list[tuple[str, list[MergeLossDocument | None]]] = [
        (fleet["name"], list(fleet["merges"])) for fleet in document["fleets"]
    ]
    for mixed in document.get("mixed", []):
        by_method = {row["method"]: row for row in mixed["merges"]}
        rows = [by_method.get(row["method"]) if num_experts(first, row) == 2 else None for row in first["merges"]]
        columns.append((" with ".join(mixed["fleets"]), rows))
    return columns


def merge_rows(document: AnalysisDocument) -> list[tuple[str, int, list[str]]]:
    """Rows of the table of merges in `document`: method, number of merged experts, and a text for each column."""
    first, columns = document["fleets"][0], merge_columns(document)
    texts = zip(*(["" if row is None else merge_text(row) for row in rows] for _, rows in columns), strict=True)
    return [
        (row["method"], num_experts(first, row), list(cells)) for row, cells in zip(first["merges"], texts, strict=True)
    ]


def has_values(document: AnalysisDocument) -> bool:
    """Whether the analysis `document` has metrics of merges besides losses, which analyses of old versions lack."""
    return any(row.get("value") is not None for fleet in document["fleets"] for row in fleet["merges"])


def merge_text(row: MergeLossDocument) -> str:
    """Text of a merge's metric and loss, with the coefficient that gives them, such as `0.612 (loss 1.204) at 0.4`.

    If `row`, the merge's entry in the analysis, has no metric, the text has only the loss.
    """
    at = "" if row["coefficient"] is None else f" at {row['coefficient']:g}"
    loss, value = _loss_text(row["mean"]), row.get("value")
    return f"{loss}{at}" if value is None else f"{number_text(value)} (loss {loss}){at}"


def vectors_of(fleet: FleetAnalysisDocument) -> list[TaskVectorDocument]:
    """Task vectors (expert minus base) of the experts of a fine-tuning, followed by their sum if it was analysed."""
    return [*fleet["task_vectors"], *([fleet["accumulated"]] if "accumulated" in fleet else [])]


def _landscapes(fleet: FleetAnalysisDocument) -> list[LandscapeDocument]:
    """Loss landscapes of a fleet (the experts of one fine-tuning), one for each measured pair of experts.

    A landscape has the losses of merges of the two experts over a grid of their coefficients.
    """
    return fleet.get("landscapes", [fleet["landscape"]] if fleet["landscape"] else [])


def _curves(fleets: Sequence[FleetAnalysisDocument]) -> list[dict[str, Any]]:
    """Draw one chart for each merge method: the mean loss over the merge coefficient, for merges of all experts.

    A chart has a line for each fleet (the experts of one fine-tuning). The losses are measured on the samples on which
    the coefficients are chosen. A method for which only one coefficient was tried has no chart. Each entry of the
    result contains the method's name under "name" and the chart under "svg".
    """
    charts = []
    for rows in zip(*(fleet["merges"] for fleet in fleets), strict=True):
        lines = [_points(row) for row in rows]
        losses = [loss for line in lines for _, loss in line]
        if num_experts(fleets[0], rows[0]) < len(fleets[0]["task_vectors"]) or max(map(len, lines)) < 2:
            continue
        plot = Plot(
            nice_scale([x for line in lines for x, _ in line], count=5),
            nice_scale(losses, count=4),
            label=f"Mean loss of merges by {rows[0]['method']}, by the coefficient",
            x_title="coefficient",
            y_title="mean loss",
            height=210,
        )
        for index, line in enumerate(lines):
            plot.curve(line, css="loss", style=f"stroke:var(--c{index})")
        charts.append({"name": rows[0]["method"], "svg": plot.render()})
    return charts


def _points(row: MergeLossDocument) -> list[tuple[float, float]]:
    tried = ((each["coefficient"], each["mean"]) for each in row.get("tried", []))
    return [(x, y) for x, y in tried if x is not None and y is not None and math.isfinite(y)]


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else number_text(loss)


def num_experts(fleet: FleetAnalysisDocument, row: MergeLossDocument) -> int:
    """Number of experts that each merge in a row of the table combines.

    `row` is the entry of the merges in the analysis of `fleet` (the experts of one fine-tuning). Files of earlier
    versions do not have the number; their merges combine all experts of the fleet.
    """
    return row.get("num_experts", len(fleet["task_vectors"]))


def _histogram(vector: Mapping[str, Any]) -> Any:
    """Draw the distribution of a task vector's nonzero elements, with the fitted Laplace and Gauss distributions.

    `vector` is the task vector's entry in the analysis. The axis of the density is logarithmic, so that a Laplace
    distribution has two straight sides.
    """
    middles = [(low + high) / 2 for low, high in pairwise(vector["edges"])]
    share = 1 - vector["fits"][0]["zeros"]
    curves = [vector["density"]]
    for fitted in vector["fits"]:
        scale = fitted["scale"]
        if fitted["distribution"] == "laplace":
            curves.append([share * math.exp(-abs(x) / scale) / (2 * scale) for x in middles])
        else:
            curves.append(
                [share * math.exp(-0.5 * (x / scale) ** 2) / (scale * math.sqrt(2 * math.pi)) for x in middles]
            )
    top = math.log10(max(max(curve) for curve in curves))
    plot = Plot(
        nice_scale(vector["edges"], count=4),
        Scale(math.floor(top) - 5, math.ceil(top), 1),
        label=f"How the elements of the task vector of {vector['expert']} are distributed",
        x_title="element",
        y_title="log10 of the density",
        height=210,
    )
    for index, curve in enumerate(curves):
        points = [(x, math.log10(y)) for x, y in zip(middles, curve, strict=True) if y > 0]
        inside = [(x, y) for x, y in points if y >= plot.y.low]
        plot.curve(inside, css="loss", style=f"stroke:var(--c{index})")
    return plot.render()


def _landscape(found: Mapping[str, Any], low: float, high: float) -> Any:
    """Draw the losses of merges of two experts as a heatmap over the experts' coefficients.

    `found` is the entry of these losses in the analysis. Rows are coefficients of the first expert, the largest at the
    top; columns are coefficients of the second expert. The colours are on a logarithmic scale from `low` to `high`, the
    lowest and the highest loss in all landscapes of the report.
    """
    first, second = found["experts"]
    width = math.log(high / low) or 1.0
    rows = []
    for i in reversed(range(len(found["coefficients"]))):
        cells = [
            Cell(
                j,
                -1.0 if text == "not finite" else 1 - 2 * math.log(min(max(loss, low), high) / low) / width,
                f"{first} {found['coefficients'][i]:g}, {second} {found['coefficients'][j]:g}: {text}",
            )
            for j, loss in enumerate(found["losses"][i])
            for text in (_loss_text(loss),)
        ]
        rows.append((f"{found['coefficients'][i]:g}", cells))
    columns = [f"{coefficient:g}" for coefficient in found["coefficients"]]
    return heatmap(rows, columns, label=f"Loss by the coefficients of {first} and {second}", row_height=CELL)
