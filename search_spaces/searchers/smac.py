"""Declaration of the searcher `smac`: SMAC, Bayesian optimisation with a random forest and expected improvement."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True, reference="Lindauer et al., SMAC3, JMLR 23(54), 2022", handles=frozenset(Feature), version=4
)
