"""Rungs and brackets of successive halving, as pure functions of budgets and the reduction factor eta.

A budget is the number of samples at a rung. Brackets follow Li et al., "Hyperband" (2018), algorithm 1; bracket sizes
are equal to SMAC's. This module does not depend on trials or scores.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

__all__ = [
    "OPEN_BRACKETS",
    "Bracket",
    "Scheduler",
    "bracket_cycle",
    "bracket_plan",
    "fidelities",
    "hyperband_brackets",
    "open_brackets",
    "rungs",
]

# The least number of brackets that may be open at a time: one more can start while the last trials of one climb.
OPEN_BRACKETS = 2

Scheduler = Literal["hyperband", "asha", "racing", "successive_halving", "none"]


def rungs(min_samples: int, max_samples: int, eta: int) -> tuple[int, ...]:
    """Numbers of samples at the rungs of successive halving, from `min_samples` to `max_samples`, strictly increasing.

    `eta` is the reduction factor: one trial in `eta` is promoted to the next rung, which has about `eta` times as many
    samples. There are round(log_eta(max_samples / min_samples)) + 1 rungs. Rung i, counted from 0, has min_samples *
    eta^i samples; the last rung has exactly `max_samples`. Raises ValueError if this gives a single rung, or if
    min_samples > max_samples, eta < 2 or min_samples < 1.
    """
    if min_samples < 1:
        raise ValueError(f"min_samples={min_samples} is below 1")
    if eta < 2:
        raise ValueError(f"eta={eta} is below 2; each rung needs at least twice the samples of the one before")
    if min_samples > max_samples:
        raise ValueError(f"min_samples={min_samples} is above max_samples={max_samples}")
    num_rungs = round(math.log(max_samples / min_samples, eta)) + 1
    if num_rungs < 2:
        raise ValueError(
            f"min_samples={min_samples} to max_samples={max_samples} leaves one rung at eta={eta}; widen the range, or "
            f"write `scheduler: none` (with hyperband also `rungs: [{max_samples}]`)"
        )
    return (*(min_samples * eta**i for i in range(num_rungs - 1)), max_samples)


def fidelities(rungs: Sequence[int]) -> tuple[float, ...]:
    """For each rung, its number of samples divided by the number of samples at the last rung, in (0, 1].

    `rungs` has the numbers of samples on which trials are scored at the rungs of successive halving.
    """
    return tuple(samples / rungs[-1] for samples in rungs)


@dataclass(frozen=True)
class Bracket:
    """A bracket of successive halving: several configurations start at one rung, and the best reach the next rungs.

    The bracket starts `num_configurations` configurations at rung `first_rung` (0-based); the best of them reach rung
    `num_rungs` - 1. `eta` is the reduction factor.
    """

    num_configurations: int
    first_rung: int
    num_rungs: int
    eta: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of configurations that are scored at each rung, from the bracket's first rung on.

        A rung is a level of successive halving.
        """
        sizes = [self.num_configurations]
        while len(sizes) < self.num_rungs - self.first_rung:
            sizes.append(self.num_promoted(sizes[-1]))
        return tuple(sizes)

    def samples(self, totals: Sequence[int]) -> int:
        """Total number of samples that are scored for the configurations of the bracket.

        `totals` has, for each rung of the study, the number of samples over all objectives. A promoted configuration
        takes only the samples on which it has not been scored yet.
        """
        increments = (rung - paid for paid, rung in itertools.pairwise((0, *totals[self.first_rung :])))
        return sum(size * samples for size, samples in zip(self.sizes, increments, strict=True))

    def num_promoted(self, num_scored: int) -> int:
        """The number of configurations that are promoted from one rung of successive halving to the next.

        `num_scored` is the number of configurations that are scored at the rung. The result is floor(num_scored / eta),
        but at least one.
        """
        return max(1, num_scored // self.eta)


def hyperband_brackets(num_rungs: int, eta: int) -> tuple[Bracket, ...]:
    """The brackets of one Hyperband iteration, numbered s from s_max = num_rungs - 1 down to 0.

    A bracket is a group of configurations that start at the same rung. `num_rungs` is the number of rungs, and one
    configuration in `eta` is promoted to the next rung. Bracket s starts ceil(eta^s * (s_max + 1) / (s + 1))
    configurations at rung s_max - s. For example, with three rungs and eta 3, the brackets start 9 configurations at
    the first rung, 5 at the second and 3 at the last.
    """
    if num_rungs < 1 or eta < 2:
        raise ValueError(f"num_rungs={num_rungs}, eta={eta}: at least one rung and eta 2 are needed")
    s_max = num_rungs - 1
    # Integer arithmetic: a floating-point ceiling would add a configuration where the quotient is whole.
    return tuple(
        Bracket(-(-(eta**s * (s_max + 1)) // (s + 1)), first_rung=s_max - s, num_rungs=num_rungs, eta=eta)
        for s in range(s_max, -1, -1)
    )


def bracket_cycle(scheduler: Scheduler, *, num_rungs: int, eta: int, max_trials: int) -> tuple[Bracket, ...]:
    """The brackets (groups of configurations for successive halving) that a search repeats, in order.

    With the scheduler `hyperband`, the result has the brackets of one Hyperband iteration. With the scheduler `racing`,
    it is one bracket of one configuration. With another scheduler, or with `hyperband` on one rung, one bracket has
    all `max_trials` configurations. `num_rungs` is the number of rungs, and one configuration in `eta` is promoted.
    """
    if scheduler == "racing":
        return (Bracket(1, first_rung=0, num_rungs=num_rungs, eta=eta),)
    if scheduler == "hyperband" and num_rungs > 1:
        return hyperband_brackets(num_rungs, eta)
    return (Bracket(max_trials, first_rung=0, num_rungs=num_rungs, eta=eta),)


def bracket_plan(cycle: Sequence[Bracket], max_trials: int) -> tuple[Bracket, ...]:
    """All brackets of a search, in the order in which they run.

    `cycle` is repeated until `max_trials` configurations have started. The last bracket is smaller if fewer
    configurations are left.
    """

    def cut() -> Iterator[Bracket]:
        left = max_trials
        for bracket in itertools.cycle(cycle):
            if left <= 0:
                return
            started = min(left, bracket.num_configurations)
            yield replace(bracket, num_configurations=started)
            left -= started

    return tuple(cut())


def open_brackets(cycle: Sequence[Bracket], *, max_staleness: int) -> int:
    """Number of consecutive brackets of a search that may run at the same time.

    A bracket is a group of trials that start at the same rung of successive halving; a search runs the brackets in
    `cycle` again and again. `max_staleness` is the number of trials that may be proposed before earlier trials are
    evaluated. The result k is the number of consecutive brackets that together have about `max_staleness` trials, but
    at least two. Bracket number i may begin only when bracket i - k and all earlier brackets are finished.
    """
    size = sum(bracket.num_configurations for bracket in cycle)
    return max(OPEN_BRACKETS, max_staleness * len(cycle) // size)
