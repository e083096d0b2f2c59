"""Types of the server's JSON responses, except result files: jobs, events, exports, plots, problems.

Server and client share these definitions. The series of a plot are declared with the plot, in `service.results.series`.
Keys may be added in later versions, never renamed or removed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from service.schemas.files import Number, PreferredDocument, State, TrialDocument, Values

__all__ = [
    "AnalysisDocument",
    "AuditDocument",
    "AuditEntryDocument",
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
    "LogoutDocument",
    "MeDocument",
    "MergeLossDocument",
    "NewTokenDocument",
    "PlotsDocument",
    "ProblemDocument",
    "ProgressDocument",
    "RayJobDocument",
    "RoleName",
    "ScopeName",
    "SessionDocument",
    "SharingName",
    "StudyDocument",
    "TaskVectorDocument",
    "TeamDocument",
    "TeamsDocument",
    "TokenDocument",
    "TokensDocument",
    "TrainingProgressDocument",
    "TrialsDocument",
    "UserDocument",
    "UsersDocument",
    "list_document",
]

Time = Annotated[str, Field(description="RFC 3339, in UTC.")]


class ProgressDocument(TypedDict):
    """Latest progress of a study, as the driver that works on the study reported it."""

    study: str
    stage: Literal["searching", "refining", "held-out", "benchmarks"]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    max_trials: Annotated[int, Field(description="Planned number of trials, baselines included.")]
    bracket: int | None
    num_brackets: int | None
    rung: int | None
    rungs: Annotated[list[int], Field(description="Samples at each rung, of the objective with the most samples.")]
    best_trial: int | None
    best: Values
    samples_scored: Number
    samples_planned: Number
    samples_used: NotRequired[
        Annotated[int, Field(ge=0, description="Samples that the search has used: scored, or charged for its steps.")]
    ]
    max_samples: NotRequired[
        Annotated[int | None, Field(description="Limit of `samples_used`; null if there is none.")]
    ]
    steps: NotRequired[
        Annotated[int, Field(ge=0, description="Gradient steps and policy updates that the searcher has made.")]
    ]
    steps_planned: NotRequired[
        Annotated[int, Field(ge=0, description="Expected number of `steps`; 0 for a searcher without them.")]
    ]


SharingName = Literal["private", "team", "all"]
RoleName = Literal["viewer", "member", "admin"]
ScopeName = Literal["read", "submit", "admin"]


class RayJobDocument(TypedDict):
    """Ray Job in which the driver of a job runs."""

    submission_id: str
    dashboard_url: Annotated[str | None, Field(description="Page of the Ray Job in the dashboard, if Ray is up.")]


class JobDocument(TypedDict):
    """Job on the server, with the fields that all kinds of jobs have."""

    id: str
    kind: Annotated[str, Field(description='"search": a study; "finetune": a fine-tuning.')]
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What must happen before the job continues.")]
    created_at: Time
    wall_clock_s: Annotated[float, Field(description="Seconds that drivers have worked on the job.")]
    attempt: Annotated[int, Field(description="Number of drivers that have worked on the job so far.")]
    job: RayJobDocument | None
    owner: Annotated[str | None, Field(description="User who created the job; null if there were no accounts.")]
    team: Annotated[str | None, Field(description="Team of the job; null if it is its owner's alone.")]
    sharing: Annotated[SharingName, Field(description="Who may read it besides its owner and administrators.")]
    description: Annotated[str | None, Field(description="What the job is for.")]
    tags: Annotated[list[str], Field(description="Words to find it by.")]
    notes: Annotated[str | None, Field(description="What was learned from it.")]
    priority: Annotated[int, Field(description="Waiting jobs with a larger one start first.")]
    version: Annotated[int, Field(ge=0, description="Number of edits; the `ETag` of the job has it.")]
    links: Annotated[dict[str, str], Field(description="URL paths of the job (self) and of its results, by name.")]


class StudyDocument(JobDocument):
    """Study on the server."""

    algorithm: Annotated[str | None, Field(description="Name of the searcher; the chosen one if the file says auto.")]
    algorithm_reason: Annotated[str | None, Field(description="Reason why the searcher was chosen.")]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    progress: ProgressDocument | None


class ExpertProgressDocument(TypedDict):
    """Progress of the training of an expert."""

    step: Annotated[int, Field(description="Number of updates so far.")]
    steps: Annotated[int, Field(description="Planned number of updates.")]
    loss: Annotated[float, Field(description="Loss of the last update.")]
    seconds: Annotated[float, Field(description="Seconds that the last update took.")]
    values: Annotated[
        dict[str, float], Field(description="Values of the last evaluation by objective; empty before the first.")
    ]


class TrainingProgressDocument(TypedDict):
    """Latest progress of a fine-tuning, as the driver that works on it reported it."""

    experts: Annotated[
        dict[str, ExpertProgressDocument],
        Field(description="Progress of the experts whose training has begun, by alias."),
    ]


class ExpertDocument(TypedDict):
    """Expert of a fine-tuning."""

    method: Annotated[str, Field(description="Name of the optimizer, `method.kind` in the expert's specification.")]
    progress: ExpertProgressDocument | None
    bytes: Annotated[int | None, Field(description="Total size of the expert's files, once the expert is trained.")]
    links: Annotated[dict[str, str], Field(description='The link "download", once the expert is trained.')]


class FinetuneDocument(JobDocument):
    """Fine-tuning on the server, of one expert or of several experts."""

    experts: Annotated[
        dict[str, ExpertDocument],
        Field(description="Experts by alias; the alias of a single expert is the fine-tuning's name."),
    ]


class LossPoint(TypedDict):
    step: Annotated[int, Field(description="Number of the last update in the mean.")]
    loss: Annotated[float, Field(description="Mean loss over the updates since the previous point.")]


class EvaluationPoint(TypedDict):
    step: int
    values: Values


class ExpertCurvesDocument(TypedDict):
    expert: str
    loss: list[LossPoint]
    evaluations: list[EvaluationPoint]


class CurvesDocument(TypedDict):
    """Training curves of a fine-tuning: the losses and evaluations of each expert."""

    experts: list[ExpertCurvesDocument]


Loss = Annotated[float | None, Field(description="Nats per token of the reference answers; null: not finite.")]


class FitDocument(TypedDict):
    """Zero-mean distribution fitted to the elements of a task vector."""

    distribution: Literal["laplace", "gaussian"]
    scale: Annotated[float, Field(description="Scale b of the Laplace distribution, or standard deviation.")]
    distance: Annotated[float, Field(description="Kolmogorov-Smirnov distance between elements and distribution.")]
    log_likelihood: Annotated[float, Field(description="Mean log-likelihood of the elements, in nats.")]
    zeros: Annotated[float, Field(description="Share of elements that are exactly 0.")]
    num_elements: int


class TaskVectorDocument(TypedDict):
    """Distribution of the elements of a task vector (expert minus base).

    The histogram leaves out the elements that are exactly 0. The fitted distributions include them.
    """

    expert: str
    fits: list[FitDocument]
    edges: Annotated[list[float], Field(description="Edges of the histogram's bins, one more than there are bins.")]
    density: Annotated[list[float], Field(description="Share of all elements in each bin, divided by its width.")]


class LandscapeDocument(TypedDict):
    """Losses of merges of two experts over a grid of the two task vectors' coefficients.

    Each loss is the sum of the losses on the tasks of both experts.
    """

    experts: list[str]
    coefficients: list[float]
    losses: Annotated[
        list[list[Loss]],
        Field(description="Sums of losses: a row for each coefficient of the first expert, a column for the second's."),
    ]


class TriedDocument(TypedDict):
    """A coefficient that was tried for a merge method, with the mean loss of the merge."""

    coefficient: float | None
    mean: Loss


class MergeLossDocument(TypedDict):
    """Losses and metrics of merges by one method, at the best coefficient that was tried.

    If there are `values`, the coefficient was chosen on some samples, and the numbers here were measured on others.
    """

    method: str
    num_experts: NotRequired[
        Annotated[
            int,
            Field(description="Number of merged experts; if fewer than all, losses are means over subsets."),
        ]
    ]
    coefficient: Annotated[
        float | None, Field(description="The best coefficient; null if the method has no coefficient.")
    ]
    losses: Annotated[dict[str, Loss], Field(description="Loss on each expert's own tasks, by expert.")]
    mean: Loss
    spread: Annotated[Loss, Field(description="Standard deviation, over all coefficients, of the mean loss.")]
    values: NotRequired[
        Annotated[dict[str, Loss], Field(description="Mean metric of each expert's own tasks, by expert.")]
    ]
    value: NotRequired[Annotated[Loss, Field(description="Mean of `values`.")]]
    tried: NotRequired[list[TriedDocument]]


class FleetAnalysisDocument(TypedDict):
    """Analysis of the experts that one fine-tuning trained: task vectors and losses of merges."""

    name: Annotated[
        str, Field(description="Name of the optimizer, with the options in which it differs from other fleets'.")
    ]
    task_vectors: list[TaskVectorDocument]
    landscape: Annotated[
        LandscapeDocument | None, Field(description="Losses of merges of the first two experts; null with one expert.")
    ]
    merges: Annotated[list[MergeLossDocument], Field(description="Losses of merges, by number of experts and method.")]
    landscapes: NotRequired[
        Annotated[list[LandscapeDocument], Field(description="Losses of merges of up to four pairs of experts.")]
    ]
    accumulated: NotRequired[
        Annotated[TaskVectorDocument, Field(description="The sum of the task vectors of all experts.")]
    ]


class MixedDocument(TypedDict):
    """Losses of merges of two experts that come from two trainings of the same experts, averaged over pairs."""

    fleets: Annotated[list[str], Field(description="Names of the two trainings.")]
    merges: list[MergeLossDocument]


class AnalysisDocument(TypedDict):
    """Statistics of trained experts and losses of their merges, for one or several trainings of the same experts."""

    samples: Annotated[
        int,
        Field(description="Samples of each evaluation task that coefficients are chosen by; as many are reported."),
    ]
    fleets: list[FleetAnalysisDocument]
    mixed: NotRequired[
        Annotated[
            list[MixedDocument],
            Field(description="Merges of experts of the first training and of another; on the command line only."),
        ]
    ]


class TrialsDocument(TypedDict):
    trials: list[TrialDocument]
    next: Annotated[str | None, Field(description="Link to the next page; null on the last one.")]


class EventDocument(TypedDict):
    """Event of a job. In a stream of server-sent events, the field `id` has the event's id, and `event` its kind."""

    id: int
    time: Time
    kind: str
    payload: dict[str, Any]


class EventsDocument(TypedDict):
    events: list[EventDocument]


class EndDocument(TypedDict):
    """Last document of an event stream: how the job ended."""

    state: State
    reason: str | None


class ExportDocument(TypedDict):
    """Export, a merged model that the server writes for download, with its state."""

    id: str
    study: str
    trial: Number
    dtype: str
    state: Literal["WAITING", "RUNNING", "COMPLETE", "FAIL"]
    reason: str | None
    created_at: Time
    bytes: Annotated[int | None, Field(description="Total size of the model's files, once the export is COMPLETE.")]
    links: Annotated[dict[str, str], Field(description='The link "self", and "download" once the export is COMPLETE.')]
    preferred: NotRequired[
        Annotated[PreferredDocument, Field(description="Trial that the weights in the request picked.")]
    ]


class DeletedDocument(TypedDict):
    """Response to a request that deleted a job or an export."""

    deleted: Annotated[str, Field(description="Id of the deleted job or export.")]


class ExportsDocument(TypedDict):
    exports: list[ExportDocument]


class PlotLink(TypedDict):
    name: str
    title: str
    link: str


class PlotsDocument(TypedDict):
    plots: list[PlotLink]


class FieldProblem(TypedDict):
    field: Annotated[str, Field(description="Dotted path in the request; empty for the request as a whole.")]
    message: str


class ProblemDocument(TypedDict):
    """Problem details of a refused or failed request (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    problems: NotRequired[list[FieldProblem]]


class UserDocument(TypedDict):
    """User of the server."""

    name: str
    is_admin: Annotated[bool, Field(description="Whether the user administers the server.")]
    is_disabled: Annotated[bool, Field(description="Whether the tokens of the user are refused.")]
    created_at: Time
    teams: Annotated[dict[str, RoleName], Field(description="Role of the user in each team.")]


class UsersDocument(TypedDict):
    users: list[UserDocument]


class TeamDocument(TypedDict):
    """Team of users who share jobs."""

    name: str
    created_at: Time
    members: Annotated[dict[str, RoleName], Field(description="Role of each member.")]


class TeamsDocument(TypedDict):
    teams: list[TeamDocument]


class TokenDocument(TypedDict):
    """API token, without its secret."""

    id: str
    user: str
    name: str
    prefix: Annotated[str, Field(description="Beginning of the token, by which its user recognizes it.")]
    scope: ScopeName
    created_at: Time
    expires_at: Annotated[Time | None, Field(description="Null: never.")]
    last_used_at: Annotated[Time | None, Field(description="Null: not yet. It may be 10 s behind.")]
    revoked_at: Time | None


class NewTokenDocument(TokenDocument):
    """API token that was just created. No later response has its secret."""

    token: Annotated[str, Field(description="The whole token; it is not stored and cannot be read again.")]


class TokensDocument(TypedDict):
    tokens: list[TokenDocument]


class MeDocument(TypedDict):
    """Sender of the request."""

    user: Annotated[UserDocument | None, Field(description="Null: the server has no accounts.")]
    token: Annotated[TokenDocument | None, Field(description="Null: the sender has a session, or no account.")]


class SessionDocument(TypedDict):
    """User who sends the request, and the session of the browser."""

    user: Annotated[UserDocument | None, Field(description="Null: the server has no accounts.")]
    scope: Annotated[ScopeName | None, Field(description="What the session or the token may be used for.")]
    expires_at: Annotated[Time | None, Field(description="End of the session; null: the sender has no session.")]
    csrf_token: Annotated[
        str | None,
        Field(description="Value of the header X-CSRF-Token of requests that change something; null: no session."),
    ]


class LogoutDocument(TypedDict):
    """Answer to a logout."""

    was_logged_in: Annotated[bool, Field(description="Whether the request ended a session.")]


class AuditEntryDocument(TypedDict):
    """Entry of the audit log."""

    id: int
    time: Time
    user: Annotated[str | None, Field(description="Null: a command on the server's machine, or no accounts.")]
    origin: Annotated[str, Field(description="Address of the sender, or the machine of a command.")]
    token: Annotated[str | None, Field(description="Beginning of the token.")]
    action: Annotated[str, Field(description='Such as "job.cancel".')]
    target: Annotated[str, Field(description='Such as "job 5f0c...".')]
    before: dict[str, Any] | None
    after: dict[str, Any] | None


class AuditDocument(TypedDict):
    """Part of the audit log, oldest entries first."""

    entries: list[AuditEntryDocument]


def list_document(collection: str, document: type) -> type:
    """Make the TypedDict of the response that lists all jobs of one kind.

    The response has one key, `collection`, such as "studies", with a list of `document`, the TypedDict of a job.
    """
    listed: type = TypedDict(f"{collection.capitalize()}Document", {collection: list[document]})  # type: ignore
    return listed
