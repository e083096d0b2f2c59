"""Recipes as mergekit configurations, for those that mergekit computes the same way.

Only what is numerically equal (up to float32 rounding) is written; for everything else there is a reason. The
functions know mergekit's configuration format, not its code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from search_spaces.recipe import COMPONENTS, Merge, Recipe
from workers.checkpoints import Layout

__all__ = ["Inexpressible", "mergekit_config"]

# mergekit applies the first filter that is a part of the tensor's name.
FILTERS = {"norm": "norm", "attention": "attn", "mlp": "mlp", "embedding": "embed", "head": "lm_head", "final_norm": "model.norm."}


class Inexpressible(ValueError):
    """mergekit cannot compute this recipe equally; the message says why."""
