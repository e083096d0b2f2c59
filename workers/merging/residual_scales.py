"""Scales of layers, folded into the weights of an ordinary checkpoint.

A recipe's scale s_t multiplies the residual stream after layer t. A layer has two branches, A (attention) and M (MLP),
each preceded by a norm of its own, so that the stream h is

    u_t = h_t + A_t(norm(h_t)),    h_t+1 = s_t (u_t + M_t(norm(u_t))).

Let c_t = s_0 s_1 ... s_t-1, and divide the stream by it: g_t = h_t / c_t. An RMSNorm gives the same for h and for c h
with c > 0, up to its eps, so that

    v_t = g_t + A_t(norm(g_t)) / c_t,    g_t+1 = v_t + M_t(norm(v_t)) / c_t,

which is the model without scales whose branches end in weights and biases divided by c_t (`o_proj`, `down_proj`). The
final norm absorbs the last c, and the embedding is unchanged, as c_0 = 1.

This folded form is what a scale means here: engines, transformers and exports all compute it. A model that multiplies
its stream differs from it through eps, where the mean square of the stream is not far above eps. Differences measured
over eight layers, in log-probability: 9e-6 on the shipped family; 0.007 on a Llama with random weights of 0.02, an eps
of 1e-5 and scales of 0.5; with an eps of 1e-12 at most 1e-6, which is rounding.

There is no such form for models that normalise what a branch adds (Gemma-2, OLMo-2), nor for scales of zero or below.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import LayerRecipe

__all__ = ["SCALABLE", "branch_factors", "ends_a_branch"]

# Model types whose layers have two branches, each preceded by an RMSNorm and followed by no other module.
SCALABLE = ("gemma", "llama", "mistral", "phi3", "qwen2", "qwen3")

# The last module of each branch in those models.
BRANCH_END = re.compile(r"^(?:self_attn\.o_proj|mlp\.down_proj)\.(?:weight|bias)$")


def branch_factors(layers: Sequence[LayerRecipe], *, model_type: str) -> tuple[float, ...]:
    """For each layer, the factor that its branches (attention, MLP) are multiplied by to fold scales into the weights.

    A layer's scale multiplies the residual stream after the layer. The factor is one over the product of the scales of
    all earlier layers. It multiplies the last weights of the layer's branches. Raises InvalidRecipe, with the layer,
    for scales that cannot be folded (not above 0, with a product that float64 cannot represent, or in a model of a type
    that is not in `SCALABLE`) and for alignments.
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
        factors.append(1 / cumulative)
        cumulative *= layer.scale
        if not (math.isfinite(cumulative) and math.isfinite(1 / cumulative if cumulative else math.inf)):
            raise InvalidRecipe(f"layer {index}: the product of the scales up to here is {cumulative:g}")
    return tuple(factors)


def ends_a_branch(suffix: str) -> bool:
    """Whether a tensor is the last weight or bias of a branch (attention, MLP) of its layer.

    `suffix` is the tensor's name within the layer.
    """
    return BRANCH_END.match(suffix) is not None
