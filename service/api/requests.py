"""Reads requests: the body, which is limited in size, and the sender."""

from __future__ import annotations

from fastapi import Request
from fastapi.datastructures import Headers

from service.api.problems import Refusal
from service.api.protocols import Principal

__all__ = ["JSON_TYPES", "MAX_BODY_BYTES", "YAML_TYPES", "principal", "read_body", "sent_as_json"]

MAX_BODY_BYTES = 2**20

JSON_TYPES = ("application/json",)
# The first is the registered name, the others are older names.
YAML_TYPES = ("application/yaml", "application/x-yaml", "text/yaml")


async def principal(request: Request) -> Principal:
    """FastAPI dependency of every route of the API: the sender of the request.

    There are no accounts. Senders are distinguished by their IP address.
    """
    return Principal(request.client.host if request.client is not None else "unknown")


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
