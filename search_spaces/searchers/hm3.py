"""Declaration of the searcher `hm3`: HM3's policy, an actor-critic that builds layer paths step by step."""

from search_spaces.searchers.base import Feature, SearcherDeclaration

SEARCHER = SearcherDeclaration(
    learns=True,
    reference="Zhou et al., HM3 (arXiv:2409.18893); Schulman et al., PPO, 2017",
    version=4,
    handles=frozenset(Feature) - {Feature.CONSTRAINTS},
    trains_policy=True,
    uses_preferences=True,
)
