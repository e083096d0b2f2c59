"""The searcher's actor: it computes proposals, with the steps and checkpoints of its study in memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from search_spaces.parameters import Parameters
from service.store.steps import Step, StepRequest, UpdateRequest, UpdateResult
from service.tune.proposing.checkpoints import checkpoint_digests, kept_iterations
from service.tune.searchers import get_searcher
from service.tune.searchers.base import LearningSearcher, Observation, ProposalContext, SearchSetting
from workers.telemetry import logs

__all__ = ["SearcherState", "SentObservations"]

logger = logging.getLogger(__name__)


class SearcherState:
    """Actor that runs a study's searcher, with the study's steps, observations and checkpoints in memory.

    `algorithm` is the name of the searcher, `parameters` are the parameters of the search space, and `setting` has
    further facts about the study. A step is the result of a computation that the searcher has requested, such as a
    gradient. In the methods, `call` has the trial's `number`, the `seed`, the results that may be used
    (`observations`), and the configurations of trials whose results may not be used (`pending`). In `observations`, an
    index may stand for an observation that the method `receive` has received before.
    """

    def __init__(
        self,
        algorithm: str,
        parameters: Parameters,
        setting: SearchSetting,
        steps: Sequence[Step],
        checkpoints: Mapping[int, bytes],
    ) -> None:
        logs.log_in_worker()
        self._searcher = get_searcher(algorithm)
        self._parameters = parameters
        self._setting = setting
        self._steps = list(steps)
        self._checkpoints = dict(checkpoints)
        self._received: list[Observation] = []
        self._last_call: Mapping[str, Any] = {}
        self._last_answer: StepRequest | dict[str, Any] | None = None
        self._ahead: _Ahead | None = None

    def receive(self, observations: Sequence[Observation]) -> None:
        """Store observations (results of trials); later calls refer to them by their indices in the order of arrival.

        Each observation is therefore sent to this process once, and not with every call.
        """
        self._received += observations

    def propose(self, **call: Any) -> StepRequest | dict[str, Any]:
        """The configuration of the next trial, or a request for a computation (step) that is needed first.

        `call` has the trial's number, the seed, the known results (`observations`) and the configurations of earlier
        trials whose results may not be used (`pending`).
        """
        self._last_call = call
        if isinstance(self._searcher, LearningSearcher):
            self._restore_checkpoints(self._searcher, call)
        self._last_answer = self._searcher.advance(self._context(call))
        return self._last_answer

    def propose_next(self) -> StepRequest | dict[str, Any]:
        """The configuration of the trial after the last proposal, or a request for a step that is needed first.

        The proposal uses the same results as the last proposal. The configuration proposed last counts as pending
        (proposed, without a result). If the last call returned a request instead of a configuration, the same request
        is returned again, because the proposal that needs it must be made first.
        """
        if not isinstance(self._last_answer, dict):
            assert self._last_answer is not None, "nothing was proposed"
            return self._last_answer
        call = dict(self._last_call)
        pending = (*call["pending"], self._parameters.repair(self._last_answer))
        return self.propose(**{**call, "number": call["number"] + 1, "pending": pending})

    def propose_after(self, step: Step, **call: Any) -> StepRequest | dict[str, Any]:
        """Add the result of a computation to the study's steps, and continue with the proposal that needs it.

        `step` is the result, which the driver has stored. `call` has the arguments of the method `propose`. Like
        `propose`, this method returns a configuration, or a request for a further computation.
        """
        self._steps.append(step)
        return self.propose(**call)

    def update(self, request: UpdateRequest, **call: Any) -> tuple[UpdateResult, bytes | None]:
        """Compute a policy update, which a proposal needs before it can be made.

        `request` has the number of the training iteration (a fixed number of trials) from whose trials the policy
        learns. `call` has the keyword arguments that `propose` received for this proposal. Returns the update's result
        and the policy's new checkpoint, which is None if nothing was learned. The caller must store the checkpoint
        before it stores the record of the update.
        """
        assert isinstance(self._searcher, LearningSearcher), "a searcher asks for an update, and does not learn"
        self._restore_checkpoints(self._searcher, call)
        return self._learn(self._searcher, request.iteration, call)

    def learn_ahead(self) -> None:
        """Compute the next policy update in advance, if all results that it learns from are known.

        Engines then do not wait for the update when a proposal needs it.
        """
        iteration = len(checkpoint_digests(self._steps))
        if not isinstance(self._searcher, LearningSearcher) or not self._last_call:
            return
        if self._ahead is None or self._ahead.iteration != iteration:
            context = self._context(self._last_call)
            known = self._searcher.learned_from(context, iteration=iteration)
            if known is not None:
                self._ahead = _Ahead(iteration, known, *_timed(self._searcher, context, iteration))

    def _context(self, call: Mapping[str, Any]) -> ProposalContext:
        given = (each if isinstance(each, Observation) else self._received[each] for each in call["observations"])
        known = {**call, "observations": (*self._setting.observed, *given)}
        return ProposalContext(
            self._parameters, steps=self._steps, setting=self._setting, checkpoints=self._checkpoints, **known
        )

    def _learn(
        self, searcher: LearningSearcher, iteration: int, call: Mapping[str, Any]
    ) -> tuple[UpdateResult, bytes | None]:
        context, ahead = self._context(call), self._ahead
        is_ahead = ahead is not None and ahead.iteration == iteration
        if ahead is not None and is_ahead and ahead.known == searcher.learned_from(context, iteration=iteration):
            result, content = ahead.result, ahead.content
        else:
            result, content = _timed(searcher, context, iteration)
        self._ahead = None
        if content is not None:
            needed = kept_iterations(iteration + 1, searcher.num_policies(self._setting))
            every = {**self._checkpoints, iteration: content}
            self._checkpoints = {number: kept for number, kept in every.items() if number >= needed.start}
        return result, content

    def _restore_checkpoints(self, searcher: LearningSearcher, call: Mapping[str, Any]) -> None:
        """Compute all stored policy updates again, in order, if a checkpoint that the searcher needs is missing.

        `call` has the arguments of the current proposal, whose observations the updates learn from. A warning is logged
        if a policy differs from the policy that was stored, for example because another machine computes other bits.
        """
        digests = checkpoint_digests(self._steps)
        needed = kept_iterations(len(digests), searcher.num_policies(self._setting))
        if all(number in self._checkpoints for number in needed if digests[number]):
            return
        self._checkpoints = {}
        for iteration, digest in enumerate(digests):
            result, _ = self._learn(searcher, iteration, call)
            if result.checkpoint != digest:
                logger.warning(
                    "the policy of iteration %d was learned again, and differs from the stored one (sha256 %s..., not "
                    "%s...): later proposals may differ",
                    iteration,
                    result.checkpoint[:12],
                    digest[:12],
                )


class SentObservations:
    """Record of the observations that were sent to a `SearcherState` in another process, and of their indices.

    An observation is the result of a trial. The other process keeps the observations in a list; an index is the place
    in this list. Two observations count as equal if they are the same Python object; their contents are not compared.
    """

    def __init__(self) -> None:
        self._indices: dict[int, tuple[int, Observation]] = {}  # by id; observations are kept so that ids stay theirs

    def add(self, observations: Sequence[Observation]) -> tuple[list[Observation], list[int]]:
        """Register the observations of a call; return the new observations, to be sent, and the indices of all.

        The new observations were not sent to the other process before. Both results are in the order of `observations`.
        """
        new = []
        for observation in observations:
            if id(observation) not in self._indices:
                self._indices[id(observation)] = len(self._indices), observation
                new.append(observation)
        return new, [self._indices[id(observation)][0] for observation in observations]


def _timed(searcher: LearningSearcher, context: ProposalContext, iteration: int) -> tuple[UpdateResult, bytes | None]:
    """Compute the policy update of `iteration` with `searcher.learn`, and measure the time.

    `context` has the results that the policy learns from. Returns the update's result with the seconds that it took,
    and the policy's checkpoint (None if nothing was learned).
    """
    started = time.perf_counter()
    result, content = searcher.learn(context, iteration=iteration)
    return replace(result, seconds=time.perf_counter() - started), content


@dataclass(frozen=True)
class _Ahead:
    """A policy update that was computed before the searcher's proposal needed it.

    `iteration` is the training iteration of the update. `known` are the observations (results of trials) from which the
    update was computed. The update is used only if the proposal that needs it has the same observations. `result` is
    the update's result, and `content` is the policy's checkpoint, or None if nothing was learned.
    """

    iteration: int
    known: Sequence[Observation]
    result: UpdateResult
    content: bytes | None
