"""The commands `tasks` (list of shipped tasks), `tasks fetch` (their data) and `tasks images` (classes of a folder)."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict

from service.cli.terminal import console, print_json
from workers.evaluation.shipped_tasks import FetchedData, ShippedTask, fetch, shipped_tasks

__all__ = ["fetch_task", "list_images", "list_tasks"]


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
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for heading in ("task", "paper", "licence", "samples", "metric", "data"):
        table.add_column(heading, overflow="fold")
    for task in tasks:
        data = "here" if task.is_here else f"not here: {', '.join(path for path in task.data if not task.places[path])}"
        table.add_row(task.name, task.paper, task.licence, _sizes(task.sizes), task.metric, data)
    console().print(table)


def _sizes(sizes: Mapping[str, int | str]) -> str:
    return ", ".join(
        f"{split} {size:,}" if isinstance(size, int) else f"{split} {size}" for split, size in sizes.items()
    )


def _name_of(fetched: FetchedData) -> str:
    return fetched.data if fetched.part is None else f"{fetched.data}, {fetched.part}"
