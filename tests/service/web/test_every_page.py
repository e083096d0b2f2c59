"""Requirements of every address of the page: accessibility, 320 px without overflow, no other origins, a prefix."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal
from urllib.parse import urljoin

import pytest
from playwright.sync_api import Browser, Route

from service.store.exports import ExportStore
from service.types import ExportRecord, ExportState, JobRecord
from tests.service.api.harness import ApiServer, finished_study
from tests.service.http_server import HttpServer
from tests.service.pictured import pictured_study
from tests.service.web.driving import (
    HEIGHT,
    SCHEMES,
    WIDTH,
    Visit,
    check_shown,
    expect,
    navigate,
    settle,
    visit,
)
from tests.service.web.made import CONSTANT

# Addresses of all views with their titles in the browser's tab; ID is a study that has ended. The views of a walk are
# shown one after the other in one window. Neighbours have different titles.
WALKS = {
    "a study": {
        "/studies/ID/trials": "Trials",
        "/studies/ID": "searched",
        "/studies/ID/events": "Events",
        "/studies/ID/log": "Log",
        "/studies/ID/file": "File",
        "/studies/ID/exports": "Exports",
        "/studies/ID/trials?columns=trial,label,math,recipe,time&at=30": "Trials",
    },
    "comparisons": {
        "/studies/ID/parameters": "Parameters",
        "/studies/ID/compare": "Compare",
        f"/studies/ID/parameters?axes=value.math,value.text,parameter.{CONSTANT}": "Parameters",
        "/studies/ID/rungs?bracket=0&rung=0": "Rungs",
        "/studies/ID/timeline": "Timeline",
        "/studies/ID/benchmarks": "Benchmarks",
    },
    "trials": {
        "/studies/ID/trials/5": "Trial 5",
        "/studies/ID/trials/0/samples?split=holdout": "Samples",
        "/studies/ID/trials/1": "Trial 1",
        "/studies/ID/trials/0/samples?split=holdout&against=1": "Samples",
        "/studies/new?recipe=ID/5": "Enqueue a merge",
    },
    "editors": {
        "/studies/new": "New study",
        "/finetunes/new": "New fine-tuning",
        "/studies/new?example=lfs": "New study",
    },
    "the server": {
        "/studies": "Studies",
        "/finetunes": "Fine-tunings",
        "/queue": "Queue",
        "/settings": "Settings",
        "/teams": "Teams",
        "/login": "Log in",
        "/admin/cluster": "Cluster",
    },
}


@pytest.mark.parametrize("walk", WALKS)
def test_views_are_accessible(visitor: Visit, searched: JobRecord, walk: str) -> None:
    """Each view, light and dark, violates no rule of axe, and does not scroll sideways at 320 px."""
    page = visitor.page
    for number, (address, title) in enumerate(WALKS[walk].items()):
        path = address.replace("ID", searched.id)
        if number == 0:
            visitor.goto(path)
        else:
            page.set_viewport_size({"width": WIDTH, "height": HEIGHT})
            navigate(page, path, title)
        settle(page)
        check_shown(page)


PREFIX = "/team/merge"


class BehindProxy(ApiServer):
    """An ApiServer behind a proxy that removes the prefix `PREFIX`, of which the server knows nothing."""

    def __enter__(self) -> BehindProxy:
        async def forwarded(scope: Any, receive: Any, send: Any) -> None:
            if scope["type"] == "http":
                path = scope["path"].removeprefix(PREFIX) if scope["path"].startswith(f"{PREFIX}/") else "/v1/nowhere"
                scope = {**scope, "path": path, "raw_path": path.encode()}
            await self.app(scope, receive, send)

        self._http = HttpServer(lambda: forwarded, grace_s=1, port=self.port)
        self.url = self._http.url
        self.start()
        return self


@pytest.fixture(scope="module", params=["kept", "removed"])
def below(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, own_port: int
) -> Iterator[ApiServer]:
    """A server below `PREFIX`, which the proxy has kept in requests or removed from them."""
    data_dir = tmp_path_factory.mktemp("below")
    if request.param == "kept":
        server = ApiServer(data_dir, prefix=PREFIX, port=own_port)
    else:
        server = BehindProxy(data_dir, port=own_port)
    with server:
        yield server


def test_below_a_prefix(browser: Browser, below: ApiServer) -> None:
    """Below a proxy's path prefix, every request and every link has the prefix."""
    study = finished_study(below.store)
    below.store.record_submission(study.id, 1)
    with visit(browser, below.url) as opened:
        page = opened.goto(f"{PREFIX}/studies/{study.id}")
        page.get_by_test_id("picked").wait_for()
        page.get_by_role("link", name="Trials", exact=True).click()
        expect(page.get_by_role("region", name="Trials").get_by_role("row").nth(1)).to_be_visible()
        assert page.url == f"{below.url}{PREFIX}/studies/{study.id}/trials"
        page.get_by_role("link", name="Timeline", exact=True).click()
        link = page.get_by_role("link", name="The study's job in the Ray dashboard")
        expect(link).to_have_attribute("href", re.compile(f"^{PREFIX}/ray/#/jobs/"))
        assert [path for path in opened.requests if not path.startswith(f"{PREFIX}/")] == []


def test_files_below_a_prefix(browser: Browser, below: ApiServer) -> None:
    """Pictures and exports are loaded with a proxy's path prefix."""
    study = pictured_study(below.store)
    record = ExportRecord(study.id, study.id, 3, "bfloat16", ExportState.COMPLETE, created_at=1.7e9)
    ExportStore(below.store).add_export(record)
    directory = below.app.state.services.exports.directory(record)
    directory.mkdir(parents=True)
    (directory / "model.safetensors").write_bytes(b"weights")
    with visit(browser, below.url) as opened:
        page = opened.goto(f"{PREFIX}/studies/{study.id}/trials/1/samples?split=holdout&objective=text")
        expect(page.locator("ol.samples img").first).to_have_js_property("naturalWidth", 28)
        opened.goto(f"{PREFIX}/studies/{study.id}/exports")
        table = page.get_by_role("region", name="Exports of the study")
        with page.expect_download() as started:
            table.get_by_role("link", name="Download the export of trial 3").click()
        assert started.value.url == f"{below.url}{PREFIX}/v1/studies/{study.id}/exports/{record.id}/download"
        assert started.value.failure() is None

        def existing(route: Route) -> None:
            (export,) = route.fetch(method="GET").json()["exports"]
            route.fulfill(json=export)

        page.route("**/exports", lambda route: existing(route) if route.request.method == "POST" else route.continue_())
        page.get_by_role("button", name="Begin").click()
        link = page.get_by_role("link", name="download", exact=True)
        assert urljoin(page.url, link.get_attribute("href") or "") == started.value.url
        assert [path for path in opened.requests if not path.startswith(f"{PREFIX}/")] == []


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
