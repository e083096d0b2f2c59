"""OpenAPI document of the server, and the page /docs (Swagger UI), where users can try requests.

FastAPI derives the document from the routes; this module adds the schemas to which routes refer by name. The page is
Swagger UI. The server serves the files of Swagger UI from the package fastapi-swagger, so the page works offline.
"""

from __future__ import annotations

import base64
import hashlib
import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.docs import get_swagger_ui_html
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter
from starlette.responses import HTMLResponse
from starlette.staticfiles import StaticFiles

from service.api.limits.csrf import CSRF_HEADER
from service.api.routes.events import STREAMED
from service.auth.sessions import COOKIE
from service.jobs.registry import KINDS
from service.schemas.api import EndDocument, ProblemDocument

__all__ = ["EXPORT_REQUEST", "install_docs", "install_openapi"]

TEMPLATE = "#/components/schemas/{model}"

EXPORT_REQUEST = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "trial": {
            "anyOf": [{"const": "best"}, {"type": "integer", "minimum": 0}],
            "default": "best",
            "description": "The trial's number, or the best trial.",
        },
        "prefer": {
            "anyOf": [
                {"type": "object", "additionalProperties": {"type": "number", "minimum": 0}, "minProperties": 1},
                {"type": "null"},
            ],
            "default": None,
            "description": "Weights of the objectives, which sum to 1, to pick a trial of the front; not with `trial`.",
        },
        "dtype": {
            "enum": [None, "float32", "bfloat16", "float16"],
            "default": None,
            "description": "Null: the dtype that the engines scored in.",
        },
    },
}

PARAMETERS = {
    "tryItOutEnabled": True,
    # Swagger UI would send the document's address to a validator on the web.
    "validatorUrl": None,
}


def install_openapi(app: FastAPI) -> None:
    """Make `app` serve the OpenAPI document of its routes, with the schemas that the routes refer to by name.

    The document is generated when it is first requested.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document["components"]["schemas"]
    progress = (kind.documents()[1] for kind in KINDS.values())
    for model in (ProblemDocument, EndDocument, *STREAMED, *progress):
        schema = TypeAdapter(model).json_schema(ref_template=TEMPLATE)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    schemas["ExportRequest"] = EXPORT_REQUEST
    document["components"]["securitySchemes"]["SessionCookie"] = {
        "type": "apiKey",
        "in": "cookie",
        "name": COOKIE,
        "description": f"A browser's session, from /v1/login. Requests that change something need {CSRF_HEADER}, too.",
    }
    for kind in KINDS.values():
        schemas |= kind.schemas(TEMPLATE)
    # Routes declare their error responses; FastAPI adds a 422 of its own format to every route with parameters.
    for operations in document["paths"].values():
        for operation in operations.values():
            if "security" in operation:  # a server without users needs no token
                operation["security"] = [*operation["security"], {"SessionCookie": []}, {}]
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def install_docs(app: FastAPI) -> None:
    """Make `app` serve Swagger UI, the page on which users read about routes and try them, at /docs.

    The page's links are relative, so that they also work if a proxy serves the application below a path prefix.
    """
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
    """Value of the header Content-Security-Policy for a response with the HTML page `html`.

    The page may load files from this server only, and may send requests to this server only. Its inline scripts are
    allowed by their hashes.
    """
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
