"""Access rules of routes: the scope that a token needs, and the right on the object that the request names.

Every route depends on exactly one dependency of this module, which has the route's `Rule`. The application refuses to
start if a route has none (`check_rules`), and the test of all routes and senders derives the expected statuses from
the rules.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Annotated, Any

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import BaseRoute

from service.api.limits.rates import RateLimits
from service.api.problems import Refusal, TooManyRequests, Unauthorized
from service.api.protocols import Principal
from service.auth.authenticator import Authenticator
from service.types import JobRecord, Scope

__all__ = [
    "Guard",
    "Renewal",
    "Right",
    "Rule",
    "Sender",
    "check_admin",
    "check_right",
    "check_rules",
    "declares",
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

    The first three are rights on a job: to read it, to have its models exported, or to change and delete it. MANAGE is
    the right to change the members of a team. OWN is the right on a token, which the token's user and administrators
    have.
    """

    READ = "read"
    USE = "use"
    CHANGE = "change"
    MANAGE = "manage"
    OWN = "own"


@dataclass(frozen=True)
class Rule:
    """Requirements of a route on the sender of a request.

    - `scope`: the scope of the token; None if everybody may send the request, without a token too
    - `right`: the right on the object that the path names; None if the path names none
    - `is_for_admins`: whether only administrators of the server may send the request
    """

    scope: Scope | None
    right: Right | None = None
    is_for_admins: bool = False


@dataclass(frozen=True)
class Guard:
    """Identification of the senders of requests, and limits on their number, for one server.

    - `authenticator`: finds the users of tokens
    - `rates`: the limits on the number of requests
    - `has_open_metrics`: whether everybody may read the metrics, which name all jobs
    """

    authenticator: Authenticator
    rates: RateLimits
    has_open_metrics: bool = False

    async def identify(self, secret: str | None, address: str) -> Principal:
        """Find the sender of a request with the token `secret` from `address`, and count the request.

        Raises Unauthorized if the server has accounts and the token is missing or not valid, and TooManyRequests.
        """
        if not await self.authenticator.needs_token():
            self._count(self.rates.open, address)
            return Principal(address, address)
        found = None if secret is None else await self.authenticator.authenticate(secret)
        if found is None:
            self._count(self.rates.refused, address)
            raise Unauthorized(
                "this server needs a token: send `Authorization: Bearer TOKEN` (commands: `mergesearch login`, or "
                "MERGESEARCH_TOKEN)"
                if secret is None
                else "the token is not valid: it is unknown, revoked or expired, or its user is disabled"
            )
        self._count(self.rates.tokens, found.token.id)
        return Principal(found.account.user, address, found.account, found.token)

    async def renewed(self, sender: Principal, secret: str | None) -> Principal | None:
        """Read the sender's current rights again, for a response that lasts; None if its token is not valid any more.

        While the database does not answer, the result has the last known rights.
        """
        try:
            if not await self.authenticator.needs_token():
                return sender
            found = None if secret is None else await self.authenticator.authenticate(secret)
        except SQLAlchemyError:
            return sender
        return None if found is None else Principal(found.account.user, sender.address, found.account, found.token)

    def _count(self, rate: Any, sender: str) -> None:
        if (wait_s := rate.wait_s(sender)) > 0:
            raise TooManyRequests(
                f"too many requests: at most {rate.per_s:g} a second are accepted in the long run", wait_s
            )


_bearer = HTTPBearer(auto_error=False, description="An API token: `mergesearch tokens create`.")


async def _sender(
    request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
) -> Principal:
    """Find the sender of a request, by its token and its address."""
    guard: Guard = request.app.state.guard
    address = request.client.host if request.client is not None else "unknown"
    return await guard.identify(_secret(credentials), address)


def _secret(credentials: HTTPAuthorizationCredentials | None) -> str | None:
    return None if credentials is None else credentials.credentials


async def _renewal(
    request: Request,
    sender: Annotated[Principal, Depends(_sender)],
    credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)],
) -> Callable[[], Awaitable[Principal | None]]:
    guard: Guard = request.app.state.guard
    return partial(guard.renewed, sender, _secret(credentials))


def _declared(rule: Rule, check: Callable[..., Any]) -> Any:
    """Make `check` a FastAPI dependency that declares `rule`."""
    check.rule = rule  # type: ignore[attr-defined]
    return Depends(check)


def sender_with(scope: Scope) -> Any:
    """Make a FastAPI dependency that finds the sender, and refuses tokens that lack the `scope` (403).

    It does not declare the route's `Rule`; another dependency of the route must declare it.
    """

    def checked(sender: Annotated[Principal, Depends(_sender)]) -> Principal:
        _check_scope(sender, scope)
        return sender

    return Depends(checked)


def needs(scope: Scope, *, is_for_admins: bool = False) -> Any:
    """Make the FastAPI dependency of a route whose path names no job; it checks and returns the sender."""

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


def reads_metrics() -> Any:
    """Make the FastAPI dependency of the metrics, which only administrators may read unless the operator opens them."""

    async def checked(
        request: Request, credentials: Annotated[HTTPAuthorizationCredentials | None, Depends(_bearer)]
    ) -> None:
        guard: Guard = request.app.state.guard
        if not guard.has_open_metrics:
            check_admin(await _sender(request, credentials))

    return _declared(Rule(Scope.READ, None, is_for_admins=True), checked)


def declares(rule: Rule, check: Callable[..., Any]) -> Any:
    """Make a FastAPI dependency of the function `check`, which must check the rights that `rule` states."""
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
    if sender.token is not None and not sender.token.scope.allows(scope):
        raise Refusal(
            403, f"the token has the scope {sender.token.scope}; this request needs one with the scope {scope}"
        )


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
