"""The result files of a run, and their JSON Schemas.

Each document has one typed definition here; the schema is derived from it. Keys may be added in later versions, never
renamed or removed. The server sends the same documents, and those of `service.schemas.api`.
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

Values = Annotated[dict[str, float], Field(description="By objective, in the metric's own unit.")]
StandardErrors = Annotated[
    dict[str, float | None], Field(description="By objective; null where a single sample shows no spread.")
]
Violations = Annotated[
    dict[str, float],
    Field(description="The constraints that it violates, as written, and by how much, in the metric's own unit."),
]
Interval = Annotated[list[float], Field(min_length=2, max_length=2, description="95 % interval: lower, upper.")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="sha256 of the canonical recipe.")]
Number = Annotated[int, Field(ge=0)]
State = Literal["CREATED", "RUNNING", "STOPPED", "COMPLETE", "FAILED", "CANCELLED"]


class RungDocument(TypedDict):
    rung: Number
    samples: dict[str, int]
    values: Values
    standard_errors: StandardErrors


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
    standard_errors: StandardErrors
    violations: Annotated[Violations, Field(description="At full budget; empty for trials that did not reach it.")]
    samples_scored: Number
    samples_reused: Number
    timings_s: dict[str, float]


class SamplesDocument(TypedDict):
    scored: Number
    reused: Number
    full_budget: Annotated[int, Field(description="Samples needed to score every distinct recipe in full.")]
    saved: Annotated[
        float | None,
        Field(description="1 - scored / full_budget: what rungs and equal recipes save; null without any."),
    ]
    per_second: float | None


class RecipesDocument(TypedDict):
    proposed: Annotated[int, Field(description="Configurations that the searcher proposed.")]
    distinct: Annotated[int, Field(description="Those whose recipe no earlier trial had; the others cost nothing.")]
    share: Annotated[float | None, Field(description="distinct / proposed; null without any.")]


class LineageDocument(TypedDict):
    study: Annotated[str, Field(description="The id of the study that the source is a merge of.")]
    name: str
    trial: Number
    recipe_digest: str


class PolicyDocument(TypedDict):
    iteration: Annotated[int, Field(ge=0, description="The last that the policy had learned from.")]
    digest: Annotated[str, Field(description="The sha256 of its checkpoint.")]


class StartDocument(TypedDict):
    study: Annotated[str, Field(description="The id of the study that the policies are of.")]
    name: str
    policies: list[PolicyDocument]


class SearchDocument(TypedDict):
    algorithm: Annotated[str | None, Field(description="The searcher, also where the study file says auto.")]
    reason: Annotated[str | None, Field(description="Why it was chosen.")]
    notes: Annotated[list[str], Field(description="What the searcher decided on the way, and why.")]
    start: Annotated[StartDocument | None, Field(description="The policies of another study that it began with.")]
    steps: Annotated[int, Field(ge=0, description="Losses and gradients computed for proposals.")]
    step_samples: Annotated[
        int, Field(ge=0, description="What the steps cost, in scored samples; a gradient's sample is 3.")
    ]
    trial_samples: Annotated[int, Field(ge=0, description="Samples scored for the trials that it proposed.")]


class SwapsDocument(TypedDict):
    median: float | None
    p95: float | None
    max: float | None


class NotCheckedDocument(TypedDict):
    samples: Annotated[
        int | None,
        Field(description="Scored after the last canary that their engine passed; null before the study's end."),
    ]
    reasons: Annotated[list[str], Field(description="Why canaries at the study's end could not be made.")]


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
    mean: Annotated[EstimateDocument | None, Field(description="Unweighted mean over the accuracy objectives.")]
    violations: Annotated[Violations, Field(description="On the holdout data.")]
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
    is_better: Annotated[bool, Field(description="The interval is above 0.")]


class RivalTestDocument(TypedDict):
    """The finalists that the search proposed, compared with the best of the source models or published recipes."""

    against: Literal["source", "published"]
    rival: Annotated[int, Field(ge=0, description="The trial with the best held-out value of its kind.")]
    label: str
    differences: Annotated[
        list[DifferenceDocument],
        Field(
            description="Finalist minus rival, paired by document, larger is better, the best on search data first. "
            "The intervals of a list hold together at 95 % (Bonferroni)."
        ),
    ]


class FindingDocument(TypedDict):
    """Whether a merge that the search proposed is better than single models and published recipes."""

    text: Annotated[str, Field(description="What was found, in one sentence, also if nothing was.")]
    criterion: Annotated[str, Field(description="The value that is compared.")]
    tests: Annotated[list[RivalTestDocument], Field(description="Empty before the held-out stage.")]


class VerificationDocument(TypedDict):
    status: Literal["equal", "within tolerance", "disagreement", "not verified"]
    reason: Annotated[str | None, Field(description="Why trials or samples were not compared.")]
    trials: Annotated[int, Field(ge=0, description="Trials of which samples were compared.")]
    trials_not_verified: Annotated[int, Field(ge=0, description="Trials of which nothing could be compared.")]
    samples: Number
    equal: Annotated[int, Field(ge=0, description="Samples with equal value and completion.")]
    beyond_tolerance: Number
    tokens: Annotated[int, Field(ge=0, description="Tokens of completions that were compared.")]
    samples_without_tokens: Annotated[
        int, Field(ge=0, description="Samples stored without tokens, of which the text was compared.")
    ]
    logprobs: Annotated[int, Field(ge=0, description="Log-probabilities that were compared.")]
    tolerance: float | None
    max_logprob_difference: float | None
    differences: list[dict[str, Any]]


class FailureDocument(TypedDict):
    trial: Number
    reason: str


class SelectionDocument(TypedDict):
    """The criteria of the study in words."""

    best: Annotated[str, Field(description="What names the best trial.")]
    promotion: Annotated[str, Field(description="What promotes trials to the next rung.")]
    difference: Annotated[str, Field(description="Why a promoted trial need not be the best.")]


class WarningDocument(TypedDict):
    trial: Number
    objective: str
    message: str


class SummaryDocument(TypedDict):
    """summary.json"""

    study: str
    state: State
    reason: str | None
    seed: int
    version: str
    trials: dict[str, int]
    search: SearchDocument
    samples: SamplesDocument
    recipes: RecipesDocument
    lineage: Annotated[dict[str, LineageDocument], Field(description="The sources that are merges of other studies.")]
    wall_clock_s: float
    engine: EngineDocument
    best: BestDocument | None
    selection: SelectionDocument
    constraints: list[ConstraintDocument]
    finding: FindingDocument
    holdout: list[HoldoutDocument]
    holdout_reference: Annotated[
        int | None,
        Field(description="The trial that differences are relative to: the best, or if that failed the next finalist."),
    ]
    holdout_failures: Annotated[list[FailureDocument], Field(description="Trials that failed on holdout data.")]
    selection_bias: Annotated[
        float | None,
        Field(
            description="The best trial's mean on search data minus its mean on holdout data: the selection bias and "
            "the difference between the splits together."
        ),
    ]
    selection_bias_by_objective: Annotated[dict[str, EstimateDocument], Field(description="The same by objective.")]
    selection_bias_against_baselines: Annotated[
        dict[str, EstimateDocument],
        Field(
            description="The best trial's lead over the mean of the unselected baselines on search data minus its lead "
            'on holdout data, by objective and as "mean".'
        ),
    ]
    split_difference: Annotated[
        dict[str, EstimateDocument],
        Field(
            description="The unselected baselines' mean on search data minus their mean on holdout data, by objective "
            'and as "mean".'
        ),
    ]
    verification: VerificationDocument
    failures: list[FailureDocument]
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
    trials: Annotated[list[int], Field(description="The finalists that it is of.")]
    search: Annotated[float, Field(description="The hypervolume of the same trials on search data.")]


class ConstraintDocument(TypedDict):
    """A constraint, as written, and the trials at full budget that keep to it."""

    constraint: str
    bound: Annotated[
        float | None, Field(description="At full budget on search data; null before what it is relative to is scored.")
    ]
    kept_by: Number
    trials: Number


class PreferredDocument(TypedDict):
    """The trial of the front that a user's weights of the objectives pick."""

    weights: dict[str, float]
    trial: Number
    label: str
    values: Values
    split: Annotated[
        Literal["search", "holdout"], Field(description="The data that the values, and so the choice, are of.")
    ]


class ParetoDocument(TypedDict):
    """pareto.json: the trials at full budget that no other one dominates."""

    objectives: list[ObjectiveDocument]
    reference_point: Annotated[
        list[float], Field(description="In costs: 0 is the best value an objective can take, 1 the worst.")
    ]
    hypervolume: Annotated[float, Field(ge=0, description="Of the front's costs below the reference point.")]
    holdout_hypervolume: Annotated[
        VolumeDocument | None,
        Field(description="Of the finalists on holdout data, with a bootstrap interval; null before they were scored."),
    ]
    front: list[FrontDocument]
    preferred: NotRequired[Annotated[PreferredDocument, Field(description="Where weights were given.")]]
