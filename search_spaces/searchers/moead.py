"""Declaration of the searcher `moead`: MOEA/D-DE, a population whose members weight the objectives differently."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Li and Zhang, IEEE TEC 13(2), 2009",
    version=2,
    handles=frozenset(Feature),
)
