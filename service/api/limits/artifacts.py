"""Quota of stored artifacts, such as trained experts: fine-tunings that would exceed it are refused.

Artifacts are results, so no artifact is removed automatically to make room; users delete jobs that they no longer need.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from service.disk import gib
from service.errors import Conflict
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobRecord

__all__ = ["ArtifactQuota", "MeasuredArtifacts", "missing_bytes"]

Made = TypeVar("Made")


@dataclass(frozen=True)
class MeasuredArtifacts:
    """Use of the quota of artifacts, as measured before a new job is admitted.

    `missing` contains the number of bytes that each unfinished job is still expected to store, keyed by job id. `used`
    is the size in bytes of the stored files, and `quota` is the limit.
    """

    missing: Mapping[str, int]
    used: int
    quota: float


class ArtifactQuota:
    """Limit on the total size in bytes of the artifacts of all jobs.

    Artifacts are the models and policies that jobs have trained and stored. The limit is `quota_bytes`. If
    `quota_bytes` is None, the limit is a tenth of the disk, and artifacts in an object store have no limit.
    """

    def __init__(self, store: Store, artifacts: ArtifactStore, quota_bytes: int | None = None) -> None:
        self._store, self._artifacts, self._quota = store, artifacts, quota_bytes

    def measure(self, num_bytes: int) -> MeasuredArtifacts:
        """Measure the stored files, before the quota is checked for a job that will train models of `num_bytes` in all.

        Call this method before entering `Store.admission`, because admissions of other requests would wait while files
        are measured. If `num_bytes` is 0, nothing is measured.
        """
        if not num_bytes:
            return MeasuredArtifacts({}, 0, math.inf)
        missing = self._missing()  # before the files, or what is stored now would count nowhere
        return MeasuredArtifacts(missing, self._artifacts.num_bytes(), self._quota_bytes())

    def admit(
        self,
        num_bytes: int,
        make: Callable[[], Made],
        *,
        check: Callable[[], None] = lambda: None,
        measured: MeasuredArtifacts | None = None,
    ) -> Made:
        """Store a job by calling `make`, if the quota has room for the models that it will train (`num_bytes` in all).

        Artifacts that are stored already, such as trained models, and artifacts that unfinished jobs will still store,
        also count towards the quota. `check` is called first, and may refuse the job by an error. Until the job is
        stored or refused, no server with this database admits another job. Returns the result of `make`. Raises
        Conflict, without calling `make`, if the job's artifacts do not fit.

        `measured` is a result of the method `measure`; if it is None, this method measures. A caller that is already
        inside of `Store.admission` must pass a result.
        """
        measured = measured or self.measure(num_bytes)
        missing, used, quota = measured.missing, measured.used, measured.quota
        with self._store.admission():
            check()
            if num_bytes:
                now = self._missing()
                reserved = sum(max(missing.get(job, 0), now.get(job, 0)) for job in missing.keys() | now.keys())
                if used + reserved + num_bytes > quota:
                    raise Conflict(
                        f"the experts need {gib(num_bytes)}; of the {gib(quota)} of --artifact-quota, stored experts "
                        f"and policies take {gib(used)}, and unfinished fine-tunings will take {gib(reserved)}; delete "
                        "jobs that are no longer needed"
                    )
            return make()

    def _missing(self) -> dict[str, int]:
        """Number of bytes that each unfinished job is still expected to store, keyed by job id."""
        return {job.id: missing_bytes(job, self._artifacts) for job in self._store.unfinished_jobs()}

    def _quota_bytes(self) -> float:
        if self._quota is not None:
            return self._quota
        capacity = self._artifacts.capacity()
        return math.inf if capacity is None else capacity // 10


def missing_bytes(job: JobRecord, artifacts: ArtifactStore) -> int:
    """Number of bytes that an unfinished job is still expected to store as artifacts, such as trained experts."""
    expected = int(job.accepted.get("artifact_bytes", 0))
    return max(0, expected - sum(artifact.num_bytes for artifact in artifacts.of(job.id))) if expected else 0
