"""Base class of schedulers, with the table of rungs and brackets from which evaluations and promotions follow.

The table is rebuilt from the stored trials, rungs and brackets at every start, and uses neither SQL nor Ray. A
scheduler is a subclass, which decides when a rung promotes trials and which results a proposal may use.

A search gives the same trials for any number of replicas and after any interruption, because nothing depends on the
order in which results arrive. The members of a rung are in the order of their promotion to it. Decisions are made on
the first k members once all of these k members are evaluated. A proposal uses the results of a fixed set of earlier
evaluations. Evaluations may still overlap, so engines have work while a rung waits for a result.

While a search runs, each new result changes only the entries of the table that depend on it. This suffices because
results become visible to proposals in a fixed order and stay visible. Therefore handling a result or a proposal takes
the same time in a long search as in a short one.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from search_spaces.fidelity import Bracket
from search_spaces.objectives import Candidate
from service.tune.schedulers.ranking import Ranking

__all__ = ["Decision", "Entry", "Proposal", "Rung", "RungTable"]


@dataclass
class Entry:
    """A trial as the scheduler sees it: its bracket, its next rung, its costs at each rung, and whether it has ended.

    A rung is a number of samples at which trials are compared; a bracket is a ladder of rungs. `bracket` is None for a
    trial that is evaluated only at the last rung, such as a baseline. `is_finished` is True once the trial is complete,
    pruned or failed. `is_waiting` is True while the trial waits for a decision on its promotion.
    """

    number: int
    bracket: int | None  # None: a baseline, evaluated once at full budget
    next_rung: int  # where it is evaluated next, or was evaluated last if `is_waiting`
    costs: dict[int, tuple[float, ...]] = field(default_factory=dict)  # rung -> cost per objective
    is_failed: bool = False
    is_finished: bool = False
    is_waiting: bool = False  # evaluated at `next_rung`, promotion undecided

    def is_evaluated(self, rung: int) -> bool:
        return rung in self.costs or self.is_failed


@dataclass
class Rung:
    """A rung of one bracket (ladder of rungs): a number of samples at which the bracket's trials are compared.

    The rung's members are the trials that have arrived at it, whether or not they are evaluated there already.

    - `index`: the rung's index, from 0
    - `order`: the members in the order of their arrival
    - `members`: maps each member to the number of the newest trial whose first result was needed for promoting the
      member to this rung. This number decides which proposals may use the member's result here. The numbers never
      decrease along `order`.
    - `num_decided`: the number of members on which decisions have been made; they are the first members in `order`
    - `num_seen`: the number of members whose results at this rung proposals may use; they are the first members in
      `order`
    - `ranking`: the members on which decisions have been made, without the members that failed
    - `is_closed`: whether all decisions at this rung have been made
    """

    index: int
    members: dict[int, int] = field(default_factory=dict)
    order: list[int] = field(default_factory=list)
    num_decided: int = 0
    num_seen: int = 0  # number of first members whose results proposals may use
    is_closed: bool = False
    ranking: Ranking = field(default_factory=Ranking)

    def add(self, number: int, *, cause: int) -> None:
        self.members[number] = cause
        self.order.append(number)


@dataclass(frozen=True)
class Proposal:
    """The next configuration to request from the searcher, and the results that the searcher may use for it.

    - `number`: the number of the trial that gets the configuration
    - `bracket`: the number of the trial's bracket (ladder of rungs)
    - `visible`: the results that may be used, each as (number of the trial, index of the rung)
    - `failed`: trials that are known to have failed
    - `pending`: earlier trials whose results the searcher may not use
    - `opens`: the new bracket if the trial is the first in it, else None; the caller stores the bracket before the
      trial
    """

    number: int
    bracket: int
    visible: tuple[tuple[int, int], ...]
    failed: tuple[int, ...]
    pending: tuple[int, ...]
    opens: Bracket | None


@dataclass(frozen=True)
class Decision:
    """A decision at a rung of a bracket: the trials promoted to the next rung, and the trials that end as pruned.

    A rung is a number of samples at which trials are compared; a bracket is a ladder of rungs. `reason` says by which
    rule trials are pruned, if the scheduler has several rules. `rival` is a trial that was better than the pruned
    trials: in racing a trial that is ahead of them, with other schedulers the lowest-ranked promoted trial. It is None
    if no trial is pruned, and with these other schedulers also if no trial is promoted.
    """

    bracket: int
    rung: int
    promoted: tuple[int, ...]
    pruned: tuple[int, ...]
    reason: str = ""
    rival: int | None = field(default=None, compare=False)


class RungTable(ABC):
    """Base class of schedulers, with the rungs and brackets of one study.

    A rung is a number of samples at which trials are compared; a bracket is a ladder of rungs, as in Hyperband.

    - `num_rungs`: the number of rungs
    - `eta`: the reduction factor of successive halving; about 1/eta of a rung's trials are promoted
    - `cycle`: the brackets, which repeat until `max_trials` configurations are proposed
    - `num_baselines`: the number of baselines, which are the first trials and are evaluated once, at the last rung
    - `max_staleness`: the number of trials by which proposals may be ahead of evaluations, which keeps replicas busy
    - `batch`: the number of consecutive proposals that are made from the same results, at most `max_staleness`; all
      proposals of a batch use the results that its last proposal may use
    - `waits_for_baselines`: whether each proposal must use the results of all baselines
    - `open_brackets`: the number of brackets of Hyperband in which trials may run at the same time
    - `violation(trial, rung)`: the trial's violation of constraints at a rung for which it has a result; called when a
      decision is made on a proposed trial
    - `version`: the version of the scheduler with which the study was created; None for the newest version

    The class attribute `version` is the newest version of a scheduler. It increases whenever the scheduler's decisions
    for the same results change.
    """

    version: ClassVar[int] = 1

    def __init__(
        self,
        *,
        num_rungs: int,
        eta: int,
        cycle: Sequence[Bracket],
        num_baselines: int,
        max_trials: int,
        max_staleness: int,
        open_brackets: int = 2,
        batch: int = 1,
        waits_for_baselines: bool = False,
        violation: Callable[[int, int], float] = lambda number, rung: 0.0,
        version: int | None = None,
    ) -> None:
        self._violation = violation
        self._version = type(self).version if version is None else version
        self.last_rung = num_rungs - 1
        self._eta = eta
        self._cycle = tuple(cycle)
        self._num_baselines = num_baselines
        self._max_trials = max_trials
        self._max_staleness = max_staleness
        self._open_brackets = open_brackets
        self._batch = batch
        self._last_awaited = num_baselines - 1 if waits_for_baselines else -1
        self._entries: dict[int, Entry] = {}
        self._brackets: dict[int, Bracket] = {}
        self._members: dict[int, list[int]] = {}
        self._rungs: dict[int, tuple[Rung, ...]] = {}
        self._at_looks: dict[int, Mapping[int, tuple[float, ...]]] = {}
        self._is_search_over = False
        self._is_stopped = False
        self._num_proposed = 0
        self._num_finished = 0
        self._num_ended = 0  # trials that have ended, up to the first trial that has not ended
        self._runnable: set[int] = set()
        self._waiting: set[int] = set()
        # The results that the newest proposal may use.
        self._visible: list[tuple[int, int]] = []
        self._failed: list[int] = []
        self._num_known = 0  # trials with a visible first result, up to the first trial without one
        self._num_seen = 0  # trials whose results are all visible, up to the first other trial

    # -- what a scheduler decides ---------------------------------------------------------------------------------

    @abstractmethod
    def _num_promoted_early(self, num_decided: int) -> int:
        """Number of trials that a rung has to promote in all, while further trials may still arrive there.

        A rung is a number of samples at which trials are compared. `num_decided` is the number of its trials, in the
        order of arrival, before the first one that is not evaluated yet. The result includes the trials that the rung
        has promoted already.
        """

    @property
    def _most_promoted_at_once(self) -> int | None:
        """The most trials that one decision promotes from a rung to the next one; None is no limit."""
        return None

    @abstractmethod
    def _see_later(self, number: int, bracket: int) -> bool:
        """Let the searcher use the higher-rung results that proposal `number` needs; return whether all of them exist.

        A rung is a number of samples at which trials are compared; the higher rungs of a trial are all its rungs except
        the first rung. Each subclass defines which of these results a proposal needs, and calls the method `_see` for
        each of them. `bracket` is the number of the proposal's bracket (ladder of rungs). If a result does not exist
        yet, the method returns False, and the proposal waits for it. A result that one proposal may use can be used by
        all later proposals too.
        """

    @abstractmethod
    def position(self) -> tuple[int, int] | None:
        """Present bracket and rung of the search, for displays of progress; None if several rungs are in use at once.

        A bracket is a ladder of rungs, and a rung is a number of samples at which trials are compared; both are given
        by their index.
        """

    # -- state -----------------------------------------------------------------------------------------------------

    def open_bracket(self, index: int, *, first_rung: int, size: int) -> None:
        self._brackets[index] = Bracket(size, first_rung, self.last_rung + 1, self._eta)
        self._members[index] = []
        self._rungs[index] = tuple(Rung(rung) for rung in range(first_rung, self.last_rung + 1))

    def add_trial(self, number: int, bracket: int | None) -> None:
        first_rung = self.last_rung if bracket is None else self._brackets[bracket].first_rung
        self._entries[number] = Entry(number, bracket, first_rung)
        self._runnable.add(number)
        if bracket is not None:
            self._num_proposed += 1
            self._members[bracket].append(number)
            self._rungs[bracket][0].add(number, cause=number)

    def record(self, number: int, rung: int, costs: tuple[float, ...]) -> tuple[Decision, ...]:
        """Record the costs of trial `number` at a rung; return which trials are now promoted or pruned.

        `costs` has one cost for each objective; smaller is better. A rung is a number of samples at which trials are
        compared.
        """
        entry = self._entries[number]
        entry.costs[rung] = costs
        entry.next_rung = rung
        if rung == self.last_rung or self._is_stopped:
            self._end(entry)
        else:
            entry.is_waiting = True
            self._runnable.discard(number)
            self._waiting.add(number)
        return () if self._is_stopped else self._decide_for(entry)

    def know(self, number: int, costs: Mapping[int, tuple[float, ...]]) -> None:
        """Record the costs of trial `number` at rungs (numbers of samples) where it was not evaluated itself.

        Baselines are such trials: they are evaluated only at the last rung, whose samples include the samples of the
        lower rungs. `costs` contains the costs, keyed by the index of the lower rung, one cost for each objective.
        """
        self._at_looks[number] = dict(costs)

    def fail(self, number: int) -> tuple[Decision, ...]:
        """Record that trial `number` failed, and return the resulting promotions and prunings of other trials."""
        entry = self._entries[number]
        entry.is_failed = True
        self._end(entry)
        return () if self._is_stopped else self._decide_for(entry)

    def stop(self, *, running: Collection[int]) -> None:
        """End the search now, and end all trials except those in `running`.

        `running` has the numbers of the trials that are being evaluated. Each of these trials ends with its next
        result, because no trial is promoted any more. The planned numbers of trials in brackets (ladders of rungs) are
        not reduced. A resumed search therefore makes the same decisions up to the stop.
        """
        self._is_search_over = self._is_stopped = True
        for entry in self._entries.values():
            if not entry.is_finished and entry.number not in running:
                self._end(entry)

    def end_search(self) -> tuple[int, ...]:
        """Stop proposals, because a limit is reached or the searcher repeats known configurations.

        Trials that exist are still evaluated, promoted and pruned. A bracket is a ladder of rungs (numbers of samples)
        with a planned number of trials, and the last decisions at its first rung wait for all planned trials. Brackets
        that have fewer trials than planned are therefore reduced to the trials that they have. Returns the indices of
        the reduced brackets. A bracket of one rung promotes nothing, and keeps its planned size in case the search
        continues later.
        """
        self._is_search_over = True
        short = [
            index
            for index, members in self._members.items()
            if len(members) < self.size(index) and len(self._rungs[index]) > 1
        ]
        for index in short:
            self._brackets[index] = replace(self._brackets[index], num_configurations=len(self._members[index]))
        return tuple(short)

    def shrink(self) -> tuple[int, ...]:
        """Make the newest bracket smaller if all brackets together have more trials than the plan's `max_trials`.

        A bracket is a ladder of rungs (numbers of samples at which trials are compared) with a planned number of
        trials. The brackets have too many trials only if the user has reduced `max_trials` after the newest bracket was
        opened. The newest bracket keeps the trials that it already has. Returns a tuple with the index of the changed
        bracket, or an empty tuple.
        """
        newest = next(reversed(self._brackets), None)
        excess = sum(bracket.num_configurations for bracket in self._brackets.values()) - self._max_trials
        if newest is None or excess <= 0:
            return ()
        size = max(len(self._members[newest]), self.size(newest) - excess)
        self._brackets[newest] = replace(self._brackets[newest], num_configurations=size)
        return (newest,)

    def size(self, bracket: int) -> int:
        return self._brackets[bracket].num_configurations

    # -- samples ---------------------------------------------------------------------------------------------------

    def most_samples_left(self, totals: Sequence[int]) -> int:
        """The most samples that the study's trials can still take, if every trial is evaluated up to the last rung.

        A rung is a number of samples at which trials are compared. `totals` contains the number of samples of each
        rung, summed over the objectives. Subclasses may return a smaller number.
        """
        return sum(self._most_of(self._entries[number], totals) for number in self._runnable | self._waiting)

    def most_samples_of(self, proposal: Proposal, totals: Sequence[int]) -> int:
        """Number of samples that a new trial adds to the result of `most_samples_left`.

        In this class, it is the number of samples of the last rung; a rung is a number of samples at which trials are
        compared. `proposal` describes the new trial. `totals` has the number of samples of each rung, summed over the
        objectives.
        """
        return totals[-1]

    def _most_of(self, entry: Entry, totals: Sequence[int]) -> int:
        """Largest number of samples that a trial can still take: the samples of its last rung that are not scored yet.

        `entry` is the state of the trial. A rung is a number of samples at which trials are compared. `totals` has the
        number of samples of each rung, summed over the objectives.
        """
        return totals[-1] - (totals[max(entry.costs)] if entry.costs else 0)

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide(self, bracket: int) -> tuple[Decision, ...]:
        """Promote and prune trials of a bracket as far as the known results allow, and return these decisions.

        A bracket is a ladder of rungs, and a rung is a number of samples at which trials are compared. `bracket` is the
        index of the bracket. Until there are new results, a second call changes nothing.
        """
        decisions = []
        is_complete = self._is_full(bracket)
        for rung, above in itertools.pairwise(self._rungs[bracket]):
            promoted = self._promote_early(rung, above)
            pruned: tuple[int, ...] = ()
            rival = None
            if is_complete and not rung.is_closed and rung.num_decided == len(rung.members):
                promoted += self._promote_last(bracket, rung, above)
                pruned = self._prune(rung)
                rival = self._last_promoted(bracket, rung, above) if pruned else None
                rung.is_closed = True
            if promoted or pruned:
                decisions.append(Decision(bracket, rung.index, promoted, pruned, rival=rival))
            is_complete = rung.is_closed
        return tuple(decisions)

    def ready(self) -> Iterator[tuple[int, int]]:
        """The evaluations that may run now, as (trial number, rung), in the order of starting.

        A rung is a number of samples at which trials are compared; in the result, it is given by its index. Promoted
        trials come first, before trials that have no result yet. Both groups are sorted by trial number.
        """
        runnable = [self._entries[number] for number in self._runnable]
        runnable.sort(key=lambda entry: (entry.bracket is not None and not entry.costs, entry.number))
        for entry in runnable:
            yield entry.number, entry.next_rung

    def next_rung(self, number: int) -> int:
        """Index of the next rung (number of samples) of trial `number`."""
        return self._entries[number].next_rung

    def proposal(self) -> Proposal | None:
        """The next proposal to request from the searcher, or None if no proposal may be requested now.

        After the end of the search (`is_search_over`) the result is always None.
        """
        if self.is_search_over:
            return None
        number = len(self._entries)
        if number < self._num_baselines:
            raise AssertionError("baselines come first")
        bracket, opens = self._bracket_of_next()
        # All proposals of a batch use the results that its last proposal must use.
        first = number - (number - self._num_baselines) % self._batch
        last = first + self._batch - 1
        visible_up_to = max(last - self._max_staleness, self._last_awaited)
        # A trial that a user requested is in no bracket; it may have the number of a proposal of the batch.
        brackets = (self._entries[n].bracket for n in range(first, number))
        known_from = next((each for each in brackets if each is not None), bracket)
        if not (self._see_first(visible_up_to) and self._see_later(last, known_from)):
            return None
        return Proposal(
            number=number,
            bracket=bracket,
            visible=tuple(self._visible),
            failed=tuple(self._failed),
            pending=tuple(range(max(visible_up_to + 1, 0), number)),
            opens=opens,
        )

    @property
    def is_search_over(self) -> bool:
        """Whether the searcher will not be asked for further trials."""
        return self._is_search_over or self.num_proposed >= self._max_trials

    @property
    def is_finished(self) -> bool:
        """Whether every trial has ended and the searcher will not be asked for further trials."""
        return self.is_search_over and self._num_finished == len(self._entries)

    @property
    def num_proposed(self) -> int:
        return self._num_proposed

    def waiting(self) -> Mapping[int, int]:
        """The trials whose promotion is undecided, each with the rung at which it was evaluated last.

        Keys are trial numbers, and values are indices of rungs. A rung is a number of samples at which trials are
        compared.
        """
        return {number: self._entries[number].next_rung for number in sorted(self._waiting)}

    # -- internal --------------------------------------------------------------------------------------------------

    def _bracket_of_next(self) -> tuple[int, Bracket | None]:
        """The number of the bracket that the next proposed trial belongs to, and this bracket if it is new, else None.

        A bracket is a ladder of rungs, and a rung is a number of samples at which trials are compared. If the newest
        bracket has all its trials, a new bracket is opened: the bracket that comes next in the list `cycle`, which
        starts again at its end. The new bracket has fewer trials than planned if fewer configurations are left to
        propose.
        """
        newest = next(reversed(self._brackets), -1)
        if newest >= 0 and not self._is_full(newest):
            return newest, None
        planned = self._cycle[(newest + 1) % len(self._cycle)]
        remaining = self._max_trials - self.num_proposed
        return newest + 1, replace(planned, num_configurations=min(planned.num_configurations, remaining))

    def _is_full(self, bracket: int) -> bool:
        return len(self._members[bracket]) >= self.size(bracket)

    def _is_closed(self, bracket: int) -> bool:
        return self._is_full(bracket) and all(self._entries[number].is_finished for number in self._members[bracket])

    def _decide_for(self, entry: Entry) -> tuple[Decision, ...]:
        return () if entry.bracket is None else self.decide(entry.bracket)

    def _see_first(self, last: int) -> bool:
        """Make each trial's first result visible to proposals, for all trials up to number `last`.

        Visible results are the results that a searcher may use. Trials that failed without a result are added to the
        failed trials, which searchers also receive. Returns False if a trial has no result yet and has not failed.
        """
        while self._num_known <= last:
            entry = self._entries[self._num_known]
            if entry.costs:
                self._see(entry.number, min(entry.costs))
            elif entry.is_failed:
                self._failed.append(entry.number)
            else:
                return False
            self._num_known += 1
        return True

    def _see(self, number: int, rung: int) -> bool:
        """Let searchers use the result of a trial at a rung; return whether the trial was evaluated at this rung.

        `number` is the trial's number. A rung is a number of samples at which trials are compared. A trial that failed
        counts as evaluated, but has no result that proposals could use.
        """
        entry = self._entries[number]
        if rung in entry.costs:
            insort(self._visible, (number, rung))
        return entry.is_evaluated(rung)

    def _see_ended(self, last: int) -> None:
        """Let searchers use the results of the trials up to number `last` at all rungs, not only at the first rung.

        A rung is a number of samples at which trials are compared. The trials must have ended, and their first results
        must be visible to searchers already (`_see_first`).
        """
        while self._num_seen <= last:
            for rung in sorted(self._entries[self._num_seen].costs)[1:]:
                self._see(self._num_seen, rung)
            self._num_seen += 1

    def _end(self, entry: Entry) -> None:
        """Mark the trial of `entry` as ended, because it is complete, pruned or failed."""
        self._num_finished += not entry.is_finished
        entry.is_finished, entry.is_waiting = True, False
        self._runnable.discard(entry.number)
        self._waiting.discard(entry.number)
        while (following := self._entries.get(self._num_ended)) is not None and following.is_finished:
            self._num_ended += 1

    def _continue(self, entry: Entry, rung: int) -> None:
        """Promote the trial of `entry`, whose promotion was undecided until now, to the rung with the index `rung`.

        A rung is a number of samples at which trials are compared. The trial is then ready to be evaluated at `rung`.
        """
        entry.is_waiting, entry.next_rung = False, rung
        self._waiting.discard(entry.number)
        self._runnable.add(entry.number)

    def _promote_early(self, rung: Rung, above: Rung) -> tuple[int, ...]:
        """Promote trials of `rung` to the rung `above` while more trials may still arrive at `rung`.

        A rung is a number of samples at which trials are compared. Trials are decided on in the order in which they
        have arrived at `rung`. If the evaluation of a trial is not finished yet, this trial and all later trials wait
        for a decision. Returns the numbers of the trials that are promoted.
        """
        promoted: list[int] = []
        while rung.num_decided < len(rung.order):
            number = rung.order[rung.num_decided]
            entry = self._entries[number]
            if not entry.is_evaluated(rung.index):
                break
            rung.num_decided += 1
            if rung.index in entry.costs:
                rung.ranking.add(self._candidate(entry, rung.index, entry.costs[rung.index]))
            num_best = self._num_promoted_early(rung.num_decided)
            promoted += self._promote(rung, above, num_best, cause=rung.members[number])
        return tuple(promoted)

    def _promote_last(self, bracket: int, rung: Rung, above: Rung) -> tuple[int, ...]:
        """Promote trials of `rung` to the rung `above` once no further trial of the bracket can arrive at `rung`.

        `bracket` is the index of the bracket, a ladder of rungs (numbers of samples at which trials are compared). How
        many trials are promoted follows from the number of all trials that have arrived; failed trials count in this
        number, but are not promoted themselves. Returns the numbers of the promoted trials.
        """
        if not rung.members:
            return ()
        # Failed trials are members of the rung: they are not promoted, but count when the number of promoted trials is
        # computed.
        num_best = self._brackets[bracket].num_promoted(len(rung.members))
        return tuple(self._promote(rung, above, num_best, cause=self._members[bracket][-1]))

    def _last_promoted(self, bracket: int, rung: Rung, above: Rung) -> int | None:
        """The lowest-ranked of the best trials that a rung has promoted to the rung `above`.

        Call it once all trials of the rung have arrived there. A rung is a number of samples at which trials are
        compared, and `bracket` is the index of its bracket (a ladder of rungs). The best trials are as many as the rung
        has to promote. Returns None if the rung has promoted no trial.
        """
        best = rung.ranking.best(self._brackets[bracket].num_promoted(len(rung.members)))
        return next((number for number in reversed(best) if number in above.members), None)

    def _promote(self, rung: Rung, above: Rung, num_best: int, cause: int) -> list[int]:
        """Promote the best `num_best` trials of `rung` to the rung `above`, unless they were promoted before.

        At most `_most_promoted_at_once` of them are promoted. A rung is a number of samples at which trials are
        compared. Only trials on which decisions have been made are ranked. `cause` is the number of the newest trial
        whose first result was needed for this decision; it is stored at the rung `above`, where it decides which
        proposals may use the promoted trials' results. Returns the numbers of the trials that are promoted now.
        """
        promoted = rung.ranking.take(num_best, most=self._most_promoted_at_once)
        for number in promoted:
            above.add(number, cause=cause)
            self._continue(self._entries[number], above.index)
        return promoted

    def _candidate(self, entry: Entry, rung: int, costs: tuple[float, ...]) -> Candidate:
        return Candidate(entry.number, costs, self._violation(entry.number, rung))

    def _prune(self, rung: Rung) -> tuple[int, ...]:
        entries = [self._entries[number] for number in rung.members]
        pruned = [entry for entry in entries if entry.is_waiting and entry.next_rung == rung.index]
        for entry in pruned:
            self._end(entry)
        return tuple(sorted(entry.number for entry in pruned))
