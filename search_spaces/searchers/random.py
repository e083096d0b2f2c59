"""Declaration of the searcher `random`: every configuration is drawn at random."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=False, reference="Bergstra and Bengio, JMLR 13(10), 2012", handles=frozenset(Feature)
)
