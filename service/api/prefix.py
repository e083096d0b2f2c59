"""Middleware for reverse proxies that forward requests without removing a path prefix such as /mergesearch.

The same routes stay at the root, where probes, metrics and requests from inside a cluster reach them.
"""

from __future__ import annotations

import re
from contextvars import ContextVar
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BelowPrefix", "below_root", "prefix_problem", "with_root"]

# Root path of the request that is being answered: the prefix, or empty at the root.
ROOT_PATH: ContextVar[str] = ContextVar("root_path", default="")


class BelowPrefix:
    """ASGI middleware that serves the application also below the path `prefix`, such as /mergesearch.

    Requests without the prefix are served unchanged. A request below `prefix` reaches the application with `prefix` as
    its ASGI root path, and a path in the response's header Location gets the prefix too. The function `prefix_problem`
    says which values of `prefix` are valid.
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
            token = ROOT_PATH.set(self._prefix)
            try:
                await self._app({**scope, "root_path": self._prefix}, receive, prefixed)
            finally:
                ROOT_PATH.reset(token)
        else:
            await self._app(scope, receive, send)


def below_root(path: str) -> str:
    """Add the server's path prefix, such as /mergesearch, to `path` if the current request was sent below the prefix.

    `path` is the path of a route. The result is the path under which the client of the current request reaches this
    route. The result is `path` itself if the request was sent without the prefix.
    """
    return ROOT_PATH.get() + path


def with_root(document: Any) -> Any:
    """Copy of a JSON document whose links are valid for the client of the current request.

    If the current request was sent below the server's path prefix, such as /mergesearch, the prefix is put before each
    link. Links are the texts in the objects under the key `links`, at any depth of the document.
    """
    if isinstance(document, list):
        return [with_root(each) for each in document]
    if not isinstance(document, dict):
        return document
    return {
        name: {link: below_root(path) for link, path in value.items()} if _are_links(name, value) else with_root(value)
        for name, value in document.items()
    }


def _are_links(name: str, value: Any) -> bool:
    # An expert or an objective may have the name "links", too.
    return name == "links" and isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


def prefix_problem(prefix: str) -> str | None:
    """Reason why `prefix` is not valid as the server's path prefix; None if it is valid.

    A valid prefix is like /mergesearch: it begins with a slash and does not end with a slash.
    """
    if re.fullmatch(r"(/[A-Za-z0-9_.~-]+)+", prefix):
        return None
    return f"{prefix!r} is not a path prefix; it begins with / and does not end with it, as /mergesearch does"
