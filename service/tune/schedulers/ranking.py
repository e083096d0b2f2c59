"""The order of promotion within a rung, updated incrementally with each new trial.

The function `search_spaces.objectives.promotion_order` gives the same order, but sorts all trials (candidates) anew.
Here, a candidate is inserted into the fronts that exist, as in Li et al., "Efficient Nondomination Level Update Method
for Steady-State Evolutionary Multiobjective Optimization" (IEEE Transactions on Cybernetics 47, 2017): a candidate that
dominates others moves them one front back. Only the fronts that were requested so far are computed; all other
candidates are kept together, unsorted.
"""

from __future__ import annotations

from bisect import bisect_right, insort
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from search_spaces.objectives import Candidate, Costs, crowding_distances, non_dominated

__all__ = ["Ranking"]

Points: TypeAlias = NDArray[np.float64]


class Ranking:
    """The order of promotion of the trials at one rung; trials are added one by one, as candidates.

    A rung is a number of samples at which trials are compared, and the best trials are promoted. Trials that meet all
    constraints come first, then trials that violate constraints. Trials that failed must not be added.
    """

    def __init__(self) -> None:
        self._feasible: _Order | None = None
        self._infeasible = _Line()

    def add(self, candidate: Candidate) -> None:
        assert candidate.costs is not None, "a failed candidate has no place in the order"
        if candidate.violation > 0:
            self._infeasible.add(candidate.number, (candidate.violation,))
            return
        if self._feasible is None:
            self._feasible = _Line() if len(candidate.costs) == 1 else _Fronts(len(candidate.costs))
        self._feasible.add(candidate.number, candidate.costs)

    def take(self, count: int, *, most: int | None = None) -> list[int]:
        """The numbers of the best `count` trials, in order of promotion, without trials that an earlier call returned.

        If an earlier call returned some of the best `count` trials, the result has fewer than `count` numbers. At most
        `most` numbers are returned; None is no limit.
        """
        most = count if most is None else most
        if self._feasible is None:
            return self._infeasible.take(count, most=most)
        taken = self._feasible.take(count, most=most)
        return taken + self._infeasible.take(count - len(self._feasible), most=most - len(taken))

    def best(self, count: int) -> list[int]:
        """The numbers of the best `count` trials, or of all trials if there are fewer, in order of promotion."""
        found = [] if self._feasible is None else self._feasible.best(count)
        return found + self._infeasible.best(count - len(found))


class _Order(Protocol):
    """Interface of classes that keep trials in the order of promotion, which their costs determine.

    The method `best` returns the best trials. The method `take` does the same, but leaves out trials that it has
    returned before, and returns at most `most` trials.
    """

    def __len__(self) -> int: ...

    def add(self, number: int, costs: Costs) -> None: ...

    def take(self, count: int, *, most: int) -> list[int]: ...

    def best(self, count: int) -> list[int]: ...


class _Line:
    """Trials of a single-objective study in the order of promotion: by cost, then trial number."""

    def __init__(self) -> None:
        self._all: list[tuple[float, int]] = []
        self._left: list[tuple[float, int]] = []  # those that were not taken

    def __len__(self) -> int:
        return len(self._all)

    def add(self, number: int, costs: Costs) -> None:
        insort(self._all, (costs[0], number))
        insort(self._left, (costs[0], number))

    def take(self, count: int, *, most: int) -> list[int]:
        if count <= 0 or not self._all:
            return []
        last = self._all[min(count, len(self._all)) - 1]
        stop = min(most, bisect_right(self._left, last))
        taken, self._left = self._left[:stop], self._left[stop:]
        return [number for _, number in taken]

    def best(self, count: int) -> list[int]:
        return [number for _, number in self._all[: max(0, count)]]


class _Fronts:
    """Trials with several objectives in the order of promotion: by front, crowding distance, then trial number.

    The trials are candidates for promotion; each has `num_costs` costs. The first front consists of the candidates that
    no other candidate dominates. The second front consists of the candidates that are dominated only by candidates of
    the first front, and so on. Within a front, a larger crowding distance comes first. `_fronts` has the first fronts.
    `_rest` has the candidates behind them, which are not divided into fronts yet. In both lists, a candidate is given
    by its index in the order of arrival.
    """

    def __init__(self, num_costs: int) -> None:
        self._numbers: list[int] = []
        self._costs: Points = np.empty((16, num_costs))
        self._is_taken: NDArray[np.bool_] = np.zeros(16, dtype=bool)
        self._fronts: list[NDArray[np.intp]] = []
        self._rest: NDArray[np.intp] = np.empty(0, dtype=np.intp)

    def __len__(self) -> int:
        return len(self._numbers)

    def add(self, number: int, costs: Costs) -> None:
        place = len(self._numbers)
        if place == len(self._costs):
            self._costs = np.concatenate([self._costs, np.empty_like(self._costs)])
            self._is_taken = np.concatenate([self._is_taken, np.zeros(place, dtype=bool)])
        self._numbers.append(number)
        self._costs[place] = costs
        moved = np.array([place])
        for rank in range(self._first_undominated(costs), len(self._fronts)):
            front = self._fronts[rank]
            is_moved = _are_dominated(self._costs[front], by=self._costs[moved])
            self._fronts[rank] = np.concatenate([front[~is_moved], moved])
            moved = front[is_moved]
            if not len(moved):
                return
        self._rest = np.concatenate([self._rest, moved])

    def take(self, count: int, *, most: int) -> list[int]:
        taken: list[int] = []
        rank = 0
        while count > 0 and len(taken) < most and rank < self._num_fronts(rank):
            front = self._fronts[rank]
            if not self._is_taken[front].all():
                taken += self._take_of(np.sort(front), count, most=most - len(taken))
            count -= len(front)
            rank += 1
        return taken

    def best(self, count: int) -> list[int]:
        places: list[int] = []
        rank = 0
        while len(places) < count and rank < self._num_fronts(rank):
            places += self._in_order(np.sort(self._fronts[rank])).tolist()
            rank += 1
        return [self._numbers[place] for place in places[: max(0, count)]]

    def _in_order(self, front: NDArray[np.intp]) -> NDArray[np.intp]:
        """Sort the trials of a front by crowding distance, the largest first, then by number."""
        distances = crowding_distances([tuple(costs) for costs in self._costs[front].tolist()])
        numbers = [self._numbers[place] for place in front.tolist()]
        order: NDArray[np.intp] = front[np.lexsort((numbers, -np.array(distances)))]
        return order

    def _take_of(self, front: NDArray[np.intp], count: int, *, most: int) -> list[int]:
        order = self._in_order(front)[:count]
        new = order[~self._is_taken[order]][:most]
        self._is_taken[new] = True
        return [self._numbers[place] for place in new.tolist()]

    def _num_fronts(self, rank: int) -> int:
        """Return the number of known fronts, after computing the front with index `rank` if it is the next one.

        Fronts are computed only when they are needed. The first front has the trials that no other trial dominates.
        Each next front has the trials that are not dominated by any trial outside the earlier fronts.
        """
        if rank == len(self._fronts) and len(self._rest):
            is_first = np.array(non_dominated([tuple(costs) for costs in self._costs[self._rest].tolist()]))
            self._fronts.append(self._rest[is_first])
            self._rest = self._rest[~is_first]
        return len(self._fronts)

    def _first_undominated(self, costs: Costs) -> int:
        """The index of the first known front in which no trial dominates a point with these `costs`.

        Trials are divided into fronts; the first front has the trials that no other trial dominates. If every known
        front has a trial that dominates the point, the result is the number of known fronts.
        """
        low, high = 0, len(self._fronts)
        while low < high:
            middle = (low + high) // 2
            if _are_dominated(np.array([costs]), by=self._costs[self._fronts[middle]])[0]:
                low = middle + 1
            else:
                high = middle
        return low


def _are_dominated(points: Points, *, by: Points) -> NDArray[np.bool_]:
    """Whether each of the points is dominated by at least one of the points `by`, as a boolean array [n].

    `points` are [n, num_costs], `by` are [m, num_costs].
    """
    others, own = by[np.newaxis], points[:, np.newaxis]
    is_ahead = np.all(others <= own, axis=2) & np.any(others < own, axis=2)
    return np.asarray(np.any(is_ahead, axis=1))
