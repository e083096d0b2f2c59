"""Symbols of charts with many trials: their shapes and colours, and how many are drawn.

In a large study, only some of the trials are drawn. The report says in which file all trials are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from service.results.report.charts import Shape
from service.types import Origin

__all__ = ["MAX_POINTS", "MAX_ROWS", "NUM_COLOURS", "SHAPES", "evenly"]

T = TypeVar("T")

# A chart paints at most this many points, the most that stay distinguishable; a table lists this many rows.
MAX_POINTS = 1500
MAX_ROWS = 200

# Colours of the style sheet for models, objectives and lines (`--c0` to `--c7`), and for methods (`--m0` to `--m7`).
NUM_COLOURS = 8

SHAPES: dict[Origin, Shape] = {
    Origin.SOURCE: "diamond",
    Origin.PUBLISHED: "square",
    Origin.USER: "square",
    Origin.SEARCH: "circle",
    Origin.REFINED: "circle",
}


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """Choose `limit` evenly spaced items, or all items if there are at most `limit`."""
    return list(items) if len(items) <= limit else [items[i * len(items) // limit] for i in range(limit)]
