"""Schedulers: when a rung promotes, and which results a proposal may know.

Hyperband: Li et al., "Hyperband" (JMLR 18, 2018), algorithm 1. ASHA: Li et al., "A System for Massively Parallel
Hyperparameter Tuning" (MLSys 2020), algorithm 2. Bracket sizes are `search_spaces.fidelity`'s.
"""

from __future__ import annotations

from collections.abc import Mapping

from search_spaces.fidelity import Scheduler
from service.tune.schedulers.base import RungTable

__all__ = ["SCHEDULERS", "AshaTable", "HyperbandTable"]


class HyperbandTable(RungTable):
    """Synchronous: a rung promotes once, when its bracket can bring no further member to it.

    Proposal n in bracket b sees
        - every rung of the trials in brackets up to b - 2 (the bracket opens when those are closed), and
        - the first evaluation of all trials numbered up to n - max_staleness (it waits for those).
    Later rungs of bracket b - 1 and anything newer stay hidden, even where they are known already, so the evaluations
    of two brackets may overlap.
    """

    def _num_promoted_early(self, num_decided: int) -> int:
        return 0

    def _later_evaluations(self, number: int, bracket: int) -> list[tuple[int, int]] | None:
        old = [index for index in self._brackets if index <= bracket - 2]
        if not all(self._is_closed(index) for index in old):
            return None
        trials = [trial for index in old for trial in self._members[index] if trial <= number - self._max_staleness]
        return [(trial, rung) for trial in trials for rung in self._entries[trial].costs]

    def position(self) -> tuple[int, int] | None:
        """The oldest bracket still open, at the lowest rung that any of its trials has not left."""
        for index in sorted(self._brackets) if self.last_rung > 0 else ():
            entries = [self._entries[number] for number in self._members[index]]
            if open_rungs := [entry.next_rung for entry in entries if not entry.is_finished]:
                return index, min(open_rungs)
        return None


class AshaTable(RungTable):
    """Asynchronous: with every result, those among the best 1/eta of a rung that were not promoted yet go on.

    Departures from the paper, which make the search the same whatever the order of results:
        - What a rung holds is counted in the order in which its members came, not in which they were evaluated: its
          first k members decide when all k are there. A slow one thus holds up the promotions behind it (and, after a
          max_staleness, proposals), but nothing waits for a bracket. Promotions are those of the paper with one worker.
        - The paper's search never ends; this one does, and then a rung that has promoted nobody sends its best on, so
          that the full budget is reached, and trials left behind are pruned. Trials added to a search that had ended
          are a bracket of their own.

    Proposal n sees the i-th evaluation (1-based) of a trial, and waits for it, if results of trials up to
    n - i * max_staleness caused it. Later evaluations of a trial take longer than its first, hence the factor i.
    """

    def _num_promoted_early(self, num_decided: int) -> int:
        return num_decided // self._eta

    def _later_evaluations(self, number: int, bracket: int) -> list[tuple[int, int]]:
        return [
            (trial, rung.index)
            for rungs in self._rungs.values()
            for i, rung in enumerate(rungs[1:], start=2)
            for trial, cause in rung.members.items()
            if cause <= number - i * self._max_staleness
        ]

    def position(self) -> None:
        """Nowhere: all rungs are worked on at once."""


SCHEDULERS: Mapping[Scheduler, type[RungTable]] = {
    "hyperband": HyperbandTable,
    "asha": AshaTable,
    "none": HyperbandTable,  # with one rung: there is nothing to promote
}
