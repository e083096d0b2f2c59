"""Baselines: recipes that a search is compared with, the source models and merges recommended in the literature.

- Uniform average: Wortsman et al., "Model soups" (2022).
- Task arithmetic: Ilharco et al. (2022). Lambda is 1/n for n experts, the recommended 0.3 to 0.4, and 0.5, 0.7 and 1.0,
  so that a gain over the best baseline cannot come from a better lambda alone.
- TIES: Yadav et al. (2023), with k = 0.2 and lambda = 1.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

from search_spaces.recipe import Merge, Recipe, Source, Trimming

__all__ = ["ALL", "GROUPS", "Baseline", "BaselineGroup", "all_baselines", "baseline_labels"]

_Origin: TypeAlias = Literal["source", "published"]

# The values of `search.baselines` that are words; a list may have GROUPS and the names of single baselines.
BaselineGroup: TypeAlias = Literal["none", "sources", "published", "m3", "all"]

ALL: BaselineGroup = "all"

GROUPS: tuple[BaselineGroup, ...] = ("sources", "published", "m3")

# The groups that ALL stands for.
BY_DEFAULT: tuple[BaselineGroup, ...] = ("sources", "published")


class Baseline(NamedTuple):
    """A model or merge that a study scores in order to compare it with the search's proposals.

    `origin` is "source" for an unchanged model of the study, and "published" for a merge known from publications.
    `label` is the name of the baseline, for example "expert:math"; it is unique within a study. `recipe` describes the
    merge.
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
    """The baselines of a study: models and published merges with which the search is compared.

    The baselines are in this order: the base model, each expert alone, and published ways to merge all experts. `base`
    and `experts` are aliases, which `fingerprints` maps to content fingerprints. `num_layers` is the number of layers
    of each model. `tokenizer` is the vocabulary of the merges, as in a recipe. `chosen` selects some of the baselines,
    in the same way as the argument `chosen` of the function `baseline_labels`. Every recipe is in canonical form. If
    two baselines have equal recipes, only the first one is returned.
    """
    labels = baseline_labels(chosen, experts)
    found: dict[str, Baseline] = {}
    for known in _known(base, tuple(experts)):
        if known.label not in labels:
            continue
        recipe = Recipe.uniform(known.merge, models=fingerprints, base=base, num_layers=num_layers, tokenizer=tokenizer)
        origin: _Origin = "source" if known.group == "sources" else "published"
        baseline = Baseline(origin, known.label, replace(recipe, trim=known.trim).canonical())
        found.setdefault(baseline.recipe.digest, baseline)
    return tuple(found.values())


def baseline_labels(chosen: BaselineGroup | Sequence[str], experts: Sequence[str]) -> tuple[str, ...]:
    """Names of the baselines that `chosen` selects, in the order of the function `all_baselines`.

    A baseline is a model or a published merge that is scored for comparison. `chosen` is the value of the study file's
    option `search.baselines`, one of these words:

    - "sources": the study's models
    - "published": well-known merges
    - "all": the study's models and well-known merges
    - "none": nothing
    - "m3": the merges of the paper on Mixup Model Merge

    `chosen` may also be a list of names of single baselines and of these words, except "all" and "none". `experts` are
    the aliases of the study's experts; names that are not baselines of such a study are ignored.
    """
    names = {chosen} if isinstance(chosen, str) else {*chosen}
    groups = {*names, *(BY_DEFAULT if ALL in names else ())}
    return tuple(
        known.label for known in _known("base", tuple(experts)) if known.group in groups or known.label in names
    )


class _Known(NamedTuple):
    group: BaselineGroup
    label: str
    merge: Merge
    trim: Trimming = "tensor"


def _known(base: str, experts: tuple[str, ...]) -> Iterator[_Known]:
    sources = tuple(Source(expert) for expert in experts)
    yield _Known("sources", "base", Merge("passthrough", (Source(base),)))
    for source in sources:
        yield _Known("sources", f"expert:{source.model}", Merge("passthrough", (source,)))
    share = 1 / len(experts)
    yield _Known("published", "uniform average", Merge("linear", sources, {"weight": share}))
    for label, lambda_ in (("1/n", share), *((str(number), number) for number in (0.3, 0.4, 0.5, 0.7, 1.0))):
        yield _Known("published", f"task arithmetic {label}", Merge("task_arithmetic", sources, {"lambda": lambda_}))
    yield _Known("published", "TIES k 0.2 lambda 1.0", Merge("ties", sources, {"k": 0.2, "lambda": 1.0}))
    for label, merge in _without_m3(sources):
        yield _Known("m3", f"m3 {label}", merge, "model")


def _without_m3(sources: tuple[Source, ...]) -> Iterator[tuple[str, Merge]]:
    """Yield name and merge of each merge with which the paper "Mixup Model Merge (M3)" compares its own.

    `sources` are the experts that are merged. The merges are:

    - task arithmetic and TIES with all coefficients of the paper's tables 3 and 4
    - DARE with density 0.8, in combination with the average, task arithmetic and TIES

    TIES is the variant of the paper's code, which trims whole models.
    """
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
