"""A merge and its canonical form give the same tensor: omitted values and the order of sources have no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pytest
import torch
from torch import Tensor

from search_spaces.errors import InvalidRecipe
from search_spaces.methods import METHODS
from search_spaces.recipe import LayerRecipe, Merge, Recipe, Source
from tests.workers.merging.methods.examples import EXAMPLES
from workers.merging.masks import mask_key
from workers.merging.methods.plain import Operands, merge_tensors
from workers.merging.order_statistics import TieOrder

Numbers = Mapping[str, float | tuple[float, ...]]

EXACT: Numbers = {
    **EXAMPLES,
    "weight": (0.25, 0.5, 0.125),
    "lambda": (0.5, 0.25, 2.0),
    "t": 0.25,
    "density": 0.5,
    "epsilon": 0.125,
    "gamma": 0.125,
}
EXPERTS = ("a", "b", "c")

every_method = pytest.mark.parametrize("name", METHODS)


def of(base: Tensor, *differences: Tensor) -> dict[str, Tensor]:
    return {"base": base} | {name: base + tau for name, tau in zip(EXPERTS, differences, strict=True)}


GENERATOR = torch.Generator().manual_seed(0)
# Multiples of 1/8: a model is exactly the base plus its task vector, and equal magnitudes and opposite signs meet.
COARSE = of(*(torch.randint(-16, 17, (12, 20), generator=GENERATOR) / 8 for _ in range(4)))
# No two magnitudes are equal: where sums in another order are rounded otherwise, nothing else is selected.
FINE = of(*(torch.randn(12, 20, generator=GENERATOR) for _ in range(4)))


def example(name: str, count: int) -> Numbers:
    declared = METHODS[name]
    found: dict[str, float | tuple[float, ...]] = {}
    for coefficient in declared.coefficients:
        number = EXACT.get(coefficient.name, coefficient.default)
        assert number is not None
        if isinstance(number, tuple):
            number = number[:count] if coefficient.per_model else number[0]
        found[coefficient.name] = number
    return found


def changes(name: str, numbers: Numbers, count: int) -> Iterator[Numbers]:
    """Changes of coefficients: each to 0 and 1, for all sources, for one, and for all but one."""
    yield {}
    for coefficient in METHODS[name].coefficients:
        yield from ({coefficient.name: number} for number in (0.0, 1.0))
        if coefficient.per_model:
            value = numbers[coefficient.name]
            before = value if isinstance(value, tuple) else (value,) * count
            for place in range(count):
                yield {coefficient.name: tuple(0.0 if i == place else x for i, x in enumerate(before))}
                yield {coefficient.name: tuple(x if i == place else 0.0 for i, x in enumerate(before))}
                yield {coefficient.name: tuple(float(i == place) for i in range(count))}


def merges(name: str) -> Iterator[Merge]:
    """Valid merges by the method: of three models (or as many as it takes), of a single model, and with the base."""
    declared = METHODS[name]
    count = declared.max_sources or len(EXPERTS)
    numbers = example(name, count)
    models = EXPERTS[:count]
    for aliases in (models, models[:1] * count, ("base", *models[1:]), (*models[:-1], "base")):
        sources = tuple(Source(alias) for alias in aliases)
        for change in changes(name, numbers, count):
            merge = Merge(name, sources, {**numbers, **change}, 3 if declared.takes_seed else None)
            try:
                merge.check()
            except InvalidRecipe:
                continue
            yield merge


def canonical(merge: Merge, order: Sequence[str]) -> Merge:
    """The canonical form of the merge if models are sorted in this order."""
    fingerprints = {alias: f"{order.index(alias)}" for alias in COARSE}
    copied = Merge("passthrough", (Source("base", 0),))
    layer = LayerRecipe(copied, copied, copied)
    recipe = Recipe(fingerprints, "base", (layer,), merge, Merge("passthrough", (Source("base"),)))
    return recipe.canonical().embedding


def merged(merge: Merge, models: Mapping[str, Tensor]) -> Tensor:
    """The merged tensor by the plain method, with sources in the given order."""
    declared = METHODS[merge.method]
    keys = tuple(mask_key(merge.seed or 0, source.model, "weight") for source in merge.sources)
    tensors = tuple(models[source.model] for source in merge.sources)
    base = models["base"] if declared.needs_base else None
    orders = tuple(TieOrder(mask_key(-1, source.model, "weight")) for source in merge.sources)
    return merge_tensors(merge, Operands(tensors, base, keys=keys if declared.takes_seed else None, orders=orders))


@every_method
def test_canonical_form_changes_no_bit(name: str) -> None:
    """Values that the canonical form leaves out influence no bit."""
    found = 0
    for merge in merges(name):
        aliases = dict.fromkeys(source.model for source in merge.sources)
        brief = canonical(merge, order=[*aliases, *(alias for alias in COARSE if alias not in aliases)])
        found += brief != merge
        assert torch.equal(merged(brief, COARSE), merged(merge, COARSE)), f"{merge} became {brief}"
    assert found or METHODS[name].drops_zeros is METHODS[name].base_at_zero is METHODS[name].first_at_zero is None


@every_method
def test_the_order_of_the_canonical_form_has_no_influence(name: str) -> None:
    for merge in merges(name):
        turned = canonical(merge, order=["c", "b", "a", "base"])
        found, expected = merged(turned, FINE), merged(merge, FINE)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, msg=f"{merge} became {turned}")
