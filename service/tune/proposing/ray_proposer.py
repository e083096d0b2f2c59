"""Proposals on Ray: the searcher in a process of its own, which also learns, and the gradient actor for the steps that
it asks for."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from search_spaces.parameters import Parameters
from service.errors import StudyFailed
from service.tune.proposing.checkpoints import PolicyCheckpoints, SearcherState
from service.tune.proposing.completions import Chosen, SourceCompletions
from service.tune.proposing.gradient_actor import GradientActor, GradientJob
from service.tune.searchers.base import SearchSetting
from service.tune.steps import Step, StepKind, StepRequest, StepResult
from workers.errors import EngineUnavailable, InvalidModel, InvalidTask

__all__ = ["RayProposer"]

logger = logging.getLogger(__name__)

# An actor that died is replaced; after so many deaths without a step or a proposal between them, the attempt ends.
MAX_DEATHS = 3

# What Ray reserves for the actor on a CPU; as for a replica, it is not what it uses.
ACTOR_CPUS = 0.1


class RayProposer:
    """`proposals.Proposer` on Ray actors. `steps` are those that the study has; `job` is what its gradients are of,
    None where the searcher needs none; `completions` are those of the study's sources; `checkpoints` keeps the policies
    of a searcher that learns.

    `result` raises EngineUnavailable if an actor keeps dying or cannot read its files, InvalidModel and
    InvalidTask if it cannot use them, StudyFailed if it cannot work."""

    def __init__(
        self,
        *,
        algorithm: str,
        parameters: Parameters,
        seed: int,
        setting: SearchSetting,
        steps: Sequence[Step] = (),
        job: GradientJob | None = None,
        completions: SourceCompletions | None = None,
        checkpoints: PolicyCheckpoints | None = None,
    ) -> None:
        self._algorithm = algorithm
        self._told = (parameters, setting)
        self._steps = list(steps)
        self._checkpoints = checkpoints
        self._searcher = self._new_searcher()
        self._seed = seed
        self._job = job
        self._completions = completions
        self._chosen: Chosen = {}
        for step in steps:
            if step.request.kind is StepKind.COMPLETIONS:
                self._chosen = step.result.completions
        self._call: dict[str, Any] = {}
        self._pending: Any = None
        self._request: StepRequest | None = None  # of the step being computed
        self._gradients: Any = None
        self._num_deaths = 0

    def submit(self, **call: Any) -> None:
        self._call = {"seed": self._seed, **call}
        self._pending = self._searcher.propose.remote(**self._call)

    def result(self, *, timeout_s: float) -> Step | dict[str, Any] | None:
        deadline = time.monotonic() + timeout_s
        while True:
            ready, _ = ray.wait([self._pending], timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            answer = self._answer() if self._request is None else self._computed(self._request)
            if answer is not None:
                return answer

    def _new_searcher(self) -> Any:
        """Its name, which the Ray dashboard shows, is that of the algorithm."""
        saved = {} if self._checkpoints is None else self._checkpoints.load(self._steps)
        kind: Any = ray.remote(SearcherState)
        name = f"{self._algorithm} {'learner' if self._checkpoints else 'searcher'} {uuid.uuid4().hex[:8]}"
        # A call that its process died of is made again here, where it is counted.
        options = kind.options(num_cpus=0, name=name, max_restarts=0, max_task_retries=0)
        return options.remote(self._algorithm, *self._told, self._steps, saved)

    def stored(self, step: Step) -> None:
        self._steps.append(step)
        self._pending = self._searcher.propose_after.remote(step, **self._call)

    def _answer(self) -> Step | dict[str, Any] | None:
        """What the searcher answered; None if that is a step, which then is being computed."""
        try:
            answer: StepRequest | dict[str, Any] = ray.get(self._pending)
        except RayActorError as error:
            self._searcher_died(error)
            self._pending = self._searcher.propose.remote(**self._call)
            return None
        if not isinstance(answer, StepRequest):
            self._num_deaths = 0
            if self._checkpoints is not None:
                self._searcher.learn_ahead.remote()
            return answer
        if answer.kind is StepKind.NOTE:
            return self._step(answer, StepResult())
        if answer.kind is StepKind.COMPLETIONS:
            assert self._completions is not None, "the searcher asks for completions, and the study has no sources"
            found = self._completions.find(answer)
            self._chosen = found.completions
            self._give_completions()
            return self._step(answer, found)
        self._compute(answer)
        return None

    def _searcher_died(self, error: Exception) -> None:
        """Start another one, which knows the same."""
        self._num_deaths += 1
        logger.warning("the searcher died: %s", error)
        if self._num_deaths >= MAX_DEATHS:
            raise EngineUnavailable(f"the searcher died {MAX_DEATHS} times; the last time: {error}") from None
        self._searcher = self._new_searcher()

    def _compute(self, request: StepRequest) -> None:
        if request.kind is StepKind.UPDATE:
            self._request = request
            self._pending = self._searcher.update.remote(request, **self._call)
            return
        if self._job is None:
            raise AssertionError("the searcher asks for gradients, and the study has none")
        if self._gradients is None:
            # Where engines have all GPUs, it computes on the CPU: it would wait for ever.
            num_gpus = 1 if ray.available_resources().get("GPU", 0) >= 1 else 0
            kind: Any = ray.remote(GradientActor)
            self._gradients = kind.options(num_cpus=ACTOR_CPUS, num_gpus=num_gpus).remote(self._job)
            self._give_completions()
        self._request = request
        self._pending = self._gradients.run.remote(request)

    def _give_completions(self) -> None:
        """Calls of an actor run in their order, so its next step may name them as references."""
        if self._gradients is not None and self._completions is not None and self._chosen:
            self._gradients.use_completions.remote(self._completions.read(self._chosen))

    def _computed(self, request: StepRequest) -> Step | None:
        """The step that was computed; None if its actor died, and another computes it."""
        self._request = None
        if request.kind is StepKind.UPDATE:
            return self._updated(request)
        try:
            result: StepResult = ray.get(self._pending)
        except RayActorError as error:
            self._gradients = None
            self._num_deaths += 1
            logger.warning("the gradient actor died: %s", error)
            if self._num_deaths >= MAX_DEATHS:
                raise EngineUnavailable(f"the gradient actor died {MAX_DEATHS} times; the last time: {error}") from None
            self._compute(request)
            return None
        except RayTaskError as error:
            if isinstance(error.cause, (InvalidModel, InvalidTask)):
                raise error.cause from None
            if isinstance(error.cause, OSError):  # files that are away for a while
                raise EngineUnavailable(f"a gradient cannot be computed: {error.cause}") from error
            raise StudyFailed(f"a gradient cannot be computed: {error.cause or error}") from error
        self._num_deaths = 0
        return self._step(request, result)

    def _updated(self, request: StepRequest) -> Step | None:
        """The update that was computed, once its checkpoint is stored; None if its actor died, and another computes
        it."""
        try:
            result, content = ray.get(self._pending)
        except RayActorError as error:
            self._searcher_died(error)
            self._compute(request)
            return None
        if content is not None:
            assert self._checkpoints is not None, "a searcher that learns, and nowhere to keep its checkpoints"
            self._checkpoints.put(request.iteration, content)
        self._num_deaths = 0
        return self._step(request, result)

    def _step(self, request: StepRequest, result: StepResult) -> Step:
        return Step(len(self._steps), self._call["number"], request, result)
