"""Baselines: recipes that every search is compared with, the source models and merges recommended in the literature.

Uniform average: Wortsman et al., "Model soups" (2022). Task arithmetic: Ilharco et al. (2022), with lambda 1/n, its
recommended 0.3 to 0.4, and 0.5, 0.7 and 1.0; so a gain over the best baseline is more than a better lambda. TIES: Yadav
et al. (2023), k = 0.2 and lambda = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from search_spaces.recipe import Merge, Recipe, Source

__all__ = ["Baseline", "all_baselines", "m3_baselines"]

_Origin: TypeAlias = Literal["source", "published"]


class Baseline(NamedTuple):
    """A recipe that is known before the search and scored beside its proposals.

    `label` is its name, for example "expert:math"; it is unique within a study.
    """

    origin: _Origin
    label: str
    recipe: Recipe


def all_baselines(
    *, base: str, experts: Sequence[str], fingerprints: Mapping[str, str], num_layers: int, tokenizer: str = "base"
) -> tuple[Baseline, ...]:
    """All baselines of a study: the base model, each expert, then the published merges of all experts.

    `base` and `experts` are aliases, which `fingerprints` maps to content fingerprints. Every recipe is in canonical
    form. If two baselines have equal recipes, only the first one is returned.
    """
    found: dict[str, Baseline] = {}
    for origin, label, merge in _merges(base, tuple(experts)):
        recipe = Recipe.uniform(merge, models=fingerprints, base=base, num_layers=num_layers, tokenizer=tokenizer)
        baseline = Baseline(origin, label, recipe.canonical())
        found.setdefault(baseline.recipe.digest, baseline)
    return tuple(found.values())


def _merges(base: str, experts: tuple[str, ...]) -> Iterator[tuple[_Origin, str, Merge]]:
    sources = tuple(Source(expert) for expert in experts)
    yield "source", "base", Merge("passthrough", (Source(base),))
    for source in sources:
        yield "source", f"expert:{source.model}", Merge("passthrough", (source,))
    share = 1 / len(experts)
    yield "published", "uniform average", Merge("linear", sources, {"weight": share})
    for label, lambda_ in (("1/n", share), *((str(number), number) for number in (0.3, 0.4, 0.5, 0.7, 1.0))):
        yield "published", f"task arithmetic {label}", Merge("task_arithmetic", sources, {"lambda": lambda_})
    yield "published", "TIES k 0.2 lambda 1.0", Merge("ties", sources, {"k": 0.2, "lambda": 1.0})


def m3_baselines(
    *, base: str, experts: Sequence[str], fingerprints: Mapping[str, str], num_layers: int, tokenizer: str = "base"
) -> tuple[Baseline, ...]:
    """The merges without M3 that "Mixup Model Merge (M3)" compares with: the grids of its tables 3 and 4, and DARE.

    They are task arithmetic and TIES with the numbers of table 3, which include those of table 4, and DARE, which keeps
    0.8, with the average, task arithmetic and TIES; TIES is that of the paper's code, which trims whole models. Every
    recipe is in canonical form. They are no part of `all_baselines`, whose arguments these are.
    """
    return tuple(
        Baseline(
            "published",
            f"m3 {label}",
            replace(
                Recipe.uniform(merge, models=fingerprints, base=base, num_layers=num_layers, tokenizer=tokenizer),
                trim="model",
            ).canonical(),
        )
        for label, merge in _m3_merges(tuple(Source(expert) for expert in experts))
    )


def _m3_merges(sources: tuple[Source, ...]) -> Iterator[tuple[str, Merge]]:
    scales, shares = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0), (0.5, 0.7, 0.9)  # table 3
    for scale in scales:
        yield f"task arithmetic {scale}", Merge("task_arithmetic", sources, {"lambda": scale})
    for k, scale in itertools.product(shares, scales):
        yield f"TIES k {k} lambda {scale}", Merge("ties_majority", sources, {"k": k, "lambda": scale})
    density = {"density": 0.8}  # section 4.4
    yield "DARE average", Merge("dare_linear", sources, {"lambda": 1 / len(sources), **density}, 0)
    yield "DARE task arithmetic 1.0", Merge("dare_linear", sources, {"lambda": 1.0, **density}, 0)
    for k, scale in ((0.5, 0.5), (0.5, 1.0), (0.7, 1.0)):  # table 4
        numbers = {"weight": 1 / len(sources), "k": k, "lambda": scale, **density}
        yield f"DARE TIES k {k} lambda {scale}", Merge("m3_dare_ties", sources, numbers, 0)
