"""Declaration of the searcher `gp`: Optuna's Gaussian process with expected improvement."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Jones et al., J. Global Optimization 13, 1998",
    version=4,
    handles=frozenset(Feature) - {Feature.CONDITIONS},
)
