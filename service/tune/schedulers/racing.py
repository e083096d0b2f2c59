"""Racing: a candidate is compared with the best trials on the same samples, and stopped when it is behind.

Candidates are compared at each rung, which is a fixed number of samples of every objective. Birattari et al., "A racing
algorithm for configuring metaheuristics" (2002), stop a candidate by a statistical test. Here it is stopped as soon as
it is behind: a worse candidate costs few samples, at the risk of losing a better one that starts badly. With a `Bound`,
a candidate is stopped when that risk is known to be small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from search_spaces.objectives import Candidate, constrained_dominates, constrained_front
from service.tune.schedulers.base import Decision, Entry, RungTable
from service.tune.schedulers.bound import Bound

__all__ = ["RacingTable"]


class RacingTable(RungTable):
    """A rung table for racing: each trial is a bracket of its own, and is stopped when a rival is ahead of it.

    Trial and rival are compared at the trial's rung. A rival is ahead if it has a smaller cost or, with several
    objectives, if it dominates the trial; with constraints, a rival that violates them less is ahead. With a `bound`, a
    rival is ahead if the bound says so.

    The rivals of trial n are those of the trials up to n - max_staleness that were scored in full and that no other of
    these dominates. The proposal of trial n waits until all trials up to n - max_staleness have ended, and uses all
    their results, so a race does not depend on the order in which results arrive.
    """

    def __init__(self, *, bound: Bound | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._bound = bound

    def decide(self, bracket: int) -> tuple[Decision, ...]:
        decisions = []
        for entry in (self._entries[number] for number in self._members[bracket]):
            for rung, above in pairwise(self._rungs[bracket]):
                if rung.is_closed or rung.index not in entry.costs or not self._are_known(entry.number):
                    continue
                rung.is_closed = True
                if self._is_behind(entry, rung.index, tuple(self._rivals(entry.number, rung.index))):
                    entry.is_waiting, entry.is_finished = False, True
                    reason = "" if self._bound is None else self._bound.reason(rung.index)
                    decisions.append(Decision(bracket, rung.index, (), (entry.number,), reason))
                    break
                above.members[entry.number] = entry.number
                if entry.is_waiting and entry.next_rung == rung.index:
                    entry.is_waiting, entry.next_rung = False, above.index
                    decisions.append(Decision(bracket, rung.index, (entry.number,), ()))
        return tuple(decisions)

    def _is_behind(self, entry: Entry, rung: int, rivals: Sequence[Candidate]) -> bool:
        if self._bound is None:
            own = self._candidate(entry, rung, entry.costs[rung])
            return any(constrained_dominates(rival, own) for rival in rivals)
        shares = {"candidate": entry.number - self._num_baselines + 1, "num_rivals": len(rivals)}
        return any(self._bound.is_behind(entry.number, rival.number, rung, **shares) for rival in rivals)

    def _decide_for(self, entry: Entry) -> tuple[Decision, ...]:
        # When a search is resumed, results come in another order: those of rivals after those of the trials they stop.
        waiting = [other.bracket for other in self._entries.values() if other.is_waiting and other.bracket is not None]
        return tuple(decision for bracket in waiting for decision in self.decide(bracket))

    def _are_known(self, number: int) -> bool:
        """Whether all trials that may be rivals have ended."""
        return all(e.is_finished for e in self._entries.values() if e.number <= number - self._max_staleness)

    def _rivals(self, number: int, rung: int) -> Iterator[Candidate]:
        """The rivals of a trial, with their costs at the rung."""
        full = [
            self._candidate(other, self.last_rung, other.costs[self.last_rung])
            for other in self._entries.values()
            if other.number <= number - self._max_staleness and self.last_rung in other.costs
        ]
        for rival, is_best in zip(full, constrained_front(full), strict=True):
            entry = self._entries[rival.number]
            costs = {**self._at_looks.get(rival.number, {}), **entry.costs}
            if is_best and rung in costs:
                yield self._candidate(entry, rung, costs[rung])

    def _num_promoted_early(self, num_decided: int) -> int:
        return 0

    def _later_evaluations(self, number: int, bracket: int) -> list[tuple[int, int]] | None:
        if not self._are_known(number):
            return None
        known = (e for e in self._entries.values() if e.number <= number - self._max_staleness)
        return [(entry.number, rung) for entry in known for rung in entry.costs]

    def position(self) -> None:
        """Always None, because trials are at different rungs at the same time."""
