"""M3: one merge method for the whole model, with a direction and a scale of the task vectors.

"Mixup Model Merge (M3): A Geometric Exploration of Task-Vector Space for Decoupled Model Merging".

The merge is base + s * sum of share_k * task vector k (equation 2). The direction is each expert's share of the task
vectors; shares sum to 1. s is the scale. Directions are drawn from Beta(alpha, alpha) for two experts (equation 3) and
from its generalisation, the symmetric Dirichlet distribution, for more. Or they are a p-series over an order of the
experts: share_k is proportional to k^-p (equation 4).

The parameters are quantiles in [0, 1] that the inverse distribution functions turn into shares. So uniform draws give
the paper's distributions, random search in this space is the paper's search, and any other searcher can search the same
space. The Dirichlet distribution is drawn share by share: of what the experts before it leave, an expert that k others
follow takes a Beta(alpha, k * alpha) share.

Constants are those of section 4.1, of section 4.4 (DARE's drop rate of 0.2) and of Table 3 (the share k that TIES
keeps). A method without a scale, the average, has shares only. Random masks always have the same seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations
from typing import Annotated, Any, Literal

from pydantic import Field

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.parameters import Categorical, Condition, Configuration, Float, Parameter, Parameters
from search_spaces.recipe import COEFFICIENT_DECIMALS, COMPONENTS, Merge, Recipe, Source
from search_spaces.spaces.base import SearchedModels, SpaceDescription, SpaceSection, repeated
from search_spaces.spaces.layers import shared_merges, split_layers, with_own_aliases

__all__ = ["MAX_ORDERED", "SPACE", "M3Section", "M3Space"]

ALPHAS = (0.2, 0.4, 0.5, 1.0, 2.0, 3.0, 5.0)
EXPONENTS = (0.0, 1.0, 2.0, 3.0)
TIES_SHARES = (0.5, 0.7, 0.9)
DARE_DENSITY = 0.8
SEED = 0

# The largest number of experts with p-series, which have n! orders: 120 for 5 experts.
MAX_ORDERED = 5
ORDER = ">"

Method = Literal["linear", "task_arithmetic", "m3_ties", "m3_dare"]
Direction = Literal["dirichlet", "p_series"]


class M3Section(SpaceSection):
    kind: Literal["m3"]
    """m3: one method, direction and scale for the whole model."""
    methods: Annotated[tuple[Method, ...], Field(min_length=1)] = ("linear", "task_arithmetic", "m3_ties", "m3_dare")
    """The merge methods to choose from: the average (linear), task arithmetic, TIES and DARE."""
    directions: Annotated[tuple[Direction, ...], Field(min_length=1)] | None = None
    """How the experts' shares are chosen. dirichlet: each share is drawn (of two experts from a Beta distribution);
    p_series: shares fall with the rank in an order of the experts. Default: dirichlet for two experts and for more than
    five, else both.
    """
    alphas: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] = ALPHAS
    """Parameters of the Dirichlet distribution: below 1 single experts dominate, above 1 shares are similar."""
    exponents: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = EXPONENTS
    """Exponents p of the p-series: 0 gives equal shares, larger ones favour the first expert."""
    scale: tuple[float, float] = (0.5, 2.0)
    """The lowest and highest scale of the task vectors."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return self.methods

    def contradictions(self) -> Iterator[Problem]:
        lists = {"methods": self.methods, "directions": self.directions or ()}
        for option, values in {**lists, "alphas": self.alphas, "exponents": self.exponents}.items():
            yield from repeated(option, values)
        if not 0 < self.scale[0] < self.scale[1]:
            yield Problem("search_space.scale", f"{list(self.scale)} is not accepted; give [lowest, highest] above 0")

    def build(self, models: SearchedModels) -> M3Space:
        return M3Space(models, self)


SPACE = M3Section


class M3Space:
    """The search space M3 over one base model and its experts: one merge method for the whole model. Immutable."""

    kind = "m3"

    def __init__(self, models: SearchedModels, section: M3Section) -> None:
        """Build the space with the options `section` over the models of a study.

        Raises InvalidStudy if there are no experts, if the only expert would be averaged, or if there are too many
        experts for the orders of a p-series.
        """
        if problems := tuple(_problems(models, section)):
            raise InvalidStudy(problems)
        self._models = models
        self._section = section
        self._directions = _directions(section, len(models.experts))
        self._orders = {ORDER.join(order): order for order in permutations(models.experts)} if self._has_orders else {}
        self.parameters = Parameters(self._all_parameters())

    @property
    def _has_orders(self) -> bool:
        return "p_series" in self._directions and any(self._section.exponents)

    def describe(self) -> SpaceDescription:
        layers = split_layers(self._models.num_layers, 1)
        text = f"one of {', '.join(self._section.methods)} for the whole model, its direction and its scale"
        return SpaceDescription(self.kind, layers, {"layer": COMPONENTS}, text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        models = self._models
        return Recipe.uniform(
            self._merge(configuration),
            models=models.fingerprints,
            base=models.base,
            num_layers=models.num_layers,
            tokenizer=models.tokenizer,
        ).canonical()

    def from_recipe(self, recipe: Recipe) -> dict[str, Any] | None:
        models = self._models
        renamed = with_own_aliases(recipe.canonical(), base=models.base, fingerprints=models.fingerprints)
        if renamed is None or renamed.tensors or len(renamed.layers) != models.num_layers:
            return None
        merges = shared_merges(renamed.layers, start=0)
        if merges is None or {*merges.values(), renamed.embedding} != {renamed.head}:
            return None
        for configuration in self._candidates(renamed.head):
            try:
                if self.to_recipe(configuration).digest == recipe.digest:
                    return configuration
            except InvalidConfiguration:  # a number outside its range
                continue
        return None

    # Parameters. A choice with a single option is not a parameter.

    def _all_parameters(self) -> Iterator[Parameter]:
        section = self._section
        if len(section.methods) > 1:
            yield Categorical("method", section.methods)
        if len(self._directions) > 1:
            yield Categorical("direction", self._directions)
        if "dirichlet" in self._directions:
            drawn = self._where("direction", "dirichlet", self._directions)
            if len(section.alphas) > 1:
                yield Categorical("alpha", section.alphas, conditions=drawn)
            for expert in self._models.experts[:-1]:
                yield Float(f"quantile.{expert}", 0.0, 1.0, conditions=drawn)
        if "p_series" in self._directions:
            ranked = self._where("direction", "p_series", self._directions)
            if len(section.exponents) > 1:
                yield Categorical("p", section.exponents, conditions=ranked)
            if self._orders:
                uneven = tuple(p for p in section.exponents if p)
                is_choice = len(section.exponents) > 1
                conditions = (Condition("p", uneven),) if is_choice else ranked
                yield Categorical("order", tuple(self._orders), conditions=conditions)
        scaled = tuple(method for method in section.methods if method != "linear")
        if scaled:
            conditions = (Condition("method", scaled),) if len(section.methods) > 1 else ()
            yield Float("scale", *section.scale, conditions=conditions)
        if "m3_ties" in section.methods:
            yield Categorical("k", TIES_SHARES, conditions=self._where("method", "m3_ties", section.methods))

    def _where(self, parameter: str, value: str, choices: Sequence[str]) -> tuple[Condition, ...]:
        return (Condition(parameter, (value,)),) if len(choices) > 1 else ()

    # From a configuration to a merge.

    def _merge(self, configuration: Configuration) -> Merge:
        method = configuration.get("method", self._section.methods[0])
        shares = self._shares(configuration)
        sources = tuple(Source(expert) for expert in self._models.experts)
        if method == "linear":
            return Merge(method, sources, {"weight": shares})
        scale = configuration["scale"]
        if method == "task_arithmetic":
            return Merge(method, sources, {"lambda": tuple(scale * share for share in shares)})
        if method == "m3_ties":
            return Merge(method, sources, {"weight": shares, "lambda": scale, "k": configuration["k"]})
        return Merge(method, sources, {"weight": shares, "lambda": scale, "density": DARE_DENSITY}, SEED)

    def _shares(self, configuration: Configuration) -> tuple[float, ...]:
        experts = self._models.experts
        if not self._directions:
            return (1.0,)
        if configuration.get("direction", self._directions[0]) == "dirichlet":
            alpha = configuration.get("alpha", self._section.alphas[0])
            return dirichlet_shares([configuration[f"quantile.{expert}"] for expert in experts[:-1]], alpha)
        order = self._orders.get(configuration.get("order", ""), experts)
        return _p_series(experts, order, configuration.get("p", self._section.exponents[0]))

    # From a merge back to configurations that may have it.

    def _candidates(self, merge: Merge) -> Iterator[dict[str, Any]]:
        for method in self._section.methods:
            found = self._numbers(method, merge)
            if found is None:
                continue
            chosen: dict[str, Any] = {"method": method} if len(self._section.methods) > 1 else {}
            if method == "m3_ties":
                chosen["k"] = merge.number("k")
            for direction, shares in self._known_directions(found):
                scale = found.scale if found.scale is not None else _scale(found.numbers, shares, self._section.scale)
                yield {**chosen, **direction, **({} if method == "linear" else {"scale": scale})}

    def _numbers(self, method: str, merge: Merge) -> _Numbers | None:
        """Read the experts' coefficients from a canonical merge, if it is one by `method`; else return None.

        An expert that the merge leaves out has the coefficient 0. A merge by task arithmetic has only the products of
        the scale and the experts' shares, so that the scale in the result is None. A merge by another method states
        shares and scale.
        """
        models = [source.model for source in merge.sources]
        if merge.method == "passthrough" and not merge.coefficients:
            if method not in ("linear", "task_arithmetic") or models[0] == self._models.base:
                return None
            own = {models[0]: 1.0}
        elif merge.method != method or len(set(models)) < len(models):
            return None
        else:
            name = "lambda" if method == "task_arithmetic" else "weight"
            own = dict(zip(models, merge.per_source(name), strict=True))
        numbers = tuple(own.get(expert, 0.0) for expert in self._models.experts)
        if min(numbers) < 0 or not any(numbers):
            return None
        if method == "linear":
            return _Numbers(numbers, 1.0)
        return _Numbers(numbers, None if method == "task_arithmetic" else merge.number("lambda"))

    def _known_directions(self, found: _Numbers) -> Iterator[tuple[dict[str, Any], tuple[float, ...]]]:
        section, experts = self._section, self._models.experts
        several = len(self._directions) > 1
        if not self._directions:
            yield {}, (1.0,)
        if "p_series" in self._directions:
            chosen = {"direction": "p_series"} if several else {}
            shares = _exact_shares(found, section.scale)
            for p in section.exponents:
                numbered = {**chosen, "p": p} if len(section.exponents) > 1 else chosen
                for name, order in self._orders.items() if p else [("", experts)]:
                    series = _p_series(experts, order, p)
                    if all(math.isclose(a, b, abs_tol=1e-4) for a, b in zip(series, shares, strict=True)):
                        yield {**numbered, "order": name} if name else numbered, series
        if "dirichlet" in self._directions:
            chosen = {"direction": "dirichlet"} if several else {}
            shares = _exact_shares(found, section.scale)
            for alpha in sorted(section.alphas, key=lambda alpha: alpha != 1):  # exact where it is uniform
                quantiles = dirichlet_quantiles(shares, alpha)
                drawn = {f"quantile.{expert}": q for expert, q in zip(experts, quantiles, strict=False)}
                yield {**chosen, **({"alpha": alpha} if len(section.alphas) > 1 else {}), **drawn}, shares


@dataclass(frozen=True)
class _Numbers:
    """The coefficients of the experts in a recipe, one for each expert.

    If the recipe states the scale of the task vectors, it is `scale`, and `numbers` are the experts' shares, which sum
    to 1. If `scale` is None, `numbers` are the products of the scale and each share.
    """

    numbers: tuple[float, ...]
    scale: float | None


def dirichlet_shares(quantiles: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The shares of the experts, which sum to one, at the given quantiles of the symmetric Dirichlet distribution.

    There is one more share than there are quantiles. If the quantiles are independent and uniform in [0, 1], the shares
    have the symmetric Dirichlet distribution with concentration `alpha`; with one quantile that is Beta(alpha, alpha).
    """
    from scipy.special import betaincinv

    shares: list[float] = []
    left = 1.0
    for others, quantile in zip(range(len(quantiles), 0, -1), quantiles, strict=True):
        shares.append(left * float(betaincinv(alpha, others * alpha, quantile)))
        left -= shares[-1]
    return (*shares, max(left, 0.0))


def dirichlet_quantiles(shares: Sequence[float], alpha: float) -> tuple[float, ...]:
    """The quantiles of the symmetric Dirichlet distribution at which the shares are `shares`.

    It is the inverse of `dirichlet_shares`.
    """
    from scipy.special import betainc

    quantiles: list[float] = []
    left = 1.0
    for others, share in zip(range(len(shares) - 1, 0, -1), shares, strict=False):
        part = min(share / left, 1.0) if left > 0 else 0.0
        quantiles.append(float(betainc(alpha, others * alpha, part)))
        left -= share
    return tuple(quantiles)


def _p_series(experts: Sequence[str], order: Sequence[str], p: float) -> tuple[float, ...]:
    """The shares of the experts in a p-series: the expert with rank k in `order` has a share proportional to k^-p.

    This is equation 4 of the paper on Mixup Model Merge (M3). Shares sum to one and are in the order of `experts`.
    """
    ranked = {expert: (rank + 1) ** -p for rank, expert in enumerate(order)}
    total = math.fsum(ranked.values())
    return tuple(ranked[expert] / total for expert in experts)


def _exact_shares(found: _Numbers, scales: tuple[float, float]) -> tuple[float, ...]:
    """The experts' shares, summing to one, from the rounded coefficients of a recipe.

    `scales` are the lowest and the highest scale of task vectors. If the scale is not known, it is the sum of the
    coefficients, within `scales`. Rounding changes the sum of the coefficients; this error is distributed evenly over
    the experts.
    """
    total = math.fsum(found.numbers)
    exact = 1.0 if found.scale is not None else min(max(total, scales[0]), scales[1])
    shift = (exact - total) / len(found.numbers)
    shares = [max(number + shift, 0.0) / exact for number in found.numbers]
    whole = math.fsum(shares)
    return tuple(share / whole for share in shares)


def _scale(numbers: Sequence[float], shares: Sequence[float], scales: tuple[float, float]) -> float:
    """The scale s for which s times each expert's share, rounded, is its coefficient in a recipe.

    `numbers` are these rounded coefficients, in the order of `shares`. Of the scales that fit, which are an interval,
    it is the middle. `scales` are the lowest and the highest scale that it may be.
    """
    half = 0.5 * 10.0**-COEFFICIENT_DECIMALS
    pairs = [(number, share) for number, share in zip(numbers, shares, strict=True) if share > half]
    low = max(scales[0], *((number - half) / share for number, share in pairs))
    high = min(scales[1], *((number + half) / share for number, share in pairs))
    return min(max((low + high) / 2, scales[0]), scales[1])


def _directions(section: M3Section, num_experts: int) -> tuple[Direction, ...]:
    if num_experts < 2:
        return ()
    if section.directions is not None:
        return section.directions
    return ("dirichlet", "p_series") if 2 < num_experts <= MAX_ORDERED else ("dirichlet",)


def _problems(models: SearchedModels, section: M3Section) -> Iterator[Problem]:
    number = len(models.experts)
    if not number:
        yield Problem("models.experts", "there are no experts; name at least one")
    if number == 1 and section.methods == ("linear",):
        yield Problem("search_space.methods", "the average of one expert is that expert; name another method")
    if number > MAX_ORDERED and "p_series" in (section.directions or ()):
        yield Problem(
            "search_space.directions",
            f"p_series has an order for each way to rank {number} experts; it takes up to {MAX_ORDERED}, use dirichlet",
        )
