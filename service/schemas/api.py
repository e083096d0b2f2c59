"""The server's JSON responses, except the documents of a run: studies, fine-tunings, events, exports, plots, problems.

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
    "AnalysisDocument",
    "CurvesDocument",
    "DeletedDocument",
    "EndDocument",
    "EventDocument",
    "EventsDocument",
    "ExpertCurvesDocument",
    "ExpertDocument",
    "ExpertProgressDocument",
    "ExportDocument",
    "ExportsDocument",
    "FieldProblem",
    "FinetuneDocument",
    "FitDocument",
    "FleetAnalysisDocument",
    "JobDocument",
    "LandscapeDocument",
    "MergeLossDocument",
    "PlotsDocument",
    "ProblemDocument",
    "ProgressDocument",
    "RayJobDocument",
    "StudyDocument",
    "TaskVectorDocument",
    "TrainingProgressDocument",
    "TrialsDocument",
    "list_document",
]

Time = Annotated[str, Field(description="RFC 3339, in UTC.")]


class ProgressDocument(TypedDict):
    """The progress of a study's driver; each report replaces the one before."""

    study: str
    stage: Literal["searching", "held-out"]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    max_trials: Annotated[int, Field(description="Planned number of trials, baselines included.")]
    bracket: int | None
    num_brackets: int | None
    rung: int | None
    rungs: Annotated[list[int], Field(description="Samples at each rung, of the objective that has most.")]
    best_trial: int | None
    best: Values
    samples_scored: Number
    samples_planned: Number


class RayJobDocument(TypedDict):
    """The Ray Job that drives a job."""

    submission_id: str
    dashboard_url: Annotated[str | None, Field(description="Its page in the Ray dashboard, while that is up.")]


class JobDocument(TypedDict):
    """A job on the server: what jobs of every kind have."""

    id: str
    kind: Annotated[str, Field(description='"search": a study; "finetune": a fine-tuning.')]
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What must happen before it continues.")]
    created_at: Time
    wall_clock_s: Annotated[float, Field(description="Seconds that drivers have worked on it.")]
    attempt: Annotated[int, Field(description="Drivers that have worked on it so far.")]
    job: RayJobDocument | None
    links: Annotated[dict[str, str], Field(description="Addresses of the job (self) and of what belongs to it.")]


class StudyDocument(JobDocument):
    """A study on the server."""

    algorithm: Annotated[str | None, Field(description="The searcher, also where the study file says auto.")]
    algorithm_reason: Annotated[str | None, Field(description="Why it was chosen.")]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    progress: ProgressDocument | None


class ExpertProgressDocument(TypedDict):
    """Progress of the training of an expert."""

    step: Annotated[int, Field(description="Updates so far.")]
    steps: Annotated[int, Field(description="All updates.")]
    loss: Annotated[float, Field(description="Of the last update.")]
    seconds: Annotated[float, Field(description="Of the last update.")]
    values: Annotated[dict[str, float], Field(description="By objective, of the last evaluation; empty before it.")]


class TrainingProgressDocument(TypedDict):
    """The progress of a fine-tuning's driver; each report replaces the one before."""

    experts: Annotated[dict[str, ExpertProgressDocument], Field(description="Of those that were begun, by alias.")]


class ExpertDocument(TypedDict):
    """An expert of a fine-tuning."""

    method: Annotated[str, Field(description="The optimizer: `method.kind` of its specification.")]
    progress: ExpertProgressDocument | None
    bytes: Annotated[int | None, Field(description="Total size of its files, once it is trained.")]
    links: Annotated[dict[str, str], Field(description="download, once it is trained.")]


class FinetuneDocument(JobDocument):
    """A fine-tuning on the server: of one expert, or of a fleet."""

    experts: Annotated[dict[str, ExpertDocument], Field(description="By alias; one alone has the fine-tuning's name.")]


class LossPoint(TypedDict):
    step: Annotated[int, Field(description="The last update of the mean.")]
    loss: Annotated[float, Field(description="Mean over the updates since the point before.")]


class EvaluationPoint(TypedDict):
    step: int
    values: Values


class ExpertCurvesDocument(TypedDict):
    expert: str
    loss: list[LossPoint]
    evaluations: list[EvaluationPoint]


class CurvesDocument(TypedDict):
    """The losses and evaluations of a fine-tuning, by expert."""

    experts: list[ExpertCurvesDocument]


Loss = Annotated[float | None, Field(description="Nats per token of the reference answers; null: not finite.")]


class FitDocument(TypedDict):
    """A distribution of mean 0 fitted to the elements of a task vector."""

    distribution: Literal["laplace", "gaussian"]
    scale: Annotated[float, Field(description="Laplace's b, or the standard deviation.")]
    distance: Annotated[float, Field(description="Kolmogorov and Smirnov's.")]
    log_likelihood: Annotated[float, Field(description="Mean over the elements, in nats.")]
    zeros: Annotated[float, Field(description="Share of elements that are exactly 0.")]
    num_elements: int


class TaskVectorDocument(TypedDict):
    """A histogram of an expert minus its base, without the elements that are exactly 0, and what is fitted to all."""

    expert: str
    fits: list[FitDocument]
    edges: Annotated[list[float], Field(description="Of the bins, one more than there are bins.")]
    density: Annotated[list[float], Field(description="Share of all elements, by the width of a bin.")]


class LandscapeDocument(TypedDict):
    """The sum of two experts' losses by the coefficients of their task vectors."""

    experts: list[str]
    coefficients: list[float]
    losses: Annotated[list[list[Loss]], Field(description="A row for each coefficient of the first expert.")]


class MergeLossDocument(TypedDict):
    """Losses of merges of `num_experts` experts by one method, at the best of the coefficients that were tried."""

    method: str
    num_experts: NotRequired[
        Annotated[int, Field(description="Merged; fewer than all: the mean over sets of so many.")]
    ]
    coefficient: Annotated[float | None, Field(description="null: the method has none.")]
    losses: Annotated[dict[str, Loss], Field(description="By expert, on its own tasks.")]
    mean: Loss
    spread: Annotated[Loss, Field(description="Standard deviation of the mean over all coefficients.")]


class FleetAnalysisDocument(TypedDict):
    """The experts of one training."""

    name: Annotated[str, Field(description="The optimizer, with what differs from others of the same.")]
    task_vectors: list[TaskVectorDocument]
    landscape: Annotated[LandscapeDocument | None, Field(description="Of the first two experts; null: there is one.")]
    merges: Annotated[list[MergeLossDocument], Field(description="By number of experts and method.")]


class AnalysisDocument(TypedDict):
    """Statistics of trained experts and losses of their merges, for one or several trainings of the same experts."""

    samples: Annotated[int, Field(description="Of each evaluation task; their reference answers gave the losses.")]
    fleets: list[FleetAnalysisDocument]


class TrialsDocument(TypedDict):
    trials: list[TrialDocument]
    next: Annotated[str | None, Field(description="Link to the next page; null on the last one.")]


class EventDocument(TypedDict):
    """An event of a study or fine-tuning. As a server-sent event its id and kind are the frame's `id` and `event`."""

    id: int
    time: Time
    kind: str
    payload: dict[str, Any]


class EventsDocument(TypedDict):
    events: list[EventDocument]


class EndDocument(TypedDict):
    """The last frame of a stream of events: how the study or fine-tuning ended."""

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
    """What was deleted: a study, a fine-tuning or an export."""

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


def list_document(collection: str, document: type) -> type:
    """The TypedDict of the list of all jobs of one kind: `{collection: [document, ...]}`."""
    listed: type = TypedDict(f"{collection.capitalize()}Document", {collection: list[document]})  # type: ignore
    return listed
