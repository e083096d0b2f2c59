"""Applications behind real HTTP, in a thread: uvicorn on a port that is kept from one start to the next."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any

import uvicorn


@contextmanager
def kept_port() -> Iterator[int]:
    """A free port, on which a server may listen while the context lasts, and which no other program gets meanwhile."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


class _Server(uvicorn.Server):
    """A uvicorn server that ends at once when asked; uvicorn itself checks only ten times a second."""

    async def main_loop(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        counter = 0
        while not await self.on_tick(counter):
            counter += 1
            with suppress(TimeoutError):
                async with asyncio.timeout(0.1):
                    await self._ending.wait()

    def end(self) -> None:
        """End from another thread, once the server has started."""
        self.should_exit = True
        with suppress(RuntimeError, AttributeError):  # it has ended, or begins its loop at this moment
            self._loop.call_soon_threadsafe(self._ending.set)


class HttpServer:
    """Serves the application that `make_app` returns, a new one at each start. Use as a context manager.

    Requests that are still answered when it is stopped have `grace_s` to end. Any free port is used unless `port` is
    given.
    """

    def __init__(self, make_app: Callable[[], Any], *, grace_s: int = 0, port: int | None = None) -> None:
        self._make_app = make_app
        self._grace_s = grace_s
        with nullcontext(port) if port else kept_port() as self.port:
            pass
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        config = uvicorn.Config(
            self._make_app(),
            log_config=None,  # it takes 10 ms to set up
            log_level="critical",
            timeout_graceful_shutdown=self._grace_s,
            timeout_keep_alive=75,
        )
        self._server = _Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [listener]})
        self._thread.start()
        while not self._server.started:
            assert self._thread.is_alive()
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.end()
        self._thread.join()

    def __enter__(self) -> HttpServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
