"""Simulation of a search on fake replicas, for the share of time in which the replicas work.

The coordinator, its rung table, the store and the searchers are the product's. Only the seconds that a replica takes
for a chunk, and the waiting, are simulated. The driver and the searcher's process are one processor each: while one
computes, its CPU seconds pass on the clock, and nothing else of that process happens. As in the product, a replica has
up to CHUNKS_IN_FLIGHT_PER_REPLICA chunks, works on one at a time, and a chunk goes to the replica that has fewest.

Ray is left out: a message takes no time. When a result comes, the driver takes proposals for SEARCHER_SOON_S seconds,
and if none comes until then, looks again LOOK_S seconds later, as in Tune's loop. While nothing is in flight, it waits.
"""

from __future__ import annotations

import heapq
import itertools
import math
import pickle
import random
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from search_spaces.parameters import Parameters
from search_spaces.searchers import SEARCHERS
from service.store.steps import (
    ChargedRequest,
    CompletionsRequest,
    CompletionsResult,
    GradientRequest,
    GradientResult,
    LossesRequest,
    LossesResult,
    NoteRequest,
    NoteResult,
    Step,
    StepRequest,
    StepResult,
    UpdateRequest,
    step_of,
)
from service.tune.coordinator import Coordinator
from service.tune.evaluation import Evaluation
from service.tune.proposing.searcher_state import SearcherState, SentObservations
from service.tune.searchers.base import SearchSetting
from workers.serving.fake import FakeScorer
from workers.types import CHUNKS_IN_FLIGHT_PER_REPLICA, ScoreRequest

__all__ = ["Busy", "Clock", "SimulatedProposer", "simulate"]

LOOK_S = 0.1
SEARCHER_SOON_S = 0.03  # that of service/tune/ray_tune.py


@dataclass(frozen=True)
class Busy:
    """Result of a simulation: shares of the simulated `seconds`, and CPU seconds of the driver.

    `busy` is the share during which replicas worked, on average, `driver_share` that of the driver's processor,
    `searcher_share` that of the searcher's, and `steps_share` that of the actor that computes gradients.
    """

    busy: float
    driver_share: float
    searcher_share: float
    steps_share: float
    seconds: float
    driver_ms_per_trial: float
    trials: int


@dataclass
class Clock:
    """Simulated clock. The driver's CPU seconds pass on it, except those marked as another process's."""

    now: float = 0.0
    driver_s: float = 0.0
    _elsewhere_s: float = field(default=0.0, repr=False)

    @contextmanager
    def driver(self) -> Iterator[None]:
        elsewhere, start = self._elsewhere_s, time.process_time()
        yield
        spent = time.process_time() - start - (self._elsewhere_s - elsewhere)
        self.driver_s += spent
        self.now += spent

    @contextmanager
    def elsewhere(self) -> Iterator[list[float]]:
        """Context manager whose CPU seconds count as another process's; the yielded list has them afterwards."""
        taken, start = [0.0], time.process_time()
        yield taken
        taken[0] = time.process_time() - start
        self._elsewhere_s += taken[0]


class SimulatedProposer:
    """`proposals.Proposer` on the simulated clock: its `SearcherState` answers after its CPU seconds have passed.

    An instant searcher takes none. A loss or a gradient takes `step_s`, on an actor of its own; its values are made up:
    the distance to a point.
    """

    def __init__(
        self,
        clock: Clock,
        algorithm: str,
        parameters: Parameters,
        setting: SearchSetting,
        *,
        is_instant: bool = False,
        step_s: float = 1.0,
    ) -> None:
        self.ready_at = 0.0
        self.is_asked = False
        self._busy_until = 0.0
        self.searcher_s = 0.0
        self.steps_s = 0.0
        self._clock = clock
        self._state = SearcherState(algorithm, parameters, setting, (), {})
        self._sent = SentObservations()
        self._is_instant = is_instant
        self._step_s = step_s
        self._target = np.random.default_rng(0).random(len(parameters))
        self._call: dict[str, Any] = {}
        self._answer: StepRequest | dict[str, Any] | None = None
        self._charged: StepResult | None = None
        self._num_steps = 0
        self._setting = setting
        self._is_chained = SEARCHERS[algorithm].proposes_at_once
        self._next: deque[tuple[StepRequest | dict[str, Any], float]] = deque()

    def submit(self, *, number: int, observations: Sequence[Any], pending: Sequence[Mapping[str, Any]]) -> None:
        """Compute the proposal and the following ones of its batch, as `RayProposer` does."""
        self._call = {"number": number, "seed": 0, "observations": observations, "pending": pending}
        self.is_asked = True
        if self._next:
            self._answer, self.ready_at = self._next.popleft()
            return
        # The driver pickles the call and the observations that are new, the searcher's process unpickles them.
        message = None
        if not self._is_instant:
            new, indices = self._sent.add(observations)
            message = pickle.dumps((new, {**self._call, "observations": indices}))
        with self._clock.elsewhere() as taken:
            call = self._call
            if message is not None:
                new, call = pickle.loads(message)
                self._state.receive(new)
            self._answer = self._state.propose(**call)
        self.ready_at = self._takes(taken[0])
        self._propose_rest()

    def _propose_rest(self) -> None:
        self._next.clear()
        for _ in range(self._setting.num_left_in_batch(self._call["number"]) if self._is_chained else 0):
            with self._clock.elsewhere() as taken:
                answer = self._state.propose_next()
            self._next.append((answer, self._takes(taken[0])))

    def result(self, *, timeout_s: float) -> Step | ChargedRequest | dict[str, Any] | None:
        if self._clock.now < self.ready_at:
            return None
        answer = self._answer
        assert answer is not None
        if isinstance(answer, dict):
            self.is_asked = False
            with self._clock.elsewhere() as taken:
                self._state.learn_ahead()
            self._takes(taken[0])
            return answer
        if isinstance(answer, (LossesRequest, GradientRequest)) and self._charged is None:
            return answer
        found, self._charged = self._charged or self._computed(answer), None
        return step_of(self._num_steps, self._call["number"], answer, found)

    def compute(self, request: ChargedRequest) -> None:
        self._charged = self._computed(request)

    def stored(self, step: Step) -> None:
        self._num_steps += 1
        with self._clock.elsewhere() as taken:
            self._answer = self._state.propose_after(step, **self._call)
        self.ready_at = max(self.ready_at, self._takes(taken[0]))
        self._propose_rest()

    def _computed(self, request: StepRequest) -> StepResult:
        """The result of a step; its seconds pass before the next answer."""
        if isinstance(request, UpdateRequest):
            with self._clock.elsewhere() as taken:
                result, _ = self._state.update(request, **self._call)
            self.ready_at = self._takes(taken[0])
            return result
        if isinstance(request, NoteRequest):
            return NoteResult()
        if isinstance(request, CompletionsRequest):
            return CompletionsResult(completions=dict.fromkeys(request.completions, ()))
        self.steps_s += self._step_s
        self.ready_at = max(self._clock.now, self.ready_at) + self._step_s
        slope = 2 * (np.array(request.point) - self._target)
        loss = float((slope**2).sum() / 4)
        losses = dict.fromkeys(request.positions, loss)
        if isinstance(request, LossesRequest):
            return LossesResult(losses=losses, recipe="r", bank="b")
        assert isinstance(request, GradientRequest)
        return GradientResult(losses=losses, gradient=tuple(slope.tolist()), recipe="r", bank="b")

    def _takes(self, seconds: float) -> float:
        """Let the searcher's process compute for `seconds`, and return the time at which it ends."""
        if self._is_instant:
            return self._clock.now
        self.searcher_s += seconds
        self._busy_until = max(self._clock.now, self._busy_until) + seconds
        return self._busy_until


def simulate(
    coordinator: Coordinator,
    clock: Clock,
    proposer: SimulatedProposer,
    *,
    replicas: int,
    chunk_s: float = 1.0,
    spread: float = 0.0,
    seed: int = 0,
) -> Busy:
    """Run a search to its end on the simulated clock.

    A chunk takes `chunk_s`, or with a `spread`, a time drawn uniformly from that share of it around it.
    """
    draw, scorer = random.Random(seed), FakeScorer()
    order = itertools.count()
    free_at, queued = [0.0] * replicas, [0] * replicas
    done: list[tuple[float, int, int, Evaluation, int, Any]] = []
    worked_s = 0.0

    def send(evaluation: Evaluation, chunk: int) -> None:
        nonlocal worked_s
        replica = min(range(replicas), key=lambda each: (queued[each], free_at[each]))
        seconds = chunk_s * draw.uniform(1 - spread, 1 + spread)
        with clock.elsewhere():
            result = scorer.score(ScoreRequest(evaluation.study, evaluation.recipe, evaluation.chunks[chunk]))
        free_at[replica] = max(clock.now, free_at[replica]) + seconds
        queued[replica] += 1
        worked_s += seconds
        heapq.heappush(done, (free_at[replica], next(order), replica, evaluation, chunk, result))

    concurrency = CHUNKS_IN_FLIGHT_PER_REPLICA * replicas
    looks_until = 0.0
    while True:
        with clock.driver():
            while coordinator.num_in_flight < concurrency and (found := coordinator.next_evaluation()) is not None:
                send(found, 0)
            if coordinator.num_in_flight >= concurrency:
                coordinator.ask_ahead()
            is_finished = coordinator.is_finished
        if is_finished:
            break
        next_result = done[0][0] if done else math.inf
        next_answer = proposer.ready_at if proposer.is_asked else math.inf
        if done and next_answer > looks_until:
            next_answer = max(next_answer, looks_until + LOOK_S)
        assert min(next_result, next_answer) < math.inf, "the search waits for nothing"
        clock.now = max(clock.now, min(next_result, next_answer))
        if clock.now > looks_until:
            looks_until = clock.now + SEARCHER_SOON_S
        while done and done[0][0] <= clock.now:
            _, _, replica, evaluation, chunk, result = heapq.heappop(done)
            queued[replica] -= 1
            with clock.driver():
                is_done = coordinator.on_outcome(evaluation, result)
                if not is_done:
                    send(evaluation, chunk + 1)
    trials = len(coordinator.trials)
    return Busy(
        busy=worked_s / (replicas * clock.now),
        driver_share=clock.driver_s / clock.now,
        searcher_share=proposer.searcher_s / clock.now,
        steps_share=proposer.steps_s / clock.now,
        seconds=clock.now,
        driver_ms_per_trial=1e3 * clock.driver_s / trials,
        trials=trials,
    )
