"""The OpenAPI document: what FastAPI derives from the routes, and the schemas that routes refer to by name."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import TypeAdapter

from search_spaces.study.file import Study
from service.schemas.api import EndDocument, ProblemDocument, ProgressDocument

__all__ = ["EXPORT_REQUEST", "install_openapi"]

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
        "dtype": {
            "enum": [None, "float32", "bfloat16", "float16"],
            "default": None,
            "description": "Null: the dtype that the engines scored in.",
        },
    },
}


def install_openapi(app: FastAPI) -> None:
    """Make `app` serve this module's document, which is generated at the first request for it."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    schemas = document["components"]["schemas"]
    for model in (Study, ProblemDocument, ProgressDocument, EndDocument):
        schema = TypeAdapter(model).json_schema(ref_template=TEMPLATE)
        schemas |= schema.pop("$defs", {})
        schemas[model.__name__] = schema
    schemas["ExportRequest"] = EXPORT_REQUEST
    # Routes declare their error responses; FastAPI adds a 422 of its own format to every route with parameters.
    for operations in document["paths"].values():
        for operation in operations.values():
            if "HTTPValidationError" in str(operation["responses"].get("422", "")):
                del operation["responses"]["422"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document
