"""Routes to request, show, list, delete and download exports (merged models written for download)."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.yaml import parse_document
from service.api.dependencies import Context, Services, Study, UsedStudy
from service.api.export_queue import Tar
from service.api.permissions import Sender
from service.api.presenters import export_document, export_path
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, read_body, sent_as_json
from service.errors import Conflict, NotFound
from service.results.preference import choices
from service.results.record import RunRecord
from service.schemas.api import DeletedDocument, ExportDocument, ExportsDocument
from service.schemas.files import PreferredDocument
from service.threads import Work, in_thread, sent_in_parts
from service.types import ExportRecord, ExportState, JobRecord, JobState

__all__ = ["router"]

router = APIRouter(tags=["exports"])

MAX_WEIGHT = 10**6
DTYPES = ("float32", "bfloat16", "float16")
EXPORT_BODY = {
    "requestBody": {
        "required": True,
        "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ExportRequest"}}},
    }
}
LOCATION = {"Location": {"description": "The export's path.", "schema": {"type": "string"}}}


ExportId = Annotated[str, Path(description="The `id` of the export.", pattern="^[0-9a-f]{32}$")]


def _export(study: Study, export_id: ExportId, services: Context) -> ExportRecord:
    return _found(study, export_id, services)


def _used_export(study: UsedStudy, export_id: ExportId, services: Context) -> ExportRecord:
    return _found(study, export_id, services)


def _found(study: JobRecord, export_id: str, services: Services) -> ExportRecord:
    try:
        record = services.stored_exports.export(export_id)
    except NotFound:
        record = None
    if record is None or record.study != study.id:
        raise Refusal(404, f"export {export_id!r}: study {study.name!r} has no such export")
    return record


Export = Annotated[ExportRecord, Depends(_export)]
UsedExport = Annotated[ExportRecord, Depends(_used_export)]


@router.post(
    "/studies/{study_id:segment}/exports",
    status_code=202,
    response_model=None,
    responses={
        202: {"model": ExportDocument, "description": "The export is queued, or exists already.", "headers": LOCATION},
        **refusals(404, 409, 413, 415, 422, 503),
    },
    openapi_extra=EXPORT_BODY,
)
async def create_export(request: Request, study: UsedStudy, services: Context, sender: Sender) -> Response:
    """Export the merged model of a trial, so that it can be downloaded.

    A trial has at most one export for each dtype. The body may have `prefer`, which are weights of the objectives. In
    this case the trial of the Pareto front that is best by these weights is exported, and the field `preferred` of the
    response names it.
    """
    sent_as_json(request.headers, accepted=JSON_TYPES)
    trial, dtype, weights = _asked(await read_body(request))
    if study.state is not JobState.COMPLETE:
        raise Conflict(f"study {study.name!r} is {study.state.value}; models are exported once it is COMPLETE")
    picked: PreferredDocument | None = None
    if weights is None:
        best, num_trials = await services.records.result(study.id, _choices)
        number = _chosen(study, trial, best=best, num_trials=num_trials)
    else:
        picked = (await services.records.result(study.id, choices)).preferred(weights)
        number = picked["trial"]
    if dtype is None:
        dtype = await services.preflight.engine_dtype(study, client=sender.name)
    measured = await in_thread(Work.WRITE, services.team_bytes.measure, study.team)
    check = partial(services.team_bytes.check_export, study, dtype, measured)
    note = partial(_record, services, sender, "export.create")
    record = await services.exports.request(study.id, trial=number, dtype=dtype, check=check, note=note)
    document = await run_in_threadpool(_document, services, record)
    if picked is not None:
        document["preferred"] = picked
    return Json(document, status_code=202, headers={"Location": export_path(record)})


@router.get(
    "/studies/{study_id:segment}/exports",
    response_model=None,
    responses={200: {"model": ExportsDocument}, **refusals(404)},
)
def list_exports(study: Study, services: Context) -> Response:
    """List the exports (merged models for download) of a study, the oldest first."""
    records = services.stored_exports.exports(study.id)
    return Json(ExportsDocument(exports=[_document(services, record) for record in records]))


@router.get(
    "/studies/{study_id:segment}/exports/{export_id:segment}",
    response_model=None,
    responses={200: {"model": ExportDocument}, **refusals(404)},
)
def get_export(export: Export, services: Context) -> Response:
    """Show an export (a merged model for download), with a download link once it is COMPLETE."""
    return Json(_document(services, export))


@router.delete(
    "/studies/{study_id:segment}/exports/{export_id:segment}",
    response_model=None,
    responses={200: {"model": DeletedDocument}, **refusals(404, 409)},
)
async def delete_export(export: UsedExport, services: Context, sender: Sender) -> Response:
    """Delete an export (a merged model for download) and its files.

    An export that is being written or downloaded is not deleted (409).
    """
    await services.exports.delete(export, note=partial(_record, services, sender, "export.delete", export))
    return Json(DeletedDocument(deleted=export.id))


@router.get(
    "/studies/{study_id:segment}/exports/{export_id:segment}/download",
    response_model=None,
    responses={
        200: {
            "description": "An uncompressed tar archive of the model's files in one folder.",
            "content": {"application/x-tar": {"schema": {"type": "string", "format": "binary"}}},
        },
        **refusals(404, 409, 410),
    },
)
def download_export(export: Export, services: Context) -> Response:
    """Download the merged model of an export as a tar archive."""
    if export.state is not ExportState.COMPLETE:
        raise Conflict(f"export {export.id} is {export.state.value}; it can be downloaded once it is COMPLETE")
    files = services.exports.files(export)
    if files is None:
        raise Refusal(
            410,
            f"export {export.id}: its files are no longer on the server; request trial {export.trial} in "
            f"{export.dtype} again to have it written again",
        )
    folder = services.exports.folder(export)
    tar = Tar(folder, files, modified_at=export.created_at)
    headers = {"Content-Length": str(tar.size), "Content-Disposition": f'attachment; filename="{folder}.tar"'}
    chunks = services.exports.reading(export.id, tar.chunks())
    return StreamingResponse(sent_in_parts(chunks), media_type="application/x-tar", headers=headers)


def _record(services: Services, sender: Principal, action: str, export: ExportRecord) -> None:
    """Add the request or deletion of an export to the audit log.

    `action` says what was done: "export.create" or "export.delete".
    """
    described = {"study": export.study, "trial": export.trial, "dtype": export.dtype}
    before, after = (described, None) if action == "export.delete" else (None, described)
    services.accounts.record(sender.actor, action, f"export {export.id}", before=before, after=after)


def _document(services: Services, export: ExportRecord) -> ExportDocument:
    return export_document(export, services.exports.num_bytes(export))


def _asked(content: bytes) -> tuple[Any, str | None, dict[str, float] | None]:
    """Read the trial ("best" or a number), the dtype and the objectives' weights from the body of an export request.

    The dtype and the weights are None if the body does not state them. Raises InvalidRequest with every problem.
    """
    try:
        document = parse_document(content, "the request's body", is_json=True)
    except InvalidStudy as error:
        raise InvalidRequest(error.problems) from error
    known = ("trial", "dtype", "prefer")
    problems = [Problem(key, f"unknown key; known keys: {', '.join(known)}") for key in document if key not in known]
    trial, dtype, weights = document.get("trial", "best"), document.get("dtype"), document.get("prefer")
    if trial != "best" and (type(trial) is not int or trial < 0):
        problems.append(Problem("trial", f'{trial!r:.60} is not accepted; give "best" or the number of a trial'))
    if dtype is not None and dtype not in DTYPES:
        problems.append(Problem("dtype", f"{dtype!r:.60} is not known; available: null, {', '.join(DTYPES)}"))
    if weights is not None and not _are_weights(weights):
        problems.append(Problem("prefer", f'{weights!r:.60} is not accepted; give {{"OBJECTIVE": WEIGHT}}'))
    elif weights is not None and trial != "best":
        problems.append(Problem("prefer", f"weights choose the trial; leave out trial, which is {trial!r:.60}"))
    if problems:
        raise InvalidRequest(tuple(problems))
    return trial, dtype, weights


def _are_weights(value: Any) -> bool:
    """Whether `value` maps objectives to numbers that can be weights: floats, or integers below 10^6 in magnitude."""
    if not isinstance(value, dict):
        return False
    return all(type(w) is float or (type(w) is int and abs(w) < MAX_WEIGHT) for w in value.values())


def _choices(record: RunRecord) -> tuple[int | None, int]:
    """Number of a study's best trial (None if no trial is the best yet), and the number of all its trials.

    `record` has all stored data of the study.
    """
    best = record.best
    return (None if best is None else best.number), len(record.trials)


def _chosen(study: JobRecord, trial: Any, *, best: int | None, num_trials: int) -> int:
    if trial == "best":
        if best is None:
            raise Conflict(f"study {study.name!r}: no trial has reached the full budget, so there is no best one")
        return best
    if trial >= num_trials:
        message = f'{trial} is not accepted; give "best" or a number from 0 to {num_trials - 1}'
        raise InvalidRequest((Problem("trial", message),))
    return int(trial)
