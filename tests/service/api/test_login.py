"""Login of browsers with a real identity provider over HTTP, and the attack that each check prevents."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import math
import re
import socket
import sqlite3
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import sqlalchemy as sa
from authlib.oidc.core.claims import IDToken
from joserfc._rfc7519.claims import JWTClaimsRegistry
from joserfc.jwk import RSAKey
from joserfc.jws import JWSRegistry
from oidc_provider_mock import _app as mock

from service.api.limits.rates import Rate, RateLimits
from service.api.routes import login as login_routes
from service.auth import provider as provider_module
from service.auth.logins import LOGIN_S, Logins, login_cookie, next_problem, team_roles, user_name
from service.auth.provider import TIMEOUT_S, Provider
from service.auth.sessions import COOKIE, IDLE_S, LIFETIME_S, csrf_token_of, is_csrf_token, new_session_secret
from service.auth.settings import GroupRole
from service.auth.tokens import digest_of
from service.errors import LoginRefused
from service.store import accounts as accounts_module
from service.store import schema
from service.store.accounts import AccountStore
from service.types import JobState, LoginRecord, LoginRule, Role, Scope, SessionRecord
from tests.service.api.accounts import OPERATOR, Company, bearer
from tests.service.api.harness import ApiServer, document, stored_study
from tests.service.api.identity_provider import (
    CLIENT,
    SECRET,
    Browser,
    IdentityProvider,
    identity_provider,
    parameters_of,
)

UNLIMITED = RateLimits(*(Rate(math.inf, math.inf) for _ in range(4)))

Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def provider() -> Iterator[IdentityProvider]:
    with identity_provider() as provider:
        provider.add_user("1", preferred_username="owner", email="owner@example.org", email_verified=True)
        provider.add_user("2", preferred_username="root")
        provider.add_user("3", preferred_username="eve")
        yield provider


@pytest.fixture(scope="module")
def company(tmp_path_factory: pytest.TempPathFactory, provider: IdentityProvider) -> Iterator[Company]:
    data_dir = tmp_path_factory.mktemp("api")
    with ApiServer(data_dir, rates=UNLIMITED, prefix="/search", oidc=provider.settings()) as server:
        yield Company.on(server)


@pytest.fixture
def browser(company: Company) -> Iterator[Browser]:
    for user in company.accounts.users():  # an earlier test may have logged in with another identity
        company.accounts.unbind_identity(user.name, actor=OPERATOR)
    with Browser(company.server.url) as browser:
        yield browser


def use(company: Company, provider: IdentityProvider, monkeypatch: Patch, **changes: Any) -> None:
    """Give the server a provider with other settings, whose metadata are not read yet."""
    services = company.server.app.state.services
    logins = Logins(company.accounts, provider.settings(**changes))
    monkeypatch.setattr(company.server.app.state, "services", replace(services, logins=logins))


def later(company: Company, monkeypatch: Patch, seconds: float) -> None:
    """Set the database's clock forward, and forget earlier answers."""
    for name in ("clock", "clock_time"):
        monkeypatch.setattr(accounts_module, name, lambda _: time.time() + seconds)
    company.server.app.state.services.authenticator.forget()


def last_entry(company: Company) -> Any:
    return company.accounts.audit()[-1]


# -- a login -----------------------------------------------------------------------------------------------------------


def test_a_login_reaches_a_job_as_the_user(company: Company, provider: IdentityProvider, browser: Browser) -> None:
    """A browser logs in, submits a study as its user, and logs out; the audit log tells of it, without secrets."""
    begun = browser.begin(next="/docs?x=1")
    asked = parameters_of(begun.headers["location"])
    assert begun.headers["location"].startswith(f"{provider.url}/oauth2/authorize?")
    assert asked["redirect_uri"] == f"{company.server.url}/v1/login/callback"
    assert (asked["client_id"], asked["response_type"]) == (CLIENT, "code")
    assert asked["code_challenge_method"] == "S256"
    assert min(map(len, (asked["state"], asked["nonce"]))) >= 43
    answer = browser.get(browser.authorize(begun.headers["location"], "1"))
    assert (answer.status_code, answer.headers["location"]) == (303, "/docs?x=1")
    verifier = provider.token_requests[-1]["code_verifier"]
    hashed = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).decode().rstrip("=")
    assert hashed == asked["code_challenge"]

    session = browser.get("/v1/session").json()
    assert (session["user"]["name"], session["scope"]) == ("owner", "submit")
    assert browser.get("/v1/me").json()["token"] is None
    csrf = {"X-CSRF-Token": session["csrf_token"]}
    job = browser.post("/v1/studies", json=document("by-browser"), headers=csrf)
    assert (job.status_code, job.json()["owner"], job.json()["team"]) == (201, "owner", "red")
    assert browser.post("/v1/tokens", json={"name": "x"}, headers=csrf).status_code == 403
    assert browser.get("/v1/users").status_code == 403

    (stored,) = (entry for entry in company.accounts.audit(target=f"job {job.json()['id']}"))
    assert (stored.user, stored.token is not None and stored.token.startswith("session ")) == ("owner", True)
    assert browser.post("/v1/logout", headers=csrf).json() == {"was_logged_in": True}
    assert browser.session is None
    entries = company.accounts.audit(target="user owner")[-2:]
    assert [(entry.action, entry.user, entry.origin) for entry in entries] == [
        ("session.login", "owner", "127.0.0.1"),
        ("session.logout", "owner", "127.0.0.1"),
    ]
    assert entries[0].token == entries[1].token == stored.token


def test_administrators_manage_by_a_session(browser: Browser) -> None:
    """A session has the scope `admin` only if its user administers the server."""
    browser.log_in("2")
    assert browser.get("/v1/session").json()["scope"] == "admin"
    assert browser.get("/v1/users").status_code == 200


def test_attributes_of_cookies(company: Company, browser: Browser) -> None:
    """Cookies are HttpOnly, SameSite=Lax, of this server's path, and Secure exactly if the browser uses HTTPS."""

    def attributes(answer: httpx.Response, name: str) -> set[str]:
        (found,) = (text for text in answer.headers.get_list("set-cookie") if text.startswith(name))
        return {part.strip() for part in found.split(";")[1:]}

    base = {"HttpOnly", "SameSite=lax"}
    begun = browser.begin()
    state = parameters_of(begun.headers["location"])["state"]
    expected = base | {f"Max-Age={LOGIN_S:.0f}", "Path=/v1/login"}
    assert attributes(begun, login_cookie(state)) == expected
    ended = browser.get(browser.authorize(begun.headers["location"], "1"))
    assert attributes(ended, COOKIE) == base | {f"Max-Age={LIFETIME_S:.0f}", "Path=/"}
    value = browser.session
    assert value is not None
    assert len(base64.urlsafe_b64decode(value.removeprefix("mss_") + "=")) == 32

    secure = {"X-Forwarded-Proto": "https"}  # as a proxy on this machine says it
    begun = browser.get("/search/v1/login", headers=secure)
    asked = parameters_of(begun.headers["location"])
    assert asked["redirect_uri"] == f"{company.server.url.replace('http', 'https')}/search/v1/login/callback"
    cookie = login_cookie(asked["state"])
    assert attributes(begun, cookie) == base | {f"Max-Age={LOGIN_S:.0f}", "Path=/search/v1/login", "Secure"}
    (sent,) = (text.split(";")[0] for text in begun.headers.get_list("set-cookie"))
    back = browser.authorize(begun.headers["location"], "1").copy_with(scheme="http")
    ended = httpx.get(back, headers={**secure, "Cookie": sent})
    assert ended.headers["location"] == "/search/"
    assert attributes(ended, COOKIE) == base | {f"Max-Age={LIFETIME_S:.0f}", "Path=/search", "Secure"}


def test_the_public_url_stands_for_what_requests_tell(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """Behind a proxy that removes the prefix and does not say HTTPS, the public URL gives address, path and Secure."""
    use(company, provider, monkeypatch, public_url="https://search.example.org/merges")
    begun = browser.begin(next="/merges/docs")
    asked = parameters_of(begun.headers["location"])
    assert asked["redirect_uri"] == "https://search.example.org/merges/v1/login/callback"
    cookie = begun.headers["set-cookie"]
    assert "Path=/merges/v1/login" in cookie
    assert "Secure" in cookie
    assert browser.begin(next="/docs").status_code == 422
    back = browser.authorize(begun.headers["location"], "1")
    ended = httpx.get(f"{company.server.url}/v1/login/callback?{back.query.decode()}", headers={"Cookie": cookie})
    assert ended.headers["location"] == "/merges/docs"


def test_two_servers_share_logins_and_sessions(company: Company, provider: IdentityProvider, browser: Browser) -> None:
    """A login begins at one server and ends at another; a logout at one is seen by the other within a second."""
    begun = browser.begin()
    back = browser.authorize(begun.headers["location"], "1")
    with (
        ApiServer(company.server.data_dir, rates=UNLIMITED, oidc=provider.settings()) as other,
        Browser(other.url, cookies=browser.cookies) as elsewhere,
    ):
        assert elsewhere.get(f"/v1/login/callback?{back.query.decode()}").status_code == 303
        secret = elsewhere.session
        assert secret is not None
        browser.cookies.set(COOKIE, secret)
        assert browser.get("/v1/session").json()["user"]["name"] == "owner"
        assert browser.post("/v1/logout", headers=browser.csrf()).status_code == 200
        begun_at = time.monotonic()
        elsewhere.cookies.set(COOKIE, secret)
        while elsewhere.get("/v1/me").status_code == 200:
            assert time.monotonic() - begun_at < 1.0
            time.sleep(0.02)


def test_disabled_users_lose_their_sessions(company: Company, provider: IdentityProvider, browser: Browser) -> None:
    """Once an administrator disables a user, its sessions are over for good, and it cannot log in."""
    provider.add_user("member", preferred_username="member")
    browser.log_in("member")
    assert browser.get("/v1/me").status_code == 200
    with company.http("root") as root:
        root.patch("/v1/users/member", json={"is_disabled": True}).raise_for_status()
        assert browser.get("/v1/me").status_code == 401
        refused = browser.log_in("member")
        assert (refused.status_code, "is disabled" in refused.json()["detail"]) == (403, True)
        root.patch("/v1/users/member", json={"is_disabled": False}).raise_for_status()
    assert browser.get("/v1/me").status_code == 401


def test_a_name_that_another_person_has_now_is_refused(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """The first identity that logs in as a user stays the user's, until an administrator unbinds it."""
    provider.add_user("first", preferred_username="viewer")
    provider.add_user("second", preferred_username="viewer")
    assert browser.log_in("first").status_code == 303
    with Browser(company.server.url) as other:
        refused = other.log_in("second")
        assert (refused.status_code, "another identity" in refused.json()["detail"]) == (403, True)
        assert other.session is None
        assert last_entry(company).action == "session.refuse"
        assert browser.log_in("first").status_code == 303, "the same identity may"
        with monkeypatch.context() as patch:
            passes(patch, AccountStore, "bind_identity")
            assert other.log_in("second").status_code == 303, "without the check another person is the user"
        with company.http("root") as root:
            root.patch("/v1/users/viewer", json={"identity": None}).raise_for_status()
        assert browser.get("/v1/me").status_code == 401, "its sessions have ended"
        assert other.log_in("second").status_code == 303
        assert browser.log_in("first").status_code == 403


def test_nobody_logs_in_as_a_user_of_programs(company: Company, browser: Browser) -> None:
    """A user of programs has no identity, and an administrator over HTTP allows none; the server's operator may."""
    company.accounts.set_login("root", LoginRule.NEVER, actor=OPERATOR)
    refused = browser.log_in("2")
    assert (refused.status_code, "user 'root': nobody can log in" in refused.json()["detail"]) == (403, True)
    assert browser.session is None
    with company.http("root") as root:
        answer = root.patch("/v1/users/root", json={"identity": None})
        assert (answer.status_code, "nobody can log in as this user" in answer.json()["detail"]) == (409, True)
    company.accounts.set_login("root", LoginRule.FIRST, actor=OPERATOR)
    assert browser.log_in("2").status_code == 303
    company.accounts.set_login("root", LoginRule.KNOWN, actor=OPERATOR)
    assert browser.log_in("2").status_code == 303
    company.accounts.set_login("root", LoginRule.NEVER, actor=OPERATOR)
    company.server.app.state.services.authenticator.forget()
    assert browser.get("/v1/me").status_code == 401, "its sessions have ended"
    company.accounts.set_login("root", LoginRule.FIRST, actor=OPERATOR)


# -- what is refused, and what happens without the check ---------------------------------------------------------------


def passes(monkeypatch: Patch, place: Any, name: str) -> None:
    monkeypatch.setattr(place, name, lambda *_, **__: None)


def without(place: Any, name: str) -> Callable[[Patch], None]:
    return lambda monkeypatch: passes(monkeypatch, place, name)


def any_signature(monkeypatch: Patch) -> None:
    algorithm = JWSRegistry.algorithms["RS256"]
    monkeypatch.setattr(algorithm, "verify", lambda *_: True)


# The claims of an ID token that is not valid, the check that notices, and words of the refusal.
FORGED: dict[str, tuple[dict[str, Any], Callable[[Patch], None], str]] = {
    "nonce": ({"nonce": "n" * 43}, without(IDToken, "validate_nonce"), "nonce"),
    "audience": ({"aud": "another", "azp": CLIENT}, without(JWTClaimsRegistry, "validate_aud"), "aud"),
    "party": ({"aud": [CLIENT, "another"], "azp": "another"}, without(IDToken, "validate_azp"), "azp"),
    "issuer": ({"iss": "http://localhost:1"}, without(JWTClaimsRegistry, "validate_iss"), "iss"),
    "expired": ({"exp": int(time.time()) - 90}, without(JWTClaimsRegistry, "validate_exp"), "expired"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_forged_id_tokens_are_refused(
    kind: str, company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """An ID token for another login, server or time is refused; without the check it would be a login."""
    claims, remove_check, words = FORGED[kind]
    provider.add_user(kind, preferred_username="owner", **claims)
    refused = browser.log_in(kind)
    assert (refused.status_code, words in refused.json()["detail"]) == (403, True), refused.text
    assert "the ID token is not valid" in refused.json()["detail"]
    assert browser.session is None
    entry = last_entry(company)
    assert (entry.action, entry.after) == ("session.refuse", {"reason": refused.json()["detail"]})
    remove_check(monkeypatch)
    assert browser.log_in(kind).status_code == 303


def test_id_tokens_of_another_key_are_refused(browser: Browser, monkeypatch: Patch) -> None:
    """A signature by a key that is not the provider's is refused; without the check it would be a login."""
    own = mock.OpenIDCode.get_jwt_config
    other = RSAKey.generate_key(2048, private=True, auto_kid=False).as_dict(private=True)

    def forged(self: Any, *arguments: Any, **options: Any) -> dict[str, Any]:
        config: dict[str, Any] = own(self, *arguments, **options)
        return {**config, "key": {**other, **{n: v for n, v in config["key"].items() if n == "kid"}}}

    monkeypatch.setattr(mock.OpenIDCode, "get_jwt_config", forged)
    refused = browser.log_in("1")
    assert (refused.status_code, "signature" in refused.json()["detail"]) == (403, True), refused.text
    any_signature(monkeypatch)
    assert browser.log_in("1").status_code == 303


def test_unsigned_id_tokens_are_refused(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """An ID token without a signature is refused, even if the provider's metadata list "none"."""
    own = mock.OpenIDCode.get_jwt_config
    monkeypatch.setattr(mock.OpenIDCode, "get_jwt_config", lambda *a, **o: {**own(*a, **o), "alg": "none"})
    monkeypatch.setitem(provider.metadata, "id_token_signing_alg_values_supported", ["RS256", "none"])
    use(company, provider, monkeypatch)
    refused = browser.log_in("1")
    assert (refused.status_code, "'none' is not allowed" in refused.json()["detail"]) == (403, True), refused.text
    monkeypatch.setattr(provider_module, "ALGORITHMS", provider_module.ALGORITHMS | {"none"})
    use(company, provider, monkeypatch)
    assert browser.log_in("1").status_code == 303


def test_a_login_ends_once_where_it_began(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """Another state, another browser, a second end, and an end after ten minutes are refused."""
    begun = browser.begin()
    page = begun.headers["location"]
    back = browser.authorize(page, "1")

    def refuses(address: httpx.URL, sender: httpx.Client = browser) -> bool:
        answer = sender.get(address)
        is_refused = answer.status_code == 403 and "there is no such login" in answer.json()["detail"]
        assert is_refused or answer.status_code == 303, answer.text
        return is_refused

    other_state = back.copy_set_param("state", "s" * 43)
    with Browser(company.server.url) as other_browser:
        assert refuses(back, other_browser)
        assert refuses(other_state)
        with monkeypatch.context() as context:
            later(company, context, LOGIN_S + 1)
            assert refuses(back)
        assert not refuses(back)
        again = browser.authorize(page, "1")  # a new code for the same state
        assert refuses(again)

        # Without these checks, the last login is taken, whatever its state, browser and time.
        def unchecked(self: AccountStore, *, state: str, browser: str) -> LoginRecord:
            with company.server.store.engine.connect() as connection:
                row = connection.execute(sa.select(schema.logins)).mappings().all()[-1]
            return LoginRecord(row["nonce"], row["verifier"], row["redirect_uri"], row["next"])

        page = browser.begin().headers["location"]
        monkeypatch.setattr(AccountStore, "take_login", unchecked)
        monkeypatch.setattr(login_routes, "login_cookie", lambda _: "any")
        for visitor in (browser, other_browser):
            visitor.cookies.set("any", "any")
            assert not refuses(browser.authorize(page, "1"), visitor)
            assert not refuses(browser.authorize(page, "1").copy_set_param("state", "s" * 43), visitor)


def test_unknown_users_are_refused(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """A user whom the server does not know is refused, or with the option added, without a team."""
    refused = browser.log_in("3")
    assert (refused.status_code, "user 'eve': is not a user of this server" in refused.text) == (403, True)
    entry = last_entry(company)
    assert (entry.action, entry.user, entry.target) == ("session.refuse", None, "user eve")
    use(company, provider, monkeypatch, creates_users=True)
    assert browser.log_in("3").status_code == 303
    assert browser.get("/v1/session").json()["user"]["teams"] == {}
    actions = [entry.action for entry in company.accounts.audit(target="user eve")]
    assert actions[-3:] == ["user.add", "user.bind", "session.login"]


def test_groups_give_roles_at_each_login(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """Groups of the provider give roles in the teams of the option, and take them away; other teams stay."""
    company.accounts.add_team("green", actor=OPERATOR)
    company.accounts.set_role("green", "viewer", Role.VIEWER, actor=OPERATOR)
    rules = (
        GroupRole("g1", "red", Role.VIEWER),
        GroupRole("g2", "red", Role.ADMIN),
        GroupRole("g1", "blue", Role.MEMBER),
        GroupRole("g1", "none", Role.MEMBER),
    )
    use(company, provider, monkeypatch, groups_claim="groups", teams=rules)
    for groups, teams in (
        (["g1", "g2"], {"red": "admin", "blue": "member", "green": "viewer"}),
        ("g2", {"red": "admin", "green": "viewer"}),
        (None, {"green": "viewer"}),
    ):
        claims = {} if groups is None else {"groups": groups}
        provider.add_user("viewer", preferred_username="viewer", **claims)
        assert browser.log_in("viewer").status_code == 303
        assert browser.get("/v1/session").json()["user"]["teams"] == teams


@pytest.mark.parametrize(
    ("claims", "claim", "name"),
    [
        ({"preferred_username": "Ann"}, None, "ann"),
        ({"preferred_username": "ann", "email": "b@x.org", "email_verified": True}, None, "ann"),
        ({"email": "Ann@X.org", "email_verified": True}, None, "ann@x.org"),
        ({"preferred_username": "ann", "upn": "bob"}, "upn", "bob"),
    ],
)
def test_the_name_of_a_user(claims: dict[str, Any], claim: str | None, name: str) -> None:
    assert user_name(claims, claim) == name


@pytest.mark.parametrize(
    ("claims", "claim", "words"),
    [
        ({"email": "ann@x.org"}, None, "has not verified the e-mail address 'ann@x.org'"),
        ({"email": "ann@x.org", "email_verified": "true"}, "email", "has not verified"),
        ({"preferred_username": "\u212aate"}, None, "is not a name"),  # its lower-case form is "kate"
        ({"preferred_username": "a b"}, None, "claim preferred_username: 'a b' is not a name"),
        ({"preferred_username": ["ann"]}, None, "the claim preferred_username is ['ann']"),
        ({}, None, "the claim email is None"),
        ({"preferred_username": "ann"}, "upn", "the claim upn is None"),
    ],
)
def test_names_that_are_refused(claims: dict[str, Any], claim: str | None, words: str) -> None:
    with pytest.raises(LoginRefused, match=re.escape(words)):
        user_name(claims, claim)


def test_groups_that_are_no_list_are_refused(provider: IdentityProvider) -> None:
    settings = provider.settings(groups_claim="groups", teams=(GroupRole("g", "red", Role.MEMBER),))
    for groups in ({"g": 1}, [1], 7):
        with pytest.raises(LoginRefused, match=r"claim groups: .* is not a list of the names of groups"):
            team_roles({"groups": groups}, settings)


def test_claims_may_be_in_the_user_info_alone(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """A provider may tell the name in its user info only; that of another user is refused."""
    monkeypatch.setattr(mock.OpenIDCode, "generate_user_info", lambda _, user, scope: {"sub": user.sub})
    assert browser.log_in("1").status_code == 303
    assert browser.get("/v1/session").json()["user"]["name"] == "owner"
    monkeypatch.setitem(provider.user_info, "sub", "2")
    refused = browser.log_in("1")
    assert (refused.status_code, "is that of another user" in refused.json()["detail"]) == (403, True)


def test_a_login_that_the_provider_ends(company: Company, browser: Browser) -> None:
    """The message names the code of the provider's refusal, and nothing else that came with it."""
    for error, shown in (("access_denied", "access_denied"), ("<script>", "unknown error")):
        state = parameters_of(browser.begin().headers["location"])["state"]
        refused = browser.get("/v1/login/callback", params={"error": error, "state": state})
        assert (refused.status_code, refused.json()["detail"]) == (
            403,
            f"the identity provider ended the login: {shown}",
        )
    for parameters, field in (({}, "state"), ({"state": "x"}, "code")):
        answer = browser.get("/v1/login/callback", params=parameters)
        assert (answer.status_code, answer.json()["problems"][0]["field"]) == (422, field)
    state = parameters_of(browser.begin().headers["location"])["state"]
    wrong = browser.get("/v1/login/callback", params={"code": "wrong", "state": state})
    assert (wrong.status_code, "does not accept the code" in wrong.json()["detail"]) == (403, True)


# -- sessions ----------------------------------------------------------------------------------------------------------


def test_csrf_is_refused(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """With a session, nothing changes without its CSRF token from a page of this server; tokens need none."""
    browser.log_in("1")
    csrf = browser.csrf()
    with Browser(company.server.url) as second:
        second.log_in("1")
        other = second.csrf()
    wrong: tuple[tuple[dict[str, str], str], ...] = (
        ({}, "X-CSRF-Token: is missing"),
        ({"X-CSRF-Token": ""}, "X-CSRF-Token: is not that of this session"),
        (other, "X-CSRF-Token: is not that of this session"),
        ({**csrf, "Sec-Fetch-Site": "cross-site"}, "Sec-Fetch-Site 'cross-site': pages of other servers"),
        ({**csrf, "Sec-Fetch-Site": "same-site"}, "Sec-Fetch-Site 'same-site': pages of other servers"),
        ({**csrf, "Origin": "https://evil.example.org"}, "Origin 'https://evil.example.org'"),
    )
    for headers, words in wrong:
        refused = browser.post("/v1/studies", json=document("forged"), headers=headers)
        assert (refused.status_code, words in refused.json()["detail"]) == (403, True), refused.text
        assert browser.post("/v1/logout", headers=headers).status_code == 403
    assert browser.get("/v1/studies", headers={"Sec-Fetch-Site": "cross-site"}).status_code == 200
    assert browser.get("/v1/studies", params={"name": "forged"}).json()["studies"] == []
    same = {**csrf, "Sec-Fetch-Site": "same-origin", "Origin": company.server.url}
    assert browser.post("/v1/studies", json=document("own"), headers=same).status_code == 201
    token = bearer(company.tokens["owner", Scope.SUBMIT])
    assert browser.post("/v1/studies", json=document("token"), headers=token).status_code == 201
    monkeypatch.setattr("service.api.permissions.csrf_problem", lambda *_, **__: None)
    assert browser.post("/v1/studies", json=document("forged")).status_code == 201


def test_a_csrf_token_is_of_one_session() -> None:
    secret, other = new_session_secret(), new_session_secret()
    assert secret != other
    assert is_csrf_token(csrf_token_of(secret), secret=secret)
    assert not is_csrf_token(csrf_token_of(other), secret=secret)
    assert secret not in csrf_token_of(secret)


@pytest.mark.parametrize("is_idle", [False, True])
def test_sessions_expire(is_idle: bool, company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """A session ends after twelve hours, however much it is used, and after two without a request."""
    browser.log_in("1")
    if is_idle:
        steps, after = [IDLE_S - 60], IDLE_S + 1
    else:
        steps = [hours * 3600.0 for hours in range(1, 12)]
        after = LIFETIME_S + 1 - steps[-1]
    for seconds in steps:
        later(company, monkeypatch, seconds)
        assert browser.get("/v1/me").status_code == 200
        company.server.app.state.services.authenticator.store_uses()
    later(company, monkeypatch, steps[-1] + after)
    refused = browser.get("/v1/me")
    assert (refused.status_code, "the session is not valid" in refused.json()["detail"]) == (401, True)
    monkeypatch.setattr(SessionRecord, "is_valid", lambda *_, **__: True)
    company.server.app.state.services.authenticator.forget()
    assert browser.get("/v1/me").status_code == 200


def test_a_session_that_is_over_is_removed(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """The next login removes sessions and logins that have expired from the database."""

    def stored() -> list[int]:
        with company.server.store.engine.connect() as connection:
            return [
                connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
                for table in (schema.sessions, schema.logins)
            ]

    browser.log_in("1")
    browser.begin()
    assert min(stored()) >= 1
    later(company, monkeypatch, LIFETIME_S + 1)
    browser.log_in("1")
    assert stored() == [1, 0]


def test_a_session_ends_with_its_logout(browser: Browser, company: Company, monkeypatch: Patch) -> None:
    """After a logout the cookie's value is worth nothing; it is the database that ends it."""
    for is_broken in (False, True):
        browser.log_in("1")
        secret = browser.session
        assert secret is not None
        if is_broken:
            monkeypatch.setattr(AccountStore, "end_session", lambda *_, **__: True)
        browser.post("/v1/logout", headers=browser.csrf()).raise_for_status()
        answer = browser.get("/v1/me", headers={"Cookie": f"{COOKIE}={secret}"})
        assert answer.status_code == (200 if is_broken else 401)


def test_a_login_replaces_the_session(company: Company, browser: Browser) -> None:
    """A second login in a browser ends the session that the browser had."""
    browser.log_in("1")
    first = browser.session
    browser.log_in("2")
    assert browser.get("/v1/session").json()["user"]["name"] == "root"
    assert httpx.get(f"{company.server.url}/v1/me", headers={"Cookie": f"{COOKIE}={first}"}).status_code == 401


def test_a_stream_ends_with_its_session(company: Company, browser: Browser) -> None:
    """After a logout, an open stream sends no further event."""
    record = company.own(stored_study(company.server.store))
    writer = company.server.store.open_attempt(record.id)
    browser.log_in("1")
    csrf = browser.csrf()
    with browser.stream("GET", f"/v1/studies/{record.id}/events") as response:
        lines = response.iter_lines()
        assert any("created" in line for line in lines)
        browser.post("/v1/logout", headers=csrf).raise_for_status()
        writer.add_event("note", {"text": "secret of the team"})
        assert not any("secret of the team" in line for line in lines)
    writer.set_state(JobState.CANCELLED)


def test_tokens_are_no_sessions(company: Company, browser: Browser) -> None:
    """A token shows its user, and ends no session; a token in the cookie, and a session as a token, are not valid."""
    token = company.tokens["owner", Scope.READ]
    shown = browser.get("/v1/session", headers=bearer(token)).json()
    assert (shown["user"]["name"], shown["scope"]) == ("owner", "read")
    assert (shown["csrf_token"], shown["expires_at"]) == (None, None)
    assert browser.post("/v1/logout", headers=bearer(token)).json() == {"was_logged_in": False}
    assert browser.get("/v1/me", headers={"Cookie": f"{COOKIE}={token}"}).status_code == 401
    browser.log_in("1")
    assert browser.session is not None
    assert httpx.get(f"{company.server.url}/v1/me", headers=bearer(browser.session)).status_code == 401
    refused = httpx.get(f"{company.server.url}/v1/me")
    assert (refused.status_code, "browsers log in at /v1/login" in refused.json()["detail"]) == (401, True)


# -- paths, limits, failures -------------------------------------------------------------------------------------------

ELSEWHERE = (
    "https://evil.example.org",
    "//evil.example.org",
    "///evil.example.org",
    "/\\evil.example.org",
    "\\\\evil.example.org",
    "/\t/evil.example.org",
    "/\n/evil.example.org",
    "javascript:alert(1)",
    "evil",
    "",
    "/../evil",
    "/a/%2e%2E/b",
    "/é",
    f"/{'a' * 2000}",
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_other_servers_are_no_next_path(path: str) -> None:
    assert next_problem(path, below="") is not None


def test_next_is_a_path_below_the_prefix() -> None:
    for path in ("/", "/docs", "/studies/1?tab=front#best", "/a%20b"):
        assert next_problem(path, below="") is None
        assert next_problem(f"/search{path}", below="/search") is None
    for path in ("/", "/searching", "/other/search/", "/search/../other"):
        assert "/search" in str(next_problem(path, below="/search"))


def test_an_open_redirect_is_refused(browser: Browser, monkeypatch: Patch) -> None:
    """A login leads to paths of this server only; without the check it would lead anywhere."""
    refused = browser.begin(next="//evil.example.org")
    assert (refused.status_code, refused.json()["problems"][0]["field"]) == (422, "next")
    monkeypatch.setattr(login_routes, "next_problem", lambda *_, **__: None)
    assert browser.log_in("1", next="//evil.example.org").headers["location"] == "//evil.example.org"


def test_below_the_prefix_paths_have_it(browser: Browser) -> None:
    for path in ("/search", "/search?tab=1", "/search/docs#a", "/search//docs"):
        begun = browser.get("/search/v1/login", params={"next": path})
        answer = browser.get(browser.authorize(begun.headers["location"], "1"))
        expected = path if path.startswith("/search/") else path.replace("/search", "/search/")
        assert answer.headers["location"] == expected


def test_without_a_provider_there_is_no_login(tmp_path: Path) -> None:
    """A server without an identity provider says so; sessions work as senders without accounts do."""
    with ApiServer(tmp_path) as server, Browser(server.url) as browser:
        for path in ("/v1/login", "/v1/login/callback?state=x&code=y"):
            answer = browser.get(path)
            assert (answer.status_code, "--oidc-issuer" in answer.json()["detail"]) == (404, True)
        assert browser.get("/v1/session").json()["user"] is None
        assert browser.post("/v1/logout").json() == {"was_logged_in": False}


def test_a_provider_that_does_not_answer(
    company: Company, provider: IdentityProvider, browser: Browser, monkeypatch: Patch
) -> None:
    """While the provider is away, hangs or answers nonsense, a login gets 503 within the time limit."""
    services = company.server.app.state.services
    with socket.create_server(("127.0.0.1", 0)) as silent, socket.create_server(("127.0.0.1", 0)) as probe:
        hanging, closed = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in (silent, probe))
        probe.close()
        for url, timeout_s, words in (
            (hanging, 0.3, "does not answer within 0.3 s"),
            (closed, TIMEOUT_S, "does not answer (ConnectError)"),
            (company.server.url, TIMEOUT_S, "answers with status 404"),
        ):
            settings = provider.settings(issuer=url)
            logins = Logins(company.accounts, settings, provider=Provider(settings, timeout_s=timeout_s))
            monkeypatch.setattr(company.server.app.state, "services", replace(services, logins=logins))
            answer = browser.begin()  # which waits 30 s
            assert (answer.status_code, words in answer.json()["detail"]) == (503, True), answer.text
            assert url in answer.json()["detail"]
            assert int(answer.headers["retry-after"]) > 0
    for metadata, words in (
        ({"issuer": "https://other.example.org"}, "calls itself 'https://other.example.org'"),
        ({"token_endpoint": "http://idp.example.org/token"}, "its token_endpoint is"),
        ({"jwks_uri": None}, "its jwks_uri is None"),
        ({"id_token_signing_alg_values_supported": ["HS256", "none"]}, "signs ID tokens by none of"),
    ):
        with monkeypatch.context() as context:
            for name, value in metadata.items():
                context.setitem(provider.metadata, name, value)
            use(company, provider, context)
            answer = browser.begin()
            assert (answer.status_code, words in answer.json()["detail"]) == (503, True), answer.text


def test_a_wrong_client_secret_is_the_operators(company: Company, browser: Browser, monkeypatch: Patch) -> None:
    """A provider that refuses the server's own credentials is no refusal of the user."""
    monkeypatch.setattr(mock.ClientAllowAny, "__eq__", lambda *_: False, raising=False)
    monkeypatch.setattr(mock.Client, "check_client_secret", lambda *_: False)
    answer = browser.log_in("1")
    assert (answer.status_code, "refuses this server: invalid_client" in answer.json()["detail"]) == (503, True)


def test_logins_of_an_address_are_limited(tmp_path: Path, provider: IdentityProvider) -> None:
    rates = RateLimits(logins=Rate(0.1, 2))
    with ApiServer(tmp_path, rates=rates, oidc=provider.settings()) as server, Browser(server.url) as browser:
        assert [browser.begin().status_code for _ in range(3)] == [303, 303, 429]


def test_without_users_nobody_logs_in(tmp_path: Path, provider: IdentityProvider) -> None:
    """The first user is an administrator that the operator adds, even if logins add users."""
    with (
        ApiServer(tmp_path, oidc=provider.settings(creates_users=True)) as server,
        Browser(server.url) as browser,
    ):
        refused = browser.log_in("1")
        assert (refused.status_code, "first user must be an administrator" in refused.json()["detail"]) == (403, True)


def test_no_secret_of_a_login_is_shown(
    company: Company, provider: IdentityProvider, browser: Browser, caplog: pytest.LogCaptureFixture
) -> None:
    """The client secret, the session, state, code, nonce, verifier and ID token are in no log and no table."""
    caplog.set_level(logging.DEBUG)
    begun = browser.begin()
    asked = parameters_of(begun.headers["location"])
    back = browser.authorize(begun.headers["location"], "1")
    answers = [browser.get(back), browser.get(back), browser.get("/v1/session"), browser.get("/v1/me")]
    assert [answer.status_code for answer in answers] == [303, 403, 200, 200]
    secret = browser.session
    assert secret is not None
    verifier = provider.token_requests[-1]["code_verifier"]
    secrets = [SECRET, secret, asked["state"], asked["nonce"], verifier, parameters_of(back)["code"]]
    own = ("httpx", "httpcore", "oidc_provider_mock", "werkzeug")  # of the browser and the provider of this test
    logged = "\n".join(r.getMessage() for r in caplog.records if not r.name.startswith(own) or r.name[:6] == "httpx2")
    assert "httpx2" in {record.name.partition(".")[0] for record in caplog.records}
    with sqlite3.connect(company.server.data_dir / "mergesearch.db") as connection:
        stored = "\n".join(connection.iterdump())
    shown = "\n".join(answer.text for answer in answers)
    assert digest_of(secret) in stored
    for value in secrets:
        assert value not in logged
        assert value not in stored
        assert value not in shown
    assert SECRET not in repr(company.server.app.state.services.logins.settings)


def test_the_clients_of_other_loops_are_not_shared(provider: IdentityProvider) -> None:
    """Simultaneous logins read the metadata without waiting for each other."""
    logins = Provider(provider.settings())
    record = LoginRecord("n", "v" * 43, "http://localhost/v1/login/callback", "/")

    async def both() -> list[str]:
        return list(await asyncio.gather(*(logins.login_url(record, state=state) for state in ("a", "b"))))

    assert [parameters_of(url)["state"] for url in asyncio.run(both())] == ["a", "b"]
