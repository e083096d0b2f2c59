"""Constraints: bounds on the value of an objective, such as "general >= base - 0.01" or "math >= 0.5".

A bound is a number, or is relative to the value of the base model, an expert or the best expert in the same objective
on the same samples. Numbers are in the metric's own unit.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from search_spaces.errors import InvalidStudy, Problem

__all__ = ["BASE", "BEST_EXPERT", "EXPERT", "Constraint", "contradictory", "parse_constraint"]

BASE, BEST_EXPERT = "base", "best expert"
# Prefix of the label of an expert's trial ("expert:math").
EXPERT = "expert:"

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NUMBER = r"(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?"
_CONSTRAINT = re.compile(
    rf"(?P<objective>{_NAME}) ?(?P<relation>>=|<=) ?"
    rf"(?:(?P<number>[+-]?{_NUMBER})"
    rf"|(?P<reference>{BASE}|{BEST_EXPERT}|{EXPERT}{_NAME})(?: ?(?P<sign>[+-]) ?(?P<margin>{_NUMBER}))?)"
)


@dataclass(frozen=True)
class Constraint:
    """A bound on the value of one objective.

    With the `relation` ">=" the value must be at least the bound; with "<=" the value must be at most the bound.
    Without a `reference` the bound is `offset`. With a `reference` ("base", "best expert" or "expert:ALIAS") the bound
    is this model's value plus `offset`. `text` is the constraint as the user wrote it.
    """

    text: str
    objective: str
    relation: Literal[">=", "<="]
    reference: str | None
    offset: float

    def excess(self, value: float, reference_value: float = 0.0) -> float:
        """The amount by which `value` violates the constraint, in the metric's unit; at most 0 if the constraint holds.

        If the bound is relative to a model, as in "math >= base - 0.01", `reference_value` is the value of this model;
        otherwise it must be 0. The excess is rounded to 12 decimals, so that floating-point error does not turn a value
        on the bound into a violation.
        """
        gap = self.offset + reference_value - value
        return round(gap if self.relation == ">=" else -gap, 12)


def parse_constraint(text: str) -> Constraint:
    """Parse a constraint from text such as "math >= base - 0.01".

    Raises InvalidStudy if `text` is not a constraint.
    """
    plain = " ".join(text.split())
    found = _CONSTRAINT.fullmatch(plain)
    number = found and (found["number"] or (found["sign"] or "+") + (found["margin"] or "0"))
    if found is None or not math.isfinite(float(number or 0)):
        raise InvalidStudy(
            (
                Problem(
                    "",
                    f"{text!r:.80} is not a constraint; write OBJECTIVE >= BOUND or OBJECTIVE <= BOUND; a bound is a "
                    "number, or base, best expert or expert:ALIAS, each with or without a margin: math >= base - 0.01",
                ),
            )
        )
    relation: Literal[">=", "<="] = ">=" if found["relation"] == ">=" else "<="
    return Constraint(plain, found["objective"], relation, found["reference"], float(number or 0))


def contradictory(
    constraints: Mapping[int, Constraint], *, objectives: Sequence[str], experts: Sequence[str] | None
) -> Iterator[tuple[int, str]]:
    """Yield the errors in a study's list of constraints, as pairs (position of the constraint in the list, message).

    `constraints` has the constraints, keyed by their position in the list; `objectives` and `experts` are the names
    that they may use. Errors are an unknown objective or expert, a repeated constraint, and two bounds that no value
    can satisfy together. If `experts` is None, the names of experts are not checked.
    """
    seen: dict[Constraint, int] = {}
    for index, constraint in constraints.items():
        if objectives and constraint.objective not in objectives:
            yield index, f"{constraint.objective} is not an objective; give one of {', '.join(objectives)}"
        alias = (constraint.reference or "").removeprefix(EXPERT)
        if experts is not None and constraint.reference not in (None, BASE, BEST_EXPERT) and alias not in experts:
            yield (
                index,
                f"{alias} is not an expert; give one of {', '.join(experts)}; write spaces around a + or - after it",
            )
        if constraint in seen:
            yield index, f"{constraint.text} is also search.constraints.{seen[constraint]}; give it once"
        seen.setdefault(constraint, index)
    for index, lower in constraints.items():
        for other, upper in constraints.items():
            same = (lower.objective, lower.reference) == (upper.objective, upper.reference)
            if same and (lower.relation, upper.relation) == (">=", "<=") and lower.offset > upper.offset:
                yield max(index, other), f"no value meets both {lower.text} and {upper.text}; change one of them"
