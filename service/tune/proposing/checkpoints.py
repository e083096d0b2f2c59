"""Checkpoints of the policies that a study trains, stored as artifacts (files) of the study."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from service.errors import Conflict, NotFound
from service.store.artifacts import ArtifactStore
from service.store.steps import Step, UpdateStep
from service.tune.searchers.base import LearningSearcher, SearchSetting

__all__ = ["PolicyCheckpoints", "checkpoint_digests", "kept_iterations", "read_policy", "store_policy"]

logger = logging.getLogger(__name__)

# An artifact is a directory; a policy's has this file.
FILE = "policy.pt"


class PolicyCheckpoints:
    """The checkpoints of the policies that one study trains, stored as artifacts (files) of the study.

    `searcher` trains the policies, and `setting` has facts about the study, from which the number of policies follows.
    The last three checkpoints of each policy are kept, each in its own artifact. A searcher needs the last two of the
    finished iterations (function `kept_iterations`). If a driver ends after it has stored a checkpoint and before it
    has stored the record of the training step, these two are still available.
    """

    def __init__(
        self, artifacts: ArtifactStore, study_id: str, searcher: LearningSearcher, setting: SearchSetting
    ) -> None:
        self._artifacts = artifacts
        self._study_id = study_id
        self._num_policies = searcher.num_policies(setting)

    def put(self, iteration: int, content: bytes) -> None:
        facts = {"iteration": iteration}
        store_policy(self._artifacts, self._study_id, self._artifact(iteration), content, facts=facts)

    def load(self, steps: Sequence[Step]) -> dict[int, bytes]:
        """The checkpoints, by training iteration, that the searcher needs to continue a study with the stored `steps`.

        `steps` are the records of finished policy updates, with the digest of each update's checkpoint. A checkpoint
        that is missing, or whose content differs from its digest, is left out. The searcher then computes that
        iteration's update again.
        """
        digests = checkpoint_digests(steps)
        found = {}
        for iteration in kept_iterations(len(digests), self._num_policies):
            if not (digest := digests[iteration]):
                continue
            reasons = []
            for name in (self._artifact(iteration), self._earlier_artifact(iteration)):
                try:
                    found[iteration] = read_policy(self._artifacts, self._study_id, name, digest=digest)
                    break
                except (NotFound, Conflict, OSError) as error:
                    reasons.append(str(error))
            else:
                logger.warning("the policy of iteration %d is learned again: %s", iteration, "; ".join(reasons))
        return found

    def _artifact(self, iteration: int) -> str:
        """The name of the artifact (stored file) that holds the policy checkpoint of a training iteration.

        Iteration i trains the policy with number i modulo the number of policies. Each policy has three artifacts,
        which its iterations use in turn. A new checkpoint of a policy therefore replaces the oldest of the policy's
        artifacts.
        """
        turn, policy = divmod(iteration, self._num_policies)
        return f"hm3-policy-{policy}-{'abc'[turn % 3]}"

    def _earlier_artifact(self, iteration: int) -> str:
        """The name that earlier versions gave to the artifact of a training iteration: two names for each policy."""
        turn, policy = divmod(iteration, self._num_policies)
        return f"hm3-policy-{policy}-{turn % 2}"


def kept_iterations(num_finished: int, num_policies: int) -> range:
    """The training iterations whose policy checkpoints must be kept once `num_finished` iterations are finished.

    These are the last two iterations of each of the `num_policies` policies, which are trained in turn.
    """
    return range(max(0, num_finished - 2 * num_policies), num_finished)


def checkpoint_digests(steps: Sequence[Step]) -> list[str]:
    """The sha256 of the policy checkpoint of each finished training iteration of a study, in the order of iterations.

    `steps` are the study's stored steps, among which are the policy updates. The digest is "" for an iteration in which
    nothing was learned.
    """
    return [step.result.checkpoint for step in steps if isinstance(step, UpdateStep)]


def store_policy(
    artifacts: ArtifactStore, study_id: str, name: str, content: bytes, *, facts: dict[str, int] | None = None
) -> None:
    """Store a policy's checkpoint as the artifact `name` of the study `study_id`, in place of an earlier one.

    `artifacts` stores the artifacts (files) of all studies. `content` is the checkpoint. `facts` are numbers that are
    stored with the artifact; None stores no numbers.
    """
    with TemporaryDirectory() as temporary:
        (Path(temporary) / FILE).write_bytes(content)
        artifacts.put(study_id, name, Path(temporary), facts=facts or {})


def read_policy(artifacts: ArtifactStore, study_id: str, name: str, *, digest: str) -> bytes:
    """The policy checkpoint stored as the artifact `name` of the study `study_id`; its sha256 must be `digest`.

    `artifacts` stores the artifacts (files) of all studies. Raises NotFound if there is no such artifact, and Conflict
    if the artifact has other content.
    """
    with TemporaryDirectory() as temporary:
        place = artifacts.write_to(artifacts.get(study_id, name), Path(temporary) / "policy")
        content = (place / FILE).read_bytes()
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise Conflict(
            f"artifact {name!r} is not the stored policy: its sha256 is {found[:12]}..., not {digest[:12]}..."
        )
    return content
