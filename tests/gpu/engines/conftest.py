"""The one engine that runs at a time, and the families that only engines need."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from search_spaces.study.engine import EngineOptions
from tests.conftest import record_engine_start
from tests.gpu.conftest import ON_CPU, engines_on
from tests.layouts import layout_family
from workers.engines.vllm import worker_extension
from workers.engines.vllm.engine import Engine
from workers.engines.vllm.startup.contents import WeightContents
from workers.models.family import open_family
from workers.tiny_family import family_dir
from workers.types import Family


class Engines:
    """Starts engines in this process, one at a time.

    An engine takes most of a GPU's memory, and the end of one ends the distributed state of vLLM for all of its
    process.
    """

    def __init__(self) -> None:
        self._running: Engine | None = None

    def start(self, label: str, family: Family, options: EngineOptions, *, is_eager: bool | None = None) -> Engine:
        """Start an engine after the end of the one before.

        `is_eager` says whether it runs without compiled code and CUDA graphs; None leaves this to the product.
        """
        self.close()
        started = time.perf_counter()
        with pytest.MonkeyPatch.context() as patch:
            if is_eager is not None:
                of_product = WeightContents.model_options

                def model_options(contents: WeightContents) -> dict[str, Any]:
                    return {**of_product(contents), "enforce_eager": is_eager}

                patch.setattr(WeightContents, "model_options", model_options)
            self._running = Engine(family, options)
        record_engine_start(label, time.perf_counter() - started)
        return self._running

    def close(self) -> None:
        """End the engine that runs, if there is one, and free the memory that it and its sources took."""
        if self._running is not None:
            self._running.close()
            self._running = None
        worker_extension._opened.clear()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@pytest.fixture(scope="session")
def engines() -> Iterator[Engines]:
    if not engines_on():
        pytest.skip(f"needs vLLM and a CUDA device, or {ON_CPU}=cpu")
    started = Engines()
    yield started
    started.close()


@pytest.fixture(scope="session")
def shipped(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The shipped family: a Llama of eight layers and three experts, all trained."""
    root = family_dir()
    experts = {name: root / "experts" / name for name in ("math", "text", "lookup")}
    return open_family(root / "base", experts, cache=tmp_path_factory.mktemp("shipped"))


@pytest.fixture(scope="session")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Family:
    """A Qwen2-MoE: six experts and a router in each layer, and a shared expert with a gate."""
    return layout_family(tmp_path_factory.mktemp("mixture"), "qwen2_moe", hidden=128)


@pytest.fixture(scope="session")
def aligned_family(small_family: Family, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """The small family, with a directory for alignments."""
    return replace(small_family, alignments_dir=str(tmp_path_factory.mktemp("alignments")))
