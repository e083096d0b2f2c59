"""Gradient descent on coefficients, followed by a local search or by midpoints of the front."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Kingma and Ba, Adam, ICLR 2015; of coefficients: Yang et al., AdaMerging, ICLR 2024",
    handles=frozenset({Feature.OBJECTIVES, Feature.CONSTRAINTS, Feature.PENDING}),
    computes_steps=True,
    waits_for_baselines=True,
    uses_preferences=True,
)
