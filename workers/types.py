"""Data types shared by the service and the scoring replicas, without torch, Ray or vLLM."""

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
    "GpuNeed",
    "GradientResult",
    "ModelSource",
    "Placement",
    "SampleDifference",
    "SamplePictures",
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
"""The tokens that a model generated, by objective and sample position.

The token that ended the completion is included.
"""

# Chunks that a study keeps in flight per replica: one being scored, one waiting there, one being sent.
CHUNKS_IN_FLIGHT_PER_REPLICA = 3


class Placement(StrEnum):
    """Place where the weights of the source models are kept: mapped files, host memory or GPU memory.

    - `MAPPED`: in the models' files, which are mapped into memory, so that all processes of a machine share the pages
    - `HOST`: a copy in host memory, which the processes of a machine share if its shared memory has room; the copy is
      pinned if a GPU reads it
    - `GPU`: a copy in the memory of the device that computes merges
    """

    MAPPED = "mapped"
    HOST = "host"
    GPU = "gpu"


class GpuNeed(StrEnum):
    """Whether engines need GPUs.

    - `IF_ANY`: engines run on GPUs if the cluster has any, else on the CPU
    - `NEEDED`: engines run on GPUs, which the cluster must have
    - `MAY_COME`: engines run on GPUs, and wait for machines with GPUs that the cluster may add
    """

    IF_ANY = "if any"
    NEEDED = "needed"
    MAY_COME = "may come"


class Split(StrEnum):
    """Data from which samples come: search data, holdout data for the final comparison, or benchmarks.

    Only finalists and baselines are scored on holdout data. A value has at most 8 characters, because it is stored in a
    column of the database that has room for no more.
    """

    SEARCH = "search"
    HOLDOUT = "holdout"
    BENCHMARK = "bench"


def digest_of(document: Any) -> str:
    """The sha256 (hex) of a JSON document; it does not depend on the order of keys."""
    return hashlib.sha256(json.dumps(document, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@dataclass(frozen=True)
class ModelSource:
    """One source model: its alias in recipes, its absolute directory, and the fingerprint of its content.

    For an adapter, `adapts` is the directory of the model that the adapter changes, or None if the adapter changes the
    family's base. For other models, `adapts` is None. `origin` is the hub id with its commit, or the URL, by which
    other machines find the model; it is None if the model was given as a directory.
    """

    alias: str
    directory: str
    fingerprint: str
    adapts: str | None = None
    origin: str | None = None


@dataclass(frozen=True)
class Family:
    """A base model and its experts, which one engine can merge.

    `tokenizer` selects the vocabulary of every merge: "base", "union", or an expert's alias. `vocabulary` has further
    options of the vocabulary, such as the sources of embedding rows of single tokens (module
    `workers.models.vocabulary`). `alignments_dir` is the directory, or the URL of the object store, that has the
    alignments which recipes name (package `workers.alignments`); it is "" if there are no alignments. Files may be
    added to this directory while engines run. `modality` is the name of the kind of data that the models read (package
    `workers.models.modalities`).
    """

    base: ModelSource
    experts: tuple[ModelSource, ...]
    tokenizer: str = "base"
    vocabulary: Mapping[str, Any] = field(default_factory=dict, hash=False)
    alignments_dir: str = ""
    modality: str = "text"

    @property
    def models(self) -> tuple[ModelSource, ...]:
        return (self.base, *self.experts)

    @property
    def fingerprints(self) -> dict[str, str]:
        return {model.alias: model.fingerprint for model in self.models}

    @property
    def fingerprint(self) -> str:
        """Digest of the contents of all models, regardless of their names (aliases) and directories."""
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
    """Specification from which a replica builds an evaluation task.

    - `task`: an lm-eval name, the absolute path of a YAML file, or an inline JSONL task: {"file": absolute path,
      "prompt": jinja, "answer": jinja, "until": [...], "max_tokens": n}
    - `metric`, `filter`: one of the task's metrics and one of its filters; if `filter` is None, the task's first filter
      is used
    - `split`: a split of the task's data; with None, the task chooses the split
    - `num_fewshot`: the number of examples in a prompt; with None, the task chooses the number
    - `max_tokens`: the longest completion, in tokens, of an lm-eval task that generates; with None, the task chooses it
    - `until`: the strings at which a completion of an lm-eval task ends; with None, the task chooses them
    - `content`: a digest of the task's files, so that changed data is detected; None for a task with a registered name.
      For a YAML file it is "files:" and the digest of the file and of all files that it reads, or, in studies of
      earlier versions, the sha256 of the YAML file alone; for other data it is a sha256
    - `permutation_seed`: fixes the order of the samples: position i is the same sample in every replica and every study
    - `template`: a Jinja template of the prompts that replaces the task's own template; with None, the task's own
      template is used
    - `access`: limits the files that the task may use; None means no limit. The digest of the specification does not
      depend on `access`.
    """

    task: str | Mapping[str, Any]
    metric: str
    filter: str | None = None
    split: str | None = None
    num_fewshot: int | None = None
    content: str | None = None
    permutation_seed: int = 0
    access: FileAccess | None = field(default=None, compare=False)
    max_tokens: int | None = None
    template: str | None = None
    until: tuple[str, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        newer = {"max_tokens", "template", "until"}  # added after studies were stored; digests of these stay
        return {
            name: value
            for name, value in asdict(self).items()
            if name != "access" and not (name in newer and value is None)
        }

    @property
    def digest(self) -> str:
        return digest_of(self.to_json())


@dataclass(frozen=True)
class TaskInfo:
    """Facts about a built evaluation task, such as its number of samples.

    - `num_samples`: the number of samples
    - `higher_is_better`: whether larger values of the metric are better
    - `output_type`: lm-eval's output type, such as "generate_until" or "multiple_choice"
    - `num_truncated`: the number of prompts that were cut to the engine's option `max_model_len`
    - `groups`: the number of samples of each part of the task, such as one of its lm-eval tasks, or a class of images;
      every prefix of the scoring order contains all parts in proportion to these numbers
    - `filters`: the names of the filters, if the task, or one of the lm-eval tasks of which it consists, has several
      filters; otherwise empty
    - `categories`: for a task that consists of named categories, such as `mmlu` with `mmlu_stem`: the lm-eval tasks of
      each category
    - `confined_by`: the sandbox of the process that runs the task's own code; "" if the task has no code
    - `template`: the Jinja template of the prompts; "" if the prompts come from a function or a column of the data, or
      if the task consists of lm-eval tasks with different templates
    - `options`: the options of a multiple-choice task, if all samples have the same options; otherwise empty
    - `value_range`: the metric's lowest and highest value, if the task states them; otherwise None
    """

    num_samples: int
    higher_is_better: bool
    output_type: str
    num_truncated: int = 0
    groups: Mapping[str, int] = field(default_factory=dict)
    confined_by: str = ""
    filters: tuple[str, ...] = ()
    categories: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    template: str = ""
    options: tuple[str, ...] = ()
    value_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Span:
    """Range of adjacent samples of a task in its scoring order, to be scored for `objective`.

    The samples are at the positions `start` to `stop` - 1 of the task's permutation, which is the order in which its
    samples are scored.
    """

    objective: str
    task: TaskSpec
    start: int
    stop: int


@dataclass(frozen=True)
class ScoreRequest:
    """Request of a study to score a recipe on samples, which are given as spans (ranges of positions).

    Each objective has at most one span, because the result has one hash of prompts for each objective.

    `crashes` is the number of engines that have crashed on this request so far. If it is a number, the next crash is
    raised as EngineCrashed; if it is None, the scorer itself sends the request again after a crash. With at least one
    crash, a new replica first scores one sample with the base model, which shows whether the engine works at all.

    `trial` is the number of the trial whose samples are requested, for log lines; None if the request is for no trial.
    `traceparent` identifies the trace span that sends the request, as in the W3C header; None if the request is not
    traced.
    """

    study: str
    recipe: Recipe
    spans: tuple[Span, ...]
    crashes: int | None = None
    trial: int | None = field(default=None, compare=False)
    traceparent: str | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        ranges: dict[str, list[str]] = {}
        for span in self.spans:
            ranges.setdefault(span.objective, []).append(f"[{span.start}:{span.stop}]")
        for objective, found in ranges.items():
            if len(found) > 1:
                raise ValueError(
                    f"spans: objective {objective!r} has {len(found)} ranges of samples, {' and '.join(found)}; send a "
                    f"request for each range (study {self.study!r})"
                )

    @property
    def num_samples(self) -> int:
        return sum(span.stop - span.start for span in self.spans)


@dataclass(frozen=True)
class SampleResult:
    """Metric value and model response of one scored sample.

    - `document`: the sample's index in the task's data
    - `position`: the sample's index in the permutation, which is the order of scoring
    - `value`: the metric on this sample
    - `response`: the model's answer: the completion, or the log-probabilities of the options as JSON
    - `is_truncated`: whether the prompt was cut to the engine's option `max_model_len`
    - `tokens`: the token ids of each completion, including the token that ended it; None for a multiple-choice sample,
      and if token ids were not stored
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
    """An engine's report about the weights that it held while it scored samples.

    - `recipe_digest`: the digest of the recipe that the engine holds, which may differ from the requested recipe
    - `bank_fingerprint`: the fingerprint of the family whose source weights the engine holds
    - `prompts`: for each objective, the sha256 of the token ids of all its prompts that were scored, in order
    - `weights_checksum`: the checksum of the engine's parameters after the swap, which wrote the merge into the engine
    - `replica`, `swap_count`: the name of the engine's replica, and the number of merges that were written into it so
      far (swaps)
    - `engine`: a description of the engine: its program and dtype, the size and placement of the source weights, the
      part of the merge that was not computed on the engine's device, the tensors that every rank merged completely
      instead of only its share, and, if tasks have their own code, the sandbox of this code
    - `canaries`: the number of canaries (comparisons with transformers) that the engine had passed before it scored;
      the samples are regarded as checked once the engine has passed another canary
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
    """Result of a canary, which compares a replica's engine with transformers on fixed prompts.

    `canaries` is the number of canaries that the engine has passed so far. `skipped` is the reason why the last one
    could not be computed, or "" if the engine passed it.
    """

    replica: str
    canaries: int
    skipped: str = ""


@dataclass(frozen=True)
class ScoreResult:
    """Scored samples of one request, with the engine's report about its weights (evidence) and with timings.

    `timings_s` has seconds, keyed by name:

    - "wait": waiting until the replica had finished its earlier requests
    - "materialise": computing the merge
    - "swap": writing the merge into the engine
    - "score": scoring
    """

    samples: tuple[SampleResult, ...]
    evidence: Evidence
    timings_s: Mapping[str, float]

    @property
    def values(self) -> dict[str, dict[int, float]]:
        """The value of the metric on each sample, keyed first by objective and then by the sample's position."""
        found: dict[str, dict[int, float]] = {}
        for sample in self.samples:
            found.setdefault(sample.objective, {})[sample.position] = sample.value
        return found


@dataclass(frozen=True)
class SampleDifference:
    """A sample on which the engine's result differs from the reference by plain transformers.

    - `engine`, `reference`: the metric's value for the engine's answer, and its value for the answer of transformers
    - `what`: the part of the result that differs. "tokens": the completions have different tokens. "text": the
      completions have different text. "log-probabilities": log-probabilities differ by more than the tolerance.
      "value": only the metric's value differs.
    - `top2_gap`: the size of the difference, as a difference of log-probabilities. For "tokens", it is the largest
      amount by which a token of the engine's completion is less likely, for transformers, than the likeliest token in
      its place. For "text", it is the gap between the two tokens that are likeliest for transformers, where the texts
      begin to differ. For "log-probabilities" and "value", it is the difference between the engine's and transformers'
      log-probabilities.
    - `is_beyond`: whether the difference is too large to be explained by rounding
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
    """Comparison of stored samples of a recipe with results of plain transformers on the exported weights.

    - `num_samples`: the number of samples that were compared; 0 if nothing was verified
    - `num_equal`: the number of compared samples that are equal
    - `differences`: the samples that are not equal: the metric's value differs, the completion differs, or a
      log-probability differs by more than `tolerance`
    - `num_beyond`: the number of differences that rounding does not explain
    - `num_logprobs`: the number of compared log-probabilities: of options, and of the tokens of prompts and completions
    - `num_unstable`: the number of log-probabilities that differ by more than `tolerance` because small rounding errors
      change them much; `max_logprob_difference` does not include them
    - `max_logprob_difference`: the largest difference between two compared log-probabilities
    - `num_tokens`: the number of compared completion tokens
    - `num_without_tokens`: the number of samples that are stored without tokens; the texts of these samples were
      compared
    - `reason`: why some or all samples were not compared, or None
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
    num_unstable: int = 0

    @property
    def is_equal(self) -> bool:
        """Whether at least one sample was compared, and rounding explains every difference."""
        return self.num_samples > 0 and self.num_beyond == 0


@dataclass(frozen=True)
class GradientResult:
    """The losses of a merge on a minibatch, and the gradient of their weighted sum with respect to the coefficients.

    In the sum, each objective's loss has a given weight.

    - `losses`: the mean loss of each objective over the minibatch, divided by a number for the objective's task that
      makes losses comparable (module `evaluation.references`)
    - `num_samples`: the size of the minibatch
    - `seconds`: the time of the computation
    - `by_source`: the derivatives with respect to coefficients of single sources (`lambda` or `weight`), keyed by
      tensor and alias of the source
    - `shared`: the derivatives with respect to coefficients that all sources of a merge share, keyed by tensor and name
      of the coefficient
    - `layer_scales`: the derivatives with respect to the scales of layers, keyed by layer, if they were requested

    Tensors of merges without such coefficients are not listed.
    """

    losses: Mapping[str, float]
    num_samples: int
    seconds: float
    by_source: Mapping[str, Mapping[str, float]]
    shared: Mapping[str, Mapping[str, float]]
    layer_scales: Mapping[int, float] = field(default_factory=dict)


SampleTexts: TypeAlias = tuple[tuple[str, str | None], ...]
"""Prompt and right answer of adjacent samples; the answer is None if the task does not state it."""


SamplePictures: TypeAlias = tuple[bytes | None, ...]
"""Small pictures (WebP files) of adjacent samples; None for a sample whose image cannot be read."""


class Scorer(Protocol):
    """Interface for scoring recipes; the classes ServeScorer (Ray Serve replicas) and FakeScorer (tests) implement it.

    Implementations are picklable and thread-safe. The method `score` may be called again with the same request after a
    failure. The only side effect of the method `score` is that an engine holds another recipe.
    """

    def score(self, request: ScoreRequest) -> ScoreResult:
        """Score samples (one chunk) with the merge of a recipe.

        Raises:
            TrialFailed: The recipe's merge cannot be scored.
            EngineUnavailable: No replica works.
            EngineFault: A replica's engine failed a check.
            EngineCrashed: An engine crashed, and the caller counts crashes (the request's field `crashes` is not None).
        """
        ...

    def describe(self, tasks: tuple[TaskSpec, ...]) -> tuple[TaskInfo, ...]:
        """Build evaluation tasks, and return facts about each of them, in order.

        Raises InvalidTask if a task cannot be built.
        """
        ...

    def sample_texts(self, task: TaskSpec, start: int, stop: int) -> SampleTexts:
        """Return the prompt and the right answer of the samples [start, stop) of a task, in the order of scoring.

        The prompt is the text that engines get, with the system prompt and the chat template if the engine's options
        have them. The right answer is None if the task does not state it as text. The result is shorter if the task has
        fewer than `stop` samples. An engine that has scored the task does not build it again.

        Raises:
            InvalidTask: The task cannot be built.
            EngineUnavailable: No replica works.
        """
        ...

    def sample_pictures(self, task: TaskSpec, start: int, stop: int) -> SamplePictures:
        """Return small pictures of the samples [start, stop) of a task, in the order of scoring.

        The task must be of a modality whose samples have pictures (field `Modality.has_pictures`).

        Raises:
            InvalidTask: The task cannot be built, or its samples have no pictures.
            EngineUnavailable: No replica works.
        """
        ...

    def verify(self, recipe: Recipe, samples: tuple[SampleResult, ...], spans: tuple[Span, ...]) -> VerificationReport:
        """Score samples again with plain transformers on the recipe's exported checkpoint, and compare with `samples`.

        `spans` are the ranges of samples to compare, and `samples` are the engine's stored results for them. If nothing
        can be compared, the report has 0 samples and the reason.
        """
        ...

    def is_starting(self) -> bool:
        """Whether no engine can score yet but at least one is being started."""
        ...

    def check(self) -> tuple[CanaryReport, ...]:
        """Run a canary (comparison with transformers on fixed prompts) in each engine that scored since its last check.

        Raises EngineFault if an engine does not reproduce the log-probabilities of transformers.
        """
        ...

    def statistics(self) -> Mapping[str, Any]:
        """Counts, times and memory of the engines of all replicas, as a JSON document.

        The document contains the numbers of starts of engines and of merges written into them (swaps), the seconds of
        each swap (`swap_s`) and of work (`busy_s`), and the placement and bytes of the source weights.
        """
        ...
