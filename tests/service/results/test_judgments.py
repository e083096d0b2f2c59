"""Win rates from judgments, and their place in the tables of the benchmark stage."""

from __future__ import annotations

import numpy as np
import pytest

from service.results.benchmarks import BenchmarkColumn, benchmark_table
from service.results.judgments import judged_recipes
from service.results.statistics import estimate
from service.store import JudgmentRecord
from service.store.documents import BenchmarkFacts
from tests.service.results.test_benchmarks import trials

FACTS = BenchmarkFacts("chats", "win_rate", "maximize", None, "d", 4, judge={"url": "u", "model": "m"})


def judgment(position: int, is_swapped: bool, preference: float | None, digest: str = "d3") -> JudgmentRecord:
    answer = "no idea" if preference is None else "[[1]]"
    return JudgmentRecord("chats", digest, position, is_swapped, preference, "m-1", "p", answer)


def judged(*pairs: tuple[float | None, float | None], digest: str = "d3") -> list[JudgmentRecord]:
    """Judgments of the samples 0, 1, ... A pair has the values of an answer that was shown first, then second."""
    return [
        judgment(position, bool(order), value, digest)
        for position, pair in enumerate(pairs)
        for order, value in enumerate(pair)
    ]


def test_both_orders_are_averaged() -> None:
    """A judge that always prefers the first answer gives half a win, and is seen to be inconsistent."""
    found = judged_recipes(judged((1, 1), (1, 0), (0, 0), (0.5, 1)), num_samples=4)["d3"]
    assert found.values.tolist() == [1.0, 0.5, 0.0, 0.75]
    assert found.agreement == 0.5
    # Verdicts for one answer: 1 1 | 1 0 | 0 0 | 1; for the first one: 1, 1 and 0 as the second, 0 as the second.
    assert found.first == pytest.approx(4 / 7)
    assert found.models == ("m-1",)
    assert found.problem is None
    biased = judged_recipes(judged((1, 0), (1, 0)), num_samples=2)["d3"]
    assert (biased.values.mean(), biased.agreement, biased.first) == (0.5, 0.0, 1.0)
    ties = judged_recipes(judged((0.5, 0.5)), num_samples=1)["d3"]
    assert (ties.values.tolist(), ties.agreement, ties.first) == ([0.5], 1.0, 0.5)


def test_recipe_with_missing_judgment_is_left_out() -> None:
    assert not judged_recipes(judged((1, 1), (1, 1))[:-1], num_samples=2)


@pytest.mark.parametrize(("missing", "has_problem"), [(2, False), (3, True)])
def test_few_answers_without_verdict_are_ties(missing: int, has_problem: bool) -> None:
    """A tenth of the answers may lack a verdict."""
    pairs: list[tuple[float | None, float | None]] = [(None, 1)] * missing + [(1, 1)] * (10 - missing)
    found = judged_recipes(judged(*pairs), num_samples=10)["d3"]
    assert found.num_without_verdict == missing
    assert found.values.mean() == pytest.approx(1 - 0.025 * missing)
    assert (found.problem is not None) == has_problem
    if found.problem is not None:
        assert "3 of 20 answers of the judge m-1 have no verdict" in found.problem
        assert "'no idea'" in found.problem


def test_table_has_win_rates_in_place_of_lengths() -> None:
    """Rows, differences and comparisons are of preferences; a trial of which judgments are missing has none."""
    lengths = {f"d{n}": {"chats": np.array([5.0, 6.0, 7.0, 8.0])} for n in range(5)}
    records = judged((1, 1), (1, 1), (1, 0), (0, 0), digest="d3") + judged((1, 1), (0, 0), (0, 0), (0, 0), digest="d0")
    records += judged((1, 1), (1, 1), (1, 1), (1, 1), digest="d4")[:-1]
    table = benchmark_table(trials(), [BenchmarkColumn(FACTS)], lengths, reference=3, judgments=records)
    assert [row.trial for row in table.rows] == [0, 3]
    source, merge = table.rows
    assert merge.values["chats"] == estimate([1, 1, 0.5, 0], bounds=(0, 1))
    assert source.differences["chats"].value == pytest.approx(0.25 - 0.625)
    assert merge.judged["chats"].length == 6.5
    assert merge.judged["chats"].judged.agreement == 0.75
    (test,) = table.tests
    assert test.differences[3].value == pytest.approx(0.625 - 0.25)


def test_table_lacks_judgments_without_verdicts() -> None:
    lengths = {"d3": {"chats": np.full(4, 5.0)}}
    records = judged((1, None), (None, None), (1, 1), (1, 1))
    failures = [(3, "chats", "no verdicts")]
    table = benchmark_table(
        trials(), [BenchmarkColumn(FACTS)], lengths, reference=3, judgments=records, failures=failures
    )
    assert not table.rows
    assert table.failures == ((3, "chats", "no verdicts"),)
