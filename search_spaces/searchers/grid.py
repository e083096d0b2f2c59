"""Grid search: every combination of a few values."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=False,
    reference="as in Bergstra and Bengio, JMLR 13(10), 2012",
    handles=frozenset(Feature),
)
