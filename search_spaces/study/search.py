"""Sections `search_space` and `search` of a study file: the space, the searcher and its options, the preferences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Union

import numpy as np
from pydantic import Discriminator, Field, Tag

from search_spaces import preferences
from search_spaces.searchers import SEARCHERS
from search_spaces.section import Line, Name, Section
from search_spaces.spaces import DEFAULT_KIND, SPACES
from search_spaces.spaces.base import SpaceSection
from search_spaces.study.models import AnotherStudy
from search_spaces.study.validation import UNKNOWN_KIND

__all__ = [
    "DEFAULT_SPACE",
    "MAX_PREFERENCES",
    "GradientOptions",
    "PolicyOptions",
    "Preferences",
    "Search",
    "SearchSpaceSpec",
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


# Preference vectors of one study.
MAX_PREFERENCES = 1000

# The stream of random numbers that preference vectors are drawn from.
PREFERENCES = 3


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
