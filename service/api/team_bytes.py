"""Quotas of the bytes that the artifacts and the exported models of a team's jobs take.

A request that would exceed a quota is refused with 403, because sending it again does not help unless something is
deleted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from service.api.export_queue import Exports
from service.api.limits.artifacts import missing_bytes
from service.api.problems import Refusal
from service.disk import gib
from service.jobs.registry import KINDS
from service.store import Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.store.exports import ExportStore
from service.studies.preflight.dtype import DTYPE_BYTES
from service.types import ExportRecord, ExportState, JobRecord

__all__ = ["MeasuredExports", "TeamBytes"]


@dataclass(frozen=True)
class MeasuredExports:
    """Sizes in bytes of the files of a team's exports, keyed by the export's id and state.

    The sizes are measured before quotas are checked (`Store.admission`). An export's files change only when its state
    changes. If an export is removed after the measurement, its files do not count.
    """

    num_bytes: Mapping[tuple[str, ExportState], int]


UNMEASURED = MeasuredExports({})

# Kinds of job whose artifacts have names that users chose.
NAMED_BY_USERS = frozenset(kind.name for kind in KINDS.values() if kind.names_artifacts)


class TeamBytes:
    """Computes the bytes that artifacts and exported models of each team take, and checks requests against the quotas.

    Each check reads the team's present quotas.
    """

    def __init__(self, store: Store, accounts: AccountStore, artifacts: ArtifactStore, exports: Exports) -> None:
        self._store, self._accounts, self._artifacts, self._exports = store, accounts, artifacts, exports
        self._records = ExportStore(store)

    def artifacts(self, team: str) -> int:
        """Bytes of the artifacts of a team's jobs: trained experts, and policies that searches have learned.

        Artifacts that unfinished fine-tunings are expected to store are included.
        """
        expected = sum(missing_bytes(job, self._artifacts) for job in self._store.unfinished_jobs() if job.team == team)
        return self._stored(team) + expected

    def exports(self, team: str) -> int:
        """Bytes of the models that a team's jobs have exported; unfinished exports count with their expected size."""
        return sum(map(self._size_of, self._records.exports_of_team(team)))

    def check_artifacts(self, team: str | None, num_bytes: int) -> None:
        """Raise Refusal (403) if `num_bytes` more bytes of artifacts would exceed the quota of a team.

        Artifacts are files that jobs make, such as trained experts. If `team` is None, nothing is checked.
        """
        quota = None if team is None else self._accounts.team(team).limits.artifact_bytes
        if team is not None and quota is not None and num_bytes and (used := self.artifacts(team)) + num_bytes > quota:
            raise Refusal(
                403,
                f"quota artifact_bytes of team {team}: {gib(used)} of {gib(quota)} are used, and the experts need "
                f"{gib(num_bytes)}; delete jobs that are no longer needed",
            )

    def measure(self, team: str | None, *, with_job: str | None = None) -> MeasuredExports:
        """Measure the files of a team's exports, and the files of the exports of the job `with_job` (None: no job).

        Call this method before entering `Store.admission`, because admissions of other requests would wait while files
        are measured. Without a quota of exports nothing is measured.
        """
        if team is None or self._accounts.team(team).limits.export_bytes is None:
            return MeasuredExports({})
        exports = [*self._records.exports_of_team(team), *(() if with_job is None else self._records.exports(with_job))]
        return MeasuredExports({(each.id, each.state): self._exports.num_bytes(each) or 0 for each in exports})

    def check_export(self, study: JobRecord, dtype: str, measured: MeasuredExports) -> None:
        """Raise Refusal (403) if another exported model of a study would exceed the quota of the study's team.

        `dtype` is the number format of the model's weights, on which its size depends. `measured` are the sizes of the
        team's exports, as `measure` has found them; files that were written after this measurement are measured now.
        """
        self._check_exports(study.team, max(_expected_bytes(study, dtype), 1), "the model needs", measured)

    def check_move(self, job: JobRecord, team: str, measured: MeasuredExports) -> None:
        """Raise Refusal (403) if the stored data of a job would exceed a quota of the team to which the job moves.

        Data that an unfinished job or export is expected to store count too. `measured` are the sizes of the exports of
        the team and of the job, as `measure` has found them; files that were written after this measurement are
        measured now.
        """
        missing = 0 if job.state.is_finished else missing_bytes(job, self._artifacts)
        self.check_artifacts(team, self._stored(team, with_job=job.id) - self._stored(team) + missing)
        if self._accounts.team(team).limits.export_bytes is not None:
            moved = sum(self._size_of(export, measured) for export in self._records.exports(job.id))
            self._check_exports(team, moved, "the exported models need", measured)

    def _stored(self, team: str, *, with_job: str | None = None) -> int:
        return self._artifacts.num_bytes_of_team(team, with_job=with_job, named_by_users=NAMED_BY_USERS)

    def _check_exports(self, team: str | None, num_bytes: int, need: str, measured: MeasuredExports) -> None:
        quota = None if team is None else self._accounts.team(team).limits.export_bytes
        if team is None or quota is None or not num_bytes:
            return
        used = sum(self._size_of(export, measured) for export in self._records.exports_of_team(team))
        if used + num_bytes > quota:
            raise Refusal(
                403,
                f"quota export_bytes of team {team}: {gib(used)} of {gib(quota)} are used, and {need} "
                f"{gib(num_bytes)}; delete exports that are no longer needed",
            )

    def _size_of(self, export: ExportRecord, measured: MeasuredExports = UNMEASURED) -> int:
        stored = measured.num_bytes.get((export.id, export.state))
        if stored is None:
            stored = self._exports.num_bytes(export)
        if export.state in (ExportState.WAITING, ExportState.RUNNING):
            return max(stored or 0, _expected_bytes(self._store.job(export.study), export.dtype))
        return stored or 0


def _expected_bytes(study: JobRecord, dtype: str) -> int:
    """Expected size in bytes of a model that is exported from `study` with the number format `dtype`.

    Returns 0 for a study of an earlier version, which did not store the number of the model's parameters.
    """
    return int(study.accepted.get("export_parameters", 0)) * DTYPE_BYTES[dtype]
