"""Conversion of mergekit configurations to recipes of the same merges.

Slices of layers, gradients (values that are interpolated over the layers of a slice) and filters on tensor names have
mergekit's meaning. This module does not locate models. The merged tensors differ from mergekit's in three ways:

- All arithmetic is in float32, and results are rounded once, to `out_dtype` or `dtype`.
- Random masks are drawn by tensor name from one seed.
- Embeddings are aligned by token even without `tokenizer_source`, and rows that represent no token are kept.
"""

from __future__ import annotations

import difflib
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.mergekit import Parameter, Scalar, Values
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from workers.mergekit.config import MergekitConfig, ModelInput, Settings, Slice
from workers.mergekit.methods import MERGEKIT_METHODS, Inputs
from workers.models.components import Layout

__all__ = ["to_recipe"]

log = logging.getLogger(__name__)


def to_recipe(
    configuration: MergekitConfig,
    aliases: Mapping[str, str],
    *,
    fingerprints: Mapping[str, str],
    layout: Layout,
    layouts: Mapping[str, Layout] | None = None,
    seed: int = 0,
    warn: Callable[[str], None] = log.warning,
) -> Recipe:
    """Convert a mergekit configuration to the recipe that computes its merge.

    `layout` has the tensor names of the base. Models with another number of layers have their layout in `layouts`,
    keyed by alias. `aliases` maps the names of models in the configuration to their aliases in the recipe, and
    `fingerprints` maps aliases to content fingerprints. `seed` is for methods with random masks. `warn` is called with
    one line, which names the place in the file, for each setting that mergekit ignores, such as filters that match no
    tensor. Raises InvalidRecipe, with a line for every problem.
    """
    layouts = layouts or {}
    stacks = configuration.stacks_experts and bool(layout.stacks)
    if stacks:
        layout, layouts = layout.stacked, {alias: each.stacked for alias, each in layouts.items()}
    elif configuration.stacks_experts:
        warn("experts: 'stacked' has no effect: the models have no experts in tensors of their own")
    builder = _Builder(configuration, aliases, layout, layouts, seed)
    recipe_parts = builder.parts()
    for warning in builder.warnings:
        warn(warning)
    if builder.problems:
        raise InvalidRecipe("\n".join(builder.problems.values()))
    return Recipe(fingerprints, aliases[configuration.base], *recipe_parts, stacks_experts=stacks)


Parts = tuple[tuple[LayerRecipe, ...], Merge, Merge, Mapping[str, Merge]]


class _Builder:
    """Object that makes a recipe's parts (layers, embedding, head, single tensors) from a mergekit configuration.

    The object determines the merge of every tensor. The most frequent merge of a component's tensors becomes the
    component's merge; tensors with another merge are listed one by one.

    - `aliases`: maps the models that the configuration names to their aliases in the recipe
    - `layout`: the tensor names of the base and of all models with its number of layers; `layouts` has those of the
      other models, keyed by alias
    - `seed`: the seed for methods with random masks
    - `problems`: the problems found so far, keyed by their place in the file, so that a problem that occurs in every
      layer is reported once
    - `warnings`: lines about settings without effect
    """

    def __init__(
        self,
        configuration: MergekitConfig,
        aliases: Mapping[str, str],
        layout: Layout,
        layouts: Mapping[str, Layout],
        seed: int,
    ) -> None:
        self.problems: dict[object, str] = {}
        self.warnings: list[str] = []
        self._layouts = {model: layouts.get(alias, layout) for model, alias in aliases.items()}
        self._configuration = configuration
        self._method = MERGEKIT_METHODS[configuration.method]
        self._aliases = aliases
        self._layout = layout
        self._seed = seed
        self._tensors: dict[str, Merge] = {}
        # A tied head is not a tensor, but a filter may name it.
        self._names = {"lm_head.weight"} if layout.is_tied else set[str]()

    def parts(self) -> Parts:
        """Build the recipe's layers, embedding and head, and the merges of single tensors, keyed by name.

        Single tensors are the tensors whose merge differs from the merge of their component. Problems in the file are
        added to the attribute `problems`; a file with problems gives no usable result.
        """
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
        """Copy a slice of a mergekit file, and add the base model to its inputs where mergekit does so.

        The base is the slice's base model or, if the slice names none, the file's base model. If the file has the key
        `models`, a base that is not in its list is added. If the file has the key `slices`, nothing is added: each
        slice must then list the base itself if the method uses one. Problems with the slice's models and layer ranges
        are added to the attribute `problems`.
        """
        where = f"{slice_.place}.base_model" if slice_.base else "base_model"
        base = slice_.base or self._configuration.base_model
        inputs = slice_.inputs
        self._warn_of_parameters(base, inputs)
        if base is not None and base not in [source.model for source in inputs]:
            if not slice_.place:
                inputs = (*inputs, ModelInput(base, None, {}, "base_model"))
            elif self._method.base != "unused":
                self._problem(where, f"{base} is not among the sources of {slice_.place}; add it, with its layer_range")
        if base is None and self._method.base == "needed":
            self._problem(where, f"is missing; {self._configuration.method} needs it")
        for source in inputs:
            num_layers = self._layouts[source.model].num_layers
            if source.layers and source.layers[0] < source.layers[1] > num_layers:
                self._problem(
                    f"{source.place}.layer_range",
                    f"ends at {source.layers[1]}; {source.model} has {num_layers} layers",
                )
        depths = {stop - start for start, stop in map(self._range, inputs)}
        if len(depths) > 1:
            self._problem(
                slice_.place or "models",
                f"the models have {_listed(depths)} layers, and are merged layer by layer; give slices with a "
                "layer_range for each",
            )
        return Slice(inputs, base, slice_.settings, slice_.place)

    def _warn_of_parameters(self, base: str | None, inputs: Iterable[ModelInput]) -> None:
        """Warn if the file gives the base model parameters that mergekit ignores there, because only experts have them.

        `inputs` are the models of a slice. `base` is the base of this slice, or None if the slice has no base.
        """
        if self._method.base == "unused":
            return
        of_experts = {parameter.name for parameter in self._method.parameters if parameter.scope == "expert"}
        for source in inputs:
            for name in of_experts & source.settings.keys() if source.model == base else ():
                given = ", ".join(condition.text for condition in source.settings[name])
                self.warnings.append(
                    f"{source.place}.parameters.{name}: {given} has no effect: {base} is the base, and {name} "
                    "is read only for the models that are merged into it"
                )

    def _range(self, source: ModelInput) -> tuple[int, int]:
        return source.layers or (0, self._layouts[source.model].num_layers)

    def _component(self, name: str, slice_: Slice, *, offset: int | None, index: int | None, t: float) -> Merge:
        """The merge of a component, such as "mlp", of one merged layer; if its tensors differ, the most frequent merge.

        Tensors with another merge are added to the recipe's merges of single tensors. `name` is the component. `index`
        is the index of the layer in the merged model, and `offset` its index within the slice; both are None for the
        embedding and the head. `t` is the layer's relative place in the slice, from 0 (first layer) to 1 (last), at
        which parameters that vary over the slice are interpolated.
        """
        layers = [None if offset is None else self._range(source)[0] + offset for source in slice_.inputs]
        merges = {
            self._layout.name(suffix, index): self._merge(suffix, slice_, layers, index, t)
            for suffix in self._layouts[slice_.inputs[0].model].suffixes(name, layers[0])
        }
        if not merges:
            return Merge("passthrough", (Source(self._aliases[slice_.inputs[0].model], layers[0]),))
        common = Counter(merges.values()).most_common(1)[0][0]
        self._tensors |= {name: merge for name, merge in merges.items() if merge != common}
        return common

    def _merge(self, suffix: str, slice_: Slice, layers: Sequence[int | None], index: int | None, t: float) -> Merge:
        above = (slice_.settings, self._configuration.module_settings, self._configuration.settings)
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
            assert base is not None
            usual = {Source(self._aliases[self._configuration.base], source.layer) for source in merge.sources}
            return merge if usual == {base} else replace(merge, base=base)
        return merge

    def _value(self, parameter: Parameter, scopes: Sequence[Settings], name: str, t: float, place: str) -> Scalar:
        """Value that a mergekit file gives a parameter for the tensor `name`.

        `t` is the place of the tensor's layer in its slice: 0 for the first layer, 1 for the last. `scopes` are the
        settings from the narrowest scope to the widest: of the model, the slice, the module, the whole file. The first
        value whose filter matches the tensor is used, or the parameter's default if no filter matches. If the parameter
        has no default, the problem is reported at `place`, the key of the slice or model, and the result is 0.
        """
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
            text = condition.filter
            if not any(text in name for name in self._names):
                places = self._layout.places.values()
                parts = {place.suffix.split(".")[0] for place in places if place.layer is not None}
                outside = [place.suffix for place in places if place.layer is None]
                near = difflib.get_close_matches(text, {part for name in self._names for part in name.split(".")}, n=1)
                self.warnings.append(
                    f"{condition.place}.filter: {text!r} has no effect: it is in no tensor's name; "
                    + (f'did you mean "{near[0]}"? ' if near else "")
                    + "a filter is a part of one: "
                    + ", ".join([*sorted(parts), *outside])
                )

    def _problem(self, place: str, message: str) -> None:
        self.problems.setdefault(place, f"{place}: {message}" if place else message)


def _placeholder() -> Merge:
    """Replacement for an invalid merge, so that the import can continue and find further problems.

    The merge is never computed, because the import fails.
    """
    return Merge("passthrough", (Source(""),))


def _listed(numbers: Iterable[int | None]) -> str:
    return " and ".join(map(str, sorted(numbers, key=str)))
