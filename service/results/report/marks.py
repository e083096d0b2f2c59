"""What charts of many trials share: the shape of a trial's mark, and how many marks are drawn.

Large studies are drawn from a sample of their points; the table says where the rest is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from service.results.report.charts import Shape
from service.types import Origin

__all__ = ["MAX_POINTS", "MAX_ROWS", "SHAPES", "evenly"]

T = TypeVar("T")

# A chart paints at most this many points, the most that stay distinguishable; a table lists this many rows.
MAX_POINTS = 1500
MAX_ROWS = 200

SHAPES: dict[Origin, Shape] = {
    Origin.SOURCE: "diamond",
    Origin.PUBLISHED: "square",
    Origin.USER: "square",
    Origin.SEARCH: "circle",
}


def evenly(items: Sequence[T], limit: int) -> list[T]:
    """All `items`, or `limit` of them at even distances."""
    return list(items) if len(items) <= limit else [items[i * len(items) // limit] for i in range(limit)]
