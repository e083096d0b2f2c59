"""JSON documents that are sent to webhooks, and from which mails are made.

A document has only data that every reader of the job may read: neither secrets nor the submitted document.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from service.jobs.registry import kind_of
from service.schemas.api import NotificationDocument
from service.store.notifications import TEST, Notice
from service.types import DeliveryRecord, JobRecord, NoticeKind

__all__ = ["event_type", "message_id", "notification", "notification_for_test"]

# Characters of a reason that are sent; the page of the job has all.
MAX_REASON = 2000


def notification(job: JobRecord, notice: Notice, *, public_url: str | None) -> str:
    """Make the message that tells users about a change of a job: a JSON object as text, in ASCII.

    `job` is the job as it is stored now, and `notice` is the change. `public_url` is the URL under which users reach
    the server; None if it is not known, so that the link to the job has only a path.
    """
    reason = notice.reason
    is_wait = notice.kind is NoticeKind.WAITING
    document: NotificationDocument = {
        "type": event_type(notice.kind.value),
        "timestamp": _rfc_3339(notice.time),
        "data": {
            "id": job.id,
            "kind": job.kind,
            "name": job.name,
            "state": notice.state.value,
            "reason": None if is_wait else _cut(reason),
            "waiting_for": _cut(reason) if is_wait else None,
            "url": f"{public_url or ''}{kind_of(job.kind).path_of(job.id)}",
            "owner": job.owner,
            "team": job.team,
            "wall_clock_s": job.wall_clock_s,
            "progress": None if job.progress is None else dict(job.progress),
        },
    }
    return _text(document)


def event_type(event: str) -> str:
    """Value of the key `type` in the notification about an event (a change of a job, or a test): "job.complete" etc."""
    return event if event == TEST else f"job.{event}"


def message_id(delivery: DeliveryRecord) -> str:
    """Id of a message to a webhook or mail address, equal at each try, by which receivers recognise repetitions."""
    return f"msg_{delivery.id}"


def notification_for_test(time_s: float) -> str:
    """Text of the test message to a webhook, as JSON in ASCII; it is about no job.

    `time_s` is the time of the test in seconds since the epoch.
    """
    return _text({"type": TEST, "timestamp": _rfc_3339(time_s), "data": {}})


def _text(document: Mapping[str, Any]) -> str:
    return json.dumps(document, separators=(",", ":"))


def _cut(text: str | None) -> str | None:
    return text if text is None or len(text) <= MAX_REASON else f"{text[:MAX_REASON]}..."


def _rfc_3339(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
