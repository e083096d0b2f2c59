"""What a model's tokenizer calls its tokens, as far as merging models by the rows of their embeddings asks for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from workers.layout import some_of

__all__ = ["vocabulary_problems"]


def vocabulary_problems(base_dir: Path, others: Mapping[str, Path]) -> tuple[str, ...]:
    """Why a row of the embedding does not stand for the same token in the base and in each of `others` (by alias)."""
    base = _tokens(base_dir)
    problems = []
    for alias, directory in others.items():
        tokens = _tokens(directory)
        if base is None or tokens is None:
            problems.append(
                f"model {alias!r}: {directory if base else base_dir}: no tokenizer.json to compare tokens by"
            )
        elif differing := {token for token, _ in base.items() ^ tokens.items()}:
            problems.append(
                f"model {alias!r}: {directory}: {len(differing)} tokens differ from the base's or have other ids: "
                f"{some_of(map(repr, differing))}"
            )
    return tuple(problems)


def _tokens(directory: Path) -> Mapping[str, int] | None:
    """Ids by token; None where there is no tokenizer.json that says."""
    try:
        document = json.loads((directory / "tokenizer.json").read_bytes())
        vocabulary = document["model"]["vocab"]
        # Unigram models list their tokens with a score, in the order of their ids.
        listed = vocabulary if isinstance(vocabulary, dict) else {entry[0]: i for i, entry in enumerate(vocabulary)}
        return listed | {str(token["content"]): int(token["id"]) for token in document.get("added_tokens", ())}
    except (OSError, ValueError, KeyError, TypeError, IndexError, RecursionError):
        return None
