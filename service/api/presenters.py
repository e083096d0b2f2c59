"""The store's records as the documents that the server sends."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from service.api.protocols import Cluster
from service.schemas.api import (
    EventDocument,
    ExpertDocument,
    ExportDocument,
    FinetuneDocument,
    ProgressDocument,
    StudyDocument,
)
from service.store import EventRecord
from service.types import ArtifactRecord, ExportRecord, ExportState, JobRecord
from workers.training.finetuning.fleet import EXPERTS

__all__ = [
    "event_document",
    "export_document",
    "export_path",
    "finetune_document",
    "finetune_path",
    "rfc_3339",
    "study_document",
    "study_path",
]

LINKED = ("study", "trials", "pareto", "summary", "report", "events", "plots", "exports", "log")
FINETUNE_LINKED = ("specification", "curves", "report", "events", "log")


def rfc_3339(time_s: float) -> str:
    """Seconds since the epoch as `2026-11-21T09:54:24.123Z`."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def study_path(study_id: str) -> str:
    return f"/v1/studies/{study_id}"


def finetune_path(finetune_id: str) -> str:
    return f"/v1/finetunes/{finetune_id}"


def export_path(record: ExportRecord) -> str:
    return f"{study_path(record.study)}/exports/{record.id}"


def study_document(record: JobRecord, *, trials: Mapping[str, int], cluster: Cluster) -> StudyDocument:
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


def finetune_document(
    record: JobRecord,
    *,
    artifacts: Iterable[ArtifactRecord],
    study: JobRecord | None,
    is_analysed: bool,
    cluster: Cluster,
) -> FinetuneDocument:
    """`artifacts` are the experts that are trained, `study` is the one that was made of them."""
    path = finetune_path(record.id)
    progress = (record.progress or {}).get("experts", {})
    trained = {artifact.name: artifact for artifact in artifacts}
    experts: dict[str, ExpertDocument] = {
        alias: {
            "method": spec["method"]["kind"],
            "progress": progress.get(alias),
            "bytes": trained[alias].num_bytes if alias in trained else None,
            "links": {"download": f"{path}/experts/{alias}/download"} if alias in trained else {},
        }
        for alias, spec in record.document.get(EXPERTS, {record.name: record.document}).items()
    }
    return {
        "id": record.id,
        "name": record.name,
        "state": record.state.value,
        "reason": record.reason,
        "waiting_for": cluster.waiting_for(record),
        "created_at": rfc_3339(record.created_at),
        "wall_clock_s": record.wall_clock_s,
        "attempt": record.attempt,
        "experts": experts,
        "job": cluster.job(record),
        "links": {
            "self": path,
            **{name: f"{path}/{name}" for name in FINETUNE_LINKED},
            **({"analysis": f"{path}/analysis"} if is_analysed else {}),
            **({} if study is None else {"study": study_path(study.id)}),
        },
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
