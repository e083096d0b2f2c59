"""The history of a training: one JSON line for every update and every evaluation.

{"step": 1, "steps": 500, "loss": 2.3, "gradient_norm": 0.8, "learning_rate": 1e-5, "tokens": 512, "seconds": 0.4}
{"step": 50, "values": {"math": 0.61}}

`tokens` is the number of tokens whose losses `loss` includes; lines of image classifiers have `images` in its place.
`loss` is the loss of the batch at the point where the gradient is computed: at the weights or, with the optimizer
MergOPT, at the weights plus an offset. MergOPT's lines also have `alpha` and `models`, the coefficient and the number
of models in the merge that the update simulates. Every tenth of these lines, and the last line, have `weights_loss`,
the loss of the batch at the weights. For the optimizers SAM and ASAM, `loss` is the loss at the weights, and
`offset_loss` is the loss at the weights plus an offset that raises it. The fine-tuning method `tangent` trains a
linearization, a model that is linear in its weights. With it, `values` are the values of the original model with the
exported weights, and `linearized_values` are the values of the linearization.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.directories import write_file

__all__ = [
    "CHECKPOINTS",
    "EXPERT",
    "LINEARIZED",
    "METRICS",
    "VALUES",
    "History",
    "HistoryReader",
    "Report",
    "read_history",
]

# Names in the directory of a training: its history, its checkpoints, and the expert.
METRICS, CHECKPOINTS, EXPERT = "metrics.jsonl", "checkpoints", "model"

# Keys of the values of an evaluation: of the expert's weights, and of the linearization that tangent trains.
VALUES, LINEARIZED = "values", "linearized_values"

Report = Callable[[Mapping[str, Any]], None]


def read_history(file: Path) -> list[dict[str, Any]]:
    """Read the lines of a training's history, without a last line that a killed process left incomplete.

    The result is empty if the file does not exist.
    """
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


class HistoryReader:
    """Reader of the history in `file` while another process writes it.

    The history of a training has one JSON line for each update or evaluation.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._inode = self._offset = 0

    def new(self) -> list[dict[str, Any]]:
        """Read the complete lines that were written since the last call, or all complete lines at the first call.

        If the method `History.forget_after` has replaced the file, all lines of the new file are returned. The result
        is empty if the file does not exist.
        """
        try:
            with self._file.open("rb") as stream:
                inode = os.fstat(stream.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                stream.seek(self._offset)
                data = stream.read()
        except FileNotFoundError:
            return []
        complete = data[: data.rfind(b"\n") + 1]
        self._offset += len(complete)
        return [json.loads(line) for line in complete.splitlines()]


class History:
    """Writer of a training's history: a file with one JSON line for each update and evaluation.

    Only the rank with `is_writer` True writes the file. On every rank, each line is also passed to `report`.
    """

    def __init__(self, file: Path, *, is_writer: bool, report: Report) -> None:
        self._file, self._is_writer, self._report = file, is_writer, report

    def add(self, line: Mapping[str, Any]) -> None:
        if self._is_writer:
            with self._file.open("a") as stream:
                stream.write(json.dumps(line) + "\n")
        self._report(line)

    def forget_after(self, step: int) -> None:
        """Remove the lines of updates after `step`, because training repeats these updates from a checkpoint."""
        if self._is_writer:
            kept = [line for line in read_history(self._file) if line["step"] <= step]
            write_file(self._file, "".join(json.dumps(line) + "\n" for line in kept))

    def last(self, key: str) -> Any:
        """Value of `key` in the last history line with this key; None if no line has it."""
        return next((line[key] for line in reversed(read_history(self._file)) if key in line), None)

    def values_at(self, step: int) -> Mapping[str, float]:
        """Values of the last evaluation after `step` updates, keyed by objective; empty if there was none."""
        lines = reversed(read_history(self._file))
        found: Mapping[str, float] = next(
            (line[VALUES] for line in lines if line["step"] == step and VALUES in line), {}
        )
        return found
