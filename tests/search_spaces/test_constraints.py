"""Constraints: their syntax, and the values that satisfy them."""

from __future__ import annotations

import pytest

from search_spaces.constraints import BEST_EXPERT, Constraint, contradictory, parse_constraint
from search_spaces.errors import InvalidStudy


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("math >= 0.5", Constraint("math >= 0.5", "math", ">=", None, 0.5)),
        ("ppl<=12", Constraint("ppl<=12", "ppl", "<=", None, 12.0)),
        ("shift >= -2.5e-1", Constraint("shift >= -2.5e-1", "shift", ">=", None, -0.25)),
        ("general >= base - 0.01", Constraint("general >= base - 0.01", "general", ">=", "base", -0.01)),
        ("general >= base", Constraint("general >= base", "general", ">=", "base", 0.0)),
        ("a-b.c  <=  best expert+.5", Constraint("a-b.c <= best expert+.5", "a-b.c", "<=", BEST_EXPERT, 0.5)),
        ("math >= expert:my-math", Constraint("math >= expert:my-math", "math", ">=", "expert:my-math", 0.0)),
        ("math >= expert:m - 0.1", Constraint("math >= expert:m - 0.1", "math", ">=", "expert:m", -0.1)),
    ],
)
def test_what_is_written_is_read(text: str, expected: Constraint) -> None:
    assert parse_constraint(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("", "math", "math > 0.5", "math == 0.5", "math >= ", "math >= much", "math >= base - ", ">= 0.5"),
        *("0.5 <= math <= 1", "math >= base * 0.9", "math >= 0.5 - 0.1", "math >= 1e999", "math >= nan"),
        *("math >= expert:", "math >= best"),
    ],
)
def test_what_is_no_constraint_is_quoted_with_how_to_write_one(text: str) -> None:
    with pytest.raises(InvalidStudy) as caught:
        parse_constraint(text)
    assert str(caught.value).startswith(f"{text!r} is not a constraint; write OBJECTIVE >= BOUND or OBJECTIVE <= BOUND")


def test_value_on_the_bound_keeps_to_it() -> None:
    """A value on the bound satisfies it, and one beyond exceeds it."""
    at_least, at_most = parse_constraint("math >= base - 0.1"), parse_constraint("math <= 0.3")
    assert at_least.excess(0.2, 0.3) == 0  # 0.3 - 0.1 is not 0.2 in floating point
    assert at_least.excess(0.15, 0.3) == pytest.approx(0.05)
    assert at_least.excess(0.9, 0.3) == pytest.approx(-0.7)
    assert at_most.excess(0.1 + 0.2) == 0
    assert at_most.excess(0.5) == pytest.approx(0.2)


def problems(*texts: str) -> list[tuple[int, str]]:
    constraints = dict(enumerate(map(parse_constraint, texts)))
    return list(contradictory(constraints, objectives=("math", "text"), experts=("m", "t")))


def test_constraints_that_can_be_met_together_are_accepted() -> None:
    assert problems("math >= 0.1", "math <= 0.9", "text >= base", "text <= base", "text >= expert:t - 0.1") == []
    assert problems("math >= base + 0.5", "math <= 0.1") == []  # the base may be that bad


def test_contradictions_name_both_constraints() -> None:
    assert problems("math >= 0.9", "text >= 0.9", "math <= 0.1") == [
        (2, "no value meets both math >= 0.9 and math <= 0.1; change one of them")
    ]
    assert problems("math <= base", "math >= base + 0.01") == [
        (1, "no value meets both math >= base + 0.01 and math <= base; change one of them")
    ]


def test_unknown_names_are_told_with_the_known_ones() -> None:
    assert problems("code >= 0.5") == [(0, "code is not an objective; give one of math, text")]
    ((_, message),) = problems("math >= expert:m-0.1")
    assert message.startswith("m-0.1 is not an expert; give one of m, t; write spaces around a + or -")
    assert problems("math >= 0.5", "math >=  0.5") == [(1, "math >= 0.5 is also search.constraints.0; give it once")]
