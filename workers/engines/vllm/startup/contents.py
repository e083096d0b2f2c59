"""Options, memory sizes and possible merges of an engine, for the process that starts vLLM.

The class `WeightContents` is for merges with as many layers as the base model, and its subclasses are for other merges,
such as layer paths. The class `Engine` is the same for all of them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.engines.vllm.memory import (
    EngineMemory,
    MemoryRequirements,
    divide_memory,
    free_for_engine,
    memory_requirements,
)
from workers.engines.vllm.startup.cpus import cpu_options
from workers.engines.vllm.startup.gpus import free_gpu_bytes, gpus_of_this_machine
from workers.evaluation.prompts import Prompts
from workers.merging.node import free_shared_bytes, remove_leftovers, shared_bytes
from workers.models.family import ResolvedFamily

__all__ = ["WeightContents"]

log = logging.getLogger(__name__)

# The prefix of vLLM's classes for models without code in vLLM.
GENERIC = "Transformers"


class WeightContents:
    """Start options and memory sizes of an engine whose merges have as many layers as the base model.

    `sources` are the base model and its experts. `prompts` has the properties on which prompts depend, such as the
    model's configuration. `options` are the engine's options. `dtype` is the engine's dtype; the option "auto" means
    "float32" on CPU and "bfloat16" on a GPU. `aligns` says whether merges may have alignments (maps of the residual
    stream between layers). `most_engines` is the largest number of equal engines in the cluster; None means one for
    each GPU. The method `options_by_device` raises EngineUnavailable if the model does not fit into a GPU's memory. The
    subclass `PathContents` is for engines whose merges may have other numbers of layers.
    """

    def __init__(
        self,
        sources: ResolvedFamily,
        prompts: Prompts,
        options: EngineOptions,
        *,
        aligns: bool = False,
        most_engines: int | None = None,
    ) -> None:
        from vllm.platforms import current_platform

        self.sources = sources
        self.prompts = prompts
        self.options = options
        self.aligns = aligns
        self.most_engines = most_engines
        self.is_cpu = bool(current_platform.is_cpu())
        self.dtype = options.dtype
        if self.dtype == "auto":
            self.dtype = "float32" if self.is_cpu else "bfloat16"

    @property
    def config(self) -> Mapping[str, Any]:
        """The model configuration of the longest merge that this engine can hold.

        The key names are the same for every model type.
        """
        return self.prompts.config

    def model_options(self) -> dict[str, Any]:
        """Options of vLLM that depend on the model: how weights are loaded, and whether the model is compiled."""
        return {
            # Random weights: the first swap writes all, or fails (`HeldWeights.mark_unwritten`).
            "load_format": "dummy",
            "enforce_eager": self.is_cpu or not _has_code_for(self.prompts.config),
        }

    def refusal(self, recipe: Recipe) -> str | None:
        """Reason why the engine cannot hold the merge of `recipe`; None if it can hold the merge.

        The engine can hold only merges with as many layers as the base has.
        """
        layers = int(self.config["num_hidden_layers"])
        if len(recipe.layers) == layers:
            return None
        return f"the recipe has {len(recipe.layers)} layers, the model {layers}"

    def options_by_device(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options that depend on the device and its memory: (options of vLLM, options for opening the source weights).

        The second dict has arguments of the method `mergesearch_open` of the class `MergeExtension`.
        """
        opening: dict[str, Any] = {
            "keeps_ranks": self.options.rank_cache,
            "ranks": self.options.tensor_parallel_size,
            # Mapped files, from which engines on CPU merge, are shared by the operating system.
            "is_shared": not self.is_cpu or self.options.tensor_parallel_size > 1,
        }
        if self.is_cpu:
            return cpu_options(self.prompts, self.config, self.dtype), opening
        from workers.merging.bank import content_name

        content = content_name(self.sources.family, "cuda")
        remove_leftovers(except_for=content)
        ranks = self.options.tensor_parallel_size
        share_left = self.options.gpu_share_left
        free, total = free_gpu_bytes(ranks, share_left=share_left)
        free = free_for_engine(free, total, share_left)
        needs = self.requirements(gpu_free=free, gpu_total=total)
        # The copy of an engine that was started before is used again.
        already = shared_bytes(content)
        memory: EngineMemory = divide_memory(
            needs,
            gpu_free=free,
            gpu_total=total,
            host_free=free_host_bytes() + already,
            processes=self._num_processes(),
            is_shared=already + free_shared_bytes() >= needs.bank,
        )
        log.info("%s; the engine has %.2f of the GPU", memory.reason, memory.gpu_share)
        opening |= {"placements": memory.placements, "scratch_bytes": needs.scratch, "reason": memory.reason}
        opening["max_recent_bytes"] = memory.recent
        # vLLM sizes its cache by the GPU's free memory before and after a pass, in which another process may take or
        # free some.
        cache = int(memory.gpu_share * total) - replace(needs, kv_token=0).engine(1)
        return {
            "gpu_memory_utilization": memory.gpu_share,
            **({"kv_cache_memory_bytes": cache} if share_left else {}),
            # Other kernels for mixtures of experts reorder the weights while loading them; weights written later
            # would be read in the wrong order.
            "moe_backend": "triton",
            "enable_prefix_caching": True,
        }, opening

    def _num_processes(self) -> int:
        """The number of processes of equal engines that may run on this machine at once; each process uses one GPU."""
        ranks, gpus = self.options.tensor_parallel_size, gpus_of_this_machine()
        return max(ranks, gpus if self.most_engines is None else min(gpus, self.most_engines * ranks))

    def requirements(self, *, gpu_free: int, gpu_total: int) -> MemoryRequirements:
        """The memory that engine and source weights need on each GPU.

        Each GPU has `gpu_total` bytes, of which `gpu_free` are free.
        """
        return memory_requirements(
            self.sources,
            config=self.config,
            dtype=self.dtype,
            max_length=self.prompts.max_length,
            ranks=self.options.tensor_parallel_size,
            merges_parts=self.options.merges_parts,
        )


def _has_code_for(config: Mapping[str, Any]) -> bool:
    """Whether vLLM has its own implementation of a model with the configuration `config`.

    vLLM runs other models through transformers' modules. To compile these modules, or to capture them as CUDA graphs,
    vLLM would have to change transformers' classes, which this package prevents. Therefore engines of such models use
    neither compilation nor CUDA graphs.
    """
    from vllm import ModelRegistry

    names = config.get("architectures") or ()
    runs = [getattr(ModelRegistry.models.get(name), "class_name", GENERIC) for name in names]
    return any(not name.startswith(GENERIC) for name in runs)
