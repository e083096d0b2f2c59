"""Sections `search_space` and `search` of a study file: the space, the searcher and its options, the preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from search_spaces import preferences
from search_spaces.baselines import ALL, BaselineGroup
from search_spaces.searchers import SEARCHERS
from search_spaces.section import Line, Name, Section, one_of
from search_spaces.spaces import DEFAULT_KIND, SPACES
from search_spaces.spaces.base import SpaceSection
from search_spaces.study.models import AnotherStudy
from search_spaces.study.validation import UNKNOWN_KIND

__all__ = [
    "DEFAULT_SPACE",
    "MAX_PREFERENCES",
    "GivenRecipe",
    "GradientOptions",
    "PolicyOptions",
    "Preferences",
    "RefinementOptions",
    "Search",
    "SearchSpaceSpec",
    "SmacOptions",
    "WarmStart",
]


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


# The largest number of preference vectors of one study.
MAX_PREFERENCES = 1000

# The stream of random numbers that preference vectors are drawn from.
PREFERENCES = 3


def _tag_of_baselines(value: object) -> str | None:
    return "<group>" if isinstance(value, str) else "<names>" if isinstance(value, list | tuple) else None


# Defaults of a descent on the entropy of predictions: those of AdaMerging (Yang et al., "AdaMerging: Adaptive Model
# Merging for Multi-Task Learning", ICLR 2024, arXiv 2310.02575, section 4, and the authors' code).
ADAMERGING: Mapping[str, Any] = {"steps": 500, "learning_rate": 1e-3, "schedule": "constant", "start": 0.3}


class GradientOptions(Section):
    loss: Literal["auto", "cross_entropy", "entropy"] = "auto"
    """Loss that descents minimise.

    - cross_entropy: the cross-entropy of right answers
    - entropy: the entropy of predictions, which needs no labels; only for tasks of images. The defaults of `steps`,
      `learning_rate`, `schedule` and `start` are then the values of AdaMerging.
    - auto: cross_entropy for tasks with right answers, entropy for tasks without
    """
    steps: Annotated[int, Field(ge=1, le=100_000)] = 48
    """The number of gradients of one descent. With loss: entropy, 500 by default."""
    batch: Annotated[int, Field(ge=1)] = 48
    """Samples of one gradient, shared equally by the objectives; each costs as much as three scored samples."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.2
    """Adam's learning rate at the first step of a descent. With loss: entropy, 0.001 by default."""
    schedule: Literal["linear", "constant"] = "linear"
    """The learning rates of later steps. linear: they fall linearly to almost 0; constant: they are that of the first.
    With loss: entropy, constant by default.
    """
    start: float | None = None
    """The coefficient of every expert at which the first descent starts, in spaces with coefficients of experts; it is
    moved into the range of the space. Default: that of the space, the average of the experts; with loss: entropy, 0.3.
    """
    warm_steps: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """The number of gradients of each descent after the first, at most `steps`. Default: a quarter of `steps`."""
    warm_rate: Annotated[float, Field(gt=0)] = 0.6
    """The learning rate at the first step of each descent after the first, relative to `learning_rate`."""
    points: Annotated[int, Field(ge=1, le=1000)] = 4
    """How many points of the descents become trials. Each descent has an equal share, evenly spaced and including its
    end.
    """

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_loss(cls, given: Any) -> Any:
        is_entropy = isinstance(given, Mapping) and given.get("loss") == "entropy"
        return {**ADAMERGING, **given} if is_entropy else given


class RefinementOptions(Section):
    """Options of the refinement: after the search, gradient descent optimises the merge coefficients of the best paths.

    A path is a sequence of layers of several models. The paths of the Pareto front are refined.
    """

    paths: Annotated[int, Field(ge=1, le=1000)] = 8
    """The largest number of paths that are refined: those of the front, the best first."""
    steps: Annotated[int, Field(ge=1, le=100_000)] = 48
    """The number of gradients along each path."""
    batch: Annotated[int, Field(ge=1)] = 48
    """Samples of one gradient, shared equally by the objectives; each costs as much as three scored samples."""
    learning_rate: Annotated[float, Field(gt=0)] = 0.05
    """Adam's learning rate at the first step along a path; it falls linearly to almost 0."""


class SmacOptions(Section):
    surrogate: Literal["all_rungs", "highest_budget", "auto"] = "all_rungs"
    """The results from which the forest learns. all_rungs: all, with the fidelity as one more feature; highest_budget:
    those at the highest rung that has enough, as in SMAC; auto: the one of the two that predicts results at the full
    budget better, which the study notes.
    """
    random_share: Annotated[float, Field(ge=0, le=1)] = 0.1
    """The share of proposals that are drawn at random, so that no region is excluded forever."""
    acquisition: Literal["ei", "log_ei"] = "ei"
    """What a proposal maximises. ei: expected improvement; log_ei: the same for a forest of logarithms of costs."""


class PolicyOptions(Section):
    start: AnotherStudy | None = None
    """The study whose trained policies this study starts with, as they are when this study begins. Default: new
    policies.
    """
    learns: bool = True
    """Whether the policies are trained; false: the policies of `start` propose all paths and do not change."""
    policy: Literal["per_preference", "conditioned"] = "per_preference"
    """How policies depend on the preference vector. per_preference: each vector has a policy of its own; conditioned:
    one policy has the vector as an input.
    """
    knows_models: bool = True
    """Whether the policy has a learned embedding for each model; false: it knows models by the statistics of their
    layers only, so it can propose paths through other models with as many layers.
    """
    episodes: Annotated[int, Field(ge=2, le=10_000)] = 16
    """The number of episodes (trials) of one iteration, after which a policy is updated."""
    warm_up: Annotated[int, Field(ge=1, le=1000)] = 1
    """The number of iterations of each policy in which all paths are random, before its first update."""
    neighbours: Annotated[int, Field(ge=1)] = 6
    """The number of steps nearest to the proto-action among which the best is taken: Wolpertinger's k."""
    exploration: Annotated[float, Field(ge=0, le=1)] = 0.03
    """The probability that a step is drawn from the nearest `neighbours` at random instead of taking the best."""
    explored: Annotated[int, Field(ge=0, le=100_000)] = 10
    """The number of iterations of each policy, after the warm-up, over which the share of random paths decays to zero.
    """
    scalarisation: Literal["weighted_sum", "tchebycheff"] = "weighted_sum"
    """How the objectives of a path become one number for a preference vector. weighted_sum: their weighted sum;
    tchebycheff: the largest weighted distance from the best known values, which reaches every point of a front.
    """
    elite_share: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The share of episodes, once results are known, whose paths are mutants of the best known paths for the preference
    vector; 0: policies and random draws alone.
    """
    archive: Annotated[int, Field(ge=1, le=1000)] = 32
    """The number of best known paths of each preference vector whose mutants are proposed."""
    avoids_repeats: bool = True
    """Whether a path that was proposed before is replaced by a new one with few changes."""
    restart_after: Annotated[int, Field(ge=1, le=100_000)] | None = None
    """The number of iterations of a policy without a better path for any of its preference vectors after which its
    policy network starts anew; its value network does not. Default: never.
    """
    length_penalty: Annotated[float, Field(ge=0)] = 0.001
    """The reduction of a path's reward for each of its layers: beta_1."""
    learning_rate: Annotated[float, Field(gt=0)] = 3e-3
    """Adam's learning rate."""
    epochs: Annotated[int, Field(ge=1, le=1000)] = 12
    """The number of passes over an iteration's episodes in one update."""
    mini_batches: Annotated[int, Field(ge=1)] = 4
    """The number of mini-batches into which an iteration's episodes are divided."""
    action: Literal["auto", "categorical", "wolpertinger"] = "wolpertinger"
    """What a policy draws for each step of a path. categorical: one of the allowed steps; wolpertinger: a point among
    the embeddings of steps, near which the value network chooses; auto: categorical where at most 32 steps are allowed.
    """
    target_kl: Annotated[float, Field(gt=0)] = 0.02
    """The KL divergence from the policy at the start of an update, in nats per step, at which the policy network stops
    learning from an iteration.
    """
    clip: Annotated[float, Field(gt=0, lt=1)] = 0.1
    gamma: Annotated[float, Field(ge=0, le=1)] | None = None
    """The discount of the outcome for each step that is left. Default: 1, no discount; 0.99 in studies of version 1 of
    the searcher.
    """
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 0.95
    value_coefficient: Annotated[float, Field(ge=0)] = 0.5
    entropy_coefficient: Annotated[float, Field(ge=0)] = 0.002


class DirichletOptions(Section):
    count: Annotated[int, Field(ge=1, le=MAX_PREFERENCES)]
    """The number of preference vectors, drawn with the study's seed."""
    alpha: Annotated[float, Field(ge=0.01, le=1000)] = 1.0
    """The concentration of the Dirichlet distribution. 1: uniform over all preference vectors; larger: nearer to equal
    weights; smaller: nearer to single objectives.
    """


class Preferences(Section):
    """The study's preference vectors: either a lattice, random vectors, or a list of vectors.

    A preference vector has a weight for each objective; the weights sum to one.
    """

    lattice: Annotated[int, Field(ge=1, le=MAX_PREFERENCES)] | None = None
    """All preference vectors whose weights are multiples of 1/lattice."""
    corners: bool = True
    """Whether the lattice includes the vectors that weight one objective alone, where experts are good already."""
    interior: bool = False
    """Whether the lattice leaves out all vectors with a weight of 0, which say nothing about one of the objectives."""
    dirichlet: DirichletOptions | None = None
    """Preference vectors drawn at random."""
    vectors: Annotated[tuple[dict[Name, float], ...], Field(min_length=1, max_length=MAX_PREFERENCES)] | None = None
    """A list of preference vectors: weights by objective that sum to one; objectives that are left out have weight 0.
    """

    @property
    def _left_out(self) -> dict[str, bool]:
        return {"corners": self.corners, "interior": self.interior}

    def size(self, num_objectives: int) -> int:
        """The number of preference vectors (weights of the objectives) in a study with `num_objectives` objectives."""
        if self.lattice is not None:
            return preferences.lattice_size(num_objectives, divisions=self.lattice, **self._left_out)
        return self.dirichlet.count if self.dirichlet is not None else len(self.vectors or ())

    def weights(self, objectives: Sequence[str], *, seed: int) -> tuple[tuple[float, ...], ...]:
        """The study's preference vectors, each with the weights in the order of `objectives`.

        Random vectors are drawn with `seed`. Raises InvalidPreference if the weights of a listed vector are not valid.
        """
        if self.vectors is not None:
            return tuple(preferences.preference_vector(vector, objectives=objectives) for vector in self.vectors)
        if self.lattice is not None:
            found = preferences.lattice(len(objectives), divisions=self.lattice, **self._left_out)
        else:
            options = self.dirichlet or DirichletOptions(count=1)
            rng = np.random.default_rng((seed, PREFERENCES))
            found = preferences.dirichlet(len(objectives), num_vectors=options.count, rng=rng, alpha=options.alpha)
        return tuple(tuple(map(float, vector)) for vector in found)


class WarmStart(AnotherStudy):
    """An earlier study whose results the searcher uses from its first proposal on."""

    rungs: Literal["all", "full"] = "all"
    """The results that are used: of trials at all rungs that they reached, or at the full budget only."""


class GivenRecipe(Section):
    """A merge that is scored without a search: a recipe document or a mergekit configuration."""

    name: Line | None = None
    """The merge's name in tables. Default: that of its file, or of the file's folder for a `recipe.json`."""
    file: Line | None = None
    """A recipe.json of an export, or a mergekit configuration."""
    recipe: dict[str, Any] | None = None
    """The content of a recipe.json or of a mergekit configuration, in place of `file`."""

    @property
    def label(self) -> str:
        """The merge's name in tables: the option `name`, or a name made from the option `file`."""
        if self.name is not None or self.file is None:
            return self.name or "recipe"
        path = PurePath(self.file)
        return path.parent.name if path.name == "recipe.json" and path.parent.name else path.stem


class Search(Section):
    algorithm: Algorithm = "auto"
    gradient: GradientOptions = GradientOptions()
    """Options of algorithm: gradient, which auto may choose."""
    smac: SmacOptions = SmacOptions()
    """Options of algorithm: smac, which auto may choose."""
    hm3: PolicyOptions = PolicyOptions()
    """Options of algorithm: hm3."""
    max_trials: Annotated[int, Field(ge=1, le=1_000_000)] = 60
    """The number of configurations that the searcher proposes; baselines are not counted."""
    baselines: Annotated[
        Annotated[BaselineGroup, Tag("<group>")] | Annotated[tuple[Line, ...], Field(min_length=1), Tag("<names>")],
        one_of(_tag_of_baselines, "none, sources, published, m3, all, or a list of baselines"),
    ] = ALL
    """The merges that are scored at full budget before the search: none, sources (base and experts), published
    (recipes), all (both), m3 (the grids that M3 was compared with), or a list of these groups and of single ones:
    [base, "expert:math", "task arithmetic 0.3"].
    """
    recipes: tuple[GivenRecipe, ...] = ()
    """Recipes that are scored in place of a search, for tables of given merges: `{file: recipe.json}`,
    `{file: mergekit.yml, name: ties}` or `{name: ties, recipe: {...}}`. Nothing is proposed, unless `recipes_only` is
    false.
    """
    recipes_only: bool = True
    """Whether a study with `recipes` scores them in place of a search. If false, the recipes are scored at full budget
    before the search, and compared with the merges that it proposes.
    """
    constraints: tuple[Line, ...] = ()
    """Bounds that a merge must meet: "text >= base - 0.01", "math >= 0.5"."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    max_staleness: Annotated[int, Field(ge=1, le=1_000_000)] | None = None
    """How many trials proposals may run ahead of results, which keeps replicas busy: proposal n does not wait for, and
    does not know, the results of the last `max_staleness` trials before it. Default: 6 for each replica, less 1; half
    an iteration or more for a policy. The study keeps the number that it was created with.
    """
    warm_start: WarmStart | None = None
    """An earlier study of the same models, search space and objectives, whose results the searcher knows from its
    first proposal on. They are copied when this study begins, and are no trials of this study. Default: none.
    """
    preferences: Preferences | None = None
    """Weights of the objectives; each vector has its own descent or policy. Default: one vector of equal weights."""
    fit_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With algorithm: gradient, the share of each objective's samples that gradients use; below 1, trials are scored on
    the other samples.
    """
    refinement: RefinementOptions | None = None
    """Whether, and how, the coefficients along the paths of the front are learned by gradients after the search, in the
    space hm3. Each refined path is a trial in addition to `max_trials`. Default: they are not learned.
    """

    @property
    def proposes(self) -> bool:
        """Whether a searcher proposes merges; False if the study scores given recipes only."""
        return not (self.recipes and self.recipes_only)

    @property
    def num_proposals(self) -> int:
        """Number of configurations to propose at most: the field `max_trials`, or 0 in a study without a search."""
        return self.max_trials if self.proposes else 0

    def num_scored(self, num_samples: int) -> int:
        """Number of an objective's samples that are scored for a trial, out of `num_samples`.

        With the option `fit_share` below 1, this share of the samples is used for gradients only, and the others are
        scored; after rounding, one of the two parts may be empty. With the value 1, all samples are used for both. The
        scored samples are the first ones in an order that the study's seed determines.
        """
        return num_samples if self.fit_share == 1 else num_samples - round(self.fit_share * num_samples)
