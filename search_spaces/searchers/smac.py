"""Declaration of the searcher `smac`: SMAC, a random forest that learns from results, and expected improvement."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True, reference="Lindauer et al., SMAC3, JMLR 23(54), 2022", handles=frozenset(Feature), version=2
)
