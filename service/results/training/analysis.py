"""The analysis of trained fleets: computed, as a file beside the report, and as pictures in it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from search_spaces.errors import Problem
from service.errors import Conflict
from service.results.report.charts import Cell, Legend, Plot, Scale, heatmap, legend, nice_scale
from service.results.report.texts import number_text
from service.schemas.api import AnalysisDocument, FleetAnalysisDocument, MergeLossDocument
from service.store import Store
from service.types import EventKind
from workers.file_access import FileAccess
from workers.models.hub import locate
from workers.training.finetuning.fleet import Pipeline
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.spec import FinetuneSpec

if TYPE_CHECKING:
    from search_spaces.recipe import Merge
    from workers.training.finetuning.analysis import MergeLosses

__all__ = [
    "ANALYSIS_FILE",
    "analyse",
    "analysis_context",
    "joined",
    "lack_of_losses",
    "merge_text",
    "num_experts",
    "read_analysis",
    "stored_analysis",
]

ANALYSIS_FILE = "analysis.json"
CELL = 22
# A loss below is drawn as this: colours are by logarithms.
LEAST = 1e-6


def analyse(
    fleets: Sequence[tuple[Mapping[str, FinetuneSpec], Mapping[str, Path]]],
    *,
    samples: int,
    note: Callable[[str], None] = lambda _: None,
    progressed: Callable[[], None] = lambda: None,
    access: FileAccess | None = None,
) -> AnalysisDocument:
    """Compute it for `fleets` of the same experts of the same base: of each the specifications and the directories that
    they were trained in. The first has the histograms' and landscapes' first place; its tasks give all losses.
    `progressed` is called after every merge; `access` limits the files that tasks lead to (None: no limit).

    Raises Conflict if they differ in experts or base, or an expert is its base; InvalidTask without reference answers,
    InvalidModel.
    """
    from workers.training.finetuning.analysis import landscape, losses_of_experts, merge_table, task_vector

    (first, _), *_ = fleets
    for experts, places in fleets:
        _check_same(first, experts, str(next(iter(places.values()))))
    found: list[FleetAnalysisDocument] = []
    for name, (experts, places) in zip(_names([experts for experts, _ in fleets]), fleets, strict=True):
        note(f"Analysing the experts of {name} ...")
        models = {alias: places[alias] / EXPERT for alias in first}
        base = locate(next(iter(experts.values())).base)
        try:
            vectors = [asdict(task_vector(alias, base, model)) for alias, model in models.items()]
        except ValueError as error:
            raise Conflict(f"analysis of {name}: {error}") from error
        fleet: dict[str, Any] = {"name": name, "task_vectors": vectors, "landscape": None, "merges": []}
        if len(models) > 1:
            # Of all fleets on the same samples, those of the first.
            losses = losses_of_experts(first, models, samples=samples, access=access)

            def measure(merge: Merge, losses: MergeLosses = losses) -> Mapping[str, float]:
                progressed()
                return losses.of(merge)

            one, other, *_ = models
            fleet["landscape"] = asdict(landscape(measure, (one, other)))
            fleet["merges"] = [asdict(row) for row in merge_table(measure, list(models))]
        found.append(cast("FleetAnalysisDocument", _finite(fleet)))
    return {"samples": samples, "fleets": found}


def lack_of_losses(pipeline: Pipeline, *, access: FileAccess | None = None) -> tuple[Problem, ...]:
    """Why the analysis of these experts could not be computed once they are trained."""
    from workers.training.finetuning.analysis import lack_of_losses

    return tuple(
        Problem(pipeline.field_of(alias, "evaluation"), reason)
        for alias, reason in lack_of_losses(pipeline.experts, access=access)
    )


def joined(analyses: Mapping[str, tuple[Pipeline, AnalysisDocument]]) -> AnalysisDocument:
    """Several analyses as one, in their order; the keys are what messages call them.

    Raises Conflict if they are not of the same experts, base and samples.
    """
    names = list(analyses)
    (first, _), *_ = analyses.values()
    samples = next(iter(analyses.values()))[1]["samples"]
    for name, (pipeline, document) in analyses.items():
        _check_same(first.experts, pipeline.experts, name)
        if document["samples"] != samples or any(
            (spec.evaluation and spec.evaluation.objectives, spec.seed, spec.data.max_length)
            != (own.evaluation and own.evaluation.objectives, own.seed, own.data.max_length)
            for spec, own in ((pipeline.experts[alias], own) for alias, own in first.experts.items())
        ):
            raise Conflict(
                f"{name}: its losses are not those of the samples of {names[0]}; to be compared it must have the same "
                "analysis.samples, evaluation.objectives, data.max_length and seed"
            )
    labels = _names([pipeline.experts for pipeline, _ in analyses.values()])
    fleets = [document["fleets"][0] for _, document in analyses.values()]
    return {"samples": samples, "fleets": [{**fleet, "name": n} for n, fleet in zip(labels, fleets, strict=True)]}


def stored_analysis(store: Store, study_id: str) -> AnalysisDocument | None:
    """That of a stored fine-tuning; None before it is computed, or if it was not asked for."""
    events = store.events(study_id, kinds=[EventKind.ANALYSIS])
    return cast("AnalysisDocument", dict(events[-1].payload)) if events else None


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
    """The loss of a merge, and its coefficient."""
    at = "" if row["coefficient"] is None else f" at {row['coefficient']:g}"
    return f"{_loss_text(row['mean'])}{at}"


def _loss_text(loss: float | None) -> str:
    return "not finite" if loss is None or not math.isfinite(loss) else number_text(loss)


def num_experts(fleet: FleetAnalysisDocument, row: MergeLossDocument) -> int:
    """How many experts a row is of; files of earlier versions have all."""
    return row.get("num_experts", len(fleet["task_vectors"]))


def _check_same(first: Mapping[str, FinetuneSpec], experts: Mapping[str, FinetuneSpec], where: str) -> None:
    if experts.keys() != first.keys() or any(spec.base != first[a].base for a, spec in experts.items()):
        raise Conflict(
            f"{where}: has the experts {', '.join(experts)}; to be compared it must have {', '.join(first)}, of the "
            "same base"
        )


def _names(fleets: Sequence[Mapping[str, FinetuneSpec]]) -> list[str]:
    """The fleets' optimizers; with what differs where two have the same one, else with a number."""
    kinds = ["/".join(dict.fromkeys(spec.method.kind for spec in experts.values())) for experts in fleets]
    names = []
    for kind, experts in zip(kinds, fleets, strict=True):
        own = _options(experts)
        same = [_options(other) for k, other in zip(kinds, fleets, strict=True) if k == kind]
        varying = [key for key in own if any(options.get(key) != own[key] for options in same)]
        names.append(", ".join([kind, *(f"{key} {own[key]}" for key in varying)]))
    return [name if names.count(name) == 1 else f"{name} {names[: i + 1].count(name)}" for i, name in enumerate(names)]


def _options(experts: Mapping[str, FinetuneSpec]) -> dict[str, str]:
    """How experts are trained, each option with the values that they have."""
    documents = [spec.canonical() for spec in experts.values()]
    found = {}
    for section in ("method", "training"):
        for key in documents[0][section]:
            found[key] = "/".join(dict.fromkeys(f"{each[section][key]}" for each in documents))
    return {**found, "seed": "/".join(dict.fromkeys(f"{each['seed']}" for each in documents))}


def _finite(value: Any) -> Any:
    """With None in place of numbers that JSON does not have, and lists in place of tuples."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


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
    to the highest, by logarithms.
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
