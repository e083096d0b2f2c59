"""The bank: the source weights of one family, held once per engine in their stored dtype.

It knows where tensors are and what depends on the sources alone (finite or not, angles); not how to merge.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from workers.checkpoints import Checkpoint, check_family, fingerprint, open_checkpoint
from workers.errors import InvalidModel
from workers.findings import remembered
from workers.layout import Layout
from workers.merge_methods import cosine
from workers.types import Family, ModelSource

__all__ = ["Bank"]

# Sorted magnitudes of task vectors, in float32, are kept up to this many bytes in all: enough for small families, where
# finding a threshold anew would cost more than the merge. Beyond it they are computed when they are needed.
MAGNITUDES_BYTES = 256 * 2**20

EMBEDDING_NAMES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")


class Bank:
    """The tensors of a family by alias and name, read-only, in their stored dtype; safe to read from several threads.

    `placement` "auto" maps the files: their pages are shared by all processes on the machine. Opening checks the
    headers and the fingerprints, and looks for NaN and infinity once per content (`cache` as in
    `findings.cache_dir`). Raises InvalidModel.
    """

    def __init__(self, family: Family, placement: str = "auto", *, cache: str | Path | None = None) -> None:
        if placement not in ("auto", "mapped"):
            raise ValueError(f"bank: placement {placement!r}; expected 'auto' or 'mapped'")
        if family.experts:
            check_family(family.base.directory, {model.alias: model.directory for model in family.experts})
        self.family = family
        self.placement = "mapped"
        self._checkpoints = {model.alias: open_checkpoint(model.directory) for model in family.models}
        self._aliases = {model.fingerprint: model.alias for model in reversed(family.models)}
        self._tensors = {
            (alias, name): checkpoint.read(name)
            for alias, checkpoint in self._checkpoints.items()
            for name in checkpoint.tensors
        }
        self._magnitudes: dict[tuple[tuple[str, str], tuple[str, str]], torch.Tensor] = {}
        self._statistics_bytes = 0
        self._cosines: dict[tuple[tuple[str, str], tuple[str, str]], float] = {}
        problems = [problem for model in family.models for problem in self._content_problems(model, cache)]
        if problems:
            raise InvalidModel(tuple(problems))

    @property
    def fingerprint(self) -> str:
        return self.family.fingerprint

    @property
    def base(self) -> Checkpoint:
        """The base model's checkpoint: its configuration, tensor headers and layout are those of every merge."""
        return self._checkpoints[self.family.base.alias]

    @property
    def layout(self) -> Layout:
        return self.base.layout

    def alias(self, fingerprint: str) -> str | None:
        """The alias under which the bank holds the model of this content, if it does."""
        return self._aliases.get(fingerprint)

    def get(self, alias: str, name: str) -> torch.Tensor:
        """Tensor `name` of model `alias`. It may be mapped from a file: never write to it. Raises InvalidModel."""
        tensor = self._tensors.get((alias, name))
        if tensor is None:
            held = ", ".join(self._checkpoints)
            raise InvalidModel((f"bank: no tensor {name!r} of model {alias!r}; it holds the tensors of {held}",))
        return tensor

    def cosine(self, first: tuple[str, str], second: tuple[str, str]) -> float:
        """The cosine between two tensors, each (alias, name), as SLERP needs it; computed once."""
        key = (first, second)
        if key not in self._cosines:
            self._cosines[key] = cosine(self.get(*first), self.get(*second))
        return self._cosines[key]

    def magnitudes(self, source: tuple[str, str], base: tuple[str, str]) -> torch.Tensor | None:
        """The magnitudes |source - base| of two tensors, each (alias, name): flat, float32, ascending, computed once.

        None where keeping them would take too much memory.
        """
        key = (source, base)
        known = self._magnitudes.get(key)
        if known is None:
            tensor = self.get(*source)
            if self._statistics_bytes + 4 * tensor.numel() > MAGNITUDES_BYTES:
                return None
            unsorted = (tensor.float() - self.get(*base).float()).abs_().flatten()
            # On CPU NumPy sorts several times faster than torch.
            known = self._magnitudes[key] = torch.from_numpy(numpy.sort(unsorted.numpy()))
            self._statistics_bytes += known.nbytes
        return known

    def summary(self) -> dict[str, Any]:
        """Where the sources are and how large: {placement, bytes, statistics_bytes, models, fingerprint}."""
        return {
            "placement": self.placement,
            "bytes": sum(
                info.num_bytes for checkpoint in self._checkpoints.values() for info in checkpoint.tensors.values()
            ),
            "statistics_bytes": self._statistics_bytes,
            "models": len(self._checkpoints),
            "fingerprint": self.fingerprint,
        }

    def _content_problems(self, model: ModelSource, cache: str | Path | None) -> list[str]:
        actual = fingerprint(model.directory, cache=cache)
        if actual != model.fingerprint:
            return [
                f"model {model.alias!r}: {model.directory} has changed: its fingerprint is {actual[:12]}, "
                f"expected {model.fingerprint[:12]}; restore it or start a new study"
            ]
        key = f"content/1 {model.fingerprint}"
        found = remembered(key, cache=cache)
        if found is None:
            found = remembered(key, "\n".join(_bad_tensors(self._checkpoints[model.alias])), cache=cache) or ""
        return [f"model {model.alias!r}: {model.directory}: {line}" for line in found.splitlines()]


def _bad_tensors(checkpoint: Checkpoint) -> Iterator[str]:
    """What only the contents tell: tensors with NaN or infinity, a tied head that is not the embedding."""
    for name in checkpoint.tensors:
        tensor = checkpoint.read(name)
        if tensor.numel() and not all(torch.isfinite(end) for end in torch.aminmax(tensor)):
            num_bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            yield f"tensor {name!r} holds {num_bad} values that are NaN or infinite; expected finite weights"
    head = checkpoint.layout.tied_head
    embeddings = [name for name in checkpoint.tensors if name.endswith(EMBEDDING_NAMES)]
    if head and embeddings and not torch.equal(checkpoint.read(head), checkpoint.read(embeddings[0])):
        yield (
            f"tensor {head!r} differs from {embeddings[0]!r}, though config.json ties them; remove it or set "
            "tie_word_embeddings to false"
        )
