"""A path engine's statement of the merge that it holds."""

from __future__ import annotations

from workers.engines.vllm.paths.held import HeldPath
from workers.engines.vllm.paths.pool import Hop
from workers.merging.residual_scales import UNSCALED


def test_devices_are_those_of_the_path() -> None:
    """Of the pool, only layers of the path count as computed; tensors outside layers always do."""
    held = object.__new__(HeldPath)
    held._devices = {
        "model.embed_tokens.weight": "cuda",
        "model.layers.1.mlp.up_proj.weight": "cpu",
        "model.layers.11.mlp.up_proj.weight": "cuda",
    }
    held._path = (Hop(11, UNSCALED, None),)
    assert held.computed_on == {"model.embed_tokens.weight": "cuda", "model.layers.11.mlp.up_proj.weight": "cuda"}
    held._path = (Hop(1, UNSCALED, None), Hop(11, UNSCALED, None), Hop(1, UNSCALED, None))
    assert held.computed_on == held._devices
