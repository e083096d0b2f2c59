"""Results as tables for the terminal, made from the same documents as the files and the HTTP API."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.table import Table
from rich.text import Text

from service.documents import (
    EstimateDocument,
    HoldoutDocument,
    ObjectiveDocument,
    ParetoDocument,
    SummaryDocument,
    TrialDocument,
)
from service.types import Origin

__all__ = ["holdout_table", "pareto_table", "sort_holdout", "trials_table"]


def pareto_table(document: ParetoDocument) -> Table:
    """The front, best mean of values first: one column per objective, value and standard error."""
    table = _table("Pareto front")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    for objective in document["objectives"]:
        arrow = "↑" if objective["direction"] == "maximize" else "↓"
        table.add_column(f"{objective['name']} {arrow}", justify="right")
    names = [objective["name"] for objective in document["objectives"]]
    for row in sorted(document["front"], key=lambda row: -_signed_mean(row["values"], document["objectives"])):
        errors = row["standard_errors"]
        table.add_row(
            str(row["trial"]),
            _label(row["label"], row["origin"]),
            *(f"{row['values'][name]:.4g} ±{errors.get(name, 0.0):.2g}" for name in names),
        )
    table.caption = f"hypervolume {document['hypervolume']:.4g}; ± is one standard error, on search data"
    return table


def holdout_table(document: SummaryDocument) -> Table:
    """The held-out stage, highest mean first: values with 95 % intervals, and the difference to the best trial."""
    table = _table("Held-out data")
    table.add_column("trial", justify="right")
    table.add_column("label", overflow="fold")
    rows = sort_holdout(document["holdout"])
    names = list(dict.fromkeys(name for row in rows for name in row["values"]))
    for name in names:
        table.add_column(name, justify="right")
    has_mean = len(names) > 1 and any(row["mean"] for row in rows)
    if has_mean:
        table.add_column("mean", justify="right")
    table.add_column("minus best", justify="right")
    best = document["best"]["trial"] if document["best"] else None
    for row in rows:
        values = [row["values"].get(name) for name in names]
        if has_mean:  # one interval a row is enough to look at; the report has all
            cells = ["" if value is None else f"{value['value']:.3f}" for value in values]
            cells.append(_interval_text(row["mean"]))
        else:
            cells = [_interval_text(value) for value in values]
        difference = row["differences"].get("mean" if has_mean else names[0])
        cells.append("" if row["trial"] == best else _interval_text(difference, signed=True))
        table.add_row(
            str(row["trial"]),
            _label(row["label"], row["origin"]),
            *cells,
            style="bold" if row["trial"] == best else None,
        )
    table.caption = "95 % intervals; differences are paired, sample by sample"
    return table


def trials_table(documents: Iterable[TrialDocument], objectives: Sequence[str]) -> Table:
    """Every trial by number, with its values at the highest rung it finished."""
    table = _table("Trials")
    for name, justify in (("trial", "right"), ("label", "left"), ("state", "left"), ("samples", "right")):
        table.add_column(name, justify="right" if justify == "right" else "left", overflow="fold")
    for name in objectives:
        table.add_column(name, justify="right")
    for trial in documents:
        rung = trial["rungs"][-1] if trial["rungs"] else None
        cells = [f"{rung['values'][name]:.4g}" if rung else "" for name in objectives]
        state = trial["state"].lower() + (f": {trial['reason']}" if trial["reason"] else "")
        samples = max(rung["samples"].values(), default=0) if rung else 0
        table.add_row(str(trial["number"]), _label(trial["label"], trial["origin"]), state, str(samples), *cells)
    table.caption = "values at the highest rung finished; samples are per objective"
    return table


def sort_holdout(rows: Iterable[HoldoutDocument]) -> list[HoldoutDocument]:
    """Highest mean first; without a mean, in the order given."""
    return sorted(rows, key=lambda row: -row["mean"]["value"] if row["mean"] else 0.0)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, caption_justify="left")


def _label(label: str, origin: str) -> Text:
    return Text(label, style="" if origin == Origin.SEARCH else "dim")


def _signed_mean(values: Mapping[str, float], objectives: Sequence[ObjectiveDocument]) -> float:
    return statistics.fmean(values[o["name"]] * (1 if o["direction"] == "maximize" else -1) for o in objectives)


def _interval_text(estimate: EstimateDocument | None, *, signed: bool = False) -> str:
    if estimate is None:
        return ""
    low, high = estimate["ci95"]
    sign = "+" if signed else ""
    return f"{estimate['value']:{sign}.3f} [{low:{sign}.3f}, {high:{sign}.3f}]"
