"""Serves the application below a path prefix too, for proxies that pass requests on with their whole path.

The same routes stay at the root, where probes, metrics and requests from inside a cluster reach them.
"""

from __future__ import annotations

import re

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BelowPrefix", "prefix_problem"]


class BelowPrefix:
    """ASGI middleware that serves the application also below the path `prefix`.

    A request below `prefix` reaches the application with `prefix` as its root path. A path in the header Location of
    the response gets the prefix, too. `prefix` is one that `prefix_problem` accepts.
    """

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def prefixed(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                if (location := headers.get("location", "")).startswith("/"):
                    headers["location"] = self._prefix + location
            await send(message)

        if scope["type"] == "http" and f"{scope['path']}/".startswith(f"{self._prefix}/"):
            await self._app({**scope, "root_path": self._prefix}, receive, prefixed)
        else:
            await self._app(scope, receive, send)


def prefix_problem(prefix: str) -> str | None:
    """Reason why `prefix` cannot be a path prefix; None if it can."""
    if re.fullmatch(r"(/[A-Za-z0-9_.~-]+)+", prefix):
        return None
    return f"{prefix!r} is not a path prefix; it begins with / and does not end with it, as /mergesearch does"
