"""LiveBench documents in the form that IFEval's checks expect."""

from __future__ import annotations

from typing import Any

__all__ = ["with_prompt"]


def with_prompt(documents: Any) -> Any:
    """Add to documents the fields `key` and `prompt` that IFEval's checks read."""
    return documents.map(lambda row, index: {"key": index, "prompt": row["turns"][0]}, with_indices=True)
