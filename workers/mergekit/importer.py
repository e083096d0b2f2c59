"""mergekit's configurations as recipes that give the same tensors.

Slices of layers, gradients over them and filters on tensor names have mergekit's meaning. Differences: arithmetic is in
float32 whatever `dtype` says, and rounded once, to `out_dtype` or `dtype`; random masks are drawn by tensor name from
one seed; embeddings are aligned by token even without `tokenizer_source`, and rows that stand for no token are kept.
Models are not located here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.mergekit import Parameter, Scalar, Values
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from workers.mergekit.config import MergekitConfig, ModelInput, Settings, Slice
from workers.mergekit.methods import MERGEKIT_METHODS, Inputs
from workers.models.components import Layout

__all__ = ["to_recipe"]


def to_recipe(
    configuration: MergekitConfig,
    aliases: Mapping[str, str],
    *,
    fingerprints: Mapping[str, str],
    layout: Layout,
    seed: int = 0,
) -> Recipe:
    """The recipe that `configuration` describes, of models that all have `layout`.

    `aliases` maps the configuration's names of models to the recipe's, `fingerprints` the recipe's to the contents;
    `seed` is for methods with random masks. Raises InvalidRecipe, a line for everything that is wrong, with its place.
    """
    builder = _Builder(configuration, aliases, layout, seed)
    recipe_parts = builder.parts()
    if builder.problems:
        raise InvalidRecipe("\n".join(builder.problems.values()))
    return Recipe(fingerprints, aliases[configuration.base], *recipe_parts)


Parts = tuple[tuple[LayerRecipe, ...], Merge, Merge, Mapping[str, Merge]]


class _Builder:
    """Computes the merge of every tensor, then what the tensors of a component have in common.

    `problems` has one entry per cause: what is wrong in every layer is reported once."""

    def __init__(self, configuration: MergekitConfig, aliases: Mapping[str, str], layout: Layout, seed: int) -> None:
        self.problems: dict[object, str] = {}
        self._configuration = configuration
        self._method = MERGEKIT_METHODS[configuration.method]
        self._aliases = aliases
        self._layout = layout
        self._seed = seed
        self._tensors: dict[str, Merge] = {}
        # A tied head is not a tensor, but a filter may name it.
        self._names = {"lm_head.weight"} if layout.is_tied else set[str]()

    def parts(self) -> Parts:
        """Layers, embedding, head, and single tensors that differ from their component."""
        slices = [self._with_all_inputs(slice_) for slice_ in self._configuration.slices]
        if self.problems:
            return (), _placeholder(), _placeholder(), {}
        embedding = self._component("embedding", slices[0], offset=None, index=None, t=0)
        layers: list[LayerRecipe] = []
        for slice_ in slices:
            start, stop = self._range(slice_.inputs[0])
            for offset in range(stop - start):
                t = offset / (stop - start - 1) if stop - start > 1 else 1.0
                attention, mlp, norm = (
                    self._component(name, slice_, offset=offset, index=len(layers), t=t) for name in COMPONENTS
                )
                layers.append(LayerRecipe(attention, mlp, norm))
        head = self._component("head", slices[-1], offset=None, index=None, t=0)
        self._check_filters()
        return tuple(layers), embedding, head, self._tensors

    def _with_all_inputs(self, slice_: Slice) -> Slice:
        """The slice with its base determined and among its inputs."""
        where = f"{slice_.place}.base_model" if slice_.base else "base_model"
        base = slice_.base or self._configuration.base_model
        inputs = slice_.inputs
        if base is not None and base not in [source.model for source in inputs]:
            if not slice_.place:
                inputs = (*inputs, ModelInput(base, None, {}, "base_model"))
            elif self._method.base != "unused":
                self._problem(where, f"{base} is not among the sources of {slice_.place}; add it, with its layer_range")
        if base is None and self._method.base == "needed":
            self._problem(where, f"is missing; {self._configuration.method} needs it")
        num_layers = self._layout.num_layers
        for source in inputs:
            if source.layers and source.layers[1] > num_layers:
                self._problem(
                    f"{source.place}.layer_range", f"ends at {source.layers[1]}; the models have {num_layers} layers"
                )
        return Slice(inputs, base, slice_.settings, slice_.place)

    def _range(self, source: ModelInput) -> tuple[int, int]:
        return source.layers or (0, self._layout.num_layers)

    def _component(self, name: str, slice_: Slice, *, offset: int | None, index: int | None, t: float) -> Merge:
        """The merge of most tensors of a component of merged layer `index`; the others are kept as single tensors."""
        layers = [None if offset is None else self._range(source)[0] + offset for source in slice_.inputs]
        merges = {
            self._layout.name(suffix, index): self._merge(suffix, slice_, layers, index, t)
            for suffix in self._layout.suffixes(name, layers[0])
        }
        if not merges:
            return Merge("passthrough", (Source(self._aliases[slice_.inputs[0].model], layers[0]),))
        common = Counter(merges.values()).most_common(1)[0][0]
        self._tensors |= {name: merge for name, merge in merges.items() if merge != common}
        return common

    def _merge(self, suffix: str, slice_: Slice, layers: Sequence[int | None], index: int | None, t: float) -> Merge:
        above = (slice_.settings, self._configuration.settings)
        name = self._layout.name(suffix, index)
        self._names.add(name)
        is_expert = [self._method.base == "unused" or source.model != slice_.base for source in slice_.inputs]
        values: dict[str, Scalar | tuple[float, ...]] = {}
        for parameter in self._method.parameters:
            if parameter.scope == "shared":
                values[parameter.name] = self._value(parameter, above, name, t, slice_.place)
                continue
            of_inputs = []
            for source, layer, counts in zip(slice_.inputs, layers, is_expert, strict=True):
                if counts:
                    source_name = self._layout.name(suffix, layer)
                    self._names.add(source_name)
                    found = self._value(parameter, (source.settings, *above), source_name, t, source.place)
                    of_inputs.append(float(found))
            values[parameter.name] = tuple(of_inputs)
        sources = [
            Source(self._aliases[source.model], layer) for source, layer in zip(slice_.inputs, layers, strict=True)
        ]
        experts = tuple(source for source, counts in zip(sources, is_expert, strict=True) if counts)
        base = next((source for source, counts in zip(sources, is_expert, strict=True) if not counts), None)
        where = slice_.place or "models"
        try:
            merge = self._method.to_merge(Inputs(experts, base, Values(values), self._seed))
        except InvalidRecipe as error:
            self._problem(where, str(error))
            return _placeholder()
        try:
            merge.check()
        except InvalidRecipe as error:
            text = str(error).removeprefix("merge: ")
            self._problem(where, text.replace(merge.method, self._configuration.method, 1))
            return _placeholder()
        if METHODS[merge.method].needs_base:
            self._check_base(merge, base, slice_)
        return merge

    def _check_base(self, merge: Merge, base: Source | None, slice_: Slice) -> None:
        """Task vectors are of one base model, and of one layer of it."""
        assert base is not None
        method, one = self._configuration.method, self._configuration.base
        if slice_.base != one:
            self._problem(f"{slice_.place}.base_model", f"{method} here has one base model for all slices, {one}")
        if others := {source.layer for source in merge.sources} - {base.layer}:
            self._problem(
                slice_.place,
                f"{method} merges layer {_listed(others)} of a model with layer {base.layer} of the base; here task "
                "vectors are of one layer: give all sources the same layer_range",
            )

    def _value(self, parameter: Parameter, scopes: Sequence[Settings], name: str, t: float, place: str) -> Scalar:
        """The parameter's value for tensor `name`: the first that fits, from the narrowest scope outwards."""
        for settings in scopes:
            fitting = (c for c in settings.get(parameter.name, ()) if c.filter in name)
            value = condition.at(t) if (condition := next(fitting, None)) is not None else None
            if value is not None:
                return value
        if parameter.default is None:
            where = f"{place}.parameters" if place else "parameters"
            self._problem(
                f"{where}.{parameter.name}", f"is missing (for {name}); {self._configuration.method} needs it"
            )
            return 0.0
        return parameter.default

    def _check_filters(self) -> None:
        for condition in self._configuration.conditions():
            if not any(condition.filter in name for name in self._names):
                places = self._layout.places.values()
                parts = {place.suffix.split(".")[0] for place in places if place.layer is not None}
                outside = [place.suffix for place in places if place.layer is None]
                self._problem(
                    f"{condition.place}.filter",
                    f"{condition.filter!r} is in no tensor's name; give a part of one: "
                    + ", ".join([*sorted(parts), *outside]),
                )

    def _problem(self, place: str, message: str) -> None:
        self.problems.setdefault(place, f"{place}: {message}" if place else message)


def _placeholder() -> Merge:
    """The result where a problem was found."""
    return Merge("passthrough", (Source(""),))


def _listed(numbers: Iterable[int | None]) -> str:
    return " and ".join(map(str, sorted(numbers, key=str)))
