"""Rows of the held-out table, compared with values computed by hand."""

import pytest

from service.results.comparison import compare


def binary(successes: int, samples: int) -> list[float]:
    return [1.0] * successes + [0.0] * (samples - successes)


def test_values_and_differences() -> None:
    """A row holds values, and differences from the reference."""
    row = {"math": binary(30, 100), "text": binary(80, 100)}
    best = {"math": binary(50, 100), "text": binary(85, 100)}
    got = compare("expert:text", 3, row, reference=best, mean_over=("math", "text"))
    assert {name: e.value for name, e in got.values.items()} == {"math": 0.3, "text": 0.8}
    assert {name: pytest.approx(e.value) for name, e in got.differences.items()} == {
        "math": -0.2,
        "text": -0.05,
        "mean": -0.125,
    }
    assert got.differences["mean"].ci95[1] < 0
    assert compare("base", 0, row).differences == {}
    assert "mean" not in compare("base", 0, row, reference=best, mean_over=("code",)).differences
