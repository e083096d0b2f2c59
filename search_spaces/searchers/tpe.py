"""TPE: Parzen estimators of good and other trials (Optuna)."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Bergstra et al., NeurIPS 2011; Watanabe, arXiv 2304.11127",
    version=2,
    handles=frozenset(Feature),
)
