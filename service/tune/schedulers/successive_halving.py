"""Schedulers by successive halving: one bracket of all trials, Hyperband and ASHA.

Successive halving is figure 3 of Jamieson and Talwalkar, "Non-stochastic Best Arm Identification and Hyperparameter
Optimization" (AISTATS 2016). Hyperband is algorithm 1 of Li et al., "Hyperband" (JMLR 18, 2018). ASHA is algorithm 2 of
Li et al., "A System for Massively Parallel Hyperparameter Tuning" (MLSys 2020). `search_spaces.fidelity` computes the
sizes of brackets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from search_spaces.fidelity import Bracket
from service.tune.schedulers.base import Proposal, Rung, RungTable

__all__ = ["AshaTable", "HyperbandTable", "SuccessiveHalvingTable"]


class HyperbandTable(RungTable):
    """Hyperband scheduler: a rung promotes trials once, when no further trial of its bracket can arrive there.

    A rung is a number of samples at which trials are compared; a bracket is a ladder of rungs. Proposals may run ahead
    of evaluations by max_staleness trials. Proposal n, which is for a trial of bracket b, uses these results:

    - the first results of all trials up to n - max_staleness; the proposal waits for these results
    - the later results of these trials, if they belong to bracket b - open_brackets or an earlier one; all trials of
      these brackets have ended before bracket b opens

    Other results are not used, even if they are known. Therefore up to `open_brackets` brackets are evaluated at the
    same time. With one open bracket, brackets follow each other as in the paper. If proposals are made in batches,
    which are consecutive proposals from the same results, n is the last proposal of the batch, and b is the bracket of
    its first proposal.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._num_closed = 0  # how many brackets are closed, up to the first open one

    def _num_promoted_early(self, num_decided: int) -> int:
        return 0

    def _see_later(self, number: int, bracket: int) -> bool:
        while self._num_closed <= bracket - self._open_brackets:
            if not self._is_closed(self._num_closed):
                return False
            self._num_closed += 1
        closed = (self._members[index] for index in range(self._num_closed - 1, -1, -1))
        last = next((members[-1] for members in closed if members), -1)
        self._see_ended(min(last, number - self._max_staleness))
        return True

    def most_samples_left(self, totals: Sequence[int]) -> int:
        """The most samples that the search can still take without opening another bracket (ladder of rungs).

        A bracket of several rungs is completed once it is open. Therefore the trials that will still be proposed for an
        open bracket are counted in addition to its existing trials. For a bracket with a single rung, only the existing
        trials are counted. `totals` has each rung's number of samples, summed over the objectives.
        """
        alone = (self._entries[number].bracket for number in self._runnable)
        left = totals[-1] * sum(index is None or len(self._rungs[index]) == 1 for index in alone)
        for index in range(self._num_closed, len(self._brackets)):
            rungs, paid, sizes = self._rungs[index], 0, self._brackets[index].sizes
            for number, rung in enumerate(rungs if len(rungs) > 1 else ()):
                has_all = number > 0 and rungs[number - 1].is_closed
                size = len(rung.members) if has_all else sizes[number]
                num_evaluated = sum(self._entries[member].is_evaluated(rung.index) for member in rung.members)
                left += (size - num_evaluated) * (totals[rung.index] - paid)
                paid = totals[rung.index]
        return left

    def most_samples_of(self, proposal: Proposal, totals: Sequence[int]) -> int:
        """Number of samples that a new proposal adds to the result of `most_samples_left`.

        A bracket is a ladder of rungs, and a rung is a number of samples. In a bracket of several rungs, the first
        proposal adds the samples of the whole bracket, and later proposals add none. In a bracket of one rung, each
        proposal adds its own samples. `totals` has each rung's number of samples, summed over the objectives.
        """
        shape = proposal.opens or self._brackets[proposal.bracket]
        if shape.first_rung == self.last_rung:
            return totals[-1]
        return 0 if proposal.opens is None else shape.samples(totals)

    def position(self) -> tuple[int, int] | None:
        """Present bracket and rung of the search as indices, for displays of progress.

        A rung is a number of samples at which trials are compared. The bracket is the oldest bracket (ladder of rungs)
        with unfinished trials, and the rung is the lowest rung that has an unfinished trial. Returns None if no bracket
        has unfinished trials.
        """
        for index in sorted(self._brackets) if self.last_rung > 0 else ():
            entries = [self._entries[number] for number in self._members[index]]
            if open_rungs := [entry.next_rung for entry in entries if not entry.is_finished]:
                return index, min(open_rungs)
        return None


class SuccessiveHalvingTable(HyperbandTable):
    """Successive halving scheduler with one bracket: a rung promotes its best trials once all trials are scored there.

    A rung is a number of samples at which trials are compared. Every trial is proposed from results at the first rung
    alone, so a searcher whose results must be at one budget can use this scheduler. The higher rungs score the best
    trials on samples that the search has not used. Trials that are added to a search that had ended form another
    bracket, whose proposals use results at the first rung, too.
    """

    def _see_later(self, number: int, bracket: int) -> bool:
        return True

    def most_samples_left(self, totals: Sequence[int]) -> int:
        """The most samples that the existing trials can still take: their evaluations and all promotions.

        `totals` has each rung's number of samples, summed over the objectives.
        """
        left = totals[-1] * sum(self._entries[number].bracket is None for number in self._runnable)
        for index, rungs in self._rungs.items():
            planned = self._cut(index, len(self._members[index])).sizes if self._members[index] else (0,) * len(rungs)
            paid = 0
            for number, rung in enumerate(rungs):
                size = len(rung.members) if number == 0 or rungs[number - 1].is_closed else planned[number]
                num_evaluated = sum(self._entries[member].is_evaluated(rung.index) for member in rung.members)
                left += (size - num_evaluated) * (totals[rung.index] - paid)
                paid = totals[rung.index]
        return left

    def most_samples_of(self, proposal: Proposal, totals: Sequence[int]) -> int:
        """Number of samples that a new proposal adds to the result of `most_samples_left`.

        These are the samples of the first rung and, if one more trial will be promoted from a rung, the samples of this
        promotion. `totals` has each rung's number of samples, summed over the objectives.
        """
        if proposal.opens is not None:
            return replace(proposal.opens, num_configurations=1).samples(totals)
        size = len(self._members[proposal.bracket])
        return self._cut(proposal.bracket, size + 1).samples(totals) - self._cut(proposal.bracket, size).samples(totals)

    def _cut(self, bracket: int, size: int) -> Bracket:
        return replace(self._brackets[bracket], num_configurations=size)


class AshaTable(RungTable):
    """ASHA scheduler: after every result, a rung promotes trials among the best 1/eta of its trials.

    A rung is a number of samples at which trials are compared; its members are the trials that have arrived there. The
    search differs from the paper in three ways, so that its trials do not depend on the order in which results arrive,
    and so that it is known how many samples they can still take:

    - The members of a rung are ordered by their arrival, not by the time of their result. Decisions on the first k
      members are made when all k members are evaluated. A slow member therefore delays promotions of later members, but
      nothing waits for a whole bracket (ladder of rungs). With one worker and one objective, promotions are the same as
      in the paper.
    - A decision promotes at most one trial. With several objectives, one result may bring several trials among the best
      1/eta, because it changes crowding distances. The best of them is promoted at once, and each later decision
      promotes one more, as long as it is among the best 1/eta. In studies of version 1 of this scheduler, one decision
      promotes all of them, so such a study may take more samples than its limit.
    - The search in the paper never ends. When this search ends, a rung that has promoted no trial promotes its best
      trial, so that a trial is scored on all samples, and the remaining trials are pruned. Trials that are added to a
      search that had ended form another bracket.

    Fixed rules say which results proposal n waits for and uses, whatever the order of results. In these rules,
    max_staleness is the number of trials by which proposals may run ahead of evaluations:

    - At the first rung of a trial: the results of all trials up to n - max_staleness.
    - At the i-th rung of a bracket (i > 1): the results of trials whose promotion to this rung needed first results of
      trials up to n - i * max_staleness only. Later rungs take longer, so proposals may run further ahead of their
      results.
    """

    version = 2

    def _num_promoted_early(self, num_decided: int) -> int:
        return num_decided // self._eta

    @property
    def _most_promoted_at_once(self) -> int | None:
        return None if self._version == 1 else 1

    def _promote_last(self, bracket: int, rung: Rung, above: Rung) -> tuple[int, ...]:
        if self._version > 1 and above.members:
            return ()
        return super()._promote_last(bracket, rung, above)

    def _see_later(self, number: int, bracket: int) -> bool:
        for rungs in self._rungs.values():
            for i, rung in enumerate(rungs[1:], start=2):
                while rung.num_seen < len(rung.order):
                    trial = rung.order[rung.num_seen]
                    if rung.members[trial] > number - i * self._max_staleness:
                        break
                    if not self._see(trial, rung.index):
                        return False
                    rung.num_seen += 1
        return True

    def most_samples_left(self, totals: Sequence[int]) -> int:
        """The most samples that the study's trials can still take.

        This counts the evaluations that may run now, and later promotions. ASHA makes one decision for each trial that
        has arrived at a rung (a number of samples at which trials are compared), and a decision promotes at most one
        trial. For each decision that is still to be made at a rung, the samples from this rung up to the last one are
        therefore counted. `totals` has each rung's number of samples, summed over the objectives.
        """
        left = 0
        for entry in (self._entries[number] for number in self._runnable):
            paid = 0 if entry.next_rung == 0 or entry.bracket is None else totals[entry.next_rung - 1]
            left += totals[entry.next_rung] - paid
        for rungs in self._rungs.values():
            for rung in rungs[:-1]:
                left += (len(rung.order) - rung.num_decided) * (totals[-1] - totals[rung.index])
        return left

    def position(self) -> None:
        """Always None: trials run at several rungs (numbers of samples) at once, so there is no rung to show."""
