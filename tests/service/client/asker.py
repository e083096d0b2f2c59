"""Both clients with one interface, so that each test runs with both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from service.client import AsyncClient, Client, Event


class Asker:
    """A client of one kind; each call uses a new one."""

    def __init__(self, kind: str, url: str) -> None:
        self.kind = kind
        self.url = url

    def __call__(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        if self.kind == "blocking":
            with Client(self.url) as client:
                return getattr(client, name)(*args, **kwargs)

        async def ask() -> Any:
            async with AsyncClient(self.url) as client:
                return await getattr(client, name)(*args, **kwargs)

        return asyncio.run(ask())

    def events(self, study: str, *, after: int = 0, patience_s: float = 60.0) -> Iterator[Event]:
        if self.kind == "blocking":
            with Client(self.url, patience_s=patience_s) as client:
                yield from client.events(study, after=after)
            return

        async def listen() -> list[Event]:
            async with AsyncClient(self.url, patience_s=patience_s) as client:
                return [event async for event in client.events(study, after=after)]

        yield from asyncio.run(listen())

    def at(self, url: str) -> Asker:
        return Asker(self.kind, url)
