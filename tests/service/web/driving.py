"""Chromium driven by Playwright. Every page is checked for console errors and requests to other origins."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Locator, Page, Request, expect, sync_playwright

from service.web.pages import STATIC
from tests.browser import browser_path

__all__ = [
    "APP",
    "SCHEMES",
    "Visit",
    "axe_violations",
    "check_view",
    "chromium",
    "is_built",
    "press",
    "screenshot",
    "signed",
    "visit",
    "wait_until",
]

APP = STATIC.parent / "app"
AXE = APP / "node_modules" / "axe-core" / "axe.min.js"
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Rules of accessibility that are checked: WCAG 2.2 AA and axe's own.
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")


def is_built() -> bool:
    """Whether `make web` has built the page."""
    return (STATIC / "index.html").is_file()


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser without a window. While it is open, its thread cannot run another event loop."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path(), args=list(ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def press(control: Locator, key: str = "Enter") -> None:
    """Presses a key at a control once it is enabled: unlike `click`, `Locator.press` does not wait for that."""
    expect(control).to_be_enabled()
    control.press(key)


class Visit:
    """A browser window on the page of a server, with the errors that occurred in it.

    - `page`: the first tab
    - `context`: the browser's profile, for further tabs
    - `expected`: texts of console messages that the test provokes, such as the status of a refused request
    - `allowed`: other origins that the test opens, such as that of an identity provider
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.context = context
        self.url = url
        self.expected: tuple[str, ...] = ()
        self.allowed: tuple[str, ...] = ()
        self._errors: list[str] = []
        self._requests: list[str] = []
        context.on("page", self._follow)
        self.page = context.new_page()

    def _follow(self, page: Page) -> None:
        def console(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                self._errors.append(f"{message.type}: {message.text}")

        def request(sent: Request) -> None:
            self._requests.append(sent.url)

        page.on("console", console)
        page.on("pageerror", lambda error: self._errors.append(f"exception: {error}"))
        page.on("request", request)
        page.set_default_timeout(20_000)

    def goto(self, path: str) -> Page:
        """Open an address of the page in the first tab."""
        self.page.goto(self.url + path)
        return self.page

    def problems(self) -> list[str]:
        """Console errors and exceptions so far, and requests to other origins."""
        unexpected = [error for error in self._errors if not any(text in error for text in self.expected)]
        own = (self.url, "data:", "blob:", *self.allowed)
        return unexpected + [f"request to {url}" for url in self._requests if not url.startswith(own)]

    @property
    def requests(self) -> list[str]:
        """Paths of all requests so far."""
        return [url.removeprefix(self.url) for url in self._requests]


@contextmanager
def visit(
    browser: Browser,
    url: str,
    *,
    scheme: Literal["light", "dark"] = "light",
    width: int = 1280,
    height: int = 900,
    **options: Any,
) -> Iterator[Visit]:
    """A window on the server at `url`; fails at its end if an error occurred in it."""
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, accept_downloads=True, **options
    )
    try:
        opened = Visit(context, url)
        yield opened
        assert not (problems := opened.problems()), problems
    finally:
        context.close()


def axe_violations(page: Page, *, within: str = "html") -> list[str]:
    """Violations of accessibility rules that axe-core finds in a page, or in a part of it, each with its elements."""
    page.evaluate(AXE.read_text())
    found = page.evaluate("([within, rules]) => axe.run(within, {runOnly: rules})", [within, list(RULES)])
    assert found["passes"], "axe has checked nothing"
    return [
        f"{violation['id']}: {node['html'][:160]} ({node['failureSummary'][:200]})"
        for violation in found["violations"]
        for node in violation["nodes"]
    ]


def check_view(browser: Browser, url: str, path: str, *, expected: tuple[str, ...] = ()) -> None:
    """Check that a view, light and dark, violates no rule of axe, and has no horizontal scroll bar at 320 px.

    `expected` are texts of console messages that the view provokes.
    """
    for scheme in SCHEMES:
        with visit(browser, url, scheme=scheme) as opened:
            opened.expected = expected
            page = opened.goto(path)
            expect(page.get_by_role("heading", level=1)).to_be_visible()
            expect(page.get_by_text("Loading", exact=True)).to_have_count(0)
            found = axe_violations(page)
            assert not found, str(found)
            page.set_viewport_size({"width": 320, "height": 800})
            wait_until(page, "document.documentElement.scrollWidth <= window.innerWidth")  # charts follow


def wait_until(page: Page, condition: str, *, timeout_s: float = 20.0) -> None:
    """Waits until a condition in JavaScript is true.

    `Page.wait_for_function` evaluates its text in the page, which the page's content security policy forbids.
    """
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"still not: {condition}"
        page.wait_for_timeout(50)


def screenshot(page: Page, file: Path) -> None:
    """Write a picture of the whole page to `file`."""
    page.screenshot(path=file, full_page=True)


def signed(value: float) -> str:
    """A difference in the page's format."""
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}"
