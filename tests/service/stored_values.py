"""Stored values of samples by position, in a form for comparisons in tests."""

from __future__ import annotations

import numpy as np

from service.store import Store
from workers.types import Split

__all__ = ["stored_values"]


def stored_values(
    store: Store, study: str, split: Split, *, recipes: tuple[str, ...] | None = None
) -> dict[str, dict[str, dict[int, float]]]:
    """Values of all scored samples, or of those of `recipes`, by recipe digest, objective and position."""
    return {
        digest: {
            name: {int(position): float(values[position]) for position in np.flatnonzero(~np.isnan(values))}
            for name, values in of_recipe.items()
        }
        for digest, of_recipe in store.sample_values(study, split, recipes=recipes).items()
    }
