"""A searcher with what it is given between proposals, and where the checkpoints of its policies are kept."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from search_spaces.parameters import Parameters
from service.errors import Conflict, NotFound
from service.store.artifacts import ArtifactStore
from service.tune.searchers import get_searcher
from service.tune.searchers.base import LearningSearcher, Observation, SearchSetting, SteppingSearcher
from service.tune.steps import Step, StepKind, StepRequest, StepResult

__all__ = ["PolicyCheckpoints", "SearcherState"]

logger = logging.getLogger(__name__)

FILE = "policy.pt"


class PolicyCheckpoints:
    """The checkpoints of one study's policies as artifacts. Of each policy the last two are kept, each in a slot of its
    own: an attempt that ends between the storing of a checkpoint and that of its step leaves what the next one
    needs."""

    def __init__(self, artifacts: ArtifactStore, study_id: str, searcher: LearningSearcher, setting: SearchSetting):
        self._artifacts = artifacts
        self._study_id = study_id
        self._searcher = searcher
        self._setting = setting

    def put(self, iteration: int, content: bytes) -> None:
        with TemporaryDirectory() as temporary:
            (Path(temporary) / FILE).write_bytes(content)
            slot = self._searcher.slot(iteration, setting=self._setting)
            self._artifacts.put(self._study_id, slot, Path(temporary), facts={"iteration": iteration})

    def load(self, steps: Sequence[Step]) -> dict[int, bytes]:
        """Those that are needed after these steps, by iteration. One that is gone, or is not what its step says, is
        left out: the searcher makes it again."""
        stated = _stated(steps)
        found = {}
        for iteration in self._searcher.kept(len(stated), setting=self._setting):
            if not (digest := stated[iteration]):
                continue
            try:
                content = self._read(self._searcher.slot(iteration, setting=self._setting))
            except (NotFound, Conflict, OSError) as error:
                logger.warning("the policy of iteration %d is learned again: %s", iteration, error)
                continue
            if hashlib.sha256(content).hexdigest() == digest:
                found[iteration] = content
            else:
                logger.warning("the policy of iteration %d is learned again: it is not the stored one", iteration)
        return found

    def _read(self, slot: str) -> bytes:
        record = self._artifacts.get(self._study_id, slot)
        with TemporaryDirectory() as temporary:
            return (self._artifacts.write_to(record, Path(temporary) / slot) / FILE).read_bytes()


class SearcherState:
    """A searcher of any kind, the steps that its study has, and, if it learns, the checkpoints that it needs."""

    def __init__(
        self,
        algorithm: str,
        parameters: Parameters,
        setting: SearchSetting,
        steps: Sequence[Step],
        checkpoints: Mapping[int, bytes],
    ) -> None:
        self._searcher = get_searcher(algorithm)
        self._parameters = parameters
        self._setting = setting
        self._steps = list(steps)
        self._checkpoints = dict(checkpoints)
        self._call: Mapping[str, Any] = {}
        self._ahead: _Ahead | None = None

    def propose(self, **call: Any) -> StepRequest | dict[str, Any]:
        """The configuration of a trial, or the step that is needed for it."""
        self._call = call
        if isinstance(self._searcher, LearningSearcher):
            self._learn_again(**call)
            return self._searcher.advance(
                self._parameters,
                steps=self._steps,
                setting=self._setting,
                checkpoints=self._checkpoints,
                **call,
            )
        if isinstance(self._searcher, SteppingSearcher):
            return self._searcher.advance(self._parameters, steps=self._steps, setting=self._setting, **call)
        return self._searcher.propose(self._parameters, **call)

    def propose_after(self, step: Step, **call: Any) -> StepRequest | dict[str, Any]:
        """The same once `step` is stored."""
        self._steps.append(step)
        return self.propose(**call)

    def update(self, request: StepRequest, **call: Any) -> tuple[StepResult, bytes | None]:
        """Compute an UPDATE step. Returns its result, and the checkpoint that is to be stored before it."""
        self._learn_again(**call)
        return self._learn(request.iteration, call)

    def learn_ahead(self) -> None:
        """Compute the next UPDATE before it is asked for, if all that it depends on was known at the last proposal:
        then the proposal that needs it does not keep engines waiting."""
        iteration = len(_stated(self._steps))
        if not isinstance(self._searcher, LearningSearcher) or not self._call:
            return
        if self._ahead is None or self._ahead.iteration != iteration:
            known = self._known(iteration, self._call)
            if known is not None:
                self._ahead = _Ahead(iteration, known, *self._learned(iteration, self._call))

    def _known(self, iteration: int, call: Mapping[str, Any]) -> Sequence[Observation] | None:
        assert isinstance(self._searcher, LearningSearcher)
        observations = call["observations"]
        return self._searcher.learned_from(iteration=iteration, observations=observations, setting=self._setting)

    def _learned(self, iteration: int, call: Mapping[str, Any]) -> tuple[StepResult, bytes | None]:
        assert isinstance(self._searcher, LearningSearcher), "a searcher asks for an update, and does not learn"
        return self._searcher.learn(
            self._parameters,
            iteration=iteration,
            seed=call["seed"],
            observations=call["observations"],
            setting=self._setting,
            checkpoints=self._checkpoints,
        )

    def _learn(self, iteration: int, call: Mapping[str, Any]) -> tuple[StepResult, bytes | None]:
        assert isinstance(self._searcher, LearningSearcher), "a searcher asks for an update, and does not learn"
        ahead = self._ahead
        if ahead is not None and ahead.iteration == iteration and ahead.known == self._known(iteration, call):
            result, content = ahead.result, ahead.content
        else:
            result, content = self._learned(iteration, call)
        self._ahead = None
        if content is not None:
            self._checkpoints[iteration] = content
            needed = self._searcher.kept(iteration + 1, setting=self._setting)
            self._checkpoints = {number: kept for number, kept in self._checkpoints.items() if number >= needed.start}
        return result, content

    def _learn_again(self, **call: Any) -> None:
        """Where a checkpoint is gone: learn from all iterations again, in their order."""
        assert isinstance(self._searcher, LearningSearcher)
        stated = _stated(self._steps)
        needed = self._searcher.kept(len(stated), setting=self._setting)
        if all(number in self._checkpoints for number in needed if stated[number]):
            return
        self._checkpoints = {}
        for iteration in range(len(stated)):
            self._learn(iteration, call)


@dataclass(frozen=True)
class _Ahead:
    """An UPDATE that was computed before it was asked for, and the observations that it depends on."""

    iteration: int
    known: Sequence[Observation]
    result: StepResult
    content: bytes | None


def _stated(steps: Sequence[Step]) -> list[str]:
    """The digest of each iteration's checkpoint."""
    return [step.result.checkpoint for step in steps if step.request.kind is StepKind.UPDATE]
