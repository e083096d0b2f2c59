"""Recipes that every search is compared with: the sources themselves, and merges recommended in the literature.

Uniform average: Wortsman et al., "Model soups" (2022). Task arithmetic: Ilharco et al. (2022), with 1/n, its
recommended 0.3 to 0.4, and 0.5, 0.7 and 1.0, so that a gain over the best of them is more than a better lambda. TIES:
Yadav et al. (2023), k = 0.2 and lambda = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source

__all__ = ["Baseline", "everywhere", "sources_and_published"]


class Baseline(NamedTuple):
    """A recipe that needs no search. `label` is unique within a study ("expert:math")."""

    origin: Literal["source", "published"]
    label: str
    recipe: Recipe


def sources_and_published(
    *, base: str, experts: Sequence[str], fingerprints: Mapping[str, str], num_layers: int, tokenizer: str = "base"
) -> tuple[Baseline, ...]:
    """The base, each expert, then the published merges of all experts: canonical recipes, without duplicates."""
    known: dict[str, Baseline] = {}
    for origin, label, merge in _merges(base, tuple(experts)):
        recipe = everywhere(merge, base, fingerprints, num_layers, tokenizer)
        known.setdefault(recipe.digest, Baseline(origin, label, recipe))
    return tuple(known.values())


def _merges(base: str, experts: tuple[str, ...]) -> Iterator[tuple[Literal["source", "published"], str, Merge]]:
    sources = tuple(Source(expert) for expert in experts)
    yield "source", "base", Merge("passthrough", (Source(base),))
    for source in sources:
        yield "source", f"expert:{source.model}", Merge("passthrough", (source,))
    share = 1 / len(experts)
    yield "published", "uniform average", Merge("linear", sources, {"weight": share})
    for label, lambda_ in (("1/n", share), *((str(number), number) for number in (0.3, 0.4, 0.5, 0.7, 1.0))):
        yield "published", f"task arithmetic {label}", Merge("task_arithmetic", sources, {"lambda": lambda_})
    yield "published", "TIES k 0.2 lambda 1.0", Merge("ties", sources, {"k": 0.2, "lambda": 1.0})


def everywhere(
    merge: Merge, base: str, fingerprints: Mapping[str, str], num_layers: int, tokenizer: str = "base"
) -> Recipe:
    """The canonical recipe that merges every tensor alike."""

    def at(layer: int) -> Merge:
        sources = tuple(Source(source.model, layer) for source in merge.sources)
        return Merge(merge.method, sources, merge.coefficients, merge.seed)

    layers = tuple(LayerRecipe(at(layer), at(layer), at(layer)) for layer in range(num_layers))
    return Recipe(fingerprints, base, layers, embedding=merge, head=merge, tokenizer=tokenizer).canonical()
