"""Preparation of a process that starts an engine: environment variables, and a fix for llvmlite.

The module imports little, so that it can run before torch is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from search_spaces.study.engine import EngineOptions

__all__ = ["KEEP_WEIGHTS", "PATH_ARCHITECTURE", "engine_environment", "let_llvmlite_be_inspected"]

# Tells `plugin` that the process runs this package's engine; other programs in the environment use vLLM unmodified.
KEEP_WEIGHTS = "MERGESEARCH_KEEP_WEIGHTS"
# The name under which vLLM finds the model of path engines (`paths.model`).
PATH_ARCHITECTURE = "MergesearchPathForCausalLM"

# Seconds for which the end of an engine waits for its ranks, each of which ends after the merge that it computes.
RANKS_END_S = 120


def engine_environment(options: EngineOptions, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables to set for an engine's process, before torch is imported.

    `options` are the engine's options. `environment` has the variables that are set already; None means the variables
    of this process. These variables keep their values and are left out of the result, except for a few that are always
    replaced.
    """
    threads = options.threads or max(1, (len(os.sched_getaffinity(0)) - 1) // options.tensor_parallel_size)
    defaults = {
        "OMP_NUM_THREADS": str(threads),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TOKENIZERS_PARALLELISM": "false",
        "TQDM_DISABLE": "1",
    }
    if options.tensor_parallel_size > 1:
        # By default vLLM kills ranks 5 s after it has asked them to end, in the middle of a merge of a large model.
        defaults["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = str(RANKS_END_S)
    required = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_USE_V2_MODEL_RUNNER": str(int(options.model_runner == "v2")),
        # Tensors of adapters are products of matrices: with less precision they would differ from those of exports.
        "VLLM_FLOAT32_MATMUL_PRECISION": "highest",
        KEEP_WEIGHTS: "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    known = environment or {}
    return {name: value for name, value in defaults.items() if name not in known} | required


def let_llvmlite_be_inspected() -> None:
    """Fix llvmlite's library handle so that vLLM can inspect its attributes.

    vLLM inspects every object in the loaded modules. The handle, which is loaded with Numba, treats every unknown
    attribute, even `__dict__`, as a function of the library, so that vLLM fails.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    if ffi is None:
        return
    handle = type(ffi.lib)
    find = handle.__getattr__

    def find_function(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    handle.__getattr__ = find_function
