"""What routes depend on: the services, created in `create_app`, and parsed path parameters."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
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
from service.api.limits.artifacts import ArtifactQuota
from service.api.metrics import RequestCounter
from service.api.preflight_process import Preflight
from service.api.problems import Refusal
from service.api.protocols import Cluster, Principal
from service.api.record_cache import RunRecords
from service.api.requests import principal
from service.errors import NotFound
from service.store import Store
from service.store.artifacts import ArtifactStore
from service.types import JobKind, JobRecord

__all__ = [
    "GIVEN",
    "MAX_ID",
    "MAX_NUMBER",
    "PAGE_HEADERS",
    "Against",
    "Context",
    "Finetune",
    "Sender",
    "Services",
    "Study",
    "TrialNumber",
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
    data_dir: Path
    cluster: Cluster
    preflight: Preflight
    exports: Exports
    artifacts: ArtifactStore
    quota: ArtifactQuota
    hub: EventHub
    records: RunRecords
    requests: RequestCounter
    # Requests with the same idempotency key run one at a time, so later ones find the study of the first.
    key_locks: WeakValueDictionary[str, asyncio.Lock] = field(default_factory=WeakValueDictionary)


async def _services(request: Request) -> Services:
    services: Services = request.app.state.services
    return services


class _Segment(StringConvertor):
    """A path segment without a colon, which separates a verb (`STUDY:cancel`)."""

    regex = "[^/:]+"


register_url_convertor("segment", _Segment())

Context = Annotated[Services, Depends(_services)]
Sender = Annotated[Principal, Depends(principal)]
TrialNumber = Annotated[int, PathParameter(description="The trial's `number`.", ge=0, le=MAX_NUMBER)]


ID_PATTERN = "^[0-9a-f]{32}$"


def _study(
    study_id: Annotated[str, PathParameter(description="As in the study's `id`.", pattern=ID_PATTERN)],
    services: Context,
) -> JobRecord:
    return _found(services, study_id, JobKind.SEARCH)


def _finetune(
    finetune_id: Annotated[str, PathParameter(description="As in the fine-tuning's `id`.", pattern=ID_PATTERN)],
    services: Context,
) -> JobRecord:
    return _found(services, finetune_id, JobKind.FINETUNE)


def _against(
    services: Context,
    against: Annotated[
        list[Annotated[str, StringConstraints(pattern=ID_PATTERN)]],
        Query(
            description="Other fine-tunings of the same experts, to compare with: their `id`.",
            max_length=20,
            default_factory=list,
        ),
    ],
) -> list[JobRecord]:
    return [_found(services, finetune_id, JobKind.FINETUNE) for finetune_id in against]


def _found(services: Services, study_id: str, kind: JobKind) -> JobRecord:
    try:
        record = services.store.job(study_id)
    except NotFound as error:
        raise Refusal(404, f"{kind.noun} {study_id!r}: there is no such {kind.noun}") from error
    if record.kind is not kind:
        raise Refusal(404, f"{kind.noun} {study_id!r}: is a {record.kind.noun}, not a {kind.noun}")
    return record


# Parameters of routes: the stored record that the path names.
GIVEN: Mapping[JobKind, Any] = {JobKind.SEARCH: Depends(_study), JobKind.FINETUNE: Depends(_finetune)}
Study = Annotated[JobRecord, GIVEN[JobKind.SEARCH]]
Finetune = Annotated[JobRecord, GIVEN[JobKind.FINETUNE]]
Against = Annotated[list[JobRecord], Depends(_against)]
