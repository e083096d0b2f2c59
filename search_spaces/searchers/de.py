"""Declaration of the searcher `de`: differential evolution of a population of trials."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Storn and Price, J. Global Optimization 11, 1997",
    version=2,
    handles=frozenset(Feature) - {Feature.OBJECTIVES},
)
