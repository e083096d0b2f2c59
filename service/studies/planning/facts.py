"""Sizes of a family's models, from which the plan of a study computes seconds and bytes.

The sizes are read from the models' configurations and the headers of their weight files.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workers.models.family import ResolvedFamily

__all__ = ["ModelFacts", "facts_of"]


@dataclass(frozen=True)
class ModelFacts:
    """Sizes of the models of a family, from which a plan computes seconds and bytes.

    Attributes:
        parameters: Number of parameters of a merge.
        multiplied: Number of parameters outside the embedding and the output head. A pass over many tokens reads all of
            them.
        head: Number of parameters of the output head, which multiplies activations only where logits are computed.
        attention: Number of arithmetic operations of attention for each pair of a token and an earlier token, over all
            layers.
        layers: Number of layers.
        tensors: Number of tensors of a merge.
        bank_bytes: Bytes of all sources as they are stored.
        idle: Number of those `multiplied` parameters that multiply no activation of a token: in a mixture of experts,
            the parameters of the experts that are not chosen for the token.
    """

    parameters: int
    multiplied: int
    head: int
    attention: int
    layers: int
    tensors: int
    bank_bytes: int
    idle: int = 0

    @property
    def active(self) -> int:
        """Number of parameters outside embedding and head that multiply an activation of each token."""
        return self.multiplied - self.idle

    def deepened(self, layers: int) -> ModelFacts:
        """Facts about merges that have `layers` layers, each as large as the mean layer of the models."""
        if layers == self.layers or not self.layers:
            return self
        grown = self.multiplied * layers // self.layers
        return ModelFacts(
            self.parameters + grown - self.multiplied,
            grown,
            self.head,
            self.attention * layers // self.layers,
            layers,
            self.tensors * layers // self.layers,
            self.bank_bytes,
            self.idle * layers // self.layers,
        )


def facts_of(sources: ResolvedFamily) -> ModelFacts:
    """Compute the sizes of the models `sources` from their headers and configurations; no weights are read."""
    sizes = {name: math.prod(info.shape) for name, info in sources.base.tensors.items()}
    layout, config = sources.layout, sources.base.settings
    ends = {part: [sizes[name] for name in layout.suffixes(part)] for part in ("embedding", "head")}
    matrices = [size for size in ends["head"] if size > int(config["hidden_size"])]
    embedding = max(ends["embedding"], default=0)
    return ModelFacts(
        parameters=sources.num_parameters,
        multiplied=sources.num_parameters - sum(ends["embedding"]) - sum(ends["head"]),
        head=max(matrices, default=embedding),  # a tied head is the embedding
        attention=4 * int(config["num_hidden_layers"]) * _width(config),
        layers=layout.num_layers,
        tensors=len(sizes),
        bank_bytes=sources.stored_bytes,
        idle=_idle(sizes, sources.base.config, chosen=int(config.get("num_experts_per_tok") or 0)),
    )


def _idle(sizes: Mapping[str, int], config: Mapping[str, Any], *, chosen: int) -> int:
    """Number of parameters of the experts of a mixture that are not chosen for a token; 0 if there are no experts.

    `sizes` has the sizes of a model's tensors, keyed by name. `config` is the model's configuration as it is stored,
    without defaults, which may state another number of experts. `chosen` is the number of experts of a token.
    """
    from workers.engines.transformers.outlines import NUMBERS_OF_EXPERTS

    number = max(int(config.get(key) or 0) for key in NUMBERS_OF_EXPERTS)
    if not 0 < chosen < number:
        return 0
    return sum(size for name, size in sizes.items() if ".experts." in name) * (number - chosen) // number


def _width(config: Mapping[str, Any]) -> int:
    """Width of attention: the number of query heads times the size of a head, from a model's configuration."""
    heads = int(config["num_attention_heads"])
    return heads * int(config.get("head_dim") or int(config["hidden_size"]) // heads)
