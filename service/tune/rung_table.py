"""Which trial is evaluated at which rung next, and who is promoted: synchronous Hyperband over stored results.

The table decides and keeps no other books: it is rebuilt from the store's trials, rungs and brackets at every start,
and knows neither SQL nor Ray. Hyperband: Li et al. 2018 (JMLR 18), bracket sizes as in `search_spaces.fidelity`.

What makes a search repeatable, whatever the number of replicas and wherever it was interrupted, is that a proposal
depends on a fixed prefix of the schedule. Proposal n in bracket b sees
    - every rung of the trials in brackets up to b - 2 (the bracket opens when those are closed), and
    - the first evaluation of all trials numbered up to n - lag (it waits for those).
Later rungs of bracket b - 1 and anything newer than the lag stay hidden, even if they are known already. So the
evaluations of two brackets may overlap, and engines have work while a rung waits for its last trial.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from search_spaces.fidelity import Bracket
from search_spaces.objectives import Candidate, promotion_order

__all__ = ["Closing", "Proposal", "RungTable"]


@dataclass
class _Entry:
    number: int
    bracket: int | None  # None: a source or published recipe, evaluated once at full budget
    next_rung: int  # the rung it is to be evaluated at, or was last evaluated at if `is_waiting`
    costs: dict[int, tuple[float, ...]] = field(default_factory=dict)  # rung -> cost per objective
    is_failed: bool = False
    is_finished: bool = False
    is_waiting: bool = False  # evaluated at `next_rung`, promotion undecided


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
class Closing:
    """A rung of a bracket that has just closed: who goes on to the next rung, and whose trials end as pruned."""

    bracket: int
    rung: int
    promoted: tuple[int, ...]
    pruned: tuple[int, ...]


class RungTable:
    """Rungs and brackets of one study.

    `cycle` are the brackets of one Hyperband iteration, repeated until `max_trials` configurations are proposed;
    `num_extras` trials (numbers 0 ..) are sources and published recipes, evaluated once at the last rung; `lag` is
    how far, in trials, evaluations may trail behind proposals.
    """

    def __init__(
        self, *, num_rungs: int, eta: int, cycle: Sequence[Bracket], num_extras: int, max_trials: int, lag: int
    ) -> None:
        self.last_rung = num_rungs - 1
        self._eta = eta
        self._cycle = tuple(cycle)
        self._num_extras = num_extras
        self._max_trials = max_trials
        self._lag = lag
        self._entries: dict[int, _Entry] = {}
        self._brackets: dict[int, Bracket] = {}
        self._members: dict[int, list[int]] = {}
        self._is_search_over = False

    # -- books -----------------------------------------------------------------------------------------------------

    def open_bracket(self, index: int, *, first_rung: int, size: int) -> None:
        self._brackets[index] = Bracket(size, first_rung, self.last_rung + 1, self._eta)
        self._members.setdefault(index, [])

    def add_trial(self, number: int, bracket: int | None) -> None:
        first_rung = self.last_rung if bracket is None else self._brackets[bracket].first_rung
        self._entries[number] = _Entry(number, bracket, first_rung)
        if bracket is not None:
            self._members[bracket].append(number)

    def record(self, number: int, rung: int, costs: tuple[float, ...]) -> Closing | None:
        """A rung was finished. Returns what it closed, if it was the last of its bracket's rung."""
        entry = self._entries[number]
        entry.costs[rung] = costs
        entry.next_rung = rung
        if rung == self.last_rung:
            entry.is_finished = True
        else:
            entry.is_waiting = True
        return self._close(entry)

    def fail(self, number: int) -> Closing | None:
        """The trial failed for good. Returns what that closed."""
        entry = self._entries[number]
        entry.is_failed = entry.is_finished = True
        entry.is_waiting = False
        return self._close(entry)

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
        if number < self._num_extras:
            raise AssertionError("sources and published trials come first")
        visible_up_to = number - self._lag
        known = [entry for entry in self._entries.values() if entry.number <= visible_up_to]
        if not all(entry.costs or entry.is_failed for entry in known):
            return None
        bracket, opens = self._bracket_of_next()
        if not all(self._is_closed(index) for index in self._brackets if index <= bracket - 2):
            return None
        visible = [
            (entry.number, rung)
            for entry in known
            for rung in sorted(entry.costs)
            if entry.bracket is None or entry.bracket <= bracket - 2 or rung == min(entry.costs)
        ]
        return Proposal(
            number=number,
            bracket=bracket,
            visible=tuple(visible),
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

    def position(self) -> tuple[int, int] | None:
        """(bracket, rung) of the oldest bracket still open, for people to look at."""
        for index in sorted(self._brackets):
            if open_rungs := [self._entries[n].next_rung for n in self._members[index] if not self._done(n)]:
                return index, min(open_rungs)
        return None

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

    def _done(self, number: int) -> bool:
        return self._entries[number].is_finished

    def _is_closed(self, bracket: int) -> bool:
        members = self._members[bracket]
        return self._is_full(bracket) and all(self._done(number) for number in members)

    def _is_full(self, bracket: int) -> bool:
        return len(self._members[bracket]) >= self.size(bracket)

    def _close(self, entry: _Entry) -> Closing | None:
        """Decide promotions of the entry's rung once every member of it has been evaluated."""
        if entry.bracket is None:
            return None
        return self.close_rung(entry.bracket)

    def close_rung(self, bracket: int) -> Closing | None:
        """Promote from the bracket's current rung if it is complete. Returns None while it is not."""
        if not self._is_full(bracket):
            return None
        entries = [self._entries[number] for number in self._members[bracket]]
        waiting = [entry for entry in entries if entry.is_waiting]
        if not waiting or any(not entry.is_waiting and not entry.is_finished for entry in entries):
            return None
        rung = waiting[0].next_rung
        # Failed candidates took part in this rung: they lose, but count for how many are promoted.
        at_rung = len(waiting) + sum(entry.is_failed and entry.next_rung == rung for entry in entries)
        order = promotion_order([Candidate(entry.number, entry.costs[rung]) for entry in waiting])
        promoted = order[: self._brackets[bracket].num_promoted(at_rung)]
        pruned = order[len(promoted) :]
        for number in promoted:
            self._entries[number].is_waiting = False
            self._entries[number].next_rung = rung + 1
        for number in pruned:
            self._entries[number].is_waiting = False
            self._entries[number].is_finished = True
        return Closing(bracket, rung, promoted, tuple(sorted(pruned)))
