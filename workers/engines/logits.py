"""Detection of logits that are NaN or infinite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["bad_rows", "in_words"]

KINDS = ("NaN", "infinite")


def bad_rows(logits: torch.Tensor) -> torch.Tensor:
    """Count the rows of `logits` [..., vocabulary] that cannot be used: int64 [2], (rows with NaN, infinite rows).

    A row is infinite if it contains +inf, or if all its values are -inf; its probabilities would be NaN. Other values
    of -inf are allowed; they mask single tokens. The counts are on the device of the logits.
    """
    import torch

    largest = logits.amax(dim=-1)  # NaN if any value of the row is
    return torch.stack([largest.isnan().sum(), largest.isinf().sum()])


def in_words(counts: Sequence[int], *, num_prompts: int) -> str:
    """Describe how many rows of logits were NaN or infinite, as text for a message; counts of 0 are left out.

    `counts` are the two numbers that the function `bad_rows` returns, for NaN and for infinite rows. `num_prompts` is
    the number of prompts that the rows belong to.
    """
    found = [(count, kind) for count, kind in zip(counts, KINDS, strict=True) if count]
    return " and ".join(f"{kind} ({count} rows in {num_prompts} prompts)" for count, kind in found)
