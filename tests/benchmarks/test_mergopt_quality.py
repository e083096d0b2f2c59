"""Tests of the comparison of optimizers: the trainings of each optimizer, and paired gains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from search_spaces.recipe import Merge
from tests.benchmarks import arms, search_intervals
from tests.benchmarks import bench_mergopt_quality as bench

METHODS = ("task arithmetic", "TIES", "DARE")


@pytest.fixture(autouse=True)
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Temporary folder for the benchmark's results with made-up experts."""
    monkeypatch.setattr(arms, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def answers(*rows: str) -> Any:
    return np.array([[digit == "1" for digit in row] for row in rows])


def run_of(*rows: str) -> dict[str, Any]:
    """Judged merges of one seed by two methods with equal answers."""
    return {"own": 1.0, "seconds": 2.0, "methods": {"TIES": answers(*rows), "DARE": answers(*rows)}}


def test_optimizers_differ_in_nothing_but_method_rate_and_steps() -> None:
    plain = bench.specs(bench.Variant("adamw"), 1e-3, 0.002, 7)
    ours = bench.specs(bench.Variant("mergopt"), 5e-4, 0.002, 7)
    half = bench.specs(bench.Variant("sam", half=True), 1e-3, 0.002, 7)
    assert list(plain) == ["math", "text", "lookup"]
    for alias, spec in plain.items():
        other, short = ours[alias], half[alias]
        assert (spec.method.kind, other.method.kind, other.method.scale) == ("adamw", "mergopt", 0.002)
        assert (spec.data, spec.seed, spec.training.batch) == (other.data, 7, short.training.batch)
        assert other.training.steps == spec.training.steps
        assert short.training.steps == (spec.training.steps or 0) // 2
        assert spec.evaluation is None


def test_gains_are_paired_and_their_intervals_hold_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_intervals, "NUM_RESAMPLES", 200)
    better, worse = [run_of("1111", "1110")] * 3, [run_of("1110", "1100")] * 3
    found = bench.gains("a", better, worse)
    assert found["mean"]["value"] == pytest.approx(0.25)
    assert found["mean"]["low"] <= 0.25 <= found["mean"]["high"]
    assert set(found["methods"]) == {"TIES", "DARE"}
    assert bench.gains("b", better, better)["mean"] == {"value": 0.0, "low": 0.0, "high": 0.0}


def test_a_row_has_means_over_seeds_and_skills() -> None:
    row = bench.row_of("sgd", [run_of("1111", "0000"), run_of("1100", "0000")])
    assert row["methods"] == {"TIES": 0.375, "DARE": 0.375}
    assert (row["mean"], row["own"], row["seconds"]) == (0.375, 1.0, 2.0)


class TinyFleet(bench.Fleet):
    """A fleet whose merges have one more right answer for each expert, and one fewer unless the coefficient is 0.3."""

    seconds = 2.0

    def __init__(self, experts: Any) -> None:
        self.places = {alias: Path(alias) for alias in experts}

    def own(self, alias: str, split: str, num_items: int | None = None) -> Any:
        return np.ones(4, bool)

    def answers(self, merge: Merge, skills: Any, split: str, num_items: int | None = None) -> Any:
        right = len(merge.sources) + (merge.coefficients.get("lambda") == 0.3)
        return np.array([[item < right for item in range(4)]] * len(skills))


def test_pairs_are_judged_on_their_own_skills(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "Fleet", TinyFleet)
    every, pairs = (bench.judged_merges(bench.Variant("adamw"), 1e-3, 0.002, 0, n) for n in (bench.ALL, bench.PAIR))
    for found, num_rows, averaged, best in ((every, 3, "1110", "1111"), (pairs, 6, "1100", "1110")):
        expected = {"weight averaging": averaged, **dict.fromkeys(METHODS, best)}
        assert list(found["methods"]) == list(expected)
        for method, row in expected.items():
            np.testing.assert_array_equal(found["methods"][method], answers(*[row] * num_rows))
    assert pairs["coefficients"] == {"weight averaging": [None] * 3, **dict.fromkeys(METHODS, [0.3] * 3)}
    assert bench.gains("c", [every], [every])["mean"]["value"] == 0


def test_sensitivity_is_to_b_and_to_the_learning_rate(
    results: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "Fleet", TinyFleet)
    rows = bench.sensitivity(0.002, 5e-4)
    assert [row["optimizer"] for row in rows] == [
        *(f"mergopt, b {b}" for b in ("0.0005", "0.001", "0.002", "0.004", "0.008")),
        *(f"{kind}, learning rate {rate}" for kind in ("adamw", "mergopt") for rate in ("0.00025", "0.0005", "0.001")),
    ]
    assert len(list((results / bench.BENCHMARK).iterdir())) == len(rows) - 1, "the pilot's b and rate are in both"
    capsys.readouterr()
    bench.show_rows("sensitivity", rows)
    assert len(capsys.readouterr().out.splitlines()) == len(rows) + 1
