"""Recipes over a test family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from workers.alignments.alignment import Alignment
from workers.models.config import read_config
from workers.types import Family


def num_layers(family: Family) -> int:
    return int(read_config(family.base.directory)["num_hidden_layers"])


def arithmetic(family: Family, *weights: float, layers: int | None = None) -> Recipe:
    """Task arithmetic with one weight per expert, the same in every layer."""

    def merge(layer: int | None) -> Merge:
        sources = tuple(Source(expert.alias, layer) for expert in family.experts)
        return Merge("task_arithmetic", sources, {"lambda": weights})

    count = num_layers(family) if layers is None else layers
    each = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(count))
    return Recipe(family.fingerprints, family.base.alias, each, embedding=merge(None), head=merge(None))


def slerp(family: Family, t: float) -> Recipe:
    """SLERP between the first two experts, with the norms of the base."""
    first, second = family.experts[:2]

    def merge(layer: int | None) -> Merge:
        return Merge("slerp", (Source(first.alias, layer), Source(second.alias, layer)), {"t": t})

    def base(layer: int | None) -> Merge:
        return Merge("passthrough", (Source(family.base.alias, layer),))

    each = tuple(LayerRecipe(merge(i), merge(i), base(i)) for i in range(num_layers(family)))
    return Recipe(family.fingerprints, family.base.alias, each, embedding=merge(None), head=merge(None))


def model_stock(family: Family, method: str = "model_stock", **coefficients: float) -> Recipe:
    """Model Stock of all experts, in every layer."""

    def merge(layer: int | None) -> Merge:
        return Merge(method, tuple(Source(expert.alias, layer) for expert in family.experts), coefficients)

    each = tuple(LayerRecipe(merge(i), merge(i), merge(i)) for i in range(num_layers(family)))
    return Recipe(family.fingerprints, family.base.alias, each, embedding=merge(None), head=merge(None))


def copied(model: str, layer: int | None) -> Merge:
    return Merge("passthrough", (Source(model, layer),))


def path(
    family: Family,
    steps: Sequence[tuple[str, int] | Merge],
    scales: Sequence[float] = (1.0,),
    mlp_scales: Sequence[float] = (1.0,),
) -> Recipe:
    """A path of whole layers, or of layers with one merge, with scales in turn; embedding and head are the base's."""
    merges = [step if isinstance(step, Merge) else copied(*step) for step in steps]
    layers = tuple(
        LayerRecipe(m, m, m, scale=scales[i % len(scales)], mlp_scale=mlp_scales[i % len(mlp_scales)])
        for i, m in enumerate(merges)
    )
    base = family.base.alias
    return Recipe(family.fingerprints, base, layers, copied(base, None), copied(base, None))


def random_alignment(kind: str, hidden: int, seed: int = 0) -> Alignment:
    """A random alignment near the identity, so that the model still works."""
    draw = torch.Generator().manual_seed(seed)

    def some(*shape: int) -> torch.Tensor:
        return 0.3 * torch.randn(*shape, generator=draw)

    if kind == "projection":
        return Alignment(projection=torch.eye(hidden) + 0.2 * some(hidden, hidden), shift=some(hidden))
    return Alignment(scale=1 + some(hidden), shift=some(hidden))


def aligned(recipe: Recipe, *digests: str | None) -> Recipe:
    """The recipe with these alignments after its layers, in order."""
    given = (*digests, *(None,) * (len(recipe.layers) - len(digests)))
    layers = zip(recipe.layers, given, strict=True)
    return replace(recipe, layers=tuple(replace(layer, alignment=digest) for layer, digest in layers))


def whole_model(family: Family, alias: str) -> Recipe:
    """The recipe of one source model without changes."""
    return Recipe.of_model(
        alias, models=family.fingerprints, base=family.base.alias, num_layers=num_layers(family)
    ).canonical()
