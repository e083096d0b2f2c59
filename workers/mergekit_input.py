"""mergekit's configurations as recipes: what users bring from there, where it is computed equally here.

Names and numbers are mergekit's: slices of layers, gradients over them, filters on tensor names, parameters of models,
slices and the whole. What differs: arithmetic is in float32 whatever `dtype` says, and rounded once, to `out_dtype` or
`dtype`; random masks are drawn by tensor name from one seed; with `tokenizer_source` rows of the embedding that stand
for no token are kept; what has no effect is refused, not passed over, unless mergekit knows it (`int8_mask`). How the
methods differ in corner cases is said in `merge_methods`. The functions here know mergekit's configuration format, not
its code; where models are is not known here.
"""

from __future__ import annotations

import difflib
import math
import reprlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COMPONENTS, LayerRecipe, Merge, Recipe, Source
from workers.layout import Layout
from workers.merge_methods import METHODS

__all__ = ["DTYPES", "MERGE_METHODS", "REFUSED_METHODS", "Configuration", "read_configuration", "to_recipe"]

DTYPES = ("float32", "bfloat16", "float16")

Scalar = float | bool


# The methods, by mergekit's names.


@dataclass(frozen=True)
class _Parameter:
    """A parameter of a method: one number for all inputs ("shared"), one for "each" input, or one for each "expert",
    an input that is not the base. Without a `default` it must be given; `is_fixed`: no other value is merged here."""

    name: str
    scope: Literal["shared", "each", "expert"] = "shared"
    default: Scalar | None = None
    is_fixed: bool = False

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)


@dataclass(frozen=True)
class _Inputs:
    """What one tensor is merged from: every source but the base (all, for methods to which a base means nothing), and
    the values of the parameters, those that are per source in the order of `sources`."""

    sources: tuple[Source, ...]
    base: Source | None
    values: Mapping[str, Scalar | tuple[float, ...]]
    seed: int

    def number(self, name: str) -> float:
        value = self.values[name]
        assert not isinstance(value, tuple)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.values[name]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True)
class _Method:
    parameters: tuple[_Parameter, ...]
    base: Literal["needed", "optional", "unused"]
    to_merge: Callable[[_Inputs], Merge]


WEIGHT = _Parameter("weight", "expert")


def _linear(inputs: _Inputs) -> Merge:
    weights = inputs.numbers("weight")
    if not inputs.values["normalize"] and abs(math.fsum(weights) - 1) > 1e-6:
        raise InvalidRecipe(
            f"linear with normalize: false and weights that sum to {math.fsum(weights):g}; here weights sum to 1"
        )
    return Merge("linear", inputs.sources, {"weight": weights})


def _base_first(method: str, *names: str) -> Callable[[_Inputs], Merge]:
    def to_merge(inputs: _Inputs) -> Merge:
        assert inputs.base is not None
        return Merge(method, (inputs.base, *inputs.sources), {name: inputs.number(name) for name in names})

    return to_merge


def _nuslerp(inputs: _Inputs) -> Merge:
    is_flat, by_rows = inputs.values["nuslerp_flatten"], inputs.values["nuslerp_row_wise"]
    if inputs.base is not None and not is_flat:
        raise InvalidRecipe("nuslerp_flatten: false is not merged with a base_model here; leave one of them out")
    unflat = "nuslerp_columns" if by_rows else "nuslerp_rows"
    method = "nuslerp_task_vectors" if inputs.base is not None else "nuslerp" if is_flat else unflat
    return Merge(method, inputs.sources, {"weight": inputs.numbers("weight")})


def _multislerp(inputs: _Inputs) -> Merge:
    method = "multislerp" if inputs.base is None else "multislerp_task_vectors"
    return Merge(method, inputs.sources, {"weight": inputs.numbers("weight")})


def _model_stock(inputs: _Inputs) -> Merge:
    return Merge("model_stock_rows" if inputs.values["filter_wise"] else "model_stock", inputs.sources)


def _on_task_vectors(
    numbers: Callable[[_Inputs], Mapping[str, float | tuple[float, ...]]], method: str
) -> Callable[[_Inputs], Merge]:
    """Without experts the base stays."""

    def to_merge(inputs: _Inputs) -> Merge:
        assert inputs.base is not None
        if not inputs.sources:
            return Merge("passthrough", (inputs.base,))
        seed = inputs.seed if METHODS[method].takes_seed else None
        return Merge(method, inputs.sources, numbers(inputs), seed)

    return to_merge


def _sum(*sparse: str) -> Callable[[_Inputs], Mapping[str, float | tuple[float, ...]]]:
    """Coefficients of base + a sum of task vectors: mergekit's weight, divided or not, times its lambda."""

    def numbers(inputs: _Inputs) -> Mapping[str, float | tuple[float, ...]]:
        weights = inputs.numbers("weight")
        total = math.fsum(weights)
        factor = inputs.number("lambda")
        if inputs.values["normalize"] and abs(total) >= 1e-8:
            factor /= total
        return {"lambda": tuple(factor * weight for weight in weights), **_sparsity(inputs, sparse)}

    return numbers


def _signs(*sparse: str) -> Callable[[_Inputs], Mapping[str, float | tuple[float, ...]]]:
    """Coefficients of base + the task vectors that agree in sign."""

    def numbers(inputs: _Inputs) -> Mapping[str, float | tuple[float, ...]]:
        shared = {name: inputs.number(name) for name in ("lambda", "normalize")}
        return {"weight": inputs.numbers("weight"), **shared, **_sparsity(inputs, sparse)}

    return numbers


def _sparsity(inputs: _Inputs, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """At density 1 or more a task vector is left whole, whatever the other numbers say."""
    if not names:
        return {}
    densities = inputs.numbers("density")
    found = {"density": tuple(min(density, 1.0) for density in densities)}
    for name in names[1:]:
        values = zip(inputs.numbers(name), densities, strict=True)
        found[name] = tuple(0.0 if density >= 1 else value for value, density in values)
    return found


def _shared(*names: str) -> Callable[[_Inputs], Mapping[str, float | tuple[float, ...]]]:
    return lambda inputs: {name: inputs.number(name) for name in names}


def _generalised(
    method: str,
    numbers: Callable[[_Inputs], Mapping[str, float | tuple[float, ...]]],
    *others: _Parameter,
    normalize: bool,
    rescale: bool,
) -> _Method:
    """One of mergekit's variants of task arithmetic. They share their parameters; without a sparse mask `density` and
    `rescale` have no effect."""
    is_sparse = method != "task_arithmetic"
    parameters = (
        WEIGHT,
        _Parameter("density", "expert", 1.0),
        _Parameter("lambda", default=1.0),
        _Parameter("normalize", default=normalize),
        _Parameter("rescale", default=rescale, is_fixed=is_sparse),
        *others,
    )
    return _Method(parameters, "needed", _on_task_vectors(numbers, method))


GAMMA = _Parameter("gamma", "expert", 0.01)
EPSILON = _Parameter("epsilon", "expert", 0.15)

MERGE_METHODS: Mapping[str, _Method] = {
    "passthrough": _Method(
        (_Parameter("scale", "each", 1.0),),
        "unused",
        lambda inputs: Merge("passthrough", inputs.sources, {"scale": inputs.numbers("scale")[0]}),
    ),
    "linear": _Method((_Parameter("weight", "each"), _Parameter("normalize", default=True)), "unused", _linear),
    "slerp": _Method((_Parameter("t"),), "needed", _base_first("slerp", "t")),
    "nuslerp": _Method(
        (WEIGHT, _Parameter("nuslerp_row_wise", default=False), _Parameter("nuslerp_flatten", default=True)),
        "optional",
        _nuslerp,
    ),
    "multislerp": _Method(
        (
            WEIGHT,
            _Parameter("normalize_weights", default=True, is_fixed=True),
            _Parameter("eps", default=1e-8, is_fixed=True),
        ),
        "optional",
        _multislerp,
    ),
    "karcher": _Method(
        (_Parameter("max_iter", default=10.0, is_fixed=True), _Parameter("tol", default=1e-5, is_fixed=True)),
        "unused",
        lambda inputs: Merge("karcher", inputs.sources),
    ),
    "model_stock": _Method((_Parameter("filter_wise", default=False),), "needed", _model_stock),
    "nearswap": _Method((_Parameter("t"),), "needed", _base_first("nearswap", "t")),
    "arcee_fusion": _Method((), "needed", _base_first("arcee_fusion")),
    "task_arithmetic": _generalised("task_arithmetic", _sum(), normalize=False, rescale=False),
    "ties": _generalised("ties_weighted", _signs("density"), normalize=True, rescale=False),
    "dare_linear": _generalised("dare_linear_l1", _sum("density"), normalize=False, rescale=True),
    "dare_ties": _generalised("dare_ties_l1", _signs("density"), normalize=False, rescale=True),
    "breadcrumbs": _generalised("breadcrumbs", _sum("density", "gamma"), GAMMA, normalize=False, rescale=False),
    "breadcrumbs_ties": _generalised(
        "breadcrumbs_ties", _signs("density", "gamma"), GAMMA, normalize=False, rescale=False
    ),
    "della": _generalised("della_l1", _signs("density", "epsilon"), EPSILON, normalize=True, rescale=True),
    "della_linear": _generalised("della_linear_l1", _sum("density", "epsilon"), EPSILON, normalize=False, rescale=True),
    "ram": _Method((_Parameter("epsilon", default=1e-5),), "needed", _on_task_vectors(_shared("epsilon"), "ram")),
    "ramplus_tl": _Method(
        (_Parameter("r", default=0.1), _Parameter("alpha", default=0.2), _Parameter("epsilon", default=1e-5)),
        "needed",
        _on_task_vectors(_shared("r", "alpha", "epsilon"), "ramplus_tl"),
    ),
}

# Methods that have the same name here and compute something else.
REFUSED_METHODS = {"sce": METHODS["sce"].variant}

# Taken by some methods, and without effect on any result.
WITHOUT_EFFECT = ("int8_mask",)


# The document.


@dataclass(frozen=True)
class _Condition:
    """Values, more than one as a gradient over layers, for the tensors whose names contain `filter`."""

    filter: str
    values: tuple[Scalar, ...]
    place: str

    def at(self, t: float) -> Scalar | None:
        """The value at t in [0, 1] of the way through the layers."""
        if not self.values:
            return None
        position = t * (len(self.values) - 1)
        index = int(position)
        if isinstance(self.values[0], bool):
            return self.values[index]
        fraction = position - index
        following = self.values[min(index + 1, len(self.values) - 1)]
        return (1 - fraction) * self.values[index] + fraction * following


Settings = Mapping[str, tuple[_Condition, ...]]


@dataclass(frozen=True)
class _Input:
    """A model in a slice; `layers` None: all of them."""

    model: str
    layers: tuple[int, int] | None
    settings: Settings
    place: str


@dataclass(frozen=True)
class _Slice:
    inputs: tuple[_Input, ...]
    base: str | None
    settings: Settings
    place: str


@dataclass(frozen=True)
class Configuration:
    """A configuration that was understood. Models are named as it names them: directories or hub ids.

    `tokenizer_source` is "base", "union", a model, or None, which is the base without a look at the others' tokens.
    """

    method: str
    slices: tuple[_Slice, ...]
    base_model: str | None = None
    settings: Settings = field(default_factory=dict)
    dtype: str | None = None
    tokenizer_source: str | None = None

    @property
    def base(self) -> str:
        """The model that the merged one has its configuration and tokenizer from, and task vectors their origin."""
        return self.base_model or self.slices[0].base or self.slices[0].inputs[0].model

    @property
    def models(self) -> tuple[str, ...]:
        """Every model, the base first."""
        inputs = (source.model for slice_ in self.slices for source in slice_.inputs)
        bases = (slice_.base for slice_ in self.slices if slice_.base is not None)
        return tuple(dict.fromkeys([self.base, *inputs, *bases]))


def read_configuration(document: Any) -> Configuration:
    """Understand what a mergekit file holds. Raises InvalidRecipe, a line for everything that is wrong or not merged
    here, with its place."""
    reader = _Reader()
    configuration = reader.configuration(document)
    if reader.problems:
        raise InvalidRecipe("\n".join(dict.fromkeys(reader.problems)))
    return configuration


TOP = ("merge_method", "base_model", "models", "slices", "parameters", "dtype", "out_dtype", "tokenizer_source")

NOT_MERGED = {
    "modules": "models of several modules are not merged here; give models or slices",
    "chat_template": "is not set by a merge here; the tokenizer's files are taken as they are",
    "tokens": "tokens of their own are not merged here; give tokenizer_source",
    "pad_to_multiple_of": "the vocabulary is not padded here; leave it out",
    "residual_weight": "has no effect; leave it out",
    "lora": "adapters are not merged here; merge it into its model first",
    "override_architecture": "the architecture is what the model's config.json says; leave it out",
}


class _Reader:
    """Reads a document and collects what is wrong with it."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._method: str | None = None

    def configuration(self, document: Any) -> Configuration:
        top = self._mapping(document, "", (*TOP, "tokenizer", "name"))
        self._method = self._merge_method(top.get("merge_method"))
        if len(top.keys() & {"models", "slices", "modules"}) != 1:
            self._problem("", "expected either models or slices, one of them")
        slices: tuple[_Slice, ...] = ()
        if "models" in top:
            slices = (_Slice(self._inputs(top["models"], "models", has_layers=False), None, {}, ""),)
        elif "slices" in top:
            listed = self._list(top["slices"], "slices")
            slices = tuple(self._slice(node, f"slices.{i}") for i, node in enumerate(listed))
        source = top.get("tokenizer_source")
        if top.get("tokenizer") is not None:
            if source is not None:
                self._problem("tokenizer", "tokenizer_source says it already; give one of them")
            source = self._mapping(top["tokenizer"], "tokenizer", ("source",)).get("source")
        dtypes = [self._dtype(top.get(name), name) for name in ("out_dtype", "dtype")]
        return Configuration(
            method=self._method or "",
            slices=slices,
            base_model=self._optional_model(top.get("base_model"), "base_model"),
            settings=self._settings(top.get("parameters"), "parameters"),
            dtype=next((dtype for dtype in dtypes if dtype), None),
            tokenizer_source=self._optional_model(source, "tokenizer_source"),
        )

    def _merge_method(self, name: Any) -> str | None:
        if isinstance(name, str) and name in MERGE_METHODS:
            return name
        if isinstance(name, str) and name in REFUSED_METHODS:
            self._problem("merge_method", f"{name} is another computation here: {REFUSED_METHODS[name]}")
        else:
            accepted = ", ".join(MERGE_METHODS)
            self._problem(
                "merge_method", f"{_shown(name)} is not merged here; {_nearest(name, MERGE_METHODS)}{accepted}"
            )
        return None

    def _slice(self, node: Any, place: str) -> _Slice:
        found = self._mapping(node, place, ("sources", "base_model", "parameters"))
        inputs = self._inputs(found.get("sources"), f"{place}.sources", has_layers=True)
        ranges = {source.layers[1] - source.layers[0] for source in inputs if source.layers}
        if len(ranges) > 1:
            self._problem(place, f"its sources have {_listed(ranges)} layers; they must have as many")
        base = self._optional_model(found.get("base_model"), f"{place}.base_model")
        return _Slice(inputs, base, self._settings(found.get("parameters"), f"{place}.parameters"), place)

    def _inputs(self, node: Any, place: str, *, has_layers: bool) -> tuple[_Input, ...]:
        known = ("model", "layer_range", "parameters") if has_layers else ("model", "parameters")
        inputs: list[_Input] = []
        for index, entry in enumerate(self._list(node, place)):
            here = f"{place}.{index}"
            found = self._mapping(entry, here, known)
            model = self._model(found.get("model"), f"{here}.model")
            if model in [source.model for source in inputs]:
                self._problem(f"{here}.model", f"{model} is among these already; a model is merged once")
            layers = self._layer_range(found.get("layer_range"), f"{here}.layer_range") if has_layers else None
            settings = self._settings(found.get("parameters"), f"{here}.parameters", is_of_model=True)
            inputs.append(_Input(model, layers, settings, here))
        return tuple(inputs)

    def _layer_range(self, node: Any, place: str) -> tuple[int, int]:
        if isinstance(node, list) and len(node) == 2 and all(type(end) is int for end in node):
            start, stop = node
            if 0 <= start < stop:
                return start, stop
        self._problem(place, f"{_shown(node)} is no range of layers; give [START, END] from 0, END not included")
        return 0, 1

    def _settings(self, node: Any, place: str, *, is_of_model: bool = False) -> Settings:
        settings: dict[str, tuple[_Condition, ...]] = {}
        if self._method is None or node is None:
            return settings
        parameters = {parameter.name: parameter for parameter in MERGE_METHODS[self._method].parameters}
        if not isinstance(node, Mapping):
            self._problem(place, f"{_shown(node)} is not accepted; give a mapping (name: value)")
            return settings
        for name, value in node.items():
            here = f"{place}.{name}"
            parameter = parameters.get(name)
            if name in WITHOUT_EFFECT:
                continue
            if parameter is None:
                takes = ", ".join(parameters) or "none"
                self._problem(
                    here, f"{self._method} takes no such parameter; {_nearest(name, parameters)}it takes {takes}"
                )
            elif is_of_model and parameter.scope == "shared":
                self._problem(here, f"{self._method} has one {name} for all models; give it under parameters")
            else:
                settings[name] = self._conditions(value, here, parameter)
        return settings

    def _conditions(self, node: Any, place: str, parameter: _Parameter) -> tuple[_Condition, ...]:
        if isinstance(node, Mapping):
            return (self._condition(node, place, parameter),)
        if isinstance(node, list) and any(isinstance(entry, Mapping) for entry in node):
            return tuple(self._condition(entry, f"{place}.{i}", parameter) for i, entry in enumerate(node))
        return (_Condition("", self._values(node, place, parameter), place),)

    def _condition(self, node: Any, place: str, parameter: _Parameter) -> _Condition:
        found = self._mapping(node, place, ("filter", "value"))
        text = found.get("filter")
        if text is not None and not isinstance(text, str):
            self._problem(f"{place}.filter", f"{_shown(text)} is not accepted; give a part of a tensor's name")
            text = None
        values = self._values(found.get("value"), f"{place}.value", parameter)
        return _Condition("" if text in (None, "*") else text, values, place)

    def _values(self, node: Any, place: str, parameter: _Parameter) -> tuple[Scalar, ...]:
        entries = node if isinstance(node, list) else [node]
        places = [f"{place}.{i}" for i in range(len(entries))] if isinstance(node, list) else [place]
        values = (self._value(entry, here, parameter) for entry, here in zip(entries, places, strict=True))
        return tuple(value for value in values if value is not None)

    def _value(self, node: Any, place: str, parameter: _Parameter) -> Scalar | None:
        value: Scalar | None = None
        if parameter.is_flag:
            value = bool(node) if node in (True, False) else None
        elif isinstance(node, int | float | str) and not isinstance(node, bool):
            try:
                value = float(node)  # YAML reads 1e-5 as text
            except (ValueError, OverflowError):
                value = None
        if value is None or not math.isfinite(value):
            accepted = "true or false" if parameter.is_flag else "a number, or a list of them as a gradient over layers"
            self._problem(place, f"{_shown(node)} is not accepted; give {accepted}")
            return None
        if parameter.is_fixed and value != parameter.default:
            fixed = str(parameter.default).lower() if parameter.is_flag else f"{parameter.default:g}"
            self._problem(place, f"{_shown(node)} is not merged here; {self._method} has {parameter.name}: {fixed}")
        return value

    def _optional_model(self, node: Any, place: str) -> str | None:
        return None if node is None else self._model(node, place)

    def _model(self, node: Any, place: str) -> str:
        if isinstance(node, Mapping):
            kind = "path" if "path" in node else "model"
            return self._model(self._mapping(node, place, (kind,)).get(kind), f"{place}.{kind}")
        if not isinstance(node, str) or not node:
            self._problem(place, f"{_shown(node)} is no model; give a directory or the id of a hub model")
            return ""
        if "+" in node:
            self._problem(place, f"{node}: {NOT_MERGED['lora']}")
        if "@" in node:
            self._problem(place, f"{node}: revisions are not fetched here; give the directory that holds this one")
        return node

    def _dtype(self, node: Any, place: str) -> str | None:
        name = node.removeprefix("torch.") if isinstance(node, str) else node
        if name is None or name in DTYPES:
            return name
        self._problem(place, f"{_shown(node)} is not written here; give {', '.join(DTYPES)}")
        return None

    def _list(self, node: Any, place: str) -> list[Any]:
        if isinstance(node, list) and node:
            return node
        self._problem(place, f"{_shown(node)} is not accepted; give a list with at least one entry")
        return []

    def _mapping(self, node: Any, place: str, known: tuple[str, ...]) -> Mapping[str, Any]:
        if not isinstance(node, Mapping):
            self._problem(place, f"{_shown(node)} is not accepted; give {', '.join(known)}")
            return {}
        for key in node:
            if key not in known and node[key] is not None:
                here = f"{place}.{key}" if place else str(key)
                message = f"unknown key; {_nearest(key, known)}known keys: {', '.join(known)}"
                self._problem(here, NOT_MERGED.get(key, message))
        return node

    def _problem(self, place: str, message: str) -> None:
        self.problems.append(f"{place}: {message}" if place else message)


# The recipe.


def to_recipe(
    configuration: Configuration,
    aliases: Mapping[str, str],
    *,
    fingerprints: Mapping[str, str],
    layout: Layout,
    seed: int = 0,
) -> Recipe:
    """The recipe that `configuration` describes, of models that all have `layout`.

    `aliases` maps the configuration's names of models to the recipe's, `fingerprints` these to the models' contents;
    `seed` is for methods with random masks. Raises InvalidRecipe, a line for everything that is wrong, with its place.
    """
    builder = _Builder(configuration, aliases, layout, seed)
    recipe_parts = builder.parts()
    if builder.problems:
        raise InvalidRecipe("\n".join(builder.problems.values()))
    return Recipe(fingerprints, aliases[configuration.base], *recipe_parts)


Parts = tuple[tuple[LayerRecipe, ...], Merge, Merge, Mapping[str, Merge]]


class _Builder:
    """Works out the merge of every tensor, then what the tensors of a component have in common.

    `problems` has one for each cause: that the same is wrong in every layer is said once."""

    def __init__(self, configuration: Configuration, aliases: Mapping[str, str], layout: Layout, seed: int) -> None:
        self.problems: dict[object, str] = {}
        self._configuration = configuration
        self._method = MERGE_METHODS[configuration.method]
        self._aliases = aliases
        self._layout = layout
        self._seed = seed
        self._tensors: dict[str, Merge] = {}
        # A tied head is no tensor, but a filter may speak of it.
        self._names = {"lm_head.weight"} if layout.is_tied else set[str]()

    def parts(self) -> Parts:
        """Layers, embedding, head, and single tensors that differ from their component."""
        slices = [self._with_all_inputs(slice_) for slice_ in self._configuration.slices]
        if self.problems:
            return (), _nothing(), _nothing(), {}
        embedding = self._component("embedding", slices[0], offset=None, index=None, t=0)
        layers: list[LayerRecipe] = []
        for slice_ in slices:
            start, stop = self._range(slice_.inputs[0])
            for offset in range(stop - start):
                t = offset / (stop - start - 1) if stop - start > 1 else 1.0
                merges = {
                    name: self._component(name, slice_, offset=offset, index=len(layers), t=t) for name in COMPONENTS
                }
                layers.append(LayerRecipe(**merges))
        head = self._component("head", slices[-1], offset=None, index=None, t=0)
        self._check_filters()
        return tuple(layers), embedding, head, self._tensors

    def _with_all_inputs(self, slice_: _Slice) -> _Slice:
        """The slice with its base made out and among its inputs."""
        where = f"{slice_.place}.base_model" if slice_.base else "base_model"
        base = slice_.base or self._configuration.base_model
        inputs = slice_.inputs
        if base is not None and base not in [source.model for source in inputs]:
            if not slice_.place:
                inputs = (*inputs, _Input(base, None, {}, "base_model"))
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
        return _Slice(inputs, base, slice_.settings, slice_.place)

    def _range(self, source: _Input) -> tuple[int, int]:
        return source.layers or (0, self._layout.num_layers)

    def _component(self, name: str, slice_: _Slice, *, offset: int | None, index: int | None, t: float) -> Merge:
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

    def _merge(self, suffix: str, slice_: _Slice, layers: Sequence[int | None], index: int | None, t: float) -> Merge:
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
            merge = self._method.to_merge(_Inputs(experts, base, values, self._seed))
            merge.check()
        except InvalidRecipe as error:
            self._problem(where, str(error).removeprefix("merge: "))
            return _nothing()
        if METHODS[merge.method].needs_base:
            self._check_base(merge, base, slice_)
        return merge

    def _check_base(self, merge: Merge, base: Source | None, slice_: _Slice) -> None:
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

    def _value(self, parameter: _Parameter, scopes: Sequence[Settings], name: str, t: float, place: str) -> Scalar:
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
        for condition in _conditions(self._configuration):
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


def _conditions(configuration: Configuration) -> Iterator[_Condition]:
    inputs = (source.settings for slice_ in configuration.slices for source in slice_.inputs)
    of_slices = (slice_.settings for slice_ in configuration.slices)
    for settings in (configuration.settings, *of_slices, *inputs):
        for conditions in settings.values():
            yield from conditions


def _nothing() -> Merge:
    """Stands where a problem was found."""
    return Merge("passthrough", (Source(""),))


def _listed(numbers: Any) -> str:
    return " and ".join(map(str, sorted(numbers)))


def _nearest(name: Any, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else []
    return f'did you mean "{near[0]}"? ' if near else ""


def _shown(value: Any) -> str:
    return "nothing" if value is None else reprlib.repr(value)
