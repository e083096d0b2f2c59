"""Quota of stored artifacts, such as trained experts: fine-tunings that would exceed it are refused.

Artifacts are results, so none is removed automatically to make room; users delete jobs that they no longer need.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import TypeVar

from service.disk import gib
from service.errors import Conflict
from service.store import Store
from service.store.artifacts import ArtifactStore

__all__ = ["ArtifactQuota"]

Made = TypeVar("Made")


class ArtifactQuota:
    """Limit on the total size in bytes of the artifacts, such as trained experts, of all jobs.

    The limit is `quota_bytes`. If it is None, the limit is a tenth of the disk, and artifacts in an object store have
    no limit.
    """

    def __init__(self, store: Store, artifacts: ArtifactStore, quota_bytes: int | None = None) -> None:
        self._store, self._artifacts, self._quota = store, artifacts, quota_bytes
        # Held from the comparison until the job that it admits is stored.
        self._lock = threading.Lock()

    def admit(self, num_bytes: int, make: Callable[[], Made]) -> Made:
        """Store a job by calling `make`, if the job's `num_bytes` of artifacts fit into the quota.

        The artifacts that are stored already, and those that unfinished jobs will still store, take up the quota too.
        Returns the result of `make`. Raises Conflict, without calling `make`, if the job's artifacts do not fit.
        """
        with self._lock:
            used, reserved, quota = self._artifacts.num_bytes(), self._reserved(), self._quota_bytes()
            if num_bytes and used + reserved + num_bytes > quota:
                raise Conflict(
                    f"the experts need {gib(num_bytes)}; of the {gib(quota)} of --artifact-quota, stored experts and "
                    f"policies take {gib(used)}, and unfinished fine-tunings will take {gib(reserved)}; delete "
                    "jobs that are no longer needed"
                )
            return make()

    def _reserved(self) -> int:
        found = 0
        for record in self._store.unfinished_jobs():
            if record.accepted.get("artifact_bytes"):
                stored = sum(artifact.num_bytes for artifact in self._artifacts.of(record.id))
                found += max(0, record.accepted.get("artifact_bytes", 0) - stored)
        return found

    def _quota_bytes(self) -> float:
        if self._quota is not None:
            return self._quota
        capacity = self._artifacts.capacity()
        return math.inf if capacity is None else capacity // 10
