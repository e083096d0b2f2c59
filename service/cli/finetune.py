"""`mergesearch finetune`: the verb and what it prints while an expert is trained."""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.cli.terminal import print_json, print_json_line
from workers.training.finetuning.history import METRICS, read_history

__all__ = ["finetune"]

INTERVAL_S = 5.0


def finetune(options: argparse.Namespace) -> int:
    from service.jobs.finetune import EXPERT_DIR, run_finetune
    from workers.training.finetuning.spec import load_spec

    spec = load_spec(options.spec)
    directory: Path = options.out
    try:
        with _progress(directory, as_json=options.json):
            summary = run_finetune(spec, directory, note=_note if not options.json else lambda _: None)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on with the fine-tuning in {directory}", file=sys.stderr)
        return 130
    if options.json:
        print_json(summary)
    else:
        values = ", ".join(f"{name} {value:.3f}" for name, value in summary["values"].items())
        print(f"steps:     {summary['steps']}, last loss {summary['loss']:.4f}{f'; {values}' if values else ''}")
        print(f"expert:    {directory / EXPERT_DIR}")
    return 0


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def _progress(directory: Path, *, as_json: bool) -> Iterator[None]:
    """Show new numbers of the training every INTERVAL_S, on standard error."""
    done = threading.Event()
    file = directory / METRICS
    shown = len(read_history(file))

    def show() -> None:
        nonlocal shown
        while not done.wait(INTERVAL_S):
            lines = read_history(file)
            if len(lines) != shown:  # fewer, after a resumption from a checkpoint
                shown = len(lines)
                _note(_text(lines)) if not as_json else print_json_line(lines[-1])

    thread = threading.Thread(target=show, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _text(lines: list[dict[str, Any]]) -> str:
    update = next((line for line in reversed(lines) if "loss" in line), None)
    values: dict[str, float] = next((line["values"] for line in reversed(lines) if line.get("values")), {})
    if update is None:
        return "no update yet"
    scores = "".join(f"  {name} {value:.3f}" for name, value in values.items())
    return f"step {update['step']}  loss {update['loss']:.4f}  {update['seconds']:.2f} s a step{scores}"
