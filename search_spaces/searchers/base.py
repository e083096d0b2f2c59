"""What a searcher declares of itself."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SearcherDeclaration"]


@dataclass(frozen=True)
class SearcherDeclaration:
    """`learns`: its proposals depend on results, not only on which configurations were proposed before. `reference` is
    the publication. `alias_of` is the searcher that it stands for, None for an algorithm of its own."""

    learns: bool
    reference: str
    alias_of: str | None = None
