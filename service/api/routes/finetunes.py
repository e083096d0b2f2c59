"""Fine-tunings: create, list, show, their curves and report, their experts to download."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response, StreamingResponse

from service.api.dependencies import PAGE_HEADERS, Against, Context, Finetune, Sender, Services
from service.api.export_queue import Tar
from service.api.presenters import finetune_document, finetune_path
from service.api.problems import Json, Refusal, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES
from service.api.routes.jobs import PLACES, IdempotencyKey, StateFilter, add_routes, created
from service.errors import Conflict, NotFound
from service.jobs.training_study import study_key
from service.results.training import joined, render_training, stored_analysis, stored_curves
from service.schemas.api import AnalysisDocument, CurvesDocument, FinetuneDocument, FinetunesDocument
from service.types import JobKind, JobRecord, JobState
from workers.training.finetuning.fleet import ANALYSIS, STUDY, parse_pipeline

__all__ = ["router"]

router = APIRouter(tags=["finetunes"])

PLACE = PLACES[JobKind.FINETUNE]
EXAMPLE: dict[str, Any] = {
    "name": "family",
    "base": "/models/base",
    "data": {"max_length": 256},
    "training": {"steps": 500, "batch": 32, "learning_rate": 2e-5},
    "experts": {
        "math": {"data": {"file": "/data/math_train.jsonl"}},
        "text": {"data": {"file": "/data/text_train.jsonl"}, "training": {"steps": 800}},
    },
}
BODY = {
    "requestBody": {
        "required": True,
        "description": (
            "The specification of an expert, of a fleet, or of a pipeline with `study`. Its paths must be absolute: "
            "the server reads them."
        ),
        # Described once, as JSON: what tests generate from the description takes them minutes.
        "content": {
            **{m: {"schema": {"$ref": "#/components/schemas/Finetuning"}, "example": EXAMPLE} for m in JSON_TYPES},
            **{m: {"schema": {"type": "object"}, "example": EXAMPLE} for m in YAML_TYPES},
        },
    }
}
LOCATION = {"Location": {"description": "The fine-tuning's path.", "schema": {"type": "string"}}}


@router.post(
    "/finetunes",
    status_code=201,
    response_model=None,
    responses={
        200: {"model": FinetuneDocument, "description": "What an earlier request with the same key created."},
        201: {"model": FinetuneDocument, "description": "The fine-tuning was created.", "headers": LOCATION},
        **refusals(409, 413, 415, 422, 503),
    },
    openapi_extra=BODY,
)
async def create_finetune(
    request: Request, services: Context, sender: Sender, idempotency_key: IdempotencyKey = None
) -> Response:
    """Create a fine-tuning of an expert or a fleet if base, data and tasks pass every check; it starts as soon as
    possible."""
    record, is_new = await created(request, services, sender, kind=JobKind.FINETUNE, key=idempotency_key)
    document = await run_in_threadpool(_document, services, record)
    if not is_new:
        return Json(document)
    return Json(document, status_code=201, headers={"Location": finetune_path(record.id)})


@router.get("/finetunes", response_model=None, responses={200: {"model": FinetunesDocument}, **refusals(422)})
def list_finetunes(
    services: Context,
    state: Annotated[StateFilter | None, Query(description="Only fine-tunings in this state.")] = None,
    name: Annotated[str | None, Query(description="Only fine-tunings with this name.")] = None,
) -> Response:
    """Every fine-tuning, oldest first."""
    found: list[FinetuneDocument] = [
        _document(services, record)
        for record in services.store.jobs(JobKind.FINETUNE)
        if (state is None or record.state.value == state) and (name is None or record.name == name)
    ]
    return Json(FinetunesDocument(finetunes=found))


@router.get(PLACE, response_model=None, responses={200: {"model": FinetuneDocument}, **refusals(404)})
def get_finetune(finetune: Finetune, services: Context) -> Response:
    """A fine-tuning: its state, how far its experts are, and links to its results."""
    return Json(_document(services, finetune))


@router.get(
    f"{PLACE}/specification",
    response_model=None,
    responses={
        200: {
            "description": "The specification.",
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Finetuning"}}},
        },
        **refusals(404),
    },
)
def get_specification(finetune: Finetune) -> Response:
    """The specification with every default filled in; submitting it again creates an equal fine-tuning."""
    return Json(finetune.document)


@router.get(f"{PLACE}/curves", response_model=None, responses={200: {"model": CurvesDocument}, **refusals(404)})
def get_curves(finetune: Finetune, services: Context) -> Response:
    """The losses and evaluations of every expert so far, at most 1000 points each."""
    return Json(_curves(services, finetune))


@router.get(
    f"{PLACE}/analysis", response_model=None, responses={200: {"model": AnalysisDocument}, **refusals(404, 409, 422)}
)
def get_analysis(finetune: Finetune, services: Context, against: Against) -> Response:
    """The distribution of the experts' task vectors and the losses of their merges, if the specification has
    `analysis`; beside those of the same experts of other fine-tunings."""
    return Json(_analysis(services, [finetune, *against]))


@router.get(
    f"{PLACE}/report",
    response_model=None,
    responses={200: {"description": "The report.", "content": {"text/html": {}}}, **refusals(404, 409, 422)},
)
def get_training_report(finetune: Finetune, services: Context, against: Against) -> Response:
    """The losses, evaluations and analysis as pictures, one page that works offline."""
    pipeline = parse_pipeline(finetune.document)
    analysis = _analysis(services, [finetune, *against]) if against else stored_analysis(services.store, finetune.id)
    page = render_training(
        pipeline,
        _curves(services, finetune),
        state=finetune.state.value,
        reason=finetune.reason,
        analysis=analysis,
    )
    return HTMLResponse(page, headers=PAGE_HEADERS)


@router.get(
    f"{PLACE}/experts/{{alias:segment}}/download",
    response_model=None,
    responses={
        200: {
            "description": "An uncompressed tar archive of the expert's files in one folder.",
            "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
        },
        **refusals(404, 409, 410),
    },
)
def download_expert(
    finetune: Finetune, alias: Annotated[str, Path(description="The expert's alias.")], services: Context
) -> Response:
    """An expert as a tar archive, as soon as it is trained."""
    aliases = _document(services, finetune)["experts"]
    if alias not in aliases:
        raise Refusal(404, f"expert {alias!r:.80}: fine-tuning {finetune.name!r} has {', '.join(aliases)}")
    try:
        artifact = services.artifacts.get(finetune.id, alias)
    except NotFound as error:
        raise Conflict(
            f"expert {alias!r} is not trained yet; fine-tuning {finetune.name!r} is {finetune.state.value}"
        ) from error
    try:
        files = services.artifacts.files(artifact)
    except Conflict as error:
        raise Refusal(410, f"expert {alias!r}: its files are no longer on the server: {error}") from error
    folder = alias if alias == finetune.name else f"{finetune.name}-{alias}"
    tar = Tar(folder, files, modified_at=artifact.created_at)
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{folder}.tar"'}
    chunks = services.exports.reading(finetune.id, tar.chunks())
    return StreamingResponse(chunks, media_type="application/x-tar", headers=headers)


def _curves(services: Services, record: JobRecord) -> CurvesDocument:
    return stored_curves(services.store, record.id, parse_pipeline(record.document).experts)


def _analysis(services: Services, records: Sequence[JobRecord]) -> AnalysisDocument:
    found = {}
    for record in records:
        analysis = stored_analysis(services.store, record.id)
        if analysis is None:
            asked = record.document.get(ANALYSIS) is not None
            lack = "its experts are analysed once all are trained" if asked else "its specification has no `analysis`"
            raise Conflict(f"fine-tuning {record.id} has no analysis: it is {record.state.value}, and {lack}")
        found[f"fine-tuning {record.id}"] = parse_pipeline(record.document), analysis
    return joined(found)


def _document(services: Services, record: JobRecord) -> FinetuneDocument:
    # Only a pipeline that is COMPLETE has one.
    has_study = STUDY in record.document and record.state is JobState.COMPLETE
    study = services.store.job_of_key(study_key(record.id)) if has_study else None
    artifacts = services.artifacts.of(record.id)
    asked = record.document.get(ANALYSIS) is not None
    is_analysed = asked and stored_analysis(services.store, record.id) is not None
    return finetune_document(
        record, artifacts=artifacts, study=study, is_analysed=is_analysed, cluster=services.cluster
    )


add_routes(router, JobKind.FINETUNE, document=_document, model=FinetuneDocument)
