"""What routes of studies and of fine-tunings have in common: creation, cancelling, resuming, deletion, the log."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from service.api.dependencies import GIVEN, Context, Services
from service.api.problems import Json, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, YAML_TYPES, read_body, sent_as_json
from service.disk import job_dir
from service.errors import Conflict, StaleAttempt
from service.jobs.training_study import collect_sources
from service.schemas.api import DeletedDocument
from service.types import RESUMED_BY_REQUEST, JobKind, JobRecord, JobState

__all__ = ["PLACES", "IdempotencyKey", "StateFilter", "add_routes", "created"]

# The path of one of each kind.
PLACES: Mapping[JobKind, str] = {
    JobKind.SEARCH: "/studies/{study_id:segment}",
    JobKind.FINETUNE: "/finetunes/{finetune_id:segment}",
}

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="The same key with the same body again returns what it created.",
        pattern="^[!-~]{1,255}$",
    ),
]
StateFilter = Literal["CREATED", "RUNNING", "STOPPED", "COMPLETE", "FAILED", "CANCELLED"]


async def created(
    request: Request, services: Services, sender: Principal, *, kind: JobKind, key: str | None
) -> tuple[JobRecord, bool]:
    """What the request's body describes, stored if it passes every check, and whether it is new: an earlier request
    with the same key may have created it. Raises Refusal, InvalidStudy, Unavailable, and Conflict for a key of another
    body."""
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    if key is None:
        record, is_new = await _stored(services, content, is_json, kind=kind, key=None, client=sender.name)
    else:
        lock = services.key_locks.setdefault(key, asyncio.Lock())
        async with lock:
            record, is_new = await _stored(services, content, is_json, kind=kind, key=key, client=sender.name)
    if is_new:
        services.cluster.wake()
    return record, is_new


async def _stored(
    services: Services, content: bytes, is_json: bool, *, kind: JobKind, key: str | None, client: str
) -> tuple[JobRecord, bool]:
    digest = hashlib.sha256(content).hexdigest()
    found = await run_in_threadpool(services.store.job_of_key, key) if key is not None else None
    if found is None:
        checked = await services.preflight.examine(content, is_json=is_json, kind=kind, client=client)
        create = partial(
            services.store.create_job,
            name=checked.name,
            document=checked.document,
            resolved=checked.resolved,
            kind=kind,
            idempotency_key=key,
            request_digest=digest,
        )
        record = await run_in_threadpool(services.quota.admit, checked.resolved.artifact_bytes, create)
    else:
        record = found
    if record.request_digest != digest or record.kind is not kind:
        raise Conflict(
            f"Idempotency-Key {key!r} was sent before with another body, which created {record.kind.noun} {record.id}; "
            f"use another key for another {kind.noun}"
        )
    return record, found is None


def cancel(services: Services, study_id: str) -> JobRecord:
    """Cancel it permanently; its results are kept. Raises Conflict if it has ended in another state."""
    while True:
        record = services.store.job(study_id)
        if record.state is JobState.CANCELLED:
            return record
        if record.state.is_finished:
            raise Conflict(
                f"{record.kind.noun} {study_id} is already {record.state.value}; only a {record.kind.noun} that has "
                "not ended can be cancelled"
            )
        try:
            # From here on its driver cannot write; what it wrote before is kept.
            writer = services.store.open_attempt(study_id, because="it was cancelled")
            if not services.store.job(study_id).state.is_finished:
                writer.set_state(JobState.CANCELLED, "cancelled by request")
        except StaleAttempt:  # another driver, or another request, was faster
            continue


def resume(services: Services, study_id: str) -> JobRecord:
    """Let one that has FAILED go on from what is stored (results, or the last checkpoint), and one that waits try again
    now. Nothing is scored again but samples that have become void, because their engine failed a check; with such
    samples a COMPLETE study goes on, too. What goes on anyway stays as it is. Raises Conflict if it is COMPLETE or
    CANCELLED."""
    record = services.store.resume(study_id, reason=RESUMED_BY_REQUEST)
    if record.state in (JobState.COMPLETE, JobState.CANCELLED):
        which = {
            JobKind.SEARCH: "that has FAILED, that waits, or with samples of an engine that failed a check later",
            JobKind.FINETUNE: "that has FAILED or waits",
        }
        noun = record.kind.noun
        raise Conflict(
            f"{noun} {study_id} is {record.state.value}; only a {noun} {which[record.kind]} can be resumed; to run it "
            "again, submit it again"
        )
    return record


VERBS: Mapping[str, Callable[[Services, str], JobRecord]] = {"resume": resume, "cancel": cancel}


def add_routes(
    router: APIRouter, kind: JobKind, *, document: Callable[[Services, JobRecord], Mapping[str, Any]], model: Any
) -> None:
    """Add the routes that both kinds have. `document` is what describes one, of the TypedDict `model`."""
    noun, found = kind.noun, GIVEN[kind]

    def get_log(services: Context, record: JobRecord = found) -> Response:
        return PlainTextResponse(services.cluster.log(record).encode("utf-8", "replace"))

    async def delete(services: Context, record: JobRecord = found) -> Response:
        await services.exports.delete_job(record.id)
        await run_in_threadpool(shutil.rmtree, job_dir(services.data_dir, record.id), ignore_errors=True)
        await run_in_threadpool(services.artifacts.collect)
        await run_in_threadpool(collect_sources, services.store, services.artifacts)
        return Json(DeletedDocument(deleted=record.id))

    def changing(action: Callable[[Services, str], JobRecord]) -> Callable[..., Response]:
        def change(services: Context, record: JobRecord = found) -> Response:
            changed = action(services, record.id)
            services.cluster.wake()
            return Json(document(services, changed), status_code=202)

        return change

    router.add_api_route(
        f"{PLACES[kind]}/log",
        get_log,
        operation_id=f"get_{kind.value}_log",
        description=f"The output of the {noun}'s drivers.",
        response_model=None,
        responses={200: {"description": "The log.", "content": {"text/plain": {}}}, **refusals(404, 503)},
    )
    router.add_api_route(
        PLACES[kind],
        delete,
        methods=["DELETE"],
        operation_id=f"delete_{kind.value}",
        description=f"Delete a {noun} that has ended, with its results and files. Others must be cancelled first.",
        response_model=None,
        responses={200: {"model": DeletedDocument}, **refusals(404, 409)},
    )
    for verb, action in VERBS.items():
        router.add_api_route(
            f"{PLACES[kind]}:{verb}",
            changing(action),
            methods=["POST"],
            operation_id=f"{verb}_{kind.value}",
            description=action.__doc__,
            status_code=202,
            response_model=None,
            responses={
                202: {"model": model, "description": "Done, now or by an earlier request."},
                **refusals(404, 409),
            },
        )
