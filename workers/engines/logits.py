"""Detection of logits that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["bad_rows", "in_words"]

KINDS = ("NaN", "infinite")


def bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """Count the rows of `logits` [..., vocabulary] with NaN, and those that are infinite: int64 [2] on the same device.

    A row is infinite if it contains +inf or nothing but -inf: its probabilities would be NaN. Other -inf are masks.
    """
    import torch

    largest = logits.amax(dim=-1)  # NaN if any value of the row is
    return torch.stack([largest.isnan().sum(), largest.isinf().sum()])


def in_words(counts: Sequence[int], *, num_prompts: int) -> str:
    """The counts of `bad_rows` that are not 0, as text."""
    found = [(count, kind) for count, kind in zip(counts, KINDS, strict=True) if count]
    return " and ".join(f"{kind} ({count} rows in {num_prompts} prompts)" for count, kind in found)
