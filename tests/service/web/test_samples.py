"""Samples of one trial, or of two trials side by side, compared with the API's answers."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from playwright.sync_api import Locator, Page, Route

from service.types import JobRecord
from tests.service.web.driving import Visit, expect, signed

A, B = 4, 8
QUERY = {"split": "holdout", "objective": "math"}


@pytest.fixture
def answer(http: httpx.Client, searched: JobRecord) -> dict[str, Any]:
    """The API's answer with all samples of the two trials."""
    query: dict[str, Any] = {**QUERY, "against": B, "limit": 500}
    found: dict[str, Any] = http.get(f"/v1/studies/{searched.id}/trials/{A}/samples", params=query).json()
    return found


def open_samples(visitor: Visit, study: JobRecord, more: str = "") -> Page:
    return visitor.goto(f"/studies/{study.id}/trials/{A}/samples?split=holdout&objective=math&against={B}{more}")


def rows(page: Page) -> Locator:
    return page.locator("ol.samples > li")


def test_two_trials_are_side_by_side(visitor: Visit, searched: JobRecord, answer: dict[str, Any]) -> None:
    """Counts, the paired difference with its interval, texts, and right or wrong are those of the API."""
    page = open_samples(visitor, searched)
    for name in ("both_right", "a_only", "b_only", "both_wrong"):
        expect(page.get_by_test_id(name)).to_have_text(str(answer["counts"][name]))
    low, high = answer["difference"]["ci95"]
    said = page.get_by_text(f"trial {A} minus trial {B}")
    expect(said).to_contain_text(signed(answer["difference"]["value"]))
    expect(said).to_contain_text(f"{signed(low)} to {signed(high)}")
    expect(page.get_by_text(f"20 of {answer['total']} samples")).to_be_visible()
    sample = next(each for each in answer["samples"] if each["a"]["value"] != each["b"]["value"])
    row = rows(page).nth(sample["position"])
    expect(row).to_contain_text(f"Sample {sample['position']}")
    expect(row).to_contain_text(sample["reference"])
    expect(row.get_by_text(re.compile("^. right$"))).to_have_count(1)
    expect(row.get_by_text(re.compile("^. wrong$"))).to_have_count(1)


def test_words_of_one_answer_are_marked(visitor: Visit, searched: JobRecord, answer: dict[str, Any]) -> None:
    """In the answers to one sample, the words are marked that the other answer does not have."""
    page = open_samples(visitor, searched)
    sample = next(each for each in answer["samples"] if each["a"]["response"] != each["b"]["response"])
    number = re.compile(r"answer is (\d+)")
    own = [number.findall(sample[side]["response"])[0] for side in "ab"]
    marks = rows(page).nth(sample["position"]).locator("mark")
    expect(marks).to_have_text([own[0], own[0], own[1], own[1]])


def test_a_long_prompt_is_folded(visitor: Visit, searched: JobRecord, answer: dict[str, Any]) -> None:
    """Of a long prompt the end is shown, and the whole is unfolded on demand."""
    page = open_samples(visitor, searched)
    prompt = answer["samples"][4]["prompt"]
    row = rows(page).nth(4)
    expect(row.get_by_text(prompt.strip(), exact=True)).to_be_hidden()
    expect(row.get_by_text(re.compile(r"^….*What is 4 plus 1\?$", re.S))).to_be_visible()
    row.get_by_text(f"Whole prompt, {len(prompt)} characters").click()
    expect(row.get_by_text(prompt.strip(), exact=True)).to_be_visible()


def test_samples_are_filtered(visitor: Visit, searched: JobRecord, http: httpx.Client, answer: dict[str, Any]) -> None:
    """The filter is in the address; the samples are those that the API selects, the counts those of all samples."""
    page = open_samples(visitor, searched)
    for only in ("differs", "a_only", "b_only", "both_wrong"):
        query: dict[str, Any] = {**QUERY, "against": B, "only": only}
        wanted = http.get(f"/v1/studies/{searched.id}/trials/{A}/samples", params=query).json()
        page.get_by_role("combobox", name="Only").select_option(only)
        expect(page).to_have_url(re.compile(f"only={only}"))
        expect(page.get_by_text(f"of {wanted['total']} samples")).to_be_visible()
        expect(rows(page).first).to_contain_text(f"Sample {wanted['samples'][0]['position']}")
        expect(page.get_by_test_id("both_right")).to_have_text(str(answer["counts"]["both_right"]))


def test_keys_step_and_flip(visitor: Visit, searched: JobRecord, answer: dict[str, Any]) -> None:
    """The keys j and k step through the samples, loading more at the end; f flips the trials and the filter."""
    page = open_samples(visitor, searched)
    expect(rows(page)).to_have_count(20)
    page.keyboard.press("j")
    expect(rows(page).nth(0)).to_be_focused()
    page.keyboard.press("j")
    expect(rows(page).nth(1)).to_be_focused()
    page.keyboard.press("k")
    expect(rows(page).nth(0)).to_be_focused()
    rows(page).nth(19).focus()
    page.keyboard.press("j")
    expect(rows(page).nth(20)).to_be_focused()
    expect(rows(page)).to_have_count(40)
    page.get_by_role("combobox", name="Only").select_option("a_only")
    expect(page).to_have_url(re.compile("only=a_only"))
    rows(page).nth(0).focus()
    page.keyboard.press("f")
    expect(page).to_have_url(re.compile(rf"/trials/{B}/samples.*against={A}.*only=b_only"))
    expect(page.get_by_test_id("a_only")).to_have_text(str(answer["counts"]["b_only"]))


def test_keys_do_nothing_in_fields_or_if_off(visitor: Visit, searched: JobRecord) -> None:
    """A key that is typed into a field does nothing else; without the keys, buttons do the same."""
    page = open_samples(visitor, searched)
    expect(rows(page)).to_have_count(20)
    page.get_by_role("textbox", name="Against trial").press("j")
    expect(page.get_by_role("textbox", name="Against trial")).to_be_focused()
    open_samples(visitor, searched)
    page.get_by_role("checkbox", name="Keys").uncheck()
    page.get_by_role("button", name="Flip the trials").focus()
    page.keyboard.press("j")
    expect(page.get_by_role("button", name="Flip the trials")).to_be_focused()
    page.get_by_role("button", name="Flip the trials").click()
    expect(page).to_have_url(re.compile(rf"/trials/{B}/samples.*against={A}"))
    page.get_by_role("checkbox", name="Keys").check()
    expect(page.get_by_role("checkbox", name="Keys")).to_be_focused()
    page.keyboard.press("j")
    expect(rows(page).nth(0)).to_be_focused()


def test_the_other_trial_is_chosen_by_its_number(visitor: Visit, searched: JobRecord) -> None:
    """A number typed into the field is in the address; other texts are refused beside it, unknown trials by the API."""
    page = visitor.goto(f"/studies/{searched.id}/trials/{A}/samples?split=holdout")
    expect(rows(page).first).to_contain_text(f"Trial {A}")
    expect(page.get_by_role("heading", name="Right and wrong")).to_have_count(0)
    field = page.get_by_role("textbox", name="Against trial")
    field.fill(str(B))
    expect(page.get_by_role("heading", name="Right and wrong")).to_be_visible()
    expect(page).to_have_url(re.compile(f"against={B}"))
    field.fill("the best")
    expect(page.get_by_text("Give the number of a trial.")).to_be_visible()
    visitor.expected = ("404",)
    field.fill("99999")
    expect(page.get_by_role("alert")).to_contain_text("trial 99999")


def test_numbers_are_those_of_the_samples(visitor: Visit, searched: JobRecord) -> None:
    """While the samples against another trial are loaded, those before keep the number of their trial."""
    page = open_samples(visitor, searched)
    expect(rows(page).first).to_contain_text(f"Trial {B}")
    held: list[Route] = []
    page.route("**/samples?*against=3*", lambda route: held.append(route))
    with page.expect_request("**/samples?*against=3*"):
        page.get_by_role("textbox", name="Against trial").fill("3")
    expect(page).to_have_url(re.compile("against=3"))
    expect(page.get_by_role("combobox", name="Only").get_by_role("option").last).to_have_text("both are wrong")
    expect(rows(page).first).to_contain_text(f"Trial {B}")
    expect(rows(page).get_by_text("Trial 3", exact=True)).to_have_count(0)
    for route in held:
        route.continue_()
    expect(rows(page).first).to_contain_text("Trial 3")


def test_missing_samples_and_texts_are_said(visitor: Visit, study: JobRecord, http: httpx.Client) -> None:
    """Without samples, and without prompts, the page says so, with the API's reason."""
    stopped = http.get(f"/v1/studies/{study.id}/trials?state=PRUNED&limit=1").json()["trials"][0]["number"]
    page = visitor.goto(f"/studies/{study.id}/trials/{stopped}/samples")
    expect(page.get_by_text("No sample of the data of the search was scored for this trial.")).to_be_visible()
    found = http.get(f"/v1/studies/{study.id}/trials/0/samples?split=holdout").json()
    assert found["missing"]
    visitor.goto(f"/studies/{study.id}/trials/0/samples?split=holdout")
    expect(page.get_by_text(found["missing"][0])).to_be_visible()
