"""Types of the server's JSON responses, except result files: jobs, events, exports, plots, problems.

Server and client share these definitions. The series of a plot are declared with the plot, in `service.results.series`.
Keys may be added in later versions, never renamed or removed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from service.schemas.files import (
    EstimateDocument,
    Number,
    ObjectiveDocument,
    PreferredDocument,
    State,
    TrialDocument,
    Values,
    VerificationDocument,
)

__all__ = [
    "AnalysisDocument",
    "AuditDocument",
    "AuditEntryDocument",
    "BegunStudyDocument",
    "BytesUsedDocument",
    "ChatCompletionDocument",
    "CheckDocument",
    "CheckedPlanDocument",
    "ClusterDocument",
    "CurvesDocument",
    "DeletedDocument",
    "DeliveriesDocument",
    "DeliveryDocument",
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
    "GpuDocument",
    "JobDocument",
    "JobEventDocument",
    "JobEventsDocument",
    "JobProgressDocument",
    "JobReferenceDocument",
    "LandscapeDocument",
    "LogoutDocument",
    "MailDocument",
    "MeDocument",
    "MergeLossDocument",
    "ModelDocument",
    "ModelListDocument",
    "NewTokenDocument",
    "NewWebhookDocument",
    "NodeDocument",
    "NoticeName",
    "NotificationDocument",
    "PlotsDocument",
    "ProblemDocument",
    "ProgressDocument",
    "ProvenanceDocument",
    "QueueDocument",
    "QueueEntryDocument",
    "QueuePlaceDocument",
    "QueuedJobDocument",
    "RayJobDocument",
    "RoleName",
    "SampleCountsDocument",
    "SampleDocument",
    "ScopeName",
    "ScoredSampleDocument",
    "ServedProgressDocument",
    "ServedStudyDocument",
    "ServedTrialDocument",
    "SessionDocument",
    "SharingName",
    "ShownTrialDocument",
    "SourceModelDocument",
    "SourceModelsDocument",
    "StreamStartDocument",
    "StudyDocument",
    "TaskVectorDocument",
    "TeamDocument",
    "TeamLimitsDocument",
    "TeamUsageDocument",
    "TeamsDocument",
    "TextCompletionDocument",
    "TokenDocument",
    "TokensDocument",
    "TrainingProgressDocument",
    "TrialColumnsDocument",
    "TrialSamplesDocument",
    "TrialsDocument",
    "UserDocument",
    "UsersDocument",
    "WebhookDocument",
    "WebhooksDocument",
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
    best_ci95: NotRequired[
        Annotated[
            dict[str, list[float]],
            Field(description="95 % intervals of `best`, without those of exact values, such as numbers of layers."),
        ]
    ]
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
        Annotated[
            int,
            Field(
                ge=0,
                description="Expected number of `steps`; 0 for a searcher without them. Those of a refinement are "
                "counted once the search has ended.",
            ),
        ]
    ]
    time_left_s: NotRequired[
        Annotated[float | None, Field(description="Estimated seconds until the study ends; null: not known yet.")]
    ]


SharingName = Literal["private", "team", "all"]
RoleName = Literal["viewer", "member", "admin"]
ScopeName = Literal["read", "submit", "admin"]
RightName = Literal["use", "change"]


class RayJobDocument(TypedDict):
    """Ray Job (of Ray's job submission) in which the driver of a job runs."""

    submission_id: str
    dashboard_url: Annotated[
        str | None,
        Field(
            description="Path of the Ray Job's page in Ray's dashboard on this server; null for a sender who may not "
            "read the dashboard, and while Ray is down."
        ),
    ]


class QueuePlaceDocument(TypedDict):
    """Position of a waiting job in the server's queue of jobs."""

    position: Annotated[int, Field(ge=1, description="1: the job that is to start first.")]
    length: Annotated[int, Field(ge=1, description="Number of jobs that wait.")]
    estimated_start: Annotated[
        Time | None, Field(description="From the progress of running jobs; null where that does not tell.")
    ]


class JobDocument(TypedDict):
    """Job on the server, with the fields that all kinds of jobs have."""

    id: str
    kind: Annotated[str, Field(description='"search": a study; "finetune": a fine-tuning; "serving": a served study.')]
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What must happen before the job continues.")]
    queue: Annotated[QueuePlaceDocument | None, Field(description="Null: the job does not wait for a place.")]
    created_at: Time
    wall_clock_s: Annotated[float, Field(description="Seconds that drivers have worked on the job.")]
    attempt: Annotated[int, Field(description="Number of drivers that have worked on the job so far.")]
    heartbeat_at: Annotated[
        Time | None,
        Field(description="Last sign of life of a driver, which sends one every 5 s; null before the first."),
    ]
    job: RayJobDocument | None
    owner: Annotated[str | None, Field(description="User who created the job; null if there were no accounts.")]
    team: Annotated[str | None, Field(description="Team of the job; null if it is its owner's alone.")]
    sharing: Annotated[SharingName, Field(description="Who may read it besides its owner and administrators.")]
    description: Annotated[str | None, Field(description="What the job is for.")]
    tags: Annotated[list[str], Field(description="Words to find it by.")]
    notes: Annotated[str | None, Field(description="What was learned from it.")]
    priority: Annotated[int, Field(description="Waiting jobs with a larger one start first.")]
    version: Annotated[int, Field(ge=0, description="Number of edits; the `ETag` of the job has it.")]
    rights: Annotated[
        list[RightName],
        Field(description='What the sender may do: "use" (export and serve its models), "change" (everything else).'),
    ]
    last_event_id: NotRequired[
        Annotated[int, Field(ge=0, description="Id of its last event, for `after` of its events; absent in lists.")]
    ]
    links: Annotated[dict[str, str], Field(description="URL paths of the job (self) and of its results, by name.")]


class StudyDocument(JobDocument):
    """Study on the server: the job's fields, the chosen searcher, the trials by state, and the progress."""

    algorithm: Annotated[str | None, Field(description="Name of the searcher; the chosen one if the file says auto.")]
    algorithm_reason: Annotated[str | None, Field(description="Reason why the searcher was chosen.")]
    objectives: list[ObjectiveDocument]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    progress: ProgressDocument | None


LinearizedValues = Annotated[
    dict[str, float],
    Field(
        description="Values of the linearized model that the method tangent trains; `values` are those of the exported "
        "weights."
    ),
]

LossPlace = Annotated[
    Literal["weights", "offset"],
    Field(
        description="Where `loss` is measured: at the weights, or at the offset to which the method mergopt moves them."
    ),
]


class ExpertProgressDocument(TypedDict):
    """Progress of the training of an expert."""

    step: Annotated[int, Field(description="Number of updates so far.")]
    steps: Annotated[int, Field(description="Planned number of updates.")]
    loss: Annotated[float, Field(description="Loss of the last update.")]
    loss_at: NotRequired[LossPlace]
    weights_loss: NotRequired[
        Annotated[float, Field(description="Last loss at the weights, of every tenth update, if `loss_at` is offset.")]
    ]
    seconds: Annotated[float, Field(description="Seconds that the last update took.")]
    values: Annotated[
        dict[str, float], Field(description="Values of the last evaluation by objective; empty before the first.")
    ]
    linearized_values: NotRequired[LinearizedValues]


class TrainingProgressDocument(TypedDict):
    """Latest progress of a fine-tuning, as the driver that works on it reported it."""

    experts: Annotated[
        dict[str, ExpertProgressDocument],
        Field(description="Progress of the experts whose training has begun, by alias."),
    ]


class ExpertDocument(TypedDict):
    """Expert of a fine-tuning: how it is trained, how far the training is, and a link to the trained model."""

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


class ServedProgressDocument(TypedDict):
    """Latest progress of a served study, as its driver reported it."""

    engine: Annotated[
        Literal["scorer", "own"] | None,
        Field(description='Engine that completes prompts: "scorer" is one of searches; null while there is none.'),
    ]
    requests: Annotated[int, Field(description="Number of requests for completions so far.")]
    ends_in_s: Annotated[float, Field(description="Seconds after which serving ends without a further request.")]


class ServedStudyDocument(JobDocument):
    """Served study: its merges complete prompts at the link `openai`."""

    study: Annotated[str, Field(description="The `id` of the study.")]
    progress: ServedProgressDocument | None


class ServedTrialDocument(ServedStudyDocument):
    """Served study, and the name (`model`) of the served trial in requests."""

    model: str


class ModelDocument(TypedDict):
    """Trial of a served study as a model."""

    id: Annotated[str, Field(description="Name of the model in requests: the number of the trial.")]
    object: Literal["model"]
    created: int
    owned_by: str
    label: Annotated[str, Field(description="Label of the trial; that of a baseline is accepted as a name, too.")]


class ModelListDocument(TypedDict):
    """List of the trials that a served study offers as models, in the form of OpenAI's API."""

    object: Literal["list"]
    data: list[ModelDocument]


class UsageDocument(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


FinishReason = Annotated[Literal["stop", "length"], Field(description="Why the completion ended.")]
Fingerprint = Annotated[str, Field(description="Digest of the recipe that the engine held.")]


class TextChoiceDocument(TypedDict):
    index: int
    text: str
    logprobs: None
    finish_reason: FinishReason


class TextCompletionDocument(TypedDict):
    """Completion of a text, in the form of OpenAI's API."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[TextChoiceDocument]
    usage: UsageDocument


class ChatMessageDocument(TypedDict):
    role: Literal["assistant"]
    content: str


class ChatChoiceDocument(TypedDict):
    index: int
    message: ChatMessageDocument
    logprobs: None
    finish_reason: FinishReason


class ChatCompletionDocument(TypedDict):
    """Answer to the messages of a chat, in the form of OpenAI's API."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: Fingerprint
    choices: list[ChatChoiceDocument]
    usage: UsageDocument


class LossPoint(TypedDict):
    step: Annotated[int, Field(description="Number of the last update in the mean.")]
    loss: Annotated[float, Field(description="Mean loss over the updates since the previous point.")]


class EvaluationPoint(TypedDict):
    step: int
    values: Values
    linearized_values: NotRequired[LinearizedValues]


class ExpertCurvesDocument(TypedDict):
    expert: str
    loss: list[LossPoint]
    loss_at: LossPlace
    weights_loss: Annotated[
        list[LossPoint], Field(description="Losses at the weights, of every tenth update, if `loss_at` is offset.")
    ]
    offset_loss: Annotated[
        list[LossPoint], Field(description="Losses at the offset that raises the loss, of the methods sam and asam.")
    ]
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
    """A merge coefficient that was tried for a merge method, and the mean loss of the merge with it."""

    coefficient: float | None
    mean: Loss


class MergeLossDocument(TypedDict):
    """Losses and metrics of merges by one method, at the best coefficient that was tried.

    If there are `values`, they were measured on other samples than those on which the coefficient was chosen.
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
    """Losses of merges of two experts that come from different trainings, averaged over the pairs of experts.

    Both trainings train the same experts, for example with two optimizers.
    """

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


class ProvenanceDocument(TypedDict):
    """Provenance of a trial's samples: the engines that scored them, the weights in the engines, the verification.

    The samples belong to the trial's recipe; they may have been scored for another trial with the same recipe.
    """

    fingerprints: Annotated[list[str], Field(description="Fingerprints of the source weights that the engines held.")]
    engines: Annotated[list[str], Field(description="Program, dtype, and the size and place of the source weights.")]
    replicas: Annotated[dict[str, int], Field(description="Number of scored samples by replica.")]
    finished_at: Annotated[Time | None, Field(description="When the last samples were stored; null without samples.")]
    verification: Annotated[
        VerificationDocument | None,
        Field(description="Samples that plain transformers scored again; null: the trial was not chosen for this."),
    ]


class ShownTrialDocument(TrialDocument):
    """Trial with the provenance of its samples: the engines that scored them, and their verification."""

    provenance: ProvenanceDocument


class TrialsDocument(TypedDict):
    """One page of the list of a study's trials."""

    trials: list[TrialDocument]
    total: Annotated[int, Field(description="Number of trials that satisfy the conditions, on all pages.")]
    next: Annotated[str | None, Field(description="Link to the next page; null on the last one.")]


class PredictionDocument(TypedDict):
    """A class that a merge predicts for an image, and its probability."""

    name: str
    probability: float


class ScoredSampleDocument(TypedDict):
    """Response of a trial's merge to one sample, and the value of the metric for it."""

    value: Annotated[float, Field(description="The metric on this sample.")]
    is_right: Annotated[
        bool | None,
        Field(
            description="Whether the value is the best of the metric's range; null if the metric knows no right "
            "answers (`entropy`)."
        ),
    ]
    response: Annotated[
        str | None, Field(description="Answer of the merge, or log-probabilities of options as JSON; null if removed.")
    ]
    is_truncated: Annotated[bool, Field(description="Whether the prompt was cut to the engine's `max_model_len`.")]
    predictions: Annotated[
        list[PredictionDocument] | None,
        Field(description="The likeliest classes of an image, the likeliest first; null for other samples."),
    ]


class SampleDocument(TypedDict):
    """A sample with the results of one trial, or of two trials side by side."""

    position: Annotated[int, Field(description="Index of the sample in the order of scoring, from 0.")]
    document: Annotated[str, Field(description="Index of the sample in the task's data.")]
    prompt: Annotated[str | None, Field(description="Prompt with few-shot examples, before any chat template.")]
    reference: Annotated[str | None, Field(description="Right answer; null if the task states none as text.")]
    picture: Annotated[
        str | None,
        Field(description="Link to a small picture of an image; null if none is stored, and for other samples."),
    ]
    a: ScoredSampleDocument
    b: Annotated[ScoredSampleDocument | None, Field(description="Of the trial `against`.")]


class SampleCountsDocument(TypedDict):
    """Numbers of samples that two trials have both scored, by whether each trial is right.

    A trial is right on a sample if it has the best value of the metric's range. `samples` counts all samples. `a_only`
    counts samples on which only the first trial is right, and `b_only` counts samples on which only the second trial is
    right.
    """

    samples: int
    both_right: int
    a_only: int
    b_only: int
    both_wrong: int


class TrialSamplesDocument(TypedDict):
    """One page of the samples of one trial, or of two trials side by side."""

    trial: int
    against: int | None
    objective: str
    split: str
    has_pictures: Annotated[bool, Field(description="Whether samples are images, which have pictures.")]
    counts: Annotated[
        SampleCountsDocument | None,
        Field(description="Null without `against`, and if the metric knows no right answers (`entropy`)."),
    ]
    difference: Annotated[
        EstimateDocument | None,
        Field(description="Mean of the trial's value minus that of `against`, paired by sample, with its interval."),
    ]
    total: Annotated[int, Field(description="Number of samples that `only` keeps, on all pages.")]
    samples: list[SampleDocument]
    missing: Annotated[
        list[str], Field(description="Reasons why texts or pictures are null; empty if none is missing.")
    ]
    next: Annotated[str | None, Field(description="Link to the next page; null on the last one.")]


class HeldOutDifferenceDocument(TypedDict):
    trial: Number
    differences: Annotated[
        dict[str, EstimateDocument],
        Field(description='This trial minus `reference` on the same samples, by objective and as "mean".'),
    ]


class HeldOutDifferencesDocument(TypedDict):
    """Held-out values of each trial minus the held-out values of the trial `reference`."""

    reference: Number
    rows: list[HeldOutDifferenceDocument]


class TrialColumnsDocument(TypedDict):
    """Trials of a study as columns."""

    columns: Annotated[
        dict[str, list[Any]], Field(description="Column by name; all have a value, or null, for each trial.")
    ]
    event: Annotated[int, Field(description="Id of the study's last event, for `since` of the next request.")]
    is_whole: Annotated[
        bool,
        Field(
            description="Whether these are all trials, which replace those of earlier responses: without `since`, and "
            "if any trial may have changed, as after another driver has taken over."
        ),
    ]


class EventDocument(TypedDict):
    """Event of a job. In a stream of server-sent events, the fields `id` and `event` are the event's id and kind."""

    id: int
    time: Time
    kind: str
    payload: dict[str, Any]


class EventsDocument(TypedDict):
    events: list[EventDocument]
    total: Annotated[int, Field(ge=0, description="Number of events after `after`, of the kinds that are asked for.")]


class JobEventDocument(EventDocument):
    """Event with the job that it is about."""

    job: Annotated[str, Field(description="Id of the job.")]
    job_kind: Annotated[str, Field(description='Kind of the job, such as "search".')]
    name: Annotated[str, Field(description="Name of the job.")]


class JobEventsDocument(TypedDict):
    events: list[JobEventDocument]


class StreamStartDocument(TypedDict):
    """First document of the stream of all jobs."""

    after: Annotated[int, Field(description="Only events with larger ids follow.")]


class JobProgressDocument(TypedDict):
    """Latest progress of a job, in the stream of all jobs."""

    job: str
    job_kind: str
    progress: Annotated[dict[str, Any], Field(description="As the field `progress` of the job's document.")]


class JobReferenceDocument(TypedDict):
    """Job that a stream's reader may read from now on (`added`) or may no longer read (`removed`), or a deleted job."""

    job: str


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


class HoursDocument(TypedDict):
    least: float
    most: float


class CheckedPlanDocument(TypedDict):
    """Expected costs of a study."""

    trials: Annotated[dict[str, int], Field(description="Numbers of baselines (`extras`) and of proposed trials.")]
    rungs: Annotated[list[dict[str, int]], Field(description="Samples of each objective at each rung.")]
    samples: Annotated[dict[str, Any], Field(description="Expected samples of each stage.")]
    hours: Annotated[HoursDocument, Field(description="Rough running time.")]
    memory_bytes: Annotated[dict[str, int], Field(description="Bytes needed for each use, and available if known.")]
    disk_bytes: Annotated[dict[str, int], Field(description="Bytes of an export and of downloads, and available.")]
    absent_models: Annotated[list[str], Field(description="Models whose weights must be downloaded first.")]
    judgments: Annotated[int, Field(description="Requests to judges of benchmarks.")]
    text: Annotated[str, Field(description="The plan as `mergesearch run --check` prints it.")]


class CheckDocument(TypedDict):
    """Result of the check of a study file."""

    is_valid: bool
    problems: list[FieldProblem]
    plan: Annotated[CheckedPlanDocument | None, Field(description="With `level=full`, if there is no problem.")]


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


class SourceModelDocument(TypedDict):
    """Model on the machine where jobs read models: a checkpoint, or a LoRA adapter."""

    path: Annotated[str, Field(description="Its directory.")]
    name: Annotated[str, Field(description="What a study file says: ID@COMMIT in the hub's cache, else the directory.")]
    architecture: Annotated[
        str | None, Field(description="Class of the model, or its type; null for an adapter or if it is not stated.")
    ]
    bytes: Annotated[int, Field(description="Bytes of its safetensors files.")]
    is_adapter: Annotated[bool, Field(description="Whether it is a LoRA adapter.")]
    base: Annotated[str | None, Field(description="Base model that an adapter states; null for others.")]


class SourceModelsDocument(TypedDict):
    models: Annotated[list[SourceModelDocument], Field(description="Sorted by path.")]
    is_complete: Annotated[bool, Field(description="Whether all models are listed; false if the search ended early.")]
    directories: Annotated[list[str], Field(description="Directories that were searched.")]


class BegunStudyDocument(TypedDict):
    """Beginning of a study file, made from a mergekit configuration."""

    study: Annotated[dict[str, Any], Field(description="Content of the study file, whose objectives are empty.")]
    warnings: Annotated[list[str], Field(description="Settings of the configuration that have no effect.")]


class BytesUsedDocument(TypedDict):
    """Number of used bytes, and total number of bytes."""

    used: Annotated[int, Field(ge=0)]
    total: Annotated[int, Field(ge=0, description="0 if unknown.")]


class GpuDocument(TypedDict):
    """GPU of a node."""

    name: str
    percent: Annotated[float | None, Field(description="How busy the GPU is; null if unknown.")]
    memory: BytesUsedDocument


class NodeDocument(TypedDict):
    """A node of the Ray cluster, and the use of its machine's resources."""

    id: str
    host: str
    address: str
    is_head: bool
    is_alive: Annotated[bool, Field(description="Whether Ray can use the node.")]
    num_cpus: int | None
    cpu_percent: Annotated[float | None, Field(description="How busy the processors are; null if unknown.")]
    memory: BytesUsedDocument
    disk: BytesUsedDocument
    gpus: list[GpuDocument]


class DatabaseDocument(TypedDict):
    """Database of the server."""

    kind: Annotated[str, Field(description="sqlite or postgresql.")]
    revision: Annotated[str, Field(description="Revision of the database's schema.")]


class ClusterDocument(TypedDict):
    """State of the cluster and the server."""

    not_ready: Annotated[str | None, Field(description="Why no job can continue; null if jobs can.")]
    nodes: Annotated[list[NodeDocument], Field(description="Empty while Ray's dashboard does not answer.")]
    nodes_problem: Annotated[str | None, Field(description="Why the nodes are not known; null if they are.")]
    disk: Annotated[BytesUsedDocument, Field(description="The disk with the server's data directory.")]
    database: DatabaseDocument
    versions: Annotated[dict[str, str], Field(description="Versions of the installed parts, by package.")]


class FieldProblem(TypedDict):
    field: Annotated[str, Field(description="Dotted path in the request; empty for the request as a whole.")]
    message: str


class OpenAiErrorDocument(TypedDict):
    """Error in the form of OpenAI's API."""

    message: str
    type: str
    param: Annotated[str | None, Field(description="Field of the request that is wrong.")]
    code: Annotated[str | None, Field(description="Kind of error, for programs.")]


class ProblemDocument(TypedDict):
    """Problem details of a refused or failed request (RFC 9457)."""

    type: str
    title: str
    status: int
    detail: str
    problems: NotRequired[list[FieldProblem]]
    error: NotRequired[Annotated[OpenAiErrorDocument, Field(description="Only on routes like those of OpenAI's API.")]]


class UserDocument(TypedDict):
    """User of the server, with the user's rights and teams."""

    name: str
    is_admin: Annotated[bool, Field(description="Whether the user administers the server.")]
    is_disabled: Annotated[bool, Field(description="Whether the tokens of the user are refused.")]
    created_at: Time
    teams: Annotated[dict[str, RoleName], Field(description="Role of the user in each team.")]


class UsersDocument(TypedDict):
    users: list[UserDocument]


Quota = Annotated[int | None, Field(description="Null: no limit.")]


class TeamLimitsDocument(TypedDict):
    """Weight of a team, which determines its share of the running jobs, and its quotas; a quota of null is no limit."""

    weight: Annotated[float, Field(gt=0, description="Share, relative to the weights of other teams.")]
    max_running: Annotated[Quota, Field(description="Jobs that run at the same time.")]
    max_replicas: Annotated[Quota, Field(description="Replicas and workers of running jobs together.")]
    max_served: Annotated[Quota, Field(description="Studies that are served at the same time; 4 by default.")]
    gpu_hours: Annotated[float | None, Field(description="GPU-hours in a calendar month (UTC).")]
    artifact_bytes: Annotated[Quota, Field(description="Bytes of experts and policies.")]
    export_bytes: Annotated[Quota, Field(description="Bytes of exported models.")]
    requests_per_minute: Annotated[Quota, Field(description="Requests of the members in a minute, and at once.")]


class TeamDocument(TypedDict):
    """Team of users who share jobs, with the role of each member."""

    name: str
    created_at: Time
    members: Annotated[dict[str, RoleName], Field(description="Role of each member.")]
    limits: TeamLimitsDocument


class TeamUsageDocument(TypedDict):
    """Amount of each quota that a team's jobs use, with the limits of the team."""

    team: str
    limits: TeamLimitsDocument
    running: Annotated[int, Field(ge=0, description="Jobs that run.")]
    waiting: Annotated[int, Field(ge=0, description="Jobs that wait for a place.")]
    replicas: Annotated[int, Field(ge=0, description="Replicas and workers of the running jobs.")]
    served: Annotated[int, Field(ge=0, description="Studies that are served; paused ones count.")]
    gpu_hours: Annotated[float, Field(ge=0, description="GPU-hours of this calendar month (UTC).")]
    recent_gpu_hours: Annotated[
        float, Field(ge=0, description="GPU-hours that count for the fair share: half as much after seven days.")
    ]
    artifact_bytes: Annotated[int, Field(ge=0, description="Stored, or expected of unfinished fine-tunings.")]
    export_bytes: Annotated[int, Field(ge=0, description="Written, or expected of exports that wait.")]


class QueuedJobDocument(TypedDict):
    """Job in the queue."""

    id: str
    kind: str
    name: str
    state: State
    owner: str | None
    team: str | None
    priority: int
    created_at: Time
    link: Annotated[str, Field(description="URL path of the job.")]


class QueueEntryDocument(TypedDict):
    """Entry of the queue. If the user who asks may not read the job, the entry does not describe the job."""

    position: Annotated[int | None, Field(description="From 1, in the order in which jobs start; null: it runs.")]
    job: Annotated[QueuedJobDocument | None, Field(description="Null: a job that you may not read.")]
    waiting_for: str | None
    estimated_start: Annotated[
        Time | None, Field(description="From the progress of running jobs; null where that does not tell.")
    ]


class QueueDocument(TypedDict):
    """The server's running jobs, and its jobs that wait for a place."""

    places: Annotated[int, Field(ge=1, description="Number of jobs that may run at the same time.")]
    not_ready: Annotated[str | None, Field(description="Why no job can continue at the moment; null: jobs can.")]
    running: list[QueueEntryDocument]
    waiting: list[QueueEntryDocument]


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
    """Sender of the request, and the API token of the request."""

    user: Annotated[UserDocument | None, Field(description="Null: the server has no accounts.")]
    token: Annotated[TokenDocument | None, Field(description="Null: the sender has a session, or no account.")]


class SessionDocument(TypedDict):
    """Sender of the request, the sender's rights in this session, and the browser's session."""

    has_accounts: Annotated[bool, Field(description="Whether requests need a token or a session.")]
    has_identity_provider: Annotated[bool, Field(description="Whether browsers can log in at /v1/login.")]
    may_read_dashboard: Annotated[bool, Field(description="Whether the sender may open Ray's dashboard.")]
    user: Annotated[UserDocument | None, Field(description="Null: the server has no accounts, or nobody is logged in.")]
    scope: Annotated[ScopeName | None, Field(description="What the session or the token may be used for.")]
    expires_at: Annotated[Time | None, Field(description="End of the session; null: the sender has no session.")]
    csrf_token: Annotated[
        str | None,
        Field(description="Value of the header X-CSRF-Token of requests that change something; null: no session."),
    ]


class LogoutDocument(TypedDict):
    """Response to a logout: whether it ended a session."""

    was_logged_in: Annotated[bool, Field(description="Whether the request ended a session.")]


class AuditEntryDocument(TypedDict):
    """Entry of the audit log: who changed what, when and from where."""

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
    """Entries of the audit log that a request selects."""

    entries: list[AuditEntryDocument]


NoticeName = Literal["complete", "failed", "waiting", "paused", "cancelled"]


class WebhookDocument(TypedDict):
    """Webhook: a URL that the server requests when jobs change. Its secret is not shown again."""

    id: str
    url: str
    events: Annotated[list[NoticeName], Field(description="Changes of jobs that are sent.")]
    owner: Annotated[str | None, Field(description="User whose rights say what is sent; null: no accounts.")]
    covers: Annotated[Literal["own", "team", "all"], Field(description="Jobs of the owner, of a team, or all.")]
    team: Annotated[str | None, Field(description="Team whose jobs are covered; null unless `covers` is team.")]
    created_at: Time
    failing_since: Annotated[Time | None, Field(description="First failure since the last success.")]
    disabled_at: Annotated[Time | None, Field(description="Null: the webhook is used. A test that arrives enables it.")]
    disabled_reason: str | None


class NewWebhookDocument(WebhookDocument):
    """New webhook with its secret, by which receivers check signatures. No later response has the secret."""

    secret: Annotated[str, Field(description="Secret of the Standard Webhooks specification: whsec_ and base64.")]


class WebhooksDocument(TypedDict):
    webhooks: list[WebhookDocument]


class DeliveryDocument(TypedDict):
    """Message to a webhook; if sending it fails, it is sent again, up to a limited number of tries."""

    id: Annotated[str, Field(description="Header `webhook-id` of each try.")]
    event: Annotated[str, Field(description='Such as "job.complete", or "test".')]
    job: Annotated[str | None, Field(description="Id of the job; null for a test.")]
    state: Literal["WAITING", "DELIVERED", "FAILED"]
    attempts: Annotated[int, Field(description="Number of tries so far.")]
    created_at: Time
    next_at: Annotated[Time | None, Field(description="Time of the next try.")]
    finished_at: Time | None
    status: Annotated[int | None, Field(description="HTTP status of the last response.")]
    error: Annotated[str | None, Field(description="Why the last try failed.")]


class DeliveriesDocument(TypedDict):
    """Last deliveries to a webhook, newest first."""

    deliveries: list[DeliveryDocument]


class MailDocument(TypedDict):
    """E-mail address of a user, to which changes of the user's jobs are sent."""

    user: str
    address: Annotated[str | None, Field(description="Null: no mails are sent.")]
    events: Annotated[list[NoticeName], Field(description="Changes of jobs that are sent.")]
    disabled_at: Annotated[
        Time | None, Field(description="Null: mails are sent. Setting the address enables it again.")
    ]
    disabled_reason: str | None


class NotifiedJob(TypedDict):
    """Job in a notification."""

    id: str
    kind: str
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What a waiting job waits for; else null.")]
    url: Annotated[str, Field(description="URL of the job; its path only if the server has no --public-url.")]
    owner: str | None
    team: str | None
    wall_clock_s: float
    progress: Annotated[dict[str, Any] | None, Field(description="Latest progress, as in the document of the job.")]


class NotificationDocument(TypedDict):
    """Body of a request to a webhook."""

    type: str
    timestamp: Time
    data: NotifiedJob


def list_document(collection: str, document: type) -> type:
    """Make the TypedDict of the response that lists jobs of one kind.

    The response contains a list of jobs under the key `collection`, such as "studies". The key "total" has the number
    of all jobs that satisfy the request's conditions, and "next" has the link to the next page. `document` is the
    TypedDict of a job.
    """
    fields = {
        collection: list[document],  # type: ignore[valid-type]
        "total": Annotated[int, Field(description="Number of jobs that satisfy the conditions, on all pages.")],
        "next": Annotated[str | None, Field(description="Link to the next page; null on the last one.")],
    }
    listed: type = TypedDict(f"{collection.capitalize()}Document", fields)  # type: ignore[misc]
    return listed
