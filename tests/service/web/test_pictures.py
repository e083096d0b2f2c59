"""Samples of images on the page: pictures, classes and probabilities, compared with what the API answers."""

from __future__ import annotations

import re
from typing import Any, Literal

import httpx
import pytest
from playwright.sync_api import Browser, Route

from service.types import JobRecord
from tests.service.api.harness import ApiServer
from tests.service.pictured import NUM_PICTURES, pictured_study
from tests.service.web.driving import SCHEMES, Visit, axe_violations, check_view, expect, visit

A, B = 1, 2
QUERY = f"split=holdout&objective=text&against={B}"


@pytest.fixture(scope="module")
def pictured(server: ApiServer) -> JobRecord:
    return pictured_study(server.store)


def test_samples_show_pictures_and_predictions(visitor: Visit, pictured: JobRecord, http: httpx.Client) -> None:
    """In place of a prompt there is the picture, and in place of answers the classes with their probabilities."""
    answer = http.get(f"/v1/studies/{pictured.id}/trials/{A}/samples?{QUERY}").json()
    page = visitor.goto(f"/studies/{pictured.id}/trials/{A}/samples?{QUERY}")
    rows = page.locator("ol.samples > li")
    expect(rows).to_have_count(len(answer["samples"]))
    for name in ("both_right", "a_only", "b_only"):
        expect(page.get_by_test_id(name)).to_have_text(str(answer["counts"][name]))
    sample: dict[str, Any] = next(each for each in answer["samples"] if each["a"]["value"] != each["b"]["value"])
    row = rows.nth(sample["position"])
    row.scroll_into_view_if_needed()
    image = row.get_by_role("img", name=f"Image {sample['document']}")
    expect(image).to_have_attribute("src", sample["picture"])
    expect(image).to_have_js_property("naturalWidth", 28)
    expect(row).to_contain_text(f"Class{sample['reference']}")
    expect(row).not_to_contain_text(sample["prompt"])
    for k, side in enumerate("ab"):
        shown = [f"{each['name']} {100 * each['probability']:.1f} %" for each in sample[side]["predictions"]]
        expect(row.locator(".predictions").nth(k).get_by_role("listitem")).to_have_text(shown)
    expect(row.get_by_text(re.compile("^. right$"))).to_have_count(1)
    assert axe_violations(page) == []


def test_missing_pictures_are_said(visitor: Visit, pictured: JobRecord, http: httpx.Client) -> None:
    """A sample without a stored picture says so, with the API's reason; a picture that is lost on its way does too."""
    visitor.expected = ("ERR_FAILED",)
    visitor.page.route("**/pictures/holdout/text/0", lambda route: route.abort())
    page = visitor.goto(f"/studies/{pictured.id}/trials/{A}/samples?{QUERY}")
    rows = page.locator("ol.samples > li")
    expect(rows.nth(0)).to_contain_text("The picture cannot be loaded.")
    rows.nth(NUM_PICTURES).scroll_into_view_if_needed()
    expect(rows.nth(NUM_PICTURES)).to_contain_text("No picture is stored.")
    expect(rows.get_by_text("No picture is stored.")).to_have_count(20 - NUM_PICTURES)
    (reason,) = http.get(f"/v1/studies/{pictured.id}/trials/{A}/samples?{QUERY}").json()["missing"]
    expect(page.get_by_text(reason)).to_be_visible()


def test_a_lost_picture_does_not_hide_others(visitor: Visit, pictured: JobRecord) -> None:
    """The sample at the same place of another objective shows its own picture."""
    visitor.expected = ("ERR_FAILED",)
    visitor.page.route("**/pictures/holdout/text/0", lambda route: route.abort())
    page = visitor.goto(f"/studies/{pictured.id}/trials/{A}/samples?split=holdout&objective=text")
    first = page.locator("ol.samples > li").first
    expect(first).to_contain_text("The picture cannot be loaded.")
    page.get_by_role("combobox", name="Objective").select_option("math")
    expect(first.get_by_role("img")).to_have_js_property("naturalWidth", 28)


def test_images_without_labels_are_not_judged(visitor: Visit, pictured: JobRecord) -> None:
    """Samples without labels have no words, counts or filters about right and wrong, and no empty class."""

    def unlabelled(route: Route) -> None:
        answer = route.fetch().json()
        answer["counts"] = None
        for sample in answer["samples"]:
            sample["reference"] = ""
            for side in "ab":
                sample[side]["is_right"] = None
        route.fulfill(json=answer)

    visitor.page.route("**/v1/studies/*/trials/*/samples?*", unlabelled)
    page = visitor.goto(f"/studies/{pictured.id}/trials/{A}/samples?{QUERY}")
    expect(page.get_by_role("heading", name="Difference")).to_be_visible()
    expect(page.get_by_role("heading", name="Right and wrong")).to_have_count(0)
    rows = page.locator("ol.samples > li")
    expect(rows.first.locator(".predictions")).to_have_count(2)
    expect(rows.get_by_text(re.compile("right|wrong|Class"))).to_have_count(0)
    options = page.get_by_role("combobox", name="Only").get_by_role("option")
    expect(options).to_have_text(["all samples", "different values"])
    page.get_by_role("combobox", name="Only").select_option("differs")
    expect(page).to_have_url(re.compile("only=differs"))
    assert axe_violations(page) == []


def test_samples_with_pictures_are_accessible(browser: Browser, server: ApiServer, pictured: JobRecord) -> None:
    """Light, dark and at 320 px."""
    check_view(browser, server.url, f"/studies/{pictured.id}/trials/{A}/samples?{QUERY}")


def test_the_report_shows_its_pictures(visitor: Visit, pictured: JobRecord) -> None:
    """A report of the server shows pictures, although it may load nothing."""
    page = visitor.goto(f"/v1/studies/{pictured.id}/report")
    image = page.locator("#pictures img").first
    expect(image).to_be_visible()
    expect(image).to_have_js_property("naturalWidth", 28)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_report_with_pictures_is_accessible(
    browser: Browser, server: ApiServer, pictured: JobRecord, http: httpx.Client, scheme: Literal["light", "dark"]
) -> None:
    """Its section with pictures violates no rule of axe, and does not make it scroll sideways at 320 px."""
    with visit(browser, server.url, scheme=scheme) as opened:
        page = opened.page
        page.set_content(http.get(f"/v1/studies/{pictured.id}/report").text)
        assert axe_violations(page, within="#pictures") == []
        page.set_viewport_size({"width": 320, "height": 800})
        page.wait_for_function("document.documentElement.scrollWidth <= window.innerWidth")


def test_the_file_says_what_scores_images(visitor: Visit, pictured: JobRecord, http: httpx.Client) -> None:
    """The study's file names torch as the program that scores it."""
    assert http.get(f"/v1/studies/{pictured.id}/study").json()["engine"]["backend"] == "torch"
    page = visitor.goto(f"/studies/{pictured.id}/file")
    expect(page.get_by_role("main")).to_contain_text("backend: torch")
