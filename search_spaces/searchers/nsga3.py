"""Declaration of the searcher `nsga3`: Optuna's NSGA-III, a genetic algorithm for many objectives."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Deb and Jain, IEEE TEC 18(4), 2014",
    version=4,
    handles=frozenset(Feature) - {Feature.CONDITIONS},
)
