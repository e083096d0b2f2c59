"""Which trial is evaluated at which rung next, and who is promoted: the books that every scheduler keeps.

The table decides and keeps no other books: it is rebuilt from the store's trials, rungs and brackets at every start,
and knows neither SQL nor Ray. When a rung promotes, and which results a proposal may know, is the scheduler's to say
(`schedulers`).

What makes a search repeatable, whatever the number of replicas and wherever it was interrupted, is that nothing
depends on the order in which results come in. A rung has its members in a fixed order, that of their promotion, and
decides with the first k of them once those k are evaluated; a proposal depends on a fixed prefix of the schedule. So
evaluations may overlap, and engines have work while a rung waits for a result.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from search_spaces.fidelity import Bracket
from search_spaces.objectives import Candidate, promotion_order

__all__ = ["Decision", "Entry", "Proposal", "Rung", "RungTable"]


@dataclass
class Entry:
    """A trial in the table."""

    number: int
    bracket: int | None  # None: a source or published recipe, evaluated once at full budget
    next_rung: int  # the rung it is to be evaluated at, or was last evaluated at if `is_waiting`
    costs: dict[int, tuple[float, ...]] = field(default_factory=dict)  # rung -> cost per objective
    is_failed: bool = False
    is_finished: bool = False
    is_waiting: bool = False  # evaluated at `next_rung`, promotion undecided

    def is_evaluated(self, rung: int) -> bool:
        return rung in self.costs or self.is_failed


@dataclass
class Rung:
    """A rung of one bracket.

    `members` maps its trials, in the order in which they came, to the newest trial whose first result it took to bring
    them here; that never falls along the order. The first `num_decided` of them had their say in who is promoted."""

    index: int
    members: dict[int, int] = field(default_factory=dict)
    num_decided: int = 0
    is_closed: bool = False


@dataclass(frozen=True)
class Proposal:
    """The next configuration to be asked for: its trial number, its bracket, and what it may know: pairs of
    (trial, rung) with a stored result. `opens` is the bracket to be stored as open first, if it is its first."""

    number: int
    bracket: int
    visible: tuple[tuple[int, int], ...]
    failed: tuple[int, ...]
    pending: tuple[int, ...]
    opens: Bracket | None


@dataclass(frozen=True)
class Decision:
    """What was decided at a rung of a bracket: who goes on to the next rung, and whose trials end as pruned."""

    bracket: int
    rung: int
    promoted: tuple[int, ...]
    pruned: tuple[int, ...]


class RungTable(ABC):
    """Rungs and brackets of one study.

    `cycle` are brackets that are repeated until `max_trials` configurations are proposed; the first `num_baselines`
    trials are sources and published recipes, evaluated once at the last rung; `max_staleness` is how many trials
    proposals may run ahead of evaluations.
    """

    def __init__(
        self,
        *,
        num_rungs: int,
        eta: int,
        cycle: Sequence[Bracket],
        num_baselines: int,
        max_trials: int,
        max_staleness: int,
    ) -> None:
        self.last_rung = num_rungs - 1
        self._eta = eta
        self._cycle = tuple(cycle)
        self._num_baselines = num_baselines
        self._max_trials = max_trials
        self._max_staleness = max_staleness
        self._entries: dict[int, Entry] = {}
        self._brackets: dict[int, Bracket] = {}
        self._members: dict[int, list[int]] = {}
        self._rungs: dict[int, tuple[Rung, ...]] = {}
        self._is_search_over = False

    # -- what schedulers differ in ---------------------------------------------------------------------------------

    @abstractmethod
    def _num_promoted_early(self, num_decided: int) -> int:
        """How many of a rung's first `num_decided` members are good enough to go on while others may still come."""

    @abstractmethod
    def _later_evaluations(self, number: int, bracket: int) -> Sequence[tuple[int, int]] | None:
        """(trial, rung) of those evaluations beyond the trials' first ones that proposal `number`, of `bracket`, is to
        know; it waits for those that are not done. None: which they are is not decided yet."""

    @abstractmethod
    def position(self) -> tuple[int, int] | None:
        """(bracket, rung) where the search is, for people to look at; None where it is not at one."""

    # -- books -----------------------------------------------------------------------------------------------------

    def open_bracket(self, index: int, *, first_rung: int, size: int) -> None:
        self._brackets[index] = Bracket(size, first_rung, self.last_rung + 1, self._eta)
        self._members[index] = []
        self._rungs[index] = tuple(Rung(rung) for rung in range(first_rung, self.last_rung + 1))

    def add_trial(self, number: int, bracket: int | None) -> None:
        first_rung = self.last_rung if bracket is None else self._brackets[bracket].first_rung
        self._entries[number] = Entry(number, bracket, first_rung)
        if bracket is not None:
            self._members[bracket].append(number)
            self._rungs[bracket][0].members[number] = number

    def record(self, number: int, rung: int, costs: tuple[float, ...]) -> tuple[Decision, ...]:
        """A trial was evaluated at a rung. Returns what that decided."""
        entry = self._entries[number]
        entry.costs[rung] = costs
        entry.next_rung = rung
        if rung == self.last_rung:
            entry.is_finished = True
        else:
            entry.is_waiting = True
        return self._decide_for(entry)

    def fail(self, number: int) -> tuple[Decision, ...]:
        """The trial failed for good. Returns what that decided."""
        entry = self._entries[number]
        entry.is_failed = entry.is_finished = True
        entry.is_waiting = False
        return self._decide_for(entry)

    def end_search(self) -> tuple[int, ...]:
        """No more proposals: a limit was met, or the searcher repeats itself. Open rungs are played to the end.

        Returns the brackets that were not full; they are now as large as they are."""
        self._is_search_over = True
        short = [index for index, members in self._members.items() if len(members) < self.size(index)]
        for index in short:
            self._brackets[index] = replace(self._brackets[index], num_configurations=len(self._members[index]))
        return tuple(short)

    def size(self, bracket: int) -> int:
        return self._brackets[bracket].num_configurations

    # -- decisions -------------------------------------------------------------------------------------------------

    def decide(self, bracket: int) -> tuple[Decision, ...]:
        """Promote and prune wherever the bracket's results allow it. Deciding again changes nothing."""
        decisions = []
        is_complete = self._is_full(bracket)
        for rung, above in itertools.pairwise(self._rungs[bracket]):
            promoted = self._promote_early(rung, above)
            pruned: tuple[int, ...] = ()
            if is_complete and not rung.is_closed and rung.num_decided == len(rung.members):
                promoted += self._promote_last(bracket, rung, above)
                pruned = self._prune(rung)
                rung.is_closed = True
            if promoted or pruned:
                decisions.append(Decision(bracket, rung.index, promoted, pruned))
            is_complete = rung.is_closed
        return tuple(decisions)

    def ready(self) -> Iterator[tuple[int, int]]:
        """Evaluations that may run now, most urgent first: later rungs before first ones, then by number."""
        runnable = [entry for entry in self._entries.values() if not entry.is_finished and not entry.is_waiting]
        runnable.sort(key=lambda entry: (entry.bracket is not None and not entry.costs, entry.number))
        for entry in runnable:
            yield entry.number, entry.next_rung

    def proposal(self) -> Proposal | None:
        """What to ask the searcher next, or None if nothing may be asked yet (or ever: see `is_search_over`)."""
        if self.is_search_over:
            return None
        number = len(self._entries)
        if number < self._num_baselines:
            raise AssertionError("sources and published trials come first")
        visible_up_to = number - self._max_staleness
        known = [entry for entry in self._entries.values() if entry.number <= visible_up_to]
        if not all(entry.costs or entry.is_failed for entry in known):
            return None
        bracket, opens = self._bracket_of_next()
        later = self._later_evaluations(number, bracket)
        if later is None or not all(self._entries[trial].is_evaluated(rung) for trial, rung in later):
            return None
        evaluations = sorted({*((entry.number, min(entry.costs)) for entry in known if entry.costs), *later})
        return Proposal(
            number=number,
            bracket=bracket,
            visible=tuple((trial, rung) for trial, rung in evaluations if rung in self._entries[trial].costs),
            failed=tuple(entry.number for entry in known if entry.is_failed and not entry.costs),
            pending=tuple(sorted(n for n in self._entries if n > visible_up_to)),
            opens=opens,
        )

    @property
    def is_search_over(self) -> bool:
        """True once no further proposal will be made."""
        return self._is_search_over or self.num_proposed >= self._max_trials

    @property
    def is_finished(self) -> bool:
        """True once every trial has ended and no proposal will come."""
        return self.is_search_over and all(entry.is_finished for entry in self._entries.values())

    @property
    def num_proposed(self) -> int:
        return sum(entry.bracket is not None for entry in self._entries.values())

    def waiting(self) -> Mapping[int, int]:
        """Trials evaluated at a rung whose promotion is undecided: number -> rung."""
        return {entry.number: entry.next_rung for entry in self._entries.values() if entry.is_waiting}

    # -- inside ----------------------------------------------------------------------------------------------------

    def _bracket_of_next(self) -> tuple[int, Bracket | None]:
        """The bracket of the next proposal, and its size if it is yet to be opened."""
        newest = max(self._brackets, default=-1)
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

    def _promote_early(self, rung: Rung, above: Rung) -> tuple[int, ...]:
        """Let the members that were evaluated have their say, one after the other in their order."""
        promoted: list[int] = []
        for number, cause in list(rung.members.items())[rung.num_decided :]:
            if not self._entries[number].is_evaluated(rung.index):
                break
            rung.num_decided += 1
            promoted += self._promote(rung, above, self._num_promoted_early(rung.num_decided), cause)
        return tuple(promoted)

    def _promote_last(self, bracket: int, rung: Rung, above: Rung) -> tuple[int, ...]:
        """Promote what the rung still owes after its last member."""
        if not rung.members:
            return ()
        # Failed candidates took part in this rung: they lose, but count for how many are promoted.
        num_best = self._brackets[bracket].num_promoted(len(rung.members))
        return tuple(self._promote(rung, above, num_best, cause=self._members[bracket][-1]))

    def _promote(self, rung: Rung, above: Rung, num_best: int, cause: int) -> list[int]:
        """Send on those of the `num_best` best of the members decided so far that were not sent before."""
        if num_best == 0:
            return []
        decided = [self._entries[number] for number in itertools.islice(rung.members, rung.num_decided)]
        scored = [entry for entry in decided if rung.index in entry.costs]
        order = promotion_order([Candidate(entry.number, entry.costs[rung.index]) for entry in scored])
        promoted = [number for number in order[:num_best] if number not in above.members]
        for number in promoted:
            above.members[number] = cause
            self._entries[number].is_waiting = False
            self._entries[number].next_rung = above.index
        return promoted

    def _prune(self, rung: Rung) -> tuple[int, ...]:
        entries = [self._entries[number] for number in rung.members]
        pruned = [entry for entry in entries if entry.is_waiting and entry.next_rung == rung.index]
        for entry in pruned:
            entry.is_waiting = False
            entry.is_finished = True
        return tuple(sorted(entry.number for entry in pruned))
