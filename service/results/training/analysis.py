"""The analysis of trained fleets: computed, as a file beside the report, and as pictures in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any, TypedDict

from service.errors import Conflict
from service.results.report.charts import Cell, Legend, Plot, Scale, heatmap, legend, nice_scale
from service.results.report.texts import number_text
from workers.models.hub import locate
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.spec import FinetuneSpec

__all__ = [
    "ANALYSIS_FILE",
    "AnalysisDocument",
    "FleetDocument",
    "analyse",
    "analysis_context",
    "merge_text",
    "read_analysis",
]

ANALYSIS_FILE = "analysis.json"
CELL = 22
# A loss below is drawn as this: colours are by logarithms.
LEAST = 1e-6


class FleetDocument(TypedDict):
    """One trained fleet: `name` is its optimizer's. As the classes of `workers.training.finetuning.analysis`; there is
    no landscape of a single expert."""

    name: str
    task_vectors: list[dict[str, Any]]
    landscape: dict[str, Any] | None
    merges: list[dict[str, Any]]


class AnalysisDocument(TypedDict):
    """`samples` of each evaluation task gave the losses."""

    samples: int
    fleets: list[FleetDocument]


def analyse(
    fleets: Sequence[tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]]],
    *,
    samples: int,
    note: Callable[[str], None] = lambda _: None,
) -> AnalysisDocument:
    """Compute it for `fleets` of the same experts of the same base: of each the specifications and the directories that
    they were trained in. The first has the histograms' and landscapes' first place.

    Raises Conflict if they differ in experts or base, InvalidTask without reference answers, InvalidModel."""
    from workers.training.finetuning.analysis import landscape, losses_of_experts, merge_table, task_vector

    (first, _), *_ = fleets
    for experts, places in fleets:
        if experts.keys() != first.keys() or any(spec.base != first[a].base for a, spec in experts.items()):
            where = next(iter(places.values()))
            raise Conflict(
                f"{where}: has the experts {', '.join(experts)}; to be compared it must have {', '.join(first)}, of "
                "the same base"
            )
    found: list[FleetDocument] = []
    for name, (experts, places) in zip(_names(fleets), fleets, strict=True):
        note(f"Analysing the experts of {name} ...")
        models = {alias: places[alias] / EXPERT for alias in first}
        base = locate(next(iter(experts.values())).base)
        fleet: FleetDocument = {
            "name": name,
            "task_vectors": [asdict(task_vector(alias, base, model)) for alias, model in models.items()],
            "landscape": None,
            "merges": [],
        }
        if len(models) > 1:
            # Of all fleets on the same samples, those of the first.
            losses = losses_of_experts(first, models, samples=samples)
            one, other, *_ = models
            fleet["landscape"] = asdict(landscape(losses.of, (one, other)))
            fleet["merges"] = [asdict(row) for row in merge_table(losses.of, list(models))]
        found.append(fleet)
    return {"samples": samples, "fleets": found}


def read_analysis(directory: Path) -> AnalysisDocument | None:
    """What an earlier analysis of the fine-tuning in `directory` found; None if there was none."""
    try:
        document: AnalysisDocument = json.loads((directory / ANALYSIS_FILE).read_text())
        return document
    except FileNotFoundError:
        return None


def analysis_context(document: AnalysisDocument) -> dict[str, Any]:
    """For the page: pictures and rows of tables."""
    fleets = document["fleets"]
    every = [loss for fleet in fleets if fleet["landscape"] for row in fleet["landscape"]["losses"] for loss in row]
    losses = [max(loss, LEAST) for loss in every if math.isfinite(loss)] or [1.0]
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
            {"method": rows[0]["method"], "cells": [merge_text(row) for row in rows]}
            for rows in zip(*(fleet["merges"] for fleet in fleets), strict=True)
        ],
    }


def merge_text(row: Mapping[str, Any]) -> str:
    """The loss of a merge, and its coefficient."""
    at = "" if row["coefficient"] is None else f" at {row['coefficient']:g}"
    return f"{number_text(row['mean'])}{at}"


def _names(fleets: Sequence[tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]]]) -> list[str]:
    """The fleets' optimizers; with a number where two have the same one."""
    kinds = ["/".join(dict.fromkeys(spec.method.kind for spec in experts.values())) for experts, _ in fleets]
    return [kind if kinds.count(kind) == 1 else f"{kind} {kinds[: i + 1].count(kind)}" for i, kind in enumerate(kinds)]


def _histogram(vector: Mapping[str, Any]) -> Any:
    """Densities of the elements that are not 0 and of both fits, on a logarithmic axis, where a Laplace is a tent."""
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
    """Rows are coefficients of the first expert, the largest at the top; colours go from the lowest loss of all fleets
    to the highest, by logarithms."""
    first, second = found["experts"]
    width = math.log(high / low) or 1.0
    rows = []
    for i in reversed(range(len(found["coefficients"]))):
        cells = [
            Cell(
                j,
                1 - 2 * math.log(min(max(loss, low), high) / low) / width if math.isfinite(loss) else -1.0,
                f"{first} {found['coefficients'][i]:g}, {second} {found['coefficients'][j]:g}: {number_text(loss)}",
            )
            for j, loss in enumerate(found["losses"][i])
        ]
        rows.append((f"{found['coefficients'][i]:g}", cells))
    columns = [f"{coefficient:g}" for coefficient in found["coefficients"]]
    return heatmap(rows, columns, label=f"Loss by the coefficients of {first} and {second}", row_height=CELL)
