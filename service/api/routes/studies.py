"""Studies: create, list, show, cancel, resume."""

from __future__ import annotations

import asyncio
import hashlib
import shutil
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import PlainTextResponse, Response

from service.api.dependencies import Context, Sender, Services, Study
from service.api.presenters import study_document, study_path
from service.api.problems import Json, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES, read_body, sent_as_json
from service.disk import study_dir
from service.errors import Conflict, StaleAttempt
from service.schemas.api import DeletedDocument, StudiesDocument, StudyDocument
from service.types import RESUMED_BY_REQUEST, JobKind, StudyRecord, StudyState

__all__ = ["router"]

router = APIRouter(tags=["studies"])

STUDY_BODY = {
    "requestBody": {
        "required": True,
        "description": "A study file. Its paths must be absolute: the server reads them.",
        "content": {media: {"schema": {"$ref": "#/components/schemas/Study"}} for media in (*JSON_TYPES, *YAML_TYPES)},
    }
}
LOCATION = {"Location": {"description": "The study's path.", "schema": {"type": "string"}}}
IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="The same key with the same body again returns the study that it created.",
        pattern="^[!-~]{1,255}$",
    ),
]
StateFilter = Literal["CREATED", "RUNNING", "STOPPED", "COMPLETE", "FAILED", "CANCELLED"]


@router.post(
    "/studies",
    status_code=201,
    response_model=None,
    responses={
        200: {"model": StudyDocument, "description": "The study that an earlier request with the same key created."},
        201: {"model": StudyDocument, "description": "The study was created.", "headers": LOCATION},
        **refusals(409, 413, 415, 422, 503),
    },
    openapi_extra=STUDY_BODY,
)
async def create_study(
    request: Request, services: Context, sender: Sender, idempotency_key: IdempotencyKey = None
) -> Response:
    """Create a study if it passes every check that needs no engine; its search starts as soon as possible."""
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    if idempotency_key is None:
        record, is_new = await _created(services, content, is_json, key=None, client=sender.name)
    else:
        lock = services.key_locks.setdefault(idempotency_key, asyncio.Lock())
        async with lock:
            record, is_new = await _created(services, content, is_json, key=idempotency_key, client=sender.name)
    document = await run_in_threadpool(_document, services, record)
    if not is_new:
        return Json(document)
    services.cluster.wake()
    return Json(document, status_code=201, headers={"Location": study_path(record.id)})


async def _created(
    services: Services, content: bytes, is_json: bool, *, key: str | None, client: str
) -> tuple[StudyRecord, bool]:
    digest = hashlib.sha256(content).hexdigest()
    found = await run_in_threadpool(services.store.study_of_key, key) if key is not None else None
    if found is None:
        checked = await services.preflight.examine(content, is_json=is_json, client=client)
        record = await run_in_threadpool(
            services.store.create_study,
            name=checked.name,
            document=checked.document,
            resolved=checked.resolved,
            idempotency_key=key,
            request_digest=digest,
        )
    else:
        record = found
    if record.request_digest != digest:
        raise Conflict(
            f"Idempotency-Key {key!r} was sent before with another body, which created study {record.id}; "
            "use another key for another study"
        )
    return record, found is None


@router.get("/studies", response_model=None, responses={200: {"model": StudiesDocument}, **refusals(422)})
def list_studies(
    services: Context,
    state: Annotated[StateFilter | None, Query(description="Only studies in this state.")] = None,
    name: Annotated[str | None, Query(description="Only studies with this name.")] = None,
) -> Response:
    """Every study, oldest first."""
    counts = services.store.trial_counts()
    studies: list[StudyDocument] = [
        study_document(record, trials=counts.get(record.id, {}), cluster=services.cluster)
        for record in services.store.studies(JobKind.SEARCH)
        if (state is None or record.state.value == state) and (name is None or record.name == name)
    ]
    return Json(StudiesDocument(studies=studies))


@router.get(
    "/studies/{study_id:segment}", response_model=None, responses={200: {"model": StudyDocument}, **refusals(404)}
)
def get_study(study: Study, services: Context) -> Response:
    """A study: its state, its progress, and links to its results."""
    return Json(_document(services, study))


@router.get(
    "/studies/{study_id:segment}/study",
    response_model=None,
    responses={
        200: {
            "description": "The study file.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Study"}}},
        },
        **refusals(404),
    },
)
def get_study_file(study: Study) -> Response:
    """The study file with every default filled in; submitting it again creates an equal study."""
    return Json(study.document)


@router.get(
    "/studies/{study_id:segment}/log",
    response_model=None,
    responses={200: {"description": "The log.", "content": {"text/plain": {}}}, **refusals(404, 503)},
)
def get_log(study: Study, services: Context) -> Response:
    """The output of the study's drivers."""
    return PlainTextResponse(services.cluster.log(study).encode("utf-8", "replace"))


@router.delete(
    "/studies/{study_id:segment}",
    response_model=None,
    responses={200: {"model": DeletedDocument}, **refusals(404, 409)},
)
async def delete_study(study: Study, services: Context) -> Response:
    """Delete a study that has ended, with its results, exports and files. Others must be cancelled first (409)."""
    await services.exports.delete_study(study.id)
    await run_in_threadpool(shutil.rmtree, study_dir(services.data_dir, study.id), ignore_errors=True)
    return Json(DeletedDocument(deleted=study.id))


# -- verbs -------------------------------------------------------------------------------------------------------------


def cancel(services: Services, study_id: str) -> StudyRecord:
    """Cancel the study permanently; its results are kept. Raises Conflict if it has ended in another state."""
    while True:
        record = services.store.study(study_id)
        if record.state is StudyState.CANCELLED:
            return record
        if record.state.is_finished:
            raise Conflict(
                f"study {study_id} is already {record.state.value}; only a study that has not ended can be cancelled"
            )
        try:
            # From here on the study's driver cannot write; what it wrote before is kept.
            writer = services.store.open_attempt(study_id, because="it was cancelled")
            if not services.store.study(study_id).state.is_finished:
                writer.set_state(StudyState.CANCELLED, "cancelled by request")
        except StaleAttempt:  # another driver, or another request, was faster
            continue


def resume(services: Services, study_id: str) -> StudyRecord:
    """Let a study that has FAILED go on from its stored results, and one that waits try again now. Nothing is scored
    again but samples that have become void, because their engine failed a check; with such samples a COMPLETE study
    goes on, too. A study that goes on anyway stays as it is. Raises Conflict if it is COMPLETE or CANCELLED."""
    record = services.store.resume(study_id, reason=RESUMED_BY_REQUEST)
    if record.state in (StudyState.COMPLETE, StudyState.CANCELLED):
        raise Conflict(
            f"study {study_id} is {record.state.value}; only a study that has FAILED, that waits, or with samples of "
            "an engine that failed a check later can be resumed; to run it again, submit it again"
        )
    return record


VERBS: Mapping[str, Callable[[Services, str], StudyRecord]] = {"resume": resume, "cancel": cancel}


def _route(verb: str) -> Callable[..., Response]:
    def change(study: Study, services: Context) -> Response:
        record = VERBS[verb](services, study.id)
        services.cluster.wake()
        return Json(_document(services, record), status_code=202)

    return change


def _add_verbs() -> None:
    described: dict[int | str, dict[str, Any]] = {
        202: {"model": StudyDocument, "description": "Done, now or by an earlier request."},
        **refusals(404, 409),
    }
    for verb, action in VERBS.items():
        router.add_api_route(
            f"/studies/{{study_id:segment}}:{verb}",
            _route(verb),
            methods=["POST"],
            name=verb,
            operation_id=f"{verb}_study",
            description=action.__doc__,
            status_code=202,
            response_model=None,
            responses=described,
        )


_add_verbs()


def _document(services: Services, record: StudyRecord) -> StudyDocument:
    counts = services.store.trial_counts(record.id).get(record.id, {})
    return study_document(record, trials=counts, cluster=services.cluster)
