from pathlib import Path
from typing import Any

import pytest

from tests.builders import tiny_llama
from workers.engines.vllm.memory import FEW_TEXTS, MANY_TEXTS, USABLE_SHARE
from workers.engines.vllm.paths.sizes import (
    alignment_bytes,
    outside_bytes,
    path_requirements,
    pool_size,
    widest_layer_bytes,
)
from workers.errors import EngineUnavailable
from workers.models.family import resolve_model

GB = 10**9


def size(room: int, *, max_layers: int = 36, num_layers: int = 24) -> int:
    return pool_size(
        room=room, layer_bytes=GB, num_sources=96, num_layers=num_layers, max_layers=max_layers, of="the GPU"
    )


def test_where_there_is_room_all_sources_and_a_whole_merge_fit() -> None:
    assert size(500 * GB) == 96 + 36
    assert size(100 * GB) == 100
    assert size(36 * GB) == 36


def test_unfitting_merge_is_refused() -> None:
    """A merge that does not fit is refused with the size that would, if the sources, which are scored too, fit."""
    message = r"paths of up to 36 layers: one layer takes 1 GB, and the GPU has room for 30, 30\.2 GB; lower"
    with pytest.raises(EngineUnavailable, match=message + r" limits\.max_layers to at most 30"):
        size(30 * GB + GB // 5)
    with pytest.raises(EngineUnavailable, match=r"room for 0, 0 GB; the sources have 24; use a larger machine"):
        size(-5)
    with pytest.raises(EngineUnavailable, match=r"room for 30, 30 GB; the sources have 32; use a larger machine"):
        size(30 * GB, num_layers=32)


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    sources = resolve_model(tiny_llama(tmp_path / "base", tied=False, layers=3))
    total = 4 * sources.num_parameters
    assert outside_bytes(sources, 4) + 3 * widest_layer_bytes(sources, 4) == total
    assert outside_bytes(sources, 2) * 2 == outside_bytes(sources, 4) == 4 * (2 * 128 * 32 + 32)
    assert alignment_bytes(sources.base.config, 36, 2) == 36 * 32 * 32 * 2


def test_pool_leaves_memory_for_many_texts(tmp_path: Path) -> None:
    """The pool has as many layers as leave room for many texts; a merge that needs their room gets it."""
    sources = resolve_model(tiny_llama(tmp_path / "base", tied=False, layers=3))
    layer = widest_layer_bytes(sources, 4)
    options: dict[str, Any] = {
        "config": sources.base.settings,
        "dtype": "float32",
        "max_length": 64,
        "ranks": 1,
        "max_layers": 40,
        "aligns": False,
    }
    roomy, held = path_requirements(sources, **options, gpu_free=10**12, gpu_total=10**12)
    assert held == 3 + 40, "all layers of the source, and a longest merge"
    assert roomy.weights == outside_bytes(sources, 4) + held * layer
    assert roomy.kv_token == 2 * 40 * 32 * 4
    without = roomy.engine(MANY_TEXTS) - held * layer + roomy.beside

    def pool(num_layers: int, num_texts: int) -> int:
        texts = (MANY_TEXTS - num_texts) * 64 * roomy.kv_token
        total = int((without - texts + (num_layers + 0.5) * layer) / USABLE_SHARE)
        return path_requirements(sources, **options, gpu_free=2 * total, gpu_total=total)[1]

    assert pool(41, MANY_TEXTS) == 41
    assert pool(40, MANY_TEXTS) == 40
    assert pool(40, FEW_TEXTS) == 40, "beside few texts"
    with pytest.raises(EngineUnavailable, match="paths of up to 40 layers"):
        pool(39, FEW_TEXTS)
