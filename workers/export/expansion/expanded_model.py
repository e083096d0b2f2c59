"""The tensors and the configuration of a model in the common form of several models."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from workers.export.expansion.form import AXES, HEAD, WITHOUT_HEAD_DIM, Form, Shape, end_of
from workers.export.expansion.rotary import ROTARY_SETTINGS
from workers.export.expansion.tokens import Rows, Tokens, rows_for
from workers.models.checkpoints import SPECIAL_TOKENS, Checkpoint
from workers.models.components import is_output_head
from workers.models.config import of_each_layer
from workers.models.headers import DTYPE_BYTES

__all__ = ["Expansion"]

EMBEDDING = "embed_tokens.weight"
# The norms over the channels of the residual stream, and the tensors whose products are added to it.
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight")
ADDED = ("self_attn.o_proj.weight", "self_attn.o_proj.bias", "mlp.down_proj.weight", "mlp.down_proj.bias", EMBEDDING)
QUERIES = ("self_attn.q_proj.weight", "self_attn.q_proj.bias")

# Settings that a Llama lacks. They say which layers attend to a window of the text; here none do.
OF_WINDOWS = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")


class Expansion:
    """A model in the form `form`, whose tensors are computed one at a time.

    `form` has at least the sizes of `model`, except for rows of the vocabulary (function `common_form`). The expanded
    model has the tokens of `tokens_of`; None means its own.
    """

    def __init__(self, model: Checkpoint, form: Form, *, tokens_of: Checkpoint | None = None) -> None:
        self.model = model
        self.form = form
        self.shape = form.shape
        self.own = Form.of(model)
        self.vocabulary_of = tokens_of or model
        last = self.own.shape.layers - 1
        spread = (self.shape.layers - 1) / max(last, 1)
        self._layer_at = {round(layer * spread): layer for layer in range(self.own.shape.layers)}

    @property
    def is_needed(self) -> bool:
        return self.own != self.form or self.vocabulary_of is not self.model

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the widest dtype that the model stores."""
        return max(DTYPE_BYTES[info.dtype] for info in self.model.stored)

    @property
    def num_bytes(self) -> int:
        return self.itemsize * sum(map(math.prod, self.shapes.values()))

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of the expanded model, keyed by name, in the order in which they are stored."""
        layout = self.model.layout
        outside = [name for name, place in layout.places.items() if place.layer is None and not is_output_head(name)]
        in_layer = self.form.in_layer
        names = [*outside, *(layout.name(suffix, at) for at in range(self.shape.layers) for suffix in in_layer)]
        names += [] if self.shape.is_tied else [HEAD]
        sizes = {axis: len(indices) for axis, indices in self._from.items()} | {"vocabulary": self.shape.vocabulary}
        return {name: tuple(sizes[axis] for axis in AXES[end_of(name)]) for name in names}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` of the expanded model, in the dtype in which the model stores it."""
        shape, end = self.shapes[name], end_of(name)
        if (own := self._own_name(name)) is None:
            make = torch.ones if "norm" in end else torch.zeros
            return make(shape, dtype=self._dtype_in_layers(name))
        found = self.model.read(own)
        for axis, kind in enumerate(AXES[end]):
            if kind != "vocabulary":
                found = _taken(found, self._from[kind], axis)
            else:
                found = found[: self.shape.vocabulary] if self.rows is None else self.rows.of(found)
        factor = self._factor(end)
        return found if factor == 1 else (found.float() * factor).to(found.dtype)

    @cached_property
    def rows(self) -> Rows | None:
        """The rows of the vocabulary for the tokens of another model; None if the model keeps its own."""
        if self.vocabulary_of is self.model:
            return None
        own, wanted = (Tokens.of(model.tokenizer_dir) for model in (self.model, self.vocabulary_of))
        return rows_for(wanted, own, self.shape.vocabulary)

    def _factor(self, end: str) -> float:
        """The factor on the tensors that are called `end`, for what the norms and attention divide by."""
        own, to = self.own, self.form
        # The residual stream is multiplied by this: norms see a mean square in the same proportion to rms_norm_eps.
        stream = math.sqrt(to.rms_norm_eps / own.rms_norm_eps)
        factor = 1.0
        if end in NORMS:
            factor *= math.sqrt(own.shape.hidden / to.shape.hidden)
        if end in ADDED:
            factor *= stream
        if end == "norm.weight" and self.shape.is_tied:
            factor /= stream  # the output head is the embedding
        if end in QUERIES:
            factor *= math.sqrt(to.shape.head_size / own.shape.head_size)
            factor *= (own.rotary.scale / to.rotary.scale) ** 2
        return factor

    def _own_name(self, name: str) -> str | None:
        """The model's tensor of which `name`, of the expanded model, is made; None if the model has no such tensor."""
        if name.startswith(self._prefix):
            at, _, suffix = name.removeprefix(self._prefix).partition(".")
            layer = self._layer_at.get(int(at))
            return self.model.layout.name(suffix, layer) if layer is not None and suffix in self.own.in_layer else None
        if name == HEAD and self.own.shape.is_tied:
            (name,) = self.model.layout.suffixes("embedding")
        return name

    def _dtype_in_layers(self, name: str) -> torch.dtype:
        suffix = name.removeprefix(self._prefix).partition(".")[2]
        known = suffix if suffix in self.own.in_layer else self.own.in_layer[0]
        return self.model.read(self.model.layout.name(known, 0)).dtype

    @property
    def _prefix(self) -> str:
        return self.model.layout.layer_prefix

    @cached_property
    def _from(self) -> dict[str, torch.Tensor]:
        """For each kind of axis, the index in the model of each index in the expanded model; -1 where it has none."""
        own, to = self.own.shape, self.shape
        queries, keys = _head_places(own, to)
        plain = _padded(own.head_size, to.head_size)
        turned = plain
        if self.own.rotary != self.form.rotary or own.head_size != to.head_size:
            turned = self.form.rotary.channels_of(self.own.rotary)
        return {
            "hidden": _padded(own.hidden, to.hidden),
            "intermediate": _padded(own.intermediate, to.intermediate),
            "query": _of_heads(queries, turned, own.head_size),
            "key": _of_heads(keys, turned, own.head_size),
            "value": _of_heads(keys, plain, own.head_size),
            "output": _of_heads(queries, plain, own.head_size),
            "head": turned,
        }

    def config(self) -> dict[str, Any]:
        """The config.json of the expanded model."""
        left_out = {"_name_or_path"}
        left_out |= {*OF_WINDOWS} if self.form.kind != self.own.kind else set()
        left_out |= {*ROTARY_SETTINGS} if self.form.rotary != self.own.rotary else set()
        config = {key: value for key, value in self.model.config.items() if key not in left_out}
        of_layers = of_each_layer(self.model.config, self.own.shape.layers)
        config |= {name: values[:1] * self.shape.layers for name, values in of_layers.items() if name not in left_out}
        config |= {
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "vocab_size": self.shape.vocabulary,
            "tie_word_embeddings": self.shape.is_tied,
        }
        if self.form.kind not in WITHOUT_HEAD_DIM:
            config["head_dim"] = self.shape.head_size
        if "max_window_layers" in config:
            config["max_window_layers"] = self.shape.layers
        return config | self._conversion()

    def _conversion(self) -> dict[str, Any]:
        """Entries of config.json that are not sizes and differ from those of the model."""
        found: dict[str, Any] = {}
        if self.form.kind != self.own.kind:
            found |= {"model_type": self.form.kind, "architectures": ["LlamaForCausalLM"]}
        if self.form.kind == "llama" and self.form.in_layer != self.own.in_layer:
            found["attention_bias"] = "self_attn.q_proj.bias" in self.form.in_layer
            found["mlp_bias"] = "mlp.gate_proj.bias" in self.form.in_layer
        if self.form.rms_norm_eps != self.own.rms_norm_eps:
            found["rms_norm_eps"] = self.form.rms_norm_eps
        if self.form.rotary != self.own.rotary:
            found |= self.form.rotary.settings
        if self.vocabulary_of is not self.model:
            settings = self.vocabulary_of.settings
            found |= {name: settings.get(name) for name in SPECIAL_TOKENS}
        return found


def _padded(own: int, size: int) -> torch.Tensor:
    return torch.cat([torch.arange(own), torch.full((size - own,), -1)])


def _of_heads(heads: list[int], channels: torch.Tensor, own_size: int) -> torch.Tensor:
    """Indices of the channels of `heads` in a model whose heads have `own_size` channels.

    `channels` are the channels of a head. The index is -1 for a head or channel that is -1.
    """
    of_head = torch.tensor(heads)[:, None]
    return torch.where((of_head < 0) | (channels < 0), -1, of_head * own_size + channels).flatten()


def _head_places(own: Shape, to: Shape) -> tuple[list[int], list[int]]:
    """The model's query head, and its key-value head, at each place of the common shape; -1 where there is none.

    Query heads stay with their key-value head. If the model has more query heads for each key-value head than the
    common shape has, the key-value head is repeated.
    """
    copies = math.ceil(own.ratio / to.ratio)
    queries, keys = [-1] * to.heads, [-1] * to.kv_heads
    for head in range(own.heads):
        key, nth = divmod(head, own.ratio)
        group, place = key * copies + nth // to.ratio, nth % to.ratio
        queries[group * to.ratio + place] = head
        keys[group] = key
    return queries, keys


def _taken(tensor: torch.Tensor, indices: torch.Tensor, axis: int) -> torch.Tensor:
    """Take `indices` of `tensor` along `axis`, and zeros where an index is -1."""
    if len(indices) == tensor.shape[axis] and torch.equal(indices, torch.arange(len(indices))):
        return tensor
    shape = list(tensor.shape)
    shape[axis] = len(indices)
    found = torch.zeros(shape, dtype=tensor.dtype)
    at = torch.nonzero(indices >= 0).flatten()
    return found.index_copy_(axis, at, tensor.index_select(axis, indices[at]))
