"""FastAPI dependencies of routes: the services that `create_app` creates, and parsed path parameters."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from weakref import WeakValueDictionary

from fastapi import Depends, Query, Request
from fastapi import Path as PathParameter
from pydantic import StringConstraints
from starlette.convertors import StringConvertor, register_url_convertor

from service.api.event_stream import EventHub
from service.api.export_queue import Exports
from service.api.importances import Importances
from service.api.limits.artifacts import ArtifactQuota
from service.api.permissions import Guard, Right, Rule, Sender, check_right, declares, needs, sender_with
from service.api.preflight_process import Preflight
from service.api.problems import Refusal
from service.api.protocols import Cluster, Principal
from service.api.ray_dashboard.forwarding import DashboardProxy
from service.api.record_cache import RunRecords
from service.api.request_counter import RequestCounter
from service.api.team_bytes import TeamBytes
from service.auth.authenticator import Authenticator
from service.auth.logins import Logins
from service.errors import NotFound
from service.jobs.base import JobKind
from service.jobs.finetune.kind import FINETUNE
from service.jobs.registry import kind_of
from service.jobs.search.kind import SEARCH
from service.notifications.notifier import Notifier
from service.store import Store
from service.store.accounts import AccountStore
from service.store.artifacts import ArtifactStore
from service.store.exports import ExportStore
from service.store.notifications import NotificationStore
from service.store.steering import SteeringStore
from service.types import JobRecord, Scope, TrialRecord

__all__ = [
    "ID_PATTERN",
    "MAX_ID",
    "MAX_NUMBER",
    "PAGE_HEADERS",
    "Against",
    "ChangedStudy",
    "Context",
    "Finetune",
    "Reader",
    "Services",
    "Study",
    "Submitter",
    "TrialNumber",
    "UsedStudy",
    "found_job",
    "found_trial",
    "given",
]

# For pages of text and SVG: they may neither run scripts nor load anything.
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; sandbox",
    "X-Content-Type-Options": "nosniff",
}
# The largest values of the database's integer columns.
MAX_NUMBER = 2**31 - 1
MAX_ID = 2**63 - 1


@dataclass(frozen=True)
class Services:
    store: Store
    steering: SteeringStore
    stored_exports: ExportStore
    data_dir: Path
    cluster: Cluster
    preflight: Preflight
    exports: Exports
    artifacts: ArtifactStore
    quota: ArtifactQuota
    team_bytes: TeamBytes
    hub: EventHub
    records: RunRecords
    importances: Importances
    requests: RequestCounter
    accounts: AccountStore
    authenticator: Authenticator
    guard: Guard
    dashboard: DashboardProxy
    notifications: NotificationStore
    notifier: Notifier
    logins: Logins | None = None
    # Requests with the same idempotency key run one at a time, so later ones find the job of the first.
    key_locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


class _Segment(StringConvertor):
    """Route convertor for a path segment without a colon, because a colon starts an action, as in `{job_id}:cancel`."""

    regex = "[^/:]+"


register_url_convertor("segment", _Segment())

Context = Annotated[Services, Depends(_services)]
REASON = Query(description="Why; shown in the events of the job.", min_length=1, max_length=500, pattern=r"^[^\r\n]*$")
TrialNumber = Annotated[int, PathParameter(description="The `number` of the trial.", ge=0, le=MAX_NUMBER)]


ID_PATTERN = "^[0-9a-f]{32}$"


# Senders of requests whose path names no job.
Reader = Annotated[Principal, needs(Scope.READ)]
Submitter = Annotated[Principal, needs(Scope.SUBMIT)]


def given(kind: JobKind, right: Right = Right.READ) -> Any:
    """Make a FastAPI dependency that reads the job in the request's path, and checks the sender's rights on it.

    The path has the job's id; the job must be of this `kind`. The dependency responds with status 404 if there is no
    such job or the sender may not read it. The dependency responds with status 403 if the sender may read the job but
    lacks the `right`, or if the sender's token lacks the scope for the right. `Right.READ` needs the scope "read", and
    every other right needs the scope "submit".
    """
    scope = Scope.READ if right is Right.READ else Scope.SUBMIT
    # A default instead of an annotation: FastAPI cannot evaluate annotations that name local variables.
    path = PathParameter(alias=f"{kind.resource}_id", description=f"The `id` of the {kind.noun}.", pattern=ID_PATTERN)

    sending = sender_with(scope)

    def found(services: Context, sender: Principal = sending, job_id: str = path) -> JobRecord:
        return found_job(services, sender, job_id, kind, right)

    return declares(Rule(scope, right), found)


def _against(
    services: Context,
    sender: Sender,
    against: Annotated[
        list[Annotated[str, StringConstraints(pattern=ID_PATTERN)]],
        Query(
            description="The `id` of other fine-tunings of the same experts, to compare with.",
            max_length=20,
            default_factory=list,
        ),
    ],
) -> list[JobRecord]:
    return [found_job(services, sender, finetune_id, FINETUNE, Right.READ) for finetune_id in against]


def found_job(services: Services, sender: Principal, job_id: str, kind: JobKind, right: Right) -> JobRecord:
    """Read the job with the id `job_id`, and check that the sender of the request has the `right` on it.

    Raises Refusal with status 404 if the job does not exist, is not of this `kind`, or may not be read by the sender.
    Raises Refusal with status 403 if the sender may read the job but lacks the right.
    """
    try:
        record = services.store.job(job_id)
    except NotFound:
        record = None
    if record is None or not check_right(sender, record, right, noun=kind_of(record.kind).noun):
        raise Refusal(404, f"{kind.noun} {job_id!r}: there is no such {kind.noun}")
    if record.kind != kind.name:
        raise Refusal(404, f"{kind.noun} {job_id!r}: is a {kind_of(record.kind).noun}, not a {kind.noun}")
    return record


def found_trial(services: Services, study: JobRecord, number: int) -> TrialRecord:
    """Read a trial of a study. Raises Refusal with status 404 if there is no such trial (yet)."""
    try:
        return services.store.trial(study.id, number)
    except NotFound as error:
        raise Refusal(404, f"trial {number}: study {study.name!r} has no such trial (yet)") from error


Study = Annotated[JobRecord, given(SEARCH)]
UsedStudy = Annotated[JobRecord, given(SEARCH, Right.USE)]
ChangedStudy = Annotated[JobRecord, given(SEARCH, Right.CHANGE)]
Finetune = Annotated[JobRecord, given(FINETUNE)]
Against = Annotated[list[JobRecord], Depends(_against)]
