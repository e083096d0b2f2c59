"""Serving of the web page: the files that `make web` has built, and one document for every address of the page.

The page is one document, `index.html`, which shows another view at each address. Therefore every GET request that
accepts HTML gets this document, unless the path belongs to the API.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Match, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

__all__ = ["POLICY", "RESERVED", "STATIC", "install_pages"]

STATIC = Path(__file__).with_name("static")

# First segments of paths that are not addresses of the page.
RESERVED = frozenset({"v1", "docs", "openapi.json", "healthz", "readyz", "metrics", "ray", "assets"})

# The page loads files from this server only, and sends requests to this server only. Mantine sets inline styles.
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self' 'unsafe-inline'",
        "img-src 'self' data: blob:",
        "connect-src 'self'",
        "font-src 'self'",
        "worker-src 'self'",
        "base-uri 'self'",
        "form-action 'self'",
        "frame-ancestors 'none'",
    )
)
PAGE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cache-Control": "no-cache",
    "Referrer-Policy": "same-origin",
    "Vary": "Accept",
}

# Names of files in assets/ have a hash of their content. A worker, which holds the event streams, has the policy of its
# own file instead of that of the page.
ASSET_HEADERS = {"Cache-Control": "public, max-age=31536000, immutable", "Content-Security-Policy": POLICY}

NOT_BUILT = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>mergesearch</title>
<h1>mergesearch</h1>
<p>This installation has no web page. In a checkout, <code>make web</code> builds it; wheels have it.</p>
<p>The HTTP API works: <a href="{base}docs">its documentation</a>.</p>
</html>
"""


def install_pages(app: FastAPI, static: Path = STATIC) -> None:
    """Make `app` serve the web page at every path that no other route serves; call it after all routes are added.

    `static` is the directory with the built files. Without these files, a short page says how to build them.
    """
    app.mount("/assets", _Assets(directory=static / "assets", check_dir=False))
    app.router.routes.append(_PageRoute(static / "index.html"))


class _Assets(StaticFiles):
    async def check_config(self) -> None:
        """Accept that the directory does not exist: if the page is not built, no file is found."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers.update(ASSET_HEADERS)
        return response


class _PageRoute(Route):
    """Route that answers requests for HTML with the web page, at every path that does not belong to the API."""

    def __init__(self, index: Path) -> None:
        async def page(request: Request) -> HTMLResponse:
            return HTMLResponse(_document(index, _base(request.scope)), headers=PAGE_HEADERS)

        super().__init__("/{path:path}", page, include_in_schema=False)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        match, child = super().matches(scope)
        return (match, child) if match is Match.FULL and _is_for_page(scope) else (Match.NONE, {})


def _is_for_page(scope: Scope) -> bool:
    segment = _own_path(scope).lstrip("/").partition("/")[0].partition(":")[0]
    return segment not in RESERVED and "text/html" in Request(scope).headers.get("accept", "")


def _own_path(scope: Scope) -> str:
    """Path of a request without the server's path prefix."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", ""))


def _base(scope: Scope) -> str:
    """URL of the page's root, with a slash at its end, to which the links in the page's HTML are relative.

    `scope` is the ASGI scope of the request. If the server knows its path prefix, the URL is this prefix. Otherwise the
    URL is relative to the request's address, because a proxy may have removed a prefix that only the browser knows.
    """
    if root := scope.get("root_path", ""):
        return f"{root}/"
    depth = scope["raw_path"].count(b"/") - 1  # %2F in a segment is no slash
    return "../" * depth or "./"


def _document(index: Path, base: str) -> str:
    """The page's HTML document, whose links are relative to the URL `base`."""
    try:
        html = index.read_text("utf-8")
    except FileNotFoundError:
        return NOT_BUILT.format(base=escape(base))
    return re.sub(r'<base href="/"', f'<base href="{escape(base)}"', html, count=1)
