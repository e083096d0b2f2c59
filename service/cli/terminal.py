"""How commands print: JSON for programs, tables for people. Cheap to import."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from service.schemas.files import ParetoDocument, SummaryDocument

__all__ = ["console", "print_json", "print_json_line", "print_results"]

# Columns where the output is not a terminal.
WIDTH = 110


def console() -> Console:
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=2))


def print_json_line(document: Any) -> None:
    """Print one line and flush it: a program may read the output as it is written."""
    print(json.dumps(document), flush=True)


def print_results(pareto: ParetoDocument, summary: SummaryDocument, **places: str) -> None:
    """Print the tables of a finished study and where its files are: `places` by kind ("report")."""
    from service.cli.tables import holdout_table, pareto_table, search_line, verification_line

    out = console()
    out.print(pareto_table(pareto))
    if summary["holdout"]:
        out.print(holdout_table(summary))
    if "search" in summary:  # servers of earlier versions send none
        out.print(search_line(summary["search"]), soft_wrap=True)
    out.print(verification_line(summary["verification"]))
    for name, place in places.items():
        label = f"{name.replace('_', ' ')}:"
        out.print(f"{label:<13} {place}", highlight=False, soft_wrap=True)
