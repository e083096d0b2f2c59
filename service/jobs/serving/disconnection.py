"""Requests whose client has closed the connection before it got the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

__all__ = ["ClientGone", "while_connected"]

T = TypeVar("T")


class ClientGone(Exception):
    """Raised if the client of a request has closed the connection; nobody reads an answer."""


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Await `work`, which is done for an HTTP request, and return its result; cancel it if the client disconnects.

    The body of `request` must have been read. Raises ClientGone if the client has closed the connection.
    """
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
