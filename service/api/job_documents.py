"""The JSON documents of stored jobs, as the sender of a request may see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.api.dependencies import Services
from service.api.presenters import job_document
from service.api.protocols import Principal
from service.jobs.base import JobKind
from service.jobs.registry import kind_of
from service.types import JobRecord

__all__ = ["shown_job", "shown_jobs"]


def shown_jobs(services: Services, sender: Principal, jobs: Sequence[JobRecord], kind: JobKind) -> list[dict[str, Any]]:
    """JSON documents that describe `jobs`, all of one `kind`, to the sender of a request."""
    views = kind.view(jobs, services.store, services.artifacts) if jobs else ()
    sees = services.guard.may_read_dashboard(sender)
    return [
        job_document(job, kind, view, cluster=services.cluster, reader=sender.account, sees_dashboard=sees)
        for job, view in zip(jobs, views, strict=True)
    ]


def shown_job(services: Services, sender: Principal, job: JobRecord) -> dict[str, Any]:
    """JSON document that describes a job to the sender of a request."""
    (document,) = shown_jobs(services, sender, [job], kind_of(job.kind))
    return document
