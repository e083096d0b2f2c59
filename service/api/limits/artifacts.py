"""How much room artifacts may take. They are results, so none is removed to make room: fine-tunings that would need
more are refused until others are deleted."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from typing import TypeVar

from service.disk import gib
from service.errors import Conflict
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobKind

__all__ = ["ArtifactQuota"]

Made = TypeVar("Made")


class ArtifactQuota:
    """`quota_bytes` are for the artifacts of all studies and fine-tunings; None: a tenth of the disk."""

    def __init__(self, store: Store, artifacts: ArtifactStore, quota_bytes: int | None = None) -> None:
        self._store, self._artifacts, self._quota = store, artifacts, quota_bytes
        # Held from the comparison until what it has admitted is stored.
        self._lock = threading.Lock()

    def admit(self, num_bytes: int, make: Callable[[], Made]) -> Made:
        """Call `make`, which stores a job whose artifacts will take `num_bytes`. Raises Conflict if that is more than
        is left by what is stored, and by what fine-tunings that have not ended will store."""
        with self._lock:
            used, reserved, quota = self._artifacts.num_bytes(), self._reserved(), self._quota_bytes()
            if num_bytes and used + reserved + num_bytes > quota:
                raise Conflict(
                    f"the experts need {gib(num_bytes)}; of --artifact-quota, {gib(quota)}, stored experts and "
                    f"policies take {gib(used)} and fine-tunings that have not ended will take {gib(reserved)}; delete "
                    "some that are no longer needed"
                )
            return make()

    def _reserved(self) -> int:
        found = 0
        for record in self._store.jobs(JobKind.FINETUNE):
            if not record.state.is_finished:
                stored = sum(artifact.num_bytes for artifact in self._artifacts.of(record.id))
                found += max(0, record.resolved.artifact_bytes - stored)
        return found

    def _quota_bytes(self) -> int:
        place = self._artifacts.directory.parent
        return shutil.disk_usage(place).total // 10 if self._quota is None else self._quota
