"""Counts requests by HTTP method, route and status, for the server's metrics."""

from __future__ import annotations

import threading
from collections import Counter

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["CountRequests", "RequestCounter"]

METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))


class RequestCounter:
    """Thread-safe counter of requests by HTTP method, route and status.

    Requests are counted by their route's template, such as `/v1/studies/{study_id}`, and not by their path, because
    the number of paths has no limit.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, method: str, route: str, status: int) -> None:
        with self._lock:
            self._counts[method if method in METHODS else "other", route, status] += 1

    def items(self) -> list[tuple[tuple[str, str, int], int]]:
        with self._lock:
            return sorted(self._counts.items())


class CountRequests:
    """ASGI middleware that adds each request to a RequestCounter when its response begins."""

    def __init__(self, app: ASGIApp, counter: RequestCounter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path_format", "none")
                self._counter.add(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)
