"""Access rules of routes: the scope that a token or session needs, and the right on the object that the request names.

Every route depends on exactly one dependency of this module, which has the route's `Rule`. The application refuses to
start if a route has none (`check_rules`), and the test of all routes and senders derives the expected statuses from
the rules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import BaseRoute

from service.api.limits.csrf import csrf_problem
from service.api.limits.rates import Rate, RateLimits
from service.api.problems import Refusal, TooManyRequests, Unauthorized
from service.api.protocols import Principal
from service.auth.authenticator import Authenticated, Authenticator
from service.auth.sessions import COOKIE
from service.types import JobRecord, Scope

__all__ = [
    "Credential",
    "Guard",
    "Renewal",
    "Right",
    "Rule",
    "Sender",
    "check_admin",
    "check_right",
    "check_rules",
    "credential_of",
    "declares",
    "logs_in",
    "needs",
    "open_to_all",
    "reads_metrics",
    "rule_of",
    "sender_with",
]


# A sender to a server without accounts must not become the administrator of a later one with accounts.
NO_ACCOUNTS = (
    "the server has no accounts; the first administrator is added on its machine: `mergesearch users add NAME --admin`"
)


class Right(StrEnum):
    """Rights on the object that a request's path names.

    - READ: to read a job
    - USE: to have models of a job exported
    - CHANGE: to change and delete a job
    - MANAGE: to change the members of a team
    - OWN: to revoke a token, which its user and administrators may do
    """

    READ = "read"
    USE = "use"
    CHANGE = "change"
    MANAGE = "manage"
    OWN = "own"


@dataclass(frozen=True)
class Rule:
    """Requirements of a route on the sender of a request.

    - `scope`: the scope that the token must have; None if everybody may send the request, even without a token
    - `right`: the right that the sender must have on the object that the path names; None if the path names no object
    - `is_for_admins`: whether only administrators of the server may send the request
    """

    scope: Scope | None
    right: Right | None = None
    is_for_admins: bool = False


@dataclass(frozen=True)
class Credential:
    """The part of a request by which the server finds its sender.

    A request has a token, or the value of a session's cookie, or neither.
    """

    token: str | None = field(default=None, repr=False)
    session: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Guard:
    """Identification of the senders of requests, and limits on their number, for one server.

    - `authenticator`: finds the users of tokens and sessions
    - `rates`: the limits on the number of requests
    - `has_open_metrics`: whether everybody may read the metrics, which name all jobs
    - `has_login`: whether browsers can log in with an identity provider
    """

    authenticator: Authenticator
    rates: RateLimits
    has_open_metrics: bool = False
    has_login: bool = False

    async def identify(self, credential: Credential, address: str) -> Principal:
        """Find the sender of a request from `address`, and count the request against the sender's limit.

        `credential` is the token or the session's cookie of the request.

        Raises:
            Unauthorized: The server has accounts, and the token or session is missing or not valid.
            TooManyRequests: The sender or the address has sent too many requests.
        """
        if not await self.authenticator.needs_token():
            self._count(self.rates.open, address)
            return Principal(address, address)
        found = await self._found(credential)
        if found is None:
            self._count(self.rates.refused, address)
            raise Unauthorized(self._refusal(credential))
        self._count(self.rates.tokens, found.id)
        return _principal(found, address)

    async def renewed(self, sender: Principal, credential: Credential) -> Principal | None:
        """Read the sender's current rights again, while a long response such as an event stream is being sent.

        `credential` is the token or cookie of the request. Returns None if it is no longer valid. While the database
        does not answer, `sender` is returned unchanged.
        """
        try:
            if not await self.authenticator.needs_token():
                return sender
            found = await self._found(credential)
        except SQLAlchemyError:
            return sender
        return None if found is None else _principal(found, sender.address)

    def count_login(self, address: str) -> None:
        """Count a request that begins or ends a login. Raises TooManyRequests."""
        self._count(self.rates.logins, address)

    async def _found(self, credential: Credential) -> Authenticated | None:
        if credential.token is not None:
            return await self.authenticator.authenticate(credential.token)
        if credential.session is not None:
            return await self.authenticator.authenticate_session(credential.session)
        return None

    def _refusal(self, credential: Credential) -> str:
        if credential.token is not None:
            return "the token is not valid: it is unknown, revoked or expired, or its user is disabled"
        browsers = "; browsers log in at /v1/login" if self.has_login else ""
        if credential.session is not None:
            return f"the session is not valid: it is unknown, has ended or expired, or its user is disabled{browsers}"
        return (
            "this server needs a token: send `Authorization: Bearer TOKEN` (commands: `mergesearch login`, or "
            f"MERGESEARCH_TOKEN){browsers}"
        )

    def _count(self, rate: Rate, sender: str) -> None:
        if (wait_s := rate.wait_s(sender)) > 0:
            raise TooManyRequests(
                f"too many requests: at most {rate.per_s:g} a second are accepted in the long run", wait_s
            )


def _principal(found: Authenticated, address: str) -> Principal:
    account = found.account
    return Principal(account.user, address, account, found.token, found.session, found.scope)


_bearer = HTTPBearer(auto_error=False, description="An API token: `mergesearch tokens create`.")


def credential_of(request: Request, bearer: HTTPAuthorizationCredentials | None) -> Credential:
    """Find the token or the session's cookie by which the sender of a request is identified.

    `bearer` is the request's header Authorization, or None. If it has a token, a session's cookie is ignored.
    """
    if bearer is not None:
        return Credential(token=bearer.credentials)
    return Credential(session=request.cookies.get(COOKIE))


async def _sender(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    """Find the sender of a request, by its token or session and its address."""
    guard: Guard = request.app.state.guard
    credential = credential_of(request, bearer)
    sender = await guard.identify(credential, _address(request))
    if sender.session is not None and credential.session is not None:
        problem = csrf_problem(request.method, request.headers, secret=credential.session)
        if problem is not None:
            raise Refusal(403, problem)
    return sender


def _address(request: Request) -> str:
    return request.client.host if request.client is not None else "unknown"


async def _renewal(
    request: Request,
    sender: Annotated[Principal, Depends(_sender)],
    bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Callable[[], Awaitable[Principal | None]]:
    guard: Guard = request.app.state.guard
    return partial(guard.renewed, sender, credential_of(request, bearer))


def _declared(rule: Rule, check: Callable[..., Any]) -> Any:
    """Make `check` a FastAPI dependency that declares `rule`, the requirements of a route on its sender.

    The function `rule_of` reads the declaration.
    """
    check.rule = rule  # type: ignore[attr-defined]
    return Depends(check)


def sender_with(scope: Scope) -> Any:
    """Make a FastAPI dependency that finds the sender, and refuses tokens that lack the `scope` (403).

    Another dependency of the route must declare the route's `Rule`.
    """

    def checked(sender: Annotated[Principal, Depends(_sender)]) -> Principal:
        _check_scope(sender, scope)
        return sender

    return Depends(checked)


def needs(scope: Scope, *, is_for_admins: bool = False) -> Any:
    """Make the FastAPI dependency of a route whose path names no job; it returns the sender of the request.

    At a server with accounts, it refuses requests without a valid token or session, and tokens or sessions that lack
    `scope`. If `is_for_admins` is True, it also refuses senders who do not administer the server.
    """

    def checked(sender: Annotated[Principal, Depends(_sender)]) -> Principal:
        _check_scope(sender, scope)
        if is_for_admins:
            check_admin(sender)
        return sender

    return _declared(Rule(scope, None, is_for_admins), checked)


def open_to_all() -> Any:
    """Make the FastAPI dependency of a route that everybody may use without a token."""

    async def nothing() -> None:
        """Accept every sender."""

    return _declared(Rule(None), nothing)


def logs_in() -> Any:
    """Make the FastAPI dependency of a route that begins or ends a login; it returns the address of the sender.

    Everybody may use such a route without a token. Each address may send only a limited number of these requests.
    """

    async def counted(request: Request) -> str:
        guard: Guard = request.app.state.guard
        guard.count_login(_address(request))
        return _address(request)

    return _declared(Rule(None), counted)


def reads_metrics() -> Any:
    """Make the FastAPI dependency of the route of the metrics.

    Only administrators of the server may read the metrics, unless the operator has opened them to everybody.
    """

    async def checked(
        request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        guard: Guard = request.app.state.guard
        if not guard.has_open_metrics:
            check_admin(await _sender(request, bearer))

    return _declared(Rule(Scope.READ, None, is_for_admins=True), checked)


def declares(rule: Rule, check: Callable[..., Any]) -> Any:
    """Make a FastAPI dependency of the function `check` that declares `rule`.

    The dependency does not check the rule by itself: `check` must check the rights that `rule` states.
    """
    return _declared(rule, check)


Sender = Annotated[Principal, Depends(_sender)]
"""The sender of a request, beside another dependency that declares the route's rule."""

Renewal = Annotated[Callable[[], Awaitable[Principal | None]], Depends(_renewal)]
"""Function that finds the sender's present rights, for responses that last."""


def check_right(sender: Principal, job: JobRecord, right: Right, *, noun: str) -> bool:
    """Check that the sender has a right on a job; return False if the sender may not even read the job.

    Raises Refusal (403) if the sender may read the job but lacks `right`. `noun` is the word for the job in the
    message.
    """
    account = sender.account
    if account is None:
        return True
    if not account.may_read(job):
        return False
    if right is Right.CHANGE and not account.may_change(job):
        raise Refusal(403, f"{noun} {job.name!r}: only its owner and administrators may change it; you may read it")
    if right is Right.USE and not account.may_use(job):
        raise Refusal(403, f"{noun} {job.name!r}: only members of its team may export its models; you may read it")
    return True


def _check_scope(sender: Principal, scope: Scope) -> None:
    if scope is Scope.ADMIN and sender.account is None:
        raise Refusal(403, NO_ACCOUNTS)
    if sender.scope is not None and not sender.scope.allows(scope):
        has = "the session" if sender.token is None else "the token"
        needed = "a token" if sender.token is None else "one"
        raise Refusal(403, f"{has} has the scope {sender.scope}; this request needs {needed} with the scope {scope}")


def check_admin(sender: Principal) -> None:
    """Raise Refusal (403) unless the sender administers the server."""
    if sender.account is not None and not sender.account.is_admin:
        raise Refusal(403, f"{sender.account.user}: only administrators of the server may send this request")


def rule_of(route: APIRoute) -> Rule:
    """The rule that a route declares. Raises TypeError if it declares none, or several."""
    found = set(_rules(route.dependant))
    if len(found) != 1:
        raise TypeError(
            f"route {', '.join(sorted(route.methods))} {route.path}: declares {len(found)} rules; it must depend on "
            "exactly one dependency of service.api.permissions or service.api.dependencies that declares what it needs"
        )
    return found.pop()


def _rules(dependant: Dependant) -> Iterator[Rule]:
    for part in dependant.dependencies:
        if isinstance(rule := getattr(part.call, "rule", None), Rule):
            yield rule
        yield from _rules(part)


def check_rules(routes: list[BaseRoute]) -> None:
    """Check that every route of the API declares its rule. Raises TypeError at the first one that does not."""
    for route in routes:
        if isinstance(route, APIRoute):
            rule_of(route)
