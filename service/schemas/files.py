"""Types of the result files of a study: trials.jsonl, summary.json and pareto.json.

JSON Schemas are derived from these definitions. Keys may be added in later versions, never renamed or removed. The
server sends the same documents; its other responses are in `service.schemas.api`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

__all__ = [
    "ConstraintDocument",
    "EngineDocument",
    "EstimateDocument",
    "FindingDocument",
    "HoldoutDocument",
    "ObjectiveDocument",
    "ParetoDocument",
    "PreferredDocument",
    "SummaryDocument",
    "TrialDocument",
    "VerificationDocument",
    "VolumeDocument",
]

Values = Annotated[dict[str, float], Field(description="Value of each objective, in the metric's unit.")]
StandardErrors = Annotated[
    dict[str, float | None],
    Field(description="Standard error of each objective; null where a single sample shows no spread."),
]
Violations = Annotated[
    dict[str, float],
    Field(description="Violated constraints, as written, with the excess in the metric's unit."),
]
Interval = Annotated[list[float], Field(min_length=2, max_length=2, description="95 % interval: lower, upper.")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="sha256 of the canonical recipe.")]
Number = Annotated[int, Field(ge=0)]
State = Literal["CREATED", "RUNNING", "STOPPED", "PAUSED", "COMPLETE", "FAILED", "CANCELLED"]


class RungDocument(TypedDict):
    rung: Number
    samples: dict[str, int]
    values: Values
    standard_errors: StandardErrors


class TrialDocument(TypedDict):
    """Trial of a study, as a line of trials.jsonl describes it."""

    number: Number
    origin: Literal["source", "published", "search", "refined", "user"]
    label: str
    state: Literal["WAITING", "RUNNING", "COMPLETE", "PRUNED", "FAIL"]
    reason: str | None
    invalid: Annotated[str | None, Field(description="Why a user marked the trial as invalid; null if it is valid.")]
    rival: Annotated[
        int | None,
        Field(
            description="Trial against which a scheduler has stopped it: in a race one that was ahead, otherwise the "
            "last one that its rung promoted. Null of other trials, and of those that early versions stopped."
        ),
    ]
    bracket: int | None
    configuration: dict[str, Any] | None
    recipe_digest: Digest
    shares: NotRequired[
        Annotated[
            dict[str, float] | None,
            Field(
                description="In the space m3: each expert's share of the task vectors (lambda of equation 2); they "
                "sum to 1. Null for the base."
            ),
        ]
    ]
    rungs: list[RungDocument]
    values: Annotated[
        dict[str, float],
        Field(description="Value of each objective at full budget; empty for trials that did not reach it."),
    ]
    standard_errors: StandardErrors
    violations: Annotated[
        Violations, Field(description="Constraints violated at full budget, with the excess in the metric's unit.")
    ]
    samples_scored: Number
    samples_reused: Number
    timings_s: dict[str, float]


class StoredBytesDocument(TypedDict):
    values: Annotated[int, Field(description="Bytes of values and flags, compressed.")]
    texts: Annotated[int, Field(description="Bytes of responses and tokens, compressed.")]


class RemovedResponsesDocument(TypedDict):
    time: Annotated[float, Field(description="When they were removed, in seconds since the epoch.")]
    samples: Annotated[int, Field(ge=0, description="Number of samples that had them.")]
    bytes: Annotated[int, Field(ge=0, description="Bytes that they took, compressed.")]


class SamplesDocument(TypedDict):
    scored: Number
    reused: Number
    full_budget: Annotated[int, Field(description="Samples that scoring every distinct recipe in full takes.")]
    saved: Annotated[
        float | None,
        Field(
            description="1 - scored / full_budget, the share that rungs and equal recipes save; null without trials."
        ),
    ]
    per_second: float | None
    used: Annotated[int, Field(ge=0, description="Samples that the search used: `scored` and `search.step_samples`.")]
    limit: Annotated[int | None, Field(description="`limits.max_samples`, the largest `used`; null if there is none.")]
    stored_bytes: Annotated[
        StoredBytesDocument,
        Field(description="Bytes that the database takes for the samples; those of earlier versions do not count."),
    ]
    responses_removed: Annotated[
        RemovedResponsesDocument | None,
        Field(description="Removal of responses and tokens; values and scores are kept. Null if they are stored."),
    ]


class RecipesDocument(TypedDict):
    proposed: Annotated[int, Field(description="Configurations that the searcher proposed.")]
    distinct: Annotated[
        int, Field(description="Proposed configurations whose recipe no earlier trial had; the others cost nothing.")
    ]
    share: Annotated[float | None, Field(description="distinct / proposed; null without proposals.")]


class LineageDocument(TypedDict):
    study: Annotated[str, Field(description="Id of the study that produced the source.")]
    name: str
    trial: Number
    recipe_digest: str


class TrainedDocument(TypedDict):
    finetune: Annotated[str, Field(description="Id of the fine-tuning that trained the expert.")]
    name: Annotated[str, Field(description="Name of the fine-tuning.")]
    expert: Annotated[str, Field(description="Name of the expert in the fine-tuning.")]
    digest: Annotated[str, Field(description="Hash of the expert's files.")]


class PolicyDocument(TypedDict):
    iteration: Annotated[int, Field(ge=0, description="Last iteration that the policy had learned from.")]
    digest: Annotated[str, Field(description="sha256 of the policy's checkpoint.")]


class StartDocument(TypedDict):
    study: Annotated[str, Field(description="Id of the study that trained the policies.")]
    name: str
    policies: list[PolicyDocument]


class WarmStartDocument(TypedDict):
    study: Annotated[str, Field(description="Id of the earlier study.")]
    name: str
    rungs: Annotated[str, Field(description="all: results at every rung; full: only those at the full budget.")]
    trials: Annotated[int, Field(ge=1, description="Number of trials of the earlier study that were used.")]
    observations: Annotated[int, Field(ge=1, description="Number of their results.")]


class SearchDocument(TypedDict):
    algorithm: Annotated[
        str | None, Field(description="Name of the searcher; where the study file says auto, the chosen one.")
    ]
    reason: Annotated[str | None, Field(description="Reason why the searcher was chosen.")]
    notes: Annotated[list[str], Field(description="Decisions of the searcher during the study, with reasons.")]
    start: Annotated[
        StartDocument | None, Field(description="Policies of another study that the searcher started with.")
    ]
    warm_start: Annotated[
        WarmStartDocument | None,
        Field(description="Results of an earlier study that the searcher started with; they are none of this study."),
    ]
    steps: Annotated[int, Field(ge=0, description="Number of losses and gradients computed for proposals.")]
    step_samples: Annotated[
        int, Field(ge=0, description="Cost of the steps in scored samples; a sample of a gradient counts as 3.")
    ]
    trial_samples: Annotated[
        int, Field(ge=0, description="Samples scored for the trials that the searcher proposed or that refine them.")
    ]


class SwapsDocument(TypedDict):
    median: float | None
    p95: float | None
    max: float | None


class NotCheckedDocument(TypedDict):
    samples: Annotated[
        int | None,
        Field(
            description="Samples scored after the last canary that their engine passed; null before the study's end."
        ),
    ]
    reasons: Annotated[list[str], Field(description="Reasons why canaries could not be run at the study's end.")]


class EngineDocument(TypedDict):
    starts: Number
    kinds: Annotated[list[str], Field(description="Program, dtype, and the size and place of the source weights.")]
    busy_fraction: float | None
    swaps: Number
    swap_s: SwapsDocument
    not_checked: NotCheckedDocument


class BestDocument(TypedDict):
    trial: Number
    label: str
    origin: str
    recipe_digest: Digest
    values: Values
    violations: Violations


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
    mean: Annotated[
        EstimateDocument | None, Field(description="Unweighted mean over the accuracy objectives; null without any.")
    ]
    violations: Annotated[
        Violations, Field(description="Constraints violated on the holdout data, with the excess in the metric's unit.")
    ]
    differences: Annotated[
        dict[str, EstimateDocument],
        Field(
            description="This row minus the best trial (see `holdout_reference`) on the same samples, by objective and "
            'as "mean".'
        ),
    ]
    tokens_per_second: Annotated[
        float | None,
        Field(
            description="Tokens of its completions for each second of scoring, as the engine was then: merges of other "
            "depths differ. Null where engines stored no tokens."
        ),
    ]


class DifferenceDocument(EstimateDocument):
    trial: Number
    is_better: Annotated[bool, Field(description="Whether the interval is above 0.")]


class RivalTestDocument(TypedDict):
    """Comparison, on holdout data, of the search's best trials (finalists) with the best baseline of one kind.

    The two kinds of baseline are the sources (base and experts) and the published recipes.
    """

    against: Literal["source", "published"]
    rival: Annotated[
        int, Field(ge=0, description="Trial number of the baseline with the best held-out value of its kind.")
    ]
    label: str
    differences: Annotated[
        list[DifferenceDocument],
        Field(
            description="Finalist minus rival, paired by document, larger is better, the best on search data first. "
            "The intervals of a list hold together at 95 % (Bonferroni)."
        ),
    ]


class BenchmarkColumnDocument(TypedDict):
    name: str
    metric: str
    direction: Literal["maximize", "minimize"]
    range: Interval
    group: Annotated[str | None, Field(description="Group whose average it is a part of.")]
    samples: Number
    subtasks: Annotated[dict[str, int], Field(description="Samples by subtask, if the task is a group of several.")]
    categories: Annotated[dict[str, list[str]], Field(description="Subtasks by group within the task.")]
    attack: Annotated[
        dict[str, Any] | None,
        Field(description="The attack on the prompts as in the study file, and the `template` that is attacked."),
    ]
    judge: Annotated[
        dict[str, Any] | None,
        Field(
            description="The judge as in the study file, and `reference_length`: mean number of characters of the "
            "reference answers."
        ),
    ]


class AttackDocument(TypedDict):
    """Result of one trial on a benchmark with a prompt attack, which searches for the most harmful prompt template.

    The template is the one with which this trial has its lowest value.
    """

    value: Annotated[EstimateDocument, Field(description="Value with this template.")]
    drop: Annotated[
        EstimateDocument | None,
        Field(
            description="Performance drop rate, (original - attacked) / original, with its paired bootstrap interval; "
            "null if the value with the original template is not positive."
        ),
    ]
    template: str
    queries: Annotated[int, Field(ge=0, description="Templates that were scored on all samples to find this one.")]
    is_cut: Annotated[bool, Field(description="Whether `max_queries` ended the attack.")]


class JudgedDocument(TypedDict):
    """Verdicts of a judge, a language model, on one trial's completions.

    The judge compares each completion with a reference answer twice: once as the first answer, once as the second
    answer.
    """

    models: Annotated[list[str], Field(description="Models that judged, as the endpoint named them.")]
    length: Annotated[float, Field(description="Mean number of characters of the completions.")]
    agreement: Annotated[
        float, Field(description="Share of the samples on which both orders of the answers gave the same preference.")
    ]
    first: Annotated[
        float,
        Field(description="Share of the verdicts for one of the two answers that preferred the first; 0.5 is no bias."),
    ]
    without_verdict: Annotated[int, Field(ge=0, description="Answers of the judge without a verdict, counted as ties.")]


class BenchmarkRowDocument(TypedDict):
    """Values of one trial on benchmarks. Benchmarks that still lack samples of this trial are left out."""

    trial: Number
    label: str
    origin: str
    values: dict[str, EstimateDocument]
    averages: Annotated[
        dict[str, EstimateDocument],
        Field(description="Unweighted mean over each group whose benchmarks were all scored."),
    ]
    subtasks: Annotated[
        dict[str, dict[str, EstimateDocument]],
        Field(description="Values by benchmark and subtask, followed by the groups within the task."),
    ]
    differences: Annotated[
        dict[str, EstimateDocument], Field(description="This row minus the reference, on the same samples.")
    ]
    average_differences: Annotated[dict[str, EstimateDocument], Field(description="The same of the averages.")]
    attacks: Annotated[dict[str, AttackDocument], Field(description="Results with attacked prompts, by benchmark.")]
    judged: Annotated[dict[str, JudgedDocument], Field(description="Judgments of completions, by benchmark.")]


class BenchmarkTestDocument(TypedDict):
    """Comparison of all merges with the best baseline of one kind: the best source model, or the best published recipe.

    The comparison is on one benchmark or on the average of a group of benchmarks.
    """

    name: Annotated[str, Field(description="Name of the benchmark or group.")]
    is_average: bool
    against: Literal["source", "published"]
    rival: Annotated[int, Field(ge=0, description="Trial number of the baseline that is best of its kind here.")]
    label: str
    differences: Annotated[
        list[DifferenceDocument],
        Field(
            description="Merge minus rival, paired by document, larger is better. The intervals of all tests against "
            "one kind of baseline hold together at 95 % (Bonferroni)."
        ),
    ]


class BenchmarkFailureDocument(TypedDict):
    trial: Number
    benchmark: str
    reason: str


class BenchmarksDocument(TypedDict):
    """Results on benchmarks, which are scored after the search and influence no selection."""

    benchmarks: list[BenchmarkColumnDocument]
    groups: Annotated[dict[str, list[str]], Field(description="Benchmarks by group.")]
    reference: Annotated[
        int | None, Field(description="Trial that differences are relative to: the best on search data, if scored.")
    ]
    rows: list[BenchmarkRowDocument]
    tests: list[BenchmarkTestDocument]
    failures: list[BenchmarkFailureDocument]


class OverlapDocument(TypedDict):
    """Overlap of holdout data or a benchmark with the search data: which items occur in both."""

    section: Annotated[str, Field(description="holdout or benchmarks.")]
    name: str
    items: Number
    exact: Annotated[int, Field(ge=0, description="Items that are equal to an item of the search data.")]
    overlapping: Annotated[
        int, Field(ge=0, description="Items that are equal or have 13 consecutive words in common with one.")
    ]
    share: Annotated[float, Field(ge=0, le=1, description="Overlapping items of all items.")]
    by_objective: Annotated[dict[str, int], Field(description="Overlapping items by objective.")]
    examples: Annotated[list[str], Field(description="Some overlapping items, as indices in the task's data.")]
    is_allowed: Annotated[bool, Field(description="Whether the study file allows any share.")]


class FindingDocument(TypedDict):
    """Main result of a study: whether a merge that the search proposed is better than the baselines on holdout data.

    The finding has the statistical tests on which the statement is based.
    """

    text: Annotated[str, Field(description="Result in one sentence, also if no merge is better.")]
    criterion: Annotated[str, Field(description="Name of the compared value.")]
    tests: Annotated[
        list[RivalTestDocument], Field(description="Tests by kind of baseline; empty before the held-out stage.")
    ]


class VerificationDocument(TypedDict):
    status: Literal["equal", "within tolerance", "disagreement", "not verified"]
    reason: Annotated[str | None, Field(description="Reason why trials or samples were not compared.")]
    trials: Annotated[int, Field(ge=0, description="Number of trials with compared samples.")]
    trials_not_verified: Annotated[int, Field(ge=0, description="Number of trials without compared samples.")]
    samples: Number
    equal: Annotated[int, Field(ge=0, description="Samples with equal value and completion.")]
    beyond_tolerance: Number
    tokens: Annotated[int, Field(ge=0, description="Number of compared tokens of completions.")]
    samples_without_tokens: Annotated[
        int, Field(ge=0, description="Samples stored without tokens, whose text was compared instead.")
    ]
    logprobs: Annotated[int, Field(ge=0, description="Number of compared log-probabilities.")]
    unstable_logprobs: Annotated[
        int,
        Field(ge=0, description="Log-probabilities of unstable tokens: rounding explains more than the tolerance."),
    ]
    tolerance: float | None
    max_logprob_difference: float | None
    differences: list[dict[str, Any]]


class FailureDocument(TypedDict):
    trial: Number
    reason: str


class SteeringDocument(TypedDict):
    """Request of a user that changes how a study continues, such as a pause or an edit."""

    time: Annotated[float, Field(description="Seconds since the epoch.")]
    action: Annotated[
        str,
        Field(
            description="pause, resume, stop, cancel, edit, move, enqueue, evaluate (a trial), invalidate or validate."
        ),
    ]
    trial: Annotated[int | None, Field(ge=0, description="Trial that the request is about, if it is about one.")]
    user: Annotated[str | None, Field(description="Who asked; null if the server had no accounts.")]
    reason: Annotated[str | None, Field(description="Why, in the user's words.")]
    changes: Annotated[
        dict[str, list[Any]],
        Field(description="Old and new value of each edited option; for enqueue, the label; else empty."),
    ]


class SelectionDocument(TypedDict):
    """Texts about a study's selections: of its best trial, and of the trials that are promoted to the next rung.

    A rung is a number of samples at which trials are compared.
    """

    best: Annotated[str, Field(description="Criterion that names the best trial.")]
    promotion: Annotated[str, Field(description="Criterion that promotes trials to the next rung.")]
    difference: Annotated[str, Field(description="Reason why a promoted trial need not be the best.")]


class WarningDocument(TypedDict):
    trial: Number
    objective: str
    message: str


class SummaryDocument(TypedDict):
    """Summary of a study's results and cost, the content of summary.json."""

    study: str
    state: State
    reason: str | None
    steering: Annotated[list[SteeringDocument], Field(description="Requests that paused, resumed or ended the study.")]
    seed: int
    version: str
    trials: dict[str, int]
    search: SearchDocument
    samples: SamplesDocument
    recipes: RecipesDocument
    lineage: Annotated[
        dict[str, LineageDocument], Field(description="Sources that are merges of other studies, by alias.")
    ]
    trained: Annotated[
        dict[str, TrainedDocument], Field(description="Sources that are experts of fine-tunings, by alias.")
    ]
    wall_clock_s: float
    engine: EngineDocument
    phases: Annotated[
        dict[str, float],
        Field(
            description="Seconds of each phase of the search that it had: alignments (of layer paths), updates (of "
            "policies), gradients, merging (also writing merges into engines) and scoring. The last two are added up "
            "over engines. Phases run at the same time."
        ),
    ]
    best: BestDocument | None
    selection: SelectionDocument
    constraints: list[ConstraintDocument]
    finding: FindingDocument
    holdout: list[HoldoutDocument]
    holdout_reference: Annotated[
        int | None,
        Field(description="Trial that differences are relative to: the best, or the next finalist if the best failed."),
    ]
    holdout_failures: Annotated[list[FailureDocument], Field(description="Trials that failed on holdout data.")]
    selection_bias: Annotated[
        float | None,
        Field(
            description="The best trial's mean on search data minus its mean on holdout data: the selection bias and "
            "the difference between the splits together."
        ),
    ]
    selection_bias_by_objective: Annotated[
        dict[str, EstimateDocument],
        Field(description="Search value minus held-out value of the best trial, by objective."),
    ]
    selection_bias_against_baselines: Annotated[
        dict[str, EstimateDocument],
        Field(
            description="Lead of the best trial over the mean of the baselines on search data minus its lead "
            'on holdout data, by objective and as "mean".'
        ),
    ]
    split_difference: Annotated[
        dict[str, EstimateDocument],
        Field(
            description="Mean of the baselines on search data minus their mean on holdout data, by objective "
            'and as "mean".'
        ),
    ]
    benchmarks: BenchmarksDocument
    contamination: list[OverlapDocument]
    verification: VerificationDocument
    failures: list[FailureDocument]
    invalid: Annotated[list[FailureDocument], Field(description="Trials that users marked as invalid, with reasons.")]
    warnings: Annotated[list[WarningDocument], Field(description="Samples outside the range of their objective.")]


class ObjectiveDocument(TypedDict):
    name: str
    direction: Literal["maximize", "minimize"]
    metric: str
    range: NotRequired[Interval]
    constraints: NotRequired[list[str]]


class FrontDocument(TypedDict):
    trial: Number
    label: str
    origin: str
    values: Values
    standard_errors: StandardErrors
    violations: Violations
    recipe_digest: Digest


class VolumeDocument(EstimateDocument):
    trials: Annotated[list[int], Field(description="Numbers of the finalists.")]
    search: Annotated[float, Field(description="Hypervolume of the same trials on search data.")]


class ConstraintDocument(TypedDict):
    """Constraint on an objective's value, as written in the study file, and how many trials satisfy it.

    `trials` is the number of trials that were scored on all samples, and `kept_by` is the number of these trials that
    satisfy the constraint.
    """

    constraint: str
    bound: Annotated[
        float | None,
        Field(
            description="Bound at full budget on search data; null until the model that it is relative to is scored."
        ),
    ]
    kept_by: Number
    trials: Number


class PreferredDocument(TypedDict):
    """Trial on the Pareto front that is best under a user's weights of the objectives."""

    weights: dict[str, float]
    trial: Number
    label: str
    values: Values
    split: Annotated[Literal["search", "holdout"], Field(description="Split whose values made the choice.")]


class ParetoDocument(TypedDict):
    """Pareto front of a study, the content of pareto.json: the trials that no other trial dominates.

    Only trials that were scored on all samples of the search count.
    """

    objectives: list[ObjectiveDocument]
    reference_point: Annotated[
        list[float],
        Field(description="Reference point in costs: 0 is the best value that an objective can take, 1 the worst."),
    ]
    hypervolume: Annotated[
        float, Field(ge=0, description="Hypervolume of the front's costs below the reference point.")
    ]
    holdout_hypervolume: Annotated[
        VolumeDocument | None,
        Field(
            description="Hypervolume of the finalists on holdout data, with a bootstrap interval; null until scored."
        ),
    ]
    front: list[FrontDocument]
    preferred: NotRequired[
        Annotated[PreferredDocument, Field(description="Trial that the given weights pick; absent without weights.")]
    ]
