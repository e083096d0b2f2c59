"""Recipe: the complete description of one merged model, and the only interface between search spaces and other code.

A search space decodes a configuration into a Recipe. Code that merges, scores, exports, plots or caches receives
recipes, not configurations. A recipe names its models by alias and by content fingerprint. A recipe's digest depends on
the fingerprints only: the same merge has the same digest, independent of the aliases and directories of its models.

The package `workers.models` decides which tensor belongs to which component.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, get_args

from search_spaces.errors import InvalidRecipe
from search_spaces.merge import Merge, Source, canonical_merge
from search_spaces.methods import METHODS
from search_spaces.methods.base import COEFFICIENT_DECIMALS, MergeMethod

__all__ = [
    "COEFFICIENT_DECIMALS",
    "COMPONENTS",
    "Component",
    "LayerRecipe",
    "Merge",
    "Recipe",
    "Source",
    "Trimming",
    "may_keep_equal",
]

Component = Literal["attention", "mlp", "norm"]
COMPONENTS: tuple[Component, ...] = ("attention", "mlp", "norm")
Trimming = Literal["tensor", "model"]

# Format 2 is for recipes with a method that cuts at a rank (`MergeMethod.cuts_at_rank`). Where several elements have
# the magnitude at that rank, format 2 keeps as many of them as the rank says; format 1 keeps all of them. Format 3 is
# for recipes whose methods trim whole models (`Recipe.trim`), so that no program reads them without knowing that.
FORMAT, FORMAT_OF_CUTS, FORMAT_OF_MODELS = "mergesearch-recipe/1", "mergesearch-recipe/2", "mergesearch-recipe/3"


@dataclass(frozen=True)
class LayerRecipe:
    """One layer of the merged model: the merges of its components, its scales and its alignment.

    `attention`, `mlp` and `norm` are the merges of the layer's components. `scale` multiplies the residual stream after
    the layer (1 = unchanged). `mlp_scale` multiplies only the output of the layer's MLP, which is added to the stream
    (1 = unchanged). `alignment` is the digest of a map that is applied to the residual stream after the layer, or None
    if there is no such map.
    """

    attention: Merge
    mlp: Merge
    norm: Merge
    scale: float = 1.0
    alignment: str | None = None  # digest of the alignment after this layer (workers.alignments)
    mlp_scale: float = 1.0

    def component(self, name: Component) -> Merge:
        """The merge of one component of the layer; `name` is "attention", "mlp" or "norm"."""
        merge: Merge = getattr(self, name)
        return merge

    def to_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {name: self.component(name).to_json() for name in COMPONENTS}
        if self.scale != 1.0:
            document["scale"] = self.scale
        if self.mlp_scale != 1.0:
            document["mlp_scale"] = self.mlp_scale
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
                mlp_scale=float(document.get("mlp_scale", 1.0)),
            )
        except InvalidRecipe:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InvalidRecipe(f"layer: not a layer recipe: {document!r} ({error!r})") from error


@dataclass(frozen=True)
class Recipe:
    """The description of one merged model: its source models, and the merge of every tensor.

    - `models`: the content fingerprint of each model that is used, keyed by alias. With a vocabulary other than the
      base's, there are also models that no merge uses, because the vocabulary depends on them.
    - `base`: the alias of the base model
    - `layers`: the merged model's layers in order
    - `embedding`: the merge of the input embedding, and of an output head that is tied to it
    - `head`: the merge of the final norm and, if it is not tied, of the output head
    - `tensors`: the merges of single tensors that differ from the merge of their component, keyed by the tensors' names
      in the merged model
    - `tokenizer`: the merged model's vocabulary, to which the rows of embeddings are aligned: "base", "union", or the
      alias of another model
    - `keeps_equal`: whether methods that keep the n largest elements also keep all others with the n-th largest
      magnitude, as in files of recipe format 1; otherwise exactly n elements are kept
    - `vocabulary`: further options of the vocabulary, which the module `workers.models.vocabulary` reads
    - `stacks_experts`: whether all experts of a layer's mixture of experts are merged as one tensor; otherwise each
      expert is merged separately
    - `trim`: for methods that keep a share of a task vector's elements by magnitude (field `MergeMethod.trims`): with
      "tensor", this share of each tensor is kept; with "model", this share of all tensors of the model together is
      kept, so that the kept share of a tensor differs between tensors. A recipe without such a method has "tensor".
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
    trim: Trimming = "tensor"

    def __post_init__(self) -> None:
        if self.trim not in get_args(Trimming):
            raise InvalidRecipe(f"recipe: trim is {self.trim!r}; expected one of {', '.join(get_args(Trimming))}")
        if self.trim == "model" and not any(method.trims for method in self._methods()):
            object.__setattr__(self, "trim", "tensor")
        if self.keeps_equal and (self.trim == "model" or not self._cuts_at_rank()):
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

    @classmethod
    def uniform(
        cls,
        merge: Merge,
        *,
        models: Mapping[str, str],
        base: str,
        num_layers: int,
        tokenizer: str = "base",
        vocabulary: Mapping[str, Any] | None = None,
    ) -> Self:
        """The recipe that merges every tensor by the same merge; layer l is merged from layer l of each source.

        `models`, `base`, `tokenizer` and `vocabulary` become the recipe's fields of these names. `num_layers` is the
        number of layers of the merged model.
        """
        layers = tuple(LayerRecipe(own, own, own) for own in map(merge.at_layer, range(num_layers)))
        whole = merge.at_layer(None)
        return cls(models, base, layers, whole, whole, tokenizer=tokenizer, vocabulary=vocabulary or {})

    @classmethod
    def of_model(
        cls,
        model: str,
        *,
        models: Mapping[str, str],
        base: str,
        num_layers: int,
        tokenizer: str = "base",
        vocabulary: Mapping[str, Any] | None = None,
    ) -> Self:
        """The recipe of one unchanged model: every tensor is a tensor of `model`, one of the aliases in `models`.

        `models`, `base`, `tokenizer` and `vocabulary` become the recipe's fields of these names. `num_layers` is the
        number of layers of `model`.
        """
        merge = Merge("passthrough", (Source(model),))
        return cls.uniform(
            merge, models=models, base=base, num_layers=num_layers, tokenizer=tokenizer, vocabulary=vocabulary
        )

    def merges(self) -> tuple[Merge, ...]:
        """All merges of the recipe: of the layers in order, of the embedding, of the head, then of single tensors."""
        in_layers = tuple(layer.component(name) for layer in self.layers for name in COMPONENTS)
        return (*in_layers, self.embedding, self.head, *self.tensors.values())

    def _cuts_at_rank(self) -> bool:
        return any(method.cuts_at_rank for method in self._methods())

    def _methods(self) -> list[MergeMethod]:
        return [METHODS[name] for name in {merge.method for merge in self.merges()} & METHODS.keys()]

    def check(self) -> None:
        """Check that every merge is valid for its method. Raises InvalidRecipe, with the name of the invalid merge."""
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
        """A copy of the recipe in which every merge is replaced by `rewrite(merge)`.

        If several merges are equal, `rewrite` is called only once for them.
        """
        once = functools.cache(rewrite)
        layers = tuple(
            replace(layer, attention=once(layer.attention), mlp=once(layer.mlp), norm=once(layer.norm))
            for layer in self.layers
        )
        tensors = {name: once(merge) for name, merge in self.tensors.items()}
        return replace(self, layers=layers, embedding=once(self.embedding), head=once(self.head), tensors=tensors)

    def canonical(self) -> Recipe:
        """The equivalent recipe in canonical form, which is the same for equal merges.

        Each merge is in its simplest form (function `canonical_merge`), and models that are not used are left out.

        Raises InvalidRecipe if a merge is not valid for its method.
        """
        known: Recipe | None = self.__dict__.get("_canonical")
        if known is not None:
            return known
        self.check()
        recipe = self.rewritten(lambda merge: canonical_merge(merge, base=self.base, fingerprints=self.models))
        used = {self.base, *_models(recipe.merges())}
        if self.tokenizer != "base" or self.vocabulary:
            used = set(self.models)
        recipe = replace(recipe, models={alias: self.models[alias] for alias in used})
        object.__setattr__(recipe, "_canonical", recipe)
        object.__setattr__(self, "_canonical", recipe)
        return recipe

    @property
    def digest(self) -> str:
        """The sha256 (hex) of the recipe's canonical JSON, with fingerprints in place of the models' names (aliases).

        A fingerprint is a hash of a model's content, so the digest does not depend on names.
        """
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
        """The recipe as plain data for JSON; entries that have their default value are left out."""
        usual = FORMAT if self.keeps_equal or not self._cuts_at_rank() else FORMAT_OF_CUTS
        document = {
            "format": FORMAT_OF_MODELS if self.trim == "model" else usual,
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
            "trim": "" if self.trim == "tensor" else self.trim,
        }
        return document | {key: value for key, value in unusual.items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Read a recipe from a JSON document that the method `to_json` has made.

        Raises InvalidRecipe if `document` is not such a document.
        """
        found = document.get("format") if isinstance(document, Mapping) else document
        if found not in (known := (FORMAT, FORMAT_OF_CUTS, FORMAT_OF_MODELS)):
            raise InvalidRecipe(f"recipe: format is {found!r}; this version reads {', '.join(map(repr, known))}")
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
                trim=document.get("trim", "tensor"),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise InvalidRecipe(f"recipe: missing or malformed: {error!r}") from error


def may_keep_equal(text: str) -> bool:
    """Whether a recipe may keep more elements of a task vector than its density says, because of equal magnitudes.

    Some merge methods keep the n elements with the largest magnitudes, for a number n that follows from the density. If
    several elements have the n-th largest magnitude, recipes of format 1 keep all elements with this magnitude. The
    result is True if `text`, a recipe as JSON, has this format and names one of these methods.
    """
    return FORMAT in text and any(f'"{name}"' in text for name, method in METHODS.items() if method.cuts_at_rank)


def _models(merges: Iterable[Merge]) -> Iterator[str]:
    for merge in merges:
        yield from (source.model for source in merge.sources)
        if merge.base is not None:
            yield merge.base.model


def _renamed(document: Any, names: Mapping[str, str]) -> Any:
    """A copy of a recipe's JSON data, or of a part of it, with other names of models.

    `names` maps each alias in `document` to the name that replaces it. Aliases occur in lists of sources, as a base,
    and as a model. All else is unchanged.
    """
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
