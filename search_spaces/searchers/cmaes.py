"""Declaration of the searcher `cmaes`: CMA-ES, a normal distribution that adapts to the best trials."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Hansen, arXiv 1604.00772; Ros and Hansen, PPSN 2008",
    handles=frozenset({Feature.CONSTRAINTS, Feature.PENDING}),
)
