"""One evaluation: the unit of work between the coordinator and Ray Tune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from search_spaces.recipe import Recipe
from workers.types import Span

__all__ = ["ChunkFailed", "Evaluation"]


@dataclass(frozen=True, repr=False)
class Evaluation:
    """What is still to be scored of one trial at one rung (or, with split "holdout", on the whole holdout data)."""

    study: str
    trial: int
    rung: int
    split: str
    recipe: Recipe
    chunks: tuple[tuple[Span, ...], ...]

    def __repr__(self) -> str:  # Tune makes tags and folder names of it
        return f"trial-{self.trial}-{self.split}-{self.rung}"

    def __deepcopy__(self, memo: Mapping[int, Any]) -> Self:  # immutable, and Tune copies every configuration
        return self


@dataclass(frozen=True)
class ChunkFailed:
    """A chunk that was not scored. `kind` is "trial" (this candidate cannot be scored), "engine" (no engine can be
    had) or "evidence" (an engine held something else than was asked for)."""

    kind: str
    reason: str
