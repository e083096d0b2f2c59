"""Racing: a scheduler that compares each trial with the best trials on the same samples, and stops worse trials.

Trials are compared at each rung, which is a fixed number of samples of every objective. Birattari et al., "A racing
algorithm for configuring metaheuristics" (2002), stop a trial by a statistical test. Here the test (class `Bound`) is
optional, and limits the probability that a good trial is stopped. Without the test, a trial is stopped as soon as its
results are worse: bad trials then cost few samples, but a good trial that starts badly may be lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

from search_spaces.objectives import Candidate, constrained_dominates
from service.tune.schedulers.base import Decision, Entry, RungTable
from service.tune.schedulers.bound import Bound

__all__ = ["RacingTable"]


class RacingTable(RungTable):
    """Racing scheduler: a trial is compared with the best earlier trials at each rung, and stopped if one is better.

    A rung is a number of samples at which trials are compared. The earlier trials with which a trial is compared are
    its rivals. A trial that is not stopped moves up to the next rung, independently of other trials. A trial is stopped
    if a rival is ahead. With one objective, a rival is ahead if it has a smaller cost. With several objectives, a rival
    is ahead if it dominates the trial. With constraints, a rival that violates them less is ahead. With a `bound`, a
    rival is ahead only if its lead is larger than chance explains (`Bound.is_behind`).

    Proposals may run ahead of evaluations by max_staleness trials. The rivals of trial n are on the Pareto front of the
    trials up to n - max_staleness that were scored in full. The proposal of trial n waits until all trials up to n -
    max_staleness have ended, and uses all their results. A race therefore does not depend on the order in which results
    arrive.
    """

    def __init__(self, *, bound: Bound | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self._bound = bound
        # The front of the first k trials, scored in full, for each k; its candidates have their costs of the last rung.
        self._fronts: list[tuple[Candidate, ...]] = [()]

    def decide(self, bracket: int) -> tuple[Decision, ...]:
        decisions = []
        for entry in (self._entries[number] for number in self._members[bracket]):
            for rung, above in pairwise(self._rungs[bracket]):
                if rung.is_closed or rung.index not in entry.costs or not self._are_known(entry.number):
                    continue
                rung.is_closed = True
                rival = self._rival_ahead(entry, rung.index, tuple(self._rivals(entry.number, rung.index)))
                if rival is not None:
                    self._end(entry)
                    reason = "" if self._bound is None else self._bound.reason(rung.index)
                    decisions.append(Decision(bracket, rung.index, (), (entry.number,), reason, rival))
                    break
                above.add(entry.number, cause=entry.number)
                if entry.is_waiting and entry.next_rung == rung.index:
                    self._continue(entry, above.index)
                    decisions.append(Decision(bracket, rung.index, (entry.number,), ()))
        return tuple(decisions)

    def _rival_ahead(self, entry: Entry, rung: int, rivals: Sequence[Candidate]) -> int | None:
        """Find the first of `rivals` that is ahead of the trial of `entry` at a rung; None if no rival is ahead.

        A rung is a number of samples at which trials are compared; `rung` is its index. Returns the number of the
        rival's trial.
        """
        if self._bound is None:
            own = self._candidate(entry, rung, entry.costs[rung])
            return next((rival.number for rival in rivals if constrained_dominates(rival, own)), None)
        is_behind = partial(
            self._bound.is_behind,
            entry.number,
            rung=rung,
            candidate=entry.number - self._num_baselines + 1,
            num_rivals=len(rivals),
        )
        return next((rival.number for rival in rivals if is_behind(rival.number)), None)

    def _decide_for(self, entry: Entry) -> tuple[Decision, ...]:
        # When a search is resumed, the results of rivals come after the results of the trials that they stop.
        decisions: list[Decision] = []
        for number in sorted(self._waiting):
            if not self._are_known(number):
                break
            bracket = self._entries[number].bracket
            decisions += () if bracket is None else self.decide(bracket)
        return tuple(decisions)

    def _are_known(self, number: int) -> bool:
        """Whether all possible rivals of trial `number` (trials that it is compared with) have ended.

        The possible rivals are the trials up to `number` - `max_staleness`. Newer trials are no rivals, because up to
        `max_staleness` trials are proposed ahead of evaluations.
        """
        return self._num_ended > number - self._max_staleness

    def _rivals(self, number: int, rung: int) -> Iterator[Candidate]:
        """Yield the rivals of trial `number` (the trials that it is compared with), each with its costs at a rung.

        The rivals are the Pareto front of the trials up to `number` - `max_staleness`. Newer trials are no rivals,
        because they may not have ended when the trial is proposed: up to `max_staleness` trials are proposed ahead of
        evaluations. A rung is a number of samples at which trials are compared; `rung` is its index. A rival without
        costs at the rung is left out.
        """
        for rival in self._front_of(max(0, number - self._max_staleness + 1)):
            entry = self._entries[rival.number]
            costs = {**self._at_looks.get(rival.number, {}), **entry.costs}
            if rung in costs:
                yield self._candidate(entry, rung, costs[rung])

    def _front_of(self, num_trials: int) -> tuple[Candidate, ...]:
        """The Pareto front of the trials with numbers below `num_trials`, by their costs on all samples.

        These trials must have ended. A trial that was not scored on all samples of the search is not on the front. A
        trial that violates constraints is dominated by a trial that violates them less.
        """
        for entry in (self._entries[number] for number in range(len(self._fronts) - 1, num_trials)):
            front = self._fronts[-1]
            if self.last_rung in entry.costs:
                new = self._candidate(entry, self.last_rung, entry.costs[self.last_rung])
                if not any(constrained_dominates(rival, new) for rival in front):
                    front = (*(rival for rival in front if not constrained_dominates(new, rival)), new)
            self._fronts.append(front)
        return self._fronts[num_trials]

    def _num_promoted_early(self, num_decided: int) -> int:
        return 0

    def _see_later(self, number: int, bracket: int) -> bool:
        if not self._are_known(number):
            return False
        self._see_ended(number - self._max_staleness)
        return True

    def position(self) -> None:
        """Always None: trials run at several rungs (numbers of samples) at once, so there is no rung to show."""
