"""Routes of a study's results so far: trials, recipes, Pareto front, summary, report, plots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union
from urllib.parse import urlencode

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from search_spaces.errors import Problem
from search_spaces.preferences import parse_preference
from search_spaces.searchers import SEARCHERS
from search_spaces.study.file import parse_benchmarks
from search_spaces.study.yaml import parse_document
from service.api.conditional import NOT_MODIFIED, answer
from service.api.dependencies import (
    MAX_NUMBER,
    PAGE_HEADERS,
    REASON,
    ChangedStudy,
    Context,
    Services,
    Study,
    TrialNumber,
)
from service.api.permissions import Sender
from service.api.prefix import below_root
from service.api.presenters import job_document
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.api.requests import JSON_TYPES, YAML_TYPES, body_of, read_body, read_object, sent_as_json
from service.errors import NotFound
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.results.documents import benchmarks_document, has_directions, pareto, trial_document
from service.results.feasibility import has_constraints
from service.results.preference import choices
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.series import CHARTS
from service.results.summary import summary
from service.schemas.api import PlotsDocument, StudyDocument, TrialsDocument
from service.schemas.files import BenchmarksDocument, ParetoDocument, SummaryDocument, TrialDocument
from service.schemas.recipe import RecipeDocument
from service.studies.benchmarks import study_with
from service.types import JobRecord, JobState, Steering, TrialRecord, TrialState

__all__ = ["router"]

router = APIRouter(tags=["results"])

MAX_PAGE = 1000

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
# Both are derived from the declared charts.
PlotName: Any = Literal[*CHARTS]
PlotDocument: Any = Union[*(chart.series_type for chart in CHARTS.values())]
StateName = Literal["WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAIL"]


@router.get(
    "/studies/{study_id:segment}/trials",
    response_model=None,
    responses={200: {"model": TrialsDocument}, **refusals(404, 422)},
)
def list_trials(
    study: Study,
    services: Context,
    after: Annotated[int | None, Query(description="Only trials with a larger number.", ge=0, le=MAX_NUMBER)] = None,
    limit: Annotated[int, Query(description="Maximum number of trials.", ge=1, le=MAX_PAGE)] = 100,
    state: Annotated[StateName | None, Query(description="Only trials in this state.")] = None,
) -> Response:
    """List the trials of a study by number, a page at a time."""
    start = 0 if after is None else after + 1
    wanted = None if state is None else TrialState(state)
    found = services.store.trials(study.id, start=start, state=wanted, limit=limit + 1)
    page = found[:limit]
    query: dict[str, Any] = {"limit": limit, **({"state": state} if state else {})}
    more = (
        below_root(f"{SEARCH.path_of(study.id)}/trials?{urlencode({'after': page[-1].number, **query})}")
        if found[limit:]
        else None
    )
    return Json(TrialsDocument(trials=_documents(services, study, page), next=more))


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}",
    response_model=None,
    responses={200: {"model": TrialDocument}, **refusals(404)},
)
def get_trial(study: Study, number: TrialNumber, services: Context) -> Response:
    """Show a trial of a study."""
    return Json(_documents(services, study, [_trial(services, study, number)])[0])


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/recipe",
    response_model=None,
    responses={200: {"model": RecipeDocument}, **refusals(404)},
)
def get_recipe(study: Study, number: TrialNumber, services: Context) -> Response:
    """The recipe of a trial's merge, in the format that `mergesearch merge` reads."""
    return Json(_trial(services, study, number).read_recipe().to_json())


class Validity(BaseModel):
    """Body of the request that marks a trial as valid or invalid."""

    model_config = ConfigDict(extra="forbid", strict=True)

    is_valid: bool
    reason: (
        Annotated[
            str,
            Field(min_length=1, max_length=500, pattern=r"^[^\r\n]*$", description="Why; needed for an invalid trial."),
        ]
        | None
    ) = None


@router.put(
    "/studies/{study_id:segment}/trials/{number:segment}/validity",
    response_model=None,
    responses={200: {"model": TrialDocument}, **refusals(404, 413, 415, 422)},
    openapi_extra=body_of(Validity),
)
async def set_validity(
    request: Request, study: ChangedStudy, number: TrialNumber, services: Context, sender: Sender
) -> Response:
    """Mark a trial as invalid, or as valid again.

    An invalid trial keeps its samples, but is left out of the front, of the held-out table and of every comparison. The
    searcher keeps what it has learned from it. A COMPLETE study continues, so that new finalists are scored.
    """
    body = await read_object(request, Validity)
    if not body.is_valid and body.reason is None:
        raise InvalidRequest((Problem("reason", "is missing; say why the trial is invalid"),))
    before = await run_in_threadpool(_trial, services, study, number)
    invalid = None if body.is_valid else body.reason
    user = None if sender.account is None else sender.account.user
    steering = Steering("validate" if body.is_valid else "invalidate", user, body.reason)
    await run_in_threadpool(services.store.set_invalid, study, number, invalid=invalid, steering=steering)
    if before.invalid != invalid:
        await run_in_threadpool(
            services.accounts.record,
            sender.actor,
            "trial.validity",
            f"job {study.id}",
            before={"trial": number, "invalid": before.invalid},
            after={"trial": number, "invalid": invalid},
        )
        services.cluster.wake()
    trial = await run_in_threadpool(_trial, services, study, number)
    (document,) = await run_in_threadpool(_documents, services, study, [trial])
    return Json(document)


@router.post(
    "/studies/{study_id:segment}/trials/{number:segment}:evaluate",
    status_code=202,
    response_model=None,
    responses={
        202: {"model": StudyDocument, "description": "Requested, now or by an earlier request."},
        **refusals(404, 409, 422),
    },
)
def evaluate_trial(
    study: ChangedStudy,
    number: TrialNumber,
    services: Context,
    sender: Sender,
    reason: Annotated[str | None, REASON] = None,
) -> Response:
    """Evaluate the recipe of a trial that was pruned, or that failed, at the full budget.

    The study gets a new trial with the recipe and the origin `user`; stored samples are not scored again. A COMPLETE
    study continues. While a searcher with gradients or policies searches, the request is refused (409).
    """
    trial = _trial(services, study, number)
    if trial.state not in (TrialState.PRUNED, TrialState.FAIL):
        raise Refusal(
            409, f"trial {number} is {trial.state.value}; only a trial that is PRUNED or has failed (FAIL) is evaluated"
        )
    if study.state is JobState.CANCELLED:
        raise Refusal(409, f"study {study.name!r} is CANCELLED; only a study that has not been cancelled can continue")
    algorithm = ResolvedStudy.of(study).algorithm or ""
    searcher = SEARCHERS.get(algorithm)
    is_planned = searcher is not None and (searcher.computes_steps or searcher.trains_policy)
    if is_planned and study.state is not JobState.COMPLETE:
        raise Refusal(409, f"study {study.name!r} searches with {algorithm}; send the request when it is COMPLETE")
    user = None if sender.account is None else sender.account.user
    steering = Steering("evaluate", user, reason)
    record = services.store.request_evaluation(study, number, steering=steering)
    if record != study:
        services.accounts.record(sender.actor, "trial.evaluate", f"job {study.id}", after={"trial": number})
        services.cluster.wake()
    (view,) = SEARCH.view([record], services.store, services.artifacts)
    return Json(job_document(record, SEARCH, view, cluster=services.cluster), status_code=202)


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
    """The Pareto front: the trials at full budget that no other trial dominates.

    If `prefer` has weights of the objectives, the document also says which trial of the front the weights pick.
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
    "/studies/{study_id:segment}/report",
    response_model=None,
    responses={200: {"description": "The report.", "content": {"text/html": {}}}, **NOT_MODIFIED, **refusals(404)},
)
async def get_report(study: Study, services: Context, request: Request) -> Response:
    """The report on a study's current state, an HTML page that works offline."""
    return await answer(request, services.records, study.id, _report, media_type="text/html", headers=PAGE_HEADERS)


@router.get(
    "/studies/{study_id:segment}/plots",
    response_model=None,
    responses={200: {"model": PlotsDocument}, **refusals(404)},
)
def list_plots(study: Study) -> Response:
    """List the plots of a study, with their titles and links."""
    path = below_root(f"{SEARCH.path_of(study.id)}/plots")
    document: PlotsDocument = {
        "plots": [{"name": name, "title": chart.title, "link": f"{path}/{name}"} for name, chart in CHARTS.items()]
    }
    return Json(document)


@router.get(
    "/studies/{study_id:segment}/plots/{name:segment}",
    response_model=None,
    responses={200: {"model": PlotDocument}, **NOT_MODIFIED, **refusals(404)},
)
async def get_plot(
    study: Study,
    name: Annotated[PlotName, Path(description="The name of the plot.")],
    services: Context,
    request: Request,
) -> Response:
    """The data series of a plot of a study, as numbers."""
    return await answer(request, services.records, study.id, CHARTS[name].json)


@router.get(
    "/studies/{study_id:segment}/benchmarks",
    response_model=None,
    responses={200: {"model": BenchmarksDocument}, **NOT_MODIFIED, **refusals(404)},
)
async def get_benchmarks(study: Study, services: Context, request: Request) -> Response:
    """The results of a study on its benchmarks so far, as in its summary."""
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
    """Add benchmarks to a study that is COMPLETE, and score what is not scored yet.

    A benchmark of the study may be named again, with the same task and metric: it is then scored on more trials, or
    again on trials that failed. Stored samples are not scored again. A study that is not COMPLETE is refused (409).
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
    record = await run_in_threadpool(services.store.add_benchmarks, study, document, names=names)
    await run_in_threadpool(
        services.accounts.record, sender.actor, "job.add_benchmarks", f"job {study.id}", after={"benchmarks": names}
    )
    services.cluster.wake()
    (view,) = await run_in_threadpool(SEARCH.view, [record], services.store, services.artifacts)
    return Json(job_document(record, SEARCH, view, cluster=services.cluster), status_code=202)


def _benchmarks(run: RunRecord) -> bytes:
    return Json.encode(benchmarks_document(run.benchmarks))


def _pareto(run: RunRecord) -> bytes:
    return Json.encode(pareto(run))


def _summary(run: RunRecord) -> bytes:
    return Json.encode(summary(run))


def _report(run: RunRecord) -> bytes:
    return render_report(run).encode()


def _documents(services: Services, study: JobRecord, trials: Sequence[TrialRecord]) -> list[TrialDocument]:
    objectives = ResolvedStudy.of(study).objectives
    # The source models are the first trials; constraints may be relative to them.
    stop = len(ResolvedStudy.of(study).fingerprints) if has_constraints(objectives) else 0
    sources = services.store.trials(study.id, start=0, stop=stop) if stop else ()
    has_shares = has_directions(study)
    return [trial_document(trial, objectives=objectives, sources=sources, has_shares=has_shares) for trial in trials]


def _trial(services: Services, study: JobRecord, number: int) -> TrialRecord:
    try:
        return services.store.trial(study.id, number)
    except NotFound as error:
        raise Refusal(404, f"trial {number}: study {study.name!r} has no such trial (yet)") from error
