"""Judged completions in the report, in the summary and at the command."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from search_spaces.study.judge import JudgeSpec
from service.cli.terminal import print_benchmarks
from service.results.benchmarks import BenchmarkColumn, benchmark_table
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.summary import summary
from service.store import JudgmentRecord
from service.store.documents import BenchmarkFacts
from tests.service.results.report.test_page import Page
from tests.service.synthetic_run import best_of, run_record

JUDGE = JudgeSpec(
    url="http://judge:8000/v1", model="qwen", prompt="Which <is> better? {{question}} {{first}} {{second}}"
)


@pytest.fixture(scope="module")
def run() -> RunRecord:
    """A run whose best trial wins 150 of 200 comparisons in both orders; the judge has no verdict once."""
    run = run_record(num_trials=12)
    best = best_of(run)
    facts = BenchmarkFacts(
        *("chats", "win_rate", "maximize", None, "d", 200),
        judge=JUDGE.model_dump(mode="json"),
        reference_length=1234.4,
    )
    digest = best.recipe.digest
    judgments = [
        JudgmentRecord("chats", digest, position, is_swapped, float(position < 150), "qwen-7b", "p", "...")
        for position in range(200)
        for is_swapped in (False, True)
    ]
    judgments[-1] = replace(judgments[-1], preference=None)
    samples = {digest: {"chats": np.full(200, 321.0)}}
    table = benchmark_table([best], [BenchmarkColumn(facts)], samples, reference=best.number, judgments=judgments)
    return replace(run, benchmarks=table)


def test_summary_has_the_judgments(run: RunRecord) -> None:
    document = summary(run)["benchmarks"]
    (column,), (row,) = document["benchmarks"], document["rows"]
    assert column["judge"] is not None
    assert (column["judge"]["url"], column["judge"]["reference_length"]) == (JUDGE.url, 1234.4)
    assert row["values"]["chats"]["value"] == pytest.approx((150 + 0.25) / 200)
    assert row["judged"]["chats"] == {
        "models": ["qwen-7b"],
        "length": 321.0,
        "agreement": pytest.approx(199 / 200),
        "first": pytest.approx(199 / 399),
        "without_verdict": 1,
    }


def test_report_says_whose_verdicts_they_are(run: RunRecord) -> None:
    page = Page(render_report(run))
    section = page.text.split("chats, judged by qwen-7b")[1]
    assert "http://judge:8000/v1" in section
    assert "plain one, without control of length" in section
    assert "1,234 characters" in section
    assert "Which <is> better?" in section
    for text in ("0.751", "100%", "50%", "321"):
        assert text in section


def test_command_prints_the_judgments(run: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    print_benchmarks(summary(run)["benchmarks"])
    printed = capsys.readouterr().out
    assert "Judged completions" in printed
    assert "plain win rate" in " ".join(printed.split())
    assert "1,234" in printed
