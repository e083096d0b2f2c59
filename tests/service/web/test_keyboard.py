"""The way from the list of studies to a downloaded model, by keys alone."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page

from tests.service.api.family import family_study
from tests.service.api.harness import ApiServer
from tests.service.web.driving import Visit, expect

# More than the stops of the Tab key between any two steps of the way.
MAX_STOPS = 60


def tab_to(page: Page, wanted: Locator) -> None:
    """Press Tab until the focus is on `wanted`; fails with the stops that it had instead."""
    expect(wanted).to_be_visible()
    element = wanted.element_handle()
    stops = []
    for _ in range(MAX_STOPS):
        page.keyboard.press("Tab")
        is_reached, stop = element.evaluate(
            "wanted => { const own = document.activeElement; return [wanted === own, own.ariaLabel ?? own.innerText] }"
        )
        if is_reached:
            return
        stops.append(stop)
    raise AssertionError(f"the Tab key does not reach {wanted}, but {stops}")


@pytest.mark.slow
def test_the_whole_way_by_keys(visitor: Visit, server: ApiServer, tmp_path: Path) -> None:
    """Tab, Enter, Home and arrow keys lead from the list to a study, pick a model by sliders, and download it."""
    best = {"math": 1, "text": 2, "lookup": 3}  # each is best at one objective
    study = family_study(server.store, value=lambda number, objective: 0.9 if best[objective] == number else 0.1)
    page = visitor.goto("/studies")
    tab_to(page, page.get_by_role("link", name=study.name, exact=True))
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_be_focused()
    picked = page.get_by_test_id("picked")
    for name in best:
        slider = page.get_by_role("slider", name=f"Importance of {name}")
        tab_to(page, slider)
        if name == "text":
            for _ in range(3):
                page.keyboard.press("ArrowRight")
            expect(slider).to_have_attribute("aria-valuenow", "53")
            expect(picked).to_contain_text("Trial 2,")
        else:
            page.keyboard.press("Home")
            expect(slider).to_have_attribute("aria-valuenow", "0")
    tab_to(page, page.get_by_role("button", name="Export trial 2"))
    page.keyboard.press("Enter")
    tab_to(page, page.get_by_role("status").get_by_role("link", name="exports"))
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/exports$"))
    link = page.get_by_role("link", name="Download the export of trial 2")
    expect(link).to_be_visible(timeout=60_000)
    tab_to(page, link)
    with page.expect_download() as started:
        page.keyboard.press("Enter")
    started.value.save_as(tmp_path / "model.tar")
    with tarfile.open(tmp_path / "model.tar") as tar:
        assert any(each.name.endswith(".safetensors") and each.size > 0 for each in tar)
