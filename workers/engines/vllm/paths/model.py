"""The vLLM model that computes a path through a pool of layers, for Llama, Mistral, Qwen2 and Qwen3.

The model has the parameters of all layers of the pool. A path has at most `mergesearch_max_layers` hops. A layer may be
used at several hops, so keys and values belong to the hop, not to the layer: the model has one object of vLLM's class
`Attention` for each hop.

The path is an attribute of the model; compiled code and captured graphs would ignore its changes. Therefore the model
is neither compiled nor captured, and its engine runs eagerly.

Alignments of the path (package `workers.alignments`) are not parameters of the model. The attribute `alignments` has
the alignments in use, keyed by digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from vllm.model_executor.models.mistral import MistralDecoderLayer
from vllm.model_executor.models.qwen2 import Qwen2DecoderLayer
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer
from vllm.model_executor.models.utils import AutoWeightsLoader, make_empty_intermediate_tensors_factory

from workers.alignments.alignment import Alignment
from workers.engines.vllm.paths.held import HeldPath
from workers.engines.vllm.paths.pool import Hop
from workers.merging.residual_scales import BranchFactors

__all__ = ["LAYER_OF", "PathForCausalLM"]

MakeLayer = Callable[[VllmConfig, str], nn.Module]


def _of_whole_config(kind: type[nn.Module]) -> MakeLayer:
    return lambda config, prefix: kind(vllm_config=config, prefix=prefix)


def _of_parts(kind: type[nn.Module]) -> MakeLayer:
    return lambda config, prefix: kind(
        config=config.model_config.hf_config,
        cache_config=config.cache_config,
        quant_config=config.quant_config,
        prefix=prefix,
    )


# vLLM's decoder layer of each model type. All have the same parts under the same names; see `_walk`.
LAYER_OF: Mapping[str, MakeLayer] = {
    "llama": _of_whole_config(LlamaDecoderLayer),
    "mistral": _of_whole_config(MistralDecoderLayer),
    "qwen2": _of_parts(Qwen2DecoderLayer),
    "qwen3": _of_parts(Qwen3DecoderLayer),
}


class PathModel(nn.Module):
    """A decoder that computes the layers listed in its attribute `path`, in this order.

    The attribute is a sequence of hops (class `pool.Hop`). A hop names a layer, factors on its outputs, and an
    alignment (map of the residual stream) before it. The attribute may be set between forward passes, when no request
    is in flight.
    """

    hf_to_vllm_mapper = LlamaModel.hf_to_vllm_mapper

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size)
        make = LAYER_OF[config.model_type]
        names = [f"{prefix}.layers.{index}" for index in range(config.num_hidden_layers)]
        self.layers = nn.ModuleList(make(vllm_config, name) for name in names)
        registered = vllm_config.compilation_config.static_forward_context
        slots: list[nn.Module] = []
        layer: Any
        for index, (name, layer) in enumerate(zip(names, self.layers, strict=True)):
            modules: dict[str, Any] = layer.self_attn._modules
            if index < config.mergesearch_max_layers:
                slots.append(modules["attn"])
            else:
                del registered[f"{name}.self_attn.attn"]
            modules["attn"] = None
        self.slots = nn.ModuleList(slots)
        self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.make_empty_intermediate_tensors = make_empty_intermediate_tensors_factory(
            ["hidden_states", "residual"], config.hidden_size
        )
        # vLLM measures its memory with a first pass, before any merge is held.
        self.path: tuple[Hop, ...] = tuple(Hop(index) for index in range(len(slots)))
        self.alignments: Mapping[str, Alignment] = {}

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self.embed_tokens(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: Any = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden: torch.Tensor = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        residual = None
        for slot, hop in zip(self.slots, self.path, strict=False):
            layer: Any = self.layers[hop.layer]
            if hop.alignment is not None:
                stream = hidden if residual is None else hidden + residual
                hidden, residual = self.alignments[hop.alignment](stream, hop.factors.stream), None
            layer.self_attn._modules["attn"] = slot
            hidden, residual = _walk(layer, hop.factors, positions, hidden, residual)
        normalised: torch.Tensor = self.norm(hidden, residual)[0]
        return normalised

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded: set[str] = AutoWeightsLoader(self).load_weights(weights, mapper=self.hf_to_vllm_mapper)
        return loaded


def _walk(
    layer: Any, factors: BranchFactors, positions: torch.Tensor, hidden: torch.Tensor, residual: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute one of vLLM's decoder layers, and multiply the outputs of its attention and of its MLP by `factors`.

    The residual stream before the layer is `hidden` + `residual`, the two results for the previous layer. At the first
    layer it is `hidden`, and `residual` is None. `positions` are the positions of the tokens. Returns the output of the
    MLP and the residual stream before the MLP.
    """
    if residual is None:
        residual = hidden
        hidden = layer.input_layernorm(hidden)
    else:
        hidden, residual = layer.input_layernorm(hidden, residual)
    hidden = layer.self_attn(positions=positions, hidden_states=hidden)
    if factors.stream != 1:
        hidden = hidden * factors.stream
    hidden, residual = layer.post_attention_layernorm(hidden, residual)
    hidden = layer.mlp(hidden)
    return hidden * factors.mlp if factors.mlp != 1 else hidden, residual


class PathForCausalLM(LlamaForCausalLM):  # type: ignore[misc]  # vLLM has no types
    """The causal language model for layer paths: PathModel with vLLM's output head (Llama, Mistral, Qwen2, Qwen3).

    A layer path names the layers of a merge in the order in which they are computed. The head may be tied to the
    embedding.
    """

    held_by = HeldPath

    def _init_model(self, vllm_config: VllmConfig, prefix: str = "", layer_type: Any = None) -> PathModel:
        return PathModel(vllm_config=vllm_config, prefix=prefix)
