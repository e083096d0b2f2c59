"""Data of the chart on policies that a search trains: the outcomes of their layer paths in each iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean, stdev
from typing import Annotated, Literal

from pydantic import Field

from service.results.record import RunRecord
from service.results.series.base import chart
from service.store.steps import UpdateStep

__all__ = ["MeanIteration", "PoliciesPlot", "PolicyIteration", "PolicySeries", "policies"]


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
class MeanIteration:
    outcome: Annotated[float, Field(description="Mean over policies of the outcome of their iteration at this place.")]
    outcome_std: Annotated[float, Field(ge=0, description="The standard deviation over policies; 0 for one policy.")]
    num_policies: Annotated[int, Field(ge=1, description="Policies that have had so many iterations.")]


@dataclass(frozen=True)
class PoliciesPlot:
    """The policies (networks that build layer paths) that a search has trained, in the order of their start.

    `mean` has, for each training iteration, the mean of the policies' outcomes. An outcome is the weighted sum of a
    trial's values, minus a price for its number of layers.
    """

    plot: Literal["policies"]
    policies: tuple[PolicySeries, ...]
    mean: tuple[MeanIteration, ...]


@chart(place=10)
def policies(run: RunRecord) -> PoliciesPlot:
    """Mean outcome of each policy's trials in each iteration: a trial's weighted values minus a price for layers."""
    found: dict[tuple[tuple[str, float], ...], list[UpdateStep]] = {}
    for update in run.updates:
        found.setdefault(tuple(update.request.preference.items()), []).append(update)
    series = tuple(
        PolicySeries(f"policy {number}", dict(preference), tuple(map(_iteration, updates)))
        for number, (preference, updates) in enumerate(found.items())
    )
    return PoliciesPlot("policies", series, _mean(series))


def _mean(series: Sequence[PolicySeries]) -> tuple[MeanIteration, ...]:
    found = []
    for turn in zip_longest(*(policy.iterations for policy in series)):
        outcomes = [each.outcome for each in turn if each is not None]
        deviation = stdev(outcomes) if len(outcomes) > 1 else 0.0
        found.append(MeanIteration(fmean(outcomes), deviation, len(outcomes)))
    return tuple(found)


MEASURED = ("outcome", "outcome_std", "length")


def _iteration(update: UpdateStep) -> PolicyIteration:
    statistics = update.result.statistics
    outcome, std, length = (statistics[name] for name in MEASURED)
    others = {name: value for name, value in statistics.items() if name not in MEASURED}
    return PolicyIteration(update.request.iteration, outcome, std, length, others)
