"""Middleware that adds security headers to every response, unless the response has them already."""

from __future__ import annotations

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["HEADERS", "SecureHeaders"]

# Browsers may not guess the type of a response, show it in a frame, run scripts in it, keep it in a cache, or let pages
# of other servers read it; they do not tell other servers its address.
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

# For requests that came by HTTPS, as a proxy says: browsers use HTTPS for this server from then on.
HSTS = "max-age=31536000"


class SecureHeaders:
    """ASGI middleware that adds security headers, such as Content-Security-Policy, to every response.

    A header that the response has already is not changed. Responses to HTTPS requests also get the header
    Strict-Transport-Security.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in HEADERS.items():
                    headers.setdefault(name, value)
                if scope["scheme"] == "https":
                    headers.setdefault("Strict-Transport-Security", HSTS)
            await send(message)

        await self._app(scope, receive, secured if scope["type"] == "http" else send)
