"""The bank: the source weights of one family, held once per engine in their stored dtype.

It knows where tensors are and what depends on the sources alone (finite or not, angles); not how to merge.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from workers.checkpoints import Checkpoint, aligned, content_problems, fingerprint, open_sources, stored_bytes
from workers.errors import InvalidModel
from workers.headers import TensorInfo
from workers.hub import is_stand_in
from workers.layout import Layout
from workers.magnitudes import MagnitudeTable
from workers.merge_methods import Products, cosine, inner_products
from workers.types import Family, ModelSource

__all__ = ["Bank", "Key"]

Key = tuple[str, str]  # alias and tensor name

# The shares of the memory free on the GPU and on the host that a bank may take: candidates are merged beside it.
GPU_SHARE, HOST_SHARE = 0.8, 0.5


class Bank:
    """The tensors of a family by alias and name, read-only, in their stored dtype; safe to read from several threads.
    Of an adapter its matrices are held, and what it makes of its base's tensors is float32.

    `placement` says where they are: "mapped" from their files, whose pages all processes on the machine share; in
    "host" memory, pinned where there is a GPU; in the memory of the current "gpu". "auto" is the fastest of these that
    has room: the GPU, then host memory; without a GPU, mapped. Merges are computed on the GPU where there is one.
    Without `keeps_statistics` nothing that was computed is kept, as for a single merge, which asks for nothing twice.

    Opening checks the headers and the fingerprints, and looks for NaN and infinity once per content (`cache` as in
    `findings.cache_dir`). Raises InvalidModel.
    """

    def __init__(
        self,
        family: Family,
        placement: str = "auto",
        *,
        keeps_statistics: bool = True,
        cache: str | Path | None = None,
    ) -> None:
        has_gpu = torch.cuda.is_available()
        accepted = ("auto", "mapped", "host", *(["gpu"] if has_gpu else []))
        if placement not in accepted:
            raise ValueError(f"bank: placement {placement!r}; expected one of {', '.join(accepted)}")
        self.family = family
        self.device = torch.device("cuda" if has_gpu else "cpu")
        self._checkpoints = open_sources(family)
        self._aliases = {model.fingerprint: model.alias for model in reversed(family.models)}
        self._keeps_statistics = keeps_statistics
        self._magnitudes: dict[tuple[Key, Key], MagnitudeTable] = {}
        self._cosines: dict[tuple[Key, Key], float] = {}
        self._products: dict[tuple[tuple[Key, ...], Key | None], Products] = {}
        problems = [problem for model in family.models for problem in self._content_problems(model, cache)]
        if problems:
            raise InvalidModel(tuple(problems))
        self._checkpoints, self.alignment = aligned(self._checkpoints, family.tokenizer)
        self.num_bytes = stored_bytes(self._checkpoints.values())
        self.placement = _fastest_place(self.num_bytes) if placement == "auto" else placement
        self._stored = {
            info: _placed(checkpoint.read_stored(info), self.placement)
            for checkpoint in self._checkpoints.values()
            if not is_stand_in(checkpoint.directory)
            for info in checkpoint.own
        }

    @property
    def fingerprint(self) -> str:
        return self.family.fingerprint

    @property
    def base(self) -> Checkpoint:
        """The base model's checkpoint: its configuration, tensor headers and layout are those of every merge, in the
        family's vocabulary."""
        return self._checkpoints[self.family.base.alias]

    @property
    def layout(self) -> Layout:
        return self.base.layout

    def alias(self, fingerprint: str) -> str | None:
        """The alias under which the bank holds the model of this content, if it does."""
        return self._aliases.get(fingerprint)

    def get(self, alias: str, name: str) -> torch.Tensor:
        """Tensor `name` of model `alias`, on `device`. It may be the bank's own: never write to it.

        An adapter's is computed anew each time. Raises InvalidModel.
        """
        checkpoint = self._checkpoints.get(alias)
        tensor = checkpoint.tensors.get(name) if checkpoint else None
        if tensor is None:
            held = ", ".join(self._checkpoints)
            raise InvalidModel((f"bank: no tensor {name!r} of model {alias!r}; it holds the tensors of {held}",))
        return tensor.value(self._read)

    def cosine(self, first: Key, second: Key) -> float:
        """The cosine between two tensors, each (alias, name), as SLERP needs it; computed once."""
        known = self._cosines.get((first, second))
        if known is None:
            known = cosine(self.get(*first), self.get(*second))
            if self._keeps_statistics:
                self._cosines[first, second] = known
        return known

    def products(self, sources: Sequence[Key], base: Key | None) -> Products:
        """The inner products of all pairs of tensors, or with `base` of their differences from it; computed once."""
        asked = (tuple(sources), base)
        known = self._products.get(asked)
        if known is None:
            tensors = [self.get(*source) for source in sources]
            known = inner_products(tensors, None if base is None else self.get(*base))
            if self._keeps_statistics:
                self._products[asked] = known
        return known

    def magnitudes(self, sources: Sequence[Key], base: Key) -> tuple[MagnitudeTable | None, ...]:
        """For each source the table of |source - base|, computed once; None for tensors without elements."""
        if self.get(*base).numel() == 0:
            return (None,) * len(sources)
        tables = {source: self._magnitudes.get((source, base)) for source in sources}
        unknown = [source for source, table in tables.items() if table is None]
        if unknown:
            with ThreadPoolExecutor(torch.get_num_threads()) as threads:
                made = threads.map(lambda source: MagnitudeTable.of(self.get(*source), self.get(*base)), unknown)
                tables |= dict(zip(unknown, made, strict=True))
            if self._keeps_statistics:
                self._magnitudes |= {(source, base): table for source, table in tables.items() if table is not None}
        return tuple(tables[source] for source in sources)

    def summary(self) -> dict[str, Any]:
        """Where the sources are and how large: {placement, bytes, statistics_bytes, models, fingerprint}."""
        return {
            "placement": self.placement,
            "bytes": self.num_bytes,
            "statistics_bytes": sum(table.num_bytes for table in self._magnitudes.values()),
            "models": len(self._checkpoints),
            "fingerprint": self.fingerprint,
        }

    def _read(self, info: TensorInfo) -> torch.Tensor:
        return self._stored[info].to(self.device, non_blocking=True)

    def _content_problems(self, model: ModelSource, cache: str | Path | None) -> list[str]:
        actual = fingerprint(model.directory, base=self.family.base.directory, cache=cache)
        if actual != model.fingerprint:
            return [
                f"model {model.alias!r}: {model.directory} has changed: its fingerprint is {actual[:12]}, "
                f"expected {model.fingerprint[:12]}; restore it or start a new study"
            ]
        problems = content_problems(self._checkpoints[model.alias], actual, cache=cache)
        return [f"model {model.alias!r}: {problem}" for problem in problems]


def _fastest_place(num_bytes: int) -> str:
    """The fastest place with room for a bank of this size."""
    if torch.cuda.is_available():
        if num_bytes <= GPU_SHARE * torch.cuda.mem_get_info()[0]:
            return "gpu"
        if num_bytes <= HOST_SHARE * psutil.virtual_memory().available:
            return "host"
    return "mapped"


def _placed(tensor: torch.Tensor, placement: str) -> torch.Tensor:
    if placement == "mapped":
        return tensor
    if placement == "gpu":
        return tensor.cuda()
    return tensor.pin_memory() if torch.cuda.is_available() else tensor.clone()
