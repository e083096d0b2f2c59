"""Sessions of browsers that log in with a token, the attack that each check prevents, and refused logins."""

from __future__ import annotations

import json
import logging
import math
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.limits.rates import Rate, RateLimits
from service.auth import authenticator
from service.auth.sessions import COOKIE, IDLE_S, LIFETIME_S
from service.auth.tokens import digest_of
from service.notifications.settings import NotificationSettings
from service.store import accounts as accounts_module
from service.types import Scope, SessionRecord
from tests.service.api.accounts import OPERATOR, Company, bearer
from tests.service.api.harness import ApiServer, document
from tests.service.api.identity_provider import Browser, IdentityProvider, identity_provider

UNLIMITED = RateLimits(*(Rate(math.inf, math.inf) for _ in range(4)))
JSON = {"Content-Type": "application/json"}
HTML = {"Accept": "text/html,application/xhtml+xml"}

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as provider:
        provider.add_user("1", preferred_username="owner")
        provider.add_user("3", preferred_username="eve")
        yield provider


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory, provider: IdentityProvider) -> Iterator[Company]:
    data_dir = tmp_path_factory.mktemp("api")
    with ApiServer(data_dir, rates=UNLIMITED, prefix="/search", oidc=provider.settings()) as server:
        yield Company.on(server)


@pytest.fixture
def browser(company: Company) -> Iterator[Browser]:
    with Browser(company.server.url) as browser:
        yield browser


def log_in(browser: Browser, token: str, **headers: str) -> httpx.Response:
    return browser.post("/v1/session", json={"token": token}, headers=headers)


def forget(company: Company) -> None:
    company.server.app.state.services.authenticator.forget()


@pytest.mark.parametrize("scope", list(Scope))
def test_a_session_has_the_scope_of_its_token(company: Company, browser: Browser, scope: Scope) -> None:
    """A session that a token began may do what the token may, and nothing more."""
    begun = log_in(browser, company.tokens["root", scope])
    assert begun.status_code == 201
    shown = begun.json()
    assert (shown["user"]["name"], shown["scope"]) == ("root", scope.value)
    assert browser.get("/v1/session").json() == shown
    csrf = {"X-CSRF-Token": shown["csrf_token"]}
    submitted = browser.post("/v1/studies", json=document(f"by-{scope}"), headers=csrf).status_code
    assert submitted == (403 if scope is Scope.READ else 201)
    assert browser.get("/v1/users").status_code == (200 if scope is Scope.ADMIN else 403)
    assert browser.post("/v1/logout", headers=csrf).json() == {"was_logged_in": True}
    assert browser.session is None


def test_without_its_scope_a_session_may_more(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """Without the scope of the token, the session of an administrator could manage accounts."""
    log_in(browser, company.tokens["root", Scope.READ])
    assert browser.get("/v1/users").status_code == 403
    monkeypatch.setattr(accounts_module, "Scope", lambda _: None)
    forget(company)
    assert browser.get("/v1/users").status_code == 200


def test_the_cookie_of_a_token_session(company: Company, browser: Browser) -> None:
    """The cookie is HttpOnly and SameSite=Lax, of the server's path, Secure over HTTPS, and is not the token."""
    token = company.tokens["owner", Scope.READ]
    secure = {"X-Forwarded-Proto": "https"}  # as a proxy on this machine says it
    for path, headers, expected in (
        ("/v1/session", {}, {"Path=/"}),
        ("/search/v1/session", secure, {"Path=/search", "Secure"}),
    ):
        answer = httpx.post(f"{company.server.url}{path}", json={"token": token}, headers=headers)
        value, *attributes = answer.headers["set-cookie"].split("; ")
        assert set(attributes) == {"HttpOnly", "SameSite=lax", f"Max-Age={LIFETIME_S:.0f}", *expected}
        assert value.startswith(f"{COOKIE}=mss_")
        assert token not in answer.text + str(answer.headers)


def test_the_cookie_is_for_the_address_of_the_browser(tmp_path: Path) -> None:
    """The public URL decides about the cookie, except if the browser reaches the server at another address."""
    notifications = NotificationSettings(public_url="https://search.example.org/merge")
    hosts = ("search.example.org",)
    with ApiServer(tmp_path, prefix="/search", notifications=notifications, hosts=hosts) as server:
        token = Company.on(server).tokens["owner", Scope.READ]
        public = {"Host": "search.example.org", "Origin": "https://search.example.org"}
        for path, headers, expected in (
            ("/v1/session", {}, {"Path=/merge", "Secure"}),
            ("/v1/session", public, {"Path=/merge", "Secure"}),
            ("/v1/session", {"Origin": server.url}, {"Path=/"}),
            ("/search/v1/session", {"Origin": server.url}, {"Path=/search"}),
        ):
            answer = httpx.post(f"{server.url}{path}", json={"token": token}, headers=headers)
            _, *attributes = answer.headers["set-cookie"].split("; ")
            assert {each for each in attributes if each == "Secure" or each.startswith("Path=")} == expected
        headers = {"Origin": server.url}
        with httpx.Client(base_url=server.url, headers=headers) as browser:  # it drops cookies that it may not keep
            csrf = browser.post("/v1/session", json={"token": token}).json()["csrf_token"]
            assert browser.get("/v1/session").json()["user"]["name"] == "owner"
            assert browser.post("/v1/logout", headers={"X-CSRF-Token": csrf}).json() == {"was_logged_in": True}
            assert COOKIE not in browser.cookies


def test_a_revoked_token_ends_its_sessions(company: Company, browser: Browser) -> None:
    """A revoked token ends the sessions that it began, and no others of its user."""
    first, second = company.add_token("owner", Scope.SUBMIT), company.add_token("owner", Scope.SUBMIT)
    with Browser(company.server.url) as other:
        log_in(browser, first)
        log_in(other, second)
        (record,) = (each for each in company.accounts.tokens("owner") if first.startswith(each.prefix))
        company.accounts.revoke_token(record.id, actor=OPERATOR)
        forget(company)
        assert browser.get("/v1/me").status_code == 401
        assert browser.get("/v1/session").json()["user"] is None
        assert other.get("/v1/me").status_code == 200
    assert log_in(browser, first).status_code == 401


def test_a_session_ends_with_its_token(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """A session does not outlive the token that began it."""
    log_in(browser, company.add_token("owner", Scope.SUBMIT, lifetime_s=60.0))
    monkeypatch.setattr(accounts_module, "clock", lambda _: time.time() + 61.0)
    forget(company)
    assert browser.get("/v1/me").status_code == 401
    monkeypatch.setattr(SessionRecord, "is_valid", lambda *_, **__: True)
    forget(company)
    assert browser.get("/v1/me").status_code == 200


def test_tokens_that_are_not_valid_begin_nothing(company: Company, browser: Browser) -> None:
    """An unknown, revoked, expired or disabled user's token gets 401 and no cookie; the audit log has known tokens."""
    log_in(browser, company.tokens["owner", Scope.READ])
    before = browser.session
    company.accounts.change_user("loner", is_disabled=True, actor=OPERATOR)
    revoked = company.add_token("owner", Scope.READ)
    (record,) = (each for each in company.accounts.tokens("owner") if revoked.startswith(each.prefix))
    company.accounts.revoke_token(record.id, actor=OPERATOR)
    invalid = {
        "mst_unknown": None,
        before or "": None,
        revoked: "owner",
        company.expired: "owner",
        company.tokens["loner", Scope.READ]: "loner",
    }
    for token, user in invalid.items():
        num_entries = len(company.accounts.audit())
        refused = log_in(browser, token)
        assert (refused.status_code, "the token is not valid" in refused.json()["detail"]) == (401, True)
        assert "set-cookie" not in refused.headers
        entries = company.accounts.audit()[num_entries:]
        reason = {"reason": "the token is not valid", "token": token[:10]}
        expected = [] if user is None else [("session.refuse", None, f"user {user}", reason)]
        assert [(each.action, each.user, each.target, each.after) for each in entries] == expected
    company.accounts.change_user("loner", is_disabled=False, actor=OPERATOR)
    assert browser.session == before
    assert browser.get("/v1/me").status_code == 200, "a refused login leaves the session that there is"
    bodies: tuple[dict[str, Any], ...] = (
        {},
        {"token": ""},
        {"token": 1},
        {"token": "x", "next": "/"},
        {"token": "\ud800"},
    )
    for body in bodies:
        assert browser.post("/v1/session", content=json.dumps(body), headers=JSON).status_code == 422
    assert browser.post("/v1/session", content="token=x").status_code == 415


def test_a_page_of_another_server_logs_nobody_in(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """A foreign page cannot give a browser a session of somebody else; without the check it could."""
    token = company.tokens["owner", Scope.READ]
    foreign = {"Sec-Fetch-Site": "cross-site"}
    for headers in (foreign, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.example.org"}):
        assert log_in(browser, token, **headers).status_code == 403
    assert browser.session is None
    assert log_in(browser, token, **{"Sec-Fetch-Site": "same-origin"}).status_code == 201
    csrf = {"X-CSRF-Token": browser.get("/v1/session").json()["csrf_token"]}
    assert browser.post("/v1/logout").status_code == 403
    assert browser.post("/v1/logout", headers=csrf).status_code == 200
    monkeypatch.setattr("service.api.permissions.foreign_problem", lambda *_: None)
    assert log_in(browser, token, **foreign).status_code == 201


def test_a_token_login_replaces_the_session(company: Company, browser: Browser) -> None:
    """A second login in a browser ends the session that the browser had."""
    log_in(browser, company.tokens["owner", Scope.READ])
    first = browser.session
    log_in(browser, company.tokens["root", Scope.READ])
    assert browser.get("/v1/session").json()["user"]["name"] == "root"
    forget(company)
    assert httpx.get(f"{company.server.url}/v1/me", headers={"Cookie": f"{COOKIE}={first}"}).status_code == 401


def test_a_login_that_is_refused_keeps_the_session(company: Company, browser: Browser) -> None:
    """A login that a quota of the user's team refuses leaves the earlier session of the browser."""
    log_in(browser, company.tokens["viewer", Scope.READ])
    before = browser.session
    assert before is not None
    company.accounts.set_limits("red", {"requests_per_minute": 1}, actor=OPERATOR)
    try:
        forget(company)
        assert browser.get("/v1/me").status_code == 200
        refused = log_in(browser, company.tokens["owner", Scope.READ])
        assert (refused.status_code, "set-cookie" in refused.headers) == (429, False)
        assert company.accounts.find_session(digest_of(before), idle_s=IDLE_S) is not None
    finally:
        company.accounts.set_limits("red", {"requests_per_minute": None}, actor=OPERATOR)
        forget(company)
    assert browser.session == before


def test_token_logins_of_an_address_are_limited(tmp_path: Path) -> None:
    """Logins with tokens count as all other logins do; without the limit an address could try as many as it likes."""
    with ApiServer(tmp_path, rates=RateLimits(logins=Rate(0.1, 2))) as server, Browser(server.url) as browser:
        Company.on(server)
        statuses = [log_in(browser, "mst_unknown").status_code for _ in range(4)]
        assert statuses == [401, 401, 429, 429]
        assert browser.get("/v1/login").status_code == 429


def test_what_the_page_learns_without_a_session(company: Company, browser: Browser, tmp_path: Path) -> None:
    """Without a session, the server tells only whether it has accounts and an identity provider."""
    nobody = {"user": None, "scope": None, "expires_at": None, "csrf_token": None}
    found = {"has_accounts": True, "has_identity_provider": True, "may_read_dashboard": False, **nobody}
    assert browser.get("/v1/session").json() == found
    assert browser.get("/v1/session", headers=bearer("mst_unknown")).json() == found
    token = company.tokens["owner", Scope.ADMIN]
    shown = browser.get("/v1/session", headers=bearer(token)).json()
    assert (shown["may_read_dashboard"], shown["csrf_token"]) == (False, None)
    log_in(browser, company.tokens["root", Scope.READ])
    assert browser.get("/v1/session").json()["may_read_dashboard"] is True
    with ApiServer(tmp_path) as server, Browser(server.url) as visitor:
        open_to_all = {"has_accounts": False, "has_identity_provider": False, "may_read_dashboard": True, **nobody}
        assert visitor.get("/v1/session").json() == open_to_all
        assert log_in(visitor, "mst_any").status_code == 404


def test_no_token_of_a_login_is_shown(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """Neither the token nor the session is in a log, in the database or in a refusal."""
    records: list[logging.LogRecord] = []
    handle = logging.Logger.callHandlers

    def keep(logger: logging.Logger, record: logging.LogRecord) -> None:
        records.append(record)  # whichever handlers other tests have left
        handle(logger, record)

    monkeypatch.setattr(logging.Logger, "callHandlers", keep)
    errors = logging.getLogger("uvicorn.error")
    level = errors.level
    errors.setLevel(logging.DEBUG)  # not by its attribute: loggers remember which levels they are enabled for
    token = company.add_token("owner", Scope.READ)
    answers = [log_in(browser, token), log_in(browser, f"{token}x")]
    secret = browser.session
    assert secret is not None
    answers.append(browser.post("/v1/session", json={"token": token, "more": token}))

    async def fail(*_: Any, **__: Any) -> None:
        raise OSError("a fault of the server")

    monkeypatch.setattr(authenticator.Authenticator, "authenticate", fail)
    with Browser(company.server.url) as other:
        answers.append(other.post("/v1/session", json={"token": token}))
    errors.setLevel(level)
    assert [answer.status_code for answer in answers] == [201, 401, 422, 500]
    own = ("httpx", "httpcore")  # of the browser of this test
    logged = "\n".join(logging.Formatter().format(each) for each in records if not each.name.startswith(own))
    assert "a fault of the server" in logged
    with sqlite3.connect(company.server.data_dir / "mergesearch.db") as connection:
        stored = "\n".join(connection.iterdump())
    shown = "\n".join(answer.text for answer in answers)
    for value in (token, secret):
        assert value not in logged + stored + shown


# -- refused logins with the identity provider -------------------------------------------------------------------------


def test_a_refused_login_is_shown_by_the_page(company: Company, browser: Browser) -> None:
    """A browser whose login is refused is sent to the login of the page with a code; programs get the problem."""
    begun = browser.get("/search/v1/login")
    back = browser.authorize(begun.headers["location"], "3")
    for code in ("user", "expired"):  # the login ends with its first answer
        answer = browser.get(back, headers=HTML)
        assert answer.status_code == 303
        assert answer.headers["location"] == f"/search/login?problem={code}"
    refused = browser.get(back)
    assert (refused.status_code, refused.headers["content-type"]) == (403, "application/problem+json")


def test_a_login_without_a_provider_is_shown(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """A browser is sent back to the page's login while the identity provider is not as it should be."""
    monkeypatch.setitem(provider.metadata, "issuer", "https://other.example.org")
    logins = company.server.app.state.services.logins
    monkeypatch.setattr(logins, "_provider", type(logins._provider)(provider.settings()))
    answer = browser.get("/v1/login", headers=HTML)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?problem=unavailable")
    assert browser.get("/v1/login").status_code == 503


def test_a_login_leads_to_the_page(browser: Browser) -> None:
    """A login that names no path leads to the web page."""
    assert browser.log_in("1").headers["location"] == "/"
