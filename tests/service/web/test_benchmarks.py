"""Results on benchmarks, compared with the API's answers, and the addition of benchmarks."""

from __future__ import annotations

import httpx
import pytest
from playwright.sync_api import Browser

from service.types import JobRecord
from tests.service.api.harness import FAMILY, ApiServer, finished_study, stored_study
from tests.service.web.benchmarked import REASON, TEMPLATE, WORST, benchmarked_study
from tests.service.web.driving import Visit, check_view, expect, press


@pytest.fixture(scope="module")
def scored(server: ApiServer) -> JobRecord:
    return benchmarked_study(server.store)


def minus(x: float) -> str:
    return f"{x:+.3f}".replace("-", "−")


def test_values_and_differences_are_shown(visitor: Visit, scored: JobRecord, http: httpx.Client) -> None:
    """Each trial has its values with intervals, the averages of groups, and paired differences to the reference."""
    found = http.get(f"/v1/studies/{scored.id}/benchmarks").json()
    page = visitor.goto(f"/studies/{scored.id}/benchmarks")
    table = page.get_by_role("region", name="Values on benchmarks")
    expect(table.get_by_role("columnheader", name="common sense")).to_have_attribute("colspan", "3")
    for row in found["rows"]:
        line = table.get_by_role("row").filter(has=page.get_by_role("rowheader", name=str(row["trial"]), exact=True))
        low, high = row["values"]["piqa"]["ci95"]
        expect(line).to_contain_text(f"{row['values']['piqa']['value']:.3f} {low:.3f} to {high:.3f}")
        if "common sense" in row["averages"]:
            expect(line.get_by_role("cell").nth(3)).to_contain_text(f"{row['averages']['common sense']['value']:.3f}")
        if row["trial"] == found["reference"]:
            expect(line).to_contain_text("reference")
        else:
            expect(line).to_contain_text(minus(row["differences"]["piqa"]["value"]))


def test_subtasks_are_folded_out(visitor: Visit, scored: JobRecord, http: httpx.Client) -> None:
    """A benchmark of several tasks has the values of its categories and subtasks below its name."""
    row = http.get(f"/v1/studies/{scored.id}/benchmarks").json()["rows"][0]
    page = visitor.goto(f"/studies/{scored.id}/benchmarks")
    table = page.get_by_role("region", name="Subtasks of mmlu")
    expect(table).to_be_hidden()
    page.get_by_text("mmlu: 3 subtasks").focus()
    page.keyboard.press("Enter")
    for number, name in enumerate(("stem", "algebra", "geometry", "history"), start=1):
        expect(table.get_by_role("row").nth(number)).to_contain_text(name)
        expect(table.get_by_role("row").nth(number)).to_contain_text(f"{row['subtasks']['mmlu'][name]['value']:.3f}")


def test_attacks_and_judgments_are_shown(visitor: Visit, scored: JobRecord, http: httpx.Client) -> None:
    """Robustness has both values, the drop and the templates as text; judgments have agreement and lengths."""
    row = http.get(f"/v1/studies/{scored.id}/benchmarks").json()["rows"][0]
    attack, judged = row["attacks"]["sst2"], row["judged"]["chats"]
    page = visitor.goto(f"/studies/{scored.id}/benchmarks")
    expect(page.get_by_text(TEMPLATE)).to_be_visible()
    line = page.get_by_role("region", name="Table of sst2 with attacked prompts").get_by_role("row").nth(1)
    for text in (f"{attack['value']['value']:.3f}", f"{attack['drop']['value']:.3f}", "1,234", "limit reached", WORST):
        expect(line).to_contain_text(text)
    expect(page.get_by_role("heading", name="chats, judged by qwen-7b")).to_be_visible()
    line = page.get_by_role("region", name="Judgments on chats").get_by_role("row").nth(1)
    for text in (f"{row['values']['chats']['value']:.3f}", f"{100 * judged['agreement']:.0f} %", "50 %"):
        expect(line).to_contain_text(text)


def test_comparisons_are_corrected(visitor: Visit, scored: JobRecord, http: httpx.Client) -> None:
    """Each comparison with a rival has the server's corrected interval and says which merges are better."""
    tests = http.get(f"/v1/studies/{scored.id}/benchmarks").json()["tests"]
    page = visitor.goto(f"/studies/{scored.id}/benchmarks")
    table = page.get_by_role("region", name="Comparisons with rivals")
    expect(table.get_by_role("row")).to_have_count(1 + len(tests))
    for number, test in enumerate(tests, start=1):
        best = max(test["differences"], key=lambda each: each["value"])
        line = table.get_by_role("row").nth(number)
        expect(line).to_contain_text(f"{minus(best['ci95'][0])} to {minus(best['ci95'][1])}")
        expect(line).to_contain_text(test["label"])
        if not any(each["is_better"] for each in test["differences"]):
            expect(line).to_contain_text("no merge is better")
    expect(page.get_by_text(f"Trial 1 on siqa: {REASON}")).to_be_visible()


@pytest.mark.slow
def test_benchmarks_are_added(visitor: Visit, server: ApiServer, http: httpx.Client) -> None:
    """Problems have their fields; a valid benchmark becomes part of the study, which then continues, live."""
    study = finished_study(server.store, num_trials=6, name="without-benchmarks")
    page = visitor.goto(f"/studies/{study.id}/benchmarks")
    expect(page.get_by_text("The study has no results on benchmarks.")).to_be_visible()
    editor = page.get_by_role("textbox", name="Benchmarks")
    file = FAMILY / "tasks" / "math_holdout.jsonl"
    visitor.expected = ("422",)
    wrong = f"benchmarks:\n  - {{name: sums, task: {{file: {file}}}, metric: exact_match, trials: [99]}}"
    editor.fill(wrong)
    page.get_by_role("button", name="Add").click()
    expect(page.get_by_role("alert").get_by_text("benchmarks.0.trials.0", exact=True)).to_be_visible()
    editor.fill(wrong.replace("[99]", "[best]"))
    press(page.get_by_role("button", name="Add"))
    expect(page.get_by_text("Benchmarks can be added once the study is complete.")).to_be_visible()
    expect(page.get_by_label("Connection")).to_have_text("live")
    assert [each["name"] for each in http.get(f"/v1/studies/{study.id}/study").json()["benchmarks"]] == ["sums"]


def test_a_running_study_gets_none(visitor: Visit, server: ApiServer) -> None:
    """A study that has not ended says when benchmarks are scored, and has no form to add some."""
    study = stored_study(server.store, name="not-ended")
    page = visitor.goto(f"/studies/{study.id}/benchmarks")
    expect(page.get_by_text("Benchmarks can be added once the study is complete.")).to_be_visible()
    expect(page.get_by_role("textbox", name="Benchmarks")).to_have_count(0)


def test_results_are_accessible(browser: Browser, server: ApiServer, scored: JobRecord) -> None:
    """Results on benchmarks of every kind violate no rule of axe."""
    check_view(browser, server.url, f"/studies/{scored.id}/benchmarks")
