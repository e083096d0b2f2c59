"""Paired differences of judged searches, with intervals over seeds and judge items.

A judged merge is [skills, items]: which judge items it answers right. Seeds of one family share their judge items.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import hypervolume

__all__ = ["interval", "volume_interval", "volume_of"]

NUM_RESAMPLES = 1000
NUM_RESAMPLES_OF_VOLUMES = 300  # each computes two hypervolumes for every family and seed


def interval(ours: Sequence[NDArray[Any]], theirs: Sequence[NDArray[Any]]) -> dict[str, float]:
    """Mean over families of `ours` minus `theirs`, each [seeds, skills, items], with its 95 % interval.

    A bootstrap draws both the seeds and the judge items of each skill again, the same ones for both sides.
    """
    differences = [a.astype(np.float64) - b for a, b in zip(ours, theirs, strict=True)]

    def drawn(draw: np.random.Generator) -> float:
        total = 0.0
        for each in differences:
            seeds, items = _weights(draw, each.shape)
            total += float((np.tensordot(seeds, each, 1) * items).sum()) / each.shape[1]
        return total / len(differences)

    return _bootstrap(float(np.mean([each.mean() for each in differences])), drawn, num=NUM_RESAMPLES)


def volume_interval(
    ours: Sequence[Sequence[NDArray[np.bool_]]], theirs: Sequence[Sequence[NDArray[np.bool_]]]
) -> dict[str, float]:
    """Mean difference between the hypervolumes of judged fronts [merges, skills, items], with its 95 % interval.

    Each side has one front for each family and seed; the bootstrap is that of `interval`.
    """

    def drawn(draw: np.random.Generator) -> float:
        total = 0.0
        for a, b in zip(ours, theirs, strict=True):
            seeds, items = _weights(draw, (len(a), *a[0].shape[1:]))
            total += sum(
                weight * (volume_of(x, items) - volume_of(y, items))
                for weight, x, y in zip(seeds.tolist(), a, b, strict=True)
                if weight
            )
        return total / len(ours)

    pairs = [volume_of(x) - volume_of(y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True)]
    return _bootstrap(float(np.mean(pairs)), drawn, num=NUM_RESAMPLES_OF_VOLUMES)


def _weights(draw: np.random.Generator, shape: tuple[int, ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Shares with which a bootstrap has drawn each seed and each item of a skill."""
    num_seeds, num_skills, num_items = shape
    seeds = draw.multinomial(num_seeds, np.full(num_seeds, 1 / num_seeds)) / num_seeds
    items = draw.multinomial(num_items, np.full(num_items, 1 / num_items), size=num_skills) / num_items
    return seeds, items


def _bootstrap(value: float, drawn: Callable[[np.random.Generator], float], *, num: int) -> dict[str, float]:
    draw = np.random.default_rng(0)
    low, high = np.quantile([drawn(draw) for _ in range(num)], [0.025, 0.975])
    return {"value": value, "low": float(low), "high": float(high)}


def volume_of(values: NDArray[np.bool_], weights: NDArray[np.float64] | None = None) -> float:
    """Hypervolume of judged merges [merges, skills, items], with weights [skills, items] of the items."""
    means = values.mean(axis=2) if weights is None else np.einsum("mki,ki->mk", values, weights)
    return hypervolume([tuple(row) for row in (1 - means).tolist()])
