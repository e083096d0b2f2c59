"""Time from a recipe to an engine that serves the merge, for the methods that take mergekit longest."""

from __future__ import annotations

from typing import Any

from tests.benchmarks import bench_swap

__all__ = ["run", "show"]

show = bench_swap.show


def run() -> dict[str, Any]:
    return bench_swap.run(bench_swap.SLOW)
