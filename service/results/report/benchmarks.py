"""Report section on benchmarks: forest plots, table, adversarial prompts, judges, comparisons, and subtasks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from service.results.documents import benchmarks_document
from service.results.format import ATTACK_NAMES, comparison_text
from service.results.record import RunRecord
from service.results.report.charts import Interval, forest
from service.results.report.scales import nice_scale
from service.results.report.texts import interval_text, row_name
from service.schemas.files import BenchmarkColumnDocument, BenchmarkRowDocument, BenchmarksDocument, EstimateDocument

__all__ = ["benchmarks_section"]


def benchmarks_section(run: RunRecord, *, best: int | None) -> dict[str, Any] | None:
    """Build the data of the report's section on benchmarks; None in a study without benchmarks.

    The tables and charts mark the trial with number `best`, the best on search data.
    """
    document = benchmarks_document(run.benchmarks)
    if not document["benchmarks"]:
        return None
    rows = document["rows"]
    columns = {column["name"]: column for column in document["benchmarks"]}
    groups = document["groups"]
    averages = [group for group, names in groups.items() if len(names) > 1]
    return {
        "columns": list(columns.values()),
        "averages": averages,
        "rows": [{"name": row_name(row), "is_best": row["trial"] == best, **row} for row in rows],
        "reference": document["reference"],
        "charts": [
            *(_chart(rows, f"average of {g}", "averages", g, columns[groups[g][0]], best) for g in averages),
            *(_chart(rows, name, "values", name, column, best) for name, column in columns.items()),
        ],
        "attacks": [_attacked(rows, column, best) for column in columns.values() if column["attack"] is not None],
        "judged": [_judged(rows, column, best) for column in columns.values() if column["judge"] is not None],
        "comparisons": [comparison_text(test) for test in document["tests"]],
        "subtasks": [_subtasks(document, column) for column in columns.values() if len(column["subtasks"]) > 1],
        "failures": document["failures"],
    }


def _chart(
    rows: Sequence[BenchmarkRowDocument],
    title: str,
    kind: str,
    name: str,
    column: BenchmarkColumnDocument,
    best: int | None,
) -> dict[str, Any]:
    """Draw a forest plot of a benchmark: the value of each trial with its interval, the best value first.

    `rows` have the trials' values. `kind` is "values" for the benchmark `name`, or "averages" for the average of the
    group of benchmarks `name`. `column` has the direction and the range of the values. The trial with the number `best`
    is marked; None marks no trial. The result contains the chart under "svg", and `title` under "name".
    """
    found: list[tuple[BenchmarkRowDocument, EstimateDocument]] = []
    for row in rows:
        estimates: Mapping[str, EstimateDocument] = row["averages"] if kind == "averages" else row["values"]
        if name in estimates:
            found.append((row, estimates[name]))
    found.sort(key=lambda each: each[1]["value"], reverse=column["direction"] == "maximize")
    intervals = [
        Interval(
            row_name(row),
            estimate["value"],
            low=estimate["ci95"][0],
            high=estimate["ci95"][1],
            css="best" if row["trial"] == best else row["origin"],
            title=f"{row_name(row)}: {interval_text(estimate)}, {estimate['samples']} samples",
        )
        for row, estimate in found
    ]
    ends = [end for interval in intervals for end in (interval.low, interval.high)]
    mine = next((estimate["value"] for row, estimate in found if row["trial"] == best), None)
    label = f"{title} with 95 % intervals, {len(intervals)} rows; values are in the table below"
    low, high = column["range"]
    drawn = forest(intervals, nice_scale(ends, bounds=(low, high)), label=label, reference=mine) if intervals else ""
    return {"name": title, "svg": drawn}


def _attacked(
    rows: Sequence[BenchmarkRowDocument], column: BenchmarkColumnDocument, best: int | None
) -> dict[str, Any]:
    """Build the data of the table of a benchmark's results with adversarial prompts, with the most robust trial first.

    `rows` have the results of the trials, and `column` is the benchmark. A trial is more robust if attacked prompts
    lower its value less. The row of the trial with the number `best` is marked; None marks no row.
    """
    name, attack = column["name"], column["attack"] or {}
    found = [(row, row["attacks"][name]) for row in rows if name in row["attacks"]]
    found.sort(key=lambda each: math.inf if each[1]["drop"] is None else each[1]["drop"]["value"])
    return {
        "name": name,
        "kind": ATTACK_NAMES[attack["kind"]],
        "template": attack["template"],
        "rows": [
            {"name": row_name(row), "is_best": row["trial"] == best, "clean": row["values"][name], **attacked}
            for row, attacked in found
        ],
    }


def _judged(rows: Sequence[BenchmarkRowDocument], column: BenchmarkColumnDocument, best: int | None) -> dict[str, Any]:
    """Build the data of the table of a benchmark whose completions a judge (an LLM) has rated, best trial first.

    `rows` have the results of the trials, and `column` is the benchmark. The row of the trial with the number `best` is
    marked; None marks no row.
    """
    name, judge = column["name"], column["judge"] or {}
    found = [(row, row["judged"][name]) for row in rows if name in row["judged"]]
    found.sort(key=lambda each: each[0]["values"][name]["value"], reverse=True)
    return {
        "name": name,
        "models": sorted({model for _, judged in found for model in judged["models"]}) or [judge["model"]],
        "url": judge["url"],
        "prompt": judge["prompt"],
        "reference_length": judge["reference_length"],
        "rows": [
            {"name": row_name(row), "is_best": row["trial"] == best, "win_rate": row["values"][name], **judged}
            for row, judged in found
        ],
    }


def _subtasks(document: BenchmarksDocument, column: BenchmarkColumnDocument) -> dict[str, Any]:
    """Build the data of the table of a benchmark's subtasks: groups of subtasks first, then single subtasks.

    Subtasks are sorted by name. `document` has the values of all trials, and `column` is the benchmark.
    """
    rows = [row for row in document["rows"] if column["name"] in row["subtasks"]]
    names = [*column["categories"], *sorted(column["subtasks"])]
    return {
        "name": column["name"],
        "trials": [row_name(row) for row in rows],
        "rows": [
            {
                "name": name,
                "is_category": name in column["categories"],
                "estimates": [row["subtasks"][column["name"]].get(name) for row in rows],
            }
            for name in names
        ],
    }
