"""The search space of HM3, layer paths: each step of a path is a layer of one of several models.

The paper is "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models" (arXiv:2409.18893).

A merge is a path of any length between two limits. The embedding is taken from the first layer's model; the final norm
and the output head are taken from the last layer's model. The searcher `hm3` learns a policy that builds such paths.
Every other searcher may also search the space, for comparison with the method.

With the option `merged`, steps may also be layers of one more model, whose layers are merges of the experts' layers
(the upper level of HM3). The coefficients of this model follow from a preference vector. A path has one of these
vectors, and states which of its layers are merged.

In the paper, any layer may follow any other layer. Almost no random path of this kind is a usable model, so a policy
would have no reward to learn from. Here the layer that follows layer l is at most `max_jump` layers away from layer l +
1; `max_jump: null` removes the limit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

from pydantic import Field

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.methods.base import CoefficientValue
from search_spaces.parameters import Configuration, Parameters
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from search_spaces.section import Section
from search_spaces.spaces.base import (
    AlignmentKind,
    Coefficients,
    LayerPair,
    SearchedModels,
    SpaceDescription,
    SpaceSection,
    repeated,
)
from search_spaces.spaces.layer_paths import MERGED, LayerPaths
from search_spaces.spaces.layers import split_layers, with_own_aliases
from search_spaces.spaces.path_coefficients import PathCoefficients

__all__ = ["DEPTH_FACTOR", "SPACE", "Hm3Section", "Hm3Space", "MergedOptions"]

# The default length of the longest path, as a multiple of the sources' layers: the same as in the space `dis`.
DEPTH_FACTOR = 1.25

# The largest number of alignments that a study learns before its search: each has up to hidden_size^2 numbers.
MAX_PAIRS = 10_000

# Default strength and density of the methods that merge layers of the pool. Task arithmetic's strength is the
# coefficient of every expert under equal weights (Ilharco et al. 2023: 0.3 to 0.5). Those of TIES, DARE and PCB-Merging
# are the publications' lambda, 1, and share of elements. Consensus merging (arXiv:2405.07813) multiplies sums of task
# vectors, as task arithmetic does; mask lambdas are the middle of the publication's 0.2 to 0.6, and two models must
# agree.
STRENGTHS = {"task_arithmetic": 0.4, "ties_weighted": 1.0, "dare_ties_l1": 1.0, "pcb": 1.0, "consensus_ta": 0.4}
DENSITIES = {"ties_weighted": 0.2, "dare_ties_l1": 0.5, "pcb": 0.1}
MASK_LAMBDA, AGREEMENT = 0.4, 2
UNWEIGHTED = ("pcb", "consensus_ta")


class MergedOptions(Section):
    method: Literal["task_arithmetic", "ties_weighted", "dare_ties_l1", "pcb", "consensus_ta"] = "task_arithmetic"
    """The method by which layers are merged in their parameters."""
    strength: Annotated[float, Field(gt=0, le=5)] | None = None
    """The factor on the task vectors: each expert's coefficient if all objectives are equally important
    (task_arithmetic, consensus_ta), or lambda. Default: 0.4 for task_arithmetic and consensus_ta, else 1.
    """
    density: Annotated[float, Field(gt=0, le=1)] | None = None
    """The share of each task vector's elements that are kept. Default: 0.2 for ties_weighted, 0.5 for dare_ties_l1, 0.1
    for pcb; the other methods have none."""
    experts: dict[str, str] | None = None
    """The expert of each objective; its weight is that of the objective. Default: the expert of the same name."""

    def merge(self, weights: Mapping[str, float]) -> Merge:
        """The merge of a layer from several experts, by the method that these options choose.

        `weights` has the weight of each expert, keyed by its alias (name in the study file); the weights sum to one.
        PCB-Merging and consensus merging have no weights: experts with a weight of 0 are left out, and all others are
        merged equally.
        """
        chosen = {alias: weight for alias, weight in weights.items() if weight > 0 or self.method not in UNWEIGHTED}
        sources = tuple(map(Source, chosen))
        strength = STRENGTHS[self.method] if self.strength is None else self.strength
        shares = tuple(chosen.values())
        if self.method == "task_arithmetic":
            return Merge("task_arithmetic", sources, {"lambda": tuple(strength * len(weights) * w for w in shares)})
        if self.method == "consensus_ta":
            agreed: dict[str, CoefficientValue] = {"lambda": strength * len(weights) / len(chosen)}
            agreed |= {"mask_lambda": (MASK_LAMBDA,) * len(chosen), "agreement": float(min(AGREEMENT, len(chosen)))}
            return Merge("consensus_ta", sources, agreed)
        density = DENSITIES[self.method] if self.density is None else self.density
        if self.method == "pcb":
            return Merge("pcb", sources, {"lambda": strength, "density": density})
        # Both divide by the sum of the weights of the experts that take part in each element.
        taken: dict[str, CoefficientValue] = {"weight": shares, "density": (density,) * len(shares)}
        taken |= {"lambda": strength, "normalize": 1.0}
        return Merge(self.method, sources, taken, seed=0 if self.method == "dare_ties_l1" else None)


class Hm3Section(SpaceSection):
    kind: Literal["hm3"]
    """hm3: a path of any length: at each step a layer of one of several models."""
    max_path_length: Annotated[int, Field(ge=1)] | None = None
    """The largest number of layers of a path. Default: limits.max_layers, or 1.25 times the sources'."""
    min_path_length: Annotated[int, Field(ge=1)] | None = None
    """The smallest number of layers of a path. Default: half of the sources'."""
    max_jump: Annotated[int, Field(ge=0)] | None = 1
    """The largest distance between a step's layer and the layer after the previous step's. 0: layers keep the sources'
    order; 1: a step may also repeat a layer or leave one out; null: any layer may follow.
    """
    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The models whose layers are used: experts' aliases, or base. Default: all experts."""
    merged: MergedOptions | None = None
    """Options of an additional model whose layers paths may use: a merge of the experts, a different one for each
    preference vector. Default: no such model.
    """
    alignment: AlignmentKind = "none"
    """How the output of a layer is adapted to a next layer that does not follow it in its own model. none: not at all;
    moments: each channel gets the mean and the variance that the next layer expects; mlp: a projection that a small
    network learns; ridge: a projection by ridge regression over tokens, for models whose channels do not correspond.
    """
    scales: tuple[float, float] | None = None
    """The lowest and highest factor on the residual stream after each layer of a path but the last; 1 is between them.
    The searcher hm3 learns them with the path. Default: no factors.
    """

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return () if self.merged is None else (self.merged.method,)

    @property
    def changes_layers(self) -> bool:
        return True

    @property
    def scaled_by(self) -> str | None:
        return None if self.scales is None else "scales"

    def contradictions(self) -> Iterator[Problem]:
        yield from repeated("models", self.models or ())
        if self.models is not None and len(self.models) < 2 and self.merged is None:
            yield Problem("search_space.models", f"{self.models[0]} alone has no layers to exchange; give two or more")
        if self.scales is not None and not 0 < self.scales[0] < 1 < self.scales[1]:
            message = f"{list(self.scales)} is not accepted; give [lowest, highest], with 0 < lowest < 1 < highest"
            yield Problem("search_space.scales", message)
        longest, shortest = self.max_path_length, self.min_path_length
        if longest is not None and shortest is not None and longest < shortest:
            message = f"{longest} is below min_path_length={shortest}; give at least {shortest}"
            yield Problem("search_space.max_path_length", message)
        if self.merged is not None and self.merged.method not in DENSITIES and self.merged.density is not None:
            message = f"{self.merged.method} has none; leave it out, or take one of {', '.join(DENSITIES)}"
            yield Problem("search_space.merged.density", message)

    def build(self, models: SearchedModels) -> Hm3Space:
        return Hm3Space(models, self)


SPACE = Hm3Section


class Hm3Space:
    """The search space of HM3: paths through the layers of several models.

    A configuration describes a path: which layers a merge takes from which model, and in which order. The space is
    immutable, and implements the interfaces `AlignedSpace` and `RefinableSpace`.
    """

    kind = "hm3"

    def __init__(self, models: SearchedModels, section: Hm3Section) -> None:
        """Build the space with the options `section` over the models of a study.

        Raises InvalidStudy in these cases:

        - There are no experts, or fewer than two models have layers to exchange.
        - The section names a model that the study does not have.
        - No path has the required length.
        - Layers are to be merged by preference vectors, and an objective has no expert.
        - Too many pairs of layers need an alignment (a learned map from one layer's output to the next layer's input).
        """
        chosen = models.experts if section.models is None else section.models
        default = math.ceil(models.num_layers * DEPTH_FACTOR) if models.max_layers is None else models.max_layers
        longest = default if section.max_path_length is None else section.max_path_length
        shortest = math.ceil(models.num_layers / 2) if section.min_path_length is None else section.min_path_length
        if problems := tuple(_problems(models, section, chosen, shortest, longest)):
            raise InvalidStudy(problems)
        self._models = models
        self._merges = tuple(_merges(models, section.merged)) if section.merged is not None else ()
        pool = (*chosen, MERGED) if self._merges else tuple(chosen)
        num_vectors = max(1, len(self._merges))
        try:
            self.paths = LayerPaths(
                pool, models.num_layers, shortest, longest, section.max_jump, num_vectors, section.scales
            )
        except ValueError as error:
            raise InvalidStudy((Problem("search_space.max_path_length", str(error)),)) from error
        self.max_layers = max(self.paths.longest, models.num_layers)  # the sources are scored too
        self.parameters = Parameters(self.paths.parameters(), structure=self.paths)
        self.alignment: AlignmentKind = section.alignment
        self._alignments: Mapping[LayerPair, str] = {}
        if len(self.pairs) > MAX_PAIRS:
            message = (
                f"{len(self.pairs)} pairs of layers may be neighbours, each with an alignment of its own; at most "
                f"{MAX_PAIRS} are learned: give a smaller max_jump, fewer models or preference vectors, or "
                "alignment: none"
            )
            raise InvalidStudy((Problem("search_space.alignment", message),))

    def describe(self) -> SpaceDescription:
        paths = self.paths
        order = (
            "in any order"
            if paths.max_jump is None
            else f"each at most {paths.max_jump} away from the one after the last"
        )
        text = (
            f"a path of {paths.shortest} to {paths.longest} layers out of {paths.num_layers} of each of "
            f"{len(paths.models)} models, {order}"
        )
        if self._merges:
            of = "" if paths.num_preferences == 1 else f" by one of {paths.num_preferences} preference vectors"
            text += f"; {MERGED} is merged{of}: {self._merges[0].method}"
        if self.alignment != "none":
            number = len(self.pairs)
            text += f"; between layers that do not follow each other one of {number} alignments: {self.alignment}"
        if paths.scale_range is not None:
            text += "; a scale of {:g} to {:g} after each layer but the last".format(*paths.scale_range)
        groups = split_layers(paths.num_layers, paths.num_layers)
        return SpaceDescription(self.kind, groups, {"layer": COMPONENTS}, text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        paths = self.paths
        steps = paths.path(configuration)
        number = paths.preference(configuration)
        wholes = [self._model(paths.models[paths.model_of(step)], number) for step in steps]
        layers = [whole.layers[paths.layer_of(step)] for whole, step in zip(wholes, steps, strict=True)]
        for index, scale in enumerate(paths.scales(configuration)):
            layers[index] = replace(layers[index], scale=scale)
        if self.alignment != "none":
            layers = self._aligned(layers, steps, number)
        return replace(
            wholes[0], models=self._models.fingerprints, layers=tuple(layers), head=wholes[-1].head
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models, paths = self._models, self.paths
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        if renamed is None:
            return None
        for number in range(paths.num_preferences):
            steps = self._steps(number)
            plain = (replace(layer, alignment=None, scale=1.0) for layer in renamed.layers)
            path = [steps[layer] for layer in plain if layer in steps]
            if len(path) < len(renamed.layers) or not paths.contains(path):
                continue
            scales = tuple(layer.scale for layer in renamed.layers[:-1])
            low, high = paths.scale_range or (1.0, 1.0)
            if not all(low <= scale <= high for scale in scales):
                continue
            configuration = paths.configuration(path, preference=number, scales=scales)
            if self.to_recipe(configuration).digest == recipe.digest:
                return configuration
        return None

    def coefficients_of(self, recipe: Recipe) -> Coefficients:
        """The coefficients of the merges on the layer path of `recipe`, as numeric parameters for gradient descent.

        A layer path is the sequence of the layers that a merge takes from several models. The parameters' defaults give
        `recipe` itself. An expert can have a coefficient if the search space allows its layers on a path, either
        unchanged or merged.
        """
        merged = {source.model for merge in self._merges for source in merge.sources}
        experts = [expert for expert in self._models.experts if expert in {*self.paths.models, *merged}]
        return PathCoefficients(self._models, recipe, experts=experts, scale_range=self.paths.scale_range)

    # Alignments.

    @property
    def pool(self) -> dict[str, Recipe]:
        return {name: self._model(model, number).canonical() for name, (model, number) in self._names.items()}

    @cached_property
    def pairs(self) -> tuple[LayerPair, ...]:
        if self.alignment == "none":
            return ()
        paths = self.paths
        of_models = (
            (first, second)
            for first, (_, number) in self._names.items()
            for second, (_, other) in self._names.items()
            if number is None or other is None or number == other
        )
        return tuple(
            ((first, layer), (second, after))
            for first, second in of_models
            for layer in range(paths.num_layers)
            for after in paths.layers_after(layer)
            if not self._is_natural((first, layer), (second, after))
        )

    def with_alignments(self, names: Mapping[LayerPair, str]) -> Self:
        if missing := [pair for pair in self.pairs if pair not in names]:
            raise ValueError(f"{len(missing)} of {len(self.pairs)} pairs have no alignment, the first is {missing[0]}")
        aligned = copy.copy(self)
        aligned._alignments = {pair: names[pair] for pair in self.pairs}
        return aligned

    def _aligned(self, layers: Sequence[LayerRecipe], steps: Sequence[int], number: int) -> list[LayerRecipe]:
        paths = self.paths
        at = [(self._name(paths.models[paths.model_of(step)], number), paths.layer_of(step)) for step in steps]
        found = list(layers)
        for index, pair in enumerate(pairwise(at)):
            if not self._is_natural(*pair):
                if pair not in self._alignments:
                    raise ValueError(f"no alignment was learned for {pair}; the space needs with_alignments first")
                found[index] = replace(layers[index], alignment=self._alignments[pair])
        return found

    def _is_natural(self, first: tuple[str, int], second: tuple[str, int]) -> bool:
        """Whether layer `second` follows layer `first` in one model, so that no alignment is needed between the two.

        An alignment maps the residual stream after a layer to the stream that a layer of another model expects. A layer
        is given as a model's name and the layer's number. Models with equal recipes count as the same model.
        """
        return second[1] == first[1] + 1 and self._digests[first[0]] == self._digests[second[0]]

    @cached_property
    def _names(self) -> dict[str, tuple[str, int | None]]:
        """Models that provide layers for layer paths (sequences of layers that make a new model), keyed by name.

        A model of the study has its alias (name in the study file) as the key, and (alias, None) as the value. Layers
        may also come from models that are merged from the experts, one for each preference vector (weights of the
        objectives). The merged model of the preference vector with index 2 has the key "merged 2" and the value
        ("merged", 2).
        """
        found: dict[str, tuple[str, int | None]] = {}
        for model in self.paths.models:
            numbers = range(self.paths.num_preferences) if model == MERGED else (None,)
            found |= {self._name(model, number): (model, number) for number in numbers}
        return found

    @cached_property
    def _digests(self) -> dict[str, str]:
        """Recipe digest of each model that provides layers for layer paths, keyed by the name in the property `pool`.

        A layer path is the sequence of layers of a new model. Some of the models are merged from the experts, each with
        the weights of one preference vector (weights of the objectives). Two models whose recipes are equal have the
        same digest.
        """
        return {name: recipe.digest for name, recipe in self.pool.items()}

    @staticmethod
    def _name(model: str, number: int | None) -> str:
        return f"{MERGED} {number}" if model == MERGED else model

    @cached_property
    def _wholes(self) -> dict[tuple[str, int], Recipe]:
        """Cache of the complete recipes of the models that provide layers for layer paths; empty at first.

        A layer path is the sequence of layers of a new model. A key is (alias, 0) for a model of the study. For a model
        that is merged from the experts, the key is (MERGED, index of the preference vector that gives the experts'
        weights), where MERGED is a constant name.
        """
        return {}

    def _model(self, name: str, number: int | None) -> Recipe:
        key = (name, number or 0) if name == MERGED else (name, 0)
        if key not in self._wholes:
            merge = self._merges[key[1]] if name == MERGED else Merge("passthrough", (Source(name),))
            models = self._models
            whole = Recipe.uniform(
                merge,
                models=models.fingerprints,
                base=models.base,
                num_layers=models.num_layers,
                tokenizer=models.tokenizer,
            )
            self._wholes[key] = replace(whole.canonical(), models=models.fingerprints)
        return self._wholes[key]

    def _steps(self, number: int) -> dict[LayerRecipe, int]:
        """Step number of every possible layer of a path, keyed by the layer's recipe.

        A path is a sequence of step numbers; each number stands for one layer of one model. One of the models may be
        merged from the experts, with weights by a preference vector; `number` is the index of this vector. If several
        models contain the same layer, its step number is the one for the first of these models.
        """
        paths = self.paths
        found: dict[LayerRecipe, int] = {}
        for index, name in enumerate(paths.models):
            for layer, recipe in enumerate(self._model(name, number).layers):
                found.setdefault(recipe, paths.step(index, layer))
        return found


def _merges(models: SearchedModels, options: MergedOptions) -> Iterator[Merge]:
    """Yield the merge for a layer that is merged from the experts, one for each preference vector of the study.

    Layer paths (sequences of layers that make a new model) may take layers from the study's models and from an
    additional model, whose layers are merged from the experts. A preference vector has a weight for each objective. In
    the merge, this is the weight of the objective's expert; every objective must have an expert. If the study has no
    preference vectors, there is one merge, in which all experts have equal weights. `options` choose the merge method
    and its coefficients.
    """
    for vector in models.preferences or (dict.fromkeys(models.experts, 1 / max(1, len(models.experts))),):
        named = {_expert_of(objective, options): weight for objective, weight in vector.items()}
        yield options.merge(named)


def _expert_of(objective: str, options: MergedOptions) -> str:
    return objective if options.experts is None else options.experts.get(objective, objective)


def _problems(
    models: SearchedModels, section: Hm3Section, chosen: tuple[str, ...], shortest: int, longest: int
) -> Iterator[Problem]:
    if not models.experts:
        yield Problem("models.experts", "there are no experts; name at least one")
    known = (*models.experts, models.base)
    for index, name in enumerate(section.models or ()):
        if name not in known:
            message = f"{name!r} is not a model of the study; give some of {', '.join(known)}"
            yield Problem(f"search_space.models.{index}", message)
    if section.merged is not None:
        yield from _problems_of_merged(models, section.merged)
    if len(chosen) + (section.merged is not None) == 1:
        message = f"{chosen[0]} alone has no layers to exchange; give two or more of {', '.join(known)}"
        yield Problem("search_space.models", message)
    if models.max_layers is not None and models.max_layers < models.num_layers:
        message = f"{models.max_layers} is below the {models.num_layers} layers of the sources, which are scored too"
        yield Problem("limits.max_layers", f"{message}; give at least {models.num_layers}")
    elif longest < shortest:
        yield Problem(
            "search_space.max_path_length",
            f"{longest} is below the shortest path of {shortest} layers; give at least {shortest}",
        )
    if models.max_layers is not None and section.max_path_length is not None and longest > models.max_layers:
        message = f"{longest} is above limits.max_layers={models.max_layers}; give at most {models.max_layers}"
        yield Problem("search_space.max_path_length", message)


def _problems_of_merged(models: SearchedModels, options: MergedOptions) -> Iterator[Problem]:
    if MERGED in models.experts:
        message = f"an expert is called {MERGED!r}, as the merged model of the pool is; rename it"
        yield Problem("search_space.merged", message)
    objectives = tuple(models.preferences[0]) if models.preferences else ()
    for objective in options.experts or ():
        if models.preferences and objective not in objectives:
            message = f"{objective!r} is not an objective with a task; give some of {', '.join(objectives)}"
            yield Problem(f"search_space.merged.experts.{objective}", message)
    named = [_expert_of(objective, options) for objective in objectives]
    for objective, expert in zip(objectives, named, strict=True):
        if expert not in models.experts:
            message = f"objective {objective!r} has no expert: {expert!r} is none of {', '.join(models.experts)}"
            yield Problem("search_space.merged.experts", f"{message}; write {objective}: EXPERT")
        elif named.count(expert) > 1:
            message = f"{expert!r} is the expert of several objectives; give each its own"
            yield Problem("search_space.merged.experts", message)
            return
