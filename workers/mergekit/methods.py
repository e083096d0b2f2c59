"""mergekit's merge methods: their parameters by its names, and the merge of ours that computes the same.

How the methods differ in corner cases is said in `merge_methods`. The tables here know what mergekit's configurations
say, not its code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from search_spaces.errors import InvalidRecipe
from search_spaces.recipe import Merge, Source
from workers.merging.methods import METHODS

__all__ = ["MERGE_METHODS", "WITHOUT_EFFECT", "Inputs", "Parameter", "PeerMethod", "Scalar"]

Scalar = float | bool


@dataclass(frozen=True)
class Parameter:
    """A parameter of a method: one number for all inputs ("shared"), one for "each" input, or one for each "expert",
    an input that is not the base. Without a `default` it must be given; `is_fixed`: no other value is merged here."""

    name: str
    scope: Literal["shared", "each", "expert"] = "shared"
    default: Scalar | None = None
    is_fixed: bool = False

    @property
    def is_flag(self) -> bool:
        return isinstance(self.default, bool)


@dataclass(frozen=True)
class Inputs:
    """What one tensor is merged from: every source but the base (all, for methods to which a base means nothing), and
    the values of the parameters, those that are per source in the order of `sources`."""

    sources: tuple[Source, ...]
    base: Source | None
    values: Mapping[str, Scalar | tuple[float, ...]]
    seed: int

    def number(self, name: str) -> float:
        value = self.values[name]
        assert not isinstance(value, tuple)
        return float(value)

    def numbers(self, name: str) -> tuple[float, ...]:
        value = self.values[name]
        assert isinstance(value, tuple)
        return value


@dataclass(frozen=True)
class PeerMethod:
    parameters: tuple[Parameter, ...]
    base: Literal["needed", "optional", "unused"]
    to_merge: Callable[[Inputs], Merge]


WEIGHT = Parameter("weight", "expert")


def _linear(inputs: Inputs) -> Merge:
    weights = inputs.numbers("weight")
    if not inputs.values["normalize"] and abs(math.fsum(weights) - 1) > 1e-6:
        raise InvalidRecipe(
            f"linear with normalize: false and weights that sum to {math.fsum(weights):g}; here weights sum to 1"
        )
    return Merge("linear", inputs.sources, {"weight": weights})


def _base_first(method: str, *names: str) -> Callable[[Inputs], Merge]:
    def to_merge(inputs: Inputs) -> Merge:
        assert inputs.base is not None
        return Merge(method, (inputs.base, *inputs.sources), {name: inputs.number(name) for name in names})

    return to_merge


def _nuslerp(inputs: Inputs) -> Merge:
    is_flat, by_rows = inputs.values["nuslerp_flatten"], inputs.values["nuslerp_row_wise"]
    if inputs.base is not None and not is_flat:
        raise InvalidRecipe("nuslerp_flatten: false is not merged with a base_model here; leave one of them out")
    unflat = "nuslerp_columns" if by_rows else "nuslerp_rows"
    method = "nuslerp_task_vectors" if inputs.base is not None else "nuslerp" if is_flat else unflat
    return Merge(method, inputs.sources, {"weight": inputs.numbers("weight")})


def _multislerp(inputs: Inputs) -> Merge:
    method = "multislerp" if inputs.base is None else "multislerp_task_vectors"
    return Merge(method, inputs.sources, {"weight": inputs.numbers("weight")})


def _model_stock(inputs: Inputs) -> Merge:
    return Merge("model_stock_rows" if inputs.values["filter_wise"] else "model_stock", inputs.sources)


def _on_task_vectors(
    numbers: Callable[[Inputs], Mapping[str, float | tuple[float, ...]]], method: str
) -> Callable[[Inputs], Merge]:
    """Without experts the base stays."""

    def to_merge(inputs: Inputs) -> Merge:
        assert inputs.base is not None
        if not inputs.sources:
            return Merge("passthrough", (inputs.base,))
        seed = inputs.seed if METHODS[method].takes_seed else None
        return Merge(method, inputs.sources, numbers(inputs), seed)

    return to_merge


def _sum(*sparse: str) -> Callable[[Inputs], Mapping[str, float | tuple[float, ...]]]:
    """Coefficients of base + a sum of task vectors: mergekit's weight, divided or not, times its lambda."""

    def numbers(inputs: Inputs) -> Mapping[str, float | tuple[float, ...]]:
        weights = inputs.numbers("weight")
        total = math.fsum(weights)
        factor = inputs.number("lambda")
        if inputs.values["normalize"] and abs(total) >= 1e-8:
            factor /= total
        return {"lambda": tuple(factor * weight for weight in weights), **_sparsity(inputs, sparse)}

    return numbers


def _signs(*sparse: str) -> Callable[[Inputs], Mapping[str, float | tuple[float, ...]]]:
    """Coefficients of base + the task vectors that agree in sign."""

    def numbers(inputs: Inputs) -> Mapping[str, float | tuple[float, ...]]:
        shared = {name: inputs.number(name) for name in ("lambda", "normalize")}
        return {"weight": inputs.numbers("weight"), **shared, **_sparsity(inputs, sparse)}

    return numbers


def _sparsity(inputs: Inputs, names: Sequence[str]) -> dict[str, tuple[float, ...]]:
    """At density 1 or more a task vector is left whole, whatever the other numbers say."""
    if not names:
        return {}
    densities = inputs.numbers("density")
    found = {"density": tuple(min(density, 1.0) for density in densities)}
    for name in names[1:]:
        values = zip(inputs.numbers(name), densities, strict=True)
        found[name] = tuple(0.0 if density >= 1 else value for value, density in values)
    return found


def _shared(*names: str) -> Callable[[Inputs], Mapping[str, float | tuple[float, ...]]]:
    return lambda inputs: {name: inputs.number(name) for name in names}


def _generalised(
    method: str,
    numbers: Callable[[Inputs], Mapping[str, float | tuple[float, ...]]],
    *others: Parameter,
    normalize: bool,
    rescale: bool,
) -> PeerMethod:
    """One of mergekit's variants of task arithmetic. They share their parameters; without a sparse mask `density` and
    `rescale` have no effect."""
    is_sparse = method != "task_arithmetic"
    parameters = (
        WEIGHT,
        Parameter("density", "expert", 1.0),
        Parameter("lambda", default=1.0),
        Parameter("normalize", default=normalize),
        Parameter("rescale", default=rescale, is_fixed=is_sparse),
        *others,
    )
    return PeerMethod(parameters, "needed", _on_task_vectors(numbers, method))


GAMMA = Parameter("gamma", "expert", 0.01)
EPSILON = Parameter("epsilon", "expert", 0.15)

MERGE_METHODS: Mapping[str, PeerMethod] = {
    "passthrough": PeerMethod(
        (Parameter("scale", "each", 1.0),),
        "unused",
        lambda inputs: Merge("passthrough", inputs.sources, {"scale": inputs.numbers("scale")[0]}),
    ),
    "linear": PeerMethod((Parameter("weight", "each"), Parameter("normalize", default=True)), "unused", _linear),
    "slerp": PeerMethod((Parameter("t"),), "needed", _base_first("slerp", "t")),
    "nuslerp": PeerMethod(
        (WEIGHT, Parameter("nuslerp_row_wise", default=False), Parameter("nuslerp_flatten", default=True)),
        "optional",
        _nuslerp,
    ),
    "multislerp": PeerMethod(
        (
            WEIGHT,
            Parameter("normalize_weights", default=True, is_fixed=True),
            Parameter("eps", default=1e-8, is_fixed=True),
        ),
        "optional",
        _multislerp,
    ),
    "karcher": PeerMethod(
        (Parameter("max_iter", default=10.0, is_fixed=True), Parameter("tol", default=1e-5, is_fixed=True)),
        "unused",
        lambda inputs: Merge("karcher", inputs.sources),
    ),
    "model_stock": PeerMethod((Parameter("filter_wise", default=False),), "needed", _model_stock),
    "nearswap": PeerMethod((Parameter("t"),), "needed", _base_first("nearswap", "t")),
    "arcee_fusion": PeerMethod((), "needed", _base_first("arcee_fusion")),
    "task_arithmetic": _generalised("task_arithmetic", _sum(), normalize=False, rescale=False),
    "ties": _generalised("ties_weighted", _signs("density"), normalize=True, rescale=False),
    "dare_linear": _generalised("dare_linear_l1", _sum("density"), normalize=False, rescale=True),
    "dare_ties": _generalised("dare_ties_l1", _signs("density"), normalize=False, rescale=True),
    "breadcrumbs": _generalised("breadcrumbs", _sum("density", "gamma"), GAMMA, normalize=False, rescale=False),
    "breadcrumbs_ties": _generalised(
        "breadcrumbs_ties", _signs("density", "gamma"), GAMMA, normalize=False, rescale=False
    ),
    "della": _generalised("della_l1", _signs("density", "epsilon"), EPSILON, normalize=True, rescale=True),
    "della_linear": _generalised("della_linear_l1", _sum("density", "epsilon"), EPSILON, normalize=False, rescale=True),
    "sce": PeerMethod(
        (Parameter("select_topk", default=1.0),), "needed", _on_task_vectors(_shared("select_topk"), "sce_mergekit")
    ),
    "ram": PeerMethod((Parameter("epsilon", default=1e-5),), "needed", _on_task_vectors(_shared("epsilon"), "ram")),
    "ramplus_tl": PeerMethod(
        (Parameter("r", default=0.1), Parameter("alpha", default=0.2), Parameter("epsilon", default=1e-5)),
        "needed",
        _on_task_vectors(_shared("r", "alpha", "epsilon"), "ramplus_tl"),
    ),
}

# Taken by some methods, and without effect on any result.
WITHOUT_EFFECT = ("int8_mask",)
