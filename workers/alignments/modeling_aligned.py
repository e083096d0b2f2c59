"""Models with alignments (maps of the residual stream) between their layers, for transformers.

Exports of merges with alignments have this file beside the weights. The file needs only torch and transformers. Load a
checkpoint with

    AutoModelForCausalLM.from_pretrained(directory, trust_remote_code=True)

The alignment before layer t maps the layer's input, h, to W h + f b (a projection) or a * h + f b (a number for each
channel); b is optional. The field `alignments` of the configuration is keyed by the number of the layer. A value has
the names of the alignment's tensors, and `factor`, the number f. It differs from 1 only in merges that multiply the
outputs of earlier layers by numbers.

The configuration has a separate model type, so that transformers does not load it as a model without alignments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

__all__ = [
    "AlignedLlamaConfig",
    "AlignedLlamaForCausalLM",
    "AlignedMistralConfig",
    "AlignedMistralForCausalLM",
    "AlignedQwen2Config",
    "AlignedQwen2ForCausalLM",
    "AlignedQwen3Config",
    "AlignedQwen3ForCausalLM",
]


class LayerAlignment(nn.Module):
    """The alignment (map of the residual stream) that a model applies to the input of one of its layers.

    `tensors` lists the names of the alignment's tensors: `projection` [hidden, hidden] or `scale` [hidden], and
    optionally `shift` [hidden]. `factor` multiplies the shift; it is 1 unless the layers' outputs have scales.
    """

    projection: Tensor | None
    scale: Tensor | None
    shift: Tensor | None

    def __init__(self, tensors: tuple[str, ...], hidden_size: int, factor: float) -> None:
        super().__init__()
        self.factor = factor
        for name in ("projection", "scale", "shift"):
            shape = (hidden_size, hidden_size) if name == "projection" else (hidden_size,)
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if name in tensors else None)

    def forward(self, stream: Tensor) -> Tensor:
        shift = self.shift if self.shift is None or self.factor == 1 else self.shift * self.factor
        if self.projection is not None:
            return nn.functional.linear(stream, self.projection, shift)
        assert self.scale is not None
        scaled = stream * self.scale
        return scaled if shift is None else scaled + shift


class _Aligned:
    """Base class of models that apply alignments to the inputs of some of their layers.

    An alignment is a map of the residual stream between two layers.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)  # type: ignore[call-arg]
        decoder: Any = self.model  # type: ignore[attr-defined]
        for number, stated in config.alignments.items():
            layer = decoder.layers[int(number)]
            layer.alignment = LayerAlignment(tuple(stated["tensors"]), config.hidden_size, stated["factor"])
            layer.register_forward_pre_hook(_align_first)


def _align_first(layer: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
    stream, *others = given
    alignment: Any = layer.alignment
    return (alignment(stream), *others)


class AlignedLlamaConfig(LlamaConfig):  # type: ignore[misc]  # transformers has no types
    model_type = "aligned_llama"


class AlignedMistralConfig(MistralConfig):  # type: ignore[misc]  # transformers has no types
    model_type = "aligned_mistral"


class AlignedQwen2Config(Qwen2Config):  # type: ignore[misc]  # transformers has no types
    model_type = "aligned_qwen2"


class AlignedQwen3Config(Qwen3Config):  # type: ignore[misc]  # transformers has no types
    model_type = "aligned_qwen3"


class AlignedLlamaForCausalLM(_Aligned, LlamaForCausalLM):  # type: ignore[misc]
    config_class = AlignedLlamaConfig


class AlignedMistralForCausalLM(_Aligned, MistralForCausalLM):  # type: ignore[misc]
    config_class = AlignedMistralConfig


class AlignedQwen2ForCausalLM(_Aligned, Qwen2ForCausalLM):  # type: ignore[misc]
    config_class = AlignedQwen2Config


class AlignedQwen3ForCausalLM(_Aligned, Qwen3ForCausalLM):  # type: ignore[misc]
    config_class = AlignedQwen3Config
