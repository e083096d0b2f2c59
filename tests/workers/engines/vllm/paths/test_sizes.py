from pathlib import Path

import pytest

from tests.builders import tiny_llama
from workers.engines.vllm.paths.sizes import alignment_bytes, outside_bytes, pool_size, widest_layer_bytes
from workers.errors import EngineUnavailable
from workers.models.family import resolve_model

GB = 10**9


def size(room: int, *, max_layers: int = 36) -> int:
    return pool_size(room=room, layer_bytes=GB, num_sources=96, max_layers=max_layers, of="the GPU")


def test_where_there_is_room_all_sources_and_a_whole_merge_fit() -> None:
    assert size(500 * GB) == 96 + 36
    assert size(100 * GB) == 100
    assert size(36 * GB) == 36


def test_unfitting_merge_is_refused() -> None:
    """A merge that does not fit is refused with the size that would."""
    message = r"paths of up to 36 layers: one layer takes 1 GB, and the GPU has room for 30, 30\.2 GB; lower"
    with pytest.raises(EngineUnavailable, match=message + r" limits\.max_layers to at most 30"):
        size(30 * GB + GB // 5)
    with pytest.raises(EngineUnavailable, match=r"room for 0, 0 GB; use a larger machine"):
        size(-5)


def test_bytes_are_those_of_the_tensors(tmp_path: Path) -> None:
    sources = resolve_model(tiny_llama(tmp_path / "base", tied=False, layers=3))
    total = 4 * sources.num_parameters
    assert outside_bytes(sources, 4) + 3 * widest_layer_bytes(sources, 4) == total
    assert outside_bytes(sources, 2) * 2 == outside_bytes(sources, 4) == 4 * (2 * 128 * 32 + 32)
    assert alignment_bytes(sources.base.config, 36, 2) == 36 * 32 * 32 * 2
