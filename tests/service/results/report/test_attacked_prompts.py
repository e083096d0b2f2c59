"""Attacked prompts in the report, the summary and the command: the same numbers, beside those of original prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from service.cli.terminal import print_benchmarks
from service.results.benchmarks import BenchmarkColumn, benchmark_table
from service.results.record import RunRecord
from service.results.report import render_report
from service.results.summary import summary
from service.store.documents import AttackResult, BenchmarkFacts
from tests.service.results.report.test_page import Page
from tests.service.synthetic_run import best_of, run_record

TEMPLATE = "Classify <it> as positive or negative: {{text}}"
WORST = "Cassify <it> as positive or negative: {{text}}"


@pytest.fixture(scope="module")
def run() -> RunRecord:
    """A run whose best trial answers half of a benchmark with the original template, and a tenth with the worst one."""
    run = run_record(num_trials=12)
    best = best_of(run)
    facts = BenchmarkFacts("sst2", "acc", "maximize", None, "d", 200, attack={"kind": "deepwordbug"}, template=TEMPLATE)
    samples = {best.recipe.digest: {"sst2": _share(100), "@w": _share(20)}}
    found = AttackResult("sst2", best.recipe.digest, WORST, "@w", 1234, is_cut=True)
    table = benchmark_table([best], [BenchmarkColumn(facts)], samples, reference=best.number, attacks=[found])
    return replace(run, benchmarks=table)


def _share(number: int) -> NDArray[np.float64]:
    return (np.arange(200) < number).astype(np.float64)


def test_summary_has_the_drop_rate(run: RunRecord) -> None:
    """The summary has the attack, the worst template, both values, and the rate with its interval."""
    document = summary(run)["benchmarks"]
    assert document["benchmarks"][0]["attack"] == {"kind": "deepwordbug", "template": TEMPLATE}
    (row,) = document["rows"]
    found = row["attacks"]["sst2"]
    assert (row["values"]["sst2"]["value"], found["value"]["value"]) == (0.5, 0.1)
    assert found["drop"] is not None
    assert found["drop"]["value"] == pytest.approx(0.8)
    assert found["drop"]["ci95"][0] < 0.8 < found["drop"]["ci95"][1] < 1
    assert (found["template"], found["queries"], found["is_cut"]) == (WORST, 1234, True)


def test_report_has_clean_beside_attacked(run: RunRecord) -> None:
    """The report's table has both values, the rate, the queries and the templates, which are text."""
    page = Page(render_report(run))
    section = page.text.split("sst2 with attacked prompts")[1]
    assert "DeepWordBug changes the template" in section
    assert TEMPLATE in section
    assert WORST in section
    for text in ("0.500", "0.100", "0.800", "1,234", "limit reached"):
        assert text in section
    assert "it" not in {tag for tag, _ in page.tags}


def test_command_prints_attacked_prompts(run: RunRecord, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints a second table where prompts were attacked, and none elsewhere."""
    document = summary(run)["benchmarks"]
    print_benchmarks(document)
    printed = capsys.readouterr().out
    assert "Attacked prompts" in printed
    assert "0.800 [" in printed
    assert "1,234" in printed
    for row in document["rows"]:
        row["attacks"] = {}
    print_benchmarks(document)
    assert "Attacked prompts" not in capsys.readouterr().out
