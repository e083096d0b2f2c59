"""Options and memory sizes of an engine for layer paths (merges of any depth), for the process that starts vLLM.

The engine holds a pool of layers, and attention's keys and values for the longest path.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from search_spaces.recipe import Recipe
from search_spaces.study.engine import EngineOptions
from workers.engines.host_memory import free_host_bytes
from workers.engines.kv_cache import value_bytes
from workers.engines.vllm.environment import PATH_ARCHITECTURE
from workers.engines.vllm.memory import HOST_SHARE, MemoryRequirements, kv_cache_bytes
from workers.engines.vllm.paths.geometry import path_problems
from workers.engines.vllm.paths.sizes import (
    alignment_bytes,
    outside_bytes,
    path_requirements,
    pool_size,
    widest_layer_bytes,
)
from workers.engines.vllm.startup.contents import WeightContents
from workers.errors import EngineUnavailable, InvalidModel
from workers.evaluation.prompts import Prompts
from workers.models.config import of_each_layer
from workers.models.family import ResolvedFamily
from workers.models.merged_files import WINDOWED

__all__ = ["PathContents"]

log = logging.getLogger(__name__)

# On CPU a layer is held twice: plain, as it is written, and packed, as it is computed with.
COPIES_ON_CPU = 2


class PathContents(WeightContents):
    """Start options and memory sizes of an engine whose merges have layers in any order from the models in `sources`.

    The engine keeps a pool of layers, which usually has more layers than one merge, so that a layer that occurs in
    several merges need not be written again. A merge is a path through the pool: a sequence of up to
    `options.max_layers` of its layers. The KV cache is sized for the longest path. Raises InvalidModel for models whose
    layers cannot be combined in one path. Raises EngineUnavailable if the source models have more than
    `options.max_layers` layers, or do not fit into memory.
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
        super().__init__(sources, prompts, options, aligns=aligns, most_engines=most_engines)
        if problems := path_problems(sources):
            raise InvalidModel(tuple(problems))
        self.max_layers = options.max_layers
        if self.max_layers < (own := sources.layout.num_layers):
            raise EngineUnavailable(
                f"limits.max_layers: {self.max_layers}; expected at least {own}, because the models themselves are "
                f"scored too, and have {own} layers"
            )
        self._pool_size = 0
        self._made: TemporaryDirectory[str] | None = None

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return {**self.prompts.config, "num_hidden_layers": self.max_layers}

    def model_options(self) -> dict[str, Any]:
        from vllm import ModelRegistry

        from workers.engines.vllm.paths.model import PathForCausalLM

        # As a class: given a name, vLLM would import it in another process to inspect it.
        ModelRegistry.models.pop(PATH_ARCHITECTURE, None)
        ModelRegistry.register_model(PATH_ARCHITECTURE, PathForCausalLM)
        return {"load_format": "dummy", "enforce_eager": True, "hf_config_path": self._config_directory()}

    def refusal(self, recipe: Recipe) -> str | None:
        if 0 < len(recipe.layers) <= self.max_layers:
            return None
        return f"the recipe has {len(recipe.layers)} layers; this engine holds 1 to {self.max_layers}"

    def options_by_device(self) -> tuple[dict[str, Any], dict[str, Any]]:
        if self.is_cpu:
            size = value_bytes(self.dtype)
            keys_and_values = kv_cache_bytes(self.config, self.prompts.max_length, self.dtype)
            room = int(HOST_SHARE * free_host_bytes()) - keys_and_values - self._alignment_bytes(size)
            self._pool_size = pool_size(
                room=room - COPIES_ON_CPU * outside_bytes(self.sources, size),
                layer_bytes=widest_layer_bytes(self.sources, COPIES_ON_CPU * size),
                num_sources=self._num_sources,
                num_layers=self.sources.layout.num_layers,
                max_layers=self.max_layers,
                of="host memory",
            )
            self._log_pool()
        return super().options_by_device()

    def requirements(self, *, gpu_free: int, gpu_total: int) -> MemoryRequirements:
        needs, self._pool_size = path_requirements(
            self.sources,
            config=self.prompts.config,
            dtype=self.dtype,
            max_length=self.prompts.max_length,
            ranks=self.options.tensor_parallel_size,
            merges_parts=self.options.merges_parts,
            max_layers=self.max_layers,
            aligns=self.aligns,
            gpu_free=gpu_free,
            gpu_total=gpu_total,
        )
        self._log_pool()
        return needs

    def _alignment_bytes(self, bytes_of_value: int) -> int:
        return alignment_bytes(self.config, self.max_layers, bytes_of_value) if self.aligns else 0

    def _log_pool(self) -> None:
        log.info(
            "a pool of %d layers for paths of up to %d; the sources have %d",
            self._pool_size,
            self.max_layers,
            self._num_sources,
        )

    @property
    def _num_sources(self) -> int:
        """The number of layers of all source models."""
        return len(self.sources.views) * self.sources.layout.num_layers

    def _config_directory(self) -> str:
        """Write a config.json with as many layers as the engine's pool to a temporary directory, and return its path.

        From this configuration vLLM makes the engine's model, which has all layers of the pool; a merge uses some of
        them.
        """
        config = dict(self.sources.base.config)
        config |= {
            "architectures": [PATH_ARCHITECTURE],
            "num_hidden_layers": self._pool_size,
            "mergesearch_max_layers": self.max_layers,
        }
        for name, values in of_each_layer(self.sources.base.config, self.sources.layout.num_layers).items():
            config[name] = values[:1] * self._pool_size  # `path_problems` has found all layers to be of one kind
        if "max_window_layers" in config:
            config["max_window_layers"] = 0 if WINDOWED in config.get("layer_types", ()) else self._pool_size
        self._made = TemporaryDirectory(prefix="mergesearch-path-")
        (Path(self._made.name) / "config.json").write_text(json.dumps(config))
        return self._made.name
