"""Plain data between the service and the scoring replicas, without torch, Ray or vLLM."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Protocol, TypeAlias

from search_spaces.recipe import Recipe
from workers.file_access import FileAccess

__all__ = [
    "CHUNKS_IN_FLIGHT_PER_REPLICA",
    "CanaryReport",
    "Completions",
    "Evidence",
    "Family",
    "GradientResult",
    "ModelSource",
    "Placement",
    "SampleDifference",
    "SampleResult",
    "ScoreRequest",
    "ScoreResult",
    "Scorer",
    "Span",
    "Split",
    "TaskInfo",
    "TaskSpec",
    "VerificationReport",
    "digest_of",
]

Completions: TypeAlias = Mapping[str, Mapping[int, tuple[int, ...]]]
"""By objective and sample position: the tokens that a model generated, the one that ended them included."""

# Chunks that a study keeps in flight per replica: one being scored, one waiting there, one being sent.
CHUNKS_IN_FLIGHT_PER_REPLICA = 3


class Placement(StrEnum):
    """Where a bank keeps its source weights.

    `MAPPED`: in their files, whose pages all processes of a machine share. `HOST`: a copy in this process's memory,
    pinned for a GPU. `GPU`: the memory of the device that merges.
    """

    MAPPED = "mapped"
    HOST = "host"
    GPU = "gpu"


class Split(StrEnum):
    """Which data of an objective: those that the search is scored on, or those that only finalists are scored on."""

    SEARCH = "search"
    HOLDOUT = "holdout"


def digest_of(document: Any) -> str:
    """sha256 (hex) of a JSON document, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class ModelSource:
    """One checkpoint: its alias in recipes, its absolute directory, and its content fingerprint.

    `adapts` is the directory of the model that an adapter changes; None: the family's base.
    """

    alias: str
    directory: str
    fingerprint: str
    adapts: str | None = None


@dataclass(frozen=True)
class Family:
    """A base model and its experts: the models that one engine can merge.

    `tokenizer` is the vocabulary of every merge: "base", "union", or an expert's alias; `vocabulary` has its details
    (`workers.models.vocabulary`). `alignments_dir` has the files of the alignments that recipes name
    (`workers.alignments`), which may be written while engines run; "" if there are none.
    """

    base: ModelSource
    experts: tuple[ModelSource, ...]
    tokenizer: str = "base"
    vocabulary: Mapping[str, Any] = field(default_factory=dict, hash=False)
    alignments_dir: str = ""

    @property
    def models(self) -> tuple[ModelSource, ...]:
        return (self.base, *self.experts)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {model.alias: model.fingerprint for model in self.models}

    @property
    def fingerprint(self) -> str:
        """Digest of the models' contents, independent of their aliases and directories."""
        document: dict[str, Any] = {
            "base": self.base.fingerprint,
            "models": sorted({model.fingerprint for model in self.models}),
        }
        if self.tokenizer != "base":
            document["tokenizer"] = self.fingerprints.get(self.tokenizer, self.tokenizer)
        if self.vocabulary:
            document["vocabulary"] = dict(self.vocabulary)
        return digest_of(document)


@dataclass(frozen=True)
class TaskSpec:
    """A task as a replica builds it.

    `task` is an lm-eval name, an absolute YAML file, or an inline JSONL task ({"file": absolute, "prompt": jinja,
    "answer": jinja, "until": [...], "max_tokens": n}). `content` is the sha256 of the data file, if there is one, so
    that changed data is detected. `permutation_seed` fixes the order of the samples: position i is the same sample in
    every replica and every run. `access` limits the files that the task may use, wherever it is built (None: no limit);
    it is no part of the digest.
    """

    task: str | Mapping[str, Any]
    metric: str
    filter: str | None = None
    split: str | None = None
    num_fewshot: int | None = None
    content: str | None = None
    permutation_seed: int = 0
    access: FileAccess | None = field(default=None, compare=False)

    def to_json(self) -> dict[str, Any]:
        return {name: value for name, value in asdict(self).items() if name != "access"}

    @property
    def digest(self) -> str:
        return digest_of(self.to_json())


@dataclass(frozen=True)
class TaskInfo:
    """Facts about a built task.

    Its number of samples, whether larger values are better, how many prompts were cut to `max_model_len`, and the sizes
    of the groups (subtasks) by which the permutation is stratified.
    """

    num_samples: int
    higher_is_better: bool
    output_type: str
    num_truncated: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Span:
    """Positions [start, stop) of a task's permutation, to be scored for `objective`."""

    objective: str
    task: TaskSpec
    start: int
    stop: int


@dataclass(frozen=True)
class ScoreRequest:
    """One chunk of work: score these spans with this recipe.

    `crashes` is the number of engines that have crashed with it, if the caller counts. Then the next crash is raised as
    EngineCrashed. After the first crash, a replica that has scored nothing else yet scores one sample of the base model
    first, so that a crash can be told from an engine that never worked. If `crashes` is None, the request is sent again
    after a crash.
    """

    study: str
    recipe: Recipe
    spans: tuple[Span, ...]
    crashes: int | None = None

    @property
    def num_samples(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True)
class SampleResult:
    """The value and answer of one scored sample.

    `document` is its index in the task's data, `position` in the permutation; `value` is the metric on this sample;
    `response` is the model's answer: the completion, or the options' log-probabilities (JSON). `tokens` are the ids of
    each completion's tokens, the one that ended it included; None for options, and where they were not stored.
    """

    objective: str
    position: int
    document: str
    value: float
    response: str
    is_truncated: bool = False
    tokens: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Evidence:
    """What the engine held while it scored: the digest that the engine itself reports, not the requested one.

    `prompts` maps an objective to the sha256 of the token ids of every prompt of its span, in order; `weights_checksum`
    is of the engine's parameters after the swap; `replica` and `swap_count` identify the engine, and `engine` describes
    it: program, dtype, size and placement of the source weights. `canaries` is the number of canaries that the engine
    had passed before it scored: the samples are checked once it has passed another.
    """

    recipe_digest: str
    bank_fingerprint: str
    prompts: Mapping[str, str]
    weights_checksum: str
    replica: str
    swap_count: int
    engine: str
    canaries: int = 0


@dataclass(frozen=True)
class CanaryReport:
    """The result of a replica's canary.

    `canaries` is the number that its engine has passed so far; `skipped` says why the last one could not be made, and
    is empty if it passed.
    """

    replica: str
    canaries: int
    skipped: str = ""


@dataclass(frozen=True)
class ScoreResult:
    """The samples of one request, the evidence, and seconds spent: materialise, swap, score, wait (for the lock)."""

    samples: tuple[SampleResult, ...]
    evidence: Evidence
    timings_s: Mapping[str, float]

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """The values by objective and position."""
        found: dict[str, dict[int, float]] = {}
        for sample in self.samples:
            found.setdefault(sample.objective, {})[sample.position] = sample.value
        return found


@dataclass(frozen=True)
class SampleDifference:
    """A sample on which the engine and transformers, the reference, differ.

    `engine` and `reference` are their values of the metric. `what` differs: "tokens" or "text" of the completion,
    "log-probabilities" by more than the tolerance, or only the "value". `top2_gap` is the largest gap between the
    reference's best log-probability and that of the engine's token (the gap between the two best, if the engine took
    the second); for options, the difference of their log-probabilities. `is_beyond` says that rounding does not explain
    the difference.
    """

    objective: str
    position: int
    engine: float
    reference: float
    top2_gap: float
    what: str
    is_beyond: bool


@dataclass(frozen=True)
class VerificationReport:
    """Comparison of stored samples of one recipe with plain transformers on the exported weights.

    `differences` lists every sample that is not equal in value and completion, or whose log-probabilities differ by
    more than `tolerance`; `num_beyond` counts those that rounding does not explain. `max_logprob_difference` is the
    largest difference over the `num_logprobs` compared log-probabilities: those of options, and those of the tokens of
    prompts and completions as the engine and transformers read them. `num_tokens` is the number of completion tokens
    compared; `num_without_tokens` counts samples that are stored without tokens, whose texts were compared. `reason`
    says why samples were left out; nothing is verified if `num_samples` is 0.
    """

    recipe_digest: str
    num_samples: int
    num_equal: int
    max_logprob_difference: float
    tolerance: float
    differences: tuple[SampleDifference, ...]
    num_beyond: int
    num_tokens: int = 0
    num_logprobs: int = 0
    num_without_tokens: int = 0
    reason: str | None = None

    @property
    def is_equal(self) -> bool:
        """Whether something was compared, and nothing differed beyond the tolerance."""
        return self.num_samples > 0 and self.num_beyond == 0


@dataclass(frozen=True)
class GradientResult:
    """A minibatch's losses, and the derivatives of the loss by the coefficients of the merge that read it.

    `losses` are means over the minibatch by objective, each divided by its task's unit (`evaluation.references`), so
    that they are comparable; the loss that was differentiated is their sum, times the given weights. `by_source`:
    tensor -> alias of a source -> derivative by that source's coefficient (`lambda` or `weight`); `shared`: tensor ->
    coefficient -> derivative by a coefficient that a merge has once for all sources. Tensors of merges without such
    coefficients are in neither. `layer_scales`: layer -> derivative by its scale, if requested.
    """

    losses: Mapping[str, float]
    num_samples: int
    seconds: float
    by_source: Mapping[str, Mapping[str, float]]
    shared: Mapping[str, Mapping[str, float]]
    layer_scales: Mapping[int, float] = field(default_factory=dict)


class Scorer(Protocol):
    """Scores recipes: replicas of warm engines behind Ray Serve, or the fake in `workers.serving.fake`.

    Implementations are picklable and thread-safe. `score` may be called again with the same request after a failure;
    its only side effect is which recipe an engine holds.
    """

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Score one chunk.

        Raises TrialFailed (this candidate cannot be scored), EngineUnavailable (no replica), EngineFault (a replica
        failed a check), and EngineCrashed if the request counts crashes.
        """
        ...

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        """Build tasks and describe them. Raises InvalidTask."""
        ...

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Score `spans` with plain transformers on the exported checkpoint and compare with `samples`.

        Returns a report of 0 samples, with the reason, if nothing can be compared.
        """
        ...

    def is_starting(self) -> bool:
        """Whether no engine can score yet, but one is being started."""
        ...

    def check(self) -> tuple[CanaryReport, ...]:
        """Make a canary in every replica that runs and has scored since its last one. Raises EngineFault."""
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Engine statistics over all replicas: starts, swaps, swap_s (list), busy_s, bank placement and bytes."""
        ...
