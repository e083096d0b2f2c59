"""Scales of the residual stream after layers and of MLP outputs, folded into the weights of an ordinary checkpoint.

A recipe's scale s_t multiplies the residual stream after layer t. A layer has two branches, A (attention) and M (MLP),
each preceded by its own norm, so that the stream h is

    u_t = h_t + A_t(norm(h_t)),    h_t+1 = s_t (u_t + M_t(norm(u_t))).

Let c_t = s_0 s_1 ... s_t-1, and divide the stream by it: g_t = h_t / c_t. An RMSNorm gives the same result for h and
for c h with c > 0, up to its eps, so that

    v_t = g_t + A_t(norm(g_t)) / c_t,    g_t+1 = v_t + M_t(norm(v_t)) / c_t,

which is the model without scales whose branches end in weights and biases divided by c_t (`o_proj`, `down_proj`). The
final norm absorbs the last c, and the embedding is unchanged, as c_0 = 1.

This folded form defines scales in this project: engines, transformers and exports all compute it. A model that
multiplies its stream gives other results because of eps, if the mean square of the stream is not far above eps. Over
eight layers, the log-probabilities of such a model and of the folded form were measured to differ by 9e-6 for the
models that the project ships; by 0.007 for a Llama with random weights of 0.02, an eps of 1e-5 and scales of 0.5; with
an eps of 1e-12 by at most 1e-6, which is rounding.

There is no such form for models that normalise the output of a branch (Gemma-2, OLMo-2), nor for scales of zero or
below.

A recipe's MLP scale m_t multiplies only the output of layer t's MLP: u_t + m_t M_t(norm(u_t)). The MLP's last weight
and bias are multiplied by m_t, or by m_t / c_t if the stream has scales. This is exact up to rounding, does not depend
on the norms, and holds for all numbers, including 0. The MLP must end in a linear map whose output reaches the stream
without a norm. In a mixture of experts, the last weights and biases of all experts are multiplied.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe

__all__ = ["MLP_SCALABLE", "SCALABLE", "UNSCALED", "BranchFactors", "branch_factors", "ends_a_branch"]

# Model types whose layers have two branches, each preceded by an RMSNorm or LayerNorm and followed by no other module.
SCALABLE = ("gemma", "llama", "mistral", "phi3", "qwen2", "qwen3", "vit")

# Model types whose MLPs, or mixtures of experts, end in linear maps that are added to the stream as they are.
MLP_SCALABLE = (*SCALABLE, "gpt2", "gpt_neox", "mixtral", "qwen2_moe", "qwen3_moe")

# The last module of each branch in those models. Only scales of the stream change attention, so only the name that it
# has in `SCALABLE` is needed. Experts of a mixture are named one by one, or as the stack of all.
ATTENTION_END = re.compile(r"(?:self_attn\.o_proj|attention\.output\.dense)\.(?:weight|bias)")
MLP_END = re.compile(
    r"(?:mlp|block_sparse_moe)\.(?:experts\.(?:\d+\.)?|shared_expert\.)?"
    r"(?:down_proj|w2|c_proj|dense_4h_to_h)(?:\.weight|\.bias)?"
    r"|output\.dense\.(?:weight|bias)"
)


@dataclass(frozen=True)
class BranchFactors:
    """Factors on the outputs of one layer's attention and MLP, which replace the scales of a recipe's layers.

    A scale is a factor on the residual stream after a layer. The factors have the same effect: the outputs of all later
    layers are divided by the scale. `stream` multiplies the output of the layer's attention, and is one over the
    product of the scales of all earlier layers. `mlp` multiplies the output of the layer's MLP. This factor is `stream`
    times the layer's MLP scale, a factor on the MLP's output alone.
    """

    stream: float = 1.0
    mlp: float = 1.0

    def of(self, suffix: str) -> float:
        """The factor by which the layer's tensor `suffix` is multiplied; 1 for a tensor that stays unchanged.

        `suffix` is the tensor's name within the layer.
        """
        if MLP_END.fullmatch(suffix):
            return self.mlp
        return self.stream if ATTENTION_END.fullmatch(suffix) else 1.0


UNSCALED = BranchFactors()


def branch_factors(layers: Sequence[LayerRecipe], *, model_type: str) -> tuple[BranchFactors, ...]:
    """Convert the scales of a recipe's `layers` to factors on the attention and MLP outputs of each layer.

    With these factors multiplied into the weights, the merged model needs no scales. A layer's scale multiplies the
    residual stream after the layer. Dividing the last weights of attention and MLP in all later layers by the scale has
    the same effect. A layer's MLP scale multiplies the last weights of its MLP. `model_type` is the models' type in
    transformers.

    Raises:
        InvalidRecipe: A layer has an alignment (a map of the residual stream after the layer), or a scale that cannot
            be multiplied into weights; the message names the layer. A scale must be above 0, and must be 1 in models of
            a type that is not in the constant SCALABLE. float64 must be able to represent the product of the scales. An
            MLP scale must be finite, and must be 1 in models of a type that is not in the constant MLP_SCALABLE.
    """
    factors = []
    cumulative = 1.0
    for index, layer in enumerate(layers):
        if layer.alignment is not None:
            raise InvalidRecipe(
                f"layer {index}: alignment {layer.alignment[:12]!r}: a module between layers cannot be folded into the "
                "weights of an ordinary checkpoint; expected none"
            )
        if not (math.isfinite(layer.scale) and layer.scale > 0):
            raise InvalidRecipe(
                f"layer {index}: scale {layer.scale:g}; expected a number above 0: only these can be folded into the "
                "weights of an ordinary checkpoint"
            )
        if layer.scale != 1 and model_type not in SCALABLE:
            raise InvalidRecipe(
                f"layer {index}: scale {layer.scale:g}: in a model of type {model_type!r} scales cannot be folded into "
                f"weights; expected scale 1, or one of the types {', '.join(SCALABLE)}"
            )
        if not math.isfinite(layer.mlp_scale):
            raise InvalidRecipe(f"layer {index}: mlp_scale {layer.mlp_scale:g}; expected a finite number")
        if layer.mlp_scale != 1 and model_type not in MLP_SCALABLE:
            raise InvalidRecipe(
                f"layer {index}: mlp_scale {layer.mlp_scale:g}: in a model of type {model_type!r} it cannot be folded "
                f"into weights; expected mlp_scale 1, or one of the types {', '.join(MLP_SCALABLE)}"
            )
        factors.append(BranchFactors(stream=1 / cumulative, mlp=layer.mlp_scale / cumulative))
        cumulative *= layer.scale
        if not (math.isfinite(cumulative) and math.isfinite(1 / cumulative if cumulative else math.inf)):
            raise InvalidRecipe(f"layer {index}: the product of the scales up to here is {cumulative:g}")
    return tuple(factors)


def ends_a_branch(suffix: str) -> bool:
    """Whether a tensor is the last weight or bias of its layer's attention or MLP.

    `suffix` is the tensor's name within the layer.
    """
    return ATTENTION_END.fullmatch(suffix) is not None or MLP_END.fullmatch(suffix) is not None
