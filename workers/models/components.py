"""Layer and component (attention, MLP, norm) of each tensor of a model, by module names.

Only names are used, not the values of tensors or the places where they are stored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from search_spaces.recipe import Component
from workers.errors import InvalidModel

__all__ = ["EMBEDDING", "IGNORED", "LAYER", "STACKS", "Layout", "TensorPlace", "first_few", "is_output_head", "layout"]

# A report names this many tensors of one kind of problem, then counts the rest.
MAX_NAMED = 5

LAYER = re.compile(r"^(?P<prefix>(?:\w+\.)*?(?:layers|h|blocks)\.)(?P<layer>\d+)\.(?P<suffix>.+)$")
NORM = re.compile(r"norm|(?:^|_)ln(?:$|_)")
# The component of a module, by its name; `post_attention_layernorm` is a norm.
COMPONENT_OF: tuple[tuple[Component, re.Pattern[str]], ...] = (
    ("norm", NORM),
    # Modules that mix positions instead of attention belong to it: state-space layers, convolutions, linear
    # recurrences.
    ("attention", re.compile(r"attn|attention|mamba|^conv$|^temporal_block$")),
    ("mlp", re.compile(r"mlp|feed_forward|ffn|moe|^fc[12]$")),
)
# Modules of models that read images or sound.
OTHER_INPUT = re.compile(r"(?:^|[._])(?:vision|visual|image|video|audio|speech)(?:$|[._])")
EMBEDDING = re.compile(r"embed|(?:^|\.)w[tp]e\.")
OUTPUT_HEAD = re.compile(r"(?:^|\.)(?:lm_head|embed_out|output)\.")
# EXPERT is the name of a matrix of one expert of a mixture. transformers holds the matrices of all experts of a layer
# in the stacks of STACKS; each joins, by rows, the matrices that files store under one of these tuples of names.
EXPERT = re.compile(r"(?P<place>.+\.experts)\.(?P<number>\d+)\.(?P<matrix>\w+)\.weight")
STACKS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
# Buffers stored in old checkpoints (rotary frequencies, causal masks); models compute them again.
IGNORED = re.compile(r"rotary_emb\.inv_freq$|(?:^|\.)(?:self_|cross)?(?:attn|attention)\.(?:masked_)?bias$")


@dataclass(frozen=True)
class TensorPlace:
    """Part of a model to which a tensor belongs: a component of a decoder layer, the embedding, or the head.

    `layer` is the index of the layer (0-based), or None outside layers. `suffix` is the tensor's name within its layer,
    such as "self_attn.q_proj.weight"; outside layers it is the whole name.
    """

    component: Component | Literal["embedding", "head"]
    layer: int | None
    suffix: str


@dataclass(frozen=True)
class Layout:
    """Layer and component of each tensor of a model.

    - `places`: the layer and component of each tensor, keyed by the tensor's name. An output head that is tied to the
      embedding is not included.
    - `num_layers`: the number of decoder layers
    - `layer_prefix`: the text before the layer's index in names of tensors, such as "model.layers."
    - `tied_head`: the name of a tied output head that a file contains anyway; None if no file contains a tied output
      head
    - `task_heads`: the names of tensors that belong to one task, such as the head of a classifier; they are never
      merged, and are not in `places`
    """

    places: Mapping[str, TensorPlace]
    num_layers: int
    layer_prefix: str
    tied_head: str | None = None
    task_heads: tuple[str, ...] = ()

    @property
    def is_tied(self) -> bool:
        """Whether output head and embedding are tied, that is, one tensor."""
        return not any(is_output_head(name) for name in self.places)

    @cached_property
    def _groups(self) -> dict[tuple[str, int | None], tuple[str, ...]]:
        groups: dict[tuple[str, int | None], list[str]] = {}
        for place in self.places.values():
            groups.setdefault((place.component, place.layer), []).append(place.suffix)
        return {key: tuple(sorted(suffixes)) for key, suffixes in groups.items()}

    @cached_property
    def stacks(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """Names of the stored tensors of each stacked MoE tensor, keyed by the stacked tensor's name in transformers.

        A stack joins one matrix of each expert of a layer's mixture of experts (such as all down projections) in one
        tensor. The value contains, for each expert of the mixture, a tuple of the names of its stored tensors. Stacks
        that a file stores as one tensor are not included.
        """
        mixtures: dict[str, dict[int, set[str]]] = {}
        for name in self.places:
            if match := EXPERT.fullmatch(name):
                mixtures.setdefault(match["place"], {}).setdefault(int(match["number"]), set()).add(match["matrix"])
        return {
            f"{place}.{stack}": tuple(
                tuple(f"{place}.{number}.{matrix}.weight" for matrix in matrices) for number in sorted(experts)
            )
            for place, experts in mixtures.items()
            for stack, known in STACKS.items()
            for matrices in known
            if all(found >= set(matrices) for found in experts.values())
        }

    @cached_property
    def stacked(self) -> Layout:
        """Layout of the same model with each stacked MoE tensor (property `stacks`) stored as one tensor."""
        parts = {part for stack in self.stacks.values() for joined in stack for part in joined}
        places = {name: place for name, place in self.places.items() if name not in parts}
        for name, ((first, *_), *_) in self.stacks.items():
            of = self.places[first]
            places[name] = TensorPlace(of.component, of.layer, name[len(first) - len(of.suffix) :])
        return Layout(places, self.num_layers, self.layer_prefix, self.tied_head, self.task_heads)

    def suffixes(self, component: str, layer: int | None = None) -> tuple[str, ...]:
        """Names of a component's tensors within the layer `layer`, sorted.

        With `layer` None, the result has the full names of the component's tensors outside layers, such as the
        embedding's tensor.
        """
        return self._groups.get((component, layer), ())

    def name(self, suffix: str, layer: int | None) -> str:
        """Full name of the tensor that is called `suffix` within its layer.

        `layer` is None for tensors outside layers, whose `suffix` is the full name.
        """
        return suffix if layer is None else f"{self.layer_prefix}{layer}.{suffix}"


def layout(config: Mapping[str, Any], names: Iterable[str]) -> Layout:
    """Assign every tensor of a model to a layer and component, by the names of its modules.

    A norm inside attention or the MLP counts as a norm, a bias belongs to its module, and modules that mix token
    positions count as attention. Routers and the experts of a mixture belong to the MLP. Position embeddings belong to
    the embedding; the final norm and the output head form the head. `config` has common key names (function
    `config.in_common_names`). Raises InvalidModel, which names the tensors that cannot be assigned.
    """
    names = [name for name in names if not IGNORED.search(name)]
    places: dict[str, TensorPlace] = {}
    unknown: list[str] = []
    inputs = [name for name in names if OTHER_INPUT.search(name)]
    if inputs:
        raise InvalidModel((f"layout: a model that reads more than text, which is not merged: {first_few(inputs)}",))
    prefixes: set[str] = set()
    for name in names:
        if match := LAYER.match(name):
            prefix, layer, suffix = match["prefix"], int(match["layer"]), match["suffix"]
            component = _component(suffix)
            prefixes.add(prefix)
            place = TensorPlace(component, layer, suffix) if component else None
        else:
            part = _part_outside_layers(name)
            place = TensorPlace(part, None, name) if part else None
        if place is None:
            unknown.append(name)
        else:
            places[name] = place
    if unknown:
        raise InvalidModel((f"layout: not a known part of a decoder-only model: {first_few(unknown)}",))
    layers = {place.layer for place in places.values() if place.layer is not None}
    if len(prefixes) != 1 or layers != set(range(len(layers))):
        raise InvalidModel(
            (
                f"layout: expected decoder layers 0..n-1 under one module, found {sorted(prefixes)} "
                f"with layers {sorted(layers)}",
            )
        )
    _assign_final_norm(places)
    heads = [name for name, place in places.items() if place.component == "head" and is_output_head(name)]
    tied_head = None
    if config.get("tie_word_embeddings", not heads):
        for tied_head in heads:
            del places[tied_head]
    return Layout(places, len(layers), prefixes.pop(), tied_head)


def _assign_final_norm(places: dict[str, TensorPlace]) -> None:
    """Assign all norms outside layers to the head, if by their names all of them were assigned to the embedding.

    `places` has the part of the model that each tensor was assigned to, keyed by the tensor's name; it is changed in
    place. Every decoder ends in a norm, which belongs to the head even if its name looks like a part of the embedding.
    """
    norms = {
        name: place
        for name, place in places.items()
        if place.layer is None and any(NORM.search(module) for module in name.split("."))
    }
    if all(place.component == "embedding" for place in norms.values()):
        for name in norms:
            places[name] = TensorPlace("head", None, name)


def is_output_head(name: str) -> bool:
    """Whether a tensor is, by its name, the output head, which maps hidden states to the vocabulary."""
    return OUTPUT_HEAD.search(name) is not None


def first_few(names: Iterable[str]) -> str:
    """Text for messages that lists the first few of `names`, and says how many names it leaves out."""
    names = sorted(names)
    rest = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + rest


def _component(suffix: str) -> Component | None:
    """Component of a tensor by the names of its modules; None if no name indicates a component.

    `suffix` is the tensor's name within its layer. The innermost module whose name indicates a component decides:
    `norm_attn_norm.attn.Wqkv.weight` is attention.
    """
    modules = suffix.split(".")[:-1]
    return next((kind for module in reversed(modules) for kind, name in COMPONENT_OF if name.search(module)), None)


def _part_outside_layers(name: str) -> Literal["embedding", "head"] | None:
    if is_output_head(name):
        return "head"
    if EMBEDDING.search(name):
        return "embedding"
    return "head" if any(NORM.search(module) for module in name.split(".")) else None
