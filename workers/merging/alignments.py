"""Alignments: what stands between two layers of a path that do not follow each other in one model.

What layer t hands on, h, becomes what layer t + 1 starts with:

    projection    W h + b,      W [hidden, hidden], b [hidden]
    moments       a * h + b,    a, b [hidden], element by element

b may be left out. "HM3: Hierarchical Multi-Objective Model Merging for Pretrained Models" fits such modules between
layers of different models. A layer of a recipe names the one behind it by the digest of its file, `DIGEST.safetensors`
in `Family.alignments_dir`, so that a recipe's digest covers the numbers.

With scales, engines and transformers compute with g = h / c (`residual_scales`), where an alignment is W g + b / c: its
shift is divided as the branches of the next layer are. Alignments have no form in the weights of an ordinary
checkpoint: norms divide by the length of what they are given, which W and a change in a way that depends on h. So
what plans weights refuses them (`residual_scales.branch_factors`), and exports bring their own model class
(`workers.export.aligned`).
"""

from __future__ import annotations

import hashlib
import re
import uuid
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import COMPONENTS, LayerRecipe, Recipe, Source
from workers.directories import sync

__all__ = [
    "Alignment",
    "alignments_before",
    "is_stored",
    "read_alignment",
    "store_alignment",
    "unaligned",
    "write_alignment",
]

DIGEST = re.compile(r"^[0-9a-f]{64}$")


@dataclass(frozen=True, eq=False)
class Alignment:
    """One alignment: a `projection` [hidden, hidden] or a `scale` [hidden], and a `shift` [hidden] if there is one.

    Raises ValueError for other tensors than these, or values that are NaN or infinite."""

    projection: torch.Tensor | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if (self.projection is None) == (self.scale is None):
            raise ValueError("expected a projection or a scale, and not both")
        hidden = self.hidden_size
        for name, tensor in self.tensors().items():
            expected = (hidden, hidden) if name == "projection" else (hidden,)
            if tuple(tensor.shape) != expected:
                raise ValueError(f"{name} is {list(tensor.shape)}; expected {list(expected)}")
            if not torch.isfinite(tensor).all():
                raise ValueError(f"{name} has values that are NaN or infinite")

    @property
    def hidden_size(self) -> int:
        of = self.scale if self.projection is None else self.projection
        assert of is not None
        return of.shape[-1] if of.ndim else 0

    def tensors(self) -> dict[str, torch.Tensor]:
        named = {"projection": self.projection, "scale": self.scale, "shift": self.shift}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, *, device: torch.device | str = "cpu", dtype: torch.dtype) -> Self:
        """The same in this memory, rounded to `dtype`."""
        return type(self)(**{name: tensor.to(device, dtype) for name, tensor in self.tensors().items()})

    def __call__(self, stream: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """What follows from `stream` [..., hidden], which was divided by the scales so far: `factor` is one over their
        product."""
        shift = self.shift if self.shift is None or factor == 1 else self.shift * factor
        if self.projection is not None:
            return torch.nn.functional.linear(stream, self.projection, shift)
        assert self.scale is not None
        scaled = stream * self.scale
        return scaled if shift is None else scaled + shift


def write_alignment(directory: str | Path, alignment: Alignment) -> str:
    """`store_alignment` in float32."""
    from safetensors.torch import save

    return store_alignment(
        directory,
        save({name: tensor.detach().cpu().float().contiguous() for name, tensor in alignment.tensors().items()}),
    )


def store_alignment(directory: str | Path, content: bytes) -> str:
    """Write a safetensors file of an alignment's tensors to `directory`, named by its digest, which is returned; an
    equal one is left as it is, a damaged one is replaced. A file appears under its name once it is complete."""
    digest = hashlib.sha256(content).hexdigest()
    place = _file(directory, digest)
    if not is_stored(directory, digest):
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = place.with_name(f".{digest}.{uuid.uuid4().hex}")
        partial.write_bytes(content)
        sync(partial)
        partial.replace(place)
    return digest


def is_stored(directory: str | Path, digest: str) -> bool:
    """Whether the directory has the file with this name, and its contents have this digest."""
    try:
        return hashlib.sha256(_file(directory, digest).read_bytes()).hexdigest() == digest
    except OSError:
        return False


def read_alignment(directory: str | Path, digest: str, *, layer: int, hidden_size: int) -> Alignment:
    """The alignment that layer number `layer` of a recipe names, in float32. Raises InvalidRecipe, with the layer and
    the file, if there is none, its contents have another digest, or it is not one of `hidden_size` numbers."""
    try:
        return _read(directory, digest, hidden_size)
    except InvalidRecipe as error:
        raise InvalidRecipe(f"layer {layer}: alignment {digest[:12]!r}: {error}") from error


def _read(directory: str | Path, digest: str, hidden_size: int) -> Alignment:
    from safetensors.torch import load

    if not DIGEST.match(digest):
        raise InvalidRecipe("expected the sha256 of a file, 64 hex digits")
    if not str(directory):
        raise InvalidRecipe("these models were opened without a directory of alignments (Family.alignments_dir)")
    place = _file(directory, digest)
    try:
        content = place.read_bytes()
    except OSError as error:
        raise InvalidRecipe(f"{place}: cannot be read: {error.strerror}") from error
    if (found := hashlib.sha256(content).hexdigest()) != digest:
        raise InvalidRecipe(f"{place}: its contents have the digest {found[:12]}")
    try:
        alignment = Alignment(**{name: tensor.float() for name, tensor in load(content).items()})
    except Exception as error:  # safetensors raises its own class, which is no more than an Exception
        raise InvalidRecipe(f"{place}: not an alignment: {error}") from error
    if alignment.hidden_size != hidden_size:
        raise InvalidRecipe(f"{place}: it aligns {alignment.hidden_size} numbers; the models have {hidden_size}")
    return alignment


def _file(directory: str | Path, digest: str) -> Path:
    return Path(directory) / f"{digest}.safetensors"


def alignments_before(recipe: Recipe) -> tuple[str | None, ...]:
    """For each layer the digest of the alignment before it: the one that the layer before names.

    Raises InvalidRecipe, with the layer, for alignments where none is needed: behind the last layer, whose model's
    final norm and head follow, and between layers that follow each other in their own models."""
    layers = recipe.canonical().layers
    for index, layer in enumerate(layers):
        if layer.alignment is None:
            continue
        where = f"layer {index}: alignment {layer.alignment[:12]!r}"
        if index + 1 == len(layers):
            raise InvalidRecipe(f"{where}: no layer follows; expected none")
        if _follow(layer, layers[index + 1]):
            raise InvalidRecipe(
                f"{where}: layers {index} and {index + 1} follow each other in their own models; expected none"
            )
    return (None, *(layer.alignment for layer in layers[:-1]))


def _follow(layer: LayerRecipe, after: LayerRecipe) -> bool:
    """Whether `after` is the same merge of the models' next layers."""

    def next_to(source: Source) -> Source:
        return source if source.layer is None else Source(source.model, source.layer + 1)

    merges = [(layer.component(name), after.component(name)) for name in COMPONENTS]
    return all(
        replace(
            merge,
            sources=tuple(map(next_to, merge.sources)),
            base=None if merge.base is None else next_to(merge.base),
        )
        == following
        for merge, following in merges
    )


def unaligned(recipe: Recipe) -> Recipe:
    """The recipe without its alignments: what its layers hold."""
    if all(layer.alignment is None for layer in recipe.layers):
        return recipe
    return replace(recipe, layers=tuple(replace(layer, alignment=None) for layer in recipe.layers))
