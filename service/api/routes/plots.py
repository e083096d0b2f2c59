"""Routes of the plots of a study and of its trials, as series of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Union

from fastapi import APIRouter, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response

from search_spaces.study.file import Study as StudyFile
from service.api.conditional import NOT_MODIFIED, answer, answer_computed, tagged
from service.api.dependencies import MAX_NUMBER, Context, Study, TrialNumber, found_trial
from service.api.permissions import Sender
from service.api.prefix import below_root
from service.api.problems import Json, refusals
from service.errors import InvalidQuery
from service.jobs.search.kind import SEARCH
from service.resolved_study import ResolvedStudy
from service.results.importance import TITLE as IMPORTANCE
from service.results.importance import ImportancePlot
from service.results.load import data_of
from service.results.series import CHARTS, TRIAL_CHARTS
from service.results.stops import TITLE as STOPS
from service.results.stops import StopsPlot, stopped_trials, stops_json
from service.results.timeline import EVENTS as TIMELINE_EVENTS
from service.results.timeline import TITLE as TIMELINE
from service.results.timeline import TimelinePlot, timeline, timeline_json
from service.schemas.api import PlotsDocument
from service.types import TrialResult, TrialState
from workers.types import Split

__all__ = ["router"]

router = APIRouter(tags=["results"])

# Stopped trials that are compared with their rivals in one answer.
MAX_STOPS = 100
# Seconds since the epoch, some time after the year 3000.
MAX_TIME = 2**35

# Derived from the declared charts.
PlotName: Any = Literal[*CHARTS]
PlotDocument: Any = Union[*(chart.series_type for chart in CHARTS.values())]
TrialPlotName: Any = Literal[*TRIAL_CHARTS]
TrialPlotDocument: Any = Union[*(chart.series_type for chart in TRIAL_CHARTS.values())]
# Plots with routes of their own, which have parameters, and their titles.
ROUTED_PLOTS = {"timeline": TIMELINE, "importance": IMPORTANCE, "stops": STOPS}


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
        request, services.records, study.id, lambda: chart.trial_json(study, found_trial(services, study, number))
    )


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
            await run_in_threadpool(found_trial, services, study, number)

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
