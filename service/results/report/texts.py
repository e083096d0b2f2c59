"""Texts of the report: names and values of trials, the headline, and the key figures."""

from __future__ import annotations

from service.results.format import duration, violation_text
from service.results.record import RunRecord
from service.results.series.front import FrontPoint
from service.results.series.history import HistoryPoint
from service.schemas.files import BenchmarkRowDocument, EstimateDocument, HoldoutDocument, SummaryDocument
from service.types import Origin, TrialResult

__all__ = ["headline", "interval_text", "key_figures", "number_text", "point_name", "row_name", "trial_name"]


def number_text(value: float | None, *, signed: bool = False) -> str:
    """Format a value with three decimals, or as "n/a" if it is None.

    If `signed` is True, a positive value gets a plus sign.
    """
    if value is None:
        return "n/a"
    text = f"{value:+.3f}" if signed else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text.replace("-", "−")  # noqa: RUF001  a minus sign, as wide as a plus


def interval_text(estimate: EstimateDocument) -> str:
    """Format an estimate: its value with its 95 % interval."""
    low, high = (number_text(limit) for limit in estimate["ci95"])
    return f"{number_text(estimate['value'])} [{low}, {high}]"


def trial_name(trial: TrialResult) -> str:
    """Name of a trial in the report: its number, or the label of a baseline."""
    return f"trial {trial.number}" if trial.origin is Origin.SEARCH else trial.label


def point_name(point: HistoryPoint | FrontPoint) -> str:
    """Name, in the report, of the trial at a point of a chart: the trial's number, or the label of a baseline."""
    return f"trial {point.trial}" if point.origin == Origin.SEARCH else point.label


def row_name(row: HoldoutDocument | BenchmarkRowDocument) -> str:
    """Name of a row of held-out data or benchmarks in the report: the trial's number, or the label of a baseline."""
    return f"trial {row['trial']}" if row["origin"] == Origin.SEARCH else row["label"]


def _score(row: HoldoutDocument) -> EstimateDocument | None:
    """The estimate by which rows of held-out results are ranked: the mean of the objectives, or the only objective.

    Returns None if there are several objectives, but the row has no mean of them.
    """
    return row["mean"] or (next(iter(row["values"].values())) if len(row["values"]) == 1 else None)


def headline(document: SummaryDocument) -> str:
    """State the result of a study in two sentences, from `document`, the content of its summary.json."""
    best = document["best"]
    if best is None:
        return "No trial has reached the full budget yet."
    name = f"Trial {best['trial']}" if best["origin"] == Origin.SEARCH else best["label"]
    if text := violation_text(best["violations"]):
        name = f"No trial keeps to all constraints. {name} {text}; it"
    rows = document["holdout"]
    mine = next((row for row in rows if row["trial"] == best["trial"]), None)
    score = None if mine is None else _score(mine)
    if mine is None or score is None:
        values = ", ".join(f"{key} {number_text(value)}" for key, value in best["values"].items())
        return f"{name} is best on search data: {values}. {document['finding']['text']}"
    kind = "a mean of " if len(mine["values"]) > 1 else ""
    return f"{name} reaches {kind}{number_text(score['value'])} on held-out data. {document['finding']['text']}"


def key_figures(run: RunRecord, document: SummaryDocument) -> list[tuple[str, str, str]]:
    """List the key figures under the headline of the report, each as (name, figure, note).

    The figures are taken from the run's data and from `document`, the content of its summary.json.
    """
    figures = []
    best = document["best"]
    if best is not None:
        row = next((row for row in document["holdout"] if row["trial"] == best["trial"]), None)
        if row is not None and (score := _score(row)) is not None:
            low, high = score["ci95"]
            figures.append(("held-out", number_text(score["value"]), f"95 % {number_text(low)} to {number_text(high)}"))
        if (bias := document["selection_bias_against_baselines"].get("mean")) is not None:
            lower, upper = (number_text(limit, signed=True) for limit in bias["ci95"])
            note = f"lead lost on held-out, 95 % {lower} to {upper}"
            figures.append(("selection bias", number_text(bias["value"], signed=True), note))
    counts = document["trials"]
    parts = [f"{counts[s]} {s.lower()}" for s in ("COMPLETE", "PRUNED", "RUNNING", "FAIL") if counts.get(s)]
    figures.append(("trials", f"{len(run.trials):,}", ", ".join(parts)))
    samples = document["samples"]
    note = "nothing reused"
    if samples["full_budget"]:
        note = f"{samples['scored'] / samples['full_budget']:.0%} of scoring all in full"
    figures.append(("samples scored", f"{samples['scored']:,}", note))
    if samples["limit"] is not None:
        note = f"{samples['used'] / samples['limit']:.0%} of limits.max_samples"
        figures.append(("samples used", f"{samples['used']:,} of {samples['limit']:,}", note))
    speed = f"{samples['per_second']:.0f} samples/s" if samples["per_second"] else ""
    figures.append(("wall-clock", duration(run.wall_clock_s), speed))
    return figures
