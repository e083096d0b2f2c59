"""Logins of browsers, with an identity provider or with an API token, until the session begins.

A login with an identity provider begins with a random state, nonce and verifier, which are in the database for ten
minutes, and a random value in a cookie of the browser. A login can end only once, and only in the same browser.
"""

from __future__ import annotations

import hashlib
import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote, urlsplit

from service.auth.authenticator import Authenticator
from service.auth.provider import Provider
from service.auth.sessions import IDLE_S, LIFETIME_S, new_session_secret
from service.auth.settings import OidcSettings
from service.auth.tokens import digest_of
from service.errors import Conflict, LoginRefused, NotFound
from service.store.accounts import AccountStore, Actor, name_problem
from service.threads import Work, in_thread
from service.types import LoginRecord, Role, UserRecord

__all__ = [
    "LOGIN_S",
    "Begun",
    "Ended",
    "Logins",
    "log_in_with_token",
    "login_cookie",
    "next_problem",
    "team_roles",
    "user_name",
]

logger = logging.getLogger(__name__)

# Seconds for a login.
LOGIN_S = 600.0

# Beginning of the names of cookies of logins: several may be in progress in a browser.
LOGIN_COOKIE = "mergesearch_login_"

MAX_NEXT = 2000

# Roles from the smallest to the largest.
ORDER = (Role.VIEWER, Role.MEMBER, Role.ADMIN)


@dataclass(frozen=True)
class Begun:
    """A browser's login that has begun; it ends when the identity provider sends the browser back.

    `url` is the address at the identity provider to which the browser goes. `state` is the OAuth state, by which the
    provider's answer is recognised. `browser` is the value of the cookie that binds the login to the browser.
    """

    url: str = field(repr=False)
    state: str = field(repr=False)
    browser: str = field(repr=False)


@dataclass(frozen=True)
class Ended:
    """Result of a browser's successful login: the secret of the new session, and the page to open next.

    `secret` is the value of the session's cookie. `next` is the path of this server to which the browser goes.
    """

    secret: str = field(repr=False)
    next: str


class Logins:
    """Logins of browsers with one identity provider, from the redirect to the provider until the session begins.

    `settings` describe the provider, and what its users may do on this server. `provider` is the client that talks to
    the provider, and is replaced in tests; None makes a client from `settings`.
    """

    def __init__(self, accounts: AccountStore, settings: OidcSettings, *, provider: Provider | None = None) -> None:
        self._accounts = accounts
        self._provider = provider or Provider(settings)
        self.settings = settings

    async def begin(self, *, redirect_uri: str, next_path: str) -> Begun:
        """Begin a login of a browser, and return the address of the provider, to which the browser must go.

        `redirect_uri` is the address of this server to which the provider sends the browser back. `next_path` is the
        path of this server to which the browser goes after the login. Raises ProviderUnavailable if the provider does
        not answer.
        """
        state, browser = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        login = LoginRecord(
            nonce=secrets.token_urlsafe(32),
            verifier=secrets.token_urlsafe(64),
            redirect_uri=redirect_uri,
            next=next_path,
        )
        url = await self._provider.login_url(login, state=state)
        await in_thread(
            Work.WRITE,
            lambda: self._accounts.add_login(
                login, state=digest_of(state), browser=digest_of(browser), lifetime_s=LOGIN_S
            ),
        )
        return Begun(url, state, browser)

    async def finish(
        self, *, state: str, browser: str | None, code: str | None, error: str | None, address: str
    ) -> Ended:
        """End a login with the identity provider's answer, which the browser brings: a `code`, or an `error`.

        `state` is the OAuth state in the answer. `browser` is the value of the login's cookie; None if the browser has
        no such cookie. `address` is the network address of the browser, for the audit log. Returns the cookie of the
        new session, and the path to which the browser goes.

        Raises:
            LoginRefused: The login or its answer is not valid, or the user may not log in. The audit log has an entry.
            ProviderUnavailable: The provider does not answer.
        """
        user: str | None = None
        try:
            login = await in_thread(Work.WRITE, self._take, state, browser)
            if error is not None or code is None:
                shown = error if error is not None and re.fullmatch("[a-z_]{1,40}", error) else "unknown error"
                raise LoginRefused(f"the identity provider ended the login: {shown}")
            claims = await self._provider.claims(login, code=code)
            user = user_name(claims, self.settings.user_claim)
            roles = team_roles(claims, self.settings)
            identity = f"{self.settings.issuer} {claims['sub']}"
            return await in_thread(Work.WRITE, self._let_in, user, identity, roles, login.next, address)
        except LoginRefused as refused:
            target, actor = "login" if user is None else f"user {user}", Actor(None, address)
            reason = {"reason": str(refused)}
            await in_thread(Work.WRITE, lambda: self._accounts.record(actor, "session.refuse", target, after=reason))
            raise

    def _take(self, state: str, browser: str | None) -> LoginRecord:
        login = None
        if browser is not None:
            login = self._accounts.take_login(state=digest_of(state), browser=digest_of(browser))
        if login is None:
            raise LoginRefused(
                f"there is no such login: it took more than {LOGIN_S / 60:g} minutes, has ended already, or was begun "
                "in another browser; log in again",
                code="expired",
            )
        return login

    def _let_in(
        self, name: str, identity: str, roles: Mapping[str, Role | None], next_path: str, address: str
    ) -> Ended:
        """Give a user the roles that follow from the identity provider's groups, begin a session, and return it.

        `name` is the name of the user, who is added if the settings allow it. `identity` consists of the provider's
        issuer and subject; no other identity can log in as the user afterwards. `roles` has the role in each team; None
        ends the membership. `next_path` is the path to which the browser goes, and `address` is the network address of
        the browser, for the audit log. Raises LoginRefused if the user is not known, is disabled, or is bound to
        another identity.
        """
        actor = Actor(name, address)
        try:
            user = self._accounts.user(name)
        except NotFound:
            user = self._new_user(name, actor)
        if user.is_disabled:
            raise LoginRefused(f"user {name!r}: is disabled; an administrator of the server can enable it", code="user")
        try:
            self._accounts.bind_identity(name, identity, actor=actor)
        except Conflict as error:
            raise LoginRefused(str(error), code="user") from error
        for team, role in roles.items():
            if user.roles.get(team) is not role:
                try:
                    self._accounts.set_role(team, name, role, actor=actor)
                except NotFound:
                    logger.warning("--oidc-team: there is no team %r, so user %r gets no role in it", team, name)
        secret = new_session_secret()
        try:
            self._accounts.add_session(
                name, digest=digest_of(secret), lifetime_s=LIFETIME_S, idle_s=IDLE_S, actor=actor
            )
        except Conflict as error:
            raise LoginRefused(str(error), code="user") from error
        return Ended(secret, next_path)

    def _new_user(self, name: str, actor: Actor) -> UserRecord:
        if not self.settings.creates_users:
            raise LoginRefused(
                f"user {name!r}: is not a user of this server; an administrator can add it, or the server's operator "
                "can give --oidc-create-users",
                code="user",
            )
        try:
            return self._accounts.add_user(name, is_admin=False, actor=actor)
        except Conflict as error:
            try:
                return self._accounts.user(name)  # another login has just added it
            except NotFound:
                raise LoginRefused(str(error), code="user") from error


async def log_in_with_token(
    accounts: AccountStore, authenticator: Authenticator, token: str, *, address: str
) -> str | None:
    """Begin a session of a browser with an API `token`, and return the value of the session's cookie.

    The session has the token's scope, and ends when the token is revoked or expires. `address` is the network address
    of the browser, for the audit log. Returns None if the token is unknown, revoked or expired, or if its user is
    disabled. The audit log has refusals of known tokens only, so that requests with random tokens cannot fill the
    database.
    """
    found = await authenticator.authenticate(token)
    if found is None:
        await in_thread(Work.WRITE, _record_refusal, accounts, token, address)
        return None
    secret = new_session_secret()
    await in_thread(
        Work.WRITE,
        lambda: accounts.add_session(
            found.account.user,
            digest=digest_of(secret),
            lifetime_s=LIFETIME_S,
            idle_s=IDLE_S,
            actor=Actor(found.account.user, address),
            token=found.token,
        ),
    )
    return secret


def _record_refusal(accounts: AccountStore, token: str, address: str) -> None:
    known = accounts.known_token(digest_of(token))
    if known is None:
        logger.info("a login from %s was refused: there is no such token", address)
        return
    reason = {"reason": "the token is not valid", "token": known.prefix}
    accounts.record(Actor(None, address), "session.refuse", f"user {known.user}", after=reason)


def login_cookie(state: str) -> str:
    """Name of the cookie that binds a browser's login with the given OAuth `state` to this browser.

    The name is different for each login, because several logins may be in progress in one browser.
    """
    return LOGIN_COOKIE + hashlib.sha256(state.encode("utf-8", "surrogateescape")).hexdigest()[:8]


def user_name(claims: Mapping[str, Any], claim: str | None) -> str:
    """Find the name of the user in the claims of an ID token, and convert its letters to lower case.

    The name is the value of the claim that `claim` names. If `claim` is None, the name is the value of the claim
    `preferred_username` or, if that is missing, of the claim `email`. An e-mail address counts only if the provider has
    verified it. Raises LoginRefused if there is no valid name.
    """
    if claim is None:
        claim = "preferred_username" if claims.get("preferred_username") else "email"
    value = claims.get(claim)
    if not isinstance(value, str) or not value:
        raise LoginRefused(f"the identity provider does not name the user: the claim {claim} is {value!r:.80}")
    if claim == "email" and claims.get("email_verified") is not True:
        raise LoginRefused(f"the identity provider has not verified the e-mail address {value!r:.80} of the user")
    # Other letters may become ASCII ones in lower case, as the Kelvin sign becomes k.
    name = value.lower() if value.isascii() else value
    if problem := name_problem(name):
        raise LoginRefused(f"claim {claim}: {problem}")
    return name


def team_roles(claims: Mapping[str, Any], settings: OidcSettings) -> dict[str, Role | None]:
    """Compute the user's role in each team of `settings.teams` from the groups in the claims of an ID token.

    If several groups give the user a role in a team, the result contains the role with the most rights. If no group
    gives the user a role in a team, the role is None. If the claim with the groups is missing, the user is in no group.
    The result is empty if `settings.groups_claim` is None. Raises LoginRefused if the claim is not a list of texts.
    """
    if settings.groups_claim is None:
        return {}
    groups = claims.get(settings.groups_claim, [])
    groups = [groups] if isinstance(groups, str) else groups
    if not isinstance(groups, list) or not all(isinstance(group, str) for group in groups):
        raise LoginRefused(f"claim {settings.groups_claim}: {groups!r:.80} is not a list of the names of groups")
    found: dict[str, Role | None] = {}
    for rule in settings.teams:
        role = found.setdefault(rule.team, None)
        if rule.group in groups and (role is None or ORDER.index(rule.role) > ORDER.index(role)):
            found[rule.team] = rule.role
    return found


def next_problem(path: str, *, below: str) -> str | None:
    """Reason why a browser may not be sent to `path` after a login; None if the browser may be sent there.

    `path` must be a path of this server, because a page of another server could imitate this one. `path` must also be
    below the path `below`; "" is the root.
    """
    accepted = f"give a path of this server, such as {below}/docs"
    if len(path) > MAX_NEXT:
        return f"has {len(path)} characters, more than {MAX_NEXT}; {accepted}"
    try:
        parts = urlsplit(path)
        is_path = not parts.scheme and not parts.netloc
    except ValueError:
        is_path = False
    # Browsers read \ as /, drop tabs and line ends, and take // as the beginning of another server's address.
    if not is_path or not re.fullmatch(r"/(?![/\\])[!-\[\]-~]*", path):
        return f"{path!r:.100} is not a path of this server; {accepted}"
    if any(unquote(segment) in (".", "..") for segment in parts.path.split("/")):
        return f"{path!r:.100} has the segment . or ..; {accepted}"
    if not f"{parts.path}/".startswith(f"{below}/"):
        return f"{path!r:.100} is not below {below}; {accepted}"
    return None
