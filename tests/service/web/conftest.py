from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Browser

from service.types import JobRecord
from tests.browser import has_browser
from tests.service.api.harness import ApiServer, finished_study
from tests.service.http_server import kept_port
from tests.service.web.driving import Visit, chromium, is_built, visit
from tests.service.web.made import searched_study, write_drawn


@pytest.fixture(scope="module", autouse=True)
def _page_and_browser() -> None:
    """Skip tests of the page without a built page or a browser, except in CI, which has both."""
    if not os.environ.get("CI"):
        if not is_built():
            pytest.skip("the web page is not built: make web")
        if not has_browser():
            pytest.skip("Chromium is not installed")


# Not for the whole session: Playwright's event loop would be that of all later tests in the process.
@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


# Servers at the address of an earlier one find the page's files in the browser's cache, compiled.
@pytest.fixture(scope="package")
def port() -> Iterator[int]:
    """The port of the servers of all modules, which are one after the other."""
    with kept_port() as port:
        yield port


@pytest.fixture(scope="package")
def own_port() -> Iterator[int]:
    """The port of the servers that tests have besides that of the module, one at a time."""
    with kept_port() as port:
        yield port


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, port: int) -> Iterator[ApiServer]:
    """A server that the tests of a module share. A test that adds something must not disturb the others."""
    with ApiServer(Path(tmp_path_factory.mktemp("server")), port=port) as server:
        yield server


@pytest.fixture(scope="module")
def study(server: ApiServer) -> JobRecord:
    """A study that has ended, with sources, published recipes, pruned and failed trials, and held-out values."""
    return finished_study(server.store, num_trials=40, score=write_drawn)


@pytest.fixture(scope="module")
def searched(server: ApiServer) -> JobRecord:
    """A study that has ended, with parameters, texts of samples, two replicas and two driver attempts."""
    return searched_study(server.store)


@pytest.fixture
def visitor(browser: Browser, server: ApiServer) -> Iterator[Visit]:
    """A browser window on the server; the test fails if an error occurs in the page."""
    with visit(browser, server.url) as opened:
        yield opened


@pytest.fixture
def hurried(browser: Browser, server: ApiServer) -> Iterator[Visit]:
    """The same, with timers of seconds that end sooner."""
    with visit(browser, server.url, is_in_a_hurry=True) as opened:
        yield opened


@pytest.fixture(scope="module")
def http(server: ApiServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client
