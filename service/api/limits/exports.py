"""Limits on kept exports: which have expired, and which must make room for others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.types import ExportRecord, ExportState

__all__ = ["DAY_S", "ExportLimits", "KeptExport", "to_remove"]

DAY_S = 86400.0


@dataclass(frozen=True)
class ExportLimits:
    """Limits on the age and the total size of exports.

    Exports are removed `lifetime_s` after they were written; before that, the oldest first, while all together take
    more than `quota_bytes` (None: a tenth of the disk).
    """

    lifetime_s: float = 7 * DAY_S
    quota_bytes: int | None = None


@dataclass(frozen=True)
class KeptExport:
    """An export, the time at which its files were last written (seconds since the epoch), and their bytes."""

    record: ExportRecord
    written_at: float
    num_bytes: int

    @property
    def is_in_progress(self) -> bool:
        return self.record.state in (ExportState.WAITING, ExportState.RUNNING)


def to_remove(kept: Sequence[KeptExport], *, now: float, lifetime_s: float, quota_bytes: int) -> Iterator[ExportRecord]:
    """Exports to remove, oldest first: expired ones, and those beyond the quota.

    Exports in progress stay. The quota never removes the newest complete export.
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
