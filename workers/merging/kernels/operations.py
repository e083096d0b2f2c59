"""Operations on single elements, the building blocks of the formulas of merge rules; Numba compiles them into kernels.

This module does not import Numba, so that a rule can be defined beside the method that uses it (package `lowering`)
without loading the compiler at start-up. The module `elements` has the compiled form of each operation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

__all__ = ["FORMULAS", "ONE", "ZERO", "computes", "larger", "positive", "sign", "value"]

Formula = TypeVar("Formula", bound=Callable[..., Any])

ZERO, ONE = np.float32(0), np.float32(1)

FORMULAS: dict[type, Callable[..., Any]] = {}


def computes(rule: type) -> Callable[[Formula], Formula]:
    """Decorator that registers a function as the formula of merge rules of the type `rule`.

    The function takes (rule, base, xs, i) and returns the merged element i in float32. `base` and `xs` are arrays with
    stored elements: `value(base[i])` is the number in the base, and `value(xs[s][i])` is the number in source s. Numba
    compiles the function, so it may use only the operations of this module, arithmetic on float32 and the rule's
    fields. Raises ValueError if the type already has a formula.
    """
    if rule in FORMULAS:
        raise ValueError(f"rule {rule.__name__} has a formula in {FORMULAS[rule].__module__} already")

    def register(formula: Formula) -> Formula:
        FORMULAS[rule] = formula
        return formula

    return register


def value(word: Any) -> Any:
    """The float32 value of the stored element `word`: a float32 number, or the 16 bits of a bfloat16 or float16 number.

    Callable only in compiled code.
    """
    raise NotImplementedError("only in compiled code")


# Not the built-in max, which also checks for NaN, in a branch.


def larger(first: Any, second: Any) -> Any:
    return first if first > second else second


def positive(number: Any) -> Any:
    return number if number > ZERO else ZERO


def sign(number: Any) -> Any:
    return ONE if number > ZERO else (-ONE if number < ZERO else ZERO)
