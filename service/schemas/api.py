"""The server's JSON responses, except the documents of a run: studies, events, exports, lists of plots, problems.

Server and client share them. The series of a plot are declared with the plot, in `service.results.series`. Keys may be
added in later versions, never renamed or removed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from service.schemas.files import Number, PreferredDocument, State, TrialDocument, Values

__all__ = [
    "DeletedDocument",
    "EndDocument",
    "EventDocument",
    "EventsDocument",
    "ExportDocument",
    "ExportsDocument",
    "FieldProblem",
    "JobDocument",
    "PlotsDocument",
    "ProblemDocument",
    "ProgressDocument",
    "StudiesDocument",
    "StudyDocument",
    "TrialsDocument",
]

Time = Annotated[str, Field(description="RFC 3339, in UTC.")]


class ProgressDocument(TypedDict):
    """The progress of a study's driver; each report replaces the one before."""

    study: str
    stage: Literal["searching", "held-out"]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    max_trials: Annotated[int, Field(description="Planned number of trials, sources and published recipes included.")]
    bracket: int | None
    num_brackets: int | None
    rung: int | None
    rungs: Annotated[list[int], Field(description="Samples at each rung, of the objective that has most.")]
    best_trial: int | None
    best: Values
    samples_scored: Number
    samples_planned: Number


class JobDocument(TypedDict):
    """The Ray Job that drives a study."""

    submission_id: str
    dashboard_url: Annotated[str | None, Field(description="Its page in the Ray dashboard, while that is up.")]


class StudyDocument(TypedDict):
    """A study on the server."""

    id: str
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What must happen before it goes on.")]
    created_at: Time
    wall_clock_s: Annotated[float, Field(description="Seconds that drivers have worked on it.")]
    attempt: Annotated[int, Field(description="Drivers that have worked on it so far.")]
    algorithm: Annotated[str | None, Field(description="The searcher, also where the study file says auto.")]
    algorithm_reason: Annotated[str | None, Field(description="Why it was chosen.")]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    progress: ProgressDocument | None
    job: JobDocument | None
    links: Annotated[dict[str, str], Field(description="self, trials, pareto, summary, events, report, log.")]


class StudiesDocument(TypedDict):
    studies: list[StudyDocument]


class TrialsDocument(TypedDict):
    trials: list[TrialDocument]
    next: Annotated[str | None, Field(description="Link to the next page; null on the last one.")]


class EventDocument(TypedDict):
    """An event of a study. As a server-sent event its id and kind are the frame's `id` and `event`."""

    id: int
    time: Time
    kind: str
    payload: dict[str, Any]


class EventsDocument(TypedDict):
    events: list[EventDocument]


class EndDocument(TypedDict):
    """The last frame of a stream of events: how the study ended."""

    state: State
    reason: str | None


class ExportDocument(TypedDict):
    """A merged model written for download."""

    id: str
    study: str
    trial: Number
    dtype: str
    state: Literal["WAITING", "RUNNING", "COMPLETE", "FAIL"]
    reason: str | None
    created_at: Time
    bytes: Annotated[int | None, Field(description="Total size of its files, once it is COMPLETE.")]
    links: Annotated[dict[str, str], Field(description="self, and download once it is COMPLETE.")]
    preferred: NotRequired[
        Annotated[PreferredDocument, Field(description="Where the request gave weights: which trial they picked.")]
    ]


class DeletedDocument(TypedDict):
    """What was deleted: a study or an export."""

    deleted: Annotated[str, Field(description="Its id.")]


class ExportsDocument(TypedDict):
    exports: list[ExportDocument]


class PlotLink(TypedDict):
    name: str
    title: str
    link: str


class PlotsDocument(TypedDict):
    plots: list[PlotLink]


class FieldProblem(TypedDict):
    field: Annotated[str, Field(description="Dotted path in the request; empty: the request as a whole.")]
    message: str


class ProblemDocument(TypedDict):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    problems: NotRequired[list[FieldProblem]]
