"""Routes of a study's results so far: Pareto front, summary, held-out data, benchmarks, report."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from search_spaces.preferences import parse_preference
from search_spaces.study.file import parse_benchmarks
from search_spaces.study.yaml import parse_document
from service.api.conditional import NOT_MODIFIED, answer, answer_from_trials
from service.api.dependencies import MAX_NUMBER, PAGE_HEADERS, ChangedStudy, Context, Study
from service.api.job_documents import shown_job
from service.api.permissions import Sender
from service.api.problems import Json, Refusal, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES, read_body, sent_as_json
from service.resolved_study import ResolvedStudy
from service.results.documents import benchmarks_document, estimate_documents, pareto
from service.results.load import held_out_differences
from service.results.preference import choices
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.summary import summary
from service.schemas.api import HeldOutDifferencesDocument, StudyDocument
from service.schemas.files import BenchmarksDocument, ParetoDocument, SummaryDocument
from service.studies.benchmarks import study_with
from service.threads import Work, in_thread
from service.types import JobRecord, JobState, TrialResult

__all__ = ["router"]

router = APIRouter(tags=["results"])

BENCHMARKS = {"benchmarks": [{"name": "piqa", "task": "piqa", "metric": "acc", "trials": ["best", "sources"]}]}

# OpenAPI description of the body that adds benchmarks.
BENCHMARKS_BODY: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "description": "The keys `benchmarks` and `contamination` of a study file. Its paths must be absolute: the "
        "server reads them.",
        "content": {
            **{
                media: {"schema": {"$ref": "#/components/schemas/AddedBenchmarks"}, "example": BENCHMARKS}
                for media in JSON_TYPES
            },
            **{media: {"schema": {"type": "object"}, "example": BENCHMARKS} for media in YAML_TYPES},
        },
    }
}


@router.get(
    "/studies/{study_id:segment}/pareto",
    response_model=None,
    responses={200: {"model": ParetoDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def get_pareto(
    study: Study,
    services: Context,
    request: Request,
    prefer: Annotated[
        str | None, Query(description="Weights of the objectives that sum to 1, such as `math=0.6,code=0.4`.")
    ] = None,
) -> Response:
    """The Pareto front: of the trials that are scored on all samples, those that no other one dominates.

    If the parameter `prefer` has weights of the objectives, the document also says which trial of the front is best by
    these weights.
    """
    if prefer is None:
        return await answer(request, services.records, study.id, _pareto)
    picked = (await services.records.result(study.id, choices)).preferred(parse_preference(prefer))
    return Json({**await services.records.result(study.id, pareto), "preferred": picked})


@router.get(
    "/studies/{study_id:segment}/summary",
    response_model=None,
    responses={200: {"model": SummaryDocument}, **NOT_MODIFIED, **refusals(404)},
)
async def get_summary(study: Study, services: Context, request: Request) -> Response:
    """The results and cost of a study, as in the file summary.json of a run directory."""
    return await answer(request, services.records, study.id, _summary)


@router.get(
    "/studies/{study_id:segment}/holdout",
    response_model=None,
    responses={200: {"model": HeldOutDifferencesDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def get_holdout(
    study: Study,
    services: Context,
    request: Request,
    reference: Annotated[int, Query(description="Number of a trial with held-out values.", ge=0, le=MAX_NUMBER)],
) -> Response:
    """List each trial's held-out values minus those of the trial `reference`, paired, with confidence intervals.

    The study's summary has these differences with the best trial as reference.
    """

    def differences(trials: tuple[TrialResult, ...]) -> bytes:
        found = held_out_differences(
            services.store, study.id, reference, trials=trials, objectives=ResolvedStudy.of(study).objectives
        )
        if not found:
            raise Refusal(404, f"trial {reference} of study {study.name!r} has no values on held-out data (yet)")
        document: HeldOutDifferencesDocument = {
            "reference": reference,
            "rows": [{"trial": n, "differences": estimate_documents(own)} for n, own in found.items()],
        }
        return Json.encode(document)

    return await answer_from_trials(request, services.records, study.id, differences)


@router.get(
    "/studies/{study_id:segment}/report",
    response_model=None,
    responses={200: {"description": "The report.", "content": {"text/html": {}}}, **NOT_MODIFIED, **refusals(404)},
)
async def get_report(study: Study, services: Context, request: Request) -> Response:
    """The report on the results of a study so far, an HTML page that works offline."""
    return await answer(request, services.records, study.id, _report, media_type="text/html", headers=PAGE_HEADERS)


@router.get(
    "/studies/{study_id:segment}/benchmarks",
    response_model=None,
    responses={200: {"model": BenchmarksDocument}, **NOT_MODIFIED, **refusals(404)},
)
async def get_benchmarks(study: Study, services: Context, request: Request) -> Response:
    """The results so far of a study's trials on its benchmarks, as in the study's summary.

    Benchmarks are tasks that the search does not use; chosen trials are scored on them at the end.
    """
    return await answer(request, services.records, study.id, _benchmarks)


@router.post(
    "/studies/{study_id:segment}/benchmarks",
    status_code=202,
    response_model=None,
    responses={
        202: {"model": StudyDocument, "description": "The study continues with the benchmark stage."},
        **refusals(404, 409, 413, 415, 422, 503),
    },
    openapi_extra=BENCHMARKS_BODY,
)
async def add_benchmarks(study: ChangedStudy, services: Context, request: Request, sender: Sender) -> Response:
    """Add benchmarks, which are tasks that the search does not use, to a COMPLETE study, and score trials on them.

    A benchmark of the study may be named again, with the same task and metric, to score it on further trials, or again
    on trials that failed. Stored samples are not scored again. A study that is not COMPLETE is refused (409).
    """
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    added = parse_benchmarks(parse_document(await read_body(request), "the request's body", is_json=is_json))
    if study.state is not JobState.COMPLETE:
        raise Refusal(
            409,
            f"study {study.name!r} is {study.state.value}; benchmarks can be added to a study that is COMPLETE, or are "
            "written into its study file",
        )
    trials = await run_in_threadpool(services.store.trial_numbers, study.id)
    document = study_with(study, added, trials=trials).canonical()
    await services.preflight.check_benchmarks(document, study, client=sender.name, reader=sender.account)
    names = [spec.name for spec in added.benchmarks]

    def add() -> JobRecord:
        with services.store.unit_of_work():
            record = services.steering.add_benchmarks(study, document, names=names)
            services.accounts.record(sender.actor, "job.add_benchmarks", f"job {study.id}", after={"benchmarks": names})
            return record

    record = await in_thread(Work.WRITE, add)
    services.cluster.wake()
    return Json(await run_in_threadpool(shown_job, services, sender, record), status_code=202)


def _benchmarks(run: RunRecord) -> bytes:
    return Json.encode(benchmarks_document(run.benchmarks))


def _pareto(run: RunRecord) -> bytes:
    return Json.encode(pareto(run))


def _summary(run: RunRecord) -> bytes:
    return Json.encode(summary(run))


def _report(run: RunRecord) -> bytes:
    return render_report(run).encode()
