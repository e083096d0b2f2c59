"""Baselines: recipes that a search is compared with, the source models and merges recommended in the literature.

Uniform average: Wortsman et al., "Model soups" (2022). Task arithmetic: Ilharco et al. (2022), with lambda 1/n, its
recommended 0.3 to 0.4, and 0.5, 0.7 and 1.0; so a gain over the best baseline is more than a better lambda. TIES: Yadav
et al. (2023), k = 0.2 and lambda = 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

from search_spaces.recipe import Merge, Recipe, Source

__all__ = ["ALL", "GROUPS", "Baseline", "BaselineGroup", "all_baselines", "baseline_labels"]

_Origin: TypeAlias = Literal["source", "published"]

# The values of `search.baselines` that are words; a list may have the names of single baselines.
BaselineGroup: TypeAlias = Literal["none", "sources", "published", "all"]

ALL: BaselineGroup = "all"

GROUPS: Mapping[_Origin, BaselineGroup] = {"source": "sources", "published": "published"}


class Baseline(NamedTuple):
    """A recipe that is known before the search and scored beside its proposals.

    `label` is its name, for example "expert:math"; it is unique within a study.
    """

    origin: _Origin
    label: str
    recipe: Recipe


def all_baselines(
    *,
    base: str,
    experts: Sequence[str],
    fingerprints: Mapping[str, str],
    num_layers: int,
    tokenizer: str = "base",
    chosen: BaselineGroup | Sequence[str] = ALL,
) -> tuple[Baseline, ...]:
    """The baselines of a study: the base model, each expert, then the published merges of all experts.

    `base` and `experts` are aliases, which `fingerprints` maps to content fingerprints. `chosen` are the baselines that
    are returned (`baseline_labels`). Every recipe is in canonical form. If two baselines have equal recipes, only the
    first one is returned.
    """
    labels = baseline_labels(chosen, experts)
    found: dict[str, Baseline] = {}
    for origin, label, merge in _merges(base, tuple(experts)):
        if label not in labels:
            continue
        recipe = Recipe.uniform(merge, models=fingerprints, base=base, num_layers=num_layers, tokenizer=tokenizer)
        baseline = Baseline(origin, label, recipe.canonical())
        found.setdefault(baseline.recipe.digest, baseline)
    return tuple(found.values())


def baseline_labels(chosen: BaselineGroup | Sequence[str], experts: Sequence[str]) -> tuple[str, ...]:
    """The labels of the baselines that `chosen` stands for, in their order.

    `chosen` is a group, or a list of labels and of the groups "sources" and "published". A name that stands for no
    baseline of a study with these `experts` is ignored.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    return tuple(
        label
        for origin, label, _ in _merges("base", tuple(experts))
        if not names.isdisjoint((ALL, GROUPS[origin], label))
    )


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
