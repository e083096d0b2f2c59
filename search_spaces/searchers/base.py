"""The declaration of a searcher, and the features that a search requires of its searcher."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from search_spaces.parameters import Categorical, Parameters

__all__ = ["Feature", "SearcherDeclaration", "needed_features"]


class Feature(StrEnum):
    """A feature of a search that only some searchers can handle, such as several objectives or constraints."""

    CONDITIONS = "conditional parameters"
    CHOICES = "categorical parameters"
    OBJECTIVES = "several objectives"
    CONSTRAINTS = "constraints"
    PENDING = "pending proposals"
    """Earlier proposals whose results are not known yet."""


@dataclass(frozen=True)
class SearcherDeclaration:
    """The properties of a searcher that are known without loading its code.

    - `learns`: whether proposals depend on results, not only on which configurations were proposed before
    - `reference`: the publication that describes the algorithm
    - `handles`: the features that the searcher can handle; a search that needs another feature is refused
    - `alias_of`: the name of the searcher whose algorithm this searcher uses; None for a searcher with its own
      algorithm
    - `computes_steps`: whether the searcher needs gradients with respect to the parameters of the space
    - `waits_for_baselines`: whether the first proposal is requested only after all baselines are scored
    - `uses_preferences`: whether the searcher uses the study's preference vectors; a study with preference vectors is
      accepted only with such a searcher
    - `trains_policy`: whether the searcher trains a policy that builds layer paths; it then needs a space of layer
      paths and a single rung, because the policy is rewarded once for each trial
    - `version`: a number that increases whenever the searcher's proposals for the same results change; a study keeps
      the version with which it was created
    """

    learns: bool
    reference: str
    handles: frozenset[Feature]
    alias_of: str | None = None
    computes_steps: bool = False
    waits_for_baselines: bool = False
    uses_preferences: bool = False
    trains_policy: bool = False
    version: int = 1

    @property
    def proposes_at_once(self) -> bool:
        """Whether the searcher proposes configurations without first computing gradients or training a policy."""
        return not (self.computes_steps or self.trains_policy)

    @property
    def uses_earlier_results(self) -> bool:
        """Whether the searcher supports a warm start, which begins with the results of an earlier study."""
        return self.learns and self.proposes_at_once


def needed_features(parameters: Parameters, *, num_objectives: int, num_constraints: int) -> frozenset[Feature]:
    """The features that a searcher must handle for a search with the given parameters, objectives and constraints.

    `num_objectives` and `num_constraints` are the numbers of objectives and constraints. The feature PENDING is always
    included: the searcher must take into account earlier proposals that have no results yet, because the driver does
    not wait for these results.
    """
    needed = {
        Feature.CONDITIONS: any(parameter.conditions for parameter in parameters),
        Feature.CHOICES: any(isinstance(p, Categorical) and len(p.choices) > 1 for p in parameters),
        Feature.OBJECTIVES: num_objectives > 1,
        Feature.CONSTRAINTS: num_constraints > 0,
        Feature.PENDING: True,
    }
    return frozenset(feature for feature, is_needed in needed.items() if is_needed)
