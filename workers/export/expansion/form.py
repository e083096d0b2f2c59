"""The common form of models of different widths, depths and kinds: their sizes, and how their layers are computed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from workers.engines.vllm.paths.geometry import PATH_TYPES, path_settings
from workers.errors import InvalidModel
from workers.export.expansion.rotary import ROTARY_SETTINGS, Rotary, common_rotary
from workers.models.checkpoints import Checkpoint
from workers.models.compatibility import structure
from workers.models.config import of_each_layer
from workers.models.vocabulary import token_ids

__all__ = ["AXES", "HEAD", "WITHOUT_HEAD_DIM", "Form", "Shape", "common_form", "end_of"]

# Settings that say how large a model is.
SIZES = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
        "layer_types",
        "max_window_layers",
    }
)

# Types whose layers a Llama can compute, and the settings that may differ then, apart from the rotary embedding.
LIKE_LLAMA = ("llama", "mistral", "qwen2")
CONVERTED = frozenset({"model_type", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias"})

# vLLM computes the size of a head of these types from the number of channels and heads.
WITHOUT_HEAD_DIM = ("qwen2",)

# The axes of each tensor, by the end of its name. "query" and "key" are channels that the rotary embedding turns;
# "value" and "output" are channels of values, at the places of key-value heads and of query heads.
AXES: Mapping[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocabulary", "hidden"),
    "lm_head.weight": ("vocabulary", "hidden"),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.weight": ("value", "hidden"),
    "self_attn.v_proj.bias": ("value",),
    "self_attn.o_proj.weight": ("hidden", "output"),
    "self_attn.o_proj.bias": ("hidden",),
    "self_attn.q_norm.weight": ("head",),
    "self_attn.k_norm.weight": ("head",),
    "mlp.gate_proj.weight": ("intermediate", "hidden"),
    "mlp.gate_proj.bias": ("intermediate",),
    "mlp.up_proj.weight": ("intermediate", "hidden"),
    "mlp.up_proj.bias": ("intermediate",),
    "mlp.down_proj.weight": ("hidden", "intermediate"),
    "mlp.down_proj.bias": ("hidden",),
    "input_layernorm.weight": ("hidden",),
    "post_attention_layernorm.weight": ("hidden",),
    "norm.weight": ("hidden",),
}
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that expansion changes.

    `vocabulary` is the number of rows of the embedding. `is_tied` says whether the output head is the embedding.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    is_tied: bool

    @classmethod
    def of(cls, model: Checkpoint) -> Shape:
        settings = model.settings
        hidden, heads = int(settings["hidden_size"]), int(settings["num_attention_heads"])
        (embedding,) = model.layout.suffixes("embedding")
        return cls(
            hidden,
            int(settings["intermediate_size"]),
            model.layout.num_layers,
            heads,
            int(settings.get("num_key_value_heads") or heads),
            int(settings.get("head_dim") or hidden // heads),
            model.tensors[embedding].shape[0],
            model.layout.is_tied,
        )

    @property
    def ratio(self) -> int:
        """The number of query heads for each key-value head."""
        return self.heads // self.kv_heads

    def __str__(self) -> str:
        return (
            f"{self.layers} layers of {self.hidden} channels, {self.heads} query heads and {self.kv_heads} key-value "
            f"heads of {self.head_size}, MLPs of {self.intermediate} channels, {self.vocabulary} tokens, output head "
            f"{'tied' if self.is_tied else 'not tied'} to the embedding"
        )


@dataclass(frozen=True)
class Form:
    """The sizes of a model, and how its layers are computed.

    - `shape`: the sizes
    - `kind`: the type of the model, such as "llama"
    - `in_layer`: the names of a layer's tensors, without the layer's own prefix, in alphabetical order
    - `rms_norm_eps`: the constant that norms add to the mean square
    - `rotary`: the rotary embedding
    """

    shape: Shape
    kind: str
    in_layer: tuple[str, ...]
    rms_norm_eps: float
    rotary: Rotary

    @classmethod
    def of(cls, model: Checkpoint) -> Form:
        settings = model.settings
        in_layer = sorted(place.suffix for place in model.layout.places.values() if place.layer == 0)
        rotary = Rotary.of(model)
        return cls(
            Shape.of(model), str(settings["model_type"]), tuple(in_layer), float(settings["rms_norm_eps"]), rotary
        )

    def __str__(self) -> str:
        return f"{self.kind} with {self.shape}, rotary embedding of the type {self.rotary.kind}"


def common_form(models: Mapping[str, Checkpoint], *, tokens_of: str | None = None) -> Form:
    """The smallest form in which every one of `models`, which are keyed by alias, can be computed.

    With `tokens_of` the models get the tokens of the model with this alias. Raises InvalidModel with all reasons why
    the models' layers cannot be computed with one set of settings.
    """
    if problems := [*_problems(models, tokens_of)]:
        raise InvalidModel(tuple(problems))
    rotary = common_rotary([*models.values()])
    forms = [Form.of(model) for model in models.values()]
    shapes = [form.shape for form in forms]
    kinds = {form.kind for form in forms}
    kind = kinds.pop() if len(kinds) == 1 else "llama"
    head_size = 2 * len(rotary.frequencies)
    is_bound = kind in WITHOUT_HEAD_DIM
    hidden, heads, kv_heads = min(
        _heads(shapes, ratio, head_size if is_bound else None) for ratio in {shape.ratio for shape in shapes}
    )
    if tokens_of is None:
        rows = min(shape.vocabulary for shape in shapes)
    else:
        rows = 1 + max((token_ids(models[tokens_of].tokenizer_dir) or {}).values())
    shape = Shape(
        hidden,
        max(shape.intermediate for shape in shapes),
        max(shape.layers for shape in shapes),
        heads,
        kv_heads,
        head_size,
        rows,
        all(shape.is_tied for shape in shapes),
    )
    in_layer = {name for form in forms for name in form.in_layer}
    if kind == "llama" and "self_attn.q_proj.bias" in in_layer:
        in_layer.add("self_attn.o_proj.bias")  # a Llama has all biases of attention or none
    return Form(shape, kind, tuple(sorted(in_layer)), forms[0].rms_norm_eps, rotary)


def _heads(shapes: list[Shape], ratio: int, bound_size: int | None) -> tuple[int, int, int]:
    """The numbers of channels, query heads and key-value heads that hold all `shapes`.

    There are `ratio` query heads for each key-value head. With `bound_size` the number of channels is the number of
    query heads times this size of a head.
    """
    hidden = max(shape.hidden for shape in shapes)
    kv_heads = max(shape.kv_heads * math.ceil(shape.ratio / ratio) for shape in shapes)
    if bound_size is not None:
        group = ratio * bound_size
        kv_heads = max(kv_heads, math.ceil(hidden / group))
        hidden = kv_heads * group
    return hidden, kv_heads * ratio, kv_heads


def _problems(models: Mapping[str, Checkpoint], tokens_of: str | None) -> Iterator[str]:
    if len(models) < 2:
        yield f"{len(models)} model; give at least two, which are expanded to one form"
        return
    if tokens_of is not None and tokens_of not in models:
        yield f"there is no model {tokens_of!r}, whose tokens all would get; expected one of {', '.join(models)}"
        return
    first = next(iter(models.values()))
    kinds = {str(model.settings.get("model_type")) for model in models.values()}
    if unknown := [model for model in models.values() if model.settings.get("model_type") not in PATH_TYPES]:
        for model in unknown:
            kind = model.settings.get("model_type")
            yield f"{model.directory}: model_type is {kind!r}; expected one of {', '.join(PATH_TYPES)}"
        return
    free = CONVERTED if kinds <= {*LIKE_LLAMA} else frozenset[str]()
    free |= {"architectures"} if free and len(kinds) > 1 else frozenset[str]()
    wanted = _settings(first, free)
    ids = token_ids(first.tokenizer_dir)
    for model in models.values():
        where = str(model.directory)
        layers = sorted(set(of_each_layer(model.config, model.layout.num_layers).get("layer_types", ())))
        if len(layers) > 1:
            yield f"{where}: layer_types has {' and '.join(layers)}; in paths all layers must be of one kind"
        found = _settings(model, free)
        if len(kinds) > 1 and (window := found.get("sliding_window")) is not None:
            yield f"{where}: attends to windows of {window} tokens, and a Llama to all; expected no sliding_window"
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                yield (
                    f"{where}: {name} is {found.get(name)!r}; {first.directory} has {wanted.get(name)!r}, and the "
                    "layers of a path are computed with one value"
                )
        yield from _rotary_problems(model)
        if model.modality is not first.modality or model.layout.task_heads:
            yield f"{where}: is not a causal language model; expected one"
            continue
        own = token_ids(model.tokenizer_dir)
        if own is None:
            yield f"{where}: no readable tokenizer.json; expected {'one' if tokens_of else 'that of the other models'}"
        elif own != ids and tokens_of is None:
            yield (
                f"{where}: has another vocabulary than {first.directory}; expected the same tokens with the same ids, "
                "or a model whose tokens all models get (--tokens-of)"
            )
        elif (rows := Shape.of(model).vocabulary) <= (largest := max(own.values())):
            yield f"{where}: its embedding has {rows} rows; expected one for each token, up to id {largest}"
        if unplaced := sorted({end_of(name) for name in model.layout.places} - AXES.keys()):
            yield f"{where}: has tensors that cannot be expanded: {', '.join(unplaced)}"


def _rotary_problems(model: Checkpoint) -> Iterator[str]:
    turned, size = 2 * len(Rotary.of(model).frequencies), Shape.of(model).head_size
    if turned != size:
        yield (
            f"{model.directory}: its rotary embedding turns {turned} channels of a head of {size}; expected all of them"
        )


def _settings(model: Checkpoint, free: frozenset[str]) -> dict[str, Any]:
    """The settings of `model` that must be equal in all models; those in `free` may differ.

    If any are free, the settings of the rotary embedding are too.
    """
    settings = {**model.settings, "head_dim": Shape.of(model).head_size}
    if free:
        settings = {name: value for name, value in settings.items() if name not in ROTARY_SETTINGS}
    found = {**structure(settings, model.modality.structure), **path_settings(settings)}
    if free:
        del found["rope_type"]
    return {name: value for name, value in found.items() if name not in SIZES | free}


def end_of(name: str) -> str:
    """The part of a tensor's name that says what it is, such as "self_attn.q_proj.weight"."""
    parts = name.split(".")
    return ".".join(parts[-3:] if parts[-3:-2] in (["self_attn"], ["mlp"]) else parts[-2:])
