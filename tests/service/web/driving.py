"""Chromium driven by Playwright. Every page is checked for console errors and requests to other origins."""

from __future__ import annotations

import base64
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, Literal, TypeAlias, overload
from urllib.parse import urlsplit
from weakref import WeakKeyDictionary

from playwright.sync_api import (
    Browser,
    BrowserContext,
    CDPSession,
    ConsoleMessage,
    Error,
    Locator,
    Page,
    Request,
    sync_playwright,
)
from playwright.sync_api import expect as expect_of_playwright
from playwright.sync_api._generated import LocatorAssertions, PageAssertions

from service.web.pages import STATIC
from tests.browser import browser_path

__all__ = [
    "APP",
    "HEIGHT",
    "HURRY",
    "SCHEMES",
    "WIDTH",
    "Scheme",
    "Visit",
    "answer",
    "axe_violations",
    "check_shown",
    "check_view",
    "chromium",
    "expect",
    "is_built",
    "navigate",
    "press",
    "screenshot",
    "settle",
    "signed",
    "visit",
    "wait_until",
]

APP = STATIC.parent / "app"
AXE = APP / "node_modules" / "axe-core" / "axe.min.js"
Scheme: TypeAlias = Literal["light", "dark"]
SCHEMES: tuple[Scheme, ...] = ("light", "dark")

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--no-proxy-server",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--process-per-site",  # tabs of a profile share a process, which has compiled the page's scripts
    # Pages of tests live for seconds: the optimising compilers would take a fifth of the renderer's time.
    "--js-flags=--no-maglev --no-opt",
)

# How many times sooner the timers of a second or more end in a page that is in a hurry.
HURRY = 10
HURRIED = f"""
for (const name of ['setTimeout', 'setInterval']) {{
  const own = window[name]
  window[name] = (callback, ms = 0, ...rest) => own(callback, ms < 1000 ? ms : ms / {HURRY}, ...rest)
}}
"""

# Rules of accessibility that are checked: WCAG 2.2 AA and axe's own.
RULES = ("wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice")

# Those of them whose result depends on colours.
COLOUR_RULES = ("color-contrast", "link-in-text-block")

# Elements, texts and attributes of a page, without colours, their switch and the numbers of a chart's parts. What is
# equal in two colour schemes has the same results by all rules but those of colours.
SKELETON = """() => JSON.stringify([...document.querySelectorAll('body *')].map((element) => {
  const isDrawn = element.namespaceURI === 'http://www.w3.org/2000/svg'
  const attributes = [...element.attributes].filter(({ name }) => !isDrawn || !/^(style|fill|stroke)$/.test(name))
  const texts = [...element.childNodes].filter(({ nodeType }) => nodeType === Node.TEXT_NODE).map(({ data }) => data)
  return [element.localName, attributes.map(({ name, value }) => [name, value]), texts]
})).replace(/\\bzr\\d+-\\w+/g, '').replace(/\\b(light|dark)\\b|[☾☀]/g, '')"""

# Details of what violates no rule take most of the time and are not needed, nor are parsed style sheets: the only rule
# that reads them is experimental, and none of `RULES`.
AXE_RUN = """async ([within, rules]) => {
  const options = { resultTypes: ['violations'], selectors: false, preload: { assets: ['media'] } }
  const found = await axe.run(within, { runOnly: rules, ...options })
  const nodes = ({ id, nodes }) => nodes.map(({ html, failureSummary }) => [id, html, failureSummary])
  return { passes: found.passes.length, violations: found.violations.flatMap(nodes) }
}"""


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


# Milliseconds until an assertion or an action fails. Tests share few cores, on which the page may take seconds to draw.
PATIENCE_MS = 40_000
# Milliseconds in one try of an assertion. Playwright looks ten times a second if it has up to this time, and only twice
# a second if it has more.
TRY_MS = 2000


class _Tried:
    """The assertions of Playwright, each tried again and again for its whole time, in tries of at most `TRY_MS`."""

    def __init__(self, assertions: LocatorAssertions | PageAssertions) -> None:
        self._assertions = assertions

    def __getattr__(self, name: str) -> Callable[..., None]:
        assertion: Callable[..., None] = getattr(self._assertions, name)

        def tried(*args: Any, timeout: float = PATIENCE_MS, **options: Any) -> None:
            while timeout > TRY_MS:
                try:
                    return assertion(*args, timeout=TRY_MS, **options)
                except AssertionError:
                    timeout -= TRY_MS
            return assertion(*args, timeout=timeout, **options)

        return tried


@overload
def expect(actual: Page) -> PageAssertions: ...
@overload
def expect(actual: Locator) -> LocatorAssertions: ...
def expect(actual: Any) -> Any:
    """Assertions on a page or an element that wait as those of Playwright, but look more often."""
    return _Tried(expect_of_playwright(actual))


def navigate(page: Page, path: str, title: str) -> None:
    """Lead an open page to an address of the same server without loading it anew, as links of the page do.

    Returns once the view at the address is there, whose title in the browser's tab begins with `title`; the title
    before must begin with something else.
    """
    assert not page.title().startswith(title), f"the view before is named {page.title()} too"
    page.evaluate("path => history.pushState({}, '', path)", path)
    expect(page).to_have_title(re.compile(f"^{re.escape(title)}"), timeout=PATIENCE_MS)


def answer(page: Page, *patterns: str, status: int, content_type: str, body: str) -> Callable[[], None]:
    """Answers requests of a page in place of the server until the returned function is called.

    Those are requests to URLs that match one of `patterns`, in which `*` is any text. While Playwright's own
    `Page.route` is in use, the page loads all of its files anew and compiles them, as it has no cache.
    """
    session = page.context.new_cdp_session(page)
    headers = [{"name": "Content-Type", "value": content_type}]
    said = {"responseCode": status, "responseHeaders": headers, "body": base64.b64encode(body.encode()).decode()}

    def say(paused: dict[str, Any]) -> None:
        with suppress(Error):  # the page has given it up
            session.send("Fetch.fulfillRequest", {"requestId": paused["requestId"], **said})

    session.on("Fetch.requestPaused", say)
    session.send("Fetch.enable", {"patterns": [{"urlPattern": pattern} for pattern in patterns]})
    return session.detach


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
                self._errors.append(f"{message.type} at {page.url}: {message.text}")

        def request(sent: Request) -> None:
            self._requests.append(sent.url)

        page.on("console", console)
        page.on("pageerror", lambda error: self._errors.append(f"exception at {page.url}: {error}"))
        page.on("request", request)
        page.set_default_timeout(PATIENCE_MS)

    def goto(self, path: str) -> Page:
        """Open an address of the page in the first tab."""
        self.page.goto(self.url + path)
        return self.page

    def leave(self) -> None:
        """Stop listening for new tabs of the profile."""
        self.context.remove_listener("page", self._follow)

    def problems(self) -> list[str]:
        """Console errors and exceptions so far, and requests to other origins."""
        unexpected = [error for error in self._errors if not any(text in error for text in self.expected)]
        own = (self.url, "data:", "blob:", *self.allowed)
        return unexpected + [f"request to {url}" for url in self._requests if not url.startswith(own)]

    @property
    def requests(self) -> list[str]:
        """Paths of all requests so far."""
        return [url.removeprefix(self.url) for url in self._requests]

    @property
    def origins(self) -> set[str]:
        """Origins of all requests so far."""
        parts = (urlsplit(url) for url in self._requests if url.startswith("http"))
        return {f"{part.scheme}://{part.netloc}" for part in parts}


# Size of a window in pixels, and colours of the system, unless a visit has others.
WIDTH, HEIGHT = 1280, 900


class Profile:
    """A browser's profile, which later visits may use: they find the page's files in its cache and compiled.

    A tab that remains open keeps the process alive that has compiled them.
    """

    def __init__(self, browser: Browser, url: str) -> None:
        self.context = browser.new_context(
            viewport={"width": WIDTH, "height": HEIGHT}, color_scheme="light", accept_downloads=True
        )
        self._tab = self.context.new_page()
        self._tab.goto(f"{url}/healthz", wait_until="commit")
        self._session: CDPSession = self.context.new_cdp_session(self._tab)

    def clear(self, origins: set[str]) -> None:
        """Make the profile as it was, except for its cache: without tabs, cookies, stored data of `origins`, rights."""
        for page in self.context.pages:
            if page != self._tab:
                page.close()
        self.context.unroute_all()
        self.context.clear_cookies()
        self.context.clear_permissions()
        self.context.set_extra_http_headers({})
        for origin in origins:
            self._session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})


# The profile of each browser that no visit uses.
_idle: WeakKeyDictionary[Browser, Profile] = WeakKeyDictionary()


@contextmanager
def visit(
    browser: Browser,
    url: str,
    *,
    scheme: Scheme = "light",
    width: int = WIDTH,
    height: int = HEIGHT,
    headers: Mapping[str, str] | None = None,
    is_in_a_hurry: bool = False,
    is_last: bool = False,
) -> Iterator[Visit]:
    """A window on the server at `url`; fails at its end if an error occurred in it.

    Args:
        browser: The browser.
        url: URL of the server.
        scheme: Colour scheme of the system, in the first tab.
        width: Width of the page in pixels, in the first tab.
        height: Height of the page in pixels, in the first tab.
        headers: Headers that all requests have besides their own.
        is_in_a_hurry: Whether timers of a second or more end `HURRY` times sooner in the page (not in its workers).
        is_last: Whether the visit has a profile of its own, because it changes it for good, as by a made-up clock.
    """
    profile = (None if is_last else _idle.pop(browser, None)) or Profile(browser, url)
    try:
        with profile.context.add_init_script(HURRIED) if is_in_a_hurry else nullcontext():
            profile.context.set_extra_http_headers(dict(headers or {}))
            opened = Visit(profile.context, url)
            if (width, height) != (WIDTH, HEIGHT):
                opened.page.set_viewport_size({"width": width, "height": height})
            if scheme != "light":
                opened.page.emulate_media(color_scheme=scheme)
            yield opened
            assert not (problems := opened.problems()), problems
            opened.leave()
        if not is_last and browser not in _idle:
            profile.clear(opened.origins)
            _idle[browser] = profile
    finally:
        if _idle.get(browser) is not profile:
            profile.context.close()


def axe_violations(page: Page, *, within: str = "html", rules: Sequence[str] = RULES) -> list[str]:
    """Violations of accessibility rules that axe-core finds in a page, or in a part of it, each with its elements."""
    wait_until(page, "!document.getAnimations().some(each => each instanceof CSSTransition)")  # to other colours
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE.read_text())
    found = page.evaluate(AXE_RUN, [within, list(rules)])
    assert found["passes"], "axe has checked nothing"
    return [f"{rule}: {html[:160]} ({summary[:200]})" for rule, html, summary in found["violations"]]


def check_view(browser: Browser, url: str, path: str, *, expected: tuple[str, ...] = ()) -> None:
    """Check that a view, light and dark, violates no rule of axe, and has no horizontal scroll bar at 320 px.

    `expected` are texts of console messages that the view provokes.
    """
    with visit(browser, url) as opened:
        opened.expected = expected
        page = opened.goto(path)
        settle(page)
        check_shown(page)


def settle(page: Page) -> None:
    """Wait until a view has a heading, and nothing in it is loading."""
    expect(page.get_by_role("heading", level=1)).to_be_visible()
    expect(page.get_by_text("Loading", exact=True)).to_have_count(0)


def check_shown(page: Page) -> None:
    """Check that what a page shows, light and dark, violates no rule of axe, and does not scroll sideways at 320 px."""

    def use(scheme: Scheme) -> None:
        page.emulate_media(color_scheme=scheme)
        expect(page.locator("html")).to_have_attribute("data-mantine-color-scheme", scheme)

    checked = set()
    for scheme in SCHEMES:
        use(scheme)
        # What differs in colours alone has passed the other rules.
        skeleton = page.evaluate(SKELETON)
        found = axe_violations(page, rules=COLOUR_RULES if skeleton in checked else RULES)
        assert not found, f"{page.url}, {scheme}: {found}"
        checked.add(skeleton)
    page.set_viewport_size({"width": 320, "height": 800})
    for scheme in reversed(SCHEMES):  # the last one is still in use
        use(scheme)
        wait_until(page, "document.documentElement.scrollWidth <= window.innerWidth")  # charts follow


def wait_until(page: Page, condition: str, *, timeout_s: float = PATIENCE_MS / 1000) -> None:
    """Waits until a condition in JavaScript is true.

    `Page.wait_for_function` evaluates its text in the page, which the page's content security policy forbids.
    """
    deadline = time.monotonic() + timeout_s
    while not page.evaluate(condition):
        assert time.monotonic() < deadline, f"still not at {page.url}: {condition}"
        page.wait_for_timeout(50)


def screenshot(page: Page, file: Path) -> None:
    """Write a picture of the whole page to `file`."""
    page.screenshot(path=file, full_page=True)


def signed(value: float) -> str:
    """A difference in the page's format."""
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}"
