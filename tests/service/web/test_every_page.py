"""Requirements of every address of the page: accessibility, 320 px without overflow, no other origins, a prefix."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest
from playwright.sync_api import Browser, expect

from service.types import JobRecord
from tests.service.api.harness import ApiServer, finished_study
from tests.service.web.driving import SCHEMES, check_view, visit
from tests.service.web.made import CONSTANT

# Addresses of all views; ID is a study that has ended.
ADDRESSES = (
    "/studies",
    "/studies/ID",
    "/studies/ID/trials",
    "/studies/ID/trials/5",
    "/queue",
    "/settings",
    "/teams",
    "/login",
    "/studies/ID/events",
    "/studies/ID/log",
    "/studies/ID/file",
    "/studies/new",
    "/studies/new?recipe=ID/5",
    "/studies/ID/trials/1",
    "/studies/ID/exports",
    "/studies/ID/trials/0/samples?split=holdout",
    "/studies/ID/trials/0/samples?split=holdout&against=1",
    "/studies/ID/compare",
    "/studies/ID/parameters",
    f"/studies/ID/parameters?axes=value.math,value.text,parameter.{CONSTANT}",
    "/studies/ID/rungs?bracket=0&rung=0",
    "/studies/ID/timeline",
    "/studies/ID/benchmarks",
    "/finetunes",
    "/finetunes/new",
    "/admin/cluster",
    "/studies/new?example=lfs",
    "/studies/ID/trials?columns=trial,label,math,recipe,time&at=30",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_a_view_is_accessible(browser: Browser, server: ApiServer, searched: JobRecord, address: str) -> None:
    """Each view, light and dark, violates no rule of axe, and does not scroll sideways at 320 px."""
    check_view(browser, server.url, address.replace("ID", searched.id))


def test_below_a_prefix(browser: Browser, tmp_path: Path) -> None:
    """Below a proxy's path prefix, every request and every link has the prefix."""
    with ApiServer(tmp_path, prefix="/team/merge") as server:
        study = finished_study(server.store)
        with visit(browser, server.url) as opened:
            page = opened.goto(f"/team/merge/studies/{study.id}")
            page.get_by_test_id("picked").wait_for()
            page.get_by_role("link", name="Trials", exact=True).click()
            expect(page.get_by_role("region", name="Trials").get_by_role("row").nth(1)).to_be_visible()
            assert page.url == f"{server.url}/team/merge/studies/{study.id}/trials"
            assert [path for path in opened.requests if not path.startswith("/team/merge/")] == []


@pytest.mark.parametrize("scheme", SCHEMES)
def test_colours_follow_the_system(browser: Browser, server: ApiServer, scheme: Literal["light", "dark"]) -> None:
    """The page begins in the colours of the system, and a switch changes them."""
    with visit(browser, server.url, scheme=scheme) as opened:
        page = opened.goto("/studies")
        root = page.locator("html")
        expect(root).to_have_attribute("data-mantine-color-scheme", scheme)
        other = "dark" if scheme == "light" else "light"
        page.get_by_role("button", name=f"Use {other} colours").click()
        expect(root).to_have_attribute("data-mantine-color-scheme", other)
