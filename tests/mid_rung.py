"""A study that the last version without migrations left in the middle of a rung when that version was killed.

`tests/fixtures/mid_rung` holds the study's database as SQL, its data, and the trials of an undisturbed run of that
version. The models are the shipped family. The files have placeholders for paths, for the digests of tasks (which cover
the paths of their files), and for the fake scorer's hashes of prompts (which cover the digests).
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sqlite3
from pathlib import Path
from typing import Any

from service.jobs.search.local_run import DATABASE
from workers.tiny_family import family_dir

__all__ = ["FIXTURE", "expected_trials", "restore", "write_database"]

FIXTURE = Path(__file__).parent / "fixtures" / "mid_rung"


def restore(directory: Path) -> tuple[Path, Path]:
    """Restore the study below `directory`; returns its file and the directory of its run."""
    run_dir = directory / "run"
    run_dir.mkdir()
    for name in ("search.jsonl", "holdout.jsonl"):
        shutil.copy(FIXTURE / name, directory / name)
    study = directory / "study.yaml"
    study.write_text(_filled((FIXTURE / "study.yaml").read_text(), directory))
    write_database(run_dir / DATABASE, data_dir=directory)
    return study, run_dir


def write_database(file: Path, *, data_dir: Path) -> None:
    """Write the study's database to `file`; its data are in `data_dir`."""
    connection = sqlite3.connect(file)
    connection.executescript(_filled((FIXTURE / "study.sql").read_text(), data_dir))
    connection.close()


def expected_trials() -> list[dict[str, Any]]:
    trials: list[dict[str, Any]] = json.loads((FIXTURE / "trials.json").read_text())
    return trials


def _filled(text: str, data_dir: Path) -> str:
    def with_paths(text: str) -> str:
        return text.replace("{FAMILY}", str(family_dir())).replace("{DATA}", str(data_dir))

    tasks = json.loads(with_paths((FIXTURE / "tasks.json").read_text()))
    digests = {name: _digest(task) for name, task in tasks.items()}
    text = re.sub(r"\{TASK:(\w+)\}", lambda found: digests[found[1]], text)
    text = re.sub(
        r"\{PROMPTS:(\w+):(\d+):(\d+)\}",
        lambda found: _digest([digests[found[1]], int(found[2]), int(found[3])]),
        text,
    )
    return with_paths(text)


def _digest(document: Any) -> str:
    """Digest of a document as the version without migrations computed it, independent of today's `digest_of`."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
