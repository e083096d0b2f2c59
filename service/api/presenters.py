"""JSON documents that the server sends, made from the store's records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from service.api.prefix import below_root, with_root
from service.api.protocols import Cluster
from service.jobs.base import JobKind, View
from service.jobs.search.kind import SEARCH
from service.schemas.api import (
    AuditEntryDocument,
    EventDocument,
    ExportDocument,
    TeamDocument,
    TokenDocument,
    UserDocument,
)
from service.store import EventRecord
from service.types import (
    AuditRecord,
    ExportRecord,
    ExportState,
    JobRecord,
    TeamRecord,
    TokenRecord,
    UserRecord,
)

__all__ = [
    "audit_document",
    "event_document",
    "export_document",
    "export_path",
    "job_document",
    "rfc_3339",
    "team_document",
    "token_document",
    "user_document",
]


def rfc_3339(time_s: float) -> str:
    """Format a time in seconds since the epoch as RFC 3339 text, such as `2026-11-21T09:54:24.123Z`."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export_path(record: ExportRecord) -> str:
    """URL path of an export on the server."""
    return f"{SEARCH.path_of(record.study)}/exports/{record.id}"


def job_document(job: JobRecord, kind: JobKind, view: View, *, cluster: Cluster) -> dict[str, Any]:
    """Build the JSON document that describes a job: the fields of all jobs, the fields of its kind, and links.

    `view` has the fields and links that are specific to the job's kind. `cluster` says why the job waits, and in which
    Ray Job its driver runs.
    """
    path = kind.path_of(job.id)
    document = {
        "id": job.id,
        "kind": job.kind,
        "name": job.name,
        "state": job.state.value,
        "reason": job.reason,
        "waiting_for": cluster.waiting_for(job),
        "created_at": rfc_3339(job.created_at),
        "wall_clock_s": job.wall_clock_s,
        "attempt": job.attempt,
        **view.fields,
        "job": cluster.ray_job(job),
        "owner": job.owner,
        "team": job.team,
        "sharing": job.sharing.value,
        "description": job.description,
        "tags": list(job.tags),
        "notes": job.notes,
        "priority": job.priority,
        "version": job.version,
        "links": {"self": path, **{name: f"{path}/{name}" for name in kind.links}, **view.links},
    }
    shown: dict[str, Any] = with_root(document)
    return shown


def user_document(user: UserRecord) -> UserDocument:
    return {
        "name": user.name,
        "is_admin": user.is_admin,
        "is_disabled": user.is_disabled,
        "created_at": rfc_3339(user.created_at),
        "teams": {team: role.value for team, role in user.roles.items()},
    }


def team_document(team: TeamRecord) -> TeamDocument:
    return {
        "name": team.name,
        "created_at": rfc_3339(team.created_at),
        "members": {user: role.value for user, role in team.members.items()},
    }


def token_document(token: TokenRecord) -> TokenDocument:
    def shown(time: float | None) -> str | None:
        return None if time is None else rfc_3339(time)

    return {
        "id": token.id,
        "user": token.user,
        "name": token.name,
        "prefix": token.prefix,
        "scope": token.scope.value,
        "created_at": rfc_3339(token.created_at),
        "expires_at": shown(token.expires_at),
        "last_used_at": shown(token.last_used_at),
        "revoked_at": shown(token.revoked_at),
    }


def audit_document(entry: AuditRecord) -> AuditEntryDocument:
    return {
        "id": entry.id,
        "time": rfc_3339(entry.time),
        "user": entry.user,
        "origin": entry.origin,
        "token": entry.token,
        "action": entry.action,
        "target": entry.target,
        "before": None if entry.before is None else dict(entry.before),
        "after": None if entry.after is None else dict(entry.after),
    }


def event_document(event: EventRecord) -> EventDocument:
    payload: dict[str, Any] = dict(event.payload)
    return {"id": event.id, "time": rfc_3339(event.time), "kind": event.kind, "payload": payload}


def export_document(record: ExportRecord, num_bytes: int | None) -> ExportDocument:
    """Build the JSON document that describes an export; `num_bytes` is the size of its files, None if there are none.

    The document has the model's size and a download link only if the export is COMPLETE and its files still exist.
    """
    is_there = record.state is ExportState.COMPLETE and num_bytes is not None
    path = below_root(export_path(record))
    return {
        "id": record.id,
        "study": record.study,
        "trial": record.trial,
        "dtype": record.dtype,
        "state": record.state.value,
        "reason": record.reason,
        "created_at": rfc_3339(record.created_at),
        "bytes": num_bytes if is_there else None,
        "links": {"self": path, **({"download": f"{path}/download"} if is_there else {})},
    }
