"""vLLM's entry point into this package (group `vllm.general_plugins`), called in each of its processes.

On CPU vLLM packs the weight of every linear layer for its kernels and throws the plain weight away; then nothing can be
written in place. For engines of ours the plain weight stays beside the packed copy.
"""

from __future__ import annotations

import os

import torch

__all__ = ["KEEP_WEIGHTS", "register"]

# Set by `workers.engine`: other programs of the same environment keep vLLM as it is.
KEEP_WEIGHTS = "MERGESEARCH_KEEP_WEIGHTS"


def register() -> None:
    """Make vLLM keep plain weights on CPU. Does nothing elsewhere, in other programs, or when called again."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if not current_platform.is_cpu() or os.environ.get(KEEP_WEIGHTS) != "1":
        return
    pack = utils.dispatch_cpu_unquantized_gemm
    if getattr(pack, "keeps_weights", False):
        return

    def pack_and_keep(layer: torch.nn.Module, remove_weight: bool) -> None:
        pack(layer, remove_weight=False)

    pack_and_keep.keeps_weights = True  # type: ignore[attr-defined]
    utils.dispatch_cpu_unquantized_gemm = pack_and_keep
