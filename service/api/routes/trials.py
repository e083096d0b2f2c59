"""Routes of a study's trials: their values, recipes and configurations, and new trials that users request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.searchers import SEARCHERS
from service.api.conditional import NOT_MODIFIED, answer_computed, answer_from_trials, tagged
from service.api.dependencies import (
    MAX_ID,
    MAX_NUMBER,
    REASON,
    ChangedStudy,
    Context,
    Services,
    Study,
    TrialNumber,
    found_trial,
)
from service.api.job_documents import shown_job
from service.api.permissions import Sender
from service.api.prefix import below_root
from service.api.presenters import provenance_document
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.api.requests import body_of, read_object
from service.errors import InvalidQuery
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.results.columns import MAX_PATTERNS, ColumnChoice, trial_columns
from service.results.documents import has_directions, trial_document
from service.results.feasibility import has_constraints
from service.results.trial_table import DEFAULT_SORT, MAX_CONDITIONS, TrialTable
from service.schemas.api import ShownTrialDocument, StudyDocument, TrialColumnsDocument, TrialsDocument
from service.schemas.files import TrialDocument
from service.schemas.recipe import RecipeDocument
from service.store.documents import VERIFICATION, read_verification
from service.threads import Work, in_thread, in_threads_of
from service.types import JobRecord, JobState, Steering, TrialRecord, TrialResult, TrialState

__all__ = ["router"]

router = APIRouter(tags=["results"])

MAX_PAGE = 1000
# Characters of an expression in a query, such as a condition.
MAX_EXPRESSION = 2000

OriginName = Literal["source", "published", "user", "search", "refined"]
StateName = Literal["WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAIL"]


@router.get(
    "/studies/{study_id:segment}/trials",
    response_model=None,
    responses={200: {"model": TrialsDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def list_trials(
    study: Study,
    services: Context,
    request: Request,
    after: Annotated[int | None, Query(description="Only trials with a larger number.", ge=0, le=MAX_NUMBER)] = None,
    limit: Annotated[int, Query(description="Maximum number of trials.", ge=1, le=MAX_PAGE)] = 100,
    state: Annotated[StateName | None, Query(description="Only trials in this state.")] = None,
    origin: Annotated[OriginName | None, Query(description="Only trials of this origin.")] = None,
    sort: Annotated[
        str,
        Query(
            description="Field to sort by, such as `number`, `-mean`, `-value.NAME` or `parameter.NAME`; with `-`, the "
            "largest is first. Trials without a value are last. If it is a value of objectives, trials at full budget "
            "are first.",
            max_length=MAX_EXPRESSION,
        ),
    ] = DEFAULT_SORT,
    where: Annotated[
        list[Annotated[str, StringConstraints(max_length=MAX_EXPRESSION)]] | None,
        Query(
            description="Conditions such as `math>=0.6`, `rung<2` or `origin=search`, also separated by commas; "
            f"at most {MAX_CONDITIONS}."
        ),
    ] = None,
    q: Annotated[str | None, Query(description="Text that the label or the number has.", max_length=200)] = None,
    offset: Annotated[
        int | None, Query(description="Number of trials to leave out at the beginning.", ge=0, le=MAX_NUMBER)
    ] = None,
) -> Response:
    """List trials of a study, at most `limit` at a time, by number or sorted by a field, and count them."""
    if sort == DEFAULT_SORT and not any(given is not None for given in (origin, where, q, offset)):
        return await tagged(
            request, services.records, study.id, lambda: _trials_by_number(services, study, after, limit, state)
        )
    if after is not None:
        raise InvalidQuery("after", "pages through all trials by number; with sort, where, q and origin, give offset")
    wanted = {"sort": sort, "where": where, "q": q, "state": state, "origin": origin}
    query = {name: value for name, value in wanted.items() if value is not None}

    def page(trials: tuple[TrialResult, ...]) -> bytes:
        table = TrialTable(trials, lambda: services.store.configurations(study.id), ResolvedStudy.of(study).objectives)
        found = table.select(sort=sort, where=where or (), text=q, state=state, origin=origin)
        start, stop = offset or 0, (offset or 0) + limit
        more = {**query, "limit": limit, "offset": stop} if found[stop:] else None
        shown = services.store.named_trials(study.id, found[start:stop])
        return _trials_document(services, study, shown, total=len(found), more=more)

    return await answer_from_trials(request, services.records, study.id, page)


def _trials_by_number(
    services: Services, study: JobRecord, after: int | None, limit: int, state: StateName | None
) -> bytes:
    """Encode a page of a study's trials as JSON: the first `limit` trials in `state` with numbers above `after`.

    If `after` is None, the page begins with the first trial. If `state` is None, trials in all states are included.
    Other trials are not read.
    """
    start, wanted = 0 if after is None else after + 1, None if state is None else TrialState(state)
    found = services.store.trials(study.id, start=start, state=wanted, limit=limit + 1)
    page = found[:limit]
    chosen: dict[str, Any] = {"limit": limit, **({"state": state} if state else {})}
    counts = services.store.trial_counts(study.id).get(study.id, {})
    total = sum(count for name, count in counts.items() if state in (None, name))
    more = {"after": page[-1].number, **chosen} if found[limit:] else None
    return _trials_document(services, study, page, total=total, more=more)


def _trials_document(
    services: Services, study: JobRecord, page: Sequence[TrialRecord], *, total: int, more: dict[str, Any] | None
) -> bytes:
    """Encode a page of a study's trials, with a link to the next page, as JSON.

    `page` are the trials, and `total` is the number of trials on all pages. `more` has the query parameters of the next
    page; None on the last page.
    """
    path = f"{SEARCH.path_of(study.id)}/trials"
    link = None if more is None else below_root(f"{path}?{urlencode(more, doseq=True)}")
    return Json.encode(TrialsDocument(trials=_documents(services, study, page), total=total, next=link))


@router.get(
    "/studies/{study_id:segment}/trials/columns",
    response_model=None,
    responses={200: {"model": TrialColumnsDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def get_columns(
    study: Study,
    services: Context,
    request: Request,
    fields: Annotated[
        str | None,
        Query(
            description="Columns by name, separated by commas; `value.*` is every column that begins with `value.`. At "
            f"most {MAX_PATTERNS} of them may be such patterns.",
            max_length=MAX_EXPRESSION,
        ),
    ] = None,
    since: Annotated[
        int | None,
        Query(
            description="`event` of an earlier response: only trials that have changed since, unless any may have "
            "(`is_whole`).",
            ge=0,
            le=MAX_ID,
        ),
    ] = None,
) -> Response:
    """The trials of a study as columns, for tables and charts of many trials.

    The columns are `number`, `state`, `origin`, `label`, `bracket`, `reason`, `invalid`, `recipe_digest`, `rung`,
    `samples`, `samples_scored`, `samples_reused`, and `value.NAME`, `standard_error.NAME` and `parameter.NAME` for each
    objective and parameter. Values are given for the highest rung that the trial has finished.
    """
    choice = None if fields is None else ColumnChoice(fields)
    if since is None:
        return await tagged(request, services.records, study.id, lambda: _columns(services, study, choice, None))

    async def changes() -> tuple[bytes, bool]:
        """The trials that have changed; newly scored samples change a trial without an event, and so without a tag."""
        return await run_in_threadpool(_columns, services, study, choice, since), False

    return await answer_computed(request, services.records, study.id, changes)


def _columns(services: Services, study: JobRecord, choice: ColumnChoice | None, since: int | None) -> bytes:
    """Encode the trials of a study as JSON, as columns.

    `choice` selects the columns; None means all columns. Only trials that may have changed after the event with the id
    `since` are encoded; None means all trials.
    """
    # The event is read first: what changes between the reads is encoded once more for the next request.
    event = services.store.last_event_id(study.id)
    numbers = None if since is None else services.store.changed_trials(study.id, after=since)
    trials = services.store.trial_results(study.id, numbers)
    columns = trial_columns(trials, services.store.configurations(study.id, numbers))
    if choice is not None:
        chosen = choice.of(columns)
        columns = {name: values for name, values in columns.items() if name in chosen}
    return Json.encode(TrialColumnsDocument(columns=columns, event=event, is_whole=numbers is None))


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}",
    response_model=None,
    responses={200: {"model": ShownTrialDocument}, **refusals(404)},
)
def get_trial(study: Study, number: TrialNumber, services: Context) -> Response:
    """Show a trial of a study: its configuration, its state, its values so far, and the origin of these values."""
    trial = found_trial(services, study, number)
    (document,) = _documents(services, study, [trial])
    evidence = services.store.evidence(study.id, recipe_digest=trial.recipe.digest)
    verification = read_verification(services.store.document(study.id, VERIFICATION))
    return Json({**document, "provenance": provenance_document(number, evidence, verification)})


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/recipe",
    response_model=None,
    responses={200: {"model": RecipeDocument}, **refusals(404, 503)},
)
async def get_recipe(study: Study, number: TrialNumber, services: Context, sender: Sender) -> Response:
    """The recipe of a trial's merge, in the format that `mergesearch merge` reads.

    The recipe says which source models are merged, and how. It also has the dtype in which the study's engines run the
    merge.
    """
    trial = await run_in_threadpool(found_trial, services, study, number)
    stated = study.document.get("engine", {}).get("dtype", "auto")
    if stated == "auto":
        stated = await services.preflight.engine_dtype(study, client=sender.name)
    return Json({**trial.read_recipe().to_json(), "dtype": stated})


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/mergekit",
    response_model=None,
    responses={
        200: {"description": "The configuration.", "content": {"application/yaml": {"schema": {"type": "object"}}}},
        **refusals(404, 409, 503),
    },
)
async def get_mergekit(study: Study, number: TrialNumber, services: Context, sender: Sender) -> Response:
    """A mergekit configuration (YAML) that computes the same merge as a trial, up to float32 rounding.

    Models are named by their hub ids. A model without a hub id has its name in the study, because the server's
    directories are not on the reader's machine; a comment lists these models.

    If mergekit would compute other tensors, or the models cannot be read or have changed since the study was created,
    the request is refused (409). The request is also refused (503) if reading the models takes more time or memory than
    a request may use. The field `problems` of the response lists every reason.
    """
    trial = await run_in_threadpool(found_trial, services, study, number)
    recipe = trial.read_recipe().to_json()
    try:
        content = await services.preflight.mergekit_file(study, recipe, client=sender.name)
    except InvalidStudy as error:
        fields = {problem.field for problem in error.problems}
        if fields == {"recipe"}:
            status, reason = 409, "there is no mergekit configuration that computes the same merge"
        elif "" in fields:  # a limit of requests
            status, reason = 503, "the mergekit configuration cannot be computed within the limits of a request"
        else:
            status, reason = 409, "the models of the study cannot be read, or have changed"
        raise Refusal(status, f"trial {number}: {reason}", error.problems) from error
    return Response(content, media_type="application/yaml")


class EnqueuedTrial(BaseModel):
    """Body of the request that enqueues a merge: a label, and either a recipe or a configuration."""

    model_config = ConfigDict(extra="forbid", strict=True)

    label: Annotated[
        str, Field(min_length=1, max_length=100, pattern=r"^[^\r\n]*$", description="Label of the new trial.")
    ]
    recipe: Annotated[
        dict[str, Any] | None, Field(description="Content of a recipe.json or of a mergekit configuration.")
    ] = None
    configuration: Annotated[
        dict[str, Any] | None, Field(description="A value for each parameter of the study's search space.")
    ] = None
    reason: (
        Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\r\n]*$", description="Shown by the events.")]
        | None
    ) = None


@router.post(
    "/studies/{study_id:segment}/trials",
    status_code=202,
    response_model=None,
    responses={
        202: {"model": StudyDocument, "description": "Enqueued, now or by an earlier request."},
        **refusals(404, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of(EnqueuedTrial),
)
async def enqueue_trial(request: Request, study: ChangedStudy, services: Context, sender: Sender) -> Response:
    """Evaluate a given merge on all samples of the study's search, as a new trial with the origin `user`.

    The merge is a recipe, a mergekit configuration over the study's models, or a configuration of the search space. A
    COMPLETE study continues. If the study's searcher computes gradients or trains a policy, the request is refused
    (409) until the study is COMPLETE. The same request sent twice enqueues one trial.
    """
    body = await read_object(request, EnqueuedTrial)
    if (body.recipe is None) == (body.configuration is None):
        message = "give exactly one of recipe and configuration"
        raise InvalidRequest((Problem("recipe" if body.recipe is None else "configuration", message),))
    _check_evaluations(study)
    recipe = await services.preflight.check_enqueued(
        study, body.label, recipe=body.recipe, configuration=body.configuration, client=sender.name
    )
    user = None if sender.account is None else sender.account.user

    def enqueue() -> tuple[JobRecord, bool]:
        steering = Steering("enqueue", user, body.reason)
        with services.store.unit_of_work():
            record, is_new = services.steering.enqueue_trial(
                study, body.label, recipe=recipe, configuration=body.configuration, steering=steering
            )
            if is_new:
                services.accounts.record(sender.actor, "trial.enqueue", f"job {study.id}", after={"label": body.label})
            return record, is_new

    record, is_new = await in_thread(Work.WRITE, enqueue)
    if is_new:
        services.cluster.wake()
    return Json(await run_in_threadpool(shown_job, services, sender, record), status_code=202)


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

    An invalid trial keeps its scored samples, but is left out of the Pareto front, of the results on held-out data and
    of every comparison. The searcher keeps the trial's results. If other trials are now among the best, they are scored
    on held-out data; a COMPLETE study continues for this.
    """
    body = await read_object(request, Validity)
    if not body.is_valid and body.reason is None:
        raise InvalidRequest((Problem("reason", "is missing; say why the trial is invalid"),))
    invalid = None if body.is_valid else body.reason
    user = None if sender.account is None else sender.account.user
    steering = Steering("validate" if body.is_valid else "invalidate", user, body.reason)

    def mark() -> bool:
        with services.store.unit_of_work():
            known = found_trial(services, study, number).invalid
            services.steering.set_invalid(study, number, invalid=invalid, steering=steering)
            if known != invalid:
                before, after = ({"trial": number, "invalid": each} for each in (known, invalid))
                services.accounts.record(sender.actor, "trial.validity", f"job {study.id}", before=before, after=after)
            return known != invalid

    if await in_thread(Work.WRITE, mark):
        services.cluster.wake()
    trial = await run_in_threadpool(found_trial, services, study, number)
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
@in_threads_of(Work.WRITE)
def evaluate_trial(
    study: ChangedStudy,
    number: TrialNumber,
    services: Context,
    sender: Sender,
    reason: Annotated[str | None, REASON] = None,
) -> Response:
    """Evaluate the recipe (merge) of a trial that was pruned, or that failed, on all samples of the study.

    The study gets a new trial with the recipe and the origin `user`; stored samples are not scored again. A COMPLETE
    study continues. If the study's searcher computes gradients or trains a policy, the request is refused (409) until
    the study is COMPLETE.
    """
    trial = found_trial(services, study, number)
    if trial.state not in (TrialState.PRUNED, TrialState.FAIL):
        raise Refusal(
            409, f"trial {number} is {trial.state.value}; only a trial that is PRUNED or has failed (FAIL) is evaluated"
        )
    _check_evaluations(study)
    user = None if sender.account is None else sender.account.user
    steering = Steering("evaluate", user, reason)
    with services.store.unit_of_work():
        record, is_new = services.steering.request_evaluation(study, number, steering=steering)
        if is_new:
            services.accounts.record(sender.actor, "trial.evaluate", f"job {study.id}", after={"trial": number})
    if is_new:
        services.cluster.wake()
    return Json(shown_job(services, sender, record), status_code=202)


def _check_evaluations(study: JobRecord) -> None:
    """Raise Refusal (409) if a study cannot evaluate a merge that a user requests now.

    This is so if the study is CANCELLED. It is also so if the study is not COMPLETE, and its searcher computes
    gradients or trains a policy.
    """
    if study.state is JobState.CANCELLED:
        raise Refusal(409, f"study {study.name!r} is CANCELLED; only a study that has not been cancelled can continue")
    algorithm = ResolvedStudy.of(study).algorithm or ""
    searcher = SEARCHERS.get(algorithm)
    is_planned = searcher is not None and (searcher.computes_steps or searcher.trains_policy)
    if is_planned and study.state is not JobState.COMPLETE:
        raise Refusal(409, f"study {study.name!r} searches with {algorithm}; send the request when it is COMPLETE")


def _documents(services: Services, study: JobRecord, trials: Sequence[TrialRecord]) -> list[TrialDocument]:
    objectives = ResolvedStudy.of(study).objectives
    # The source models are the first trials; constraints may be relative to them.
    stop = len(ResolvedStudy.of(study).fingerprints) if has_constraints(objectives) else 0
    sources = services.store.trials(study.id, start=0, stop=stop) if stop else ()
    has_shares = has_directions(study)
    return [trial_document(trial, objectives=objectives, sources=sources, has_shares=has_shares) for trial in trials]
