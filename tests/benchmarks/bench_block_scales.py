"""Accuracy of the shipped math expert with a scale of 1.2 at one layer: of the residual stream, and of the layer's MLP.

These are the two meanings of a block's scale in the space `dis`: `scale_of: stream` and `scale_of: mlp`. transformers
answers the sums and differences of the tasks with the folded weights, in float32 on CPU.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from search_spaces.recipe import Recipe
from tests.benchmarks.family_training import Item, exact_match
from workers.engines.transformers.merged_models import merged_model
from workers.merging.bank import Bank
from workers.models.family import open_family

SCALE = 1.2
SHIPPED = Path(__file__).parents[2] / "workers" / "tiny_family"
FEW = 200  # of the search data, whose share is shown beside that of the holdout


def run() -> dict[str, Any]:
    items = {name: _items(name) for name in ("search", "holdout")}
    with tempfile.TemporaryDirectory(prefix="mergesearch-scales-") as directory:
        family = open_family(SHIPPED / "base", {"math": SHIPPED / "experts" / "math"}, cache=Path(directory))
        bank = Bank(family, cache=Path(directory))
        num_layers = bank.layout.num_layers
        plain = Recipe.of_model("math", models=family.fingerprints, base="base", num_layers=num_layers)
        rows = [
            {
                "layer": layer,
                "stream": _accuracy(_scaled(plain, layer, scale=SCALE), bank, items),
                "mlp": _accuracy(_scaled(plain, layer, mlp_scale=SCALE), bank, items),
            }
            for layer in range(num_layers)
        ]
        return {"plain": _accuracy(plain, bank, items), "layers": rows}


def show(result: dict[str, Any]) -> None:
    print(f"a scale of {SCALE:g} at one layer of math: accuracy on 1,000 held-out items, and on {FEW} of the search")
    print(f"none      {_shown(result['plain'])}")
    for row in result["layers"]:
        print(f"layer {row['layer']}   stream {_shown(row['stream'])}   MLP {_shown(row['mlp'])}")


def _shown(accuracy: Mapping[str, float]) -> str:
    return f"{accuracy['holdout']:.3f} ({accuracy['search']:.3f})"


def _items(name: str) -> list[Item]:
    lines = (SHIPPED / "tasks" / f"math_{name}.jsonl").read_text().splitlines()
    found = [Item(each["prompt"], each["answer"]) for each in map(json.loads, lines)]
    return found[:FEW] if name == "search" else found


def _scaled(recipe: Recipe, at: int, *, scale: float = 1.0, mlp_scale: float = 1.0) -> Recipe:
    layers = list(recipe.layers)
    layers[at] = replace(layers[at], scale=scale, mlp_scale=mlp_scale)
    return replace(recipe, layers=tuple(layers))


def _accuracy(recipe: Recipe, bank: Bank, items: Mapping[str, Sequence[Item]]) -> dict[str, float]:
    model = merged_model(recipe, bank, dtype="float32")
    return {name: sum(exact_match(model, own)) / len(own) for name, own in items.items()}
