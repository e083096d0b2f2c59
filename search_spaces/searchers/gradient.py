"""Declaration of the searcher `gradient`: gradient descent, then a local search or midpoints of the Pareto front."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Kingma and Ba, Adam, ICLR 2015; of coefficients: Yang et al., AdaMerging, ICLR 2024",
    handles=frozenset({Feature.OBJECTIVES, Feature.CONSTRAINTS, Feature.PENDING}),
    computes_steps=True,
    waits_for_baselines=True,
    uses_preferences=True,
)
