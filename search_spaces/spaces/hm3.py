"""HM3's paths: "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models", as its authors describe it to
their reviewers.

A merge is a path of any length between two limits: each step is a layer of one of several models. The embedding is that
of the first layer's model, the final norm and the output head are those of the last layer's. The searcher `hm3` learns
a policy that builds such paths; every other searcher may search them too, which are the baselines of the method.

The authors let any layer follow any other. Of paths drawn that way hardly one is a usable model, so that there is no
reward to learn from; here a step goes at most `max_jump` layers away from the next one, which null turns off.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.parameters import Configuration, Parameters
from search_spaces.recipe import COMPONENTS, Recipe
from search_spaces.spaces.base import SearchedModels, SpaceDescription, SpaceSection, repeated
from search_spaces.spaces.layer_paths import LayerPaths
from search_spaces.spaces.layers import path_of_recipe, recipe_of_path, split_layers, with_own_aliases

__all__ = ["DEPTH_FACTOR", "SPACE", "Hm3Section", "Hm3Space"]

# The layers of the longest path where the study does not say: as in the space `dis`.
DEPTH_FACTOR = 1.25


class Hm3Section(SpaceSection):
    kind: Literal["hm3"]
    """hm3: a path of any length: at each step a layer of one of several models."""
    max_path_length: Annotated[int, Field(ge=1)] | None = None
    """The most layers of a path. Default: limits.max_layers, or 1.25 times the sources'."""
    min_path_length: Annotated[int, Field(ge=1)] | None = None
    """The fewest layers of a path. Default: half of the sources'."""
    max_jump: Annotated[int, Field(ge=0)] | None = 1
    """How far a step may be from the layer after the one before: 0 is the sources' own order, 1 repeats a layer or
    leaves one out; null: any layer may follow."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The models whose layers are used: experts' aliases, or base. Default: all experts."""
    alignment: Literal["none"] = "none"
    """How what one model's layer hands on is fitted to another's: none, it is not."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return ()

    @property
    def changes_layers(self) -> bool:
        return True

    def contradictions(self) -> Iterator[Problem]:
        yield from repeated("models", self.models or ())
        if self.models is not None and len(self.models) < 2:
            yield Problem("search_space.models", f"{self.models[0]} alone has no layers to exchange; give two or more")
        longest, shortest = self.max_path_length, self.min_path_length
        if longest is not None and shortest is not None and longest < shortest:
            message = f"{longest} is below min_path_length={shortest}; give at least {shortest}"
            yield Problem("search_space.max_path_length", message)

    def build(self, models: SearchedModels) -> Hm3Space:
        return Hm3Space(models, self)


SPACE = Hm3Section


class Hm3Space:
    """The paths through the layers of a family's models. Immutable."""

    kind = "hm3"

    def __init__(self, models: SearchedModels, section: Hm3Section) -> None:
        """Raises InvalidStudy: no experts, fewer than two models, models that are none of the study's, or lengths that
        no path has."""
        chosen = models.experts if section.models is None else section.models
        default = math.ceil(models.num_layers * DEPTH_FACTOR) if models.max_layers is None else models.max_layers
        longest = default if section.max_path_length is None else section.max_path_length
        shortest = math.ceil(models.num_layers / 2) if section.min_path_length is None else section.min_path_length
        if problems := tuple(_problems(models, section, chosen, shortest, longest)):
            raise InvalidStudy(problems)
        self._models = models
        try:
            self.paths = LayerPaths(tuple(chosen), models.num_layers, shortest, longest, section.max_jump)
        except ValueError as error:
            raise InvalidStudy((Problem("search_space.max_path_length", str(error)),)) from error
        self.max_layers = max(self.paths.longest, models.num_layers)  # the sources are scored too
        self.parameters = Parameters(self.paths.parameters(), structure=self.paths)

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
        groups = split_layers(paths.num_layers, paths.num_layers)
        return SpaceDescription(self.kind, groups, {"layer": COMPONENTS}, text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        paths = self.paths
        steps = paths.path(configuration)
        layers = [(paths.models[paths.model_of(step)], paths.layer_of(step), 1.0) for step in steps]
        return recipe_of_path(self._models, layers)

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models, paths = self._models, self.paths
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        layers = None if renamed is None else path_of_recipe(renamed)
        if layers is None or any(
            model not in paths.models or layer >= paths.num_layers or scale != 1 for model, layer, scale in layers
        ):
            return None
        path = [paths.step(paths.models.index(model), layer) for model, layer, _ in layers]
        if not paths.contains(path):
            return None
        configuration = paths.configuration(path)
        return configuration if self.to_recipe(configuration).digest == recipe.digest else None


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
    if len(chosen) == 1:
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
