"""Proposals: the results that one may use, and the protocol of what computes them while the driver works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from search_spaces.spaces.base import SearchSpace
from service.tune.plan import Plan
from service.tune.schedulers.base import Proposal
from service.tune.searchers.base import Observation
from service.types import Origin, TrialRecord

__all__ = ["Proposer", "num_duplicates_in_a_row", "observations"]


class Proposer(Protocol):
    """Computes proposals while the driver works."""

    def submit(self, *, number: int, observations: Sequence[Observation], pending: Sequence[Mapping[str, Any]]) -> None:
        """Start computing proposal `number`."""
        ...

    def result(self, *, timeout_s: float) -> dict[str, Any] | None:
        """The submitted proposal's configuration, or None if it is not ready within `timeout_s`."""
        ...


def observations(
    proposal: Proposal, trials: Mapping[int, TrialRecord], *, space: SearchSpace, plan: Plan
) -> tuple[Observation, ...]:
    """The results that the proposal may know, without trials that the space cannot express."""
    full = sum(plan.rung_samples[-1].values())
    found = []
    for number, rung in proposal.visible:
        trial = trials[number]
        configuration = trial.configuration or space.from_recipe(trial.recipe)
        if configuration is None:
            continue
        values = next(record.values for record in trial.rungs if record.rung == rung)
        fidelity = sum(plan.rung_samples[rung].values()) / full
        found.append(Observation(configuration, fidelity, plan.costs(values)))
    for number in proposal.failed:
        if (configuration := trials[number].configuration) is not None:
            found.append(Observation(configuration, 1.0, None))
    return tuple(found)


def num_duplicates_in_a_row(trials: Sequence[TrialRecord], first: Mapping[str, int]) -> int:
    """How many of the newest `trials` are proposals whose recipe an earlier trial has.

    `first` is the number of the first trial of each recipe's digest."""
    count = 0
    for trial in reversed(trials):
        if trial.origin is not Origin.SEARCH or first[trial.recipe.digest] == trial.number:
            break
        count += 1
    return count
