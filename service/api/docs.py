"""The interface as a page for people, made from the OpenAPI document: no scripts, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup, escape

__all__ = ["render_docs"]

TEMPLATES = Path(__file__).parent


def render_docs(document: Mapping[str, Any]) -> str:
    """An OpenAPI document as one HTML page."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            groups.setdefault(operation["tags"][0], []).append(_operation(path, method, operation))
    return _template().render(
        **document["info"],
        groups=groups.items(),
        schemas=[_schema(name, schema) for name, schema in sorted(document["components"]["schemas"].items())],
    )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    return environment.get_template("docs.html.j2")


def _operation(path: str, method: str, operation: Mapping[str, Any]) -> dict[str, Any]:
    body = operation.get("requestBody")
    return {
        "id": operation["operationId"],
        "path": path,
        "method": method,
        "description": operation.get("description", ""),
        "parameters": [
            {
                "name": parameter["name"],
                "where": parameter["in"],
                "type": _type(parameter["schema"]),
                "description": parameter.get("description", ""),
            }
            for parameter in operation.get("parameters", ())
        ],
        "body": body
        and {
            "type": _type(next(iter(body["content"].values()))["schema"]),
            "media": list(body["content"]),
            "description": body.get("description", ""),
        },
        "answers": list(_answers(operation["responses"])),
    }


def _answers(responses: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for status, answer in sorted(responses.items()):
        for media, content in answer.get("content", {"": {}}).items():
            schema = content.get("schema", content.get("itemSchema", {}))
            yield {
                "status": status,
                "media": media,
                "type": _type(schema),
                "description": answer.get("description", ""),
            }


def _schema(name: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    required = schema.get("required", ())
    return {
        "name": name,
        "description": schema.get("description", ""),
        "fields": [
            {
                "name": key if key in required else f"{key}?",
                "type": _type(field),
                "description": field.get("description", ""),
            }
            for key, field in schema.get("properties", {}).items()
        ],
    }


def _type(schema: Mapping[str, Any]) -> Markup:
    """A schema in a few words, with links to those that have a name."""
    if reference := schema.get("$ref"):
        name = escape(reference.rpartition("/")[2])
        return Markup('<a href="#{0}">{0}</a>').format(name)
    if "const" in schema:
        return escape(repr(schema["const"]))
    if "enum" in schema:
        return escape(" | ".join("null" if value is None else str(value) for value in schema["enum"]))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return Markup(" | ").join(dict.fromkeys(_type(branch) for branch in schema[key]))
    kind = schema.get("type", "")
    if kind == "array":
        return Markup("list of {}").format(_type(schema.get("items", {})))
    if kind == "object" and isinstance(values := schema.get("additionalProperties"), Mapping):
        return Markup("mapping to {}").format(_type(values))
    return escape(kind)
