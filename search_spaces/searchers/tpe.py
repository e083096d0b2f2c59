"""Declaration of the searcher `tpe`: Optuna's TPE, which models the densities of good and of other trials."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Bergstra et al., NeurIPS 2011; Watanabe, arXiv 2304.11127",
    version=4,
    handles=frozenset(Feature),
)
