"""Policies that a search trains: the outcomes of the layer paths in each iteration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import RunRecord
from service.results.series.base import chart
from service.store.steps import UpdateStep

__all__ = ["PoliciesPlot", "PolicyIteration", "PolicySeries", "policies"]


@dataclass(frozen=True)
class PolicyIteration:
    iteration: Annotated[int, Field(ge=0, description="Counted over all policies.")]
    outcome: Annotated[float, Field(description="Mean over its trials: weighted values less the price of length.")]
    outcome_std: Annotated[float, Field(ge=0, description="The standard deviation over its trials.")]
    length: Annotated[float, Field(description="Mean number of layers.")]
    statistics: Annotated[
        dict[str, float], Field(description="Losses, entropy, KL divergence and clipping of the update.")
    ]


@dataclass(frozen=True)
class PolicySeries:
    name: str
    preference: Annotated[dict[str, float], Field(description="By objective; empty for a policy of all preferences.")]
    iterations: tuple[PolicyIteration, ...]


@dataclass(frozen=True)
class PoliciesPlot:
    """The policies that a search has trained, in the order in which they began; none for other searches."""

    plot: Literal["policies"]
    policies: tuple[PolicySeries, ...]


@chart(place=10)
def policies(run: RunRecord) -> PoliciesPlot:
    """Mean outcome in each iteration of the policies that the search has trained."""
    found: dict[tuple[tuple[str, float], ...], list[UpdateStep]] = {}
    for update in run.updates:
        found.setdefault(tuple(update.request.preference.items()), []).append(update)
    return PoliciesPlot(
        "policies",
        tuple(
            PolicySeries(f"policy {number}", dict(preference), tuple(map(_iteration, updates)))
            for number, (preference, updates) in enumerate(found.items())
        ),
    )


MEASURED = ("outcome", "outcome_std", "length")


def _iteration(update: UpdateStep) -> PolicyIteration:
    statistics = update.result.statistics
    outcome, std, length = (statistics[name] for name in MEASURED)
    others = {name: value for name, value in statistics.items() if name not in MEASURED}
    return PolicyIteration(update.request.iteration, outcome, std, length, others)
