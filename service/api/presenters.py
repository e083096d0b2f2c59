"""The store's records as the documents that the server sends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from service.api.protocols import Cluster
from service.schemas.api import EventDocument, ExportDocument, ProgressDocument, StudyDocument
from service.store import EventRecord
from service.types import ExportRecord, ExportState, StudyRecord

__all__ = ["event_document", "export_document", "export_path", "rfc_3339", "study_document", "study_path"]

LINKED = ("study", "trials", "pareto", "summary", "report", "events", "plots", "exports", "log")


def rfc_3339(time_s: float) -> str:
    """Seconds since the epoch as `2026-11-21T09:54:24.123Z`."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def study_path(study_id: str) -> str:
    return f"/v1/studies/{study_id}"


def export_path(record: ExportRecord) -> str:
    return f"{study_path(record.study)}/exports/{record.id}"


def study_document(record: StudyRecord, *, trials: Mapping[str, int], cluster: Cluster) -> StudyDocument:
    path = study_path(record.id)
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state.value,
        "reason": record.reason,
        "waiting_for": cluster.waiting_for(record),
        "created_at": rfc_3339(record.created_at),
        "wall_clock_s": record.wall_clock_s,
        "attempt": record.attempt,
        "algorithm": record.resolved.algorithm,
        "algorithm_reason": record.resolved.algorithm_reason,
        "trials": dict(trials),
        "progress": None if record.progress is None else cast(ProgressDocument, dict(record.progress)),
        "job": cluster.job(record),
        "links": {"self": path, **{name: f"{path}/{name}" for name in LINKED}},
    }


def event_document(event: EventRecord) -> EventDocument:
    payload: dict[str, Any] = dict(event.payload)
    return {"id": event.id, "time": rfc_3339(event.time), "kind": event.kind, "payload": payload}


def export_document(record: ExportRecord, directory: Path) -> ExportDocument:
    """`directory` holds the exported model once it is COMPLETE, unless someone has removed it."""
    is_there = record.state is ExportState.COMPLETE and directory.is_dir()
    path = export_path(record)
    return {
        "id": record.id,
        "study": record.study,
        "trial": record.trial,
        "dtype": record.dtype,
        "state": record.state.value,
        "reason": record.reason,
        "created_at": rfc_3339(record.created_at),
        "bytes": sum(file.stat().st_size for file in directory.iterdir()) if is_there else None,
        "links": {"self": path, **({"download": f"{path}/download"} if is_there else {})},
    }
