"""Reads the body of a request, which is limited in size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.datastructures import Headers
from pydantic import BaseModel, ValidationError

from search_spaces.errors import InvalidStudy, Problem
from search_spaces.study.yaml import parse_document
from service.api.problems import InvalidRequest, Refusal

__all__ = ["JSON_TYPES", "MAX_BODY_BYTES", "YAML_TYPES", "body_of", "read_body", "read_object", "sent_as_json"]

Body = TypeVar("Body", bound=BaseModel)

MAX_BODY_BYTES = 2**20

JSON_TYPES = ("application/json",)
# The first is the registered name, the others are older names.
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")


def sent_as_json(headers: Headers, *, accepted: tuple[str, ...]) -> bool:
    """Whether a request's body is JSON rather than YAML, according to the request's `headers`.

    Raises Refusal if the media type is not in `accepted`, the charset is not UTF-8, or the body is compressed.
    """
    content_type, *parameters = (part.strip().lower() for part in headers.get("content-type", "").split(";"))
    if content_type not in accepted:
        shown = f"Content-Type {content_type[:100]!r}" if content_type else "without a Content-Type"
        raise Refusal(415, f"the body was sent {'as ' * bool(content_type)}{shown}; send {' or '.join(accepted)}")
    for parameter in parameters:
        name, _, value = parameter.partition("=")
        if name.strip() == "charset" and value.strip().strip('"') not in ("utf-8", "utf8", "us-ascii"):
            raise Refusal(415, f"the body's charset is {value[:40]}; send UTF-8")
    if (encoding := headers.get("content-encoding", "identity")) != "identity":
        raise Refusal(415, f"the body's encoding is {encoding[:40]!r}; send it without one")
    return content_type in JSON_TYPES


async def read_object(request: Request, model: type[Body]) -> Body:
    """Read the JSON object in the body of `request`, as a pydantic model. Raises InvalidRequest with every problem."""
    sent_as_json(request.headers, accepted=JSON_TYPES)
    try:
        document = parse_document(await read_body(request), "the request's body", is_json=True)
        return model.model_validate(document)
    except InvalidStudy as error:
        raise InvalidRequest(error.problems) from error
    except ValidationError as error:
        problems = (
            Problem(".".join(map(str, details["loc"])), f"{details['msg'][:1].lower()}{details['msg'][1:]}")
            for details in error.errors(include_url=False, include_input=False)
        )
        raise InvalidRequest(tuple(problems)) from error


def body_of(model: type[BaseModel], *, required: bool = True) -> dict[str, Any]:
    """OpenAPI description of a request body that is an object of the pydantic class `model`.

    The schemas of nested classes are written in place, not as references. `required` says whether the request must have
    a body.
    """
    schema = model.model_json_schema()
    nested = schema.pop("$defs", {})
    content = {"application/json": {"schema": _inlined(schema, nested)}}
    return {"requestBody": {"required": required, "content": content}}


def _inlined(schema: Any, nested: Mapping[str, Any]) -> Any:
    if isinstance(schema, Mapping):
        if "$ref" in schema:
            return _inlined(nested[schema["$ref"].rpartition("/")[2]], nested)
        return {key: _inlined(value, nested) for key, value in schema.items()}
    return [_inlined(value, nested) for value in schema] if isinstance(schema, list) else schema


async def read_body(request: Request) -> bytes:
    """Read the body of `request`, which may have at most 1 MiB.

    Raises Refusal as soon as the body is known to be larger, without reading the rest.
    """
    announced = request.headers.get("content-length", "")
    size = int(announced) if announced.isdecimal() and len(announced) < 20 else 0
    content = bytearray()
    if size <= MAX_BODY_BYTES:
        async for chunk in request.stream():
            content += chunk
            size = len(content)
            if size > MAX_BODY_BYTES:
                break
    if size > MAX_BODY_BYTES:
        raise Refusal(413, f"the body has {size} bytes or more; send at most {MAX_BODY_BYTES}")
    return bytes(content)
