"""LFS, layer-wise fusion: groups of layers that each choose a merge method, the models to merge and the coefficients.

Su and Geiping, "Fine, I'll Merge It Myself: A Multi-Fidelity Framework for Automated Model Merging" (2025), sections
3.2.1 and A.6, Table 11.

The layers are divided into G consecutive groups of sizes that are as equal as possible. Each layer's tensors are
divided into C component groups (1: the whole layer; 3: mlp, attention, norm). A layer group chooses its method and the
experts that are merged. A component group has the method's coefficients. The embedding follows the first layer group;
the final norm and the output head follow the last layer group. With C = 3 both use the group's `norm` coefficients,
which Table 11 calls "other".

One bit per expert and layer group selects the experts that are merged. **If no bit is set, all experts are merged.**
Therefore every configuration is a merge of at least one expert. No configuration has to be repaired or rejected, so a
surrogate model is fitted to exactly the proposed configurations. The set of all experts, the most promising choice, is
slightly more likely than each smaller set.

SLERP merges two models, so it chooses a pair instead: two experts, or one expert and the base. All other methods of two
models, and methods of one model, choose their models in the same way. For these methods, bits would be redundant and do
not exist. With `method_per: component` the bits always exist, because another component group may need them.

With `selection: all`, as in the published code, every group merges all experts. There are no bits, and for SLERP and
other methods of two models, a pair consists of two experts, never of the base and an expert.

docs/reference/departures.md lists how the defaults differ from the paper and from the published code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.methods import METHODS
from search_spaces.parameters import Categorical, Condition, Configuration, Parameter, Parameters
from search_spaces.recipe import COMPONENTS, Component, LayerRecipe, Merge, Recipe, Trimming
from search_spaces.spaces.base import ParameterPlace, SearchedModels, SpaceDescription, SpaceSection, repeated
from search_spaces.spaces.layers import shared_merges, split_layers, with_own_aliases
from search_spaces.spaces.lfs_methods import DIRECTED, PUBLISHED, ComponentGroup, SearchedMethod
from search_spaces.spaces.lfs_ranges import SEARCHED_METHODS

__all__ = ["PAPER", "SPACE", "LfsMethod", "LfsSection", "LfsSpace"]

COMPONENT_GROUPS: dict[int, dict[str, tuple[Component, ...]]] = {
    1: {"layer": COMPONENTS},
    3: {"mlp": ("mlp",), "attention": ("attention",), "norm": ("norm",)},
}

# `preset: paper`: section 4.1 and A.6. Every value that the paper or its code leaves open is allowed: selections of
# experts as in section 3.2.1 or all experts as in the code, and a method for each layer group (Table 11) or component
# group (the dimensions G x C x (1 + H) of section 3.2.1).
PAPER: dict[str, Any] = {
    "layer_groups": 4,
    "component_groups": 3,
    "methods": tuple(PUBLISHED),
    "lambdas": "shared",
}

if TYPE_CHECKING:
    LfsMethod = str
else:
    LfsMethod = Literal[tuple(SEARCHED_METHODS)]


class LfsSection(SpaceSection):
    kind: Literal["lfs"]
    """lfs: one merge method per layer group, its coefficients per component group."""
    layer_groups: Annotated[int, Field(ge=1)] = 4
    """The number of groups of adjacent layers that each choose their method and experts; at most the number of layers.
    """
    component_groups: Literal[1, 3] = 3
    """How many sets of coefficients a layer has. 1: one for the whole layer; 3: one each for mlp, attention and norms.
    """
    methods: Annotated[tuple[LfsMethod, ...], Field(min_length=1)] = tuple(PUBLISHED)
    method_per: Literal["layer_group", "component"] = "layer_group"
    """The unit that chooses a method: each layer group, or each component group in it."""
    selection: Literal["subset", "all"] = "subset"
    """The experts that a group merges. subset: the search selects them, for SLERP a pair of experts or one with the
    base; all: every group merges all experts, SLERP any pair of them.
    """
    lambdas: Literal["shared", "per_model"] = "shared"
    """Task arithmetic's lambda: one for all selected experts, or one for each, searched as a direction and a scale."""
    trim: Trimming = "tensor"
    """The unit of which methods that trim task vectors keep a share: each tensor, or the whole model's task vector."""
    preset: Literal["paper"] | None = None
    """A published configuration of the space. paper: the published methods, groups and ranges. Options that contradict
    it are refused.
    """

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return self.methods

    def place_of(self, parameter: str, *, experts: Sequence[str], num_layers: int) -> ParameterPlace:
        groups = {group.name: group for group in split_layers(num_layers, self.layer_groups)}
        group, _, rest = parameter.partition(".")
        first, _, tail = rest.partition(".")
        if is_of_part := first in COMPONENT_GROUPS[self.component_groups]:
            rest = tail
        pieces = rest.split(".", 1) if rest.startswith("use.") else rest.split(".", 2)[1:]  # METHOD.COEFFICIENT.EXPERT
        expert = pieces[1] if len(pieces) == 2 and pieces[1] in experts else None
        return ParameterPlace(groups.get(group), first if is_of_part and first != "layer" else None, expert)

    def contradictions(self) -> Iterator[Problem]:
        yield from repeated("methods", self.methods)
        if self.trim == "model" and not any(METHODS[name].trims for name in self.methods):
            yield Problem("search_space.trim", "has no effect: none of the methods trims task vectors; leave it out")
        if self.preset == "paper":
            yield from _paper_contradictions(self.model_dump())

    def build(self, models: SearchedModels) -> LfsSpace:
        return LfsSpace(
            base=models.base,
            experts=models.experts,
            fingerprints=models.fingerprints,
            num_layers=models.num_layers,
            tokenizer=models.tokenizer,
            **self.model_dump(exclude={"kind"}),
        )


SPACE = LfsSection


class LfsSpace:
    """The search space LFS (layer-wise fusion) over one base model and its experts. Immutable.

    Each group of layers chooses a merge method and the experts that are merged, and has its own coefficients.
    """

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
        selection: Literal["subset", "all"] = "subset",
        lambdas: Literal["shared", "per_model"] = "shared",
        trim: Trimming = "tensor",
        preset: Literal["paper"] | None = None,
        tokenizer: str = "base",
    ) -> None:
        """Build the space over the base model `base` and its `experts`, which are aliases.

        `fingerprints` maps these aliases to content fingerprints. `num_layers` is the number of layers of each model.
        `tokenizer` is the tokenizer of every recipe. The other arguments are the options with the same names in the
        study file's section `search_space`, where they are described. Raises InvalidStudy if there are no experts, if
        there are more layer groups than layers, for an unknown method, and for options that contradict the `preset`.
        """
        given = {
            "layer_groups": layer_groups,
            "component_groups": component_groups,
            "methods": tuple(methods),
            "method_per": method_per,
            "selection": selection,
            "lambdas": lambdas,
        }
        if problems := tuple(_problems(given, num_layers=num_layers, num_experts=len(experts), preset=preset)):
            raise InvalidStudy(problems)
        self._base = base
        self._experts = tuple(experts)
        self._fingerprints = {alias: fingerprints[alias] for alias in (base, *experts)}
        self._tokenizer = tokenizer
        self._trim = trim
        self._layer_groups = split_layers(num_layers, layer_groups)
        self._components = COMPONENT_GROUPS[component_groups]
        self._methods = tuple(name for name in SEARCHED_METHODS if name in methods)
        self._is_directed = lambdas == "per_model" and DIRECTED.name in methods
        self._selects = selection == "subset" and len(experts) > 1
        self._pairs_with_base = selection == "subset"
        self._is_per_component = method_per == "component" and component_groups > 1
        self._choices = {
            name: self._operand_choices(name) for name in self._methods if METHODS[name].source_choice != "experts"
        }
        parameters = [p for group in self._layer_groups for p in self._group_parameters(group.name)]
        self.parameters = Parameters(parameters, roles={p.name: self._role(p.name) for p in parameters})

    def describe(self) -> SpaceDescription:
        text = (
            f"one of {', '.join(self._methods)} in each of {len(self._layer_groups)} groups of layers; coefficients by "
            f"{', '.join(self._components)}"
        )
        return SpaceDescription(self.kind, self._layer_groups, dict(self._components), text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        groups = [self._decode_group(group.name, configuration) for group in self._layer_groups]
        layers = tuple(
            LayerRecipe(
                attention=merges["attention"].at_layer(layer),
                mlp=merges["mlp"].at_layer(layer),
                norm=merges["norm"].at_layer(layer),
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
            trim=self._trim,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        renamed = with_own_aliases(recipe.canonical(), base=self._base, fingerprints=self._fingerprints)
        if renamed is None or renamed.tensors or len(renamed.layers) != self._layer_groups[-1].stop:
            return None
        configuration: dict[str, Any] = {}
        for group in self._layer_groups:
            merges = shared_merges(renamed.layers[group.start : group.stop], start=group.start)
            found = None if merges is None else self._encode_group(group.name, merges)
            if found is None:
                return None
            configuration |= found
        try:
            return configuration if self.to_recipe(configuration).digest == recipe.digest else None
        except InvalidConfiguration:  # a number outside its range
            return None

    def _searched(self, method: str) -> SearchedMethod:
        return DIRECTED if self._is_directed and method == DIRECTED.name else SEARCHED_METHODS[method]

    # Names. A choice with a single option is not a parameter.

    def _method_key(self, group: str, components: str) -> str:
        return f"{group}.{components}.method" if self._is_per_component else f"{group}.method"

    def _choice_key(self, group: str, components: str, method: str) -> str:
        place = f"{group}.{components}" if self._is_per_component else group
        return f"{place}.{method}.{'model' if METHODS[method].source_choice == 'model' else 'pair'}"

    def _bit_key(self, group: str, expert: str) -> str:
        return f"{group}.use.{expert}"

    def _uses(self, group: str, components: str, *methods: str) -> tuple[Condition, ...]:
        """Conditions under which a component group of a layer group is merged by one of the methods `methods`.

        A condition says that a search parameter has one of certain values. `components` is the name of the component
        group, such as attention, and `group` is the name of the layer group. Returns () if `methods` contains all
        methods of the space, because no condition is needed then.
        """
        if set(self._methods) <= set(methods):
            return ()
        return (Condition(self._method_key(group, components), tuple(m for m in self._methods if m in methods)),)

    def _cell(self, group: str, components: str, method: str) -> ComponentGroup:
        bits = {
            expert: (Condition(self._bit_key(group, expert), (True,)),) if self._selects else ()
            for expert in self._experts
        }
        uses = self._uses(group, components, method)
        return ComponentGroup(f"{group}.{components}", self._base, self._experts, uses, bits)

    def _role(self, name: str) -> str:
        """Role of the search parameter `name`; the role is the same in all layer groups and component groups.

        A layer group consists of adjacent layers, and a component group is a part of each layer, such as attention. The
        parts of a parameter's name are separated by dots. The role is the name without the parts that name the layer
        group and the component group.
        """
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
        if self._selects and with_bits:
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
                yield from self._searched(method).parameters(self._cell(group, components, method))

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
            merge = self._searched(method).decode(self._cell(group, components, method), operands, configuration)
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
        """The models, or pairs of models, that a search may choose as sources of the merge method `method`.

        The keys are the names of the choices: the aliases of the models, joined by "+". A pair consists of two experts
        or, unless the option is `selection: all`, of the base and an expert. If the method is not symmetric in its two
        models, a pair of experts is listed in both orders.
        """
        with_base = tuple((self._base, expert) for expert in self._experts if self._pairs_with_base)
        choices: dict[str, tuple[tuple[str, ...], ...]] = {
            "pair": (*itertools.combinations(self._experts, 2), *with_base),
            "ordered pair": (*itertools.permutations(self._experts, 2), *with_base),
            "model": tuple((model,) for model in (self._base, *self._experts)),
        }
        return {"+".join(models): models for models in choices[METHODS[method].source_choice]}

    # From merges back to a configuration.

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
        """Names of the space's methods that may produce the canonical merge `merge`.

        If the merge is an unchanged model, the result has all methods of the space, because each of them may give such
        a merge. Otherwise the result has only the merge's own method, or it is empty if the space does not have this
        method.
        """
        is_model = merge.method == "passthrough" and not merge.coefficients
        return tuple(name for name in self._methods if is_model or merge.method == name)

    def _possible_selections(self, merges: Sequence[Merge]) -> list[tuple[str, ...]]:
        if not self._selects:
            return [self._experts]
        named = {source.model for merge in merges for source in merge.sources} - {self._base}
        if named:
            others = [expert for expert in self._experts if expert not in named] if self._is_directed else []
            more = (extra for size in range(len(others) + 1) for extra in itertools.combinations(others, size))
            return [tuple(e for e in self._experts if e in named or e in extra) for extra in more]
        # The base itself: all task vectors times 0 or, with linear, a single expert of weight 0.
        return [self._experts, self._experts[:1]]

    def _encode_with(
        self, group: str, merges: Mapping[str, Merge], methods: Mapping[str, str], experts: tuple[str, ...]
    ) -> dict[str, Any] | None:
        configuration: dict[str, Any] = {}
        # If each component group has its own method, the bits exist for any methods.
        others = self._methods if self._is_per_component else methods.values()
        if self._selects and not set(others) <= set(self._choices):
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
            values = self._searched(method).encode(self._cell(group, components, method), operands, merge)
            if values is None:
                return None
            configuration |= values
        return configuration

    def _operands_of(self, group: str, method: str, merges: Mapping[str, Merge]) -> tuple[str, ...] | None:
        """Find the model or pair of models from which the method `method` can make every merge in `merges`.

        `merges` has the merges of the layer group (adjacent layers) `group`, keyed by component group, such as
        attention. The result is the first choice of sources for which the method has parameter values that give each
        merge, or None if there is no such choice.
        """
        return next(
            (
                choice
                for choice in self._choices[method].values()
                if all(
                    self._searched(method).encode(self._cell(group, components, method), choice, merge) is not None
                    for components, merge in merges.items()
                )
            ),
            None,
        )


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
    of_pairs = [name for name in given["methods"] if name in METHODS and "pair" in METHODS[name].source_choice]
    if given["selection"] == "all" and num_experts == 1 and of_pairs:
        names = ", ".join(of_pairs)
        message = f"all needs two experts for methods of two models ({names}); name another, or use subset"
        yield Problem("search_space.selection", message)
    if preset == "paper":
        yield from _paper_contradictions(given)


def _paper_contradictions(given: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield a problem for each option in `given` that contradicts the published search space (`preset: paper`)."""
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
