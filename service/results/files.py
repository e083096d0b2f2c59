"""Writes the result files of a run: trials.jsonl, summary.json, pareto.json and report.html.

Everything is computed from stored records, so writing the files again gives the same files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from service.results.documents import pareto, trial_documents
from service.results.record import RunRecord
from service.results.summary import summary
from workers.directories import write_file

__all__ = ["trials_jsonl", "write_results"]


def trials_jsonl(run: RunRecord) -> str:
    """Build the content of trials.jsonl from the data of a run: one line of JSON for each trial, sorted by number."""
    return "".join(_json(document, indent=None) + "\n" for document in trial_documents(run))


def write_results(directory: Path, run: RunRecord, *, report: str | None = None) -> tuple[Path, ...]:
    """Write trials.jsonl, summary.json, pareto.json and, if given, report.html into `directory`.

    `run` has the study's data, and `report` is the text of report.html. Each file is written under a temporary name and
    then renamed, so it is never seen incomplete.

    Returns:
        Paths of the files.

    Raises:
        ValueError: A number is one that JSON does not allow (NaN, inf). In this case no file is written.
    """
    texts = {
        "trials.jsonl": trials_jsonl(run),
        "summary.json": _json(summary(run)) + "\n",
        "pareto.json": _json(pareto(run)) + "\n",
    }
    if report is not None:
        texts["report.html"] = report
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_file(directory / name, text)
    return tuple(directory / name for name in texts)


def _json(document: Any, indent: int | None = 2) -> str:
    return json.dumps(document, indent=indent, allow_nan=False, ensure_ascii=False)
