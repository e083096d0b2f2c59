"""Requests and responses of both clients in terms of httpx, which is imported at the first use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from service.client.events import SILENCE_S
from service.client.requests import Call, Response, TransportError
from service.errors import NotFound

if TYPE_CHECKING:
    import httpx

__all__ = ["TIMEOUT_S", "address", "listening", "lost", "reason_of", "reply", "request", "timeout"]

CONNECT_S = 10.0

# Default timeout of one response: a server that checks a study reads the headers of all its models.
TIMEOUT_S = 300.0


def address(url: str) -> str:
    """Normalized server address: http where `url` names no scheme, without a trailing slash.

    Raises:
        NotFound: `url` is not an address.
    """
    import httpx

    try:
        parsed = httpx.URL(url if "://" in url else f"http://{url}")
    except httpx.InvalidURL:
        parsed = httpx.URL()
    is_whole = parsed.scheme in ("http", "https") and parsed.host and (parsed.port or 1) < 2**16
    if not is_whole or parsed.query or parsed.fragment:
        raise NotFound(f"server {url!r}: is not an address; write http://HOST:PORT")
    return str(parsed).rstrip("/")


def request(url: str, call: Call) -> dict[str, Any]:
    """Keyword arguments of httpx that send `call` to the server at `url`."""
    return {
        "method": call.method,
        "url": url + call.path,
        "params": dict(call.query) or None,
        "headers": dict(call.headers),
        "content": call.content,
    }


def timeout(timeout_s: float) -> httpx.Timeout:
    """Timeouts of a request whose response may take `timeout_s` seconds."""
    import httpx

    return httpx.Timeout(timeout_s, connect=CONNECT_S)


def listening() -> httpx.Timeout:
    """Timeouts of an event stream, whose connection ends after SILENCE_S seconds without data."""
    return timeout(SILENCE_S)


def reply(response: httpx.Response, content: bytes) -> Response:
    """Response of httpx as flows read it."""
    return Response(str(response.url), response.status_code, response.headers, content)


def lost(url: str, error: httpx.RequestError) -> TransportError:
    """Outcome of a request to `url` that got no complete response."""
    import httpx

    was_there = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.CloseError | httpx.RemoteProtocolError)
    return TransportError(url, reason_of(error), was_cut=was_there)


def reason_of(error: Exception) -> str:
    """Message of an error, or its type where it has no message."""
    return str(error) or type(error).__name__
