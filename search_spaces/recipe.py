"""Recipe: the only interface between search spaces and everything downstream.

A search space decodes a configuration into a Recipe; merging, scoring, exporting, plotting and caching only see
recipes. A recipe names its models by alias and by content fingerprint; its digest uses fingerprints only, so that the
same merge has the same digest whatever the aliases and directories of its models.

`workers.models` decides which tensor belongs to which component.
"""

from __future__ import annotations

import functools
import hashlib
import json
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.methods.base import COEFFICIENT_DECIMALS, Coefficient, CoefficientValue, MergeMethod

__all__ = ["COEFFICIENT_DECIMALS", "COMPONENTS", "Component", "LayerRecipe", "Merge", "Recipe", "Source"]

Component = Literal["attention", "mlp", "norm"]
COMPONENTS: tuple[Component, ...] = ("attention", "mlp", "norm")

# Format 2 is of recipes with a method that cuts at a rank (`MergeMethod.cuts_at_rank`): of elements of equal magnitude
# as many are kept as the rank says. In format 1 all of them were.
FORMAT, FORMAT_OF_CUTS = "mergesearch-recipe/1", "mergesearch-recipe/2"


@dataclass(frozen=True, order=True)
class Source:
    """One operand of a merge: a model's alias and, for decoder layers, which of its layers (0-based)."""

    model: str
    layer: int | None = None


@dataclass(frozen=True)
class Merge:
    """How the tensors of one component are computed from the same tensors of `sources`.

    `coefficients` maps a name to a number (shared by all sources) or to a tuple with one number per source, in the
    order of `sources`. Sources are the operands; methods on task vectors (task_arithmetic, ties) subtract `base`, which
    is not listed: by default the recipe's base model, in the layer of the sources. SLERP's two sources are its ends:
    t = 0 is the first. `seed` is for methods that draw random masks. `methods` declares what each method takes.
    """

    method: str
    sources: tuple[Source, ...]
    coefficients: Mapping[str, CoefficientValue] = field(default_factory=dict)
    seed: int | None = None
    base: Source | None = None

    def __post_init__(self) -> None:
        if not self.sources:
            raise InvalidRecipe(f"merge: method {self.method!r} has no sources; give at least one")
        rounded: dict[str, CoefficientValue] = {}
        for name in sorted(self.coefficients):
            value, decimals = self.coefficients[name], self._decimals(name)
            if isinstance(value, tuple):
                if len(value) != len(self.sources):
                    raise InvalidRecipe(
                        f"merge: {self.method}.{name} has {len(value)} numbers for {len(self.sources)} sources; "
                        "give one per source"
                    )
                rounded[name] = tuple(_rounded(v, decimals) for v in value)
            else:
                rounded[name] = _rounded(value, decimals)
        object.__setattr__(self, "coefficients", rounded)

    def __hash__(self) -> int:
        # Sources after the first rarely make a difference, and take time.
        return hash((self.method, self.sources[0].model, self.sources[0].layer, *self.coefficients.items(), self.seed))

    def number(self, name: str) -> float:
        """The shared coefficient `name`, or its default. Raises InvalidRecipe if it is missing or per source."""
        value = self.coefficients[name] if name in self.coefficients else self._default(name)
        if value is None or isinstance(value, tuple):
            raise InvalidRecipe(f"merge: {self.method} needs one number {name!r}, found {value!r}")
        return value

    def per_source(self, name: str) -> tuple[float, ...]:
        """Coefficient `name`, or its default, for each source; a shared number is repeated.

        Raises InvalidRecipe if it is missing."""
        value = self.coefficients[name] if name in self.coefficients else self._default(name)
        if value is None:
            raise InvalidRecipe(f"merge: {self.method} needs {name!r}, found only {sorted(self.coefficients)}")
        return value if isinstance(value, tuple) else (value,) * len(self.sources)

    def check(self) -> None:
        """Raise InvalidRecipe unless the method accepts these sources, coefficients and seed."""
        declared = METHODS.get(self.method)
        if declared is None:
            raise InvalidRecipe(f"merge: unknown merge method {self.method!r}; known are {', '.join(METHODS)}")
        for problem in declared.problems(len(self.sources), self.coefficients, self.seed):
            raise InvalidRecipe(f"merge: {problem}")
        for coefficient in declared.coefficients:
            if coefficient.per_model:
                self.per_source(coefficient.name)
            else:
                self.number(coefficient.name)
        broken = None if declared.constraint is None else declared.constraint(self.per_source)
        if broken is not None:
            raise InvalidRecipe(f"merge: {self.method}: {broken}")

    def base_in(self, recipe_base: str) -> Source:
        """What methods on task vectors subtract, in a recipe whose base model is `recipe_base`."""
        return self.base or Source(recipe_base, self.sources[0].layer)

    def _default(self, name: str) -> float | None:
        coefficient = self._declared(name)
        return None if coefficient is None else coefficient.default

    def _decimals(self, name: str) -> int:
        coefficient = self._declared(name)
        return COEFFICIENT_DECIMALS if coefficient is None else coefficient.decimals

    def _declared(self, name: str) -> Coefficient | None:
        declared = METHODS.get(self.method)
        return None if declared is None else declared.coefficient(name)

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "method": self.method,
            "sources": [[source.model, source.layer] for source in self.sources],
        }
        if self.coefficients:
            document["coefficients"] = {
                name: list(value) if isinstance(value, tuple) else value for name, value in self.coefficients.items()
            }
        if self.seed is not None:
            document["seed"] = self.seed
        if self.base is not None:
            document["base"] = [self.base.model, self.base.layer]
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        try:
            return cls(
                method=str(document["method"]),
                sources=tuple(map(_source, document["sources"])),
                coefficients={
                    name: tuple(float(v) for v in value) if isinstance(value, list) else float(value)
                    for name, value in document.get("coefficients", {}).items()
                },
                seed=_whole(document.get("seed")),
                base=_source(document["base"]) if "base" in document else None,
            )
        except InvalidRecipe:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRecipe(f"merge: not a merge: {document!r} ({error!r})") from error


@dataclass(frozen=True)
class LayerRecipe:
    """One layer of the merged model. `scale` multiplies the residual stream after the layer (1 = unchanged)."""

    attention: Merge
    mlp: Merge
    norm: Merge
    scale: float = 1.0
    alignment: str | None = None  # digest of the alignment after this layer (workers.alignments)

    def component(self, name: Component) -> Merge:
        merge: Merge = getattr(self, name)
        return merge

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {name: self.component(name).to_json() for name in COMPONENTS}
        if self.scale != 1.0:
            document["scale"] = self.scale
        if self.alignment is not None:
            document["alignment"] = self.alignment
        return document

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        try:
            return cls(
                **{name: Merge.from_json(document[name]) for name in COMPONENTS},
                scale=float(document.get("scale", 1.0)),
                alignment=document.get("alignment"),
            )
        except InvalidRecipe:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRecipe(f"layer: not a layer recipe: {document!r} ({error!r})") from error


@dataclass(frozen=True)
class Recipe:
    """A concrete merge of whole models.

    `models` maps every alias used to its content fingerprint; `base` is the alias of the base model; `layers` are the
    merged model's layers in order; `embedding` is the input embedding (a tied output head follows it); `head` is the
    final norm and, where untied, the output head. `tensors` are single tensors, by their names in the merged model,
    whose merge differs from their component's. `tokenizer` is the merged model's vocabulary, by which the rows of
    embeddings are aligned: "base", "union", or the alias of another model; `vocabulary` says more about it, as
    `workers.models.vocabulary.Wishes` reads it. With a vocabulary other than the base's, `models` keeps models that no
    merge uses, because the vocabulary depends on them.
    `keeps_equal`: methods that cut at a rank keep all elements of the magnitude at that rank, as in format 1.
    `stacks_experts`: all experts of a layer are merged as one tensor, not each by itself.
    """

    models: Mapping[str, str]
    base: str
    layers: tuple[LayerRecipe, ...]
    embedding: Merge
    head: Merge
    tensors: Mapping[str, Merge] = field(default_factory=dict)
    tokenizer: str = "base"
    keeps_equal: bool = False
    vocabulary: Mapping[str, Any] = field(default_factory=dict)
    stacks_experts: bool = False

    def __post_init__(self) -> None:
        if self.keeps_equal and not self._cuts_at_rank():
            object.__setattr__(self, "keeps_equal", False)
        object.__setattr__(self, "models", dict(sorted(self.models.items())))
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))
        used = {self.base, *_models(self.merges())}
        if missing := sorted(used - set(self.models)):
            raise InvalidRecipe(f"recipe: {missing} not in models; known are {sorted(self.models)}")
        if self.tokenizer == self.base:
            object.__setattr__(self, "tokenizer", "base")
        if self.tokenizer not in ("base", "union", *self.models):
            raise InvalidRecipe(
                f"recipe: tokenizer is {self.tokenizer!r}; expected base, union or one of {sorted(self.models)}"
            )

    def __hash__(self) -> int:
        return hash(self.digest)

    def merges(self) -> tuple[Merge, ...]:
        """Every merge of the recipe, layer by layer, then embedding and head, then those of single tensors."""
        in_layers = tuple(layer.component(name) for layer in self.layers for name in COMPONENTS)
        return (*in_layers, self.embedding, self.head, *self.tensors.values())

    def _cuts_at_rank(self) -> bool:
        methods = {merge.method for merge in self.merges()} & METHODS.keys()
        return any(METHODS[method].cuts_at_rank for method in methods)

    def check(self) -> None:
        """Raise InvalidRecipe, with the place, unless every merge is valid for its method."""
        places = [f"layer {index}, {name}" for index in range(len(self.layers)) for name in COMPONENTS]
        checked: set[Merge] = set()  # most recipes repeat few merges
        for place, merge in zip((*places, "embedding", "head", *self.tensors), self.merges(), strict=True):
            if merge in checked:
                continue
            checked.add(merge)
            try:
                merge.check()
            except InvalidRecipe as error:
                raise InvalidRecipe(f"{place}: {str(error).removeprefix('merge: ')}") from error

    def rewritten(self, rewrite: Callable[[Merge], Merge]) -> Recipe:
        """The recipe with `rewrite` applied to every merge, once to equal ones."""
        once = functools.cache(rewrite)
        layers = tuple(
            replace(layer, attention=once(layer.attention), mlp=once(layer.mlp), norm=once(layer.norm))
            for layer in self.layers
        )
        tensors = {name: once(merge) for name, merge in self.tensors.items()}
        return replace(self, layers=layers, embedding=once(self.embedding), head=once(self.head), tensors=tensors)

    def canonical(self) -> Recipe:
        """The equivalent recipe in canonical form: no sources without influence, no unused models, sources ordered by
        (fingerprint, layer), a merge that equals one of its sources as passthrough. Raises InvalidRecipe as `check`."""
        known: Recipe | None = self.__dict__.get("_canonical")
        if known is not None:
            return known
        self.check()
        recipe = self.rewritten(lambda merge: _canonical(merge, base=self.base, fingerprints=self.models))
        used = {self.base, *_models(recipe.merges())}
        if self.tokenizer != "base" or self.vocabulary:
            used = set(self.models)
        recipe = replace(recipe, models={alias: self.models[alias] for alias in used})
        object.__setattr__(recipe, "_canonical", recipe)
        object.__setattr__(self, "_canonical", recipe)
        return recipe

    @property
    def digest(self) -> str:
        """sha256 (hex) of the canonical JSON with aliases replaced by fingerprints."""
        cached: str | None = self.__dict__.get("_digest")
        if cached is None:
            document = self.canonical().to_json()
            del document["models"]
            if self.tokenizer != "base" or self.vocabulary:
                of = self.models.get(self.tokenizer, self.tokenizer)
                document["tokenizer"] = {"of": of, "models": sorted(self.models.values())}
            text = json.dumps(_renamed(document, self.models), sort_keys=True, separators=(",", ":"))
            cached = hashlib.sha256(text.encode()).hexdigest()
            object.__setattr__(self, "_digest", cached)
        return cached

    def to_json(self) -> dict[str, Any]:
        document = {
            "format": FORMAT if self.keeps_equal or not self._cuts_at_rank() else FORMAT_OF_CUTS,
            "models": dict(self.models),
            "base": self.base,
            "embedding": self.embedding.to_json(),
            "layers": [layer.to_json() for layer in self.layers],
            "head": self.head.to_json(),
        }
        unusual = {
            "tensors": {name: merge.to_json() for name, merge in self.tensors.items()},
            "tokenizer": "" if self.tokenizer == "base" else self.tokenizer,
            "vocabulary": dict(self.vocabulary),
            "experts": "stacked" if self.stacks_experts else "",
        }
        return document | {key: value for key, value in unusual.items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`. Raises InvalidRecipe, with the reason, for any other document."""
        found = document.get("format") if isinstance(document, Mapping) else document
        if found not in (FORMAT, FORMAT_OF_CUTS):
            raise InvalidRecipe(f"recipe: format is {found!r}; this version reads {FORMAT!r} and {FORMAT_OF_CUTS!r}")
        if (experts := document.get("experts", "each")) not in ("each", "stacked"):
            raise InvalidRecipe(f"recipe: experts is {experts!r}; expected 'each' or 'stacked'")
        try:
            return cls(
                models={str(alias): str(print_) for alias, print_ in document["models"].items()},
                base=str(document["base"]),
                layers=tuple(LayerRecipe.from_json(layer) for layer in document["layers"]),
                embedding=Merge.from_json(document["embedding"]),
                head=Merge.from_json(document["head"]),
                tensors={str(name): Merge.from_json(merge) for name, merge in document.get("tensors", {}).items()},
                tokenizer=str(document.get("tokenizer", "base")),
                keeps_equal=found == FORMAT,
                vocabulary=dict(document.get("vocabulary", {})),
                stacks_experts=experts == "stacked",
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRecipe(f"recipe: missing or malformed: {error!r}") from error


def _whole(value: Any) -> int | None:
    """The value itself. Raises TypeError if it is neither a whole number nor None."""
    return None if value is None else operator.index(value)


def _source(document: Any) -> Source:
    model, layer = document
    return Source(str(model), _whole(layer))


def _models(merges: Iterable[Merge]) -> Iterator[str]:
    for merge in merges:
        yield from (source.model for source in merge.sources)
        if merge.base is not None:
            yield merge.base.model


def _rounded(value: float, decimals: int) -> float:
    if value != value or value in (float("inf"), float("-inf")):
        raise InvalidRecipe(f"merge: coefficient {value} is not a finite number")
    return round(float(value), decimals) + 0.0  # + 0.0 turns -0.0 into 0.0


def _passthrough(source: Source) -> Merge:
    return Merge("passthrough", (source,))


def _canonical(merge: Merge, *, base: str, fingerprints: Mapping[str, str]) -> Merge:
    base_source, declared = merge.base_in(base), METHODS[merge.method]
    coefficients, sources = dict(merge.coefficients), merge.sources

    if merge.method == "slerp":
        t, (first, second) = merge.number("t"), sources
        if t == 0 or first == second:
            return _passthrough(first)
        if t == 1:
            return _passthrough(second)
        if _order(second, fingerprints) < _order(first, fingerprints):
            return Merge("slerp", (second, first), {"t": 1 - t})
        return merge

    if declared.base_at_zero is not None and not any(merge.per_source(declared.base_at_zero)):
        return _passthrough(base_source)
    if declared.first_at_zero is not None and (merge.number(declared.first_at_zero) == 0 or sources[0] == sources[1]):
        return _passthrough(sources[0])
    if (name := declared.drops_zeros) is not None:
        weights = merge.per_source(name)
        # With task arithmetic, the base's own task vector is zero.
        is_sum = merge.method == "task_arithmetic"
        kept = [i for i, weight in enumerate(weights) if weight != 0 and not (is_sum and sources[i] == base_source)]
        if not kept and declared.needs_base and not declared.is_itself_alone:
            return _passthrough(base_source)
        is_sum |= merge.method == "linear"
        if len(kept) == 1 and (declared.is_itself_alone or (is_sum and weights[kept[0]] == 1)):
            return _passthrough(sources[kept[0]])
        if kept:
            sources = tuple(sources[i] for i in kept)
            coefficients = _of_sources(coefficients, kept)
    if declared.is_itself_alone and len(sources) == 1:
        return _passthrough(sources[0])
    coefficients = _brief(coefficients, declared)
    if not declared.is_ordered:
        order = sorted(range(len(sources)), key=lambda i: _order(sources[i], fingerprints))
        sources = tuple(sources[i] for i in order)
        coefficients = _of_sources(coefficients, order)
    is_usual = not declared.needs_base or all(Source(base, source.layer) == base_source for source in sources)
    found = Merge(merge.method, sources, coefficients, merge.seed, None if is_usual else merge.base)
    return merge if found == merge else found


def _of_sources(coefficients: Mapping[str, CoefficientValue], at: Sequence[int]) -> dict[str, CoefficientValue]:
    return {name: tuple(v[i] for i in at) if isinstance(v, tuple) else v for name, v in coefficients.items()}


def _brief(coefficients: Mapping[str, CoefficientValue], declared: MergeMethod) -> dict[str, CoefficientValue]:
    """`coefficients` with one number where all sources have the same, and without defaults."""
    brief: dict[str, CoefficientValue] = {}
    for name, value in coefficients.items():
        shared = value[0] if isinstance(value, tuple) and len(set(value)) == 1 else value
        known = declared.coefficient(name)
        if known is None or known.default is None or shared != known.default:
            brief[name] = shared
    return brief


def _order(source: Source, fingerprints: Mapping[str, str]) -> tuple[str, int]:
    return fingerprints[source.model], -1 if source.layer is None else source.layer


def _renamed(document: Any, names: Mapping[str, str]) -> Any:
    """`document` (a recipe's JSON) with aliases replaced wherever a model is named."""
    if isinstance(document, dict):
        return {
            key: [[names[model], layer] for model, layer in value]
            if key == "sources" and isinstance(value, list)
            else [names[value[0]], value[1]]
            if key == "base" and isinstance(value, list)
            else names.get(value, value)
            if key in ("base", "model") and isinstance(value, str)
            else _renamed(value, names)
            for key, value in document.items()
        }
    if isinstance(document, list):
        return [_renamed(item, names) for item in document]
    return document
