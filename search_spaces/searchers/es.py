"""Declaration of the searcher `es`: a (1+1) evolution strategy, which changes the best trial by random steps."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Rechenberg, 1973; Kern et al., Natural Computing 3, 2004",
    version=2,
    handles=frozenset(Feature) - {Feature.OBJECTIVES},
)
