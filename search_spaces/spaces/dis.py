"""DIS, depth-wise integration: merges that are paths through layers of several models; no weights are merged.

Su and Geiping, "Fine, I'll Merge It Myself: A Multi-Fidelity Framework for Automated Model Merging" (2025), sections
3.2.2, 4.1 and 5.2, Tables 12 to 14.

The base's L layers are divided into L / D blocks of D adjacent layers. A block of the merge is a sequence of layers
from the D layers of this block in M models, each used up to R times, in any order. A block that uses no layer keeps the
base's layers (layer retention) or, as an option, is left out. The embedding is taken from the first layer's model; the
final norm and the output head are taken from the last layer's model.

Section 3.2.2 has scales "to normalize the output of each block". By default a block's scale multiplies the residual
stream after the block's last layer, as in the published class for transformers. The published class for vLLM, on which
Tables 12 to 14 rest, multiplies only the output of that layer's MLP, which is added to the stream; this is `scale_of:
mlp`. A scale of the stream after the last block has no influence, because the final norm cancels it, so the last block
has no such scale.

Two more defaults differ from the published code, and are options. Scales are in [0.5, 1.5], where the published code
has [0, 2]. Random paths are near one source, where the published code draws all parameters uniformly. In the published
search, paths may be too deep, and the trials with such paths are lost (56 % and 20 % of all trials in Table 10). Here
every configuration describes a path within the limit. The published code runs only with D = 1 and R = 1. The module
`dis_paths` has the configurations of paths.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.parameters import Configuration, Parameters
from search_spaces.recipe import COMPONENTS, Recipe
from search_spaces.spaces.base import ParameterPlace, SearchedModels, SpaceDescription, SpaceSection, repeated
from search_spaces.spaces.dis_paths import SCALES, DisPaths
from search_spaces.spaces.layers import (
    ScaleOf,
    expert_of,
    one_layer,
    path_of_recipe,
    recipe_of_path,
    split_layers,
    with_own_aliases,
)

__all__ = ["DEPTH_FACTOR", "PRESETS", "SPACE", "DisSection", "DisSpace"]

# The default limit of layers, as a multiple of the number of a source's layers: 50 layers from models of 40, as
# published.
DEPTH_FACTOR = 1.25

# Section 4.1: the depth granularity D, the number of models M and the repeats R.
PRESETS = {"d1m3r1": (1, 3, 1), "d1m1r2": (1, 1, 2)}


# Name of the parameter that says whether, or where, a block uses a layer of a model.
OF_LAYER = re.compile(r"b\d+\.(?:use|key)\.(?P<layer>\d+)(?:\.\d+)?\..+")


class DisSection(SpaceSection):
    kind: Literal["dis"]
    """dis: a path through the sources' layers: which layers, how often, in which order, with a scale for each block."""
    depth_granularity: Annotated[int, Field(ge=1)] = 1
    """The number of layers of a block, which may be used in any order: D. It divides the number of layers."""
    repeats: Annotated[int, Field(ge=1)] | None = None
    """How often a block may use the same layer: R. Default: 1."""
    models: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The models whose layers blocks choose from: experts' aliases, or base. Default: all experts."""
    layer_retention: bool = True
    """Whether a block that uses no layer keeps the base's layers; false: it is left out."""
    permutations: bool = True
    """Whether a block may use its layers in any order; false: in their own order, those of one layer in the order of
    `models`.
    """
    scales: bool = True
    """Whether each block has a scale of its own; false: all are 1."""
    scale_of: ScaleOf = "stream"
    """What the scale of a block multiplies: stream, the residual stream after the block's last layer (the last block
    has no scale then); mlp, only what the MLP of that layer adds to the stream.
    """
    scale_range: tuple[float, float] = SCALES
    """The lowest and highest scale; it contains 1. The lowest is above 0 or, with scale_of: mlp, at least 0."""
    sampling: Literal["near_sources", "uniform"] = "near_sources"
    """How random configurations are drawn. near_sources: paths are near one source's own order of layers, and most
    scales are 1; uniform: every parameter is drawn independently.
    """
    preset: Literal["d1m3r1", "d1m1r2"] | None = None
    """A published configuration. d1m3r1: blocks choose from one layer of each of three models; d1m1r2: blocks use a
    layer of one model up to twice. Options that contradict the preset are refused.
    """

    @property
    def num_repeats(self) -> int:
        """The number of times that a merge may use the same layer within one block of adjacent layers.

        The result is the option `repeats`. Without this option, it is the value in the published configuration that the
        option `preset` names, or 1 without a preset.
        """
        preset = PRESETS[self.preset][2] if self.preset else 1
        return preset if self.repeats is None else self.repeats

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return ()

    @property
    def changes_layers(self) -> bool:
        return True

    @property
    def scaled_by(self) -> str | None:
        return "scales" if self.scales and self.scale_of == "stream" else None

    def place_of(self, parameter: str, *, experts: Sequence[str], num_layers: int) -> ParameterPlace:
        found = OF_LAYER.fullmatch(parameter)
        if found is None:  # of a block
            return ParameterPlace()
        return ParameterPlace(one_layer(int(found["layer"])), None, expert_of(parameter, experts))

    def contradictions(self) -> Iterator[Problem]:
        yield from repeated("models", self.models or ())
        yield from self._scale_problems()
        if self.preset is None:
            return
        granularity, num_models, repeats = PRESETS[self.preset]
        given = {
            "depth_granularity": (self.depth_granularity, granularity),
            "repeats": (self.num_repeats, repeats),
            "models": (num_models if self.models is None else len(self.models), num_models),
        }
        for option, (own, published) in given.items():
            if own != published:
                text = f"{published} models" if option == "models" else f"{option}={published}"
                message = f"preset: {self.preset} means {text}, but {own} is given; leave out one of the two"
                yield Problem(f"search_space.{option}", message)
        for option in ("layer_retention", "permutations", "scales"):
            if getattr(self, option):
                continue
            message = f"preset: {self.preset} means {option}: true, but false is given; leave out one of the two"
            yield Problem(f"search_space.{option}", message)

    def _scale_problems(self) -> Iterator[Problem]:
        low, high = self.scale_range
        given = list(self.scale_range)
        if not low <= 1 <= high or low == high:
            message = f"{given} is not accepted; give [lowest, highest] with 1, the scale of the sources, between them"
            yield Problem("search_space.scale_range", message)
        elif low < 0:
            yield Problem("search_space.scale_range", f"{given} is not accepted; give a lowest scale of at least 0")
        elif low == 0 and self.scale_of == "stream":
            message = (
                f"{given} contains 0, which as a scale of the residual stream cannot be folded into the weights of an "
                "ordinary checkpoint; give a lowest scale above 0, or write scale_of: mlp"
            )
            yield Problem("search_space.scale_range", message)
        for option, default in (("scale_of", "stream"), ("scale_range", SCALES)):
            if not self.scales and getattr(self, option) != default:
                yield Problem(f"search_space.{option}", "has no effect with scales: false; leave it out")

    def build(self, models: SearchedModels) -> DisSpace:
        return DisSpace(models, self)


SPACE = DisSection


class DisSpace:
    """The search space DIS (depth-wise integration): a merge is a sequence of layers of the base model and its experts.

    The class is immutable.
    """

    kind = "dis"

    def __init__(self, models: SearchedModels, section: DisSection) -> None:
        """Build the space with the options `section` over the models of a study.

        Raises:
            InvalidStudy: There are no experts, the section names a model that the study does not have, the number of
                layers in a block (group of adjacent layers) does not divide the models' number of layers, or fewer
                layers are allowed than the sources have.
        """
        chosen = models.experts if section.models is None else section.models
        self.max_layers = (
            math.ceil(models.num_layers * DEPTH_FACTOR) if models.max_layers is None else models.max_layers
        )
        if problems := tuple(_problems(models, section, chosen, self.max_layers)):
            raise InvalidStudy(problems)
        self._models = models
        self.paths = DisPaths(
            base=models.base,
            models=tuple(chosen),
            num_layers=models.num_layers,
            max_layers=self.max_layers,
            depth_granularity=section.depth_granularity,
            repeats=section.num_repeats,
            retains=section.layer_retention,
            has_scales=section.scales,
            permutes=section.permutations,
            scale_of=section.scale_of,
            scale_range=section.scale_range,
            draws_uniformly=section.sampling == "uniform",
        )
        self.parameters = Parameters(self.paths.parameters(), structure=self.paths)

    def describe(self) -> SpaceDescription:
        paths = self.paths
        scale = ", and a scale" if paths.scale_of == "stream" else ", and a scale of its last MLP"
        again = f", each up to {paths.repeats} times" if paths.repeats > 1 else ""
        order = "any" if paths.permutes else "their own"
        text = (
            f"a path of at most {self.max_layers} layers: in each of {paths.num_blocks} blocks, any of "
            f"{paths.depth_granularity} x {len(paths.models)} layers{again}, in {order} order"
            f"{scale if paths.has_scales else ''}"
        )
        return SpaceDescription(
            self.kind, split_layers(self._models.num_layers, paths.num_blocks), {"layer": COMPONENTS}, text
        )

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        layers = self.paths.layers(self.paths.blocks(configuration))
        return recipe_of_path(self._models, layers, scale_of=self.paths.scale_of)

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models = self._models
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        layers = None if renamed is None else path_of_recipe(renamed, scale_of=self.paths.scale_of)
        blocks = None if layers is None else self.paths.blocks_of(layers)
        if blocks is None or self.paths.depth(blocks) > self.max_layers:
            return None
        if not self.paths.has_scales and any(block.scale != 1 for block in blocks):
            return None
        configuration = self.paths.configuration(blocks)
        return configuration if self.to_recipe(configuration).digest == recipe.digest else None


def _problems(
    models: SearchedModels, section: DisSection, chosen: tuple[str, ...], max_layers: int
) -> Iterator[Problem]:
    num_layers = models.num_layers
    if not models.experts:
        yield Problem("models.experts", "there are no experts; name at least one")
    known = (*models.experts, models.base)
    for index, name in enumerate(section.models or ()):
        if name not in known:
            message = f"{name!r} is not a model of the study; give some of {', '.join(known)}"
            yield Problem(f"search_space.models.{index}", message)
    if section.preset is not None and len(chosen) != (wanted := PRESETS[section.preset][1]):
        more = f"name {wanted} of them" if len(chosen) > wanted else f"the study has only {len(chosen)} experts"
        yield Problem("search_space.models", f"preset: {section.preset} takes {wanted} models; {more}")
    if num_layers % section.depth_granularity:
        divisors = [str(number) for number in range(1, num_layers + 1) if num_layers % number == 0]
        message = (
            f"{section.depth_granularity} does not divide the {num_layers} layers of the models; use "
            f"{' or '.join((', '.join(divisors[:-1]), divisors[-1])) if len(divisors) > 1 else divisors[0]}"
        )
        yield Problem("search_space.depth_granularity", message)
    if max_layers < num_layers:
        message = f"{max_layers} is below the {num_layers} layers of the sources, from which the search starts"
        yield Problem("limits.max_layers", f"{message}; give at least {num_layers}")
