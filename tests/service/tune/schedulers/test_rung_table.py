"""The rung table alone, without store or searcher: next evaluations, promotions, and results that a proposal knows."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.fidelity import Bracket, Scheduler, bracket_cycle
from search_spaces.objectives import Candidate, promotion_order
from service.errors import Conflict
from service.resolved_study import ResolvedStudy
from service.studies.preflight.models import check_unchanged
from service.tune.schedulers import SCHEDULERS
from service.tune.schedulers.base import Decision, Proposal, RungTable
from service.types import JobRecord, JobState
from tests.service.resolved import resolved_study


def table_of(
    *,
    max_trials: int,
    scheduler: Scheduler = "hyperband",
    num_rungs: int = 3,
    baselines: int = 0,
    max_staleness: int = 1,
    waits_for_baselines: bool = False,
    batch: int = 1,
    violation: Callable[[int, int], float] = lambda number, rung: 0.0,
    version: int | None = None,
) -> RungTable:
    """A table with its baselines added, none of them evaluated. eta is 3."""
    table = SCHEDULERS[scheduler](
        num_rungs=num_rungs,
        eta=3,
        cycle=bracket_cycle(scheduler, num_rungs=num_rungs, eta=3, max_trials=max_trials),
        num_baselines=baselines,
        max_trials=max_trials,
        max_staleness=max_staleness,
        waits_for_baselines=waits_for_baselines,
        batch=batch,
        violation=violation,
        version=version,
    )
    for number in range(baselines):
        table.add_trial(number, None)
    return table


def propose(table: RungTable) -> int | None:
    """Take the next proposal as the driver does: open its bracket, add its trial."""
    proposal = table.proposal()
    if proposal is None:
        return None
    if proposal.opens is not None:
        table.open_bracket(
            proposal.bracket, first_rung=proposal.opens.first_rung, size=proposal.opens.num_configurations
        )
    table.add_trial(proposal.number, proposal.bracket)
    return proposal.number


def filled(size: int, **settings: Any) -> RungTable:
    """A table whose first bracket has its `size` trials, none of them evaluated."""
    table = table_of(max_trials=size, max_staleness=size, **settings)
    assert [propose(table) for _ in range(size)] == list(range(size))
    return table


def decisions(table: RungTable, outcomes: list[float | None], rung: int) -> list[tuple[Decision, ...]]:
    """Decisions after the cost (or failure) of each trial was recorded, in order."""
    return [
        table.fail(number) if cost is None else table.record(number, rung, (cost,))
        for number, cost in enumerate(outcomes)
    ]


def play(table: RungTable, cost: Callable[[int], float] = float) -> list[Decision]:
    """Propose and evaluate trials one at a time until the table is finished; returns its decisions."""
    decided: list[Decision] = []
    while not table.is_finished:
        while propose(table) is not None:
            pass
        number, rung = next(table.ready())
        decided += table.record(number, rung, (cost(number),))
    return decided


# Promotion.


def test_rung_promotes_one_in_eta() -> None:
    """A rung closes with its last trial and promotes one in eta, the lowest cost first."""
    table = filled(9)
    *earlier, last = decisions(table, [9, 2, 8, 1, 7, 3, 6, 5, 4], rung=0)
    assert earlier == [()] * 8
    assert last == (Decision(bracket=0, rung=0, promoted=(3, 1, 5), pruned=(0, 2, 4, 6, 7, 8)),)
    assert last[0].rival == 5, "the last one that is promoted"
    assert sorted(table.ready()) == [(1, 1), (3, 1), (5, 1)]


def test_equal_costs_are_promoted_by_trial_number() -> None:
    assert decisions(filled(9), [0.5] * 9, rung=0)[-1] == (Decision(0, 0, (0, 1, 2), (3, 4, 5, 6, 7, 8)),)


def test_several_objectives_are_promoted_by_front_before_mean() -> None:
    table = filled(3)
    # 0 is dominated by 1; 1 and 2 are the front, both ends of it, so that the number decides.
    for number, costs in enumerate([(0.5, 0.5), (0.4, 0.4), (0.0, 1.0)]):
        decided = table.record(number, 0, costs)
    assert decided == (Decision(0, 0, promoted=(1,), pruned=(0, 2)),)


@pytest.mark.parametrize(
    ("outcomes", "promoted"),
    [
        # Failed candidates lose but count: 9 took part, so 3 go on, as long as there are 3.
        ([None, 2, 3, 4, 5, 6, 7, 8, 9], (1, 2, 3)),
        ([None, None, None, None, None, 3, 2, 1, None], (7, 6, 5)),
        ([None] * 7 + [2, 1], (8, 7)),
        ([None] * 8 + [1], (8,)),
    ],
)
def test_failed_trials_count_for_promotions(outcomes: list[float | None], promoted: tuple[int, ...]) -> None:
    """Failed trials count for the number of promotions and are never promoted."""
    (decision,) = decisions(filled(9), outcomes, rung=0)[-1]
    assert decision.promoted == promoted
    assert set(decision.pruned).isdisjoint({number for number, cost in enumerate(outcomes) if cost is None})


def test_a_failure_that_comes_last_closes_the_rung() -> None:
    decided = decisions(filled(9), [1, 2, 3, 4, 5, 6, 7, 8, None], rung=0)[-1]
    assert decided == (Decision(0, 0, (0, 1, 2), (3, 4, 5, 6, 7)),)


def test_a_bracket_of_failures_ends_without_a_promotion() -> None:
    table = filled(9)
    assert decisions(table, [None] * 9, rung=0) == [()] * 9
    assert table.is_finished
    assert list(table.ready()) == []


def test_failed_promotion_frees_no_place() -> None:
    """A promoted trial that fails frees no place for a pruned one."""
    table = filled(9)
    decisions(table, [1, 2, 3, 4, 5, 6, 7, 8, 9], rung=0)
    assert [table.fail(0), table.fail(1)] == [(), ()]
    assert table.record(2, 1, (0.3,)) == (Decision(0, 1, promoted=(2,), pruned=()),)
    assert table.record(2, 2, (0.3,)) == ()
    assert table.is_finished


def test_a_waiting_trial_is_neither_ready_nor_finished() -> None:
    table = filled(9)
    table.record(0, 0, (0.1,))
    assert table.waiting() == {0: 0}
    assert (0, 0) not in table.ready()
    assert not table.is_finished


def test_lost_decision_is_made_again() -> None:
    """A decision lost before it was stored is made again from the same books.

    A driver that died at a promotion rebuilds the table from what is stored.
    """
    costs = [9, 2, 8, 1, 7, 3, 6, 5, 4]
    first = decisions(filled(9), list(costs), rung=0)[-1]
    again = filled(9)
    found = [again.record(number, 0, (costs[number],)) for number in reversed(range(9))]
    assert found[-1] == first
    assert again.decide(0) == ()  # decided once only


# Order of evaluations.


def test_order_of_evaluations() -> None:
    """Later rungs precede first ones, and baselines precede both."""
    table = table_of(max_trials=14, baselines=1, max_staleness=15)
    for _ in range(14):
        propose(table)
    assert list(table.ready())[:2] == [(0, 2), (1, 0)]
    table.record(0, 2, (0.5,))
    for number in range(1, 10):
        table.record(number, 0, (number / 10,))
    assert list(table.ready()) == [(1, 1), (2, 1), (3, 1), (10, 1), (11, 1), (12, 1), (13, 1), (14, 1)]


def test_promoted_trial_precedes_older_one() -> None:
    """A promoted trial precedes an older one without a result."""
    table = table_of(max_trials=14, max_staleness=14)
    for _ in range(14):
        propose(table)
    for number in range(9, 14):
        table.record(number, 1, (number / 100,))
    assert list(table.ready())[:2] == [(9, 2), (0, 0)]


def test_baselines_belong_to_no_bracket() -> None:
    """Baselines are evaluated once at the last rung and belong to no bracket."""
    table = table_of(max_trials=3, baselines=2)
    assert list(table.ready()) == [(0, 2), (1, 2)]
    assert table.num_proposed == 0
    assert table.record(0, 2, (0.1,)) == ()
    assert list(table.ready()) == [(1, 2)]


def test_position_is_the_oldest_open_bracket() -> None:
    """The position is the oldest open bracket at its lowest rung."""
    table = table_of(max_trials=14, max_staleness=14)
    assert table.position() is None
    for _ in range(14):
        propose(table)
    assert table.position() == (0, 0)
    for number in range(9):
        table.record(number, 0, (number / 10,))
    assert table.position() == (0, 1)
    for number in (0, 1, 2):
        table.record(number, 1, (number / 10,))
    table.record(0, 2, (0.0,))
    assert table.position() == (1, 1)


# What proposals wait for and may know.


def test_proposal_waits_for_the_lag() -> None:
    """A proposal waits for the first result of the trial one lag before it."""
    table = table_of(max_trials=9, max_staleness=2)
    assert [propose(table), propose(table)] == [0, 1]
    assert propose(table) is None  # trial 2 may know trial 0, which has no result
    table.record(1, 0, (0.1,))
    assert propose(table) is None
    table.record(0, 0, (0.2,))
    assert [propose(table), propose(table), propose(table)] == [2, 3, None]


def test_a_failure_is_a_first_result_too() -> None:
    table = table_of(max_trials=9, max_staleness=1)
    propose(table)
    assert table.proposal() is None
    table.fail(0)
    proposal = table.proposal()
    assert proposal is not None
    assert (proposal.visible, proposal.failed, proposal.pending) == ((), (0,), ())


def test_proposal_sees_nothing_newer() -> None:
    """A proposal sees nothing newer than the lag, even if it is known."""
    table = table_of(max_trials=9, max_staleness=3)
    for _ in range(3):
        propose(table)
    for number in (2, 1, 0):
        table.record(number, 0, (number / 10,))
    proposal = table.proposal()
    assert proposal is not None
    assert proposal.number == 3
    assert proposal.visible == ((0, 0),)
    assert proposal.pending == (1, 2)


def test_baselines_are_visible_at_the_last_rung_and_waited_for() -> None:
    table = table_of(max_trials=3, baselines=2, max_staleness=1)
    table.record(0, 2, (0.1,))
    assert table.proposal() is None
    table.record(1, 2, (0.2,))
    proposal = table.proposal()
    assert proposal is not None
    assert (proposal.number, proposal.visible) == (2, ((0, 2), (1, 2)))


def test_proposal_before_baselines_fails() -> None:
    """A proposal before the baselines are added is a programming error."""
    table = SCHEDULERS["none"](
        num_rungs=1,
        eta=3,
        cycle=(Bracket(1, first_rung=0, num_rungs=1, eta=3),),
        num_baselines=1,
        max_trials=1,
        max_staleness=1,
    )
    with pytest.raises(AssertionError, match="baselines come first"):
        table.proposal()


def test_older_brackets_are_seen() -> None:
    """Later rungs of the bracket before stay hidden; those of older brackets are seen.

    Brackets of 9, 5 and 3; the proposals of bracket 1 see only first results of bracket 0, those of 2 all of it.
    """
    table = table_of(max_trials=17, max_staleness=1)
    seen = {}
    while not table.is_finished:
        while (proposal := table.proposal()) is not None:
            seen[proposal.number] = proposal
            propose(table)
        number, rung = next(table.ready())
        table.record(number, rung, (number / 100,))
    first = tuple((number, 0) for number in range(9))
    assert seen[9].bracket == 1
    assert seen[9].visible == first
    assert seen[10].visible == (*first, (9, 1))
    assert seen[14].bracket == 2
    everything = ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), *first[3:])
    assert seen[14].visible == (*everything, *((number, 1) for number in range(9, 14)))


def test_bracket_opens_after_two_closed() -> None:
    """A bracket opens only when the brackets up to the one two before it are closed."""
    table = table_of(max_trials=17, max_staleness=1)
    for number in range(9):
        assert propose(table) == number
        table.record(number, 0, (number / 10,))
    for number in range(9, 14):  # bracket 1 is filled while bracket 0 climbs
        assert propose(table) == number
        table.record(number, 1, (number / 100,))
    assert table.proposal() is None
    for number in (0, 1, 2):
        table.record(number, 1, (number / 10,))
    assert table.proposal() is None  # trial 0 is still to be evaluated at the last rung
    table.record(0, 2, (0.0,))
    proposal = table.proposal()
    assert proposal is not None
    assert (proposal.bracket, proposal.opens) == (2, Bracket(3, first_rung=2, num_rungs=3, eta=3))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_searcher_that_waits_for_baselines_knows_all_of_them(scheduler: Scheduler) -> None:
    def first_known(waits_for_baselines: bool) -> tuple[int, Proposal]:
        """Number of ended baselines when the first proposal may be requested, and that proposal."""
        table = table_of(
            max_trials=4, scheduler=scheduler, baselines=5, max_staleness=3, waits_for_baselines=waits_for_baselines
        )
        for number in range(5):
            if (proposal := table.proposal()) is not None:
                return number, proposal
            if number == 1:
                table.fail(number)
            else:
                table.record(number, 2, (0.5,))
        proposal = table.proposal()
        assert proposal is not None
        return 5, proposal

    assert first_known(waits_for_baselines=False)[0] == 3
    ended, proposal = first_known(waits_for_baselines=True)
    assert ended == 5
    assert (proposal.visible, proposal.failed, proposal.pending) == (((0, 2), (2, 2), (3, 2), (4, 2)), (1,), ())


def test_only_the_baselines_are_waited_for() -> None:
    table = table_of(max_trials=6, baselines=2, max_staleness=3, waits_for_baselines=True)
    table.record(0, 2, (0.5,))
    assert propose(table) is None
    table.record(1, 2, (0.5,))
    assert [propose(table) for _ in range(4)] == [2, 3, 4, None]  # 5 needs the result of 2


@pytest.mark.parametrize("waits_for_baselines", [False, True])
@pytest.mark.parametrize("max_staleness", [1, 2, 5, 9])
@pytest.mark.parametrize("scheduler", [name for name in SCHEDULERS if name != "none"])
def test_order_of_results_is_not_seen(scheduler: Scheduler, max_staleness: int, waits_for_baselines: bool) -> None:
    """The observations of a proposal do not depend on the order of results."""
    settings: dict[str, Any] = {"max_staleness": max_staleness, "waits_for_baselines": waits_for_baselines}

    def seen(pick: Callable[[list[tuple[int, int]]], tuple[int, int]]) -> dict[int, Any]:
        table, proposals = table_of(max_trials=25, scheduler=scheduler, baselines=2, **settings), {}
        while not table.is_finished:
            while (proposal := table.proposal()) is not None:
                proposals[proposal.number] = proposal
                propose(table)
            number, rung = pick(list(table.ready()))
            if number % 7 == 3:
                table.fail(number)
            else:
                table.record(number, rung, (number * 37 % 11 / 11,))
        return proposals

    in_order, backwards, middle = (seen(pick) for pick in (lambda r: r[0], lambda r: r[-1], lambda r: r[len(r) // 2]))
    assert len(in_order) == 25
    assert in_order == backwards == middle


# The end of the search.


@pytest.mark.parametrize(
    ("max_trials", "sizes"),
    [(1, [1]), (4, [4]), (9, [9]), (11, [9, 2]), (17, [9, 5, 3]), (20, [9, 5, 3, 3]), (30, [9, 5, 3, 9, 4])],
)
def test_last_bracket_is_cut(max_trials: int, sizes: list[int]) -> None:
    """The cycle repeats, and the last bracket is cut to `max_trials`."""
    table = table_of(max_trials=max_trials)
    play(table)
    assert table.num_proposed == max_trials
    assert [table.size(bracket) for bracket in range(len(sizes))] == sizes


@pytest.mark.parametrize(("cut", "climb"), [(1, [1, 1]), (2, [1, 1]), (4, [1, 1]), (6, [2, 1]), (9, [3, 1])])
def test_a_cut_bracket_still_brings_one_trial_to_the_last_rung(cut: int, climb: list[int]) -> None:
    assert [len(decision.promoted) for decision in play(table_of(max_trials=cut))] == climb


def test_more_trials_open_a_new_bracket() -> None:
    """A larger `max_trials` opens a new bracket and leaves the cut one unchanged."""
    before = table_of(max_trials=4, max_staleness=4)
    play(before)
    after = table_of(max_trials=8, max_staleness=4)
    after.open_bracket(0, first_rung=0, size=before.size(0))
    for number in range(4):
        after.add_trial(number, 0)
    assert decisions(after, [0, 1, 2, 3], rung=0)[-1] == (Decision(0, 0, (0,), (1, 2, 3)),)
    after.record(0, 1, (0.0,))
    after.record(0, 2, (0.0,))
    proposal = after.proposal()
    assert proposal is not None
    assert (proposal.number, proposal.bracket) == (4, 1)
    assert proposal.opens == Bracket(4, first_rung=1, num_rungs=3, eta=3)


def test_end_cuts_open_brackets() -> None:
    """The end of the search cuts open brackets and finishes them."""
    table = table_of(max_trials=100, max_staleness=9)
    for _ in range(4):
        propose(table)
    for number in range(4):
        assert table.record(number, 0, (number / 10,)) == ()  # the bracket was to have nine
    assert table.end_search() == (0,)
    assert table.size(0) == 4
    assert table.is_search_over
    assert table.proposal() is None
    assert table.decide(0) == (Decision(0, 0, promoted=(0,), pruned=(1, 2, 3)),)
    assert table.record(0, 1, (0.0,)) == (Decision(0, 1, promoted=(0,), pruned=()),)
    assert table.record(0, 2, (0.0,)) == ()
    assert table.is_finished


def test_end_waits_for_running_trials() -> None:
    """A rung stays open after the end of the search until its running trials have results."""
    table = table_of(max_trials=100, max_staleness=9)
    for _ in range(4):
        propose(table)
    assert table.end_search() == (0,)
    assert decisions(table, [3, 2, None], rung=0) == [()] * 3
    assert not table.is_finished
    assert table.record(3, 0, (0.0,)) == (Decision(0, 0, promoted=(3,), pruned=(0, 1)),)


def test_second_end_changes_nothing() -> None:
    """A second end of the search, or one with full brackets, changes nothing."""
    table = filled(9)
    assert table.end_search() == ()
    assert table.size(0) == 9


def test_a_bracket_that_was_opened_and_has_no_trial_ends_empty() -> None:
    table = table_of(max_trials=9)
    table.open_bracket(0, first_rung=0, size=9)
    assert table.end_search() == (0,)
    assert table.decide(0) == ()
    assert table.is_finished
    assert table.position() is None


@pytest.mark.parametrize("scheduler", ["none", "hyperband"])
def test_one_rung_needs_no_promotion_and_no_waiting_for_brackets(scheduler: Scheduler) -> None:
    table = table_of(max_trials=4, scheduler=scheduler, num_rungs=1, max_staleness=4)
    assert [propose(table) for _ in range(4)] == [0, 1, 2, 3]
    assert table.position() is None
    assert play(table) == []
    assert table.is_finished


# ASHA.


def asha_of(size: int, **settings: Any) -> RungTable:
    """An ASHA table with `size` proposed trials, none of them evaluated."""
    return filled(size, scheduler="asha", **settings)


def test_asha_promotes_at_once() -> None:
    """ASHA promotes with every result that makes a trial one of the best.

    One in eta of what the rung holds: after three results the best, after six the two best. A better one that comes
    late goes on as well, although that makes three of seven.
    """
    decided = decisions(asha_of(10), [5, 3, 4, 6, 7, 2, 1], rung=0)
    assert [[decision.promoted for decision in found] for found in decided] == [[], [], [(1,)], [], [], [(5,)], [(6,)]]
    assert [number for number, rung in asha_ready(10, [5, 3, 4, 6, 7, 2, 1]) if rung == 1] == [1, 5, 6]


def asha_ready(size: int, costs: list[float | None]) -> list[tuple[int, int]]:
    table = asha_of(size)
    decisions(table, costs, rung=0)
    return list(table.ready())


def test_asha_counts_in_order_of_trials() -> None:
    """ASHA counts a rung in the order of its trials, whenever their results arrive."""
    table = asha_of(9)
    costs = [5, 3, 4, 6, 7, 2]
    assert [table.record(number, 0, (costs[number],)) for number in (5, 4, 3, 2, 1)] == [()] * 5
    assert table.record(0, 0, (5,)) == (Decision(0, 0, promoted=(1, 5), pruned=()),)


def test_asha_prunes_a_rung_when_nobody_can_come_to_it_any_more() -> None:
    table = asha_of(6)
    costs: list[float | None] = [5, 3, 4, 6, 7, 2]
    (last,) = decisions(table, costs, rung=0)[-1]
    assert last == Decision(0, 0, promoted=(5,), pruned=(0, 2, 3, 4))
    assert last.rival == 1, "promoted early, and the last one of the two best"
    assert table.record(5, 1, (2.0,)) == ()
    # The second rung holds two: one in three of them is none, so the best goes on at the end.
    assert table.record(1, 1, (3.0,)) == (Decision(0, 1, promoted=(5,), pruned=(1,)),)
    table.record(5, 2, (2.0,))
    assert table.is_finished


def test_asha_never_promotes_failures() -> None:
    """Failures count as members of an ASHA rung and are never promoted."""
    table = asha_of(9)
    assert decisions(table, [None, 2, None], rung=0)[-1] == (Decision(0, 0, promoted=(1,), pruned=()),)
    assert decisions(asha_of(3), [None] * 3, rung=0) == [()] * 3


def test_asha_cascades() -> None:
    """ASHA promotes through several rungs where their results exist."""
    table = asha_of(4)
    assert decisions(table, [2, 1, 3], rung=0)[-1] == (Decision(0, 0, promoted=(1,), pruned=()),)
    assert table.record(1, 1, (1.0,)) == ()
    assert table.record(3, 0, (4.0,)) == (Decision(0, 0, (), (0, 2, 3)), Decision(0, 1, (1,), ()))


def test_asha_early_end_reaches_last_rung() -> None:
    """An ASHA search that ends early brings one trial to the last rung."""
    table = table_of(max_trials=50, scheduler="asha", max_staleness=9)
    for _ in range(2):
        propose(table)
    assert decisions(table, [2, 1], rung=0) == [(), ()]
    assert table.end_search() == (0,)
    assert table.decide(0) == (Decision(0, 0, (1,), (0,)),)
    assert table.record(1, 1, (1.0,)) == (Decision(0, 1, (1,), ()),)
    table.record(1, 2, (1.0,))
    assert table.is_finished


def test_asha_sees_promotions_after_two_lags() -> None:
    """A second evaluation under ASHA is seen two lags after the result that caused it.

    Trial 2 is promoted by its own result: proposal 6 = 2 + 2 lags waits for its second evaluation. Trial 1 is
    promoted by the result of trial 5, which is hidden from 6 even if it is there.
    """
    table = table_of(max_trials=20, scheduler="asha", max_staleness=2)
    seen: dict[int, Proposal] = {}

    def take_all() -> None:
        while (proposal := table.proposal()) is not None:
            seen[proposal.number] = proposal
            propose(table)

    for number in range(6):
        take_all()
        table.record(number, 0, ((3 - number) / 10 if number < 3 else number,))
    take_all()
    assert max(seen) == 5
    assert list(table.ready()) == [(1, 1), (2, 1)]
    table.record(1, 1, (0.2,))
    assert table.proposal() is None
    table.record(2, 1, (0.1,))
    take_all()
    assert (2, 1) not in seen[5].visible
    assert seen[6].visible == ((0, 0), (1, 0), (2, 0), (2, 1), (3, 0), (4, 0))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("num_objectives", "version"), [(1, None), (2, 1)])
def test_asha_promotes_whom_one_worker_of_the_paper_would(num_objectives: int, version: int | None, seed: int) -> None:
    """Algorithm 2 with a single worker: promote from the highest rung that can, else start a new configuration.

    Since version 2, a decision promotes one trial, also if several are promotable, as with several objectives.
    """
    draw = random.Random(seed)
    costs = [tuple(draw.randrange(20) / 20 for _ in range(num_objectives)) for _ in range(40)]
    held: list[list[int]] = [[], [], []]
    sent: list[list[int]] = [[], []]

    def promotable(rung: int) -> list[int]:
        order = promotion_order([Candidate(number, costs[number]) for number in held[rung]])
        return [number for number in order[: len(held[rung]) // 3] if number not in sent[rung]]

    while (rung := next((rung for rung in (1, 0) if promotable(rung)), None)) is not None or len(held[0]) < len(costs):
        if rung is None:
            held[0].append(len(held[0]))
        else:
            number = promotable(rung)[0]
            sent[rung].append(number)
            held[rung + 1].append(number)
    table = table_of(max_trials=100, scheduler="asha", max_staleness=100, version=version)
    for _ in costs:
        propose(table)
    climbed: list[list[int]] = [[], []]
    while ready := list(table.ready()):
        number, rung = draw.choice(ready)
        for decision in table.record(number, rung, costs[number]):
            climbed[decision.rung] += decision.promoted
    assert [sorted(numbers) for numbers in climbed] == [sorted(numbers) for numbers in sent]


def test_asha_promotes_one_trial_at_once() -> None:
    """Several objectives, since version 2; nevertheless a rung promotes one in eta."""

    def promotions(version: int | None, seed: int) -> list[list[int]]:
        """Numbers of trials that decisions of each rung but the last promote, the last decision of a rung included."""
        table = asha_of(60, version=version)
        found: list[list[int]] = [[], []]
        while (ready := next(table.ready(), None)) is not None:
            number, rung = ready
            costs = tuple(random.Random(f"{seed} {number} {rung} {axis}").random() for axis in range(4))
            for decision in table.record(number, rung, costs):
                found[decision.rung].append(len(decision.promoted))
                assert not decision.pruned or decision.rival is not None
        assert table.is_finished
        return found

    early, late = ([promotions(version, seed) for seed in range(5)] for version in (1, None))
    assert max(number for found in early for numbers in found for number in numbers) > 1
    assert max(number for found in late for numbers in found for number in numbers) == 1
    for first, second in (map(sum, found) for found in late):
        assert first >= 60 // 3
        assert second >= first // 3


def test_a_study_keeps_the_version_of_its_scheduler() -> None:
    """A study without a version, of an earlier program, has version 1; later versions are refused."""
    stored = resolved_study(scheduler_version=2)
    assert ResolvedStudy.from_json(stored.to_json()).scheduler_version == 2
    earlier = {key: value for key, value in stored.to_json().items() if key != "scheduler_version"}
    assert ResolvedStudy.from_json(earlier).scheduler_version == 1
    job = JobRecord("1", "merge-code", JobState.STOPPED, {}, earlier, 0.0, "search")
    check_unchanged(job, stored)
    later = replace(job, accepted=resolved_study(scheduler_version=9).to_json())
    with pytest.raises(Conflict, match=r"'merge-code': was created with version 9 of its scheduler, .* up to 2"):
        check_unchanged(later, stored)


def test_a_requested_trial_may_take_a_number_of_a_batch() -> None:
    """A trial in no bracket that is the first of a batch of proposals does not end the search."""
    table = table_of(max_trials=9, baselines=1, max_staleness=9, batch=2)
    assert [propose(table), propose(table)] == [1, 2]
    table.add_trial(3, None)
    assert [propose(table), propose(table)] == [4, 5]
