"""Server-sent events as bytes (WHATWG HTML, section 9.2)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["KEEP_ALIVE", "KEEP_ALIVE_S", "RETRY", "frame"]

# Comments that keep proxies from closing a quiet stream.
KEEP_ALIVE_S = 15.0
KEEP_ALIVE = b": \n\n"
# Milliseconds until a client reconnects after a lost connection.
RETRY = b"retry: 1000\n\n"


def frame(data: Mapping[str, Any], *, event: str, id: int | None = None) -> bytes:
    """Encode one server-sent event (SSE) with the type `event` and the object `data` as JSON.

    `id` is the event's id in the database, from which a client can resume the stream after a lost connection. `id` is
    None for events that are not stored, such as progress.
    """
    head = f"id: {id}\n" if id is not None else ""
    return f"{head}event: {event}\ndata: {json.dumps(data, separators=(',', ':'))}\n\n".encode()
