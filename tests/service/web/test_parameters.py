"""Parallel coordinates, importances and slices of parameters, compared with the API's answers."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest

from service.types import JobRecord
from tests.service.api.harness import ApiServer, stored_study
from tests.service.web.driving import Visit, check_shown, expect, press, wait_until
from tests.service.web.made import CONSTANT, searched_study

AXES = "samples,value.math,parameter.g0.method,parameter.g1.ties.k"
# Milliseconds; a new process imports Optuna.
FIRST_IMPORTANCE_MS = 60_000


@pytest.fixture(scope="module")
def full(server: ApiServer) -> JobRecord:
    """A study with enough trials at full budget for importances."""
    return searched_study(server.store, num_full=60, name="full")


def total(http: httpx.Client, study: JobRecord, *conditions: str) -> int:
    query: dict[str, Any] = {"origin": "search", "where": ",".join(("rung>=0", *conditions)), "limit": 1}
    found: int = http.get(f"/v1/studies/{study.id}/trials", params=query).json()["total"]
    return found


def test_importances_are_those_of_the_api(visitor: Visit, full: JobRecord, http: httpx.Client) -> None:
    """The bars are the API's importances, also summed by expert; the most important parameters are axes."""
    page = visitor.goto(f"/studies/{full.id}/parameters?objective=text")
    figure = page.get_by_role("figure", name="Importance for text by parameter")
    expect(figure).to_be_visible(timeout=FIRST_IMPORTANCE_MS)
    plot = http.get(f"/v1/studies/{full.id}/plots/importance?objective=text").json()
    figure.get_by_text("Show as table").click()
    for place, each in enumerate(plot["parameters"][:3], 1):
        expect(figure.get_by_role("row").nth(place)).to_have_text(f"{each['name']}{each['importance']:.3f}")
        expect(page.get_by_role("slider", name=f"{each['name']}, lowest")).to_be_visible()
    page.get_by_role("combobox", name="Bars").select_option("experts")
    table = page.get_by_role("figure", name="Importance for text summed by expert")
    expect(table).to_contain_text(f"{plot['experts'][0]['importance']:.3f}")


# The pixels of the first chart of a figure that have the accent colour.
BLUE = """figure => {
  const canvas = figure.querySelector('canvas')
  const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height)
  let found = 0
  for (let k = 0; k < data.length; k += 4) found += data[k] === 0x2f && data[k + 1] === 0x5f && data[k + 2] === 0xa8
  return found
}"""


def test_a_narrow_chart_has_room_for_its_bars(visitor: Visit, full: JobRecord) -> None:
    """At 320 px the names of parameters are cut, not the bars of their importances."""
    page = visitor.goto(f"/studies/{full.id}/parameters?objective=text")
    figure = page.get_by_role("figure", name="Importance for text by parameter")
    expect(figure).to_be_visible(timeout=FIRST_IMPORTANCE_MS)
    page.set_viewport_size({"width": 320, "height": 800})
    wait_until(page, "document.querySelector('#importance ~ figure canvas').clientWidth < 320")
    wait_until(page, f"({BLUE})(document.querySelector('#importance ~ figure')) > 1000")


def test_sliders_filter_the_trials(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """Keys move a range; the number of trials, and the table of trials behind the link, are those in it."""
    page = visitor.goto(f"/studies/{searched.id}/parameters?axes={AXES}")
    number = total(http, searched)
    expect(page.get_by_text(f"{number} of {number} trials are within all ranges")).to_be_visible()
    highest = http.get(f"/v1/studies/{searched.id}/trials/columns?fields=samples").json()["columns"]["samples"]
    page.get_by_role("slider", name="samples, lowest").press("End")
    left = total(http, searched, f"samples>={max(each for each in highest if each is not None)}")
    assert 0 < left < number
    expect(page.get_by_text(f"{left} of {number} trials are within all ranges")).to_be_visible()
    page.get_by_role("slider", name="g0.method, highest").press("Home")
    both = total(http, searched, "samples>=810", "parameter.g0.method=task_arithmetic")
    expect(page.get_by_text(f"{both} of {number} trials are within all ranges")).to_be_visible()
    page.get_by_text("These trials", exact=True).click()
    expect(page.get_by_role("region", name="Kept trials").get_by_role("row")).to_have_count(both + 1)
    page.get_by_role("link", name="These trials in the table").click()
    expect(page.get_by_text(f"{both} trials", exact=True)).to_be_visible()


def test_ranges_are_those_of_the_history_and_the_front(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """The address has the ranges, which the overview follows until they are cleared: its charts say how many trials."""
    page = visitor.goto(f"/studies/{searched.id}/parameters?axes={AXES}")
    page.get_by_role("slider", name="samples, lowest").press("End")
    page.get_by_role("slider", name="g0.method, highest").press("Home")
    left = total(http, searched, "samples>=810", "parameter.g0.method=task_arithmetic")
    words = f"{left} of {total(http, searched)} proposed trials are in the selected ranges"
    page.get_by_role("link", name="These trials in the history and the front").click()
    expect(page.get_by_role("status").filter(has_text=words)).to_contain_text(
        "(samples 810; g0.method task_arithmetic)"
    )
    assert "ranges=samples" in page.url
    expect(page.get_by_test_id("picked")).to_contain_text("Trial")
    charts = ("every trial", "the trials at full budget")
    columns = http.get(f"/v1/studies/{searched.id}/trials/columns?fields=number,origin,rung").json()["columns"]
    baselines = [origin in ("source", "published") for origin in columns["origin"]]
    for chart in charts:
        figure = page.get_by_role("figure", name=re.compile(chart))
        expect(figure.get_by_role("img")).to_have_attribute("aria-label", re.compile(re.escape(words)))
        figure.get_by_text("Show as table").press("Enter")
        expect(figure.get_by_role("row")).to_have_count(1 + left + sum(baselines))
    check_shown(page)
    press(page.get_by_role("button", name="Clear the ranges"))
    expect(page.get_by_text("All trials are shown.")).to_be_visible()
    assert "ranges" not in page.url
    for chart in charts:
        expect(page.get_by_role("img", name=re.compile(chart))).not_to_have_attribute(
            "aria-label", re.compile("ranges")
        )


def test_axes_are_chosen_in_the_address(visitor: Visit, searched: JobRecord) -> None:
    """Axes are chosen from a list; categories have names, and a parameter that never changes is left out."""
    page = visitor.goto(f"/studies/{searched.id}/parameters?axes={AXES},parameter.{CONSTANT}")
    expect(page.get_by_text(f"all trials have the same value: {CONSTANT}")).to_be_visible()
    thumb = page.get_by_role("slider", name="g0.method, highest")
    expect(thumb).to_have_attribute("aria-valuetext", "ties")
    expect(page.get_by_role("slider", name="g1.ties.k, lowest")).to_have_attribute(
        "aria-valuetext", re.compile("^0.000")
    )
    page.get_by_text("Choose the axes").click()
    page.get_by_role("textbox", name="Search the axes").fill("steps")
    page.get_by_role("checkbox", name="g1.steps").check()
    expect(page.get_by_role("slider", name="g1.steps, highest")).to_have_attribute("aria-valuetext", "5")
    assert "parameter.g1.steps" in page.url
    page.get_by_role("slider", name="g1.steps, lowest").press("ArrowUp")
    expect(page.get_by_role("slider", name="g1.steps, lowest")).to_have_attribute("aria-valuetext", "2")
    page.get_by_role("button", name="Reset the ranges").click()
    expect(page.get_by_role("slider", name="g1.steps, lowest")).to_have_attribute("aria-valuetext", "1")


def test_what_is_shown_first_differs(visitor: Visit, searched: JobRecord) -> None:
    """Without importances, the first axes and the first slice are parameters that differ between trials."""
    page = visitor.goto(f"/studies/{searched.id}/parameters")
    expect(page.get_by_role("slider", name="g1.ties.k, lowest")).to_be_visible()
    expect(page.get_by_role("combobox", name="Parameter")).to_have_value("g0.method")
    expect(page.get_by_role("figure", name="math against g0.method")).to_be_visible()
    expect(page.get_by_text("all trials have the same value")).to_have_count(0)


def test_a_slice_has_all_trials(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """One parameter against the objective: a point for each trial; arrow keys step, and Enter opens a trial."""
    page = visitor.goto(f"/studies/{searched.id}/parameters?axes={AXES}")
    page.get_by_role("combobox", name="Parameter").select_option("g1.ties.k")
    assert "against=g1.ties.k" in page.url
    query: dict[str, Any] = {"origin": "search", "sort": "-samples", "limit": 1}
    first = http.get(f"/v1/studies/{searched.id}/trials", params=query).json()["trials"][0]
    figure = page.get_by_role("figure", name="math against g1.ties.k")
    expect(figure.get_by_role("img")).to_have_attribute("aria-label", re.compile(f"{total(http, searched)} trials"))
    figure.get_by_text("Show as table").click()
    row = figure.get_by_role("row").filter(has=page.get_by_role("cell", name=str(first["number"]), exact=True))
    expect(row).to_contain_text(f"{first['values']['math']:.3f}")
    chart = figure.get_by_role("group", name="arrow keys")
    chart.press("ArrowRight")
    expect(figure.get_by_role("status")).to_contain_text("on 810 samples")
    chart.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(re.compile(r"Trial \d+"))


def test_too_few_trials_are_said(visitor: Visit, server: ApiServer, searched: JobRecord, http: httpx.Client) -> None:
    """Below 50 trials at full budget the API's reason is shown; a study without trials says that it has none."""
    reason = http.get(f"/v1/studies/{searched.id}/plots/importance").json()["reason"]
    page = visitor.goto(f"/studies/{searched.id}/parameters?axes={AXES}")
    expect(page.get_by_text(f"No importances: {reason}.")).to_be_visible()
    waiting = stored_study(server.store, name="waiting")
    visitor.goto(f"/studies/{waiting.id}/parameters")
    expect(page.get_by_text("No proposed trial has parameters yet.")).to_be_visible()
