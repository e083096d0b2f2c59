"""Declaration of the searcher `gradient`: gradient descent on merge coefficients, then a local search.

In a study with preference vectors, midpoints of the Pareto front are proposed between the two.
"""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    version=2,
    reference="Kingma and Ba, Adam, ICLR 2015; of coefficients: Yang et al., AdaMerging, ICLR 2024",
    handles=frozenset({Feature.OBJECTIVES, Feature.CONSTRAINTS, Feature.PENDING}),
    computes_steps=True,
    waits_for_baselines=True,
    uses_preferences=True,
)
