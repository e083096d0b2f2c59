"""Login and logout on the web page: with tokens and an identity provider, its settings, and an unreachable server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from playwright.sync_api import Browser, Page, Request
from starlette import types

from service.api.app import create_app
from service.auth.sessions import COOKIE
from service.types import JobRecord, Scope
from tests.service.api import harness
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer
from tests.service.api.identity_provider import IdentityProvider, identity_provider
from tests.service.web.driving import Visit, answer, check_shown, expect, visit


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as provider:
        provider.add_user("1", preferred_username="owner")
        provider.add_user("3", preferred_username="eve")
        yield provider


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, port: int, provider: IdentityProvider) -> Iterator[ApiServer]:
    with ApiServer(Path(tmp_path_factory.mktemp("server")), port=port, oidc=provider.settings()) as server:
        yield server


@pytest.fixture(scope="module")
def company(server: ApiServer) -> Company:
    return Company.on(server)


@pytest.fixture(scope="module")
def job(company: Company) -> JobRecord:
    return company.finished()


def log_in(page: Page, token: str) -> None:
    page.get_by_label("Token", exact=True).fill(token)
    page.get_by_role("button", name="Log in").click()


# -- tokens ------------------------------------------------------------------------------------------------------------


def test_a_login_by_keyboard_leads_back(visitor: Visit, company: Company, job: JobRecord) -> None:
    """A user who opens a view logs in by the keyboard alone, comes back to the view, and logs out."""
    address = f"/studies/{job.id}/trials?sort=-value.math"
    page = visitor.goto(address)
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
    assert page.url.startswith(f"{visitor.url}/login?next=")
    expect(page.get_by_role("navigation", name="Main")).to_have_count(0)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(2):  # past the link of the single sign-on
        page.keyboard.press("Tab")
    expect(page.get_by_label("Token", exact=True)).to_be_focused()
    page.keyboard.type(company.tokens["owner", Scope.SUBMIT])
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(job.name)
    assert page.url == f"{visitor.url}{address}"
    (cookie,) = (each for each in visitor.context.cookies() if each["name"] == COOKIE)
    assert (cookie["httpOnly"], cookie["sameSite"]) == (True, "Lax")

    menu = page.locator("summary", has_text="owner")
    menu.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("list", name="Your teams")).to_contain_text("red")
    page.keyboard.press("Escape")
    expect(menu).to_be_focused()
    page.keyboard.press("Enter")
    for _ in range(2):
        page.keyboard.press("Tab")
    expect(page.get_by_role("button", name="Log out")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
    assert [each for each in visitor.context.cookies() if each["name"] == COOKIE] == []
    visitor.goto("/studies")
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")


def test_no_token_stays_in_the_browser(visitor: Visit, company: Company) -> None:
    """The page sends the token once, in a body, and keeps it neither in an address nor in a store of the browser."""
    token = company.tokens["owner", Scope.READ]
    page = visitor.goto("/login")
    with page.expect_request(lambda request: request.method == "POST") as sent:
        log_in(page, token)
    assert sent.value.url == f"{visitor.url}/v1/session"
    assert sent.value.post_data_json == {"token": token}
    expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
    kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie, location.href])")
    assert token not in kept
    assert COOKIE not in kept
    assert not any(token in address for address in visitor.requests)


def test_a_token_that_is_not_valid_is_refused(visitor: Visit, company: Company) -> None:
    """The login shows the server's words about a wrong token, and another one can be given."""
    visitor.expected = ("401",)
    page = visitor.goto("/login?next=//evil.example.org")
    log_in(page, "mst_wrong")
    expect(page.get_by_role("alert")).to_contain_text("the token is not valid")
    log_in(page, f" {company.tokens['viewer', Scope.READ]} ")
    expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
    assert page.url == f"{visitor.url}/studies", "the next path of another server is not taken"


def test_a_revoked_token_ends_the_page(hurried: Visit, company: Company) -> None:
    """Once its token is revoked, the page is nobody's: it leads to the login, and back after it."""
    token = company.add_token("member", Scope.SUBMIT)
    page = hurried.goto("/studies?sort=name")
    log_in(page, token)
    expect(page.locator("summary", has_text="member")).to_be_visible()
    hurried.expected = ("401",)
    (record,) = (each for each in company.accounts.tokens("member") if token.startswith(each.prefix))
    company.accounts.revoke_token(record.id, actor=OPERATOR)
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
    expect(page.get_by_text("member", exact=True)).to_have_count(0)
    log_in(page, company.tokens["member", Scope.SUBMIT])
    expect(page.get_by_role("heading", level=1)).to_have_text("Studies")
    assert page.url == f"{hurried.url}/studies?sort=name"


def test_a_text_outlasts_a_session_but_not_a_logout(visitor: Visit, company: Company) -> None:
    """A study that is being written is there after the next login; for another user, and after a logout, it is not."""
    visitor.expected = ("401",)
    page = visitor.goto("/studies/new")
    log_in(page, company.tokens["owner", Scope.SUBMIT])
    name = page.locator('[id="field-name"]')
    usual = name.input_value()
    name.fill("half-written")
    for user, wanted in (("owner", "half-written"), ("member", usual), ("owner", "half-written")):
        visitor.context.clear_cookies()
        page.reload()
        log_in(page, company.tokens[user, Scope.SUBMIT])
        expect(name).to_have_value(wanted)
    page.locator("summary", has_text="owner").click()
    page.get_by_role("button", name="Log out").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Log in")
    assert "half-written" not in page.evaluate("JSON.stringify({...sessionStorage})")


# -- the identity provider ---------------------------------------------------------------------------------------------


@pytest.fixture
def abroad(browser: Browser, server: ApiServer, provider: IdentityProvider) -> Iterator[Visit]:
    """A window that may also open the page of the identity provider."""
    styles = "https://cdn.jsdelivr.net/"  # of the provider's page
    with visit(browser, server.url) as opened:
        answer(opened.page, f"{styles}*", status=200, content_type="text/css", body="")
        opened.allowed = (provider.url, styles)
        opened.expected = ("404",)  # the provider has no icon
        yield opened


def test_single_sign_on_leads_back(abroad: Visit, company: Company, job: JobRecord) -> None:
    """A login with the identity provider begins at the page and comes back to the view that needed it."""
    page = abroad.goto(f"/studies/{job.id}")
    page.get_by_role("link", name="Log in with single sign-on").click()
    page.locator("input[name=sub]").fill("1")
    page.locator("button[type=submit], input[type=submit]").first.click()
    expect(page.get_by_role("heading", level=1)).to_have_text(job.name)
    assert page.url == f"{abroad.url}/studies/{job.id}"
    expect(page.locator("summary", has_text="owner")).to_be_visible()


def test_a_refused_sign_on_is_explained(abroad: Visit, company: Company) -> None:
    """A user whom the server does not know comes back to the login, which says why."""
    page = abroad.goto("/login")
    page.get_by_role("link", name="Log in with single sign-on").click()
    page.locator("input[name=sub]").fill("3")
    page.locator("button[type=submit], input[type=submit]").first.click()
    expect(page.get_by_role("alert")).to_contain_text("You may not log in to this server.")
    expect(page.get_by_label("Token", exact=True)).to_be_visible()


# -- settings ----------------------------------------------------------------------------------------------------------


def test_tokens_are_made_and_revoked_with_csrf(visitor: Visit, company: Company) -> None:
    """A token is shown once and works until it is revoked; both requests send the session's CSRF token."""
    sent: list[Request] = []
    page = visitor.goto("/settings")
    page.on("request", lambda request: sent.append(request) if request.method != "GET" else None)
    log_in(page, company.tokens["manager", Scope.ADMIN])
    page.get_by_label("Name of the new token").fill("laptop")
    page.get_by_label("Scope").select_option("read")
    page.get_by_label("It expires").select_option("7")
    page.get_by_role("button", name="Create token").click()
    shown = page.get_by_label("Token laptop of manager, which is shown once")
    expect(shown).to_have_value(re.compile("^mst_.{43}$"))
    with company.http("manager") as http:
        known = next(each for each in http.get("/v1/tokens").json()["tokens"] if each["name"] == "laptop")
        assert (known["scope"], known["prefix"]) == ("read", shown.input_value()[:10])
        page.get_by_role("button", name="Done").click()
        expect(shown).to_have_count(0)
        row = page.get_by_role("row").filter(has_text="laptop")
        expect(row).to_contain_text(known["prefix"])
        row.get_by_role("button", name="Revoke token laptop").click()
        page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
        expect(row).to_contain_text("revoked")
        csrf = page.evaluate("fetch('v1/session').then(answer => answer.json()).then(session => session.csrf_token)")
        changes = [request for request in sent if not request.url.endswith("/v1/session")]
        assert [request.method for request in changes] == ["POST", "DELETE"]
        assert {request.headers["x-csrf-token"] for request in changes} == {csrf}


def test_a_session_to_read_offers_no_change(visitor: Visit, company: Company) -> None:
    """What a session of the scope `read` may not do is absent from the settings."""
    page = visitor.goto("/settings")
    log_in(page, company.tokens["manager", Scope.READ])
    expect(page.get_by_role("region", name="Table of tokens")).to_contain_text("manager-read")
    for name in ("Create token", "Add webhook", "Set address", re.compile("^Revoke")):
        expect(page.get_by_role("button", name=name)).to_have_count(0)
    expect(page.get_by_text("The session has the scope read")).to_be_visible()


def test_webhooks_are_added_and_removed(visitor: Visit, company: Company) -> None:
    """A webhook has the events that were chosen; its secret is shown once, and a refused URL is explained."""
    page = visitor.goto("/settings")
    log_in(page, company.tokens["manager", Scope.SUBMIT])
    url = page.get_by_label("URL of the new webhook")
    url.fill("https://10.0.0.1/")
    visitor.expected = ("422",)
    page.get_by_role("button", name="Add webhook").click()
    expect(page.get_by_role("alert")).to_contain_text("10.0.0.1")
    url.fill("https://example.org/hook")
    page.get_by_label("Jobs").select_option("team red")
    page.get_by_label("waiting").first.uncheck()
    page.get_by_role("button", name="Add webhook").click()
    expect(page.get_by_label("Secret that signs the requests, which is shown once")).to_have_value(
        re.compile("^whsec_")
    )
    with company.http("manager") as http:
        (webhook,) = http.get("/v1/webhooks").json()["webhooks"]
        assert (webhook["events"], webhook["team"]) == (["complete", "failed"], "red")
        page.get_by_role("button", name="Remove webhook https://example.org/hook").click()
        page.get_by_role("dialog").get_by_role("button", name="Remove").click()
        expect(page.get_by_role("heading", name="https://example.org/hook")).to_have_count(0)
        assert http.get("/v1/webhooks").json()["webhooks"] == []
    # Without a mail server, the server says so.
    visitor.expected = ("422", "409")
    page.get_by_label("Address").fill("ann@example.org")
    page.get_by_role("button", name="Set address").click()
    expect(page.get_by_role("alert")).to_contain_text("the server sends no mails")


def test_colours_are_chosen_in_the_settings(visitor: Visit, company: Company) -> None:
    """The colours of the page are those of the system, or those that were chosen, also after a reload."""
    page = visitor.goto("/settings")
    log_in(page, company.tokens["viewer", Scope.READ])
    root = page.locator("html")
    expect(root).to_have_attribute("data-mantine-color-scheme", "light")
    page.get_by_text("dark", exact=True).click()
    expect(root).to_have_attribute("data-mantine-color-scheme", "dark")
    page.reload()
    expect(root).to_have_attribute("data-mantine-color-scheme", "dark")
    expect(page.get_by_role("radio", name="dark")).to_be_checked()


# -- servers -----------------------------------------------------------------------------------------------------------


def test_the_login_is_accessible(visitor: Visit, company: Company) -> None:
    """The login violates no rule of axe in both schemes, and does not scroll sideways at 320 px."""
    page = visitor.goto("/login?problem=refused")
    expect(page.get_by_role("alert")).to_be_visible()
    check_shown(page)


def test_a_login_below_a_prefix(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """Below a proxy's path prefix, the login leads back to the view below the prefix."""
    with ApiServer(tmp_path, prefix="/team/merge", port=own_port) as server, visit(browser, server.url) as opened:
        company = Company.on(server)
        page = opened.goto("/team/merge/queue")
        log_in(page, company.tokens["owner", Scope.READ])
        expect(page.get_by_role("heading", level=1)).to_have_text("Queue")
        assert page.url == f"{server.url}/team/merge/queue"
        assert [path for path in opened.requests if not path.startswith("/team/merge/")] == []


def test_a_login_behind_a_proxy_that_removes_a_prefix(
    browser: Browser, tmp_path: Path, own_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a proxy that removes its path prefix, the page works, also without the proxy, as through a tunnel."""

    class RemovesPrefix:
        def __init__(self, app: types.ASGIApp) -> None:
            self._app = app

        async def __call__(self, scope: types.Scope, receive: types.Receive, send: types.Send) -> None:
            if scope.get("path", "").startswith("/merge/"):
                shorter = {"path": scope["path"][6:], "raw_path": scope["raw_path"][6:]}
                scope = {**scope, **shorter}
            await self._app(scope, receive, send)

    def behind_proxy(*args: Any, **options: Any) -> FastAPI:
        app = create_app(*args, **options)
        app.add_middleware(RemovesPrefix)
        return app

    monkeypatch.setattr(harness, "create_app", behind_proxy)
    with ApiServer(tmp_path, port=own_port) as server:
        company = Company.on(server)
        for prefix, view in (("/merge", "/queue"), ("/merge", "/studies/none/trials/1"), ("", "/queue")):
            with visit(browser, server.url) as opened:
                page = opened.goto(f"{prefix}{view}")
                page.wait_for_url(f"{server.url}{prefix}/login*")
                if view == "/queue":
                    log_in(page, company.tokens["owner", Scope.READ])
                    expect(page.get_by_role("heading", level=1)).to_have_text("Queue")
                    assert page.url == f"{server.url}{prefix}/queue"
                assert [path for path in opened.requests if not path.startswith(f"{prefix}/")] == []


def test_without_accounts_nobody_logs_in(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """A server without accounts shows neither login nor users nor teams, and its settings say how to get accounts."""
    with ApiServer(tmp_path, port=own_port) as server, visit(browser, server.url) as opened:
        page = opened.goto("/settings")
        expect(page.get_by_text("This server has no accounts")).to_be_visible()
        expect(page.get_by_text("mergesearch users add NAME --admin")).to_be_visible()
        for name in ("Tokens", "E-mail"):
            expect(page.get_by_role("heading", name=name)).to_have_count(0)
        links = page.get_by_role("navigation", name="Main").get_by_role("link")
        expect(links).to_have_text(["Studies", "Fine-tunings", "Queue", "Cluster"])
        expect(page.get_by_role("button", name="Log out")).to_have_count(0)
        opened.goto("/login")
        expect(page.get_by_text("nobody needs to log in")).to_be_visible()


def test_a_server_that_is_away_comes_back(browser: Browser, tmp_path: Path, own_port: int) -> None:
    """While the server does not answer, the page says since when; it goes on by itself when the server is back."""
    with (
        ApiServer(tmp_path, port=own_port) as server,
        visit(browser, server.url, is_in_a_hurry=True) as opened,
    ):
        opened.expected = ("ERR_CONNECTION_REFUSED", "ERR_CONNECTION_RESET", "ERR_EMPTY_RESPONSE")
        page = opened.goto("/studies")
        expect(page.get_by_text("There are no studies yet.")).to_be_visible()
        server.stop()
        page.get_by_role("textbox", name="Search by name, description or owner").fill("a study")
        state = page.get_by_role("status", name="Server")
        expect(state).to_contain_text("The server does not answer.")
        expect(state).to_contain_text(re.compile(r"Last answer \d+s ago"))
        server.start()
        expect(state).to_be_empty()
        expect(page.get_by_text("No study matches.")).to_be_visible()
