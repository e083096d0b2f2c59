"""LiveBench documents in the form that IFEval's checks expect."""

from __future__ import annotations

from typing import Any

__all__ = ["with_prompt"]


def with_prompt(documents: Any) -> Any:
    """Copy `documents` of LiveBench with the fields that IFEval's checks read.

    These fields are `key`, the document's index, and `prompt`, the first turn of the conversation.
    """
    return documents.map(lambda row, index: {"key": index, "prompt": row["turns"][0]}, with_indices=True)
