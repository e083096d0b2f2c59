"""Layer paths through several models: the layers that may follow each other, and layer paths as configurations.

A path is a sequence of steps. Each step is a layer of a model, with the number `model * num_layers + layer`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from search_spaces.methods.base import COEFFICIENT_DECIMALS
from search_spaces.parameters import Categorical, Condition, Configuration, Float, Integer, Parameter

__all__ = ["LENGTH", "MERGED", "PREFERENCE", "LayerPaths", "Path"]

Path: TypeAlias = tuple[int, ...]

LENGTH, PREFERENCE = "length", "preference"

# The name of the model whose layers are merged from several models by a preference vector.
MERGED = "merged"

# Probabilities of the changes to a random path: exchange the model of a layer, repeat a layer, leave a layer out.
CHANGES = {"exchange": 0.5, "repeat": 0.25, "drop": 0.25}

# Probability that a scale of a random path is not 1.
SCALED = 0.5


@dataclass(frozen=True)
class LayerPaths:
    """Paths of `min_length` to `max_length` layers through several models, and their conversion to configurations.

    The class implements the interface `Structure`. Each of `models` has `num_layers` layers. If `max_jump` is a number,
    layer l is followed by one of the layers l + 1 - max_jump to l + 1 + max_jump of any model. The first layer of a
    path is then at most `max_jump` from layer 0, and the last layer is at most `max_jump` from layer num_layers - 1. If
    `max_jump` is None, any layer may follow any other layer.

    The model whose name is the constant MERGED has layers that are merged from several models, with weights that follow
    from a preference vector. There are `num_preferences` preference vectors. A path uses one of these vectors, and its
    configuration has the number of this vector, or 0 if the path has no merged layer.

    If `scale_range` is not None, every layer of a path except the last has a scale, which is a factor on the residual
    stream after the layer. `scale_range` is then (lowest scale, highest scale).
    """

    models: tuple[str, ...]
    num_layers: int
    min_length: int
    max_length: int
    max_jump: int | None = None
    num_preferences: int = 1
    scale_range: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        """Check the limits of lengths and jumps. Raises ValueError if they allow no sequence of layers (path)."""
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"lengths from {self.min_length} to {self.max_length}; give 1 <= min <= max")
        if self.shortest > self.max_length or (self.max_jump == 0 and self.min_length > self.num_layers):
            raise ValueError(
                f"no path of {self.min_length} to {self.max_length} layers leads through {self.num_layers} layers with "
                f"jumps of at most {self.max_jump}"
            )

    # Steps.

    @property
    def num_steps(self) -> int:
        """The number of different steps that sequences of layers (paths) may have: one for each layer of each model."""
        return len(self.models) * self.num_layers

    @property
    def shortest(self) -> int:
        """The number of layers in the shortest path (sequence of layers) that the space's limits allow."""
        if self.max_jump is None:
            return self.min_length
        # The distance from the last layer at which a path may begin to the first at which it may end.
        way = self.num_layers - 1 - 2 * self.max_jump
        return max(self.min_length, 1 + math.ceil(max(way, 0) / (self.max_jump + 1)))

    @property
    def longest(self) -> int:
        """The number of layers in the longest path (sequence of layers) that the space's limits allow."""
        return self.num_layers if self.max_jump == 0 else self.max_length

    def step(self, model: int, layer: int) -> int:
        """The step number that stands for layer `layer` of the model with index `model` in the field `models`.

        A layer path, the sequence of layers of a new model, is given as a sequence of step numbers.
        """
        return model * self.num_layers + layer

    def model_of(self, step: int) -> int:
        """The index, in the field `models`, of the model that has the layer with the step number `step`.

        A path is a sequence of step numbers; each number stands for one layer of one model.
        """
        return step // self.num_layers

    def layer_of(self, step: int) -> int:
        """Index of the layer, in its own model, that the step number `step` stands for.

        A step number is a number for one layer of one model; a layer path is a sequence of step numbers.
        """
        return step % self.num_layers

    def layers_after(self, layer: int) -> range:
        """The numbers of the layers, of any model, that may follow layer `layer` in a path by the field `max_jump`."""
        if self.max_jump is None:
            return range(self.num_layers)
        return range(max(layer + 1 - self.max_jump, 0), min(layer + 1 + self.max_jump, self.num_layers - 1) + 1)

    def may_end(self, path: Sequence[int]) -> bool:
        """Whether the layer path `path`, a sequence of step numbers, may end after its last step.

        The path must have an allowed length. Unless the field `max_jump` is None, the last layer of the path must be at
        most this number of layers before the last layer of a model.
        """
        if not self.min_length <= len(path) <= self.max_length:
            return False
        return self.max_jump is None or self.layer_of(path[-1]) >= self.num_layers - 1 - self.max_jump

    def next_layers(self, path: Sequence[int], *, max_length: int | None = None) -> tuple[int, ...]:
        """The numbers, ascending, of the layers of any model that may come next in a path that begins with `path`.

        `path` is a sequence of step numbers; a step is one layer of one model. A layer number is listed only if the
        path can still be completed after it within `max_length` layers in total. By default `max_length` is the largest
        length in the space. The result is empty if the path already has this length.
        """
        left = (self.max_length if max_length is None else max_length) - len(path) - 1
        if left < 0:
            return ()
        if self.max_jump is None:
            return tuple(range(self.num_layers))
        expected = self.layer_of(path[-1]) + 1 if path else 0
        low, high = max(expected - self.max_jump, 0), min(expected + self.max_jump, self.num_layers - 1)
        reach = self.max_jump + left * (self.max_jump + 1)  # the largest distance of a step from the last layer
        return tuple(range(max(low, self.num_layers - 1 - reach), high + 1))

    def contains(self, path: Sequence[int]) -> bool:
        """Whether the space allows the layer path `path`, a sequence of step numbers; a step is one layer of one model.

        The path must have an allowed length, and its layers must follow each other within the limit in the field
        `max_jump`.
        """
        return self.may_end(path) and all(
            self.layer_of(step) in self.next_layers(path[:at]) and 0 <= step < self.num_steps
            for at, step in enumerate(path)
        )

    # Paths as configurations.

    def parameters(self) -> Iterator[Parameter]:
        """The search parameters that describe a sequence of layers (path): its length, and each step's model and layer.

        If layers have scales, each step except the last has its scale as a further parameter. If there are several
        preference vectors (weights by which experts are merged), the number of the preference vector is a parameter.
        """
        shortest, longest = self.shortest, self.longest
        own = min(max(self.num_layers, shortest), longest)
        yield Integer(LENGTH, shortest, longest, default=own)
        for at in range(longest):
            conditions = (Condition(LENGTH, tuple(range(at + 1, longest + 1))),) if at >= shortest else ()
            yield Categorical(_model(at), self.models, conditions=conditions)
            default = min(at, self.num_layers - 1)
            yield Integer(_layer(at), 0, self.num_layers - 1, default=default, conditions=conditions)
            if self.scale_range is not None and at + 1 < longest:
                longer = tuple(range(at + 2, longest + 1))
                scaled = (Condition(LENGTH, longer),) if at + 1 >= shortest else ()
                yield Float(_scale(at), *self.scale_range, default=1.0, conditions=scaled)
        if self.num_preferences > 1:
            yield Categorical(PREFERENCE, tuple(range(self.num_preferences)))

    def path(self, configuration: Configuration) -> Path:
        """The layer path that a configuration describes: the layers of the new model, in order, from several models.

        Each layer is given by one number: the index of its model in the field `models`, times the number of layers of a
        model, plus the layer's index in the model. The space's parameters must accept the configuration's values. A
        layer that may not follow the previous layer is replaced by the nearest layer of the same model that may follow
        it.
        """
        found: list[int] = []
        length = configuration[LENGTH]
        for at in range(length):
            wanted = configuration[_layer(at)]
            allowed = self.next_layers(found, max_length=length)
            layer = min(max(wanted, allowed[0]), allowed[-1])
            found.append(self.step(self.models.index(configuration[_model(at)]), layer))
        return tuple(found)

    def preference(self, configuration: Configuration) -> int:
        """The index of the preference vector that a configuration chooses.

        A preference vector has a weight for each objective. It gives the experts' weights in those layers of a path
        (the sequence of layers of a new model) that are merged from the experts. The index is 0 if the configuration
        does not state it.
        """
        return int(configuration.get(PREFERENCE, 0))

    def merged_preference(self, configuration: Configuration) -> int | None:
        """The index of the preference vector of the merged layers in the path that a configuration describes.

        The result is None if no layer is merged from the experts, or if the space has one preference vector.
        """
        if self.num_preferences == 1 or not self._is_merged(self.path(configuration)):
            return None
        return self.preference(configuration)

    def with_preference(self, configuration: Configuration, preference: int) -> Configuration:
        """The configuration with the same path (sequence of layers), merged for another preference vector.

        `preference` is the index of the vector that gives the experts' weights in merged layers. A path without merged
        layers is returned as it is.
        """
        if self.merged_preference(configuration) is None:
            return configuration
        return {**configuration, PREFERENCE: preference}

    def scales(self, configuration: Configuration) -> tuple[float, ...]:
        """The scales of all layers except the last in the sequence of layers that a configuration describes.

        A scale is a factor on the residual stream after a layer. The result is empty if the space has no scales.
        """
        if self.scale_range is None:
            return ()
        return tuple(configuration[_scale(at)] for at in range(configuration[LENGTH] - 1))

    def scale_of(self, place: float) -> float:
        """Convert a position on the logarithmic axis of scales, from -1 (lowest) to 1 (highest), to the scale.

        Positions `place` below -1 give the lowest scale, and positions above 1 give the highest scale. Scales are
        rounded in the same way as coefficients.
        """
        assert self.scale_range is not None, "paths without scales"
        low, high = map(math.log, self.scale_range)
        middle, half = (low + high) / 2, (high - low) / 2
        scale = math.exp(middle + half * min(max(place, -1.0), 1.0))
        return min(max(round(scale, COEFFICIENT_DECIMALS), self.scale_range[0]), self.scale_range[1])

    def place_of(self, scale: float) -> float:
        """Convert a scale to its position on the logarithmic axis of scales, from -1 (lowest) to 1 (highest).

        The method is the inverse of the method `scale_of`.
        """
        assert self.scale_range is not None, "paths without scales"
        low, high = map(math.log, self.scale_range)
        return (2 * math.log(scale) - low - high) / (high - low)

    def configuration(
        self, path: Sequence[int], *, preference: int = 0, scales: Sequence[float] = ()
    ) -> dict[str, Any]:
        """The configuration of a path, which is given as step numbers; a step is one layer of one model.

        A merged layer is a layer of the model MERGED: its parameters are merged from the experts, with weights that
        follow from a preference vector. `preference` is the index of this vector; without a merged layer, the
        configuration has 0 instead. `scales` has the scales of all layers except the last. If `scales` is empty, all
        scales are 1. If the field `scale_range` is None, `scales` is ignored.
        """
        found: dict[str, Any] = {LENGTH: len(path)}
        for at, step in enumerate(path):
            found |= {_model(at): self.models[self.model_of(step)], _layer(at): self.layer_of(step)}
            if self.scale_range is not None and at + 1 < len(path):
                found[_scale(at)] = scales[at] if scales else 1.0
        if self.num_preferences > 1:
            found[PREFERENCE] = preference if self._is_merged(path) else 0
        return found

    def repair(self, configuration: Configuration) -> dict[str, Any]:
        """Convert a proposed configuration to the form that studies store.

        Several configurations may describe the same layer path (sequence of layers of a new model), because the method
        `path` replaces a layer that may not follow the previous layer. The result describes the path of
        `configuration`, with layers that need not be replaced. If no layer of the path is merged from the experts, the
        index of the preference vector (weights by which experts are merged) is set to 0. The values of `configuration`
        must be valid values of the space's parameters.
        """
        path, scales = self.path(configuration), self.scales(configuration)
        return self.configuration(path, preference=self.preference(configuration), scales=scales)

    def unused(self, configuration: Configuration) -> tuple[str, ...]:
        """The names of parameters that have no effect on the layers that `configuration` describes.

        Only the preference vector (weights by which experts are merged) can have no effect: it has none if no layer is
        merged from the experts.
        """
        if self.num_preferences == 1 or self._is_merged(self.path(configuration)):
            return ()
        return (PREFERENCE,)

    def sample(self, rng: np.random.Generator) -> dict[str, Any]:
        """The configuration of a random path: one model's own sequence of layers with random changes.

        The number of changes is between 0 and the model's number of layers, and small numbers are likelier. A change
        takes a layer from another model, repeats a layer, or leaves a layer out. If layers have scales, half of the
        scales on average are 1.
        """
        own = int(rng.integers(len(self.models)))
        num_changes = int(math.exp(rng.uniform(0.0, math.log(self.num_layers + 2)))) - 1
        layers = self._changed([(own, layer, 1.0) for layer in range(self.num_layers)], num_changes, rng)
        if self.scale_range is not None:
            layers[:-1] = [(model, layer, self._drawn_scale(rng)) for model, layer, _ in layers[:-1]]
        preference = int(rng.integers(self.num_preferences)) if self.num_preferences > 1 else 0
        return self._configuration_of(layers, preference=preference)

    def mutant(
        self, configuration: Configuration, rng: np.random.Generator, *, most: int = 3, preference: int | None = None
    ) -> dict[str, Any]:
        """A configuration whose path (sequence of layers) differs from the path of `configuration` by a few changes.

        The changes are random. The number of changes is from one to `most`; smaller numbers are likelier. A change
        takes a layer from another model, repeats a layer, or leaves a layer out. If layers have scales, one scale is
        also replaced by a random scale. `rng` gives the random numbers. The result may describe the same path as
        `configuration`, because one change may undo another.

        Merged layers have the experts' weights of one preference vector. If the path of `configuration` has merged
        layers, the result has the same vector. Otherwise merged layers that the changes add have the vector with the
        index `preference`, by default 0.
        """
        num_changes = int(math.exp(rng.uniform(0.0, math.log(most + 1))))
        path = self.path(configuration)
        scales = (*self.scales(configuration), 1.0) if self.scale_range is not None else (1.0,) * len(path)
        layers = [(self.model_of(step), self.layer_of(step), s) for step, s in zip(path, scales, strict=True)]
        layers = self._changed(layers, num_changes, rng)
        if self.scale_range is not None:
            at = int(rng.integers(len(layers)))
            layers[at] = (*layers[at][:2], self._drawn_scale(rng))
        own = self.preference(configuration)
        kept = own if preference is None or self._is_merged(path) else preference
        return self._configuration_of(layers, preference=kept)

    def _is_merged(self, path: Sequence[int]) -> bool:
        """Whether a layer of the path is merged from the experts; `path` is a sequence of step numbers (layers)."""
        return any(self.models[self.model_of(step)] == MERGED for step in path)

    def _drawn_scale(self, rng: np.random.Generator) -> float:
        return self.scale_of(rng.uniform(-1.0, 1.0)) if rng.random() < SCALED else 1.0

    def _changed(
        self, layers: list[tuple[int, int, float]], num_changes: int, rng: np.random.Generator
    ) -> list[tuple[int, int, float]]:
        """The layers of a path, as tuples (model, layer, scale), after `num_changes` random changes.

        A change takes a layer from another model, repeats a layer, or leaves a layer out; `rng` gives the random
        numbers. `layers` may be shorter or longer than the space allows; the result has an allowed length. A layer that
        may not follow the previous layer is not replaced here.
        """
        for _ in range(num_changes):
            at = int(rng.integers(len(layers)))
            model = int(rng.integers(len(self.models)))
            change = rng.choice(list(CHANGES), p=list(CHANGES.values()))
            if change == "exchange":
                layers[at] = (model, *layers[at][1:])
            elif change == "repeat" and len(layers) < self.longest:
                layers.insert(at, (model, *layers[at][1:]))
            elif change == "drop" and len(layers) > max(self.shortest, 1):
                del layers[at]
        while len(layers) < self.shortest:
            at = int(rng.integers(len(layers)))
            layers.insert(at, layers[at])
        return layers[: self.longest]

    def _configuration_of(self, layers: Sequence[tuple[int, int, float]], *, preference: int) -> dict[str, Any]:
        """The configuration of a path whose layers are given as tuples (index of the model, layer number, scale).

        A layer that may not follow the previous layer is replaced by the nearest layer that may follow it. `preference`
        is the index of the preference vector that gives the experts' weights in merged layers.
        """
        drawn: dict[str, Any] = {LENGTH: len(layers), PREFERENCE: preference}
        for at, (model, layer, scale) in enumerate(layers):
            drawn |= {_model(at): self.models[model], _layer(at): layer, _scale(at): scale}
        return self.repair(drawn)

    def passthrough(self, num_blocks: int, rng: np.random.Generator) -> dict[str, Any] | None:
        """The configuration of a random layer sequence made of `num_blocks` blocks; a block has consecutive layers.

        Merges by hand ("frankenmerges") usually are such sequences (paths). `rng` gives the random numbers. Returns
        None if the drawn blocks together are not a path of the space.
        """
        length = int(rng.integers(self.shortest, self.longest + 1))
        if num_blocks > length:
            return None
        begins = {0, *(1 + rng.choice(length - 1, num_blocks - 1, replace=False)).tolist()}
        path: list[int] = []
        for at in range(length):
            allowed = self.next_layers(path, max_length=length)
            if at in begins:
                step = self.step(int(rng.integers(len(self.models))), int(rng.choice(allowed)))
            else:
                step = path[-1] + 1
            continues = at > 0 and step == path[-1] + 1 and self.layer_of(step) > 0
            if continues == (at in begins) or self.layer_of(step) not in allowed:
                return None
            path.append(step)
        if not self.may_end(path):
            return None
        return self.configuration(path, preference=int(rng.integers(self.num_preferences)))


def _model(at: int) -> str:
    return f"step{at + 1}.model"


def _layer(at: int) -> str:
    return f"step{at + 1}.layer"


def _scale(at: int) -> str:
    return f"step{at + 1}.scale"
