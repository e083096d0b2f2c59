"""Output of commands: JSON for programs, tables for people. The module's imports are cheap."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

from service.results.format import preferred_text

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from rich.console import Console

    from service.retention.cleaning import Removal
    from service.schemas.files import BenchmarksDocument, ParetoDocument, PreferredDocument, SummaryDocument

__all__ = [
    "console",
    "print_benchmarks",
    "print_export",
    "print_json",
    "print_json_line",
    "print_removals",
    "print_results",
    "print_scores",
]

# Columns of tables where the output is not a terminal.
WIDTH = 110


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_json_line(document: Any) -> None:
    """Print a document as one line of JSON, and flush, so that programs can read each line as it is written."""
    print(json.dumps(document), flush=True)


def print_export(directory: Path, chosen: PreferredDocument | None, *, as_json: bool) -> None:
    """Print the directory of a written merged model, and its trial if weights of the objectives selected the trial.

    `chosen` describes the selected trial; None if no weights were given. If `as_json` is True, directory and trial are
    printed as JSON.
    """
    if as_json:
        print_json({"directory": str(directory)} | ({} if chosen is None else {"preferred": chosen}))
        return
    if chosen is not None:
        print(preferred_text(chosen))
    print(f"merged model: {directory}")


def print_scores(rows: Sequence[tuple[str, ...]]) -> None:
    """Print held-out scores of a merge and of its quantised model.

    Each of `rows` has the objective, both scores, their difference, and the number of samples.
    """
    from rich.table import Table

    columns = ("objective", "merge", "quantised", "difference", "samples")
    table = Table(*columns, title="Held-out data", title_justify="left")
    for row in rows:
        table.add_row(*row)
    console().print(table)


def print_removals(removals: Sequence[Removal], *, is_dry_run: bool) -> None:
    """Print which data of ended jobs were removed and, for each kind of data, their number and bytes.

    If `is_dry_run` is True, nothing was removed, and the text lists the data that would be removed.
    """
    for removal in removals:
        print(removal)
    verb = "would be removed" if is_dry_run else "removed"
    for kind in dict.fromkeys(removal.kind for removal in removals):
        of_kind = [removal for removal in removals if removal.kind == kind]
        counts = [removal.count for removal in of_kind if removal.count is not None]
        number = f"{sum(counts):,}, " if counts else ""
        print(f"{verb}: {kind}: {number}{sum(removal.num_bytes for removal in of_kind):,} bytes")
    if not removals:
        print("nothing exceeds the limits")


def print_benchmarks(document: BenchmarksDocument) -> None:
    """Print the results of a study on its benchmarks as tables.

    Results with adversarially changed prompts, and judgments of answers by a model, get tables of their own.
    """
    from service.cli.tables import attacks_table, benchmarks_table, judged_table

    console().print(benchmarks_table(document))
    if any(row["attacks"] for row in document["rows"]):
        console().print(attacks_table(document))
    if any(row.get("judged") for row in document["rows"]):  # servers of earlier versions send none
        console().print(judged_table(document))


def print_results(pareto: ParetoDocument, summary: SummaryDocument, **places: str) -> None:
    """Print the results of a finished study as tables.

    `pareto` has the Pareto front, and `summary` has the other results. The `places` are printed last: each keyword is a
    label, and its value the path or URL of a file.
    """
    from service.cli.tables import finding_line, holdout_table, pareto_table, search_line, verification_line

    out = console()
    out.print(pareto_table(pareto))
    if summary["holdout"]:
        out.print(holdout_table(summary))
    if summary.get("benchmarks", {}).get("rows"):  # servers of earlier versions send none
        print_benchmarks(summary["benchmarks"])
    if "finding" in summary:  # servers of earlier versions send neither a finding nor a search
        out.print(finding_line(summary["finding"]), soft_wrap=True)
    if "search" in summary:
        out.print(search_line(summary["search"]), soft_wrap=True)
    out.print(verification_line(summary["verification"]))
    for name, place in places.items():
        label = f"{name.replace('_', ' ')}:"
        out.print(f"{label:<13} {place}", highlight=False, soft_wrap=True)
