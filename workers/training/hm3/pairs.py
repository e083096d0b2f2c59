"""What alignments are learned from, and alignments kept by pair of layers between runs.

An alignment is a function of the two layers' weights, the texts and the kind: it is learned once, whatever study and
path ask for it. Its name, in recipes too, is the sha256 of its file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from search_spaces.recipe import Recipe
from search_spaces.spaces.base import LayerPair
from search_spaces.study.engine import EngineOptions
from workers.cache import cache_dir, cached
from workers.merging.alignments import store_alignment
from workers.training.hm3.alignment import Aligned, AlignmentOptions, Kind, discrepancy, fit_mlp, fit_moments
from workers.types import Family, TaskSpec

__all__ = ["AlignmentJob", "file_of", "fit", "found", "keep"]

# Part of every key: another way to learn alignments is another number.
VERSION = 2

# Options that prompts depend on.
OF_PROMPTS = ("add_bos_token", "chat_template", "max_model_len")


@dataclass(frozen=True)
class AlignmentJob:
    """What alignments are learned from: models (`pool`, merges of the family by the names that pairs have), the prompts
    of the objectives' samples at these positions, and how."""

    family: Family
    pool: Mapping[str, Recipe]
    options: EngineOptions
    tasks: Mapping[str, TaskSpec]
    positions: Mapping[str, Sequence[int]]
    kind: Kind

    def key(self, pair: LayerPair) -> str:
        """Equal for equal weights and texts, whatever the models are called."""
        engine = self.options.model_dump(mode="json")
        document = {
            "hm3 alignment": VERSION,
            "kind": self.kind,
            "pair": [[self.pool[model].digest, layer] for model, layer in pair],
            "family": self.family.fingerprint,
            "texts": sorted([spec.digest, list(self.positions[name])] for name, spec in self.tasks.items()),
            "prompts": {name: engine[name] for name in OF_PROMPTS},
        }
        return json.dumps(document, sort_keys=True)


def fit(
    kind: Kind, x_ND: Tensor, y_ND: Tensor, is_held_out: Tensor, *, options: AlignmentOptions | None = None
) -> Aligned:
    """The alignment of rows x, handed on by one layer, to rows y, received by another, from those not held out."""
    train = (x_ND[~is_held_out], y_ND[~is_held_out])
    out = (x_ND[is_held_out], y_ND[is_held_out])
    if kind == "mlp":
        return fit_mlp(train, out, seed=0, options=options)
    alignment = fit_moments(*train)
    after = float(discrepancy(alignment(out[0]), out[1]))
    return Aligned(alignment, float(discrepancy(*out)), after, after)


def file_of(digest: str) -> Path:
    """Where the alignment with this name is kept: a safetensors file of `Alignment.tensors`."""
    return _directory() / f"{digest}.safetensors"


def _directory() -> Path:
    return cache_dir() / "alignments"


def found(job: AlignmentJob, pair: LayerPair) -> tuple[str, Aligned] | None:
    """The name of the pair's alignment, and the alignment; None if it was not learned before, or its file was lost or
    damaged."""
    digest = cached(job.key(pair))
    if digest is None:
        return None
    try:
        content = file_of(digest).read_bytes()
        return (digest, Aligned.from_bytes(content)) if hashlib.sha256(content).hexdigest() == digest else None
    except (OSError, ValueError):
        return None


def keep(job: AlignmentJob, pair: LayerPair, content: bytes) -> str:
    """Keep an alignment (`Aligned.to_bytes`). Returns its name. Raises OSError where the cache cannot be written: what
    recipes name must be there."""
    digest = store_alignment(_directory(), content)
    cached(job.key(pair), digest)
    return digest
