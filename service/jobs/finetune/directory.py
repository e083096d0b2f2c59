"""Functions for the files in a training directory: specification, checkpoints, history of losses, expert, summary."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from service.errors import Conflict, NotFound
from service.jobs.finetune.earlier_versions import read_spec
from workers.directories import write_file
from workers.training.finetuning.fleet import EXPERTS
from workers.training.finetuning.history import EXPERT
from workers.training.finetuning.spec import FinetuneSpec

__all__ = [
    "EXPERT_DIR",
    "FAILURE_FILE",
    "RAY_DIR",
    "SPEC_FILE",
    "SUMMARY_FILE",
    "WRITER_LOCK",
    "read_document",
    "trained_fleet",
    "write_document",
    "written_spec",
]

SPEC_FILE, SUMMARY_FILE, FAILURE_FILE = "finetune.json", "summary.json", "failure.json"
EXPERT_DIR, RAY_DIR = EXPERT, "ray"

# Lock file of the worker that writes checkpoints.
WRITER_LOCK = ".writer"


def written_spec(directory: Path) -> FinetuneSpec | None:
    """Read the specification of the expert whose training was started in `directory`.

    Returns None if no training was started there.
    """
    document = read_document(directory / SPEC_FILE)
    return None if document is None else read_spec(document)


def trained_fleet(directory: Path) -> tuple[dict[str, FinetuneSpec], dict[str, Path]]:
    """Find the experts that were trained in `directory`; return their specifications and directories, keyed by alias.

    An expert's alias is its name in the fine-tuning. Raises NotFound if no expert was trained there, and Conflict if
    the training of an expert has not ended.
    """
    places = {place.name: place for place in sorted((directory / EXPERTS).glob("*")) if place.is_dir()}
    experts = {}
    for alias, place in (places or {"": directory}).items():
        spec = written_spec(place)
        if spec is None:
            raise NotFound(f"{place}: holds no fine-tuning")
        if not (place / EXPERT_DIR).is_dir():
            raise Conflict(f"{place}: its training has not ended; run the command that began it again to continue")
        experts[alias or spec.name] = spec
    return experts, places or {next(iter(experts)): directory}


def read_document(file: Path) -> dict[str, Any] | None:
    """Read the JSON document in `file`. Returns None if the file does not exist."""
    try:
        document: dict[str, Any] = json.loads(file.read_text())
        return document
    except FileNotFoundError:
        return None


def write_document(file: Path, document: Mapping[str, Any]) -> None:
    """Write a JSON document to `file` atomically: readers see the old document or the whole new one."""
    write_file(file, json.dumps(document, indent=2) + "\n")
