"""Access rules of routes: the scope that a token or session needs, and the right on the object that the request names.

Every route depends on exactly one dependency of this module, which declares the route's `Rule`. The application refuses
to start if a route has no such dependency (function `check_rules`), and the test of all routes and senders derives the
expected statuses from the rules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
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

from service.api.limits.csrf import csrf_problem, foreign_problem
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
    "needs_throughout",
    "open_to_all",
    "reads_dashboard",
    "reads_metrics",
    "rule_of",
    "sender_with",
    "shows_session",
]


# A sender to a server without accounts must not become the administrator of a later one with accounts.
NO_ACCOUNTS = (
    "the server has no accounts; the first administrator is added on its machine: `mergesearch users add NAME --admin`"
)


class Right(StrEnum):
    """Rights of the sender of a request on the object (job, team or token) that the request's path names.

    - READ: to read a job
    - USE: to export models of a job
    - CHANGE: to change and delete a job
    - SEE: to see a team, which its members and administrators of the server may do
    - MANAGE: to change the members of a team
    - OWN: to revoke a token, or to change a webhook or an e-mail address, which its user and administrators may do
    """

    READ = "read"
    USE = "use"
    CHANGE = "change"
    SEE = "see"
    MANAGE = "manage"
    OWN = "own"


@dataclass(frozen=True)
class Rule:
    """Requirements of a route on the sender of a request.

    - `scope`: the scope (kind of requests) that the sender's token or session must permit; None if everybody may send
      the request, even without a token
    - `right`: the right that the sender must have on the object that the path names; None if the path names no object
    - `is_for_admins`: whether only administrators of the server may send the request
    """

    scope: Scope | None
    right: Right | None = None
    is_for_admins: bool = False


@dataclass(frozen=True)
class Credential:
    """The secret in a request that identifies its sender: an API token, or the value of a session's cookie.

    Both fields are None if the request has neither.
    """

    token: str | None = field(default=None, repr=False)
    session: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Guard:
    """Access control of one server: it identifies the senders of requests, and limits the number of their requests.

    - `authenticator`: finds the user of a token or session
    - `rates`: the limits on the number of requests
    - `has_open_metrics`: whether everybody may read the metrics, which name the jobs of all users
    - `has_open_dashboard`: whether every user may read Ray's dashboard, which shows the jobs of all teams
    - `has_login`: whether browsers can log in with an identity provider
    """

    authenticator: Authenticator
    rates: RateLimits
    has_open_metrics: bool = False
    has_open_dashboard: bool = False
    has_login: bool = False

    async def identify(self, credential: Credential, address: str) -> Principal:
        """Find the sender of a request, and count the request against the sender's limit.

        `credential` is the token or the session's cookie of the request, and `address` is the network address of the
        sender.

        Raises:
            Unauthorized: The server has accounts, and the token or session is missing or not valid.
            TooManyRequests: The sender, the address or a team of the sender has sent too many requests.
        """
        if not await self.authenticator.needs_token():
            self._count(self.rates.open, address)
            return Principal(address, address)
        found = await self._found(credential)
        if found is None:
            self._count(self.rates.refused, address)
            raise Unauthorized(self._refusal(credential))
        self._count(self.rates.tokens, found.id)
        if not found.account.is_admin:  # administrators may raise a quota that is used up
            self._count_teams(found.account.rates)
        return _principal(found, address)

    async def renewed(self, sender: Principal, credential: Credential) -> Principal | None:
        """Return `sender` with its current rights; called repeatedly while a long response, such as a stream, is sent.

        `credential` is the token or cookie of the request. Returns None if the token or cookie is no longer valid.
        While the database does not answer, `sender` is returned unchanged.
        """
        try:
            if not await self.authenticator.needs_token():
                return sender
            found = await self._found(credential)
        except SQLAlchemyError:
            return sender
        return None if found is None else _principal(found, sender.address)

    def may_read_dashboard(self, sender: Principal) -> bool:
        """Whether `sender` may read Ray's dashboard."""
        return self.has_open_dashboard or sender.account is None or sender.account.is_admin

    def count_login(self, address: str) -> None:
        """Count a request from `address` that begins or ends a login.

        Raises TooManyRequests if the address sends too many of these requests.
        """
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

    def _count_teams(self, rates: Mapping[str, int]) -> None:
        for team, per_minute in sorted(rates.items()):
            if (wait_s := self.rates.teams.wait_s(team, per_minute)) > 0:
                raise TooManyRequests(
                    f"quota requests_per_minute of team {team}: all {per_minute} of {per_minute} requests are used",
                    wait_s,
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
    """Find the token or the session's cookie that identifies the sender of a request.

    `bearer` is the token in the request's header Authorization, or None if the request has no token. If a request has a
    token, its cookie is ignored.
    """
    if bearer is not None:
        return Credential(token=bearer.credentials)
    return Credential(session=request.cookies.get(COOKIE))


async def _sender(
    request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    """FastAPI dependency that identifies the sender of a request by its token or by its session's cookie.

    At a server without accounts, the sender is a network address. `bearer` is the token in the header Authorization, or
    None if the request has no token. Raises Refusal (403) if the request may have been sent by a page of another server
    with the session's cookie.
    """
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
    """Make the function `check` a FastAPI dependency of routes with the access rule `rule`.

    An access rule says what the sender of a request needs: a scope of the token, a right, or to be an administrator.
    The rule is recorded as an attribute of `check`, where the function `rule_of` finds it.
    """
    check.rule = rule  # type: ignore[attr-defined]
    return Depends(check)


def sender_with(scope: Scope) -> Any:
    """Make a FastAPI dependency that returns the sender; it refuses (403) a token or session without the `scope`.

    The scope says for which requests a token or session can be used. This dependency does not declare the access rule
    (`Rule`) of its route. Another dependency of the same route must declare the rule.
    """

    async def checked(sender: Annotated[Principal, Depends(_sender)]) -> Principal:  # async: it needs no thread
        _check_scope(sender, scope)
        return sender

    return Depends(checked)


def needs(scope: Scope, *, is_for_admins: bool = False) -> Any:
    """Make the FastAPI dependency of a route whose path names no job; it returns the sender of the request.

    At a server with accounts, it refuses requests without a valid token or session, and tokens or sessions without the
    scope `scope`. If `is_for_admins` is True, it also refuses senders who do not administer the server.
    """

    async def checked(sender: Annotated[Principal, Depends(_sender)]) -> Principal:  # async: it needs no thread
        _check_scope(sender, scope)
        if is_for_admins:
            check_admin(sender)
        return sender

    return _declared(Rule(scope, None, is_for_admins), checked)


def needs_throughout(scope: Scope) -> Any:
    """Make the FastAPI dependency of a route that sends a long stream, and whose path names no job.

    The dependency refuses the same senders as a dependency made by the function `needs`. Its value is a function that
    returns the sender of the request with its present rights, or None once the token or session is no longer valid.
    """

    def checked(sender: Sender, renewal: Renewal) -> Callable[[], Awaitable[Principal | None]]:
        _check_scope(sender, scope)
        return renewal

    return _declared(Rule(scope), checked)


def open_to_all() -> Any:
    """Make the FastAPI dependency of a route that everybody may use without a token.

    Every route must have a dependency that declares who may use it. This dependency declares that everybody may use the
    route, and checks nothing.
    """

    async def nothing() -> None:
        """Accept the sender of every request; the dependency only declares that the route is open."""

    return _declared(Rule(None), nothing)


def shows_session() -> Any:
    """Make the FastAPI dependency of the route about the current login; it returns the sender of the request.

    Everybody may use this route. The sender is None if the server has accounts, and the request has no valid token or
    session.
    """

    async def found(
        request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> Principal | None:
        try:
            return await _sender(request, bearer)
        except Unauthorized:
            return None

    return _declared(Rule(None), found)


def logs_in() -> Any:
    """Make the FastAPI dependency of a route that begins or ends a login; it returns the sender's network address.

    Such a route needs no token, but the number of these requests is limited for each address. A request that changes
    something is refused (403) if a page of another server sent it, so that no such page can log a browser in.
    """

    async def counted(request: Request) -> str:
        guard: Guard = request.app.state.guard
        guard.count_login(_address(request))
        if problem := foreign_problem(request.method, request.headers):
            raise Refusal(403, problem)
        return _address(request)

    return _declared(Rule(None), counted)


def reads_metrics() -> Any:
    """Make the FastAPI dependency of the route that returns the Prometheus metrics.

    Only administrators of the server may read the metrics, unless the operator has opened them to everybody.
    """

    async def checked(
        request: Request, bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        guard: Guard = request.app.state.guard
        if not guard.has_open_metrics:
            check_admin(await _sender(request, bearer))

    return _declared(Rule(Scope.READ, None, is_for_admins=True), checked)


def reads_dashboard() -> Any:
    """Make the FastAPI dependency of the routes of Ray's dashboard.

    Only administrators of the server may read the dashboard, unless the operator has opened it to every user.
    """

    async def checked(request: Request, sender: Annotated[Principal, Depends(_sender)]) -> None:
        _check_scope(sender, Scope.READ)
        guard: Guard = request.app.state.guard
        if not guard.may_read_dashboard(sender):
            raise Refusal(
                403,
                f"{sender.name}: only administrators of the server may read Ray's dashboard, which shows the jobs of "
                "all teams; with --open-dashboard every user may",
            )

    return _declared(Rule(Scope.READ, None, is_for_admins=True), checked)


def declares(rule: Rule, check: Callable[..., Any]) -> Any:
    """Make the function `check` a FastAPI dependency of routes with the access rule `rule`.

    An access rule says what the sender of a request needs: a scope of the token, a right, or to be an administrator.
    This function only records the rule, which tests and the start of the server read: `check` itself must refuse
    senders who do not meet the rule. The result of `check` is the value of the dependency.
    """
    return _declared(rule, check)


Sender = Annotated[Principal, Depends(_sender)]
"""The sender of a request, beside another dependency that declares the route's rule."""

Renewal = Annotated[Callable[[], Awaitable[Principal | None]], Depends(_renewal)]
"""Function that finds the sender's present rights, for responses that last."""


def check_right(sender: Principal, job: JobRecord, right: Right, *, noun: str) -> bool:
    """Check that the sender of a request has a `right` on a job, and return True.

    Returns False if the sender may not even read the job. Raises Refusal (403) if the sender may read the job but lacks
    the right. `noun` is the word for the job in the error message, such as "study".
    """
    account = sender.account
    if account is None:
        return True
    if not account.may_read(job):
        return False
    is_given = {Right.CHANGE: account.may_change, Right.USE: account.may_use}.get(right, account.may_read)(job)
    if is_given:
        return True
    if account.has_left_team(job):
        raise Refusal(
            403,
            f"{noun} {job.name!r}: belongs to team {job.team}, for which you may no longer submit jobs; its "
            "administrators may change it, and you may read it",
        )
    if right is Right.CHANGE:
        raise Refusal(403, f"{noun} {job.name!r}: only its owner and administrators may change it; you may read it")
    raise Refusal(403, f"{noun} {job.name!r}: only members of its team may export its models; you may read it")


def _check_scope(sender: Principal, scope: Scope) -> None:
    if scope is Scope.ADMIN and sender.account is None:
        raise Refusal(403, NO_ACCOUNTS)
    if sender.scope is not None and not sender.scope.allows(scope):
        has = "the session" if sender.token is None else "the token"
        needed = "a token" if sender.token is None else "one"
        raise Refusal(403, f"{has} has the scope {sender.scope}; this request needs {needed} with the scope {scope}")


def check_admin(sender: Principal) -> None:
    """Raise Refusal (403) unless the sender of the request administers the server, or the server has no accounts."""
    if sender.account is not None and not sender.account.is_admin:
        raise Refusal(403, f"{sender.account.user}: only administrators of the server may send this request")


def rule_of(route: APIRoute) -> Rule:
    """Access rule of a route, as one of the route's dependencies declares it.

    An access rule says what the sender of a request needs. Raises TypeError if no dependency declares a rule, or if
    several dependencies declare different rules.
    """
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
    """Check that every API route among `routes` declares its access rule (what the sender of a request needs).

    Raises TypeError at the first route that declares no rule.
    """
    for route in routes:
        if isinstance(route, APIRoute):
            rule_of(route)
