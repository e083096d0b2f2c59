"""Converts requests and responses between the client's types and httpx, which is imported at the first use."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from service.client.credentials import token_for
from service.client.events import SILENCE_S
from service.client.requests import Call, Response, TransportError
from service.errors import Conflict, NotFound

if TYPE_CHECKING:
    import httpx

__all__ = ["TIMEOUT_S", "address", "authorization", "listening", "lost", "reason_of", "reply", "request", "timeout"]

CONNECT_S = 10.0

# Default timeout of one response: a server that checks a study reads the headers of all its models.
TIMEOUT_S = 300.0


def address(url: str) -> str:
    """Normalize a server's address: add `http://` if `url` has no scheme, and remove a trailing slash.

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


def authorization(url: str, token: str | None) -> dict[str, str]:
    """HTTP headers that send the user's API token to the server at `url`; empty if there is no token.

    The token is `token` or, if this is None, the token that the user has stored or set for this server.

    Raises:
        Conflict: The token cannot be sent, or the file of stored tokens cannot be used.
    """
    token = token or token_for(url)
    if token is None:
        return {}
    if not re.fullmatch("[!-~]+", token):  # the message must not show it
        raise Conflict("token: has characters that are not printable ASCII; give the token as it was printed")
    return {"Authorization": f"Bearer {token}"}


def request(url: str, call: Call) -> dict[str, Any]:
    """Keyword arguments for the function `httpx.request`, which then sends `call` to the server at `url`."""
    return {
        "method": call.method,
        "url": url + call.path,
        "params": dict(call.query) or None,
        "headers": dict(call.headers),
        "content": call.content,
    }


def timeout(timeout_s: float) -> httpx.Timeout:
    """Timeouts, in httpx's form, of a request whose response may take `timeout_s` seconds."""
    import httpx

    return httpx.Timeout(timeout_s, connect=CONNECT_S)


def listening() -> httpx.Timeout:
    """Timeouts, in httpx's form, of a request for an event stream.

    The connection counts as lost after 45 s without data.
    """
    return timeout(SILENCE_S)


def reply(response: httpx.Response, content: bytes) -> Response:
    """Convert a response of httpx, whose body is `content`, to this package's class Response."""
    return Response(str(response.url), response.status_code, response.headers, content)


def lost(url: str, error: httpx.RequestError) -> TransportError:
    """Convert an error of httpx for a request that got no complete response to a TransportError.

    `url` is the address to which the request was sent.
    """
    import httpx

    was_there = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.CloseError | httpx.RemoteProtocolError)
    return TransportError(url, reason_of(error), was_cut=was_there, is_late=isinstance(error, httpx.ReadTimeout))


def reason_of(error: Exception) -> str:
    """Message of an error, or the name of its class if the error has no message."""
    return str(error) or type(error).__name__
