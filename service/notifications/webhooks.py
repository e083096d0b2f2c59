"""Sends a request to a webhook, within limits of time and size, and reads a bounded part of the response."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version

import httpcore

from service.notifications.reachable import NotReachable

__all__ = ["TOTAL_S", "Outcome", "send_webhook"]

# Seconds for a whole request, and for each part of it.
TOTAL_S, PART_S = 20.0, 10.0

# Bytes of a response that are read, and characters of it that are stored of a refusal.
MAX_RESPONSE, MAX_EXCERPT = 4096, 200

TIMEOUT = {"connect": PART_S, "read": PART_S, "write": PART_S, "pool": PART_S}


@dataclass(frozen=True)
class Outcome:
    """Result of one try to send a message to a webhook.

    - `status`: HTTP status of the response; None if there was no response
    - `error`: why the try failed; None if the message arrived
    - `is_final`: whether further tries would be useless
    """

    status: int | None = None
    error: str | None = None
    is_final: bool = False


async def send_webhook(
    url: str,
    body: bytes,
    *,
    headers: Mapping[str, str],
    network: httpcore.AsyncNetworkBackend,
    tls: ssl.SSLContext,
    total_s: float = TOTAL_S,
) -> Outcome:
    """Try once to send `body`, a JSON document, to a webhook's `url` by POST, and return the outcome.

    A response with a status from 200 to 299 is a success. Redirects are not followed, and no proxy is used: httpcore
    does neither. `headers` are added to the request, `network` makes the connection, `tls` has the settings of https,
    and the request may take `total_s` seconds.
    """
    given = {"Content-Type": "application/json", "User-Agent": f"mergesearch/{version('mergesearch')}", **headers}
    sent = [("Connection", "close"), *given.items()]
    try:
        async with (
            asyncio.timeout(total_s),
            httpcore.AsyncConnectionPool(ssl_context=tls, network_backend=network) as pool,
            pool.stream("POST", url, headers=sent, content=body, extensions={"timeout": TIMEOUT}) as response,
        ):
            content = b""
            async for part in response.aiter_stream():
                content += part
                if len(content) >= MAX_RESPONSE:
                    break
    except TimeoutError:
        return Outcome(error=f"no complete response within {total_s:g} s")
    except NotReachable as error:
        return Outcome(error=str(error))
    except (httpcore.TimeoutException, httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError) as error:
        return Outcome(error=f"{type(error).__name__}: {_printable(str(error))}".removesuffix(": "))
    if 200 <= response.status < 300:
        return Outcome(response.status)
    excerpt = _printable(content[:MAX_RESPONSE].decode("utf-8", "replace"))
    shown = f"; the response begins with {excerpt!r}" if excerpt else ""
    return Outcome(response.status, f"status {response.status}{shown}")


def _printable(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:MAX_EXCERPT]
