"""Means, paired differences and their intervals, compared with cases computed by hand and with exact coverage."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import binom, multinomial

from service.results.comparison import compare
from service.results.statistics import (
    bootstrap,
    correlations,
    estimate,
    independent_difference,
    interval_of_mean,
    mean_of,
    paired_difference,
)
from service.types import Estimate


def binary(successes: int, samples: int) -> list[float]:
    return [1.0] * successes + [0.0] * (samples - successes)


def test_binary_metric_gets_wilsons_interval() -> None:
    # Newcombe 1998 (Stat. Med. 17, table I, method 3): 81 of 263 -> 0.2553 to 0.3662.
    got = estimate(binary(81, 263))
    assert got.value == pytest.approx(81 / 263)
    assert got.samples == 263
    assert got.ci95 == pytest.approx((0.2553, 0.3662), abs=5e-5)
    p = 81 / 263
    assert got.standard_error == pytest.approx(math.sqrt(p * (1 - p) / 262))


def test_interval_keeps_its_width_at_0_and_100_percent() -> None:
    # Newcombe 1998, same table: 0 of 20 -> 0 to 0.1611; 1 of 29 -> 0.0061 to 0.1718.
    assert estimate(binary(0, 20)).ci95 == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert estimate(binary(20, 20)).ci95 == pytest.approx((0.8389, 1.0), abs=5e-5)
    assert estimate(binary(1, 29)).ci95 == pytest.approx((0.0061, 0.1718), abs=5e-5)


def test_bounds_rescale_the_binary_interval() -> None:
    unit, percent = estimate(binary(7, 30)), estimate([100 * v for v in binary(7, 30)], bounds=(0, 100))
    assert percent.ci95 == pytest.approx(tuple(100 * limit for limit in unit.ci95))


def test_other_metrics_get_students_t() -> None:
    # 1, 2, 3, 4: mean 2.5, s = 1.29099, s/sqrt(4) = 0.645497, t(0.975, 3) = 3.182446.
    got = estimate([1, 2, 3, 4])
    assert (got.value, got.standard_error) == pytest.approx((2.5, 0.645497), abs=1e-6)
    assert got.ci95 == pytest.approx((2.5 - 3.182446 * 0.645497, 2.5 + 3.182446 * 0.645497), abs=1e-5)


def test_students_t_is_cut_to_the_bounds() -> None:
    assert estimate([0.9, 1.0, 1.0, 0.5], bounds=(0, 1)).ci95[1] == 1.0


def test_single_sample_is_as_uncertain_as_its_bounds_allow() -> None:
    assert estimate([0.3], bounds=(0, 1)) == Estimate(0.3, 0.5, 1, (0, 1))
    assert estimate([1.0]).standard_error == 0.5
    with pytest.raises(ValueError, match="give at least 2 samples"):
        estimate([12.5])


@pytest.mark.parametrize(
    ("values", "bounds", "message"),
    [
        ([], None, "at least 1"),
        ([0.0, float("nan")], None, "sample 1 is nan"),
        ([0.0, 3.0], (0, 1), r"values between 0.0 and 3.0; bounds are 0 to 1"),
    ],
)
def test_unusable_samples_are_refused(values: list[float], bounds: tuple[float, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        estimate(values, bounds=bounds)


@given(st.integers(1, 400).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_binary_interval_holds_its_mean_and_stays_in_range(case: tuple[int, int]) -> None:
    got = estimate(binary(*case))
    assert 0 <= got.ci95[0] <= got.value <= got.ci95[1] <= 1
    assert got.ci95[0] < got.ci95[1]


def test_binary_interval_covers_95_percent_on_average() -> None:
    n, proportions = 30, np.linspace(0.005, 0.995, 199)
    limits = np.array([estimate(binary(k, n)).ci95 for k in range(n + 1)])
    coverage = [binom.pmf(np.arange(n + 1), n, p)[(limits[:, 0] <= p) & (p <= limits[:, 1])].sum() for p in proportions]
    assert 0.945 < np.mean(coverage) < 0.965
    assert min(coverage) > 0.83


def test_paired_binary_difference_counts_only_disagreements() -> None:
    # 100 pairs, 15 better, 5 worse: centre (16 - 6)/102 = 0.0980392,
    # half width 1.959964 sqrt((22/102 - 0.0980392^2)/102) = 0.0880968.
    first = np.array(binary(15, 15) + binary(0, 5) + binary(40, 80))
    second = np.array(binary(0, 15) + binary(5, 5) + binary(40, 80))
    got = paired_difference(first, second)
    assert got.value == pytest.approx(0.1)
    assert got.ci95 == pytest.approx((0.0099424, 0.1861360), abs=1e-6)


def test_equal_candidates_differ_by_zero_with_a_width() -> None:
    few, many = (paired_difference(binary(n // 2, n), binary(n // 2, n)).ci95 for n in (30, 3000))
    assert few[0] < 0 < few[1]
    assert many[1] - many[0] < (few[1] - few[0]) / 10


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60))
def test_paired_interval_is_antisymmetric(pairs: list[tuple[int, int]]) -> None:
    """The paired binary interval contains its difference and is antisymmetric."""
    first, second = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert -1 <= there.ci95[0] <= there.value <= there.ci95[1] <= 1
    assert back.ci95 == pytest.approx((-there.ci95[1], -there.ci95[0]))


@pytest.mark.parametrize(("better", "worse"), [(0.3, 0.1), (0.05, 0.05), (0.02, 0.01)])
def test_paired_interval_covers_its_level(better: float, worse: float) -> None:
    """The paired binary interval covers its level, by exact enumeration."""
    n, covered = 25, 0.0
    for k in range(n + 1):
        for m in range(n + 1 - k):
            first = binary(k, k) + binary(0, n - k)
            second = binary(0, k) + binary(m, n - k)
            low, high = paired_difference(first, second).ci95
            if low <= better - worse <= high:
                covered += multinomial.pmf([k, m, n - k - m], n, [better, worse, 1 - better - worse])
    assert covered > 0.94


def test_paired_difference_is_students_t() -> None:
    """The paired difference of other metrics is Student's t of the differences."""
    first, second = [3.0, 5.0, 8.5, 2.0], [2.0, 3.0, 5.5, -2.0]
    assert paired_difference(first, second) == estimate([1, 2, 3, 4])


def test_pairing_removes_what_both_share() -> None:
    rng = np.random.default_rng(0)
    difficulty = rng.normal(0, 5, 200)
    first, second = difficulty + 0.2, difficulty + rng.normal(0, 0.1, 200)
    assert paired_difference(first, second).ci95[0] > 0.15
    assert independent_difference(estimate(first), estimate(second)).ci95[0] < 0


def test_paired_difference_refuses_other_lengths() -> None:
    with pytest.raises(ValueError, match="2 values against 3; give the same samples"):
        paired_difference([0, 1], [0, 1, 1])


def test_mean_of_tasks_weighs_tasks_not_samples() -> None:
    tasks = [estimate(binary(10, 100)), estimate(binary(8, 10))]
    got = mean_of(tasks)
    assert got.value == pytest.approx(0.45)
    assert got.samples == 110
    # Hand: standard errors 0.030151 and 0.133333 -> sqrt of summed squares / 2.
    assert got.standard_error == pytest.approx(math.hypot(0.0301511, 0.1333333) / 2, abs=1e-6)
    below = math.hypot(0.1 - tasks[0].ci95[0], 0.8 - tasks[1].ci95[0]) / 2
    assert got.ci95[0] == pytest.approx(0.45 - below)


def test_mean_of_symmetric_intervals_is_the_usual_one() -> None:
    got = mean_of([Estimate(1.0, 0.3, 50, (0.4, 1.6)), Estimate(3.0, 0.4, 50, (2.2, 3.8))])
    assert got == Estimate(2.0, 0.25, 100, (1.5, 2.5))


def test_mean_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        mean_of([])


def test_mean_difference_over_tasks_covers_95_percent() -> None:
    rng, covered, rounds = np.random.default_rng(1), 0, 1500
    rates = [(0.9, 0.85), (0.3, 0.5), (0.6, 0.6)]
    truth = np.mean([a - _rate_of_mixture(b) for a, b in rates])
    for _ in range(rounds):
        shared = [rng.random(60) for _ in rates]
        parts = [
            paired_difference(np.where(u < a, 1, 0), np.where(0.7 * u + 0.3 * rng.random(60) < b, 1, 0))
            for u, (a, b) in zip(shared, rates, strict=True)
        ]
        low, high = mean_of(parts).ci95
        covered += bool(low <= truth <= high)
    assert 0.93 < covered / rounds < 0.985


def _rate_of_mixture(b: float) -> float:
    """P(0.7 U + 0.3 V < b) of independent uniform U and V."""
    area = 0.5 * (b**2 - max(b - 0.7, 0) ** 2 - max(b - 0.3, 0) ** 2)
    return area / (0.7 * 0.3)


def test_correlated_means_have_zous_limits() -> None:
    """Correlated means of two tasks have Zou and Donner's limits."""
    # The same values twice: as wide as one; of opposite values: no width at all.
    one = estimate(binary(6, 20))
    assert mean_of([one, one], correlation=[[1, 1], [1, 1]]).ci95 == pytest.approx(one.ci95)
    narrow = mean_of([one, one], correlation=[[1, -1], [-1, 1]])
    assert narrow.ci95 == pytest.approx((0.3, 0.3))
    # 0.5 between errors of 3 and 4: sqrt(9 + 16 + 2 x 0.5 x 12) / 2.
    pair = [Estimate(0.0, 3.0, 50, (-3.0, 3.0)), Estimate(0.0, 4.0, 50, (-4.0, 4.0))]
    got = mean_of(pair, correlation=[[1, 0.5], [0.5, 1]])
    assert got.ci95 == pytest.approx((-math.sqrt(37) / 2, math.sqrt(37) / 2))
    assert got.standard_error == pytest.approx(math.sqrt(37) / 2)


def test_means_correlate_by_the_documents_that_they_share() -> None:
    first, second = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 3.0]
    assert correlations([first, second], ["a", "b"])[0, 1] == 0
    assert correlations([first, second], ["a", "a"])[0, 1] == pytest.approx(0.6)
    # Half of the first's documents: 2 of sqrt(4 x 2), correlated by 1.
    assert correlations([first, [5.0, 6.0]], ["a", "a"])[1, 0] == pytest.approx(2 / math.sqrt(8))
    # What does not vary may be as correlated as it gets.
    assert correlations([[1.0, 1.0], [0.0, 1.0]], ["a", "a"])[0, 1] == 1


def two_metrics(
    rng: np.random.Generator, *, rate: float, size: int, agreement: float
) -> dict[str, NDArray[np.float64]]:
    """Two 0/1 metrics of the same documents, such as two filters; the second differs on a random part of them."""
    first = rng.random(size) < rate
    again = rng.random(size) < 1 - agreement
    drawn = {"strict": first, "flexible": np.where(again, rng.random(size) < rate, first)}
    return {name: values.astype(np.float64) for name, values in drawn.items()}


def coverage(documents: Mapping[str, str] | None, rounds: int = 400) -> NDArray[np.float64]:
    """Share of intervals that contain the true value: of the mean, and of its paired difference."""
    rng, names = np.random.default_rng(3), ("strict", "flexible")
    hits = np.zeros(2)
    for _ in range(rounds):
        mine, best = (two_metrics(rng, rate=rate, size=300, agreement=0.95) for rate in (0.6, 0.55))
        row = compare("x", 0, mine, reference=best, mean_over=names, documents=documents)
        assert row.mean is not None
        hits += [e.ci95[0] <= truth <= e.ci95[1] for e, truth in ((row.mean, 0.6), (row.differences["mean"], 0.05))]
    return hits / rounds


def test_mean_of_shared_documents_covers_95() -> None:
    """The mean of two metrics of the same documents covers 95 percent."""
    assert (coverage(None) < 0.9).all()  # as if every document had been seen twice
    assert ((coverage(dict.fromkeys(("strict", "flexible"), "data")) - 0.95).__abs__() < 0.025).all()


def best_of_two(means: Mapping[str, NDArray[np.float64]]) -> float:
    return float(np.max(np.concatenate([means[name] for name in sorted(means)])))


def test_the_bootstrap_draws_whole_documents_and_repeats_itself() -> None:
    rng = np.random.default_rng(0)
    values = (rng.random((1, 200)) < 0.6) * 1.0

    def mean(means: Mapping[str, NDArray[np.float64]]) -> float:
        return float(np.mean([m[0] for m in means.values()]))

    one = bootstrap(mean, {"a": values}, {"a": "data"}, seed=1)
    assert one == bootstrap(mean, {"a": values}, {"a": "data"}, seed=1)
    assert one.standard_error == pytest.approx(float(values.std() / math.sqrt(200)), rel=0.1)
    twice, apart = (
        bootstrap(mean, {"a": values, "b": values}, {"a": "data", "b": other}, seed=1) for other in ("data", "other")
    )
    assert twice.ci95 == pytest.approx(one.ci95)
    assert apart.standard_error == pytest.approx(one.standard_error / math.sqrt(2), rel=0.1)


def test_bootstrap_interval_covers_the_truth() -> None:
    """The bootstrap interval of the best of several covers the truth."""
    rng, hits, rounds = np.random.default_rng(5), 0, 60
    for _ in range(rounds):
        low, high = bootstrap(best_of_two, {"a": (rng.random((2, 150)) < 0.6) * 1.0}, {"a": "data"}).ci95
        hits += low <= 0.6 <= high
    assert hits / rounds > 0.85


@pytest.mark.parametrize(("n", "bounds"), [(9, (0.0, 1.0)), (40, (0.0, 100.0))])
def test_an_interval_of_a_mean_is_that_of_its_samples(n: int, bounds: tuple[float, float]) -> None:
    """Of samples that are no two values, it is the interval of `estimate`."""
    rng = np.random.default_rng(3)
    samples = rng.uniform(*bounds, n)
    wanted = estimate(samples, bounds=bounds)
    found = interval_of_mean(wanted.value, wanted.standard_error, n, bounds=bounds)
    assert found == pytest.approx(wanted.ci95)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_an_interval_at_a_bound_is_wilsons(value: float) -> None:
    """If all samples are right, or none is, the standard error is 0 and the interval is not."""
    assert interval_of_mean(value, 0.0, 30, bounds=(0.0, 1.0)) == pytest.approx(estimate([value] * 30).ci95)


def test_an_interval_stays_in_the_range() -> None:
    assert interval_of_mean(0.95, 0.1, 5, bounds=(0.0, 1.0))[1] == 1.0
    assert interval_of_mean(0.5, 0.5, 1, bounds=(0.0, 1.0)) == (0.0, 1.0)
    assert interval_of_mean(1.5, 0.1, 5, bounds=(0.0, 1.0))[1] > 1.5
