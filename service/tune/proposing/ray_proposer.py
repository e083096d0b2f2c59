"""Proposals on Ray: one actor runs the searcher, and another computes the losses and gradients that it requests.

A step is a computation that a searcher requests before it proposes a configuration (`service.store.steps`).
"""

from __future__ import annotations

import logging
import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayTaskError

from search_spaces.parameters import Parameters
from search_spaces.searchers import SEARCHERS
from service.errors import StudyFailed
from service.store.steps import (
    ChargedRequest,
    CompletionsRequest,
    CompletionsStep,
    GradientRequest,
    LossesRequest,
    NoteRequest,
    NoteResult,
    Step,
    StepRequest,
    StepResult,
    UpdateRequest,
    step_of,
)
from service.tune.proposing.checkpoints import PolicyCheckpoints
from service.tune.proposing.completions import Chosen, SourceCompletions
from service.tune.proposing.gradient_actor import GradientInputs
from service.tune.proposing.ray_gradients import ACTOR_DEATH, MAX_DEATHS, RayGradients
from service.tune.proposing.searcher_state import SearcherState, SentObservations
from service.tune.searchers.base import SearchSetting
from workers.errors import EngineUnavailable, TrainingFailed

__all__ = ["RayProposer"]

logger = logging.getLogger(__name__)


class RayProposer:
    """Proposer on Ray: one actor runs the searcher, and another computes losses and gradients.

    - `algorithm`: the name of the searcher
    - `parameters`: the parameters of the search space
    - `seed`: the seed of the search
    - `setting`: further facts about the study that searchers need
    - `steps`: the results of computations that the searcher has requested in this study before, such as gradients
    - `gradient_inputs`: the input of the gradient actor, which computes losses and gradients; None for a searcher that
      needs no gradients
    - `completions`: reads correct completions of the study's source models
    - `checkpoints`: stores the policies of a searcher that trains policies

    The method `result` raises EngineUnavailable if actors keep dying, if the gradient actor does not start, or if an
    actor cannot read files that it needs. The method raises InvalidModel or InvalidTask if an actor cannot use a model
    or a task. It raises StudyFailed if an actor cannot work for another reason, for example because a policy has
    numbers that are NaN.
    """

    def __init__(
        self,
        *,
        algorithm: str,
        parameters: Parameters,
        seed: int,
        setting: SearchSetting,
        steps: Sequence[Step] = (),
        gradient_inputs: GradientInputs | None = None,
        completions: SourceCompletions | None = None,
        checkpoints: PolicyCheckpoints | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._parameters = parameters
        self._setting = setting
        self._steps = list(steps)
        self._checkpoints = checkpoints
        self._searcher = self._new_searcher()
        self._seed = seed
        self._gradients = None if gradient_inputs is None else RayGradients(gradient_inputs)
        self._completions = completions
        self._chosen: Chosen = {}
        for step in steps:
            if isinstance(step, CompletionsStep):
                self._chosen = step.result.completions
        self._send_completions()
        self._call: dict[str, Any] = {}
        self._pending: Any = None  # the actor's call whose result is awaited
        self._next: deque[Any] = deque()  # the actor's calls for the rest of the batch, in order
        self._answered: Mapping[str, Any] = {}  # the last call's configuration, repaired
        self._computing: ChargedRequest | UpdateRequest | None = None  # None: the searcher proposes
        self._num_deaths = 0

    @property
    def is_waiting(self) -> bool:
        """Whether the gradient actor waits for a machine with GPUs that the cluster may add."""
        return self._gradients is not None and self._gradients.is_waiting

    def submit(self, **call: Any) -> None:
        """Begin to compute a proposal in the background; `call` has the arguments of `Proposer.submit`.

        A batch is a number of consecutive proposals that are made from the same results. If the searcher requests no
        computations before a proposal (its attribute `proposes_at_once` is True), the actor also computes the batch's
        remaining proposals in advance. A proposal that was computed in advance is not computed again when it is
        submitted.
        """
        is_next = bool(self._next) and self._follows(call)
        self._call = {"seed": self._seed, **call}
        if is_next:
            self._pending = self._next.popleft()
            return
        self._pending = self._searcher.propose.remote(**self._message())
        self._propose_rest()

    def _propose_rest(self) -> None:
        """Begin to compute the batch's remaining proposals in advance, if they need no steps.

        A batch is a number of consecutive proposals that are made from the same results. A step is a computation, such
        as a gradient, that some searchers need before they propose. Proposals that an earlier call computed in advance
        are dropped.
        """
        self._next.clear()
        if SEARCHERS[self._algorithm].proposes_at_once:
            left = self._setting.num_left_in_batch(self._call["number"])
            self._next.extend(self._searcher.propose_next.remote() for _ in range(left))

    def _follows(self, call: Mapping[str, Any]) -> bool:
        """Whether a proposal computed in advance can be used for `call`, the arguments of `submit`.

        The proposal can be used under three conditions:

        - the trial number of `call` follows the number of the last proposal
        - the observations of `call` are the observations of the last proposal
        - the pending configurations of `call` are the pending configurations of the last proposal, followed by the
          configuration that was proposed last
        """
        last = self._call
        pending = (*last["pending"], self._answered)
        is_next = call["number"] == last["number"] + 1 and tuple(call["pending"]) == pending
        return is_next and tuple(call["observations"]) == tuple(last["observations"])

    def result(self, *, timeout_s: float) -> Step | ChargedRequest | dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _ = ray.wait([self._pending], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if self._gradients is not None:
                    self._gradients.check_start()
                return None
            answer = self._finish()
            if answer is not None:
                return answer

    def stored(self, step: Step) -> None:
        self._steps.append(step)
        self._pending = self._searcher.propose_after.remote(step, **self._message())
        self._propose_rest()

    def compute(self, request: ChargedRequest) -> None:
        self._compute(request)

    def release(self) -> None:
        """End the gradient actor, whose GPU and memory other work needs after the search.

        A later request of the searcher for losses or gradients starts another actor.
        """
        if self._gradients is not None:
            self._gradients.release()

    def _finish(self) -> Step | ChargedRequest | dict[str, Any] | None:
        """Process the result of the actor call that has ended.

        The actor's result is a proposal of the searcher, an update of a policy, or losses or gradients. Returns the
        value that the method `result` returns to the driver, or None if another call to an actor must end first.
        """
        request, self._computing = self._computing, None
        if request is None:
            return self._answer()
        return self._updated(request) if isinstance(request, UpdateRequest) else self._measured(request)

    # -- the searcher ----------------------------------------------------------------------------------------------

    def _new_searcher(self) -> Any:
        """Start a new Ray actor with the searcher, the steps that are stored and the policies' checkpoints.

        A step is the result of a computation that the searcher has requested. Ray's dashboard shows the actor under the
        algorithm's name.
        """
        self._sent = SentObservations()
        saved = {} if self._checkpoints is None else self._checkpoints.load(self._steps)
        kind: Any = ray.remote(SearcherState)
        name = f"{self._algorithm} {'learner' if self._checkpoints else 'searcher'} {uuid.uuid4().hex[:8]}"
        # A call during which the process died is repeated here, where deaths are counted.
        options = kind.options(num_cpus=0, name=name, max_restarts=0, max_task_retries=0)
        return options.remote(self._algorithm, self._parameters, self._setting, self._steps, saved)

    def _message(self) -> dict[str, Any]:
        """Arguments of a call to the searcher's actor for the present proposal, with observations given as indices.

        Observations (results of trials) that the actor does not have yet are sent to it first. The call then names each
        observation by the index under which the actor has stored it.
        """
        new, indices = self._sent.add(self._call["observations"])
        if new:
            self._searcher.receive.remote(new)
        return {**self._call, "observations": indices}

    def _answer(self) -> Step | ChargedRequest | dict[str, Any] | None:
        """Handle the searcher's answer to a call for a proposal, which may be a request for a computation (step).

        The method returns one of these values:

        - the proposed configuration
        - a request for losses or a gradient, which may be computed only if the driver calls `compute`
        - a step that this method has computed at once, because the searcher asked to store a decision or to read
          correct completions
        - None, if the searcher asked for an update of a policy, which this method has started
        - None, if the actor died; a new actor then computes the proposal again
        """
        try:
            answer: StepRequest | dict[str, Any] = _learned(self._pending)
        except ACTOR_DEATH as error:
            self._replace_searcher(error)
            self._pending = self._searcher.propose.remote(**self._message())
            return None
        if isinstance(answer, dict):
            self._num_deaths = 0
            self._answered = self._parameters.repair(answer)
            if self._checkpoints is not None:
                self._searcher.learn_ahead.remote()
            return answer
        if isinstance(answer, NoteRequest):
            return self._step(answer, NoteResult())
        if isinstance(answer, CompletionsRequest):
            assert self._completions is not None, "the searcher asks for completions, and the study has no sources"
            found = self._completions.find(answer)
            self._chosen = found.completions
            self._send_completions()
            return self._step(answer, found)
        if not isinstance(answer, UpdateRequest):
            return answer
        self._compute(answer)
        return None

    def _replace_searcher(self, error: Exception) -> None:
        """Start another searcher actor with the same state, after the previous actor died of `error`.

        Raises EngineUnavailable if MAX_DEATHS actors have died since an actor last returned a result.
        """
        self._num_deaths += 1
        logger.warning("the searcher died: %s", error)
        if self._num_deaths >= MAX_DEATHS:
            message = f"the searcher died {MAX_DEATHS} times; the last time: {error}"
            raise EngineUnavailable(message) from None
        self._next.clear()
        self._searcher = self._new_searcher()

    def _updated(self, request: UpdateRequest) -> Step | None:
        """Store the checkpoint of a finished policy update, and return the update as a step for the driver to store.

        `request` is the searcher's request for the update. There is no checkpoint if nothing was learned. Returns None
        if the actor died; this method has then started a new actor, which computes the update again.
        """
        try:
            result, content = _learned(self._pending)
        except ACTOR_DEATH as error:
            self._replace_searcher(error)
            self._compute(request)
            return None
        if content is not None:
            assert self._checkpoints is not None, "a searcher that learns, and no place for its checkpoints"
            self._checkpoints.put(request.iteration, content)
        self._num_deaths = 0
        return self._step(request, result)

    # -- steps -----------------------------------------------------------------------------------------------------

    def _compute(self, request: ChargedRequest | UpdateRequest) -> None:
        """Begin to compute the step that the searcher requested: a policy update, losses or a gradient.

        The searcher's actor computes updates of policies. The gradient actor computes losses and gradients.
        """
        self._computing = request
        if isinstance(request, UpdateRequest):
            self._pending = self._searcher.update.remote(request, **self._message())
            return
        if self._gradients is None:
            raise AssertionError("the searcher asks for gradients, and the study has none")
        self._gradients.begin(request)
        self._pending = self._gradients.pending

    def _send_completions(self) -> None:
        """Send the chosen completions of source models to the gradient actor, as reference answers for its losses.

        The gradient actor is the Ray actor that computes losses and gradients. The method does nothing if no
        completions have been chosen, or if the study has no gradient actor.
        """
        found, chosen = self._completions, self._chosen
        if self._gradients is not None and found is not None and chosen:
            self._gradients.use_completions(lambda: found.read(chosen))

    def _measured(self, request: LossesRequest | GradientRequest) -> Step | None:
        """Fetch the losses or the gradient that the gradient actor has computed, as a step for the driver to store.

        A step is the searcher's `request` together with the result. The actor's call has already ended, so the method
        does not wait. Returns None if the actor died; another actor has then begun the same computation.

        Raises:
            InvalidModel: The actor cannot use its models.
            InvalidTask: The actor cannot use its task data.
            EngineUnavailable: The actor cannot read its files, or too many actors have died in a row.
            StudyFailed: The actor failed for another reason.
        """
        assert self._gradients is not None
        result = self._gradients.finish()
        if result is None:
            self._computing, self._pending = request, self._gradients.pending
            return None
        self._num_deaths = 0
        return self._step(request, result)

    def _step(self, request: StepRequest, result: StepResult) -> Step:
        return step_of(len(self._steps), self._call["number"], request, result)


def _learned(call: Any) -> Any:
    """Wait for the end of `call`, a call to the searcher's actor, and return its result.

    Raises StudyFailed if the searcher's policy cannot learn, for example because its numbers are NaN.
    """
    try:
        return ray.get(call)
    except RayTaskError as error:
        if isinstance(error.cause, TrainingFailed):
            raise StudyFailed(str(error.cause)) from error
        raise
