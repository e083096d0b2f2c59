"""The declaration of a searcher, and what a search may need of one."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.parameters import Categorical, Parameters

__all__ = ["Feature", "SearcherDeclaration", "needed_features"]


class Feature(StrEnum):
    """What a searcher may handle."""

    CONDITIONS = "conditional parameters"
    CHOICES = "categorical parameters"
    OBJECTIVES = "several objectives"
    CONSTRAINTS = "constraints"
    PENDING = "pending proposals"
    """Earlier proposals whose results are not known yet."""


@dataclass(frozen=True)
class SearcherDeclaration:
    """`learns`: its proposals depend on results, not only on which configurations were proposed before. `reference` is
    the publication. A search that needs a feature which the searcher does not handle is refused. `alias_of` names the
    searcher that an alias stands for; None for an algorithm. A searcher that `computes_steps` needs gradients by
    the parameters of the space. One that `waits_for_baselines` is asked for its first proposal when all source and
    published recipes are scored. Preference vectors of a study are refused by searchers that are not
    declared to use them (`uses_preferences`). One that `trains_policy` learns a policy that builds layer paths: it
    needs a space of them and one rung, as an episode is a trial with one reward."""

    learns: bool
    reference: str
    handles: frozenset[Feature]
    alias_of: str | None = None
    computes_steps: bool = False
    waits_for_baselines: bool = False
    uses_preferences: bool = False
    trains_policy: bool = False

    @property
    def proposes_at_once(self) -> bool:
        """Whether the searcher answers with a configuration whenever it is asked, without steps or options."""
        return not (self.computes_steps or self.trains_policy)


def needed_features(parameters: Parameters, *, num_objectives: int, num_constraints: int) -> frozenset[Feature]:
    """What a searcher must handle to search this space. Pending proposals are always needed: the driver asks for
    proposals ahead of results."""
    needed = {
        Feature.CONDITIONS: any(parameter.conditions for parameter in parameters),
        Feature.CHOICES: any(isinstance(p, Categorical) and len(p.choices) > 1 for p in parameters),
        Feature.OBJECTIVES: num_objectives > 1,
        Feature.CONSTRAINTS: num_constraints > 0,
        Feature.PENDING: True,
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)
