"""The analysis of trained fleets as pictures and rows of tables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from service.results.report.charts import Cell, Legend, Plot, heatmap, legend
from service.results.report.scales import Scale, nice_scale
from service.results.report.texts import number_text
from service.schemas.api import AnalysisDocument, FleetAnalysisDocument, MergeLossDocument

__all__ = ["analysis_context", "merge_text", "num_experts"]

# Height of a cell of a heatmap, in pixels.
CELL = 22
# Smaller losses get the colour of this one, since colours are by logarithms.
LEAST = 1e-6


def analysis_context(document: AnalysisDocument) -> dict[str, Any]:
    """Build the data from which the report's template draws the analysis of trained fleets."""
    fleets = document["fleets"]
    every = [loss for fleet in fleets if fleet["landscape"] for row in fleet["landscape"]["losses"] for loss in row]
    losses = [max(loss, LEAST) for loss in every if loss is not None and math.isfinite(loss)] or [1.0]
    return {
        "samples": document["samples"],
        "histograms": [
            {"name": f"{vector['expert']}, {fleet['name']}", "svg": _histogram(vector)}
            for fleet in fleets
            for vector in fleet["task_vectors"]
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
            for vector in fleet["task_vectors"]
            for fitted in vector["fits"]
        ],
        "landscapes": [
            {"name": fleet["name"], "svg": _landscape(fleet["landscape"], min(losses), max(losses))}
            for fleet in fleets
            if fleet["landscape"]
        ],
        "low": number_text(min(losses)),
        "high": number_text(max(losses)),
        "fleets": [fleet["name"] for fleet in fleets],
        "merges": [
            {
                "method": rows[0]["method"],
                "experts": num_experts(fleets[0], rows[0]),
                "cells": [merge_text(row) for row in rows],
            }
            for rows in zip(*(fleet["merges"] for fleet in fleets), strict=True)
        ],
    }


def merge_text(row: MergeLossDocument) -> str:
    """Format the loss of a merge as text, with the coefficient at which the merge has this loss."""
    at = "" if row["coefficient"] is None else f" at {row['coefficient']:g}"
    return f"{_loss_text(row['mean'])}{at}"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else number_text(loss)


def num_experts(fleet: FleetAnalysisDocument, row: MergeLossDocument) -> int:
    """Number of experts that the merges of a table row combine.

    Files of earlier versions do not state it; their merges combine all experts.
    """
    return row.get("num_experts", len(fleet["task_vectors"]))


def _histogram(vector: Mapping[str, Any]) -> Any:
    """Draw the distribution of a task vector's elements that are not 0, with the two fitted distributions.

    These are a Laplace and a Gauss distribution. `vector` is the task vector's entry in the analysis. The axis of the
    density is logarithmic, so that a Laplace distribution has two straight sides.
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

    `found` is the landscape's entry in the analysis. Rows are coefficients of the first expert, the largest at the top.
    Colours are on a logarithmic scale from the lowest to the highest loss of all fleets, `low` to `high`.
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
