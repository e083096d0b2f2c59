"""Expansion of models of different widths and depths to one shape, which leaves what they compute unchanged.

The layers of a layer path have one shape. Models that differ in their sizes can be in one path after they are expanded:

- Channels of the residual stream, of the MLP, and attention heads that a model lacks are zeros, which add nothing.
- RMSNorm divides by the root mean square over all channels. With D channels instead of d it is smaller by the factor
  sqrt(d / D), so the norms' weights are multiplied by this factor.
- A model with more query heads for each key-value head than the common shape has its key and value heads repeated.
- Layers that a model lacks have projections of zeros, so they add nothing. They are spread evenly over the depth.
- Rows of the vocabulary without a token are cut, because rows of zeros could have the largest logit.

The logits are those of the model, except for rounding and for the constant `rms_norm_eps` in norms, which counts
D / d times as much relative to the mean square. Net2Net (arXiv:1511.05641) introduced such expansions.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from workers.directories import appearing
from workers.engines.vllm.paths.geometry import PATH_TYPES, path_settings
from workers.errors import InvalidModel
from workers.export.shards import Progress, plan_shards, write_index
from workers.models.checkpoints import Checkpoint, open_checkpoint
from workers.models.compatibility import structure
from workers.models.components import is_output_head
from workers.models.config import of_each_layer
from workers.models.headers import DTYPE_BYTES
from workers.models.remote import locate
from workers.models.remote.downloads import fetched
from workers.models.vocabulary import token_ids
from workers.types import digest_of

__all__ = ["Expanded", "Expansion", "Shape", "common_shape", "expand"]

log = logging.getLogger(__name__)

MAX_SHARD_BYTES = 5 * 10**9

# Settings that say how large a model is; all others must be equal.
SIZES = frozenset(
    {
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "layer_types",
        "max_window_layers",
    }
)

# vLLM computes the size of a head of these types from the number of channels and heads.
WITHOUT_HEAD_DIM = ("qwen2",)

# The axes of each tensor, by the end of its name.
AXES: Mapping[str, tuple[str, ...]] = {
    "embed_tokens.weight": ("vocabulary", "hidden"),
    "lm_head.weight": ("vocabulary", "hidden"),
    "self_attn.q_proj.weight": ("query", "hidden"),
    "self_attn.q_proj.bias": ("query",),
    "self_attn.k_proj.weight": ("key", "hidden"),
    "self_attn.k_proj.bias": ("key",),
    "self_attn.v_proj.weight": ("key", "hidden"),
    "self_attn.v_proj.bias": ("key",),
    "self_attn.o_proj.weight": ("hidden", "query"),
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
# The norms over the channels of the residual stream.
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that expansion changes, and the size of an attention head, which it does not change.

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


def common_shape(models: Mapping[str, Checkpoint]) -> Shape:
    """The smallest shape that holds every one of `models`, which are keyed by alias.

    Raises InvalidModel with all reasons why the models' layers cannot be computed with one set of settings.
    """
    if problems := [*_problems(models)]:
        raise InvalidModel(tuple(problems))
    shapes = [Shape.of(model) for model in models.values()]
    first = next(iter(models.values()))
    is_bound = first.settings["model_type"] in WITHOUT_HEAD_DIM
    hidden, heads, kv_heads = min(_heads(shapes, ratio, is_bound) for ratio in {shape.ratio for shape in shapes})
    return Shape(
        hidden,
        max(shape.intermediate for shape in shapes),
        max(shape.layers for shape in shapes),
        heads,
        kv_heads,
        shapes[0].head_size,
        min(shape.vocabulary for shape in shapes),
        all(shape.is_tied for shape in shapes),
    )


def _heads(shapes: list[Shape], ratio: int, is_bound: bool) -> tuple[int, int, int]:
    """The numbers of channels, query heads and key-value heads that hold all `shapes`.

    There are `ratio` query heads for each key-value head. With `is_bound` the number of channels is the number of query
    heads times the size of a head.
    """
    hidden = max(shape.hidden for shape in shapes)
    kv_heads = max(shape.kv_heads * math.ceil(shape.ratio / ratio) for shape in shapes)
    if is_bound:
        group = ratio * shapes[0].head_size
        kv_heads = max(kv_heads, math.ceil(hidden / group))
        hidden = kv_heads * group
    return hidden, kv_heads * ratio, kv_heads


def _problems(models: Mapping[str, Checkpoint]) -> Iterator[str]:
    if len(models) < 2:
        yield f"{len(models)} model; give at least two, which are expanded to one shape"
        return
    first = next(iter(models.values()))
    if (kind := first.settings.get("model_type")) not in PATH_TYPES:
        yield f"{first.directory}: model_type is {kind!r}; expected one of {', '.join(PATH_TYPES)}"
        return
    wanted = _settings(first)
    ids = token_ids(first.tokenizer_dir)
    for model in models.values():
        where = str(model.directory)
        if len(kinds := sorted(set(model.settings.get("layer_types") or ()))) > 1:
            yield f"{where}: layer_types has {' and '.join(kinds)}; in paths all layers must be of one kind"
        found = _settings(model)
        for name in sorted(wanted.keys() | found.keys()):
            if found.get(name) != wanted.get(name):
                yield (
                    f"{where}: {name} is {found.get(name)!r}; {first.directory} has {wanted.get(name)!r}, and the "
                    "layers of a path are computed with one value"
                )
        if model.modality is not first.modality or model.layout.task_heads:
            yield f"{where}: is not a causal language model; expected one"
            continue
        own = token_ids(model.tokenizer_dir)
        if own is None:
            yield f"{where}: no readable tokenizer.json; expected the tokenizer of {first.directory}"
        elif own != ids:
            yield f"{where}: has another vocabulary than {first.directory}; expected the same tokens with the same ids"
        elif (rows := Shape.of(model).vocabulary) <= (largest := max(own.values())):
            yield f"{where}: its embedding has {rows} rows; expected one for each token, up to id {largest}"
        if unknown := sorted({_end(name) for name in model.layout.places} - AXES.keys()):
            yield f"{where}: has tensors that cannot be expanded: {', '.join(unknown)}"


def _settings(model: Checkpoint) -> dict[str, Any]:
    """The settings of `model` that must be equal in all models, with the size of an attention head."""
    found = {**structure(model.settings, model.modality.structure), **path_settings(model.settings)}
    return {name: value for name, value in found.items() if name not in SIZES} | {
        "head_dim": Shape.of(model).head_size,
    }


def _end(name: str) -> str:
    """The part of a tensor's name that says what it is, such as "self_attn.q_proj.weight"."""
    parts = name.split(".")
    return ".".join(parts[-3:] if parts[-3:-2] in (["self_attn"], ["mlp"]) else parts[-2:])


class Expansion:
    """A model with the sizes of `shape`, whose tensors are computed one at a time.

    `shape` has at least the sizes of `model`, except for rows of the vocabulary (function `common_shape`).
    """

    def __init__(self, model: Checkpoint, shape: Shape) -> None:
        self.model = model
        self.shape = shape
        self.own = Shape.of(model)
        last = self.own.layers - 1
        spread = (shape.layers - 1) / max(last, 1)
        self._layer_at = {round(layer * spread): layer for layer in range(self.own.layers)}

    @property
    def is_needed(self) -> bool:
        return self.own != self.shape

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
        layout, of_layer = self.model.layout, sorted(self._names_of_layer)
        outside = [name for name, place in layout.places.items() if place.layer is None and not is_output_head(name)]
        names = [*outside, *(layout.name(suffix, at) for at in range(self.shape.layers) for suffix in of_layer)]
        names += [] if self.shape.is_tied else [HEAD]
        return {name: tuple(len(self._from[axis]) for axis in AXES[_end(name)]) for name in names}

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor `name` of the expanded model, in the dtype in which the model stores it."""
        shape, end = self.shapes[name], _end(name)
        if (own := self._own_name(name)) is None:
            dtype = self.model.read(self._names_of_layer[name.removeprefix(self._prefix).partition(".")[2]]).dtype
            return torch.ones(shape, dtype=dtype) if "norm" in end else torch.zeros(shape, dtype=dtype)
        found = self.model.read(own)
        for axis, kind in enumerate(AXES[end]):
            found = _taken(found, self._from[kind], axis)
        if end in NORMS:
            found = (found.float() * math.sqrt(self.own.hidden / self.shape.hidden)).to(found.dtype)
        return found

    def _own_name(self, name: str) -> str | None:
        """The model's tensor of which `name`, of the expanded model, is made; None in a layer that the model lacks."""
        if name.startswith(self._prefix):
            at, _, suffix = name.removeprefix(self._prefix).partition(".")
            layer = self._layer_at.get(int(at))
            return None if layer is None else self.model.layout.name(suffix, layer)
        if name == HEAD and self.own.is_tied:
            (name,) = self.model.layout.suffixes("embedding")
        return name

    @property
    def _prefix(self) -> str:
        return self.model.layout.layer_prefix

    @cached_property
    def _names_of_layer(self) -> dict[str, str]:
        """Names of the tensors of the model's first layer, keyed by their names within a layer."""
        return {place.suffix: name for name, place in self.model.layout.places.items() if place.layer == 0}

    @cached_property
    def _from(self) -> dict[str, torch.Tensor]:
        """For each kind of axis, the index in the model of each index in the expanded model; -1 where it has none."""
        queries, keys = _head_places(self.own, self.shape)
        size = self.own.head_size
        return {
            "hidden": _padded(self.own.hidden, self.shape.hidden),
            "intermediate": _padded(self.own.intermediate, self.shape.intermediate),
            "vocabulary": torch.arange(self.shape.vocabulary),
            "query": _of_heads(queries, size),
            "key": _of_heads(keys, size),
            "head": torch.arange(size),
        }

    def config(self) -> dict[str, Any]:
        """The config.json of the expanded model."""
        config = {key: value for key, value in self.model.config.items() if key != "_name_or_path"}
        of_layers = of_each_layer(self.model.config, self.own.layers)
        config |= {name: values[:1] * self.shape.layers for name, values in of_layers.items()}
        config |= {
            "hidden_size": self.shape.hidden,
            "intermediate_size": self.shape.intermediate,
            "num_hidden_layers": self.shape.layers,
            "num_attention_heads": self.shape.heads,
            "num_key_value_heads": self.shape.kv_heads,
            "vocab_size": self.shape.vocabulary,
            "tie_word_embeddings": self.shape.is_tied,
        }
        if config["model_type"] not in WITHOUT_HEAD_DIM:
            config["head_dim"] = self.shape.head_size
        if "max_window_layers" in config:
            config["max_window_layers"] = self.shape.layers
        return config


def _padded(own: int, size: int) -> torch.Tensor:
    return torch.cat([torch.arange(own), torch.full((size - own,), -1)])


def _of_heads(heads: list[int], size: int) -> torch.Tensor:
    """Indices of channels of `heads`, each of which has `size` channels; -1 for the channels of a head that is -1."""
    of_head = torch.tensor(heads)[:, None]
    return torch.where(of_head < 0, -1, of_head * size + torch.arange(size)).flatten()


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


@dataclass(frozen=True)
class Expanded:
    """Models of one shape, `shape`, and the directory of each of them, keyed by alias."""

    shape: Shape
    directories: Mapping[str, Path]


def expand(
    models: Mapping[str, str | Path],
    out_dir: str | Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[Progress], None] = lambda _: None,
    note: Callable[[str], None] = log.info,
) -> Expanded:
    """Expand models to their common shape, and return this shape and the directory of each model.

    `models` has the directory or hub id of each model, keyed by alias; models of a hub are downloaded. A model that has
    the common shape already stays where it is. The others are written to folders of `out_dir` that are called like
    their aliases, as Hugging Face checkpoints with files of at most `max_shard_bytes`; a folder with this model, of
    this shape, is left as it is. `progress` is called for every tensor, and `note` with messages about downloads.

    Raises:
        InvalidModel: The models cannot be expanded to one shape, or the disk has too little space.
        FileExistsError: A folder has other content, or another process writes to it.
    """
    shape = common_shape({alias: open_checkpoint(directory) for alias, directory in models.items()})
    places = fetched([locate(directory) for directory in models.values()], note=note)
    opened = {alias: open_checkpoint(place) for alias, place in zip(models, places, strict=True)}
    expansions = {alias: Expansion(model, shape) for alias, model in opened.items()}
    outs = {alias: Path(out_dir).resolve() / alias for alias, each in expansions.items() if each.is_needed}
    missing = [alias for alias, out in outs.items() if not _is_written(out, expansions[alias])]
    current = Progress(0, 0, sum(expansions[alias].num_bytes for alias in missing))
    _check_space(Path(out_dir).resolve(), current.total)
    for alias in missing:
        with appearing(outs[alias], _key(expansions[alias])[:16]) as directory:
            for written in _write(expansions[alias], directory, max_shard_bytes):
                current = replace(current, written=current.written + written)
                progress(current)
    return Expanded(shape, {alias: model.directory for alias, model in opened.items()} | outs)


def _check_space(out_dir: Path, needed: int) -> None:
    above = next(parent for parent in (out_dir, *out_dir.parents) if parent.exists())
    if needed > (free := shutil.disk_usage(above).free):
        raise InvalidModel((f"{out_dir}: {needed / 2**30:.1f} GiB are needed; {free / 2**30:.1f} GiB are free",))


def _key(expansion: Expansion) -> str:
    """Digest of what decides the content: the model's files, their sizes and times, the shape, and our version."""
    files = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in expansion.model.files]
    return digest_of([files, str(expansion.shape), version("mergesearch")])


def _is_written(out: Path, expansion: Expansion) -> bool:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return False
    try:
        found = json.loads((out / "expansion.json").read_text())["key"]
        open_checkpoint(out)
    except (OSError, ValueError, KeyError, TypeError):
        found = None
    if found == _key(expansion):
        return True
    raise FileExistsError(f"{out}: exists and is not this model, expanded to this shape; expected a new directory")


def _write(expansion: Expansion, directory: Path, max_shard_bytes: int) -> Iterator[int]:
    """Write an expanded model to `directory`, and yield the number of bytes of each tensor."""
    from safetensors.torch import save_file

    model = expansion.model
    shards = plan_shards(expansion.shapes, expansion.itemsize, max_shard_bytes)
    for shard in shards:
        tensors = {}
        for name in shard.shapes:
            tensors[name] = expansion.tensor(name).clone(memory_format=torch.contiguous_format)
            yield tensors[name].nbytes
        save_file(tensors, directory / shard.file, metadata={"format": "pt"})
    write_index(shards, directory)
    _write_json(directory / "config.json", expansion.config())
    for name in (*model.modality.files, "generation_config.json"):
        source = model.tokenizer_dir if (model.tokenizer_dir / name).is_file() else model.directory
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    _write_json(
        directory / "expansion.json",
        {"model": str(model.directory), "shape": str(expansion.own), "expanded_to": str(expansion.shape)}
        | {"key": _key(expansion)},
    )


def _write_json(file: Path, document: Any) -> None:
    file.write_text(json.dumps(document, indent=2) + "\n")
