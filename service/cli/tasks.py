"""The commands `tasks` (list of shipped tasks), `tasks fetch` (their data) and `tasks images` (classes of a folder)."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from itertools import accumulate

from service.cli.terminal import console, print_json
from workers.evaluation.shipped_tasks import FetchedData, ShippedTask, fetch, shipped_tasks

__all__ = ["fetch_task", "list_images", "list_tasks"]

# Spaces between two columns.
GAP = "  "


def list_tasks(options: argparse.Namespace) -> int:
    tasks = shipped_tasks()
    if options.json:
        print_json([task.to_json() for task in tasks])
        return 0
    _print_tasks(tasks)
    return 0


def fetch_task(options: argparse.Namespace) -> int:
    fetched = fetch(options.task)
    if options.json:
        print_json([asdict(each) for each in fetched])
        return 0
    for each in fetched:
        print(f"{_name_of(each)}: {_sizes(each.sizes)}")
    print(f"{options.task}: its data are here, and were found without the hub")
    return 0


def list_images(options: argparse.Namespace) -> int:
    """Decode every image in a folder or JSONL file, and print the number of images of each class."""
    from workers.evaluation.image_tasks import image_facts

    found = image_facts(options.place)
    if options.json:
        print_json(asdict(found))
        return 0
    for name, count in found.classes.items():
        print(f"{name}: {count:,} images")
    of = f"of {len(found.classes)} classes" if found.classes else "without labels"
    print(f"{options.place}: {found.num_images:,} images {of}, and all can be read")
    return 0


def _print_tasks(tasks: tuple[ShippedTask, ...]) -> None:
    """Print a line for each task. On a terminal, the columns are those that fit without breaking a line."""
    columns = {
        "task": [task.name for task in tasks],
        "samples": [_sizes(task.sizes) for task in tasks],
        "data": ["here" if task.is_here else "not here" for task in tasks],
        "metric": [task.metric for task in tasks],
        "licence": [task.licence for task in tasks],
        "paper": [task.paper for task in tasks],
        "missing data": [", ".join(path for path in task.data if not task.places[path]) for task in tasks],
    }
    widths = {heading: max(map(len, (heading, *cells))) for heading, cells in columns.items()}
    ends = accumulate(width + len(GAP) for width in widths.values())
    room = console().width + len(GAP) if sys.stdout.isatty() else math.inf
    shown = [heading for heading, end in zip(columns, ends, strict=True) if end <= room] or ["task"]
    for cells in (shown, *zip(*(columns[heading] for heading in shown), strict=True)):
        print(GAP.join(cell.ljust(widths[heading]) for heading, cell in zip(shown, cells, strict=True)).rstrip())
    if left_out := [heading for heading in columns if heading not in shown]:
        *others, last = left_out
        print(f"{', '.join(others) + ' and ' if others else ''}{last}: in a wider terminal, or with --json")


def _sizes(sizes: Mapping[str, int | str]) -> str:
    return ", ".join(
        f"{split} {size:,}" if isinstance(size, int) else f"{split} {size}" for split, size in sizes.items()
    )


def _name_of(fetched: FetchedData) -> str:
    return fetched.data if fetched.part is None else f"{fetched.data}, {fetched.part}"
