"""M3: one merge method for the whole model, with a direction and a scale of the task vectors.

The paper is "Mixup Model Merge (M3): A Geometric Exploration of Task-Vector Space for Decoupled Model Merging".

The merge is base + s * sum of share_k * task vector k (equation 2). The direction is each expert's share of the task
vectors; shares sum to 1. s is the scale. There are two kinds of directions:

- drawn from Beta(alpha, alpha) for two experts (equation 3) and from its generalisation, the symmetric Dirichlet
  distribution, for more experts
- a p-series over an order of the experts: share_k is proportional to k^-p (equation 4)

The parameters are quantiles in [0, 1], which the inverse distribution functions convert to shares. Therefore uniform
draws give the paper's distributions, random search in this space is the paper's search, and any other searcher can
search the same space. The Dirichlet distribution is drawn share by share: an expert that is followed by k other experts
gets a Beta(alpha, k * alpha) share of the rest that earlier experts leave.

Constants are from section 4.1, section 4.4 (DARE's drop rate of 0.2) and Table 3 (the share k that TIES keeps). A
method without a scale, namely the average, has only shares. Random masks always have the same seed.

The method `m3_ties_majority` with `trim: model` is TIES of the authors' code, and the method `m3_dare_ties` is the
authors' combination of DARE and TIES (Table 7). The method `m3_ties` is this project's interpretation of appendix H;
studies of earlier versions use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, Tag

from search_spaces.errors import InvalidConfiguration, InvalidStudy, Problem
from search_spaces.methods import METHODS
from search_spaces.methods.base import CoefficientValue
from search_spaces.parameters import Categorical, Condition, Configuration, Float, Parameter, Parameters
from search_spaces.recipe import COEFFICIENT_DECIMALS, COMPONENTS, Merge, Recipe, Source, Trimming
from search_spaces.section import one_of
from search_spaces.spaces.base import SearchedModels, SpaceDescription, SpaceSection, repeated
from search_spaces.spaces.layers import shared_merges, split_layers, with_own_aliases

__all__ = ["MAX_ORDERED", "SPACE", "M3Section", "M3Space"]

ALPHAS = (0.2, 0.4, 0.5, 1.0, 2.0, 3.0, 5.0)
EXPONENTS = (0.0, 1.0, 2.0, 3.0)
TIES_SHARES = (0.5, 0.7, 0.9)
DARE_DENSITY = 0.8
SEED = 0

# The largest number of experts with p-series over all orders, of which there are n!: 120 for 5 experts.
MAX_ORDERED = 5
ORDER = ">"

Method = Literal["linear", "task_arithmetic", "m3_ties", "m3_dare", "m3_ties_majority", "m3_dare_ties"]
Direction = Literal["dirichlet", "p_series"]
Share = Annotated[float, Field(ge=1e-6, le=1)]
Shares = Annotated[
    Annotated[Share, Tag("<number>")] | Annotated[tuple[Share, ...], Field(min_length=1), Tag("<list>")],
    one_of(lambda value: "<list>" if isinstance(value, list | tuple) else "<number>", "a number or a list of numbers"),
]


class M3Section(SpaceSection):
    kind: Literal["m3"]
    """m3: one method, direction and scale for the whole model."""
    methods: Annotated[tuple[Method, ...], Field(min_length=1)] = ("linear", "task_arithmetic", "m3_ties", "m3_dare")
    """The merge methods to choose from: the average (linear), task arithmetic, TIES, DARE, and both together."""
    directions: Annotated[tuple[Direction, ...], Field(min_length=1)] | None = None
    """How the experts' shares are chosen. dirichlet: each share is drawn (of two experts from a Beta distribution);
    p_series: shares fall with the rank in an order of the experts. Default: dirichlet for two experts and for more than
    five, else both; with `orders` always both.
    """
    alphas: Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(min_length=1)] = ALPHAS
    """Parameters of the Dirichlet distribution: below 1 single experts dominate, above 1 shares are similar."""
    exponents: Annotated[tuple[Annotated[float, Field(ge=0)], ...], Field(min_length=1)] = EXPONENTS
    """Exponents p of the p-series: 0 gives equal shares, larger ones favour the first expert."""
    orders: Annotated[tuple[str, ...], Field(min_length=1)] | None = None
    """The orders of the experts that p-series use, each with all experts, such as "math>text>code". Default: all orders
    of up to five experts.
    """
    scale: tuple[float, float] = (0.5, 2.0)
    """The lowest and highest scale of the task vectors. If both are equal, the scale is not searched."""
    k: Shares = TIES_SHARES
    """The share of each task vector's elements that TIES keeps, or several to choose from."""
    density: Shares = DARE_DENSITY
    """The share of each task vector's elements that DARE keeps, or several to choose from."""
    trim: Trimming = "tensor"
    """The unit of which TIES keeps the share `k`: each tensor, or (as the authors do) the whole model's task vector."""

    @property
    def merge_methods(self) -> tuple[str, ...]:
        return self.methods

    @property
    def has_directions(self) -> bool:
        return True

    def contradictions(self) -> Iterator[Problem]:
        lists = {"methods": self.methods, "directions": self.directions or (), "orders": self.orders or ()}
        numbers = {"alphas": self.alphas, "exponents": self.exponents, "k": _each(self.k)}
        for option, values in {**lists, **numbers, "density": _each(self.density)}.items():
            yield from repeated(option, values)
        if not 0 < self.scale[0] <= self.scale[1]:
            yield Problem("search_space.scale", f"{list(self.scale)} is not accepted; give [lowest, highest] above 0")
        if self.orders and self.directions == ("dirichlet",):
            yield Problem("search_space.orders", "has no effect with directions: [dirichlet]; leave it out")
        for option, default, methods in (
            ("k", TIES_SHARES, TRIMMED),
            ("trim", "tensor", TRIMMED),
            ("density", DARE_DENSITY, DROPPED),
        ):
            if getattr(self, option) != default and not set(methods) & set(self.methods):
                yield Problem(f"search_space.{option}", f"has no effect without {' or '.join(methods)}; leave it out")

    def build(self, models: SearchedModels) -> M3Space:
        return M3Space(models, self)


SPACE = M3Section
TRIMMED = tuple(name for name in get_args(Method) if METHODS[name].trims)
DROPPED = tuple(name for name in get_args(Method) if METHODS[name].takes_seed)


class M3Space:
    """The search space M3 over one base model and its experts: one merge method for the whole model. Immutable."""

    kind = "m3"

    def __init__(self, models: SearchedModels, section: M3Section) -> None:
        """Build the space with the options `section` over the models of a study.

        Raises InvalidStudy in these cases:

        - There are no experts.
        - There is one expert, and the average is the only merge method.
        - Shares are by a p-series (the k-th expert's share is proportional to k^-p), and there are too many experts to
          try all their orders.
        - The option `orders` has an order that does not contain each expert once.
        """
        if problems := tuple(_problems(models, section)):
            raise InvalidStudy(problems)
        self._models = models
        self._section = section
        self._directions = _directions(section, len(models.experts))
        listed = map(_order_of, section.orders) if section.orders else permutations(models.experts)
        self._orders = {ORDER.join(order): order for order in listed} if self._has_orders else {}
        self.parameters = Parameters(self._all_parameters())

    @property
    def _has_orders(self) -> bool:
        return "p_series" in self._directions and any(self._section.exponents)

    def describe(self) -> SpaceDescription:
        layers = split_layers(self._models.num_layers, 1)
        low, high = self._section.scale
        searched = "its direction and its scale" if low < high else f"its direction, scale {low:g}"
        text = f"one of {', '.join(self._section.methods)} for the whole model, {searched}"
        return SpaceDescription(self.kind, layers, {"layer": COMPONENTS}, text)

    def to_recipe(self, configuration: Configuration) -> Recipe:
        self.parameters.check(configuration)
        models = self._models
        recipe = Recipe.uniform(
            self._merge(configuration),
            models=models.fingerprints,
            base=models.base,
            num_layers=models.num_layers,
            tokenizer=models.tokenizer,
        )
        return replace(recipe, trim=self._section.trim).canonical()

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
            if len(self._orders) > 1:
                uneven = tuple(p for p in section.exponents if p)
                is_choice = len(section.exponents) > 1
                conditions = (Condition("p", uneven),) if is_choice else ranked
                yield Categorical("order", tuple(self._orders), conditions=conditions)
        scaled = tuple(method for method in section.methods if method != "linear")
        if scaled and section.scale[0] < section.scale[1]:
            yield Float("scale", *section.scale, conditions=self._of_methods(scaled))
        for name, values, users in (("k", section.k, TRIMMED), ("density", section.density, DROPPED)):
            choices, methods = _each(values), tuple(method for method in section.methods if method in users)
            if methods and len(choices) > 1:
                yield Categorical(name, choices, conditions=self._of_methods(methods))

    def _of_methods(self, methods: tuple[str, ...]) -> tuple[Condition, ...]:
        return (Condition("method", methods),) if len(self._section.methods) > 1 else ()

    def _where(self, parameter: str, value: str, choices: Sequence[str]) -> tuple[Condition, ...]:
        return (Condition(parameter, (value,)),) if len(choices) > 1 else ()

    # From a configuration to a merge.

    def _merge(self, configuration: Configuration) -> Merge:
        section = self._section
        method = configuration.get("method", section.methods[0])
        shares = self._shares(configuration)
        sources = tuple(Source(expert) for expert in self._models.experts)
        if method == "linear":
            return Merge(method, sources, {"weight": shares})
        scale = configuration.get("scale", section.scale[0])
        if method == "task_arithmetic":
            return Merge(method, sources, {"lambda": tuple(scale * share for share in shares)})
        coefficients: dict[str, CoefficientValue] = {"weight": shares, "lambda": scale}
        if method in TRIMMED:
            coefficients["k"] = configuration.get("k", _each(section.k)[0])
        if method in DROPPED:
            coefficients["density"] = configuration.get("density", _each(section.density)[0])
        return Merge(method, sources, coefficients, SEED if method in DROPPED else None)

    def _shares(self, configuration: Configuration) -> tuple[float, ...]:
        experts = self._models.experts
        if not self._directions:
            return (1.0,)
        if configuration.get("direction", self._directions[0]) == "dirichlet":
            alpha = configuration.get("alpha", self._section.alphas[0])
            return dirichlet_shares([configuration[f"quantile.{expert}"] for expert in experts[:-1]], alpha)
        order = self._orders.get(configuration.get("order", ""), next(iter(self._orders.values()), experts))
        return _p_series(experts, order, configuration.get("p", self._section.exponents[0]))

    # From a merge back to configurations that may have it.

    def _candidates(self, merge: Merge) -> Iterator[dict[str, Any]]:
        for method in self._section.methods:
            found = self._numbers(method, merge)
            if found is None:
                continue
            names = self.parameters.names
            chosen: dict[str, Any] = {"method": method} if "method" in names else {}
            of_method = {"k": TRIMMED, "density": DROPPED}
            chosen |= {name: merge.number(name) for name, of in of_method.items() if method in of and name in names}
            for direction, shares in self._known_directions(found):
                scale = found.scale if found.scale is not None else _scale(found.numbers, shares, self._section.scale)
                is_searched = method != "linear" and "scale" in names
                yield {**chosen, **direction, **({"scale": scale} if is_searched else {})}

    def _numbers(self, method: str, merge: Merge) -> _Numbers | None:
        """Read the experts' coefficients from a canonical merge; None if `method` cannot have made the merge.

        `method` is the merge method that the space would use. Task arithmetic states only the products of the scale and
        the experts' shares; the scale in the result is then None. Other methods state the shares, and the scale is
        known. If the merge leaves out an expert, its coefficient in the result is zero. The result is also None if a
        coefficient is negative, or if all coefficients are zero.
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
                        yield {**numbered, "order": name} if name and len(self._orders) > 1 else numbered, series
        if "dirichlet" in self._directions:
            chosen = {"direction": "dirichlet"} if several else {}
            shares = _exact_shares(found, section.scale)
            for alpha in sorted(section.alphas, key=lambda alpha: alpha != 1):  # exact where it is uniform
                quantiles = dirichlet_quantiles(shares, alpha)
                drawn = {f"quantile.{expert}": q for expert, q in zip(experts, quantiles, strict=False)}
                yield {**chosen, **({"alpha": alpha} if len(section.alphas) > 1 else {}), **drawn}, shares


@dataclass(frozen=True)
class _Numbers:
    """The experts' coefficients as a recipe states them.

    `numbers` has one coefficient for each expert. `scale` is the factor on the weighted sum of task vectors, or None if
    the recipe does not state it. With a `scale`, `numbers` are the experts' shares, which sum to 1. Without it, each of
    `numbers` is an expert's share times the scale.
    """

    numbers: tuple[float, ...]
    scale: float | None


def dirichlet_shares(quantiles: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Convert quantiles to the shares of the experts, which sum to one.

    For n `quantiles` (numbers in [0, 1]) there are n + 1 shares. If the quantiles are independent and uniform, the
    shares have the symmetric Dirichlet distribution with concentration `alpha`. With one quantile, this is Beta(alpha,
    alpha).
    """
    from scipy.special import betaincinv

    shares: list[float] = []
    left = 1.0
    for others, quantile in zip(range(len(quantiles), 0, -1), quantiles, strict=True):
        shares.append(left * float(betaincinv(alpha, others * alpha, quantile)))
        left -= shares[-1]
    return (*shares, max(left, 0.0))


def dirichlet_quantiles(shares: Sequence[float], alpha: float) -> tuple[float, ...]:
    """Convert the experts' shares to quantiles in [0, 1]; the inverse of the function `dirichlet_shares`.

    There is one quantile fewer than shares, because the shares sum to one. `alpha` is the concentration of the
    symmetric Dirichlet distribution of the shares.
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

    The formula is equation 4 of the paper on Mixup Model Merge (M3). Shares sum to one and are in the order of
    `experts`.
    """
    ranked = {expert: (rank + 1) ** -p for rank, expert in enumerate(order)}
    total = math.fsum(ranked.values())
    return tuple(ranked[expert] / total for expert in experts)


def _exact_shares(found: _Numbers, scales: tuple[float, float]) -> tuple[float, ...]:
    """Reconstruct the experts' shares, which sum to one, from the rounded coefficients of a recipe.

    Rounding changes the sum of the coefficients. Its exact value is 1 if the recipe states a scale beside them (then
    the coefficients are the shares), and otherwise the scale, which is estimated within `scales` (lowest, highest). The
    rounding error of the sum is distributed evenly over the coefficients, and these are divided by their sum.
    """
    total = math.fsum(found.numbers)
    exact = 1.0 if found.scale is not None else min(max(total, scales[0]), scales[1])
    shift = (exact - total) / len(found.numbers)
    shares = [max(number + shift, 0.0) / exact for number in found.numbers]
    whole = math.fsum(shares)
    return tuple(share / whole for share in shares)


def _scale(numbers: Sequence[float], shares: Sequence[float], scales: tuple[float, float]) -> float:
    """Reconstruct the scale of a recipe from its coefficients; each is the scale times an expert's share, rounded.

    `numbers` are the rounded coefficients, and `shares` are the experts' shares in the same order. Because of the
    rounding, all scales in an interval give the same coefficients; the result is the middle of this interval. `scales`
    are the lowest and the highest scale that the space allows.
    """
    half = 0.5 * 10.0**-COEFFICIENT_DECIMALS
    pairs = [(number, share) for number, share in zip(numbers, shares, strict=True) if share > half]
    low = max(scales[0], *((number - half) / share for number, share in pairs))
    high = min(scales[1], *((number + half) / share for number, share in pairs))
    return min(max((low + high) / 2, scales[0]), scales[1])


def _each(shares: float | tuple[float, ...]) -> tuple[float, ...]:
    return shares if isinstance(shares, tuple) else (shares,)


def _order_of(text: str) -> tuple[str, ...]:
    return tuple(text.split(ORDER))


def _directions(section: M3Section, num_experts: int) -> tuple[Direction, ...]:
    if num_experts < 2:
        return ()
    if section.directions is not None:
        return section.directions
    has_both = section.orders is not None or 2 < num_experts <= MAX_ORDERED
    return ("dirichlet", "p_series") if has_both else ("dirichlet",)


def _problems(models: SearchedModels, section: M3Section) -> Iterator[Problem]:
    number = len(models.experts)
    if not number:
        yield Problem("models.experts", "there are no experts; name at least one")
    if number == 1 and section.methods == ("linear",):
        yield Problem("search_space.methods", "the average of one expert is that expert; name another method")
    if number > MAX_ORDERED and "p_series" in (section.directions or ()) and section.orders is None:
        yield Problem(
            "search_space.directions",
            f"p_series has an order for each way to rank {number} experts; it takes up to {MAX_ORDERED}, use dirichlet "
            "or list the orders (option orders)",
        )
    for index, order in enumerate(section.orders or ()):
        if sorted(_order_of(order)) != sorted(models.experts):
            yield Problem(
                f"search_space.orders.{index}",
                f'"{order}" does not have each expert once; write for example "{ORDER.join(models.experts)}"',
            )
