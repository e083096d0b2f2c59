"""report.html: a single file, complete, safe, and in agreement with the records."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pytest

from search_spaces.objectives import Objective
from search_spaces.recipe import Merge, Source
from service.results.record import EngineFigures, RunRecord, SearchFigures
from service.results.report import render_report
from service.results.report.marks import MAX_POINTS
from service.results.report.page import TEMPLATES
from service.results.summary import summary
from service.types import JobState, Origin, TrialState
from tests.service.synthetic_run import best_of, gradients, run_record

VOID = {"meta", "br", "col", "link", "img", "input", "hr"}


class Page(HTMLParser):
    """A parser that collects tags and texts, and fails if a tag is not closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += data


@pytest.fixture(scope="module")
def run() -> RunRecord:
    return run_record()


def test_report_has_the_limit_of_samples(run: RunRecord) -> None:
    """The report has the samples used where they have a limit."""
    used = summary(run)["samples"]["used"]
    text = Page(render_report(replace(run, max_samples=2 * used))).text
    assert f"used {used:,} of the {2 * used:,} samples of limits.max_samples" in text
    assert "limits.max_samples" not in Page(render_report(run)).text


@pytest.fixture(scope="module")
def page(run: RunRecord) -> Page:
    return Page(render_report(run))


def test_single_tensors_of_the_best_recipe_are_listed(run: RunRecord, page: Page) -> None:
    assert "a merge of its own" not in page.text
    best = best_of(run)
    own = Merge("task_arithmetic", (Source("math"), Source("text")), {"lambda": (0.35, -0.15)})
    finer = replace(best, recipe=replace(best.read_recipe(), tensors={"model.norm.weight": own}))
    trials = tuple(finer if trial.number == best.number else trial for trial in run.trials)
    text = Page(render_report(replace(run, trials=trials))).text
    assert "1 tensor has a merge of its own" in text
    assert "model.norm.weight" in text
    assert "-0.15" in text


def test_report_loads_nothing_and_runs_nothing(run: RunRecord) -> None:
    html = render_report(run)
    tags = Page(html).tags
    assert not {tag for tag, _ in tags} & {"script", "link", "img", "iframe", "object", "embed"}
    assert not [a for _, a in tags if {"src", "href", "xlink:href"} & set(a) or any(k.startswith("on") for k in a)]
    assert not re.search(r"https?:|@import|url\(", html)


def test_headline(run: RunRecord, page: Page) -> None:
    """The headline says how good the best trial is and what was found."""
    document: Any = summary(run)
    best = document["best"]["trial"]
    mine = next(row for row in document["holdout"] if row["trial"] == best)
    assert f"Trial {best} reaches a mean of {mine['mean']['value']:.3f} on held-out data." in page.text
    assert document["finding"]["text"] in page.text
    assert [test["against"] for test in document["finding"]["tests"]] == ["source", "published"]
    for test in document["finding"]["tests"]:
        rows = [row for row in document["holdout"] if row["origin"] == test["against"]]
        assert test["rival"] == max(rows, key=lambda row: row["mean"]["value"])["trial"]
        assert test["label"] in document["finding"]["text"]
        assert test["differences"][0]["trial"] == best


def test_every_held_out_value_is_in_the_table(run: RunRecord, page: Page) -> None:
    assert run.holdout
    assert all(row.values for row in run.holdout)
    for row in run.holdout:
        for estimate in row.values.values():
            assert f"{estimate.value:.3f}" in page.text
            assert f"{estimate.ci95[0]:.3f} to {estimate.ci95[1]:.3f}" in page.text


def test_every_chart_says_what_it_shows_and_has_a_table(page: Page) -> None:
    charts = [attributes for tag, attributes in page.tags if attributes.get("role") == "img"]
    assert len(charts) == 4 + 4 + 1 + 3 + 1 + 3  # held-out, history, races, front, hypervolume, coefficients
    assert all(len(chart["aria-label"] or "") > 20 for chart in charts)
    assert sum(tag == "table" for tag, _ in page.tags) >= 7


def test_history_draws_every_rung_of_every_trial(run: RunRecord, page: Page) -> None:
    rungs = sum(len(trial.rungs) for trial in run.trials if trial.origin is Origin.SEARCH)
    drawn = [a for tag, a in page.tags if tag == "circle" and "--rung" in (a.get("style") or "")]
    legend_entries = 3
    assert len(drawn) == 4 * rungs + legend_entries


def test_descents_are_drawn(run: RunRecord, page: Page) -> None:
    """Descents are drawn with their trials and preference vectors."""
    assert "Descents" not in page.text
    html = render_report(replace(run, gradients=gradients()))
    text = Page(html).text
    assert "One descent by 48 gradients of the loss on reference answers." in text
    assert "next descent begins" not in text
    unlabelled = Objective("math", "entropy", "minimize", (0.0, 1.0))
    mixed = replace(run, gradients=gradients(), objectives=(unlabelled, *run.objectives[1:]))
    wanted = "gradients of the loss on reference answers or, for tasks without labels, the entropy of predictions."
    assert wanted in Page(render_report(mixed)).text
    assert html.count("<title>trial 9: after gradient 12, descent 0</title>") == 1
    html = render_report(replace(run, gradients=gradients(num_descents=5)))
    found = Page(html)
    assert "5 descents, one for each preference vector, by 96 gradients" in found.text
    assert "9 to 12" in found.text
    assert html.count('class="reference"') >= 4
    lines = [a for tag, a in found.tags if tag == "line" and a.get("class") == "loss"]
    assert len(lines) > 3 * 40


def test_races_say_who_was_stopped_where_and_what_that_saved(run: RunRecord) -> None:
    html = render_report(run)
    stopped = [trial for trial in run.trials if trial.state is TrialState.PRUNED]
    saved = sum(270 - max(rung.num_samples["math"] for rung in trial.rungs) for trial in stopped)
    text = Page(html).text
    assert f"{len(stopped)} were stopped before the full budget, which saved {saved:,} samples" in text
    assert "stopped: not among the best of its bracket" in text
    drawn = re.findall(r"<title>trial (\d+): [^<]*; not among the best of its bracket</title>", html)
    assert {int(number) for number in drawn} == {trial.number for trial in stopped}
    full = tuple(replace(trial, rungs=trial.rungs[-1:]) for trial in run.trials if len(trial.rungs) == 3)
    assert 'id="races"' not in render_report(replace(run, trials=full)), "with one rung nobody is stopped"


def test_coefficients_are_drawn(run: RunRecord) -> None:
    """Coefficients are drawn for every expert by layer and component."""
    html = render_report(run)
    best = best_of(run)
    for expert in ("math", "text", "lookup"):
        titles = re.findall(rf"<title>{expert}, layer (\d+) (attention|mlp|norm): -?\d\.\d+</title>", html)
        methods = [
            layer.component(name).method for layer in best.read_recipe().layers for name in ("attention", "mlp", "norm")
        ]
        assert len(titles) == sum(method != "slerp" for method in methods)


def test_verification_failures_and_engine_are_told(run: RunRecord, page: Page) -> None:
    assert "141 of 144 samples are equal" in page.text
    assert "930 tokens of completions were compared, and 2,100 log-probabilities" in page.text
    nothing = replace(
        run.verifications[0], num_samples=0, num_equal=0, differences=(), reason="there is no memory for it"
    )
    text = Page(render_report(replace(run, verifications=(nothing,)))).text
    assert "Not verified: there is no memory for it." in text
    assert "are equal" not in text
    text = Page(render_report(replace(run, verifications=(run.verifications[0], nothing)))).text
    assert "Not verified: 1 of 2 trials: there is no memory for it." in text
    assert page.text.count("NaN in the logits of objective 'math', sample 3; <merge diverged>") == 3
    assert "recipe swaps" in page.text
    assert "87%" in page.text
    assert f"{summary(run)['samples']['scored']:,} samples were scored" in page.text


def test_the_searcher_its_reason_and_its_cost_are_told(run: RunRecord) -> None:
    search = SearchFigures(
        "gradient", "there are references", ("lower losses mean better scores",), steps=52, charges={9: 7104}
    )
    page = render_report(replace(run, search=search))
    for text in ("gradient: there are references", "lower losses mean better scores", "charged as 7,104 samples"):
        assert text in page


def test_texts_of_users_cannot_become_markup(run: RunRecord) -> None:
    bad = "<script>alert(1)</script>"
    trials = [replace(trial, label=bad, reason=bad if trial.reason else None) for trial in run.trials]
    holdout = [replace(row, label=bad) for row in run.holdout]
    objectives = [replace(objective, metric=bad) for objective in run.objectives]
    study = replace(run.study, name=bad, reason=bad)
    html = render_report(
        replace(run, study=study, trials=tuple(trials), holdout=tuple(holdout), objectives=tuple(objectives))
    )
    assert "<script" not in html
    Page(html)


def test_every_stage_of_a_run_can_be_rendered(run: RunRecord) -> None:
    nothing = replace(run, trials=(), holdout=(), verifications=(), engine=EngineFigures(), samples_per_second=None)
    assert "No trial has reached the full budget yet." in Page(render_report(nothing)).text
    waiting = [replace(t, state=TrialState.WAITING, rungs=(), values={}, standard_errors={}) for t in run.trials]
    Page(render_report(replace(nothing, trials=tuple(waiting))))
    failed = replace(run.study, state=JobState.FAILED, reason="the engine did not start")
    assert "the engine did not start" in Page(render_report(replace(nothing, study=failed))).text
    searching = replace(run, holdout=(), verifications=(), trials=run.trials[:20])
    text = Page(render_report(searching)).text
    assert "There are no held-out results yet" in text
    assert "Not verified: nothing was scored again by plain transformers." in text


def test_one_objective_gets_bars_instead_of_a_front() -> None:
    run = run_record(num_objectives=1)
    page = Page(render_report(run))
    assert "Pareto front" not in page.text
    assert [a for tag, a in page.tags if tag == "rect" and (a.get("class") or "").startswith("bar")]
    assert "expert:math reaches" in page.text
    assert "No merge found is better than expert:math" in page.text


def test_objectives_to_minimise_and_with_ranges_are_drawn(run: RunRecord) -> None:
    objectives = (*run.objectives[:2], Objective("lookup", "perplexity", "minimize", (0.0, 40.0)))

    def scaled(values: Mapping[str, float]) -> Mapping[str, float]:
        return {**values, "lookup": 40 * values["lookup"]} if values else values

    trials = tuple(
        replace(t, values=scaled(t.values), rungs=tuple(replace(r, values=scaled(r.values)) for r in t.rungs))
        for t in run.trials
    )
    page = Page(render_report(replace(run, objectives=objectives, trials=trials, holdout=())))
    assert "↓ lookup" in page.text


@pytest.mark.slow
def test_ten_thousand_trials_stay_drawable(run: RunRecord) -> None:
    search = [trial for trial in run.trials if trial.origin is Origin.SEARCH]
    many = [replace(search[i % len(search)], number=9 + i) for i in range(10_000)]
    html = render_report(replace(run, trials=(*run.trials[:9], *many)))
    circles = [a for tag, a in Page(html).tags if tag == "circle"]
    assert 1000 < len(circles) < 7 * MAX_POINTS + 100
    assert len(html) < 3_000_000
    assert "Each chart shows a sample of its points" in html


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_text_has_the_contrast_of_wcag_aa(scheme: int) -> None:
    """Every colour of text has a contrast of at least 4.5 with the page's background."""
    page = (TEMPLATES / "report.html.j2").read_text()
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", re.findall(r":root \{(.*?)\}", page, re.DOTALL)[scheme]))
    words = r"[{; ]color: var\(--([\w-]+)\)", r"text\b[^{]*\{[^}]*fill: var\(--([\w-]+)\)"
    of_text = {name for pattern in words for name in re.findall(pattern, page)}
    assert {"ink", "soft", "faint", "warm"} <= of_text
    low = {name: ratio for name in of_text if (ratio := contrast(colours[name], colours["paper"])) < 4.5}
    assert low == {}


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, relative luminance in sRGB)."""

    def luminance(colour: str) -> float:
        channels = [int(colour[start : start + 2], 16) / 255 for start in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)
