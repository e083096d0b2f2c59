"""Comparisons of two trials and of two studies on the page, checked against the API's answers."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, Route

from service.types import JobRecord
from tests.service.api.harness import ApiServer, stored_study
from tests.service.web.driving import Visit, expect, signed

A, B = 3, 8


def open_pair(visitor: Visit, study: JobRecord, a: int = A, b: int = B) -> Page:
    return visitor.goto(f"/studies/{study.id}/compare?trials={a},{b}")


def test_differences_are_paired(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """Each objective has the values and the paired difference of held-out data, with intervals."""
    page = open_pair(visitor, searched)
    table = page.get_by_role("region", name="Values of the two trials")
    summary = http.get(f"/v1/studies/{searched.id}/summary").json()
    held = {row["trial"]: row["values"] for row in summary["holdout"]}
    for name in ("math", "text", "lookup"):
        query: dict[str, Any] = {"objective": name, "split": "holdout", "against": B, "limit": 1}
        wanted = http.get(f"/v1/studies/{searched.id}/trials/{A}/samples", params=query).json()["difference"]
        row = table.get_by_role("row").filter(has_text=f"{name} larger is better")
        low, high = wanted["ci95"]
        expect(row).to_contain_text(f"{signed(wanted['value'])} {signed(low)} to {signed(high)}")
        for trial in (A, B):
            expect(row).to_contain_text(f"{held[trial][name]['value']:.3f}")
        expect(row).to_contain_text("held-out")
    table.get_by_role("link", name="side by side: samples of text").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Samples")
    expect(page).to_have_url(re.compile(rf"/trials/{A}/samples\?objective=text&split=holdout&against={B}"))


def test_no_difference_of_other_trials(visitor: Visit, searched: JobRecord) -> None:
    """While the difference of two trials is loaded, that of the trials before is not shown under their numbers."""
    page = open_pair(visitor, searched)
    row = page.get_by_role("region", name="Values of the two trials").get_by_role("row").filter(has_text="math larger")
    cell = row.get_by_role("cell").nth(2)
    expect(cell).to_have_text(re.compile(r"[+−]0\.\d+ .* to "))
    held: list[Route] = []
    page.route("**/samples?*against=4*", lambda route: held.append(route))
    page.get_by_role("textbox", name="Against trial").fill("4")
    page.get_by_role("textbox", name="Against trial").press("Enter")
    expect(page.get_by_role("columnheader", name=f"trial {A} minus trial 4")).to_be_visible()
    expect(cell).to_have_text("")
    for route in held:
        route.continue_()
    expect(cell).to_have_text(re.compile(r"[+−]0\.\d+ .* to "))


def test_coefficients_are_subtracted(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """The heat map's table has both coefficients of each place, and their difference."""

    def coefficients(trial: int) -> dict[tuple[str, int | None, str], float]:
        found = http.get(f"/v1/studies/{searched.id}/trials/{trial}/plots/coefficients").json()["values"]
        return {(each["expert"], each["layer"], each["part"]): each["value"] for each in found}

    a, b = coefficients(4), coefficients(B)  # the average, and TIES
    place = ("math", 3, "mlp")
    assert a[place] != b[place]
    page = open_pair(visitor, searched, 4, B)
    expect(page.get_by_text("A place has the colour of the trial whose coefficient is larger")).to_be_visible()
    figure = page.get_by_role("figure", name=f"Coefficients of trial 4 minus those of trial {B}")
    figure.get_by_text("Show as table").click()
    row = figure.get_by_role("row").filter(has_text="math mlp").nth(3)
    expect(row.get_by_role("cell")).to_have_text(
        ["math mlp", "3", f"{a[place]:.3f}", f"{b[place]:.3f}", signed(a[place] - b[place])]
    )


def test_trials_are_picked_by_keyboard(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """By default the best two trials are compared; Enter in a field compares the trials whose numbers are typed."""
    summary = http.get(f"/v1/studies/{searched.id}/summary").json()
    best, rows = summary["holdout_reference"], summary["holdout"]
    others = {row["trial"]: row["mean"]["value"] for row in rows if row["trial"] != best}
    following = max(others, key=lambda trial: others[trial])
    assert following != rows[0]["trial"], "it is not merely the first one"
    page = visitor.goto(f"/studies/{searched.id}/compare")
    expect(page.get_by_role("textbox", name="Trial", exact=True)).to_have_value(str(best))
    expect(page.get_by_role("textbox", name="Against trial")).to_have_value(str(following))
    page.get_by_role("textbox", name="Trial", exact=True).fill("1")
    page.get_by_role("textbox", name="Against trial").fill("2")
    page.get_by_role("textbox", name="Against trial").press("Enter")
    expect(page.get_by_role("columnheader", name="trial 1 minus trial 2")).to_be_visible()
    assert "trials=1%2C2" in page.url
    page.get_by_role("textbox", name="Trial", exact=True).fill("one")
    expect(page.get_by_text("Give a number.")).to_be_visible()


def test_trials_without_held_out_values(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Without held-out values the values are those of the search; without samples there is no difference."""
    trials = http.get(f"/v1/studies/{study.id}/trials", params={"state": "PRUNED", "limit": 2}).json()["trials"]
    a, b = trials
    page = open_pair(visitor, study, a["number"], b["number"])
    row = page.get_by_role("region", name="Values of the two trials").get_by_role("row").filter(has_text="math")
    expect(row).to_contain_text(f"{a['rungs'][-1]['values']['math']:.3f}")
    expect(row).to_contain_text("none: no sample is stored for both")
    expect(row).to_contain_text("search")


@pytest.fixture(scope="module")
def other(server: ApiServer, study: JobRecord) -> JobRecord:
    """The other study of a comparison."""
    return study


def test_two_studies(visitor: Visit, searched: JobRecord, other: JobRecord, http: httpx.Client) -> None:
    """Another study is chosen in a list; the best trials so far are over the samples that were scored until then."""
    page = visitor.goto(f"/studies/{searched.id}/compare")
    page.get_by_role("combobox", name="Another study").select_option(other.id)
    assert f"with={other.id}" in page.url
    table = page.get_by_role("region", name="Best trials of both studies on held-out data")
    for study in (searched, other):
        summary = http.get(f"/v1/studies/{study.id}/summary").json()
        best = next(row for row in summary["holdout"] if row["trial"] == summary["holdout_reference"])
        row = table.get_by_role("row").filter(has_text=study.name)
        low, high = best["values"]["math"]["ci95"]
        expect(row).to_contain_text(f"{best['values']['math']['value']:.3f} {low:.3f} to {high:.3f}")
    record = http.get(f"/v1/studies/{other.id}/plots/history").json()["series"][0]["record"][-1]
    columns = http.get(f"/v1/studies/{other.id}/trials/columns?fields=number,samples_scored").json()["columns"]
    trials = zip(columns["number"], columns["samples_scored"], strict=True)
    spent = sum(samples for number, samples in trials if number <= record["trial"])
    figure = page.get_by_role("figure", name="Best mean at full budget")
    figure.get_by_text("Show as table").click()
    row = figure.get_by_role("row").filter(has_text=other.id[:8]).nth(-2)  # the last one is where the study ended
    expect(row).to_contain_text(f"{record['trial']}{spent:,}{record['value']:.3f}")


def test_nothing_to_compare_is_said(visitor: Visit, server: ApiServer, searched: JobRecord) -> None:
    """A study without trials asks for trials, and one without values says so."""
    waiting = stored_study(server.store, name="waiting")
    page = visitor.goto(f"/studies/{waiting.id}/compare?with={searched.id}")
    expect(page.get_by_text("Give the numbers of two trials.")).to_be_visible()
    expect(page.get_by_text("none scored")).to_be_visible()
    best = page.get_by_role("figure", name="Best mean at full budget").get_by_role("img")
    expect(best).to_have_attribute("aria-label", re.compile(r"waiting \(this study\): no trial at full budget"))
