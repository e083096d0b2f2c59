"""Ladders of brackets and the timeline of replicas, compared with the API's answers."""

from __future__ import annotations

import json
import re
import statistics

import httpx
import pytest

from service.types import JobRecord
from tests.service.api.harness import ApiServer, stored_study
from tests.service.web.driving import Visit, answer, expect, press, signed

BINS = 300


def test_each_rung_has_its_numbers(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """Each rung of each bracket says how many trials entered it, and what became of them."""
    page = visitor.goto(f"/studies/{searched.id}/rungs")
    places = http.get(f"/v1/studies/{searched.id}/plots/rungs").json()["places"]
    assert {place["bracket"] for place in places} == {0, 1, 2}
    for place in places:
        section = page.get_by_role("region", name=f"Bracket {place['bracket']}")
        rung = section.get_by_role("button", name=f"Rung {place['rung']} ")
        expect(rung).to_contain_text(f"{place['samples']} samples")
        expect(rung).to_contain_text(f"{place['entered']} entered")
        for end in ("promoted", "finished", "stopped", "failed"):
            if place[end]:
                expect(rung).to_contain_text(f"{place[end]} {end}")


def test_enter_lists_who_was_stopped(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """Enter at a rung lists its stopped trials with the rule, and those that failed with their reason."""
    page = visitor.goto(f"/studies/{searched.id}/rungs")
    rung = page.get_by_role("region", name="Bracket 1").get_by_role("button", name="Rung 0 ")
    press(rung)
    expect(page).to_have_url(re.compile(r"bracket=1&rung=0"))
    expect(rung).to_have_attribute("aria-expanded", "true")
    query = {"state": "PRUNED", "where": "bracket=1,rung=0"}
    stopped = http.get(f"/v1/studies/{searched.id}/trials", params=query).json()["trials"]
    failed = http.get(f"/v1/studies/{searched.id}/trials?state=FAIL&where=bracket=1").json()["trials"]
    assert stopped
    assert failed
    races = http.get(f"/v1/studies/{searched.id}/plots/races").json()["trials"]
    rules = {each["trial"]: each["rule"] for each in races}
    rows = page.get_by_role("region", name="Trials that ended at rung 0").get_by_role("row")
    expect(rows).to_have_count(1 + len(stopped) + len(failed))
    for row, trial in enumerate([*stopped, *failed], 1):
        expect(rows.nth(row).get_by_role("rowheader")).to_have_text(str(trial["number"]))
        expect(rows.nth(row)).to_contain_text(rules[trial["number"]])
    compared = http.get(f"/v1/studies/{searched.id}/plots/stops?bracket=1&rung=0").json()["trials"]
    assert [each["trial"] for each in compared] == [trial["number"] for trial in stopped]
    for row, each in enumerate(compared, 1):
        expect(rows.nth(row).get_by_role("link", name=str(each["rival"]), exact=True)).to_be_visible()
        lead = each["looks"][-1]["differences"]["mean"]
        low, high = lead["ci95"]
        expect(rows.nth(row)).to_contain_text(f"mean {signed(lead['value'])} {signed(low)} to {signed(high)}")
    rows.nth(1).get_by_role("link", name=f"beside trial {compared[0]['rival']}").click()
    expect(page).to_have_url(re.compile(rf"/trials/{stopped[0]['number']}/samples\?against={compared[0]['rival']}"))


def test_what_is_not_known_of_a_rung_is_said(visitor: Visit, searched: JobRecord) -> None:
    """If failed trials or the rules cannot be read, the table has the stopped trials, and the reason is beside it."""
    visitor.expected = ("507",)
    body = json.dumps({"type": "about:blank", "title": "Insufficient Storage", "status": 507, "detail": "a full disk"})
    paths = (r"*/trials\?state=FAIL*", "*/plots/races")
    succeed = answer(visitor.page, *paths, status=507, content_type="application/problem+json", body=body)
    page = visitor.goto(f"/studies/{searched.id}/rungs?bracket=1&rung=0")
    table = page.get_by_role("region", name="Trials that ended at rung 0")
    expect(table.get_by_role("row").nth(1)).to_be_visible()
    expect(page.get_by_role("alert").filter(has_text="a full disk")).to_have_count(2)
    succeed()
    expect(page.get_by_role("alert")).to_have_count(0)


def test_the_timeline_has_the_shares(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """The busy share of each replica, drivers' attempts and faults are those of the API."""
    page = visitor.goto(f"/studies/{searched.id}/timeline")
    plot = http.get(f"/v1/studies/{searched.id}/plots/timeline?bins={BINS}").json()
    table = page.get_by_role("region", name="Shares of the shown time")
    assert len(plot["replicas"]) == 2
    for name, shares in zip(plot["replicas"], plot["bins"], strict=True):
        row = table.get_by_role("row").filter(has_text=name)
        phases = [statistics.fmean(shares[phase]) for phase in ("merge", "swap", "score", "idle")]
        wanted = [1 - phases[-1], *phases]
        expect(row.get_by_role("cell")).to_have_text([f"{round(100 * share)} %" for share in wanted])
    assert [event["kind"] for event in plot["events"]] == ["attempt", "attempt", "engine_fault"]
    for event in plot["events"]:
        expect(page.get_by_role("listitem").filter(has_text=event["text"])).to_be_visible()
    expect(page.get_by_role("link", name="The study's job in the Ray dashboard")).to_have_attribute(
        "href", http.get(f"/v1/studies/{searched.id}").json()["job"]["dashboard_url"]
    )


def test_a_timeline_is_zoomed_in_the_address(visitor: Visit, searched: JobRecord, http: httpx.Client) -> None:
    """Buttons change the shown time in the address, and the API answers for it."""
    page = visitor.goto(f"/studies/{searched.id}/timeline")
    whole = http.get(f"/v1/studies/{searched.id}/plots/timeline?bins={BINS}").json()
    length = whole["end"] - whole["start"]
    press(page.get_by_role("button", name="Zoom in"))
    expect(page).to_have_url(re.compile("from="))
    query = page.url.partition("?")[2]
    start, end = (float(part.partition("=")[2]) for part in query.split("&"))
    assert start == pytest.approx(whole["start"] + length / 4, abs=0.01)
    assert end == pytest.approx(whole["end"] - length / 4, abs=0.01)
    inner = http.get(f"/v1/studies/{searched.id}/plots/timeline?bins={BINS}&{query}").json()
    busy = 1 - statistics.fmean(inner["bins"][0]["idle"])
    row = page.get_by_role("region", name="Shares of the shown time").get_by_role("row").nth(1)
    expect(row.get_by_role("cell").first).to_have_text(f"{round(100 * busy)} %")
    page.get_by_role("button", name="Whole time").click()
    expect(page).to_have_url(re.compile(r"/timeline$"))
    visitor.goto(f"/studies/{searched.id}/timeline?from={whole['end'] + 60:.0f}&to={whole['end'] + 90:.0f}")
    expect(page.get_by_text("No replica worked between these times.")).to_be_visible()


def test_nothing_yet_is_said(visitor: Visit, server: ApiServer) -> None:
    """A study without trials has no bracket and no scored sample, and says so."""
    waiting = stored_study(server.store, name="waiting")
    page = visitor.goto(f"/studies/{waiting.id}/rungs")
    expect(page.get_by_text("No trial is in a bracket yet")).to_be_visible()
    visitor.goto(f"/studies/{waiting.id}/timeline")
    expect(page.get_by_text("Nothing has been scored yet.")).to_be_visible()
