"""The configuration of merges whose layers come from models of different depths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.models.merged_files import merged_config

FULL, SLIDING = "full_attention", "sliding_attention"


def model(num_layers: int, *, full: int) -> Any:
    """A Qwen2 in which only the first `full` layers attend to the whole text."""
    return SimpleNamespace(
        config={
            "model_type": "qwen2",
            "num_hidden_layers": num_layers,
            "use_sliding_window": True,
            "max_window_layers": full,
        },
        layout=SimpleNamespace(num_layers=num_layers, suffixes=lambda part, layer: ("weight",)),
    )


MODELS = {"base": model(3, full=1), "deep": model(5, full=4)}


def recipe(*layers: tuple[str, int]) -> Recipe:
    merges = [Merge("passthrough", (Source(*layer),)) for layer in layers]
    outside = Merge("passthrough", (Source("base"),))
    each = tuple(LayerRecipe(merge, merge, merge) for merge in merges)
    return Recipe({"base": "b" * 64, "deep": "d" * 64}, "base", each, outside, outside)


@pytest.mark.parametrize(
    ("layers", "types"),
    [
        ([("base", 0), ("deep", 1), ("deep", 4), ("base", 2)], [FULL, FULL, SLIDING, SLIDING]),
        # As many layers as the base has, and of the same numbers.
        ([("deep", 0), ("deep", 1), ("deep", 2)], [FULL, FULL, FULL]),
    ],
)
def test_what_is_said_of_a_layer_is_what_its_own_model_says(layers: list[tuple[str, int]], types: list[str]) -> None:
    config = merged_config(recipe(*layers), MODELS["base"], MODELS, dtype="float32")
    assert (config["num_hidden_layers"], config["layer_types"]) == (len(layers), types)


def test_the_layers_of_the_base_in_order_have_its_configuration() -> None:
    config = merged_config(recipe(("base", 0), ("base", 1), ("base", 2)), MODELS["base"], MODELS, dtype="float32")
    assert config == {**MODELS["base"].config, "dtype": "float32"}
