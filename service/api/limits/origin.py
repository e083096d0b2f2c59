"""Middleware that refuses requests meant for another server, and requests that a page of another server sends.

Any web page can make a browser send requests to this machine. Such a request has the page's origin in the header
Origin. If the page's host name was made to resolve to this machine (DNS rebinding), that name is in the header Host.
Both headers are checked.
"""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.problems import problem_response

__all__ = ["LOOPBACK", "CheckOrigin"]

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class CheckOrigin:
    """ASGI middleware that refuses requests whose header Host or Origin names another server.

    `hosts` are further names of this server. Host must be one of `hosts`, a loopback name, or the address at which the
    request arrived; other requests get status 421. Origin, if it is sent, must equal Host or be one of `hosts` that is
    not a loopback name; other requests get status 403. `hosts` are compared without ports, because a proxy may use
    another port than this server.
    """

    def __init__(self, app: ASGIApp, hosts: Iterable[str] = ()) -> None:
        self._app = app
        self._given = frozenset(map(_host_of, hosts)) - frozenset(LOOPBACK)
        self._hosts = self._given | frozenset(LOOPBACK)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await problem_response(*refusal)(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = Headers(scope=scope)
        authority = headers.get("host", "")
        host = _host_of(authority)
        address = (scope.get("server") or ("",))[0]
        if host not in self._hosts and host != address:
            return 421, (
                f"Host {authority!r:.100}: is not a name of this server, which are {', '.join(sorted(self._hosts))} "
                "and the address that it listens on; the server's operator can add one with --allow-host"
            )
        origin = headers.get("origin")
        if origin is not None and not self._is_own(origin, authority):
            return 403, (
                f"Origin {origin!r:.100}: pages of other servers may not send requests; the server's operator can "
                "allow a page's host with --allow-host"
            )
        return None

    def _is_own(self, origin: str, authority: str) -> bool:
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return bool(netloc) and (netloc == authority.lower() or _host_of(netloc) in self._given)


def _host_of(authority: str) -> str:
    """Host name in `authority`, which has the form HOST or HOST:PORT; empty if `authority` is not valid.

    The name is in lower case and without the brackets of an IPv6 address.
    """
    try:
        return (urlsplit(f"//{authority}").hostname or "").rstrip(".")
    except ValueError:
        return ""
