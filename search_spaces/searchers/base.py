"""The declaration of a searcher."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SearcherDeclaration"]


@dataclass(frozen=True)
class SearcherDeclaration:
    """`learns`: its proposals depend on results, not only on which configurations were proposed before. `reference` is
    the publication. `alias_of` names the searcher that an alias stands for; None for an algorithm."""

    learns: bool
    reference: str
    alias_of: str | None = None
