"""The performance drop rate and its paired bootstrap interval."""

from __future__ import annotations

import numpy as np
import pytest

from service.results.robustness import performance_drop


def test_drop_of_known_values() -> None:
    """Equation 7 of M3 on hand-computed values: 3 of 4 right, then 1 of 4."""
    found = performance_drop([1, 1, 1, 0], [1, 0, 0, 0])
    assert found is not None
    assert found.value == pytest.approx(2 / 3)
    assert found.samples == 4
    assert performance_drop([1, 0], [1, 1]).value == pytest.approx(-1.0)  # type: ignore[union-attr]


def test_no_drop_without_right_answers() -> None:
    """A model without a right answer has no rate; one that loses all has the rate 1."""
    assert performance_drop([0, 0, 0], [0, 0, 0]) is None
    found = performance_drop([1, 0, 1], [0, 0, 0])
    assert found is not None
    assert (found.value, found.ci95) == (1.0, (1.0, 1.0))


def test_equal_answers_have_no_drop() -> None:
    """A model that answers alike has the rate 0 without an interval: the bootstrap is paired."""
    values = (np.random.default_rng(0).random(200) < 0.6).astype(float)
    found = performance_drop(values, values)
    assert found is not None
    assert (found.value, found.ci95, found.standard_error) == (0.0, (0.0, 0.0), 0.0)


def test_interval_is_fixed_by_the_seed() -> None:
    """The same seed gives the same interval."""
    draw = np.random.default_rng(1)
    clean, attacked = (draw.random(150) < 0.8).astype(float), (draw.random(150) < 0.5).astype(float)
    assert performance_drop(clean, attacked, seed=3) == performance_drop(clean, attacked, seed=3)
    assert performance_drop(clean, attacked, seed=3) != performance_drop(clean, attacked, seed=4)


@pytest.mark.slow
def test_interval_covers_the_true_drop() -> None:
    """In 95 % of repeated draws of documents (here: 92 to 98 of 100) the interval contains the true rate."""
    num_covered = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        clean = (draw.random(300) < 0.8).astype(float)
        attacked = clean * (draw.random(300) < 0.7)  # the true rate is 0.3
        found = performance_drop(clean, attacked, seed=seed)
        assert found is not None
        num_covered += found.ci95[0] <= 0.3 <= found.ci95[1]
    assert 89 <= num_covered <= 99


def test_lengths_must_agree() -> None:
    """The two lists are of the same documents."""
    with pytest.raises(ValueError, match="same shape"):
        performance_drop([1, 0], [1])
    with pytest.raises(ValueError, match="no samples"):
        performance_drop([], [])


def test_an_interval_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading the same results again draws nothing; other values, or another seed, are drawn anew."""
    values = np.random.default_rng(11).random((2, 90))
    first = performance_drop(*values, seed=5)

    def drawn(seed: int) -> np.random.Generator:
        raise AssertionError(f"drawn with seed {seed}")

    monkeypatch.setattr(np.random, "default_rng", drawn)
    assert performance_drop(*values.copy(), seed=5) == first
    with pytest.raises(AssertionError, match="seed 6"):
        performance_drop(*values, seed=6)
    with pytest.raises(AssertionError, match="seed 5"):
        performance_drop(values[0], values[1] / 2, seed=5)
