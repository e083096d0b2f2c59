"""Plans of merges: the tensors to compute for a recipe, after checking it against the source models.

This module computes no tensors. Tensors have their names in the merged model in Hugging Face's format.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import COMPONENTS, Merge, Recipe, Source
from workers.errors import InvalidModel
from workers.merging.bank import Bank
from workers.merging.merged_tensor import MergedTensor, pieces_of
from workers.merging.residual_scales import UNSCALED, branch_factors
from workers.models.components import first_few
from workers.models.vocabulary import BASE, UNION

__all__ = [
    "TensorPlan",
    "check_recipe",
    "computation",
    "computations",
    "merged_names",
    "named_sources",
    "plan_as_stated",
    "plan_tensors",
]


@dataclass(frozen=True)
class TensorPlan:
    """A recipe that was checked against the source models, with the ordered list of all tensors to compute.

    Functions that accept a recipe also accept its plan, and then need not check the recipe again. For example, writing
    a merge into an engine takes several calls with one plan. A plan is valid for the bank (source weights in memory)
    for which it was made. `aliases` maps the recipe's aliases to the bank's aliases.
    """

    recipe: Recipe
    tensors: tuple[MergedTensor, ...]
    aliases: Mapping[str, str]


def merged_names(recipe: Recipe | TensorPlan, bank: Bank) -> dict[str, tuple[int, ...]]:
    """The name and shape of every merged tensor, in the order of the function `materialize.merged_tensors`.

    `recipe` is the recipe of the merge, or a plan made from it; `bank` has the weights of its models. Raises
    InvalidRecipe, InvalidModel or EvidenceMismatch if the recipe cannot be merged from these models (function
    `plan_tensors`).
    """
    return {name: shape for tensor in plan_tensors(recipe, bank).tensors for name, shape in tensor.shapes().items()}


def computations(recipe: Recipe | TensorPlan, bank: Bank) -> dict[str, Hashable]:
    """Descriptions of how the merged tensors of a recipe are computed from the sources, keyed by tensor name.

    A description is a hashable value. Descriptions of several recipes can be compared: tensors with equal descriptions
    are equal bit for bit. `recipe` may also be a plan; `bank` has the weights of the recipe's models.
    """
    plan = plan_tensors(recipe, bank)
    return {
        name: (computation(tensor, plan), part) for tensor in plan.tensors for part, name in enumerate(tensor.shapes())
    }


def check_recipe(recipe: Recipe, bank: Bank) -> None:
    """Check that a recipe can be merged from the source models in `bank`.

    Raises InvalidRecipe, InvalidModel or EvidenceMismatch if it cannot be merged (function `plan_tensors`).
    """
    plan_tensors(recipe, bank)


def plan_tensors(recipe: Recipe | TensorPlan, bank: Bank) -> TensorPlan:
    """Check a recipe against the source models in `bank`, and list the tensors to compute: make the recipe's plan.

    If a plan is given instead of a recipe, it is returned.

    Raises:
        InvalidRecipe: The recipe does not fit the models.
        InvalidModel: The bank does not have the recipe's models, or was opened for another vocabulary.
        EvidenceMismatch: Files of the sources have changed since they were opened.
    """
    return recipe if isinstance(recipe, TensorPlan) else _plan(recipe, recipe.canonical(), bank)


def plan_as_stated(recipe: Recipe, bank: Bank) -> TensorPlan:
    """Plan a recipe with all stated sources, even sources without influence, such as those with weight 0.

    A plan lists the tensors of the merge, each with the sources from which it is computed; `bank` has the weights of
    the sources. Gradients need this plan, because they also have derivatives with respect to the coefficients of these
    sources. The merged model is the same as with the function `plan_tensors`, except for rounding, because sums may be
    computed in another order. Raises InvalidRecipe, InvalidModel or EvidenceMismatch if the recipe cannot be merged.
    """
    recipe.check()
    return _plan(recipe, recipe, bank)


def _plan(given: Recipe, recipe: Recipe, bank: Bank) -> TensorPlan:
    bank.sources.check_unchanged()
    aliases = _bank_aliases(recipe, bank)
    plan = _part(recipe, recipe.embedding, "embedding", None, bank, aliases)
    scaled = branch_factors(recipe.layers, model_type=str(bank.base.config.get("model_type")))
    for index, (layer, factors) in enumerate(zip(recipe.layers, scaled, strict=True)):
        of_layer = [
            tensor
            for component in COMPONENTS
            for tensor in _part(recipe, layer.component(component), component, index, bank, aliases)
        ]
        if factors != UNSCALED:
            of_layer = [replace(each, factor=factors.of(each.suffix)) for each in of_layer]
        plan += of_layer
    plan += _part(recipe, recipe.head, "head", None, bank, aliases)
    if unknown := recipe.tensors.keys() - {tensor.name for tensor in plan}:
        raise InvalidRecipe(f"tensors: the merged model has no {first_few(unknown)}")
    return TensorPlan(given, tuple(plan), aliases)


def _part(
    recipe: Recipe, merge: Merge, component: str, index: int | None, bank: Bank, aliases: Mapping[str, str]
) -> list[MergedTensor]:
    """List the tensors to compute for one component of a merged layer, or for the embedding or head.

    `component` is the name of the component, such as "embedding". `index` is the index of the merged layer, or None
    outside layers. `merge` is the component's merge in `recipe`; the recipe may have other merges for single tensors.
    `bank` has the weights of the source models. `aliases` maps the names of models in the recipe to their names in the
    bank (the source weights in memory). Raises InvalidRecipe if the models do not have the tensors, or have them in
    different shapes.
    """
    where = component if index is None else f"layer {index}, {component}"
    _check_merge(merge, recipe, where, index, bank, aliases)
    layout = bank.layout
    layouts = {
        source.model: of.stacked if recipe.stacks_experts else of
        for source in named_sources(merge)
        for of in (bank.view(aliases[source.model]).layout,)
    }
    first, *others = named_sources(merge)
    layer, suffixes = first.layer, layouts[first.model].suffixes(component, first.layer)
    for source in others:
        if layouts[source.model].suffixes(component, source.layer) != suffixes:
            raise InvalidRecipe(f"{where}: layers {layer} and {source.layer} do not hold the same tensors")
    planned = []
    for suffix in suffixes:
        name = layout.name(suffix, index)
        own = recipe.tensors.get(name, merge)
        if own is not merge:
            _check_merge(own, recipe, name, index, bank, aliases)
        keys = [(aliases[source.model], layout.name(suffix, source.layer)) for source in named_sources(own)]
        found = [bank.view(alias).tensor(key) for alias, key in keys]
        if missing := sorted({key for (_, key), tensor in zip(keys, found, strict=True) if tensor is None}):
            raise InvalidRecipe(f"{where}: {name}: the models have no {first_few(missing)}")
        shapes = {tensor.shape for tensor in found if tensor is not None}
        if len(shapes) > 1:
            raise InvalidRecipe(f"{where}: {suffix} has different shapes in its source layers: {sorted(shapes)}")
        pieces = pieces_of(bank.view(keys[0][0]), keys[0][1], layout, index)
        planned.append(MergedTensor(name, own, suffix, shapes.pop(), index, pieces=pieces))
    return planned


def named_sources(merge: Merge) -> tuple[Source, ...]:
    """Sources of a merge, followed by its base if the merge names a base."""
    return merge.sources if merge.base is None else (*merge.sources, merge.base)


def _check_merge(
    merge: Merge, recipe: Recipe, where: str, index: int | None, bank: Bank, aliases: Mapping[str, str]
) -> None:
    method = METHODS[merge.method]
    for source in named_sources(merge):
        if (source.layer is None) != (index is None):
            expected = "no layer" if index is None else "a layer"
            raise InvalidRecipe(f"{where}: source {source.model!r} names layer {source.layer}; expected {expected}")
        num_layers = bank.view(aliases[source.model]).layout.num_layers
        if source.layer is not None and not 0 <= source.layer < num_layers:
            raise InvalidRecipe(
                f"{where}: source {source.model!r} names layer {source.layer}; "
                f"the models have layers 0..{num_layers - 1}"
            )
    layers = {source.layer for source in merge.sources}
    if method.needs_base and merge.base is None and len(layers) > 1:
        raise InvalidRecipe(
            f"{where}: {method.name} subtracts the base's layer, so all sources must name one layer; found "
            f"{sorted(layer for layer in layers if layer is not None)}"
        )

    if recipe.trim == "model" and method.trims and layers != {merge.base_in(recipe.base).layer}:
        raise InvalidRecipe(
            f"{where}: trim is model, so {method.name} subtracts each layer of the base from the same layer; expected "
            "sources and base of one layer"
        )


def _bank_aliases(recipe: Recipe, bank: Bank) -> dict[str, str]:
    aliases = {}
    problems = []
    for alias, fingerprint in recipe.models.items():
        held = bank.alias(fingerprint)
        if held is None:
            problems.append(
                f"recipe: model {alias!r} ({fingerprint[:12]}) is not among the given ones: "
                + ", ".join(f"{model.alias} ({model.fingerprint[:12]})" for model in bank.family.models)
            )
        else:
            aliases[alias] = held
    family = bank.family
    if _vocabulary(recipe.tokenizer, recipe.models) != _vocabulary(family.tokenizer, family.fingerprints):
        problems.append(f"recipe: tokenizer is {recipe.tokenizer!r}; the models were opened for {family.tokenizer!r}")
    if dict(recipe.vocabulary) != dict(family.vocabulary):
        problems.append(f"recipe: vocabulary is {recipe.vocabulary}; the models were opened for {family.vocabulary}")
    if recipe.tokenizer != BASE or recipe.vocabulary:
        spare = {model.alias for model in family.models if model.fingerprint not in recipe.models.values()}
        if spare:
            problems.append(
                f"recipe: with tokenizer {recipe.tokenizer!r} it must name every model; {first_few(spare)} is missing"
            )
    if problems:
        raise InvalidModel(tuple(problems))
    return aliases


def _vocabulary(tokenizer: str, fingerprints: Mapping[str, str]) -> str:
    return tokenizer if tokenizer in (BASE, UNION) else fingerprints[tokenizer]


def computation(tensor: MergedTensor, plan: TensorPlan) -> tuple[Hashable, ...]:
    """Description of how a merged tensor is computed from the source weights, as a hashable value.

    `tensor` is one of the merged tensors that `plan` lists. Tensors with equal descriptions are equal bit for bit.
    """
    merge, recipe, aliases = tensor.merge, plan.recipe, plan.aliases
    sources = tuple((aliases[source.model], source.layer) for source in merge.sources)
    base = merge.base_in(recipe.base)
    of = aliases[base.model], base.layer
    how = merge.method, tuple(merge.coefficients.items()), merge.seed, recipe.keeps_equal, recipe.trim, tensor.factor
    return how, tensor.suffix, sources, of
