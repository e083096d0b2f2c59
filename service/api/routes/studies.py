"""Studies: create, list, show. What can be done with them as with fine-tunings is in `jobs`."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from service.api.dependencies import Context, Sender, Services, Study
from service.api.presenters import study_document, study_path
from service.api.problems import Json, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES
from service.api.routes.jobs import PLACES, IdempotencyKey, StateFilter, add_routes, created
from service.schemas.api import StudiesDocument, StudyDocument
from service.types import JobKind, JobRecord

__all__ = ["router"]

router = APIRouter(tags=["studies"])

PLACE = PLACES[JobKind.SEARCH]

STUDY_BODY = {
    "requestBody": {
        "required": True,
        "description": "A study file. Its paths must be absolute: the server reads them.",
        "content": {media: {"schema": {"$ref": "#/components/schemas/Study"}} for media in (*JSON_TYPES, *YAML_TYPES)},
    }
}
LOCATION = {"Location": {"description": "The study's path.", "schema": {"type": "string"}}}


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
    record, is_new = await created(request, services, sender, kind=JobKind.SEARCH, key=idempotency_key)
    document = await run_in_threadpool(_document, services, record)
    if not is_new:
        return Json(document)
    return Json(document, status_code=201, headers={"Location": study_path(record.id)})


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
        for record in services.store.jobs(JobKind.SEARCH)
        if (state is None or record.state.value == state) and (name is None or record.name == name)
    ]
    return Json(StudiesDocument(studies=studies))


@router.get(PLACE, response_model=None, responses={200: {"model": StudyDocument}, **refusals(404)})
def get_study(study: Study, services: Context) -> Response:
    """A study: its state, its progress, and links to its results."""
    return Json(_document(services, study))


@router.get(
    f"{PLACE}/study",
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


def _document(services: Services, record: JobRecord) -> StudyDocument:
    counts = services.store.trial_counts(record.id).get(record.id, {})
    return study_document(record, trials=counts, cluster=services.cluster)


add_routes(router, JobKind.SEARCH, document=_document, model=StudyDocument)
