"""vLLM plugin (entry point group `vllm.general_plugins`) that vLLM loads in each of its processes.

On CPU, vLLM packs the weights of linear layers and of mixtures of experts: it copies them to the layout of its kernels,
and drops the plain weights. Merges are written over plain weights in place. Therefore this module makes engines of this
package keep the plain weights next to the packed copies. A layer with both kinds of weights has two more attributes:
`PACK`, a function that packs the layer again, and `IS_PACKED`, a function that returns whether the packed copies equal
the plain weights.

The module also keeps vLLM from changing transformers' classes, so that plain transformers remains available for
comparison, registers the model of layer paths, and keeps vLLM from kernels that cannot read the activations of a
quantised model.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from workers.engines.vllm.environment import KEEP_WEIGHTS, PATH_ARCHITECTURE

__all__ = ["IS_PACKED", "PACK", "register"]

PACK = "mergesearch_pack"
IS_PACKED = "mergesearch_is_packed"

# Columns of a linear layer that are compared with its packed copy. Every row of a merge is in each of them.
NUM_COLUMNS = 4

# The parameters of all experts of one layer, and the names under which vLLM passes them to its kernel.
EXPERT_WEIGHTS = {"w1": "w13_weight", "w2": "w2_weight"}


def register() -> None:
    """Prepare vLLM for engines of this package; vLLM calls this plugin in each of its processes.

    The plugin registers the model class of engines whose merges have layers in any order, and keeps transformers'
    classes unchanged. On CPU it also keeps the plain weights beside the packed weights (copies in the layout of vLLM's
    kernels), and computes quantised models in float32 without kernels for 16 bits. In other programs, and when it is
    called a second time, the plugin does nothing.
    """
    from vllm import ModelRegistry
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if os.environ.get(KEEP_WEIGHTS) != "1":
        return
    if PATH_ARCHITECTURE not in ModelRegistry.models:
        ModelRegistry.register_model(PATH_ARCHITECTURE, "workers.engines.vllm.paths.model:PathForCausalLM")
    _keep_transformers_classes()
    if current_platform.is_cpu() and not getattr(utils.dispatch_cpu_unquantized_gemm, "keeps_weights", False):
        _keep_linear_weights(utils)
        _keep_expert_weights()
        from vllm.model_executor.kernels.linear.scaled_mm import cpu

        _compute_int8_in_float32(cpu)


def _keep_linear_weights(utils: Any) -> None:
    pack = utils.dispatch_cpu_unquantized_gemm

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)
        if hasattr(layer, "cpu_linear"):
            setattr(layer, PACK, lambda: pack(layer, remove_weight=False))
            setattr(layer, IS_PACKED, lambda: _gives_its_columns(layer))

    pack_and_keep.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = pack_and_keep


def _gives_its_columns(layer: Any) -> bool:
    """Check on some columns that a linear layer's packed weights equal its plain weights [rows, columns].

    Packed weights are a copy in the layout of vLLM's CPU kernels. The kernel multiplies some rows of the identity
    matrix by the packed weights. The results must equal columns of the plain weights; nothing is rounded, because each
    result is one weight plus zeros. If plain weights contain NaN or infinity, the result is True: the merge fails in
    any case, because its logits are NaN.
    """
    weight = layer.weight.detach()
    columns = torch.linspace(0, weight.shape[1] - 1, NUM_COLUMNS, dtype=torch.float64).long()
    identity = torch.zeros(NUM_COLUMNS, weight.shape[1], dtype=weight.dtype)
    identity[torch.arange(NUM_COLUMNS), columns] = 1
    packed = layer.cpu_linear(identity, weight, None)
    # Kernels may treat numbers below the smallest normal one as zero.
    if torch.allclose(packed, weight[:, columns].t(), rtol=0, atol=torch.finfo(torch.float32).tiny):
        return True
    return not bool(weight.isfinite().all())  # times zero these give NaN, and so do the merge's logits


def _keep_expert_weights() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts

    pack, compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def pack_and_keep(self: Any, layer: torch.nn.Module) -> None:
        plain = {name: getattr(layer, name) for name in EXPERT_WEIGHTS.values()}
        pack(self, layer)  # replaces the plain weights by the packed ones
        self.packed_weights = {operand: getattr(layer, name).data for operand, name in EXPERT_WEIGHTS.items()}
        for name, parameter in plain.items():
            setattr(layer, name, parameter)
        setattr(layer, PACK, lambda: pack_and_keep(self, layer))
        packed = self.packed_weights
        pairs = [(getattr(layer, name), packed[operand]) for operand, name in EXPERT_WEIGHTS.items()]
        setattr(layer, IS_PACKED, lambda: all(_bits(plain) == _bits(copy) for plain, copy in pairs))

    def compute_with_packed(self: Any, **call: Any) -> Any:
        return compute(self, **{**call, **self.packed_weights})

    CPUUnquantizedExperts.process_weights_after_loading = pack_and_keep
    CPUUnquantizedExperts.apply = compute_with_packed


def _compute_int8_in_float32(kernels: Any) -> None:
    """Let layers in int8 use oneDNN's kernel if the model computes in float32.

    `kernels` is vLLM's module of these layers. On CPUs with AMX it takes a kernel by the dtype of the weights alone,
    and this kernel refuses activations in float32.
    """
    has_kernel = kernels.check_cpu_sgl_kernel

    def reads_activations(n: int, k: int, dtype: torch.dtype) -> bool:
        return torch.get_default_dtype() is not torch.float32 and bool(has_kernel(n, k, dtype))

    kernels.check_cpu_sgl_kernel = reads_activations


def _bits(weights: torch.Tensor) -> int:
    """Checksum of weights modulo 2^64, which is equal for copies of the weights in different layouts.

    The checksum depends on every weight, but not on the order of the weights or on added zeros.
    """
    word = {2: torch.int16, 4: torch.int32}[weights.element_size()]
    total = 0
    for part in weights.detach():  # one expert at a time: bounds the memory
        words = part.contiguous().view(word).to(torch.int64)
        total += int((words * words * words + words).sum())
    return total % 2**64


def _keep_transformers_classes() -> None:
    """Prevent vLLM from changing classes of transformers.

    vLLM uses transformers' modules for models that vLLM does not implement itself. To compile these modules, vLLM
    changes their classes, after which other code cannot use them. Engines of this package do not compile such models.
    """
    from vllm.model_executor.models.transformers.base import Base

    Base._decorate_for_torch_compile = lambda self: None
