"""LFS, layer-wise fusion: Su and Geiping, "Fine, I'll Merge It Myself: A Multi-Fidelity Framework for Automated Model
Merging" (2025), sections 3.2.1 and A.6, Table 11.

The layers fall into G consecutive groups, as even as possible; each layer's tensors into C component groups (1: the
whole layer; 3: mlp, attention, norm). A layer group chooses its method and the experts that are merged; a component
group has the method's coefficients. The embedding follows the first layer group; the final norm and the output head
follow the last. With C = 3 both use the group's `norm` coefficients, which Table 11 calls "other".

One bit per expert and layer group selects the experts that are merged. **If no bit is set, all are merged.** So every
configuration is a merge of at least one expert, none has to be repaired or rejected, a surrogate is fitted to exactly
what was proposed, and all experts together, the most promising choice, are slightly more likely than each smaller set.
SLERP merges two models, so it chooses a pair instead: two experts, or one expert and the base. The bits would be
redundant there and do not exist (with `method_per: component` they exist, for the component groups that use another
method). The same holds for all other methods of two models or of one.

Departures from the published code: parameters exist only under the method that uses them, and `t` is the
interpolation parameter itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.methods import METHODS
from search_spaces.parameters import Categorical, Condition, Configuration, Parameter, Parameters
from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe, Source
from search_spaces.spaces.base import LayerGroup, SpaceDescription
from search_spaces.spaces.lfs_methods import PUBLISHED, ComponentGroup
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS

__all__ = ["PAPER", "LfsSpace", "paper_contradictions", "split_layers"]

COMPONENT_GROUPS: dict[int, dict[str, tuple[Component, ...]]] = {
    1: {"layer": COMPONENTS},
    3: {"mlp": ("mlp",), "attention": ("attention",), "norm": ("norm",)},
}

# `preset: paper`: section 4.1 and A.6.
PAPER: dict[str, Any] = {
    "layer_groups": 4,
    "component_groups": 3,
    "methods": tuple(PUBLISHED),
    "method_per": "layer_group",
}


class LfsSpace:
    """The LFS search space over one base model and its experts. Immutable."""

    kind = "lfs"

    def __init__(
        self,
        *,
        base: str,
        experts: Sequence[str],
        fingerprints: Mapping[str, str],
        num_layers: int,
        layer_groups: int = 4,
        component_groups: int = 3,
        methods: Sequence[str] = tuple(PUBLISHED),
        method_per: Literal["layer_group", "component"] = "layer_group",
        preset: Literal["paper"] | None = None,
        tokenizer: str = "base",
    ) -> None:
        """`fingerprints` maps the aliases `base` and `experts` to content fingerprints; `tokenizer` is every recipe's.

        Raises InvalidStudy: no experts, more layer groups than layers, an unknown method, or a `preset` that the
        other arguments contradict."""
        given = {
            "layer_groups": layer_groups,
            "component_groups": component_groups,
            "methods": tuple(methods),
            "method_per": method_per,
        }
        if problems := tuple(_problems(given, num_layers=num_layers, num_experts=len(experts), preset=preset)):
            raise InvalidStudy(problems)
        self._base = base
        self._experts = tuple(experts)
        self._fingerprints = {alias: fingerprints[alias] for alias in (base, *experts)}
        self._tokenizer = tokenizer
        self._layer_groups = split_layers(num_layers, layer_groups)
        self._components = COMPONENT_GROUPS[component_groups]
        self._methods = tuple(name for name in SEARCHED_METHODS if name in methods)
        self._is_per_component = method_per == "component" and component_groups > 1
        self._choices = {
            name: self._operand_choices(name) for name in self._methods if METHODS[name].source_choice != "experts"
        }
        parameters = [p for group in self._layer_groups for p in self._group_parameters(group.name)]
        self.parameters = Parameters(parameters, roles={p.name: self._role(p.name) for p in parameters})

    def describe(self) -> SpaceDescription:
        return SpaceDescription(self.kind, self._layer_groups, dict(self._components))

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        groups = [self._decode_group(group.name, configuration) for group in self._layer_groups]
        layers = tuple(
            LayerRecipe(
                attention=_at_layer(merges["attention"], layer),
                mlp=_at_layer(merges["mlp"], layer),
                norm=_at_layer(merges["norm"], layer),
            )
            for group, merges in zip(self._layer_groups, groups, strict=True)
            for layer in range(group.start, group.stop)
        )
        return Recipe(
            self._fingerprints,
            self._base,
            layers,
            embedding=groups[0]["norm"],
            head=groups[-1]["norm"],
            tokenizer=self._tokenizer,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        renamed = self._with_own_aliases(recipe.canonical())
        if renamed is None or renamed.tensors or len(renamed.layers) != self._layer_groups[-1].stop:
            return None
        configuration: dict[str, Any] = {}
        for group in self._layer_groups:
            merges = _shared_merges(renamed.layers[group.start : group.stop], start=group.start)
            found = None if merges is None else self._encode_group(group.name, merges)
            if found is None:
                return None
            configuration |= found
        try:
            return configuration if self.to_recipe(configuration).digest == recipe.digest else None
        except InvalidConfiguration:  # a number outside its range
            return None

    # Names. A choice with a single option is not a parameter.

    def _method_key(self, group: str, components: str) -> str:
        return f"{group}.{components}.method" if self._is_per_component else f"{group}.method"

    def _choice_key(self, group: str, components: str, method: str) -> str:
        place = f"{group}.{components}" if self._is_per_component else group
        return f"{place}.{method}.{'model' if METHODS[method].source_choice == 'model' else 'pair'}"

    def _bit_key(self, group: str, expert: str) -> str:
        return f"{group}.use.{expert}"

    def _uses(self, group: str, components: str, *methods: str) -> tuple[Condition, ...]:
        """The conditions under which one of `methods` is used, empty if that is certain."""
        if set(self._methods) <= set(methods):
            return ()
        return (Condition(self._method_key(group, components), tuple(m for m in self._methods if m in methods)),)

    def _cell(self, group: str, components: str, method: str) -> ComponentGroup:
        bits = {
            expert: (Condition(self._bit_key(group, expert), (True,)),) if len(self._experts) > 1 else ()
            for expert in self._experts
        }
        uses = self._uses(group, components, method)
        return ComponentGroup(f"{group}.{components}", self._base, self._experts, uses, bits)

    def _role(self, name: str) -> str:
        """What a parameter does, whatever its layer group and component group: its name without them."""
        _, rest = name.split(".", 1)
        first, _, last = rest.partition(".")
        return last if first in self._components else rest

    # Parameters.

    def _group_parameters(self, group: str) -> Iterator[Parameter]:
        searched = tuple(self._components) if self._is_per_component else (next(iter(self._components)),)
        if len(self._methods) > 1:
            for components in searched:
                yield Categorical(self._method_key(group, components), self._methods)
        with_bits = tuple(method for method in self._methods if method not in self._choices)
        if len(self._experts) > 1 and with_bits:
            conditions = () if self._is_per_component else self._uses(group, searched[0], *with_bits)
            for expert in self._experts:
                yield Categorical(self._bit_key(group, expert), (True, False), conditions=conditions)
        for method, choices in self._choices.items():
            if len(choices) > 1:
                for components in searched:
                    key = self._choice_key(group, components, method)
                    yield Categorical(key, tuple(choices), conditions=self._uses(group, components, method))
        for components in self._components:
            for method in self._methods:
                yield from SEARCHED_METHODS[method].parameters(self._cell(group, components, method))

    # From a configuration to merges.

    def _decode_group(self, group: str, configuration: Configuration) -> dict[Component, Merge]:
        merges: dict[Component, Merge] = {}
        for components, members in self._components.items():
            method = configuration.get(self._method_key(group, components), self._methods[0])
            operands = (
                self._chosen(group, components, method, configuration)
                if method in self._choices
                else self._selected(group, configuration)
            )
            merge = SEARCHED_METHODS[method].decode(self._cell(group, components, method), operands, configuration)
            merges |= dict.fromkeys(members, merge)
        return merges

    def _selected(self, group: str, configuration: Configuration) -> tuple[str, ...]:
        chosen = tuple(expert for expert in self._experts if configuration.get(self._bit_key(group, expert)))
        return chosen or self._experts

    def _chosen(self, group: str, components: str, method: str, configuration: Configuration) -> tuple[str, ...]:
        choices = self._choices[method]
        key = self._choice_key(group, components, method)
        return choices[configuration[key]] if len(choices) > 1 else next(iter(choices.values()))

    def _operand_choices(self, method: str) -> dict[str, tuple[str, ...]]:
        """The operands that a method of one or two models can merge, by the name of the choice."""
        with_base = tuple((self._base, expert) for expert in self._experts)
        choices: dict[str, tuple[tuple[str, ...], ...]] = {
            "pair": (*itertools.combinations(self._experts, 2), *with_base),
            "ordered pair": (*itertools.permutations(self._experts, 2), *with_base),
            "model": tuple((model,) for model in (self._base, *self._experts)),
        }
        return {"+".join(models): models for models in choices[METHODS[method].source_choice]}

    # From merges back to a configuration.

    def _with_own_aliases(self, recipe: Recipe) -> Recipe | None:
        """`recipe` with this space's aliases for the same fingerprints; None if it uses other models."""
        mine = {fingerprint: alias for alias, fingerprint in reversed(self._fingerprints.items())}
        names = {alias: mine.get(fingerprint) for alias, fingerprint in recipe.models.items()}
        if None in names.values() or names[recipe.base] != self._base:
            return None

        def rename(merge: Merge) -> Merge:
            return replace(merge, sources=tuple(Source(str(names[s.model]), s.layer) for s in merge.sources))

        known = {**recipe.models, **self._fingerprints}
        return replace(recipe, models=known, base=self._base).rewritten(rename)

    def _encode_group(self, group: str, merges: Mapping[Component, Merge]) -> dict[str, Any] | None:
        by_components = {components: merges[members[0]] for components, members in self._components.items()}
        if any(merges[m] != by_components[name] for name, members in self._components.items() for m in members):
            return None
        possible = [self._methods_of(merge) for merge in by_components.values()]
        choices: list[dict[str, str]] = (
            [dict.fromkeys(by_components, method) for method in self._methods if all(method in p for p in possible)]
            if not self._is_per_component
            else [dict(zip(by_components, methods, strict=True)) for methods in itertools.product(*possible)]
        )
        for methods in choices:
            with_bits = [by_components[c] for c in methods if methods[c] not in self._choices]
            for experts in self._possible_selections(with_bits):
                if (found := self._encode_with(group, by_components, methods, experts)) is not None:
                    return found
        return None

    def _methods_of(self, merge: Merge) -> tuple[str, ...]:
        """The methods that can give `merge`: its own, or any method if it is one of the models unchanged."""
        is_model = merge.method == "passthrough" and not merge.coefficients
        return tuple(name for name in self._methods if is_model or merge.method == name)

    def _possible_selections(self, merges: Sequence[Merge]) -> list[tuple[str, ...]]:
        named = {source.model for merge in merges for source in merge.sources} - {self._base}
        if named:
            return [tuple(expert for expert in self._experts if expert in named)]
        # Base layers: task vectors times 0, or (linear) one expert with weight 0.
        return [self._experts, self._experts[:1]]

    def _encode_with(
        self, group: str, merges: Mapping[str, Merge], methods: Mapping[str, str], experts: tuple[str, ...]
    ) -> dict[str, Any] | None:
        configuration: dict[str, Any] = {}
        # Where each component group has its own method, the bits exist whatever the methods are.
        others = self._methods if self._is_per_component else methods.values()
        if len(self._experts) > 1 and not set(others) <= set(self._choices):
            configuration = {self._bit_key(group, expert): expert in experts for expert in self._experts}
        for components, merge in merges.items():
            method = methods[components]
            operands: tuple[str, ...] | None = experts
            if len(self._methods) > 1:
                configuration[self._method_key(group, components)] = method
            if method in self._choices:
                shared = merges if not self._is_per_component else {components: merge}
                operands = self._operands_of(group, method, shared)
                if operands is not None and len(self._choices[method]) > 1:
                    configuration[self._choice_key(group, components, method)] = "+".join(operands)
            if operands is None:
                return None
            values = SEARCHED_METHODS[method].encode(self._cell(group, components, method), operands, merge)
            if values is None:
                return None
            configuration |= values
        return configuration

    def _operands_of(self, group: str, method: str, merges: Mapping[str, Merge]) -> tuple[str, ...] | None:
        """The choice of operands that all `merges` (by component group) can come from."""
        return next(
            (
                choice
                for choice in self._choices[method].values()
                if all(
                    SEARCHED_METHODS[method].encode(self._cell(group, components, method), choice, merge) is not None
                    for components, merge in merges.items()
                )
            ),
            None,
        )


def split_layers(num_layers: int, num_groups: int) -> tuple[LayerGroup, ...]:
    """`num_groups` consecutive groups of `num_layers` layers; sizes differ by at most one, longer ones first."""
    size, longer = divmod(num_layers, num_groups)
    starts = [i * size + min(i, longer) for i in range(num_groups + 1)]
    return tuple(LayerGroup(f"g{i + 1}", starts[i], starts[i + 1]) for i in range(num_groups))


def _at_layer(merge: Merge, layer: int | None) -> Merge:
    return replace(merge, sources=tuple(Source(source.model, layer) for source in merge.sources))


def _shared_merges(layers: Sequence[LayerRecipe], *, start: int) -> dict[Component, Merge] | None:
    """The merges that all `layers` share, apart from the layer's number; None if they differ."""
    stripped: list[dict[Component, Merge]] = []
    for layer, recipe in enumerate(layers, start):
        merges = {component: recipe.component(component) for component in COMPONENTS}
        own = all(source.layer == layer for merge in merges.values() for source in merge.sources)
        if not own or recipe.scale != 1 or recipe.alignment is not None:
            return None
        stripped.append({component: _at_layer(merge, None) for component, merge in merges.items()})
    return stripped[0] if all(merges == stripped[0] for merges in stripped) else None


def _problems(given: Mapping[str, Any], *, num_layers: int, num_experts: int, preset: str | None) -> Iterator[Problem]:
    if num_experts < 1:
        yield Problem("models.experts", "there are no experts; name at least one")
    if not 1 <= given["layer_groups"] <= num_layers:
        yield Problem(
            "search_space.layer_groups",
            f"{given['layer_groups']} for a model of {num_layers} layers; use 1 to {num_layers}",
        )
    if given["component_groups"] not in COMPONENT_GROUPS:
        yield Problem("search_space.component_groups", f"{given['component_groups']} is not accepted; use 1 or 3")
    if unknown := sorted(set(given["methods"]) - set(SEARCHED_METHODS)):
        yield Problem("search_space.methods", f"unknown methods {unknown}; available: {', '.join(SEARCHED_METHODS)}")
    if not given["methods"]:
        yield Problem("search_space.methods", f"there are no methods; name some of {', '.join(SEARCHED_METHODS)}")
    if preset == "paper":
        yield from paper_contradictions(given)


def paper_contradictions(given: Mapping[str, Any]) -> Iterator[Problem]:
    """A Problem for each field of `given` that contradicts the published space."""
    for name, published in PAPER.items():
        same = set(given[name]) == set(published) if name == "methods" else given[name] == published
        if not same:
            yield Problem(
                f"search_space.{name}",
                f"preset: paper means {name}={_shown(published)}, but {_shown(given[name])} is given; "
                "leave out one of the two",
            )


def _shown(value: Any) -> str:
    return f"[{', '.join(value)}]" if isinstance(value, tuple) else str(value)
