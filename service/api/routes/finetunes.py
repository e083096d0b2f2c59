"""Routes of a fine-tuning's results: training curves, analysis, report, and download of experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Path
from starlette.responses import HTMLResponse, Response, StreamingResponse

from service.api.dependencies import PAGE_HEADERS, Against, Context, Finetune, Services
from service.api.export_queue import Tar
from service.api.problems import Json, Refusal, refusals
from service.errors import Conflict, NotFound
from service.results.training import joined, render_training, stored_analysis, stored_curves
from service.schemas.api import AnalysisDocument, CurvesDocument
from service.threads import sent_in_parts
from service.types import JobRecord
from workers.training.finetuning.fleet import ANALYSIS, parse_pipeline

__all__ = ["router"]

router = APIRouter(tags=["finetunes"])

PLACE = "/finetunes/{finetune_id:segment}"


@router.get(f"{PLACE}/curves", response_model=None, responses={200: {"model": CurvesDocument}, **refusals(404)})
def get_curves(finetune: Finetune, services: Context) -> Response:
    """The training losses and evaluations so far of every expert (model that this fine-tuning trains).

    A curve has at most 1000 points.
    """
    return Json(_curves(services, finetune))


@router.get(
    f"{PLACE}/analysis", response_model=None, responses={200: {"model": AnalysisDocument}, **refusals(404, 409, 422)}
)
def get_analysis(finetune: Finetune, services: Context, against: Against) -> Response:
    """The distributions of the experts' task vectors, and the losses of merges of the experts.

    An expert is a model that the fine-tuning trains, and a task vector is the difference between the weights of an
    expert and of its base. The analysis is computed once all experts are trained, if the specification of the
    fine-tuning has the key `analysis`. With the parameter `against`, the response also has the analyses of other
    fine-tunings for comparison. The experts of these fine-tunings must have the same names and tasks.
    """
    return Json(_analysis(services, [finetune, *against]))


@router.get(
    f"{PLACE}/report",
    response_model=None,
    responses={200: {"description": "The report.", "content": {"text/html": {}}}, **refusals(404, 409, 422)},
)
def get_training_report(finetune: Finetune, services: Context, against: Against) -> Response:
    """The fine-tuning's losses, evaluations and analysis as charts, on one HTML page that works offline.

    With `against`, the charts of the analysis also show other fine-tunings, which trained models of the same names on
    the same tasks.
    """
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
    """Download an expert, a model that this fine-tuning has trained, as a tar archive.

    The request is refused (409) if the expert is not trained yet.
    """
    aliases = parse_pipeline(finetune.document).experts
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
    return StreamingResponse(sent_in_parts(chunks), media_type="application/x-tar", headers=headers)


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
