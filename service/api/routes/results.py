"""Routes of a study's results so far: trials, recipes, Pareto front, summary, report, plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union
from urllib.parse import urlencode

import numpy as np
from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field, StringConstraints
from starlette.responses import Response

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.objectives import Objective
from search_spaces.preferences import parse_preference
from search_spaces.searchers import SEARCHERS
from search_spaces.section import NAME
from search_spaces.study.file import Study as StudyFile
from search_spaces.study.file import parse_benchmarks
from search_spaces.study.yaml import parse_document
from service.api.conditional import NOT_MODIFIED, answer, answer_computed, answer_from_trials, tagged, unchanging
from service.api.dependencies import (
    MAX_ID,
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
from service.api.presenters import job_document, provenance_document
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, YAML_TYPES, body_of, read_body, read_object, sent_as_json
from service.errors import InvalidQuery, NotFound
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.results.columns import MAX_PATTERNS, ColumnChoice, trial_columns
from service.results.documents import (
    benchmarks_document,
    estimate_document,
    estimate_documents,
    has_directions,
    pareto,
    trial_document,
)
from service.results.feasibility import has_constraints
from service.results.importance import TITLE as IMPORTANCE
from service.results.importance import ImportancePlot
from service.results.load import data_of, held_out_differences
from service.results.pictures import has_pictures, has_right_answers, predictions, section_of
from service.results.preference import choices
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.series import CHARTS, TRIAL_CHARTS
from service.results.side_by_side import Kept, SideBySide, best_value, side_by_side
from service.results.stops import TITLE as STOPS
from service.results.stops import StopsPlot, stopped_trials, stops_json
from service.results.summary import summary
from service.results.timeline import EVENTS as TIMELINE_EVENTS
from service.results.timeline import TITLE as TIMELINE
from service.results.timeline import TimelinePlot, timeline, timeline_json
from service.results.trial_table import DEFAULT_SORT, MAX_CONDITIONS, TrialTable
from service.schemas.api import (
    HeldOutDifferencesDocument,
    PlotsDocument,
    SampleCountsDocument,
    SampleDocument,
    ScoredSampleDocument,
    ShownTrialDocument,
    StudyDocument,
    TrialColumnsDocument,
    TrialSamplesDocument,
    TrialsDocument,
)
from service.schemas.files import BenchmarksDocument, ParetoDocument, SummaryDocument, TrialDocument
from service.schemas.recipe import RecipeDocument
from service.store import Store
from service.store.documents import BENCHMARKS as BENCHMARK_FACTS
from service.store.documents import VERIFICATION, read_benchmarks, read_verification
from service.studies.benchmarks import study_with
from service.threads import Work, in_thread, in_threads_of
from service.types import JobRecord, JobState, Steering, TrialRecord, TrialResult, TrialState
from workers.types import SampleResult, Split

__all__ = ["router"]

router = APIRouter(tags=["results"])

MAX_PAGE = 1000
# Characters of an expression in a query, such as a condition.
MAX_EXPRESSION = 2000

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
# A picture (`workers.evaluation.image_pictures`) is a WebP file.
PICTURE_TYPE = "image/webp"
MAX_SAMPLES = 500
# A page of samples ends after the sample with which its texts (in UTF-8) have this many bytes.
MAX_TEXT_BYTES = 4 * 2**20
# Samples whose texts are read from the store at a time.
READ_SAMPLES = 50
# Stopped trials that are compared with their rivals in one answer.
MAX_STOPS = 100
# Seconds since the epoch, some time after the year 3000.
MAX_TIME = 2**35
NO_VALUES = np.empty(0)
NO_PROMPTS = (
    "prompts and references are stored when the search has ended, and those of benchmarks when these are scored; "
    "studies of earlier versions have none"
)
NO_PICTURES = (
    "pictures are stored when prompts are, of the first samples (8 MiB of them) whose images can be read; studies of "
    "earlier versions have none"
)
NO_RESPONSES = "responses were removed (`limits.keep_responses` or the server's retention), or were empty"

# Derived from the declared charts.
PlotName: Any = Literal[*CHARTS]
PlotDocument: Any = Union[*(chart.series_type for chart in CHARTS.values())]
TrialPlotName: Any = Literal[*TRIAL_CHARTS]
TrialPlotDocument: Any = Union[*(chart.series_type for chart in TRIAL_CHARTS.values())]
# Plots with routes of their own, which have parameters, and their titles.
ROUTED_PLOTS = {"timeline": TIMELINE, "importance": IMPORTANCE, "stops": STOPS}
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
        int | None, Query(description="Id of an event: only trials that have changed after it.", ge=0, le=MAX_ID)
    ] = None,
) -> Response:
    """The trials of a study as columns, for tables and charts of many trials.

    The columns are `number`, `state`, `origin`, `label`, `bracket`, `reason`, `invalid`, `recipe_digest`, `rung`,
    `samples`, `samples_scored`, `samples_reused`, and `value.NAME`, `standard_error.NAME` and `parameter.NAME` for each
    objective and parameter. Values are given for the highest rung that the trial has finished.
    """
    choice = None if fields is None else ColumnChoice(fields)
    return await tagged(request, services.records, study.id, lambda: _columns(services, study, choice, since))


def _columns(services: Services, study: JobRecord, choice: ColumnChoice | None, since: int | None) -> bytes:
    """Encode the trials of a study as JSON, as columns.

    `choice` selects the columns; None means all columns. Only trials that have changed after the event with the id
    `since` are encoded; None means all trials.
    """
    event = services.store.last_event_id(study.id)
    numbers = None if since is None else services.store.changed_trials(study.id, after=since)
    trials = services.store.trial_results(study.id, numbers)
    columns = trial_columns(trials, services.store.configurations(study.id, numbers))
    if choice is not None:
        chosen = choice.of(columns)
        columns = {name: values for name, values in columns.items() if name in chosen}
    return Json.encode(TrialColumnsDocument(columns=columns, event=event))


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}",
    response_model=None,
    responses={200: {"model": ShownTrialDocument}, **refusals(404)},
)
def get_trial(study: Study, number: TrialNumber, services: Context) -> Response:
    """Show a trial of a study: its configuration, its state, its values so far, and the origin of these values."""
    trial = _trial(services, study, number)
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
    trial = await run_in_threadpool(_trial, services, study, number)
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
    trial = await run_in_threadpool(_trial, services, study, number)
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


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/samples",
    response_model=None,
    responses={200: {"model": TrialSamplesDocument}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def list_samples(
    study: Study,
    number: TrialNumber,
    services: Context,
    request: Request,
    objective: Annotated[
        str | None, Query(description="Name of an objective or benchmark; by default the first.")
    ] = None,
    split: Annotated[
        Literal["search", "holdout", "bench"], Query(description="Search data, held-out data, or benchmarks.")
    ] = "search",
    against: Annotated[
        int | None, Query(description="Number of another trial, whose samples are shown beside.", ge=0, le=MAX_NUMBER)
    ] = None,
    only: Annotated[
        Kept | None,
        Query(
            description="Only samples with different values (`differs`), that one trial alone has right (`a_only`, "
            "`b_only`), or that neither has right (`both_wrong`). Needs `against`."
        ),
    ] = None,
    after: Annotated[int | None, Query(description="Only samples at a larger position.", ge=0, le=MAX_NUMBER)] = None,
    limit: Annotated[int, Query(description="Maximum number of samples.", ge=1, le=MAX_SAMPLES)] = 50,
) -> Response:
    """List the samples of a trial, or of two trials side by side: prompts, references, completions and values.

    A trial has a sample right if its value is the best of the metric's range. With the metric `entropy`, which does not
    depend on right answers, `counts` and `is_right` are null, and `only` may be `differs` alone. `only` selects the
    samples that are listed, but `counts` and `difference` always refer to all samples that both trials have. A page
    ends before `limit` if its texts are long (4 MiB); the link `next` leads to the following samples.
    """
    if only is not None and against is None:
        raise InvalidQuery("only", f"{only} compares two trials; give the other trial as against")

    def page() -> bytes:
        store, shown = services.store, [number, *([] if against is None else [against])]
        trials = [_trial(services, study, each) for each in shown]
        scored = _objective(services, study, Split(split), objective)
        are_images = _are_images(study, Split(split), scored.name)
        has_right = has_right_answers(scored.metric, are_images=are_images)
        if not has_right and only not in (None, "differs"):
            raise InvalidQuery(
                "only", f"{only}: the metric {scored.metric} of {scored.name} knows no right answers; give differs"
            )
        digests = [trial.recipe.digest for trial in trials]
        values = store.sample_values(study.id, Split(split), recipes=set(digests), objectives=[scored.name])
        arrays = [values.get(digest, {}).get(scored.name, NO_VALUES) for digest in digests]
        kept, comparison = side_by_side(scored, arrays[0], arrays[1] if against is not None else None, only=only)
        left = [position for position in kept if after is None or position > after]
        samples, missing = _samples(store, study, Split(split), scored, digests, left[:limit], are_images=are_images)
        query = {"objective": scored.name, "split": split, "against": against, "only": only, "limit": limit}
        more = None
        if left[len(samples) :]:
            more = {**{k: v for k, v in query.items() if v is not None}, "after": samples[-1]["position"]}
        path = f"{SEARCH.path_of(study.id)}/trials/{number}/samples"
        return Json.encode(
            TrialSamplesDocument(
                trial=number,
                against=against,
                objective=scored.name,
                split=split,
                has_pictures=are_images,
                counts=None if comparison is None or not has_right else _counts(comparison),
                difference=None
                if comparison is None or comparison.difference is None
                else estimate_document(comparison.difference),
                total=len(kept),
                samples=samples,
                missing=missing,
                next=None if more is None else below_root(f"{path}?{urlencode(more)}"),
            )
        )

    return await tagged(request, services.records, study.id, page, is_large=True)


def _counts(comparison: SideBySide) -> SampleCountsDocument:
    return {
        "samples": comparison.num_samples,
        "both_right": comparison.both_right,
        "a_only": comparison.a_only,
        "b_only": comparison.b_only,
        "both_wrong": comparison.both_wrong,
    }


def _objective(services: Services, study: JobRecord, split: Split, name: str | None) -> Objective:
    """Find the objective or benchmark whose samples are shown: the one called `name`, or the first if `name` is None.

    `split` says whether samples of the search data, the holdout data or the benchmarks are shown. Raises InvalidQuery
    if the study has no such objective or benchmark.
    """
    if split is Split.BENCHMARK:
        facts = read_benchmarks(services.store.document(study.id, BENCHMARK_FACTS))
        known = {each.name: each.objective for each in facts}
    else:
        objectives = ResolvedStudy.of(study).objectives
        known = {each.name: each for each in objectives if each.cost_of_recipe is None}
    found = known.get(next(iter(known), "") if name is None else name)
    if found is None:
        kind = "benchmark with samples" if split is Split.BENCHMARK else "objective with samples"
        raise InvalidQuery(
            "objective", f"{name!r} is no {kind} of the study; accepted are {', '.join(known) or 'none yet'}"
        )
    return found


def _are_images(study: JobRecord, split: Split, objective: str) -> bool:
    """Whether the samples of an objective or benchmark of the study file are images."""
    specs = section_of(StudyFile.model_validate(study.document), split)
    return any(spec.name == objective and has_pictures(spec) for spec in specs)


def _samples(
    store: Store,
    study: JobRecord,
    split: Split,
    objective: Objective,
    digests: Sequence[str],
    positions: Sequence[int],
    *,
    are_images: bool,
) -> tuple[list[SampleDocument], list[str]]:
    """Describe the samples at `positions` for one trial or two, and list the reasons why texts are missing.

    If the texts of the first samples already have MAX_TEXT_BYTES bytes, the samples after them are left out. `digests`
    has the digest of each trial's recipe (merge). `split` says whether samples of search data, held-out data or
    benchmarks are described; `objective` is the objective or benchmark. If `are_images` is True, samples have pictures
    and predicted classes.
    """
    documents: list[SampleDocument] = []
    num_bytes = 0
    for document in _described(store, study, split, objective, digests, positions, are_images=are_images):
        documents.append(document)
        num_bytes += _num_bytes(document)
        if num_bytes >= MAX_TEXT_BYTES:
            break
    missing = []
    if any(row["prompt"] is None for row in documents):
        missing.append(NO_PROMPTS)
    if are_images and any(row["picture"] is None for row in documents):
        missing.append(NO_PICTURES)
    if any(each is not None and each["response"] is None for row in documents for each in (row["a"], row["b"])):
        missing.append(NO_RESPONSES)
    return documents, missing


def _described(
    store: Store,
    study: JobRecord,
    split: Split,
    objective: Objective,
    digests: Sequence[str],
    positions: Sequence[int],
    *,
    are_images: bool,
) -> Iterator[SampleDocument]:
    """Yield a description of the sample at each of `positions`, for one trial or for two.

    `digests` has the digest of each trial's recipe (merge). `split` says whether samples of search data, held-out data
    or benchmarks are described; `objective` is the objective or benchmark. A few samples are read from the database at
    a time. If `are_images` is True, the samples have links to stored pictures, and predicted classes.
    """
    has_right = has_right_answers(objective.metric, are_images=are_images)
    best = best_value(objective) if has_right else None
    of_task = f"{SEARCH.path_of(study.id)}/pictures/{split}/{objective.name}"
    for first in range(0, len(positions), READ_SAMPLES):
        part = positions[first : first + READ_SAMPLES]
        texts = store.prompts(study.id, split, objective.name, set(part))
        pictured = store.picture_positions(study.id, split, objective.name, set(part)) if are_images else set()
        found: list[dict[int, SampleResult]] = []
        for digest in digests:
            read = store.samples(
                study.id, digest, split, objective=objective.name, positions=set(part), has_tokens=False
            )
            found.append({sample.position: sample for sample in read})
        for position in part:
            text = texts.get(position)
            yield {
                "position": position,
                "document": found[0][position].document,
                "prompt": None if text is None else text.prompt,
                "reference": None if text is None else text.reference,
                "picture": below_root(f"{of_task}/{position}") if position in pictured else None,
                "a": _scored_sample(found[0][position], best, is_image=are_images),
                "b": _scored_sample(found[1][position], best, is_image=are_images) if len(digests) > 1 else None,
            }


def _num_bytes(sample: SampleDocument) -> int:
    """Number of bytes of a sample's prompt, reference and responses in UTF-8."""
    responses = [each["response"] for each in (sample["a"], sample["b"]) if each is not None]
    texts = [sample["prompt"], sample["reference"], *responses]
    return sum(len((text or "").encode(errors="surrogatepass")) for text in texts)


def _scored_sample(sample: SampleResult, best: float | None, *, is_image: bool) -> ScoredSampleDocument:
    """Describe a trial's response to a sample: its value, its text, and whether it is right.

    `best` is the value of a right response; None if the metric does not say whether a response is right. If `is_image`
    is True, the sample is an image, and the description has the predicted classes.
    """
    has_text = bool(sample.response or sample.tokens)
    response = sample.response if has_text else None
    return {
        "value": sample.value,
        "is_right": None if best is None else sample.value == best,
        "response": response,
        "is_truncated": sample.is_truncated,
        "predictions": None
        if not is_image or response is None
        else [{"name": each.name, "probability": each.probability} for each in predictions(response)],
    }


@router.get(
    "/studies/{study_id:segment}/pictures/{split:segment}/{objective:segment}/{position:segment}",
    response_model=None,
    responses={
        200: {
            "description": "The picture, a WebP file.",
            "content": {PICTURE_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        },
        **NOT_MODIFIED,
        **refusals(404),
    },
)
async def get_picture(
    study: Study,
    split: Annotated[
        Literal["search", "holdout", "bench"], Path(description="Search data, held-out data, or benchmarks.")
    ],
    objective: Annotated[str, Path(description="Name of an objective or benchmark.", pattern=NAME)],
    position: Annotated[int, Path(description="Index of the sample in the order of scoring.", ge=0, le=MAX_NUMBER)],
    services: Context,
    request: Request,
) -> Response:
    """A small picture of a sample that is an image.

    Pictures are stored when the search ends, so this request reads no file of the task. All trials share a sample's
    picture, and pictures do not change.
    """

    def read() -> Response:
        content = services.store.picture(study.id, Split(split), objective, position)
        if content is None:
            raise Refusal(404, f"sample {position} of {objective}, {split}: no picture is stored")
        return unchanging(request, content, media_type=PICTURE_TYPE)

    return await run_in_threadpool(read)


@router.get(
    "/studies/{study_id:segment}/trials/{number:segment}/plots/{name:segment}",
    response_model=None,
    responses={200: {"model": TrialPlotDocument}, **NOT_MODIFIED, **refusals(404)},
)
async def get_trial_plot(
    study: Study,
    number: TrialNumber,
    name: Annotated[TrialPlotName, Path(description="The name of the plot.")],
    services: Context,
    request: Request,
) -> Response:
    """The data series of a plot of one trial: its recipe, its coefficients or its layer path (sequence of layers)."""
    chart = TRIAL_CHARTS[name]
    return await tagged(
        request, services.records, study.id, lambda: chart.trial_json(study, _trial(services, study, number))
    )


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
            record, is_new = services.store.enqueue_trial(
                study, body.label, recipe=recipe, configuration=body.configuration, steering=steering
            )
            if is_new:
                services.accounts.record(sender.actor, "trial.enqueue", f"job {study.id}", after={"label": body.label})
            return record, is_new

    record, is_new = await in_thread(Work.WRITE, enqueue)
    if is_new:
        services.cluster.wake()
    return Json(await run_in_threadpool(_study_document, services, record, sender), status_code=202)


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
            known = _trial(services, study, number).invalid
            services.store.set_invalid(study, number, invalid=invalid, steering=steering)
            if known != invalid:
                before, after = ({"trial": number, "invalid": each} for each in (known, invalid))
                services.accounts.record(sender.actor, "trial.validity", f"job {study.id}", before=before, after=after)
            return known != invalid

    if await in_thread(Work.WRITE, mark):
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
    trial = _trial(services, study, number)
    if trial.state not in (TrialState.PRUNED, TrialState.FAIL):
        raise Refusal(
            409, f"trial {number} is {trial.state.value}; only a trial that is PRUNED or has failed (FAIL) is evaluated"
        )
    _check_evaluations(study)
    user = None if sender.account is None else sender.account.user
    steering = Steering("evaluate", user, reason)
    with services.store.unit_of_work():
        record, is_new = services.store.request_evaluation(study, number, steering=steering)
        if is_new:
            services.accounts.record(sender.actor, "trial.evaluate", f"job {study.id}", after={"trial": number})
    if is_new:
        services.cluster.wake()
    return Json(_study_document(services, record, sender), status_code=202)


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


def _study_document(services: Services, study: JobRecord, sender: Principal) -> Any:
    (view,) = SEARCH.view([study], services.store, services.artifacts)
    sees = services.guard.may_read_dashboard(sender)
    return job_document(study, SEARCH, view, cluster=services.cluster, reader=sender.account, sees_dashboard=sees)


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
    "/studies/{study_id:segment}/plots",
    response_model=None,
    responses={200: {"model": PlotsDocument}, **refusals(404)},
)
def list_plots(study: Study) -> Response:
    """List the plots that show the results of a study, with their titles and links to their data."""
    path = below_root(f"{SEARCH.path_of(study.id)}/plots")
    titles = {name: chart.title for name, chart in CHARTS.items()} | ROUTED_PLOTS
    document: PlotsDocument = {
        "plots": [{"name": name, "title": title, "link": f"{path}/{name}"} for name, title in titles.items()]
    }
    return Json(document)


@router.get(
    "/studies/{study_id:segment}/plots/timeline",
    response_model=None,
    responses={200: {"model": TimelinePlot}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def get_timeline(
    study: Study,
    services: Context,
    request: Request,
    start: Annotated[
        float | None, Query(alias="from", description="Beginning, in seconds since the epoch.", ge=0, le=MAX_TIME)
    ] = None,
    end: Annotated[
        float | None, Query(alias="to", description="End, in seconds since the epoch.", ge=0, le=MAX_TIME)
    ] = None,
    bins: Annotated[int, Query(description="Number of bins.", ge=1, le=2000)] = 1000,
) -> Response:
    """Show how each replica (process with an engine) spent its time: merging, swapping weights, scoring, or idle.

    The time is divided into `bins` bins of equal length; for each bin, the share of each activity is given. If the time
    has fewer than 500 chunks (groups of samples that are scored together), each chunk is listed too. `events` lists the
    drivers that worked on the study, the waits of the study, and engine faults.
    """
    if start is not None and end is not None and end <= start:
        raise InvalidQuery("to", f"{end:g} is not after from={start:g}; give a later time")

    def computed() -> bytes:
        work = services.store.chunk_work(study.id, since=start)
        events = services.store.events(study.id, kinds=TIMELINE_EVENTS)
        return timeline_json(timeline(work, start=start, end=end, num_bins=bins, events=events))

    return await tagged(request, services.records, study.id, computed)


@router.get(
    "/studies/{study_id:segment}/plots/importance",
    response_model=None,
    responses={200: {"model": ImportancePlot}, **NOT_MODIFIED, **refusals(404, 422, 503)},
)
async def get_importance(
    study: Study,
    services: Context,
    request: Request,
    sender: Sender,
    objective: Annotated[str | None, Query(description="Name of an objective; by default the first.")] = None,
) -> Response:
    """Importance of each parameter for an objective, by PED-ANOVA over the trials at full budget.

    The importances say which parameters decide whether a trial is among the best tenth. Importances are also summed by
    layer, by part of a layer, and by expert. Below 50 trials, `parameters` is null, and `reason` says why.
    """
    known = {each.name: each for each in ResolvedStudy.of(study).objectives}
    found = known.get(next(iter(known)) if objective is None else objective)
    if found is None:
        raise InvalidQuery("objective", f"{objective!r} is no objective of the study; accepted are {', '.join(known)}")
    chosen = found
    return await answer_computed(
        request, services.records, study.id, lambda: services.importances.plot(study, chosen, client=sender.name)
    )


@router.get(
    "/studies/{study_id:segment}/plots/stops",
    response_model=None,
    responses={200: {"model": StopsPlot}, **NOT_MODIFIED, **refusals(404, 422)},
)
async def get_stops(
    study: Study,
    services: Context,
    request: Request,
    trial: Annotated[int | None, Query(description="Only this trial, stopped or not.", ge=0, le=MAX_NUMBER)] = None,
    against: Annotated[
        int | None,
        Query(description="Compare `trial` with this trial instead of its rival.", ge=0, le=MAX_NUMBER),
    ] = None,
    bracket: Annotated[int | None, Query(description="Only trials of this bracket.", ge=0, le=MAX_NUMBER)] = None,
    rung: Annotated[
        int | None, Query(description="Only trials that were stopped at this rung.", ge=0, le=MAX_NUMBER)
    ] = None,
) -> Response:
    """Compare each trial that a scheduler has stopped with its rival, a trial that was better.

    Under racing, the rival is a trial that was ahead. Under other schedulers, the rival is the lowest-ranked of the
    trials that the rung promoted. The values of the two trials are compared at each rung that the stopped trial has
    finished, with differences paired by sample. At most 100 stopped trials are listed.
    """
    if against is not None and trial is None:
        raise InvalidQuery("against", f"{against} is compared with one trial; give the other as trial")
    for number in (trial, against):
        if number is not None:
            await run_in_threadpool(_trial, services, study, number)

    def computed() -> bytes:
        store = services.store
        if trial is not None:
            chosen: Sequence[TrialResult] = store.trial_results(study.id, {trial})
        else:
            ended = (each for each in store.trial_results(study.id) if each.state is TrialState.PRUNED)
            chosen = [
                each
                for each in ended
                if each.rungs and bracket in (None, each.bracket) and rung in (None, each.rungs[-1].rung)
            ]
        shown = chosen[:MAX_STOPS]
        numbers = {each.number: each.rival if against is None else against for each in shown}
        found = store.trial_results(study.id, {number for number in numbers.values() if number is not None})
        known = {each.number: each for each in found}
        resolved = ResolvedStudy.of(study)
        file = StudyFile.model_validate(study.document)
        trials = stopped_trials(
            shown,
            {own: known[number] for own, number in numbers.items() if number is not None and number in known},
            resolved.objectives,
            documents=data_of(file.scored_objectives.values()),
            read=lambda digests: store.sample_values(study.id, Split.SEARCH, recipes=sorted(digests)),
        )
        return stops_json(StopsPlot("stops", len(chosen), trials))

    return await tagged(request, services.records, study.id, computed, is_large=True)


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
    """The data series of a plot of a study, as numbers for drawing the plot."""
    return await answer(request, services.records, study.id, CHARTS[name].json)


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
            record = services.store.add_benchmarks(study, document, names=names)
            services.accounts.record(sender.actor, "job.add_benchmarks", f"job {study.id}", after={"benchmarks": names})
            return record

    record = await in_thread(Work.WRITE, add)
    services.cluster.wake()
    return Json(await run_in_threadpool(_study_document, services, record, sender), status_code=202)


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
