"""The shapes of the files a run leaves and of what the server answers, and their JSON Schemas.

Each document has one typed definition here; the schema is derived from it. Keys may be added in later versions, never
renamed or removed.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, TypeAdapter

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from search_spaces.study import Study

__all__ = [
    "BudgetPlot",
    "EndDocument",
    "EngineDocument",
    "EstimateDocument",
    "EventDocument",
    "EventsDocument",
    "ExportDocument",
    "ExportsDocument",
    "FieldProblem",
    "FrontPlot",
    "FrontPoint",
    "HistoryPlot",
    "HistorySeries",
    "HoldoutDocument",
    "HoldoutPlot",
    "JobDocument",
    "MergePicture",
    "ObjectiveDocument",
    "ParetoDocument",
    "PlotDocument",
    "PlotsDocument",
    "ProblemDocument",
    "ProgressDocument",
    "RecipeDocument",
    "RecipePlot",
    "StudiesDocument",
    "StudyDocument",
    "SummaryDocument",
    "TrialDocument",
    "TrialsDocument",
    "VerificationDocument",
    "schemas",
]

Values = Annotated[dict[str, float], Field(description="By objective, in the metric's own unit.")]
Interval = Annotated[list[float], Field(min_length=2, max_length=2, description="95 % interval: lower, upper.")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="sha256 of the canonical recipe.")]
Number = Annotated[int, Field(ge=0)]
State = Literal["CREATED", "RUNNING", "STOPPED", "COMPLETE", "FAILED", "CANCELLED"]
Time = Annotated[str, Field(description="RFC 3339, in UTC.")]


class RungDocument(TypedDict):
    rung: Number
    samples: dict[str, int]
    values: Values
    standard_errors: Values


class TrialDocument(TypedDict):
    """One line of trials.jsonl."""

    number: Number
    origin: Literal["source", "published", "search", "user"]
    label: str
    state: Literal["WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAIL"]
    reason: str | None
    bracket: int | None
    configuration: dict[str, Any] | None
    recipe_digest: Digest
    rungs: list[RungDocument]
    values: Annotated[dict[str, float], Field(description="At full budget; empty for trials that did not reach it.")]
    standard_errors: Values
    samples_scored: Number
    samples_reused: Number
    timings_s: dict[str, float]


class SamplesDocument(TypedDict):
    scored: Number
    reused: Number
    full_budget: Annotated[int, Field(description="Samples that scoring every distinct recipe in full had taken.")]
    per_second: float | None


class SwapsDocument(TypedDict):
    median: float | None
    p95: float | None
    max: float | None


class EngineDocument(TypedDict):
    starts: Number
    kinds: Annotated[list[str], Field(description="Program, dtype, and the size and place of the source weights.")]
    busy_fraction: float | None
    swaps: Number
    swap_s: SwapsDocument


class BestDocument(TypedDict):
    trial: Number
    label: str
    origin: str
    recipe_digest: Digest
    values: Values


class EstimateDocument(TypedDict):
    value: float
    ci95: Interval
    standard_error: float
    samples: Number


class HoldoutDocument(TypedDict):
    label: str
    trial: Number
    origin: str
    values: dict[str, EstimateDocument]
    mean: Annotated[EstimateDocument | None, Field(description="Over the accuracy objectives, each counting once.")]
    differences: Annotated[
        dict[str, EstimateDocument],
        Field(description='This row minus the best trial on the same samples, by objective and as "mean".'),
    ]


class VerificationDocument(TypedDict):
    status: Literal["equal", "within tolerance", "disagreement", "not verified"]
    trials: Number
    samples: Number
    equal: Number
    beyond_tolerance: Number
    tolerance: float | None
    max_logprob_difference: float | None
    differences: list[dict[str, Any]]


class FailureDocument(TypedDict):
    trial: Number
    reason: str


class SummaryDocument(TypedDict):
    """summary.json"""

    study: str
    state: State
    reason: str | None
    seed: int
    version: str
    trials: dict[str, int]
    samples: SamplesDocument
    wall_clock_s: float
    engine: EngineDocument
    best: BestDocument | None
    holdout: list[HoldoutDocument]
    selection_bias: Annotated[
        float | None, Field(description="The best trial's mean on search data minus its mean on holdout data.")
    ]
    selection_bias_by_objective: dict[str, EstimateDocument]
    verification: VerificationDocument
    failures: list[FailureDocument]


class ObjectiveDocument(TypedDict):
    name: str
    direction: Literal["maximize", "minimize"]
    metric: str
    range: NotRequired[Interval]


class FrontDocument(TypedDict):
    trial: Number
    label: str
    origin: str
    values: Values
    standard_errors: Values
    recipe_digest: Digest


class ParetoDocument(TypedDict):
    """pareto.json: the trials at full budget that no other one beats in every objective."""

    objectives: list[ObjectiveDocument]
    reference_point: Annotated[
        list[float], Field(description="In costs: 0 is the best value an objective can take, 1 the worst.")
    ]
    hypervolume: Annotated[float, Field(ge=0, description="Of the front's costs below the reference point.")]
    front: list[FrontDocument]


class MergeDocument(TypedDict):
    method: str
    sources: Annotated[
        list[Annotated[list[Any], Field(min_length=2, max_length=2)]],
        Field(min_length=1, description="[model alias, layer or null], each an operand of the merge."),
    ]
    coefficients: NotRequired[dict[str, float | list[float]]]
    seed: NotRequired[int]


class LayerDocument(TypedDict):
    attention: MergeDocument
    mlp: MergeDocument
    norm: MergeDocument
    scale: NotRequired[float]
    alignment: NotRequired[str]


class RecipeDocument(TypedDict):
    """recipe.json"""

    format: Literal["mergesearch-recipe/1"]
    models: Annotated[dict[str, str], Field(description="Alias to content fingerprint.")]
    base: str
    embedding: MergeDocument
    layers: list[LayerDocument]
    head: MergeDocument
    tensors: NotRequired[
        Annotated[
            dict[str, MergeDocument],
            Field(description="Single tensors, by name, that have another merge than their component."),
        ]
    ]
    tokenizer: NotRequired[
        Annotated[
            str, Field(description="The merged model's: \"union\", or the alias of a model; left out, the base's.")
        ]
    ]


# What the server answers.


class ProgressDocument(TypedDict):
    """How far a study's driver is; overwritten as it goes on."""

    study: str
    stage: Literal["searching", "held-out"]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    max_trials: Annotated[int, Field(description="Trials there will be, sources and published recipes included.")]
    bracket: int | None
    num_brackets: int | None
    rung: int | None
    rungs: Annotated[list[int], Field(description="Samples of an objective at each rung; of the one that has most.")]
    best_trial: int | None
    best: Values
    samples_scored: Number
    samples_planned: Number


class JobDocument(TypedDict):
    """The Ray Job that drives a study."""

    submission_id: str
    dashboard_url: Annotated[str | None, Field(description="Its page in the Ray dashboard, while that is up.")]


class StudyDocument(TypedDict):
    """A study as the server knows it."""

    id: str
    name: str
    state: State
    reason: str | None
    waiting_for: Annotated[str | None, Field(description="What must come before a driver works on it.")]
    created_at: Time
    wall_clock_s: Annotated[float, Field(description="Seconds that drivers have worked on it.")]
    attempt: Annotated[int, Field(description="Drivers that have worked on it so far.")]
    trials: Annotated[dict[str, int], Field(description="Trials by state.")]
    progress: ProgressDocument | None
    job: JobDocument | None
    links: Annotated[dict[str, str], Field(description="self, trials, pareto, summary, events, report, log.")]


class StudiesDocument(TypedDict):
    studies: list[StudyDocument]


class TrialsDocument(TypedDict):
    trials: list[TrialDocument]
    next: Annotated[str | None, Field(description="Where the list goes on; null at its end.")]


class EventDocument(TypedDict):
    """Something that happened. As a server-sent event its id and kind are the frame's `id` and `event`."""

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
    bytes: Annotated[int | None, Field(description="Of all its files, once it is COMPLETE.")]
    links: Annotated[dict[str, str], Field(description="self, and download once it is COMPLETE.")]


class ExportsDocument(TypedDict):
    exports: list[ExportDocument]


class PlotLink(TypedDict):
    name: str
    title: str
    link: str


class PlotsDocument(TypedDict):
    plots: list[PlotLink]


class HistoryPoint(TypedDict):
    trial: Number
    label: str
    origin: str
    rung: Number
    samples: Annotated[int, Field(description="Of each objective, at that rung.")]
    value: float
    is_full: Annotated[bool, Field(description="Whether it is the trial's value at full budget.")]


class RecordPoint(TypedDict):
    trial: Number
    value: float


class HistorySeries(TypedDict):
    name: Annotated[str, Field(description='An objective, or "mean": of the accuracy objectives.')]
    direction: Literal["maximize", "minimize"]
    points: list[HistoryPoint]
    record: Annotated[list[RecordPoint], Field(description="Trials that were the best so far at full budget.")]


class HistoryPlot(TypedDict):
    """Every finished rung of every trial."""

    plot: Literal["history"]
    series: list[HistorySeries]
    failed: Annotated[list[int], Field(description="Trials that failed.")]


class FrontPoint(TypedDict):
    trial: Number
    label: str
    origin: str
    values: Values
    standard_errors: Values
    is_on_front: bool
    is_best: bool


class FrontPlot(TypedDict):
    """The trials at full budget."""

    plot: Literal["front"]
    objectives: list[ObjectiveDocument]
    reference_point: list[float]
    hypervolume: float
    points: list[FrontPoint]


class HoldoutPlot(TypedDict):
    """Held-out estimates with 95 % intervals."""

    plot: Literal["holdout"]
    rows: list[HoldoutDocument]


class MergePicture(TypedDict):
    method: str
    shares: Annotated[dict[str, float], Field(description="By model, summing to 1.")]
    coefficients: dict[str, float | list[float]]


class LayersPicture(TypedDict):
    first: Number
    last: Number
    components: Annotated[dict[str, MergePicture], Field(description="attention, mlp and norm.")]


class RecipePlot(TypedDict):
    """How the best trial is merged; null before there is one."""

    plot: Literal["recipe"]
    trial: int | None
    models: list[str]
    embedding: MergePicture | None
    layers: list[LayersPicture]
    head: MergePicture | None


class BudgetRung(TypedDict):
    rung: Number
    samples: Annotated[int, Field(description="Of each objective.")]
    trials: Annotated[int, Field(description="Searched trials that reached it.")]


class BudgetPlot(TypedDict):
    """What the search cost beside scoring every recipe in full."""

    plot: Literal["budget"]
    scored: Number
    full_budget: Number
    rungs: list[BudgetRung]


PlotDocument = HistoryPlot | FrontPlot | HoldoutPlot | RecipePlot | BudgetPlot


class FieldProblem(TypedDict):
    field: Annotated[str, Field(description="Dotted place in the request; empty: the request as a whole.")]
    message: str


class ProblemDocument(TypedDict):
    """RFC 9457 problem details."""

    type: str
    title: str
    status: int
    detail: str
    problems: NotRequired[list[FieldProblem]]


def schemas() -> dict[str, dict[str, Any]]:
    """JSON Schemas by name: study, trial (a line of trials.jsonl), summary, pareto, recipe."""
    return {
        "study": Study.model_json_schema(),
        "trial": TypeAdapter(TrialDocument).json_schema(),
        "summary": TypeAdapter(SummaryDocument).json_schema(),
        "pareto": TypeAdapter(ParetoDocument).json_schema(),
        "recipe": TypeAdapter(RecipeDocument).json_schema(),
    }
