"""JSON documents that the server sends, made from the store's records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from service.api.prefix import below_root, with_root
from service.api.protocols import Cluster
from service.cluster.reconciler import QueueState
from service.jobs.base import JobKind, View
from service.jobs.registry import kind_of
from service.jobs.search.kind import SEARCH
from service.notifications.documents import event_type, message_id
from service.results.summary import verification_document
from service.schemas.api import (
    AuditEntryDocument,
    DeliveryDocument,
    EventDocument,
    ExportDocument,
    JobEventDocument,
    MailDocument,
    ProvenanceDocument,
    QueuedJobDocument,
    QueueDocument,
    QueueEntryDocument,
    QueuePlaceDocument,
    RayJobDocument,
    RightName,
    TeamDocument,
    TeamLimitsDocument,
    TokenDocument,
    UserDocument,
    WebhookDocument,
)
from service.store import EventRecord, EvidenceRecord
from service.store.documents import Verification
from service.store.records import JobEventRecord
from service.types import (
    Account,
    AuditRecord,
    DeliveryRecord,
    ExportRecord,
    ExportState,
    JobRecord,
    SubscriptionRecord,
    TeamLimits,
    TeamRecord,
    TokenRecord,
    UserRecord,
)

__all__ = [
    "audit_document",
    "delivery_document",
    "event_document",
    "export_document",
    "export_path",
    "job_document",
    "job_event_document",
    "limits_document",
    "mail_document",
    "provenance_document",
    "queue_document",
    "rfc_3339",
    "team_document",
    "token_document",
    "user_document",
    "webhook_document",
]


def rfc_3339(time_s: float) -> str:
    """Format a time in seconds since the epoch as RFC 3339 text, such as `2026-11-21T09:54:24.123Z`."""
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export_path(record: ExportRecord) -> str:
    """URL path of an export (a merged model for download) on the server, without a path prefix."""
    return f"{SEARCH.path_of(record.study)}/exports/{record.id}"


def job_document(
    job: JobRecord, kind: JobKind, view: View, *, cluster: Cluster, reader: Account | None, sees_dashboard: bool
) -> dict[str, Any]:
    """Build the JSON document that describes a job: the fields of all jobs, the fields of its kind, and links.

    `view` has the fields and links that only jobs of this `kind` have. `cluster` says why the job waits, where it is in
    the queue, and which Ray Job runs its driver, the process that works on the job. `reader` is the user who gets the
    document; None if the server has no accounts. `sees_dashboard` says whether this user may read Ray's dashboard, so
    that the document has a link to the page of the Ray Job.
    """
    path = kind.path_of(job.id)
    document = {
        "id": job.id,
        "kind": job.kind,
        "name": job.name,
        "state": job.state.value,
        "reason": job.reason,
        "waiting_for": cluster.waiting_for(job, reader=reader),
        "queue": _place_of(job, cluster.queue()),
        "created_at": rfc_3339(job.created_at),
        "wall_clock_s": job.wall_clock_s,
        "attempt": job.attempt,
        "heartbeat_at": None if job.heartbeat_at is None else rfc_3339(job.heartbeat_at),
        **view.fields,
        "job": _ray_job_document(job, cluster, sees_dashboard=sees_dashboard),
        "owner": job.owner,
        "team": job.team,
        "sharing": job.sharing.value,
        "description": job.description,
        "tags": list(job.tags),
        "notes": job.notes,
        "priority": job.priority,
        "version": job.version,
        "rights": _rights(job, reader),
        "links": {"self": path, **{name: f"{path}/{name}" for name in kind.links}, **view.links},
    }
    shown: dict[str, Any] = with_root(document)
    return shown


def _rights(job: JobRecord, reader: Account | None) -> list[RightName]:
    rights: dict[RightName, bool] = {
        "use": reader is None or reader.may_use(job),
        "change": reader is None or reader.may_change(job),
    }
    return [right for right, is_given in rights.items() if is_given]


def _place_of(job: JobRecord, queue: QueueState) -> QueuePlaceDocument | None:
    waiting = queue.choice.waiting.get(job.id)
    if waiting is None or job.state.is_finished:
        return None
    return {
        "position": waiting.position,
        "length": len(queue.choice.waiting),
        "estimated_start": _estimate(job.id, queue),
    }


def _estimate(job_id: str, queue: QueueState) -> str | None:
    estimate = queue.estimates.get(job_id)
    return None if estimate is None else rfc_3339(estimate)


def queue_document(jobs: Iterable[JobRecord], *, cluster: Cluster, reader: Account | None) -> QueueDocument:
    """Build the JSON document about the queue for the user `reader`, or for everybody if the server has no accounts.

    `jobs` has the unfinished jobs, and `cluster` knows the order of the queue. A job that the reader may not read is an
    entry with a position and nothing else.
    """
    queue = cluster.queue()
    known = {job.id: job for job in jobs if reader is None or reader.may_read(job)}

    def entry(job_id: str, position: int | None) -> QueueEntryDocument:
        job = known.get(job_id)
        return {
            "position": position,
            "job": None if job is None else _queued_job(job),
            "waiting_for": None if job is None else cluster.waiting_for(job, reader=reader),
            "estimated_start": None if job is None else _estimate(job_id, queue),
        }

    return {
        "places": queue.places,
        "not_ready": cluster.not_ready(),
        "running": [entry(job_id, None) for job_id in queue.running],
        "waiting": [entry(job_id, waiting.position) for job_id, waiting in queue.choice.waiting.items()],
    }


def _queued_job(job: JobRecord) -> QueuedJobDocument:
    return {
        "id": job.id,
        "kind": job.kind,
        "name": job.name,
        "state": job.state.value,
        "owner": job.owner,
        "team": job.team,
        "priority": job.priority,
        "created_at": rfc_3339(job.created_at),
        "link": below_root(kind_of(job.kind).path_of(job.id)),
    }


def _ray_job_document(job: JobRecord, cluster: Cluster, *, sees_dashboard: bool) -> RayJobDocument | None:
    name = cluster.ray_job(job)
    if name is None:
        return None
    is_shown = sees_dashboard and cluster.dashboard() is not None
    page = below_root(f"/ray/#/jobs/{quote(name, safe='')}") if is_shown else None
    return {"submission_id": name, "dashboard_url": page}


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
        "limits": limits_document(team.limits),
    }


def limits_document(limits: TeamLimits) -> TeamLimitsDocument:
    return {
        "weight": limits.weight,
        "max_running": limits.max_running,
        "max_replicas": limits.max_replicas,
        "max_served": limits.max_served,
        "gpu_hours": limits.gpu_hours,
        "artifact_bytes": limits.artifact_bytes,
        "export_bytes": limits.export_bytes,
        "requests_per_minute": limits.requests_per_minute,
    }


def token_document(token: TokenRecord) -> TokenDocument:
    return {
        "id": token.id,
        "user": token.user,
        "name": token.name,
        "prefix": token.prefix,
        "scope": token.scope.value,
        "created_at": rfc_3339(token.created_at),
        "expires_at": _time(token.expires_at),
        "last_used_at": _time(token.last_used_at),
        "revoked_at": _time(token.revoked_at),
    }


def _time(time_s: float | None) -> str | None:
    return None if time_s is None else rfc_3339(time_s)


def webhook_document(webhook: SubscriptionRecord) -> WebhookDocument:
    """Build the JSON document that describes a webhook, without its secret."""
    return {
        "id": webhook.id,
        "url": webhook.target,
        "events": [event.value for event in webhook.events],
        "owner": webhook.owner,
        "covers": webhook.covers.value,
        "team": webhook.team,
        "created_at": rfc_3339(webhook.created_at),
        "failing_since": _time(webhook.failing_since),
        "disabled_at": _time(webhook.disabled_at),
        "disabled_reason": webhook.disabled_reason,
    }


def delivery_document(delivery: DeliveryRecord) -> DeliveryDocument:
    """Build the JSON document that describes a delivery (one message to a webhook), without the message's text."""
    return {
        "id": message_id(delivery),
        "event": event_type(delivery.event),
        "job": delivery.study,
        "state": delivery.state.value,
        "attempts": delivery.attempts,
        "created_at": rfc_3339(delivery.created_at),
        "next_at": _time(delivery.next_at),
        "finished_at": _time(delivery.finished_at),
        "status": delivery.status,
        "error": delivery.error,
    }


def mail_document(user: str, mail: SubscriptionRecord | None) -> MailDocument:
    """Build the JSON document about a user's e-mail address, which receives mails about jobs.

    `mail` is the stored address; None if the user has none.
    """
    return {
        "user": user,
        "address": None if mail is None else mail.target,
        "events": [] if mail is None else [event.value for event in mail.events],
        "disabled_at": None if mail is None else _time(mail.disabled_at),
        "disabled_reason": None if mail is None else mail.disabled_reason,
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


def job_event_document(record: JobEventRecord) -> JobEventDocument:
    event = event_document(record.event)
    return {**event, "job": record.job, "job_kind": record.job_kind, "name": record.name}


def export_document(record: ExportRecord, num_bytes: int | None) -> ExportDocument:
    """Build the JSON document that describes an export, which is a merged model for download.

    `num_bytes` is the total size of the export's files; None if there are no files. The document contains this size and
    a download link only if the export is COMPLETE and its files still exist.
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


def provenance_document(
    trial: int, evidence: Sequence[EvidenceRecord], verification: Verification
) -> ProvenanceDocument:
    """Build the JSON document about the origin of a trial's stored samples.

    `trial` is the trial's number, and `evidence` has the reports of the engines that scored samples of its recipe.
    `verification` has the scores that transformers gave to some trials again, for comparison with the stored scores.
    """
    samples: Counter[str] = Counter()
    for record in evidence:
        samples[record.replica] += record.num_samples
    reports = [report for report in verification.reports if report.trial == trial]
    return {
        "fingerprints": list(dict.fromkeys(record.bank_fingerprint for record in evidence)),
        "engines": list(dict.fromkeys(record.engine for record in evidence)),
        "replicas": dict(sorted(samples.items())),
        "finished_at": rfc_3339(evidence[-1].finished_at) if evidence else None,
        "verification": verification_document(reports, None) if reports else None,
    }
