"""The report in a browser, narrow and wide: nothing is cut, nothing overlaps, and the page does not scroll sideways."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from service.results.record import EngineFigures, RunRecord
from service.results.report import render_report
from service.types import JobState, Origin, TrialRecord
from tests.browser import has_browser, shown
from tests.service.synthetic_run import EXPERTS, gradients, run_record

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not has_browser(), reason="Chromium is not installed (Debian: apt-get install chromium)"),
]

LONG = {name: f"{name}-a-rather-long-name-of-an-expert_or_objective-v2.1" for name in EXPERTS}

# Writes what is wrong with the page in a frame, as a list of sentences. Boxes of rotated texts overlap by design.
MEASURE = """
const view = frame.contentWindow, page = frame.contentDocument, wrong = [];
page.querySelectorAll('details').forEach(each => each.open = true);
if (page.documentElement.scrollWidth > view.innerWidth)
  wrong.push(`the page is ${page.documentElement.scrollWidth} wide in ${view.innerWidth}`);
for (const svg of page.querySelectorAll('.frame > svg')) {
  const box = svg.getBoundingClientRect(), is_cut = view.getComputedStyle(svg).overflow === 'hidden';
  const texts = [...svg.querySelectorAll('text:not([transform])')].filter(each => each.textContent)
    .map(each => [each.textContent, each.getBoundingClientRect()]).filter(([, at]) => at.width);
  for (const [text, at] of texts)
    if (is_cut && (at.left < box.left - 1 || at.right > box.right + 1)) wrong.push(`${text}: is cut`);
    else if (!svg.closest('.scroll') && (at.left < 0 || at.right > view.innerWidth))
      wrong.push(`${text}: leaves the page`);
  for (const [i, [one, a]] of texts.entries())
    for (const [other, b] of texts.slice(i + 1)) {
      const width = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const height = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (width > 1 && height > 4) wrong.push(`${one}: overlaps ${other}`);
    }
}
document.getElementById('wrong').textContent = JSON.stringify(wrong);
"""


def wrong_in(document: str, directory: Path, *, width: int) -> list[str]:
    """Descriptions of problems in the layout of an HTML document, in a window of this width."""
    frame = (
        f'<iframe id="frame" width="{width}" height="900" style="border:0" srcdoc="{html.escape(document)}"></iframe>'
    )
    page = f"<body>{frame}<pre id=wrong></pre><script>onload = () => {{ {MEASURE} }}</script>"
    file = directory / "page.html"
    file.write_text(page)
    (found,) = re.findall(r'<pre id="wrong">(.*?)</pre>', shown(file.as_uri(), directory / "profile"), re.DOTALL)
    sentences: list[str] = json.loads(html.unescape(found))
    return sentences


def named(values: Mapping[str, Any]) -> dict[str, Any]:
    return {LONG[name]: value for name, value in values.items()}


def renamed(trial: TrialRecord) -> TrialRecord:
    rungs = (
        replace(
            rung,
            num_samples=named(rung.num_samples),
            values=named(rung.values),
            standard_errors=named(rung.standard_errors),
        )
        for rung in trial.rungs
    )
    return replace(
        trial,
        label=trial.label.replace("math", LONG["math"]),
        rungs=tuple(rungs),
        values=named(trial.values),
        standard_errors=named(trial.standard_errors),
    )


def with_long_names(run: RunRecord) -> RunRecord:
    return replace(
        run,
        study=replace(run.study, name="x" * 120),
        objectives=tuple(replace(objective, name=LONG[objective.name]) for objective in run.objectives),
        trials=tuple(map(renamed, run.whole_trials)),
        full_budget=named(run.full_budget),
        holdout=tuple(replace(row, label=row.label.replace("math", LONG["math"])) for row in run.holdout),
    )


@pytest.mark.parametrize("width", [320, 1280])
@pytest.mark.parametrize("case", ["usual", "long names", "equal values", "failed"])
def test_layout(case: str, width: int, tmp_path: Path) -> None:
    """At any width, texts are whole and apart, and the page does not scroll sideways."""
    run = run_record()
    if case == "usual":
        run = replace(run, gradients=gradients(num_descents=5))
    elif case == "long names":
        run = with_long_names(run)
    elif case == "equal values":  # as of a cost that no baseline changes
        values = {"math": 0.5, "text": 0.5, "lookup": 0.5}
        run = replace(
            run,
            trials=tuple(
                replace(trial, values=values) if trial.origin is Origin.SOURCE else trial for trial in run.trials
            ),
        )
    else:
        study = replace(run.study, state=JobState.FAILED, reason="x" * 300)
        run = replace(run, study=study, trials=(), holdout=(), verifications=(), engine=EngineFigures())
    assert wrong_in(render_report(run), tmp_path, width=width) == []


def test_wrong_layouts_are_noticed(tmp_path: Path) -> None:
    """The measurement finds texts that overlap, are cut or leave the page, and a page that is too wide."""
    texts = (
        "<text x='-20' y='20'>a long text</text><text x='0' y='22'>and another</text><text x='310' y='80'>late</text>"
    )
    cut = "<svg width='40' height='40' style='overflow:hidden'><text y='20'>is not whole</text></svg>"
    wide = f"<svg width=330 height=100 style='overflow:visible'>{texts}</svg>"
    page = f"<div class=frame>{wide}</div><div class=frame>{cut}</div>"
    assert wrong_in(page, tmp_path, width=320) == [
        "the page is 338 wide in 320",
        "a long text: leaves the page",
        "late: leaves the page",
        "a long text: overlaps and another",
        "is not whole: is cut",
    ]
