"""Declaration of the searcher `grid`: every combination of a few values of each parameter."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=False,
    reference="as in Bergstra and Bengio, JMLR 13(10), 2012",
    handles=frozenset(Feature),
)
