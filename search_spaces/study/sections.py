"""The sections of a study file as frozen, validated models: types, ranges, defaults.

Contradictions between fields are found in `checks`; `file` reads a study.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import numpy as np
from pydantic import Discriminator, Field, Tag

from search_spaces import fidelity as ladders
from search_spaces import preferences
from search_spaces.objectives import Cost
from search_spaces.searchers import SEARCHERS
from search_spaces.section import Section
from search_spaces.spaces import DEFAULT_KIND, SPACES
from search_spaces.spaces.base import SpaceSection
from search_spaces.study.validation import UNKNOWN_KIND

__all__ = [
    "DEFAULT_SPACE",
    "LINE",
    "MAX_PREFERENCES",
    "NAME",
    "AnotherStudy",
    "AnyObjective",
    "Chained",
    "CostSpec",
    "Engine",
    "EngineOptions",
    "Fidelity",
    "FromStudy",
    "GradientOptions",
    "InlineTask",
    "Limits",
    "Line",
    "Models",
    "Name",
    "ObjectiveSpec",
    "PolicyOptions",
    "Preferences",
    "Search",
    "SearchSpaceSpec",
    "Verify",
]

NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
LINE = r"^[^\x00-\x1f\x7f]+$"

Name = Annotated[str, Field(pattern=NAME)]
Line = Annotated[str, Field(pattern=LINE)]

Rungs = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]


class AnotherStudy(Section):
    """A run in a directory, or a study on the same server."""

    dir: Line | None = None
    """The directory of a run (`mergesearch run STUDY --out DIR`)."""
    id: Line | None = None
    """The id of a study on the server."""


class FromStudy(AnotherStudy):
    """A merged model of another study."""

    trial: Literal["best"] | Annotated[int, Field(ge=0)] = "best"
    """Its trial's number, or best. It stays the one that it was when this study was created."""


class Chained(Section):
    """An expert that is a merge of another study."""

    from_study: FromStudy


def _tag_of_expert(value: object) -> str | None:
    return "<name>" if isinstance(value, str) else "<from_study>" if isinstance(value, Mapping | Chained) else None


if TYPE_CHECKING:
    Expert = str | Chained
else:
    Expert = Annotated[
        Annotated[Line, Tag("<name>")] | Annotated[Chained, Tag("<from_study>")],
        Discriminator(
            _tag_of_expert,
            custom_error_type="union",
            custom_error_message="give a directory, a hub id or {from_study: {dir: DIR, trial: best}}",
        ),
    ]


class Models(Section):
    base: Line
    """The base model: a directory, or a hub id, which may name a tag or commit: owner/name@commit."""
    experts: Annotated[dict[Name, Expert], Field(min_length=1)]
    """Models fine-tuned from the base, PEFT LoRA adapters to it, or merges of other studies: alias to directory, hub id
    or {from_study: {dir: DIR, trial: best}}. The base's alias is "base"."""
    tokenizer: Name = "base"
    """Whose tokens the merges have, where models have others: base, an expert's alias, or union, which is the base's
    and what experts have added. Embeddings are aligned by the tokens' strings."""

    path_of: FromStudy | None = None
    """The base and the experts get the layers of this merge's path, in its order."""

    @property
    def chained(self) -> dict[str, FromStudy]:
        """The experts that are merges of other studies."""
        return {alias: e.from_study for alias, e in self.experts.items() if isinstance(e, Chained)}

    @property
    def named(self) -> dict[str, str]:
        """The experts that are directories or hub ids: all, once those of other studies have been exported
        (`service.studies.chains`)."""
        return {alias: expert for alias, expert in self.experts.items() if isinstance(expert, str)}


def _tag_of_space(value: object) -> str | None:
    kind = value.get("kind", DEFAULT_KIND) if isinstance(value, Mapping) else getattr(value, "kind", None)
    return f"<{kind}>" if isinstance(kind, str) and kind in SPACES else None


if TYPE_CHECKING:
    SearchSpaceSpec = SpaceSection
else:
    SearchSpaceSpec = Annotated[
        Union[tuple(Annotated[section, Tag(f"<{kind}>")] for kind, section in SPACES.items())],  # noqa: UP007
        Discriminator(_tag_of_space, custom_error_type=UNKNOWN_KIND, custom_error_message="unknown kind of space"),
    ]

DEFAULT_SPACE: SearchSpaceSpec = SPACES[DEFAULT_KIND](kind=DEFAULT_KIND)


if TYPE_CHECKING:
    Algorithm = str
else:
    Algorithm = Literal[tuple(SEARCHERS)]


# Preference vectors of one study.
MAX_PREFERENCES = 1000

# The stream of random numbers that preference vectors are drawn from.
PREFERENCES = 3


DEFAULT_ERROR_RATE = 0.05


class GradientOptions(Section):
    steps: Annotated[int, Field(ge=1, le=100_000)] = 48
    """Gradients of one descent."""
    batch: Annotated[int, Field(ge=1)] = 48
    """Samples of one gradient, shared equally by the objectives; each is charged as three scored samples."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.2
    """Adam's, at the first step of a descent; it falls linearly to almost 0."""
    warm_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """Gradients of each descent after the first, at most `steps`. Default: a quarter of `steps`."""
    warm_rate: Annotated[float, Field(gt=0)] = 0.6
    """The learning rate at their first step, in units of `learning_rate`; it falls in the same way."""
    points: Annotated[int, Field(ge=1, le=1000)] = 4
    """How many points of the descents become trials: shared equally, evenly spaced in each, whose end is always one."""


class PolicyOptions(Section):
    start: AnotherStudy | None = None
    """Begin with the policies of this study, as it has them when this one begins. Default: with new ones."""
    learns: bool = True
    """false: the policies of `start` propose all paths as they are."""
    policy: Literal["per_preference", "conditioned"] = "per_preference"
    """per_preference: a policy for each preference vector; conditioned: one that has the vector as an input."""
    knows_models: bool = True
    """Whether models have embeddings of their own; false: they are known by the statistics of their layers alone, so
    that the policy can propose paths through other models of as many layers."""
    episodes: Annotated[int, Field(ge=2, le=10_000)] = 16
    """Episodes, that is trials, of one iteration, after which a policy is improved."""
    warm_up: Annotated[int, Field(ge=1, le=1000)] = 1
    """Iterations of each policy in which all paths are drawn at random, before it is improved for the first time."""
    neighbours: Annotated[int, Field(ge=1)] = 6
    """Of so many steps nearest to the proto-action the best is taken: Wolpertinger's k."""
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.03
    """How often one of these steps is taken at random instead."""
    explored: Annotated[int, Field(ge=0, le=100_000)] = 10
    """Iterations of each policy after those over which fewer and fewer paths are drawn at random, in the end none."""
    length_penalty: Annotated[float, Field(ge=0)] = 0.001
    """What each layer of a path takes off its outcome: beta_1."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Adam's."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 12
    """How often each iteration is learned from."""
    mini_batches: Annotated[int, Field(ge=1)] = 4
    """Into how many parts its episodes are divided for that."""
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.1
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.99
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.002


class DirichletOptions(Section):
    count: Annotated[int, Field(ge=1, le=MAX_PREFERENCES)]
    """How many vectors are drawn, by the study's seed."""
    alpha: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    """1: uniform over all vectors; above, nearer to equal weights; below, nearer to single objectives."""


class Preferences(Section):
    """One of the three."""

    lattice: Annotated[int, Field(ge=1, le=MAX_PREFERENCES)] | None = None
    """All vectors whose weights are multiples of 1/lattice."""
    corners: bool = True
    """false: without the vectors of the lattice that are one objective alone, where experts are good already."""
    dirichlet: DirichletOptions | None = None
    """Vectors drawn at random."""
    vectors: Annotated[tuple[dict[Name, float], ...], Field(min_length=1, max_length=MAX_PREFERENCES)] | None = None
    """Written out: weights by objective, which sum to one; those left out are 0."""

    def size(self, num_objectives: int) -> int:
        """How many vectors there are."""
        if self.lattice is not None:
            return preferences.lattice_size(num_objectives, divisions=self.lattice, corners=self.corners)
        return self.dirichlet.count if self.dirichlet is not None else len(self.vectors or ())

    def weights(self, objectives: Sequence[str], *, seed: int) -> tuple[tuple[float, ...], ...]:
        """The vectors, with weights in the order of `objectives`. Raises InvalidPreference for one that is none."""
        if self.vectors is not None:
            return tuple(preferences.preference_vector(vector, objectives=objectives) for vector in self.vectors)
        if self.lattice is not None:
            found = preferences.lattice(len(objectives), divisions=self.lattice, corners=self.corners)
        else:
            options = self.dirichlet or DirichletOptions(count=1)
            rng = np.random.default_rng((seed, PREFERENCES))
            found = preferences.dirichlet(len(objectives), num_vectors=options.count, rng=rng, alpha=options.alpha)
        return tuple(tuple(map(float, vector)) for vector in found)


class Search(Section):
    algorithm: Algorithm = "auto"
    gradient: GradientOptions = GradientOptions()
    """Of algorithm: gradient, which auto may choose."""
    hm3: PolicyOptions = PolicyOptions()
    """Of algorithm: hm3."""
    max_trials: Annotated[int, Field(ge=1, le=1_000_000)] = 60
    """Configurations the searcher proposes; sources and published recipes come on top."""
    constraints: tuple[Line, ...] = ()
    """Bounds that a merge must keep to: "text >= base - 0.01", "math >= 0.5"."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    preferences: Preferences | None = None
    """How much each objective matters: one descent or policy for each vector. Without it, one at equal weights."""
    fit_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of algorithm: gradient: the share of each objective's samples for gradients; below 1 the others score trials."""

    def num_scored(self, num_samples: int) -> int:
        """How many of an objective's samples trials are scored on: the first ones in the order of the study's seed; the
        others are fitted. 0 or `num_samples` where `fit_share` leaves one of the two parts without a sample."""
        return num_samples if self.fit_share == 1 else num_samples - round(self.fit_share * num_samples)


class Fidelity(Section):
    scheduler: ladders.Scheduler = "racing"
    """racing: a trial goes on while no better one is ahead of it on the same samples; hyperband: brackets promote when
    they are full; asha: rungs promote with every result; none: one rung."""
    min_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of every objective at the first rung."""
    max_samples: Annotated[int, Field(ge=1)] | None = None
    """Samples of every objective at the last rung, the full budget."""
    eta: Annotated[int, Field(ge=2)] | None = None
    """One configuration in eta is promoted, to about eta times the samples. Default: 3."""
    rungs: Rungs | None = None
    """The rungs written out, instead of min_samples and max_samples."""
    rule: Literal["behind", "bound"] = "behind"
    """When scheduler: racing stops a trial. behind: as soon as a better one is ahead of it; bound: when it is behind by
    a bound that holds at all looks."""
    error_rate: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Of rule: bound: how likely a trial of the study is stopped wrongly. Default: 0.05."""

    @property
    def bound_error_rate(self) -> float | None:
        """The error rate of rule: bound, or its default; None for another rule."""
        if self.rule != "bound":
            return None
        return DEFAULT_ERROR_RATE if self.error_rate is None else self.error_rate

    @property
    def reduction_factor(self) -> int:
        """eta, or its default."""
        return 3 if self.eta is None else self.eta

    @property
    def rung_samples(self) -> tuple[int, ...] | None:
        """Samples at each rung of an objective that defines none itself; None: one rung with all samples of the task.

        Raises ValueError if the section does not define them."""
        if self.rungs is not None:
            return self.rungs
        if self.scheduler == "none":
            return None if self.max_samples is None else (self.max_samples,)
        if self.min_samples is None or self.max_samples is None:
            raise ValueError(
                f"{self.scheduler} needs min_samples and max_samples, or rungs; "
                "write `scheduler: none` to score every trial on all samples"
            )
        return ladders.rungs(self.min_samples, self.max_samples, self.reduction_factor)

    def rungs_of(self, objective: ObjectiveSpec) -> tuple[int | None, ...]:
        """Samples of an objective at each rung; (None,): one rung with all samples of its task.

        Raises ValueError as `rung_samples` does."""
        return objective.rungs or self.rung_samples or (None,)


class InlineTask(Section):
    """Samples in a JSONL file: the whole greedy completion must equal the answer, white space around it aside."""

    file: Line
    prompt: Annotated[str, Field(min_length=1)] = "{{prompt}}"
    """Jinja template over a line's keys."""
    answer: Annotated[str, Field(min_length=1)] = "{{answer}}"
    until: tuple[Annotated[str, Field(min_length=1)], ...] = ("\n",)
    """A completion ends at the first of these, or at the end of text."""
    max_tokens: Annotated[int, Field(ge=1)] = 64


def _tag_of_task(value: object) -> str | None:
    return "<name>" if isinstance(value, str) else "<inline>" if isinstance(value, Mapping | InlineTask) else None


def _tag_of_verify(value: object) -> str | None:
    return "<off>" if value is False else "<on>" if isinstance(value, Mapping | Verify) else None


def _tag_of_template(value: object) -> str | None:
    return "<bool>" if isinstance(value, bool) else "<name>" if isinstance(value, str) else None


def _one_of(tag_of: Any, accepted: str) -> Discriminator:
    return Discriminator(tag_of, custom_error_type="union", custom_error_message=f"give {accepted}")


class ObjectiveSpec(Section):
    name: Name
    task: Annotated[
        Annotated[Line, Tag("<name>")] | Annotated[InlineTask, Tag("<inline>")],
        _one_of(_tag_of_task, "the name of an lm-eval task, a YAML file or {file: data.jsonl}"),
    ]
    """An lm-eval task's name, an lm-eval YAML file, or a JSONL file written inline."""
    metric: Line
    filter: Line | None = None
    """Which of the task's filters; needed where it has several."""
    split: Line | None = None
    num_fewshot: Annotated[int, Field(ge=0)] | None = None
    direction: Literal["maximize", "minimize"] | None = None
    """Default: as the task's metric says."""
    range: tuple[float, float] | None = None
    """The metric's lowest and highest value, where these are not 0 and 1."""
    rungs: Rungs | None = None
    """Samples of this objective at each rung, where the numbers of fidelity do not fit; as many rungs."""


class CostSpec(Section):
    """An objective that needs no data: less is better, and the value follows from the recipe."""

    name: Name
    cost: Cost
    """layers: how many layers the merge has; parameters: how many parameters. In spaces that change them."""


def _tag_of_objective(value: object) -> str:
    is_cost = isinstance(value, CostSpec) or (isinstance(value, Mapping) and "cost" in value)
    return "<cost>" if is_cost else "<task>"


if TYPE_CHECKING:
    AnyObjective = ObjectiveSpec | CostSpec
else:
    AnyObjective = Annotated[
        Annotated[ObjectiveSpec, Tag("<task>")] | Annotated[CostSpec, Tag("<cost>")], Discriminator(_tag_of_objective)
    ]


class Verify(Section):
    trials: Annotated[int, Field(ge=1)] = 3
    samples: Annotated[int, Field(ge=1)] = 16


class Engine(Section):
    backend: Literal["vllm"] = "vllm"
    replicas: Annotated[int, Field(ge=1)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """auto: bfloat16 on GPU, float32 on CPU."""
    max_model_len: Annotated[int, Field(ge=1)] = 2048
    """Tokens of a prompt and its completion together."""
    add_bos_token: bool | None = None
    """Default: as the model's own tokenizer does."""
    chat_template: Annotated[
        Annotated[bool, Tag("<bool>")] | Annotated[Line, Tag("<name>")],
        _one_of(_tag_of_template, "true, false or the name of a template"),
    ] = False
    system_prompt: str | None = None
    rank_cache: bool = False
    """Keep for DELLA how the magnitudes of each expert's rows are ranked: two bytes of memory for each of its
    parameters, and no sorting for every candidate."""
    verify: Annotated[
        Annotated[Verify, Tag("<on>")] | Annotated[Literal[False], Tag("<off>")],
        _one_of(_tag_of_verify, "false or {trials: 3, samples: 16}"),
    ] = Verify()
    """How many trials are scored again, on how many samples, by plain transformers; false: none."""

    @property
    def options(self) -> EngineOptions:
        """What each engine is started with."""
        return EngineOptions(**{name: value for name, value in self if name not in NOT_OF_ONE_ENGINE})


# Fields of the section that do not concern one engine: how many there are, and what is verified after the search.
NOT_OF_ONE_ENGINE = frozenset({"replicas", "verify"})


class EngineOptions(Engine):
    """How one engine is started: the options of the study file's `engine` section, and those that only programs set.

    A field added to `Engine` becomes an option of engines without any other declaration."""

    threads: int = 0
    """Threads for arithmetic on CPU; 0: all cores but one."""
    max_layers: int = 0
    """Layers of the longest merge, for an engine whose merges may have any number and order of layers; 0: every merge
    has as many layers as the base."""
    seed: int = 0
    """vLLM's seed."""

    def document(self) -> dict[str, Any]:
        """The options by name, as plain data. Engines with equal documents are interchangeable."""
        excluded = NOT_OF_ONE_ENGINE if self.max_layers else NOT_OF_ONE_ENGINE | {"max_layers"}
        return self.model_dump(exclude=set(excluded))


class Limits(Section):
    max_gpu_hours: Annotated[float, Field(gt=0)] | None = None
    max_wall_clock_s: Annotated[float, Field(gt=0)] | None = None
    max_layers: Annotated[int, Field(ge=1)] | None = None
    """Layers a merged model may have. Where the space changes layers, no merge has more; default there: 1.25 times the
    sources'."""
