"""Rungs and brackets of successive halving, as pure functions of budgets and eta.

A budget is a number of samples of every objective. Li et al., "Hyperband" (2018), algorithm 1; bracket sizes are those
that SMAC computes. This module does not know trials or scores.
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

Scheduler = Literal["hyperband", "asha", "racing", "none"]


def rungs(min_samples: int, max_samples: int, eta: int) -> tuple[int, ...]:
    """Sample counts of the rungs from `min_samples` to `max_samples`, growing by about `eta`, strictly increasing.

    There are round(log_eta(max / min)) + 1 rungs. The i-th (from 0) has min * eta^i samples, the last exactly
    `max_samples`. Raises ValueError if that gives a single rung, or if min > max, eta < 2 or samples < 1.
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
    """Each rung's share of the full budget, in (0, 1]; the last is 1."""
    return tuple(samples / rungs[-1] for samples in rungs)


@dataclass(frozen=True)
class Bracket:
    """One ladder: `num_configurations` start at rung `first_rung` (0-based) and climb to rung `num_rungs` - 1."""

    num_configurations: int
    first_rung: int
    num_rungs: int
    eta: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of configurations scored at each rung, starting with `first_rung`."""
        sizes = [self.num_configurations]
        while len(sizes) < self.num_rungs - self.first_rung:
            sizes.append(self.num_promoted(sizes[-1]))
        return tuple(sizes)

    def num_promoted(self, num_scored: int) -> int:
        """The number of configurations promoted out of `num_scored` at a rung: floor(n / eta), at least one."""
        return max(1, num_scored // self.eta)


def hyperband_brackets(num_rungs: int, eta: int) -> tuple[Bracket, ...]:
    """The brackets of one Hyperband iteration: s = s_max..0 with s_max = num_rungs - 1.

    Bracket s starts ceil(eta^s * (s_max + 1) / (s + 1)) configurations at rung s_max - s. With three rungs and eta 3, 9
    configurations start at the first rung, 5 at the second, 3 at the last.
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
    """The brackets that a search repeats, in order.

    hyperband: those of one Hyperband iteration. racing: one bracket for each configuration. Otherwise one bracket of
    all configurations: promotion does not wait for a full bracket (asha), or there is none (one rung).
    """
    if scheduler == "racing":
        return (Bracket(1, first_rung=0, num_rungs=num_rungs, eta=eta),)
    if scheduler == "hyperband" and num_rungs > 1:
        return hyperband_brackets(num_rungs, eta)
    return (Bracket(max_trials, first_rung=0, num_rungs=num_rungs, eta=eta),)


def bracket_plan(cycle: Sequence[Bracket], max_trials: int) -> tuple[Bracket, ...]:
    """Brackets in the order in which they run: `cycle` repeated until `max_trials` configurations have started.

    The last bracket is truncated to what remains of `max_trials`.
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
    """The number of brackets that may be open at a time: as many as `max_staleness` configurations fill, at least two.

    With k of them, a bracket opens once the bracket k before it and all older ones are closed.
    """
    size = sum(bracket.num_configurations for bracket in cycle)
    return max(OPEN_BRACKETS, max_staleness * len(cycle) // size)
