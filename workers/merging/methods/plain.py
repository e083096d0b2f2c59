"""Table of merge methods: the PyTorch function for each method's name.

A function receives the tensors, the base if its method needs one, and the coefficients, keyed by name. The name of a
coefficient with a number for each source is in the plural, such as `lambdas`; `lambda_` is one number for all sources.
The function also receives these arguments, if it has parameters for them:

- `keys`: the keys of random masks
- `cos`, `importance`, `magnitudes`, `majority`, `norms`, `products`, `ranks`, `variances`: statistics, if they are
  known
- `orders`, `order`: the orders of equal elements, for functions that cut at a rank
- `name`: the tensor's name, for messages
"""

from __future__ import annotations

import importlib
import inspect
import keyword
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch

from search_spaces.methods import METHODS
from search_spaces.methods.base import Coefficient, CoefficientValue, MergeMethod
from search_spaces.recipe import Merge
from workers.merging import methods
from workers.merging.methods.arithmetic import Products
from workers.merging.methods.fusions import Importance
from workers.merging.methods.peaks import Peak
from workers.merging.methods.registry import FUNCTIONS, PEAKS
from workers.merging.order_statistics import Ranked, TieOrder

__all__ = ["PLAIN", "Operands", "PlainMethod", "Statistic", "merge_tensors"]

Statistic = Literal["cosine", "importance", "magnitudes", "majority", "norms", "products", "ranks", "variances"]


@dataclass(frozen=True)
class Operands:
    """The operands of one merge: the same tensor of every source, all of one shape; none of them is modified.

    - `tensors`: the tensor of each source, in the order of the merge's sources
    - `base`: the base model's tensor, for methods that need it
    - `keys`: the keys of random masks (function `masks.mask_key`), one for each source, for methods that draw masks
    - `name`: the tensor's name, for messages
    - `orders`: for each source, the rule that breaks ties between elements of equal magnitude; with None, any
      repeatable rule is used
    - `order`: the rule that breaks ties between elements of equal variance; with None, any repeatable rule is used

    The other fields are precomputed statistics, which depend only on the sources. If a statistic is None, a method that
    needs it computes it.

    - `cosine`: the cosine of the angle between the first two tensors
    - `importance`: the criterion by which Arcee Fusion takes elements of the second tensor
    - `magnitudes`: for each source the table of |source - base|; for a merge that trims whole models, the thresholds of
      whole task vectors, after the random masks of methods that draw masks
    - `majority`: for a merge that trims whole models, a number with the sign that is elected for most of the model's
      elements
    - `products`: the inner products of all pairs of tensors; with a base, of all pairs of task vectors
    - `variances`: the table of the variances between task vectors
    - `ranks`: for each source the ranks of its magnitudes in each row
    - `norms`: for each source the sum of the magnitudes |source - base|
    """

    tensors: tuple[torch.Tensor, ...]
    base: torch.Tensor | None = None
    cosine: float | None = None
    magnitudes: tuple[Ranked | None, ...] | None = None
    keys: tuple[int, ...] | None = None
    products: Products | None = None
    importance: Importance | None = None
    variances: Ranked | None = None
    ranks: tuple[torch.Tensor, ...] | None = None
    norms: tuple[float, ...] | None = None
    majority: int | None = None
    orders: tuple[TieOrder, ...] | None = None
    order: TieOrder | None = None
    name: str = ""

    def in_float32(self) -> Operands:
        """A copy of the operands with all tensors converted to float32."""
        base = None if self.base is None else self.base.float()
        return replace(self, tensors=tuple(tensor.float() for tensor in self.tensors), base=base)


@dataclass(frozen=True)
class PlainMethod:
    """A declared merge method with the PyTorch function that computes it.

    `uses` are the names of the precomputed statistics of the sources for which the function has parameters.
    `is_told_name` says whether the function has a parameter for the tensor's name. `order_parameter` is the name of the
    function's parameter for the rules that break ties between equal elements, or None if the function has no such
    parameter. `peak` is the memory that the function takes at most.
    """

    declared: MergeMethod
    function: Callable[..., torch.Tensor]
    uses: frozenset[Statistic]
    is_told_name: bool
    order_parameter: Literal["orders", "order"] | None
    peak: Peak

    @property
    def name(self) -> str:
        return self.declared.name

    def merge(
        self,
        operands: Operands,
        merge: Merge,
        *,
        given: Mapping[str, Sequence[torch.Tensor] | torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Compute `merge` from `operands` by this method's function, with the coefficients of the merge.

        `given` maps names of coefficients to tensors without dimensions that replace the coefficients; the result then
        has gradients with respect to these tensors. Raises InvalidRecipe if `given` names a coefficient that the method
        does not have.
        """
        replaced = given or {}
        arguments: dict[str, Any] = {
            _keyword(c): replaced[c.name] if c.name in replaced else _value(c, merge)
            for c in self.declared.coefficients
        }
        if self.declared.takes_seed:
            assert operands.keys is not None, f"{self.name} was given no keys"
            arguments["keys"] = operands.keys
        for statistic in self.uses:
            arguments[_parameter(statistic)] = getattr(operands, statistic)
        if self.order_parameter and (order := getattr(operands, self.order_parameter)) is not None:
            arguments[self.order_parameter] = order
        if self.is_told_name:
            arguments["name"] = operands.name
        if not self.declared.needs_base:
            return self.function(operands.tensors, **arguments)
        assert operands.base is not None, f"{self.name} was given no base"
        return self.function(operands.tensors, operands.base, **arguments)


def merge_tensors(merge: Merge, operands: Operands) -> torch.Tensor:
    """Compute a merged tensor from its operands with the PyTorch function of the merge's method.

    Raises InvalidRecipe if the method does not accept the merge's sources or coefficients.
    """
    merge.check()
    return PLAIN[merge.method].merge(operands, merge)


def _keyword(coefficient: Coefficient) -> str:
    name = coefficient.name
    if coefficient.per_model:
        return f"{name[:-1]}ies" if name.endswith("y") else f"{name}s"
    return f"{name}_" if keyword.iskeyword(name) else name


def _value(coefficient: Coefficient, merge: Merge) -> CoefficientValue:
    if coefficient.per_model:
        return merge.per_source(coefficient.name)
    number = merge.number(coefficient.name)
    return int(number) if coefficient.is_whole else number


def _parameter(statistic: Statistic) -> str:
    return "cos" if statistic == "cosine" else statistic


def _plain_methods() -> Iterator[PlainMethod]:
    for module in pkgutil.iter_modules(methods.__path__, f"{methods.__name__}."):
        importlib.import_module(module.name)
    for name, declared in METHODS.items():
        parameters = inspect.signature(FUNCTIONS[name]).parameters
        uses = (statistic for statistic in get_args(Statistic) if _parameter(statistic) in parameters)
        order: Literal["orders", "order"] | None = None
        if "orders" in parameters:
            order = "orders"
        elif "order" in parameters:
            order = "order"
        yield PlainMethod(declared, FUNCTIONS[name], frozenset(uses), "name" in parameters, order, PEAKS[name])


PLAIN: Mapping[str, PlainMethod] = {method.name: method for method in _plain_methods()}
