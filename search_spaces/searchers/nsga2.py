"""Declaration of the searcher `nsga2`: Optuna's NSGA-II, a genetic algorithm for several objectives."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Deb et al., IEEE TEC 6(2), 2002",
    version=4,
    handles=frozenset(Feature) - {Feature.CONDITIONS},
)
