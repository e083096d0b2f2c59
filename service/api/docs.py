"""The page /docs: Swagger UI for the HTTP API, usable without internet access.

The package fastapi-swagger ships the files of Swagger UI, which the server serves under /docs/.
"""

from __future__ import annotations

import base64
import hashlib
import re

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

__all__ = ["install_docs"]

PARAMETERS = {
    "tryItOutEnabled": True,
    # Swagger UI would send the document's address to a validator on the web.
    "validatorUrl": None,
}


def install_docs(app: FastAPI) -> None:
    """Serve the page at /docs. Its URLs are relative, so that a proxy may serve the API under a path prefix."""
    page = get_swagger_ui_html(
        title=app.title,
        openapi_url="openapi.json",
        swagger_js_url="docs/swagger-ui-bundle.js",
        swagger_css_url="docs/swagger-ui.css",
        swagger_favicon_url="docs/favicon-32x32.png",
        swagger_ui_parameters=PARAMETERS,
    )
    html = bytes(page.body).decode()
    headers = {"Content-Security-Policy": _policy(html), "X-Content-Type-Options": "nosniff"}

    @app.get("/docs", include_in_schema=False)
    async def docs() -> HTMLResponse:
        return HTMLResponse(html, headers=headers)

    app.mount("/docs", StaticFiles(packages=[("fastapi_swagger", "resources")]))


def _policy(html: str) -> str:
    """A policy that allows only files of and requests to this server, and the page's inline script, by its hash."""
    scripts = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    return "; ".join(
        (
            "default-src 'none'",
            " ".join(("script-src 'self'", *(f"'sha256-{digest}'" for digest in hashes))),
            "style-src 'self' 'unsafe-inline'",
            "img-src 'self' data:",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
