"""LiveBench documents in the form that IFEval's checks expect."""

from __future__ import annotations

from typing import Any

__all__ = ["with_prompt"]


def with_prompt(documents: Any) -> Any:
    """Add the fields `key` (index) and `prompt` (first turn) to each document; IFEval's checks read both."""
    return documents.map(lambda row, index: {"key": index, "prompt": row["turns"][0]}, with_indices=True)
