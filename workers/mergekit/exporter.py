"""Conversion of recipes to mergekit configurations, if mergekit computes the same tensors up to float32 rounding.

A configuration has one merge method. Therefore all merges of a recipe must have one method: a weighted sum of models
(passthrough, linear, task_arithmetic, in any mixture), SLERP (with passthrough), or another method that has a
counterpart in mergekit. Recipes that mergekit would compute differently are refused: it may choose other elements among
equal magnitudes, draws other random masks, and differs in corner cases. The functions use mergekit's configuration
format, but not its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from search_spaces.methods import METHODS
from search_spaces.methods.base import MergeMethod
from search_spaces.recipe import COMPONENTS, Merge, Recipe
from workers.merging.residual_scales import BranchFactors
from workers.models.components import Layout
from workers.models.family import ResolvedFamily
from workers.models.remote import id_of, source_name

__all__ = ["Inexpressible", "configuration_text", "family_config", "mergekit_config"]

# Methods that compute each element from one element of each source, so that experts may be stacked or not.
ELEMENT_BY_ELEMENT = {"passthrough", "linear", "weighted_sum", "task_arithmetic", "nearswap"}

# A filter applies to the tensors whose names contain it. The first that fits is used, so norms inside attention are
# first.
COMPONENT_FILTERS = (("norm", "norm"), ("attention", "attn"), ("attention", "attention"), ("mlp", "mlp"))

SUMS = ("passthrough", "linear", "task_arithmetic")


class Inexpressible(ValueError):
    """Raised if no mergekit configuration computes the tensors of a recipe; `reasons` lists all reasons."""

    def __init__(self, *reasons: str) -> None:
        super().__init__(*reasons)
        self.reasons = reasons

    def __str__(self) -> str:
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class _Slice:
    """Adjacent merged layers with equal settings, which become one slice of the mergekit file.

    - `models`: the aliases, in the recipe, of the models that the slice lists
    - `layers`: the first layer of each model
    - `length`: the number of layers of the slice
    - `settings`: the values of each parameter. A key is a pair: the model for which the parameter is set ("" for all
      models), and the parameter's name. A value maps a piece (a component, or a tensor by its name within the layer) to
      the parameter's value there.
    - `base`: the base model that the slice names, or None if it names none
    """

    models: tuple[str, ...]
    layers: Mapping[str, int]
    settings: Mapping[tuple[str, str], Mapping[str, float]]
    length: int = 1
    base: str | None = None


def mergekit_config(
    recipe: Recipe, layout: Layout, directories: Mapping[str, str], *, dtype: str = "float32"
) -> dict[str, Any]:
    """Convert a recipe to a mergekit configuration that computes the same merge, ready to be written as YAML.

    The models are named by `directories`, which has a directory or hub id for each of the recipe's aliases. The models
    are merged in float32, and the merge is stored in `dtype`. `layout` has the names of the models' tensors. Raises
    Inexpressible if mergekit would compute other tensors.
    """
    recipe = recipe.canonical()
    if reasons := _general_reasons(recipe):
        raise Inexpressible(*reasons)
    recipe = _with_scaled_mlps(recipe, layout)
    methods = {merge.method for merge in recipe.merges()}
    if (path := _path_slices(recipe)) is not None:
        method, slices = "passthrough", path
    elif methods <= set(SUMS):
        models = _models(recipe)
        is_linear = any(
            merge.method == "linear" or merge.coefficients.get("scale", 1) != 1 for merge in recipe.merges()
        )
        method = summed = "task_arithmetic" if "task_arithmetic" in methods and not is_linear else "linear"
        slices = _slices(recipe, lambda index: _sum_slice(recipe, index, models, summed, layout))
    elif methods <= {"slerp", "passthrough"}:
        method = "slerp"
        slices = _slices(recipe, lambda index: _slerp_slice(recipe, index, layout))
    else:
        return _counterpart_config(recipe, methods.pop(), layout, directories, dtype=dtype)
    filters = _filters(recipe, layout)
    document: dict[str, Any] = {
        "merge_method": method,
        "slices": [_slice_document(slice_, filters, directories) for slice_ in _joined(slices)],
        "dtype": "float32",
        "out_dtype": dtype,
    }
    if method == "linear":
        document["parameters"] = {"normalize": False}
    if method == "task_arithmetic":
        document["base_model"] = directories[recipe.base]
        document["parameters"] = {"normalize": False, "lambda": 1.0}
    return document


def family_config(
    recipe: Recipe, sources: ResolvedFamily, *, dtype: str, has_directories: bool = True
) -> dict[str, Any]:
    """Convert a recipe over the models `sources` to a mergekit configuration that computes the same merge.

    The merge is stored in `dtype`. Models are named by their hub ids. A model without a hub id is named by its
    directory or, if `has_directories` is False, by its alias. An adapter is named with its base, as BASE+ADAPTER.
    Raises Inexpressible if mergekit would compute other tensors.
    """
    names = _names(sources, has_directories=has_directories)
    held = {alias: "+".join(parts) for alias, parts in names.items()}
    aliases = {content: alias for alias, content in sources.fingerprints.items()}
    directories = {alias: held[aliases.get(content, alias)] for alias, content in recipe.models.items()}
    alignment, stacks = sources.token_alignment, sources.layout.stacks
    reasons = []
    if sources.layout.task_heads:
        reasons.append("mergekit merges heads and towers too, which stay as they are here")
    if alignment.tensors and alignment.num_unnamed:
        reasons.append(f"{alignment.num_unnamed} rows of the embedding stand for no token, which mergekit drops")
    if sources.vocabulary.keys() - {"by_id"}:
        reasons.append("rows of single tokens are chosen, or the vocabulary is padded")
    of_mlps = {layer.mlp.method for layer in recipe.canonical().layers}
    if stacks and not recipe.stacks_experts and (whole := of_mlps - ELEMENT_BY_ELEMENT):
        reasons.append(
            f"experts are merged one by one, by {', '.join(sorted(whole))}, and mergekit merges a layer's as one tensor"
        )
    try:
        layout = sources.layout.stacked if recipe.stacks_experts else sources.layout
        document = mergekit_config(recipe, layout, directories, dtype=dtype)
    except Inexpressible as error:
        raise Inexpressible(*reasons, *error.reasons) from error
    if reasons:
        raise Inexpressible(*reasons)
    if recipe.stacks_experts:
        document["experts"] = "stacked"  # mergekit ignores it
    if alignment.tensors or sources.tokenizer != "base":
        document["tokenizer_source"] = held.get(sources.tokenizer, sources.tokenizer)
    return document


def configuration_text(document: Mapping[str, Any], sources: ResolvedFamily, *, has_directories: bool = True) -> str:
    """YAML text of a mergekit configuration, the result `document` of the function `family_config`.

    If `has_directories` is False, a comment lists the models that the configuration names by their aliases, because
    they have no hub id: a reader replaces the aliases by directories.
    """
    text = yaml.safe_dump(dict(document), sort_keys=False)
    if has_directories:
        return text
    places = {part for parts in _names(sources, has_directories=True).values() for part in parts}
    aliases = {part for parts in _names(sources, has_directories=False).values() for part in parts} - places
    if not (used := sorted(aliases & _named_models(document))):
        return text
    options = " ".join(f"--model {alias}=DIR" for alias in used)
    return (
        f"# {', '.join(used)}: put the directory of the model in place of {'each name' if used[1:] else 'the name'},\n"
        f"# or keep the file as it is: mergesearch merge FILE {options} --out DIR\n{text}"
    )


def _names(sources: ResolvedFamily, *, has_directories: bool) -> dict[str, tuple[str, ...]]:
    """Names that a mergekit configuration gives to the models of `sources`, keyed by alias.

    An adapter has two names, (BASE, ADAPTER); any other model has one name. A model without a hub id is named by its
    directory or, if `has_directories` is False, by its alias. If the model that an adapter changes is not itself among
    `sources`, its alias is that of the adapter with the suffix "-base".
    """
    aliases = {checkpoint.directory.resolve(): alias for alias, checkpoint in sources.checkpoints.items()}

    def name(directory: Path, alias: str) -> str:
        place = directory.resolve()
        return source_name(place) if has_directories or id_of(place) else aliases.get(place, alias)

    return {
        alias: (name(checkpoint.directory, alias),)
        if checkpoint.base is None
        else (name(checkpoint.base.directory, f"{alias}-base"), name(checkpoint.directory, alias))
        for alias, checkpoint in sources.checkpoints.items()
    }


def _named_models(document: Any) -> set[str]:
    """Names of all models in `document`, a mergekit configuration or a part of it; BASE+ADAPTER gives two names."""
    if isinstance(document, Mapping):
        texts = [document.get(key) for key in ("model", "base_model", "tokenizer_source")]
        own = {part for text in texts if isinstance(text, str) for part in text.split("+")}
        return own.union(*map(_named_models, document.values()))
    return set().union(*map(_named_models, document)) if isinstance(document, list) else set()


def _general_reasons(recipe: Recipe) -> list[str]:
    """Reasons why mergekit cannot express a recipe, apart from reasons about single layers or tensor names."""
    merges = recipe.merges()
    reasons = []
    if any(layer.scale != 1 or layer.alignment is not None for layer in recipe.layers):
        reasons.append("layers are scaled or aligned")
    if any(merge.base is not None for merge in merges):
        reasons.append("task vectors are relative to several bases, or to another layer of the base")
    if recipe.trim == "model":
        reasons.append("shares of task vectors are kept of the whole model; mergekit keeps those of each tensor")
    methods = {merge.method for merge in merges}
    if methods <= set(SUMS) or methods <= {"slerp", "passthrough"}:
        return reasons
    for name in sorted(methods):
        method = METHODS[name]
        if _always_differs(method):
            reasons.append(f"{name} {method.mergekit_difference}")
        elif method.takes_seed:
            reasons.append(f"{name} has random masks, which mergekit draws differently")
        elif method.mergekit is None and name not in SUMS:
            reasons.append(f"mergekit has no {name}")
    if len(methods) > 1:
        reasons.append(f"mergekit applies one method to a whole model; this recipe has {', '.join(sorted(methods))}")
    return reasons


def _slices(recipe: Recipe, slice_of: Callable[[int], _Slice]) -> list[_Slice]:
    """Make the slice of each layer of `recipe` with `slice_of`. Raises Inexpressible with the reasons of all layers."""
    slices: list[_Slice] = []
    reasons: dict[str, None] = {}
    for index in range(len(recipe.layers)):
        try:
            slices.append(slice_of(index))
        except Inexpressible as error:
            reasons |= dict.fromkeys(error.reasons)
    if reasons:
        raise Inexpressible(*reasons)
    return slices


def _with_scaled_mlps(recipe: Recipe, layout: Layout) -> Recipe:
    """Copy `recipe`, and replace its MLP scales by scaled tensors, because mergekit has no MLP scales.

    An MLP scale is a factor on the output of a layer's MLP. Instead, the last tensors of the MLP become copies of the
    source's tensors that are multiplied by the scale; `layout` has the names of the models' tensors. Raises
    Inexpressible if an MLP that has a scale is merged from several models.
    """
    if all(layer.mlp_scale == 1 for layer in recipe.layers):
        return recipe
    layers, tensors = list(recipe.layers), dict(recipe.tensors)
    for index, layer in enumerate(recipe.layers):
        layers[index], factors = replace(layer, mlp_scale=1.0), BranchFactors(mlp=layer.mlp_scale)
        for suffix in layout.suffixes("mlp", layer.mlp.sources[0].layer):
            if factors.of(suffix) != 1:
                name = layout.name(suffix, index)
                merge = tensors.get(name, layer.mlp)
                if merge.method != "passthrough":
                    raise Inexpressible(f"layer {index}: the output of a merged MLP is scaled")
                scale = float(merge.number("scale")) * factors.of(suffix)
                tensors[name] = replace(merge, coefficients={"scale": scale})
    return replace(recipe, layers=tuple(layers), tensors=tensors).canonical()


def _always_differs(method: MergeMethod) -> bool:
    is_sometimes_exact = method.mergekit is not None and bool(method.mergekit.exact_at)
    return method.mergekit_difference is not None and not is_sometimes_exact


def _counterpart_config(
    recipe: Recipe, method: str, layout: Layout, directories: Mapping[str, str], *, dtype: str
) -> dict[str, Any]:
    """Convert a recipe whose merges all use the method `method` to a mergekit configuration.

    mergekit also has this method, but may call it by another name. `layout` has the names of the models' tensors, and
    `directories` has a directory or hub id for each of the recipe's aliases. The merge is stored in `dtype`. Raises
    Inexpressible if mergekit would compute other tensors.
    """
    counterpart = METHODS[method].mergekit
    assert counterpart is not None
    slices = _slices(recipe, lambda index: _counterpart_slice(recipe, index, METHODS[method], layout))
    if len({len(slice_.models) for slice_ in slices}) > 1:
        raise Inexpressible("mergekit merges the same number of models in all layers")
    filters = _filters(recipe, layout)
    document: dict[str, Any] = {
        "merge_method": counterpart.method,
        "slices": [_slice_document(slice_, filters, directories) for slice_ in _joined(slices)],
        "dtype": "float32",
        "out_dtype": dtype,
    }
    if counterpart.base == "recipe":
        document["base_model"] = directories[recipe.base]
    if counterpart.written_settings:
        document["parameters"] = dict(counterpart.written_settings)
    return document


def _counterpart_slice(recipe: Recipe, index: int, method: MergeMethod, layout: Layout) -> _Slice:
    counterpart = method.mergekit
    assert counterpart is not None
    parameters = {parameter.name for parameter in counterpart.parameters}
    merges = _pieces(recipe, index, layout)
    orders = {tuple(source.model for source in merge.sources) for merge in merges.values()}
    if len(orders) > 1:
        raise Inexpressible(f"the slice of layer {index} merges different models: {sorted(orders)}")
    sources = orders.pop()
    if len(set(sources)) < len(sources):
        raise Inexpressible("a merge takes several layers of one model")
    settings: dict[tuple[str, str], dict[str, float]] = {}
    for piece, merge in merges.items():
        if any(set(merge.per_source(name)) != {exact} for name, exact in counterpart.exact_at.items()):
            raise Inexpressible(f"{method.name} {method.mergekit_difference}")
        for coefficient in (c for c in method.coefficients if c.name in parameters):
            for model, number in zip(sources, merge.per_source(coefficient.name), strict=True):
                owner = model if coefficient.per_model else ""
                settings.setdefault((owner, coefficient.name), {})[piece] = number
    if counterpart.base == "recipe" and recipe.base in sources:
        raise Inexpressible(f"{method.name} has the base among its sources")
    models = (recipe.base, *sources) if counterpart.base == "recipe" else sources
    base = sources[0] if counterpart.base == "first" else None
    return _Slice(models, _layers(merges, index, models), settings, base=base)


def _pieces(recipe: Recipe, index: int, layout: Layout) -> dict[str, Merge]:
    """The merges of one merged layer, keyed by the names of its parts ("pieces") in a mergekit file.

    `index` is the index of the layer in `recipe`. A piece is a component, such as "mlp". If single tensors of the
    recipe have separate merges, a piece is a tensor, by its name within the layer; `layout` has the names of the
    models' tensors. The first layer also has the embedding, and the last layer also has the head, because mergekit
    takes their parameters from the first and the last slice.
    """
    parts: dict[str, tuple[Merge, int | None]] = {
        name: (recipe.layers[index].component(name), index) for name in COMPONENTS
    }
    if index == 0:
        parts["embedding"] = recipe.embedding, None
    if index == len(recipe.layers) - 1:
        parts["head"] = recipe.head, None
    if not recipe.tensors:
        return {name: merge for name, (merge, _) in parts.items()}
    return {
        suffix: recipe.tensors.get(layout.name(suffix, layer), merge)
        for name, (merge, layer) in parts.items()
        for suffix in layout.suffixes(name, merge.sources[0].layer)
    }


def _models(recipe: Recipe) -> tuple[str, ...]:
    """Aliases of all models that the recipe uses; the base is first if it is used.

    A mergekit file for merges that are weighted sums lists all of these models in every slice.
    """
    used = {source.model for merge in recipe.merges() for source in merge.sources}
    if any(merge.method == "task_arithmetic" for merge in recipe.merges()):
        used.add(recipe.base)
    return tuple(sorted(used, key=lambda model: (model != recipe.base, recipe.models[model])))


def _layers(merges: Mapping[str, Merge], index: int, models: tuple[str, ...]) -> dict[str, int]:
    """The source layer of each model for the merged layer with the index `index`, keyed by the model's alias.

    `merges` are the merges of the merged layer. A model of `models` that no merge uses gets an arbitrary layer, because
    a slice must name a layer of every model. Raises Inexpressible if several layers of one model are used.
    """
    used: dict[str, int] = {}
    for merge in merges.values():
        for source in merge.sources:
            if source.layer is not None and used.setdefault(source.model, source.layer) != source.layer:
                raise Inexpressible(
                    f"layer {index} takes layers {used[source.model]} and {source.layer} of model {source.model!r}"
                )
    some = next(iter(used.values()))
    return {model: used.get(model, some) for model in models}


def _sum_slice(recipe: Recipe, index: int, models: tuple[str, ...], method: str, layout: Layout) -> _Slice:
    settings: dict[tuple[str, str], dict[str, float]] = {(model, "weight"): {} for model in models}
    merges = _pieces(recipe, index, layout)
    layers = _layers(merges, index, models)
    for piece, merge in merges.items():
        weights = _weights(merge, recipe.base)
        layer = merge.sources[0].layer
        if merge.method == "task_arithmetic" and layer is not None and layers[recipe.base] != layer:
            raise Inexpressible(f"layer {index}: task vectors of another layer than the base's")
        for model in models:
            settings[model, "weight"][piece] = weights.get(model, 0.0)
    if method == "task_arithmetic":
        del settings[recipe.base, "weight"]  # its weight is one by definition
    return _Slice(models, layers, settings)


def _weights(merge: Merge, base: str) -> dict[str, float]:
    """Weights of the models in a merge that is a weighted sum: passthrough, linear or task arithmetic.

    `base` is the base model, which in task arithmetic has the weight 1 minus the sum of the lambdas.
    """
    if merge.method == "passthrough":
        return {merge.sources[0].model: float(merge.number("scale"))}
    sources = [source.model for source in merge.sources]
    if len(set(sources)) < len(sources):
        raise Inexpressible("a merge takes several layers of one model")
    if merge.method == "linear":
        weights = merge.per_source("weight")
        return {model: weight / math.fsum(weights) for model, weight in zip(sources, weights, strict=True)}
    lambdas = merge.per_source("lambda")
    return {base: 1 - math.fsum(lambdas), **dict(zip(sources, lambdas, strict=True))}


def _path_slices(recipe: Recipe) -> list[_Slice] | None:
    """Make one mergekit slice per layer for a recipe that copies whole layers, with at least one not at its own index.

    Returns None for any other recipe. mergekit takes the embedding from the first layer's model, and the head from the
    last layer's model; if the recipe takes them from other models, the result is also None.
    """
    merges = [layer.component(name) for layer in recipe.layers for name in COMPONENTS]
    is_copy = all(each.method == "passthrough" and each.number("scale") == 1 for each in recipe.merges())
    taken = [layer.attention.sources[0] for layer in recipe.layers]
    is_whole = [merge.sources[0] for merge in merges] == [source for source in taken for _ in COMPONENTS]
    if not is_copy or not is_whole or recipe.tensors or [s.layer for s in taken] == list(range(len(taken))):
        return None
    if (recipe.embedding.sources[0].model, recipe.head.sources[0].model) != (taken[0].model, taken[-1].model):
        return None
    return [_Slice((source.model,), {source.model: source.layer or 0}, {}) for source in taken]


def _slerp_slice(recipe: Recipe, index: int, layout: Layout) -> _Slice:
    merges = _pieces(recipe, index, layout)
    used = sorted(
        {source.model for merge in merges.values() for source in merge.sources}, key=recipe.models.__getitem__
    )
    if len(used) == 1:
        used.append(next(model for model in _models(recipe) if model != used[0]))
    if len(used) > 2:
        raise Inexpressible(f"mergekit's slerp takes two models; the slice of layer {index} takes {used}")
    first, second = used
    settings = {}
    for piece, merge in merges.items():
        if merge.method == "passthrough":
            if merge.number("scale") != 1:
                raise Inexpressible("mergekit's slerp does not scale")
            settings[piece] = float(merge.sources[0].model == second)
        else:
            t = merge.number("t")
            settings[piece] = t if merge.sources[0].model == first else 1 - t
        if len({source.model for source in merge.sources}) < len(merge.sources):
            raise Inexpressible("a merge takes several layers of one model")
    return _Slice((first, second), _layers(merges, index, (first, second)), {("", "t"): settings}, base=first)


def _joined(slices: list[_Slice]) -> list[_Slice]:
    """Join adjacent slices of a mergekit file that have the same models, consecutive layers and compatible settings.

    A setting of a slice is for one piece (a component or a single tensor). A joined slice has the settings of both
    slices.
    """
    joined = slices[:1]
    for slice_ in slices[1:]:
        last = joined[-1]
        follows = all(slice_.layers[model] == last.layers.get(model, -1) + last.length for model in slice_.models)
        settings = _compatible(last.settings, slice_.settings)
        if last.models == slice_.models and follows and settings is not None:
            joined[-1] = _Slice(last.models, last.layers, settings, last.length + 1, last.base)
        else:
            joined.append(slice_)
    return joined


def _compatible(
    first: Mapping[tuple[str, str], Mapping[str, float]], second: Mapping[tuple[str, str], Mapping[str, float]]
) -> dict[tuple[str, str], dict[str, float]] | None:
    """Combine the settings of two slices of a mergekit file; return None if they contradict each other.

    `first` and `second` are the settings of the two slices. A setting maps (model, name of a parameter) to the
    parameter's value in each piece (a component or a single tensor); the model is "" for all models. Two slices
    contradict each other if they set different parameters, or different values for the same piece.
    """
    if first.keys() != second.keys():
        return None
    for owner in first:
        for component in first[owner].keys() & second[owner].keys():
            if first[owner][component] != second[owner][component]:
                return None
    return {owner: {**first[owner], **second[owner]} for owner in first}


def _filters(recipe: Recipe, layout: Layout) -> tuple[tuple[str, str], ...]:
    """Filters that select the tensors of each piece in a mergekit file: pairs (piece, filter) in order of precedence.

    A piece is a component, or a single tensor if the recipe has merges of single tensors. A filter matches the tensors
    whose names contain it; the first filter that matches a tensor is used. Raises Inexpressible if, with the tensor
    names of `layout`, a filter would select tensors of another piece.
    """
    by_tensor = bool(recipe.tensors)
    pieces = {name: place.suffix if by_tensor else place.component for name, place in layout.places.items()}
    outside = [(pieces[name], name) for name, place in layout.places.items() if place.layer is None]
    suffixes = sorted({place.suffix for place in layout.places.values() if place.layer is not None})
    longest_first = [(suffix, suffix) for suffix in sorted(suffixes, key=len, reverse=True)]
    filters = (*outside, *(longest_first if by_tensor else COMPONENT_FILTERS))
    for name, piece in pieces.items():
        found = next((found for found, part in filters if part in name), None)
        if found != piece:
            raise Inexpressible(f"mergekit's filters match {name!r} as {found}; it is {piece}")
    return filters


def _slice_document(
    slice_: _Slice, filters: tuple[tuple[str, str], ...], directories: Mapping[str, str]
) -> dict[str, Any]:
    def setting(values: Mapping[str, float]) -> float | list[dict[str, Any]]:
        if len(set(values.values())) == 1:
            return next(iter(values.values()))
        return [{"filter": part, "value": values[name]} for name, part in filters if name in values]

    def settings(owner: str) -> dict[str, Any]:
        return {name: setting(values) for (of, name), values in slice_.settings.items() if of == owner}

    sources = []
    for model in slice_.models:
        start = slice_.layers[model]
        source: dict[str, Any] = {"model": directories[model], "layer_range": [start, start + slice_.length]}
        if own := settings(model):
            source["parameters"] = own
        sources.append(source)
    document: dict[str, Any] = {"sources": sources}
    if slice_.base is not None:
        document["base_model"] = directories[slice_.base]
    if shared := settings(""):
        document["parameters"] = shared
    return document
