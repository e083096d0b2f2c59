"""Limits on stored exports (merged models), and the selection of exports that have expired or exceed the quota."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.types import ExportRecord, ExportState

__all__ = ["DAY_S", "ExportLimits", "KeptExport", "to_remove"]

DAY_S = 86400.0


@dataclass(frozen=True)
class ExportLimits:
    """Limits on the age and the total size of exports (merged models that are kept for download).

    An export is removed `lifetime_s` seconds after it was written. While all exports together take more than
    `quota_bytes`, the oldest export is removed. If `quota_bytes` is None, the limit is a tenth of the disk, and exports
    in an object store have no limit of size.
    """

    lifetime_s: float = 7 * DAY_S
    quota_bytes: int | None = None


@dataclass(frozen=True)
class KeptExport:
    """The record of an export (a merged model for download), with the age and size of its files.

    `written_at` is the time at which the files were last written, in seconds since the epoch. `num_bytes` is their
    total size.
    """

    record: ExportRecord
    written_at: float
    num_bytes: int

    @property
    def is_in_progress(self) -> bool:
        return self.record.state in (ExportState.WAITING, ExportState.RUNNING)


def to_remove(
    kept: Sequence[KeptExport], *, now: float, lifetime_s: float, quota_bytes: float
) -> Iterator[ExportRecord]:
    """Yield the exports to remove, oldest first: all expired exports, and others until the rest fits into the quota.

    Exports are merged models for download; `kept` has all exports. An export expires `lifetime_s` seconds after it was
    written. `quota_bytes` is the total size that may be kept. Exports that are queued or being written are not removed.
    The newest complete export is removed only when it expires. `now` is in seconds since the epoch.
    """
    total = sum(export.num_bytes for export in kept)
    oldest_first = sorted(kept, key=lambda export: export.written_at)
    newest = next((e for e in reversed(oldest_first) if e.record.state is ExportState.COMPLETE), None)
    for export in oldest_first:
        is_expired = now - export.written_at > lifetime_s
        is_over = total > quota_bytes and export.num_bytes > 0 and export is not newest
        if not export.is_in_progress and (is_expired or is_over):
            total -= export.num_bytes
            yield export.record
