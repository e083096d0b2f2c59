"""The merge methods a recipe can name: how many operands each takes, whether it needs the base, its coefficients.

What a method computes is defined where tensors are (`workers.merging.methods`), under the same names.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["METHODS", "Coefficient", "MethodSpec", "Numbers"]

# The numbers of one coefficient, one per source, by its name.
Numbers = Callable[[str], tuple[float, ...]]


@dataclass(frozen=True)
class Coefficient:
    """A number of a method, in [low, high]. `per_model`: may also be one number per source.

    One with a `default` may be left out, and canonical recipes leave it out where it has that value."""

    name: str
    low: float = -math.inf
    high: float = math.inf
    per_model: bool = False
    default: float | None = None
    is_whole: bool = False

    @property
    def accepts(self) -> str:
        kind = "a whole number" if self.is_whole else "a number"
        if self.low == -math.inf:
            return f"{kind}"
        return f"{kind} from {self.low:g}" if self.high == math.inf else f"{kind} in [{self.low:g}, {self.high:g}]"

    def contains(self, value: float) -> bool:
        return self.low <= value <= self.high and (not self.is_whole or value == int(value))


@dataclass(frozen=True)
class MethodSpec:
    """What a method takes.

    `is_ordered`: its sources have different parts, their order is kept. `takes_seed`: it draws random masks.
    `drops_zeros` names the coefficient whose zero takes a source's influence away; `base_at_zero` the one whose zero
    leaves the base; `is_itself_alone` says that a single source is returned as it is. `constraint` says what is wrong
    with numbers that are each within their ranges.
    """

    name: str
    coefficients: tuple[Coefficient, ...] = ()
    needs_base: bool = False
    min_sources: int = 1
    max_sources: int | None = None
    is_ordered: bool = False
    takes_seed: bool = False
    drops_zeros: str | None = None
    base_at_zero: str | None = None
    is_itself_alone: bool = False
    constraint: Callable[[Numbers], str | None] | None = None

    def coefficient(self, name: str) -> Coefficient | None:
        return next((coefficient for coefficient in self.coefficients if coefficient.name == name), None)

    def problems(
        self, num_sources: int, coefficients: Mapping[str, float | tuple[float, ...]], seed: int | None
    ) -> Iterator[str]:
        """What is wrong with a merge by this method, most basic first; missing coefficients are not reported."""
        if not self.min_sources <= num_sources <= (self.max_sources or num_sources):
            accepted = self.min_sources if self.max_sources else f"at least {self.min_sources}"
            yield f"{self.name} has {num_sources} sources; it takes {accepted}"
        for name, value in coefficients.items():
            coefficient = self.coefficient(name)
            if coefficient is None:
                known = ", ".join(coefficient.name for coefficient in self.coefficients) or "none"
                yield f"{self.name} takes no coefficient {name!r}; it takes {known}"
                continue
            for number in value if isinstance(value, tuple) else (value,):
                if not coefficient.contains(number):
                    yield f"{self.name}.{name} is {number:g}; give {coefficient.accepts}"
        if self.takes_seed and (seed is None or seed < 0):
            yield f"{self.name} draws random masks and its seed is {seed}; give a whole number from 0"
        if not self.takes_seed and seed is not None:
            yield f"{self.name} draws nothing, but its seed is {seed}; leave it out"


def _della(numbers: Numbers) -> str | None:
    for density, epsilon in zip(numbers("density"), numbers("epsilon"), strict=True):
        if round(density - epsilon, 9) < 0 or round(density + epsilon, 9) > 1:
            return f"density {density:g} and epsilon {epsilon:g}: density - epsilon and density + epsilon are in [0, 1]"
    return None


def _breadcrumbs(numbers: Numbers) -> str | None:
    for density, gamma in zip(numbers("density"), numbers("gamma"), strict=True):
        if round(density + gamma, 9) > 1:
            return f"density {density:g} and gamma {gamma:g}: what is kept and what is cut off are at most 1 in all"
    return None


def _some_weight(numbers: Numbers) -> str | None:
    weights = numbers("weight")
    return None if abs(math.fsum(weights)) >= 1e-6 else f"weights {weights} sum to zero; they must not"


WEIGHT = Coefficient("weight", per_model=True)
SHARE = Coefficient("weight", 0, per_model=True)
LAMBDA = Coefficient("lambda")
LAMBDAS = Coefficient("lambda", per_model=True)
LAMBDA_1 = Coefficient("lambda", default=1)
K = Coefficient("k", 0, 1)
DENSITY = Coefficient("density", 1e-6, 1)
DENSITIES = Coefficient("density", 1e-6, 1, per_model=True)
EPSILON = Coefficient("epsilon", 0, 0.5, per_model=True)
GAMMA = Coefficient("gamma", 0, 1, per_model=True)
IGNORED = Coefficient("epsilon", 0, default=1e-5)


def _normalize(default: int) -> Coefficient:
    return Coefficient("normalize", 0, 1, default=default, is_whole=True)


def _on_task_vectors(
    name: str,
    *coefficients: Coefficient,
    takes_seed: bool = False,
    drops_zeros: str | None = None,
    base_at_zero: str | None = "lambda",
    constraint: Callable[[Numbers], str | None] | None = None,
) -> MethodSpec:
    return MethodSpec(
        name,
        coefficients,
        needs_base=True,
        takes_seed=takes_seed,
        drops_zeros=drops_zeros,
        base_at_zero=base_at_zero,
        constraint=constraint,
    )


def _sums(
    name: str,
    *coefficients: Coefficient,
    takes_seed: bool = False,
    constraint: Callable[[Numbers], str | None] | None = None,
) -> MethodSpec:
    """base + a sum of task vectors, each with its own lambda."""
    return _on_task_vectors(
        name, LAMBDAS, *coefficients, takes_seed=takes_seed, drops_zeros="lambda", constraint=constraint
    )


def _pair(
    name: str,
    *coefficients: Coefficient,
    needs_base: bool = False,
    is_ordered: bool = False,
    drops_zeros: str | None = None,
) -> MethodSpec:
    return MethodSpec(
        name,
        coefficients,
        needs_base=needs_base,
        min_sources=2,
        max_sources=2,
        is_ordered=is_ordered,
        drops_zeros=drops_zeros,
        is_itself_alone=True,
    )


def _known(specs: Sequence[MethodSpec]) -> dict[str, MethodSpec]:
    return {spec.name: spec for spec in specs}


METHODS: Mapping[str, MethodSpec] = _known(
    (
        MethodSpec("passthrough", (Coefficient("scale", default=1),), max_sources=1),
        MethodSpec("linear", (WEIGHT,), drops_zeros="weight", constraint=_some_weight),
        _sums("task_arithmetic"),
        _on_task_vectors("ties", LAMBDA, K),
        _pair("slerp", Coefficient("t", 0, 1)),
        # Averages and interpolations of models.
        _pair("nuslerp", WEIGHT, drops_zeros="weight"),
        _pair("nuslerp_rows", WEIGHT, drops_zeros="weight"),
        _pair("nuslerp_columns", WEIGHT, drops_zeros="weight"),
        _pair("nuslerp_task_vectors", WEIGHT, needs_base=True, drops_zeros="weight"),
        MethodSpec("multislerp", (WEIGHT,), drops_zeros="weight", is_itself_alone=True, constraint=_some_weight),
        MethodSpec(
            "multislerp_task_vectors",
            (WEIGHT,),
            needs_base=True,
            drops_zeros="weight",
            is_itself_alone=True,
            constraint=_some_weight,
        ),
        MethodSpec(
            "karcher",
            (Coefficient("weight", 0, per_model=True, default=1),),
            drops_zeros="weight",
            is_itself_alone=True,
            constraint=_some_weight,
        ),
        MethodSpec("model_stock", needs_base=True, min_sources=2),
        MethodSpec("model_stock_rows", needs_base=True, min_sources=2),
        _pair("nearswap", Coefficient("t", 0), is_ordered=True),
        _pair("arcee_fusion", is_ordered=True),
        # Kinds of TIES.
        _on_task_vectors("ties_majority", LAMBDA, K),
        _on_task_vectors("ties_sum", LAMBDA, K),
        _on_task_vectors("ties_weighted", WEIGHT, DENSITIES, LAMBDA_1, _normalize(1), drops_zeros="weight"),
        _on_task_vectors("ties_peft", WEIGHT, DENSITIES, drops_zeros="weight", base_at_zero=None),
        _on_task_vectors("m3_ties", SHARE, LAMBDA, K, constraint=_some_weight),
        # Sparse task vectors.
        _sums("dare_linear", DENSITIES, takes_seed=True),
        _sums("dare_linear_l1", DENSITIES, takes_seed=True),
        _on_task_vectors("dare_ties", LAMBDA, DENSITIES, takes_seed=True),
        _on_task_vectors(
            "dare_ties_l1", WEIGHT, DENSITIES, LAMBDA_1, _normalize(0), takes_seed=True, drops_zeros="weight"
        ),
        _on_task_vectors(
            "m3_dare", SHARE, LAMBDA, DENSITIES, takes_seed=True, drops_zeros="weight", constraint=_some_weight
        ),
        _on_task_vectors("della", LAMBDA, DENSITIES, EPSILON, takes_seed=True, constraint=_della),
        _on_task_vectors(
            "della_l1",
            *(WEIGHT, DENSITIES, EPSILON, LAMBDA_1, _normalize(1)),
            takes_seed=True,
            drops_zeros="weight",
            constraint=_della,
        ),
        _sums("della_linear", DENSITIES, EPSILON, takes_seed=True, constraint=_della),
        _sums("della_linear_l1", DENSITIES, EPSILON, takes_seed=True, constraint=_della),
        _sums("breadcrumbs", DENSITIES, GAMMA, constraint=_breadcrumbs),
        _on_task_vectors(
            "breadcrumbs_ties",
            *(WEIGHT, DENSITIES, GAMMA, LAMBDA_1, _normalize(0)),
            drops_zeros="weight",
            constraint=_breadcrumbs,
        ),
        # Task vectors against each other.
        _on_task_vectors("sce", Coefficient("select_topk", 0, 1), base_at_zero=None),
        _on_task_vectors("sce_mergekit", Coefficient("select_topk", 0, 1), base_at_zero=None),
        _on_task_vectors("ram", IGNORED, base_at_zero=None),
        _on_task_vectors(
            "ramplus_tl",
            *(Coefficient("r", 0, default=0.1), Coefficient("alpha", 0, default=0.2), IGNORED),
            base_at_zero=None,
        ),
        _on_task_vectors("pcb", LAMBDA, DENSITY),
        _on_task_vectors("pcb_tanh", LAMBDA, DENSITY),
        _on_task_vectors(
            "consensus_ta",
            *(LAMBDA, Coefficient("mask_lambda", 0, per_model=True), Coefficient("agreement", 1, is_whole=True)),
        ),
        _on_task_vectors(
            "consensus_ties",
            *(LAMBDA, K, Coefficient("mask_lambda", 0, per_model=True), Coefficient("agreement", 1, is_whole=True)),
        ),
        _on_task_vectors(
            "wudi",
            LAMBDA_1,
            Coefficient("steps", 0, 10_000, default=300, is_whole=True),
            Coefficient("learning_rate", 1e-6, 1, default=1e-5),
        ),
    )
)
