"""Cache of learned alignments: the alignment of each pair of layers is learned only once.

An alignment depends only on the weights of the two layers, on the texts from which it is learned, and on its kind.
Therefore all studies and paths that need the alignment of a pair use the same alignment. Recipes name it by the sha256
of its file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from search_spaces.recipe import Recipe
from search_spaces.spaces.base import LayerPair
from search_spaces.study.engine import EngineOptions
from workers.alignments.files import store_alignment
from workers.alignments.fitting import FittedAlignment, Kind
from workers.cache import cache_dir, cached
from workers.types import Family, TaskSpec

__all__ = ["AlignmentInputs", "alignment_file", "find_alignment", "keep_alignment"]

# Part of every key; increased for a kind when its alignments are learned in another way.
VERSIONS: Mapping[Kind, int] = {"moments": 3, "mlp": 3, "ridge": 4}

# Engine options that prompts depend on.
PROMPT_OPTIONS = ("add_bos_token", "chat_template", "max_model_len")


@dataclass(frozen=True)
class AlignmentInputs:
    """The inputs from which alignments (maps of the residual stream between two layers) are learned.

    - `family`: the base model and the experts that are merged
    - `pool`: the models whose layers may be joined by alignments, keyed by name; a model is given by the recipe of a
      merge of `family`
    - `tasks`: the task of each objective; alignments are learned on prompts of these tasks
    - `positions`: for each objective, the positions of the samples whose prompts are used, in the task's order
    - `options`: the engine's options, on which prompts depend
    - `kind`: the kind of alignment, "moments", "mlp" or "ridge"
    """

    family: Family
    pool: Mapping[str, Recipe]
    options: EngineOptions
    tasks: Mapping[str, TaskSpec]
    positions: Mapping[str, Sequence[int]]
    kind: Kind

    def key(self, pair: LayerPair) -> str:
        """Cache key of the alignment between the layers `pair`; the cached value is the alignment's digest.

        An alignment is a map of the residual stream, and its digest is the sha256 of its file. `pair` is (layer before
        the alignment, layer after it), each as (name of a model in the field `pool`, index). The key depends on the
        models' weights, on the texts from which the alignment is computed, and on the kind of alignment, but not on the
        models' names.
        """
        engine = self.options.model_dump(mode="json")
        prompts = {name: engine[name] for name in PROMPT_OPTIONS}
        if engine["system_prompt"] is not None:  # keys of studies without one are those of earlier versions
            prompts["system_prompt"] = engine["system_prompt"]
        document = {
            "hm3 alignment": VERSIONS[self.kind],
            "kind": self.kind,
            "pair": [[self.pool[model].digest, layer] for model, layer in pair],
            "family": self.family.fingerprint,
            "texts": sorted([spec.digest, list(self.positions[name])] for name, spec in self.tasks.items()),
            "prompts": prompts,
        }
        return json.dumps(document, sort_keys=True)


def alignment_file(digest: str) -> Path:
    """The path, in the cache, of the safetensors file of the alignment whose sha256 is `digest`."""
    return _directory() / f"{digest}.safetensors"


def _directory() -> Path:
    return cache_dir() / "alignments"


def find_alignment(inputs: AlignmentInputs, pair: LayerPair) -> tuple[str, FittedAlignment] | None:
    """Find the alignment between the two layers `pair` in the cache of alignments that were learned before.

    An alignment is a map from the residual stream after the first layer to the stream before the second layer. `inputs`
    are the models and texts from which alignments are learned. Returns the alignment's digest and the alignment, or
    None if none was learned from equal inputs. A damaged file counts as missing.
    """
    digest = cached(inputs.key(pair))
    if digest is None:
        return None
    try:
        content = alignment_file(digest).read_bytes()
        return (digest, FittedAlignment.from_bytes(content)) if hashlib.sha256(content).hexdigest() == digest else None
    except (OSError, ValueError):
        return None


def keep_alignment(inputs: AlignmentInputs, pair: LayerPair, content: bytes) -> str:
    """Store the alignment of a pair of layers in the cache; return its digest, which is its name in recipes.

    An alignment is a map of the residual stream between the two layers. The function `find_alignment` finds the
    alignment again by equal `inputs` and `pair`. `content` is the result of the method `FittedAlignment.to_bytes`.
    Raises OSError if the cache cannot be written.
    """
    digest = store_alignment(_directory(), content)
    cached(inputs.key(pair), digest)
    return digest
