"""A receiver of webhooks on this machine, over real HTTP or HTTPS, which records the requests."""

from __future__ import annotations

import json
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Received:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found


@dataclass
class Receiver:
    """A receiver. `statuses` are those of the next responses, then 204; `stall_s` delays each response."""

    port: int = 0
    received: list[Received] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    stall_s: float = 0.0
    connections: int = 0

    def url(self, host: str = "127.0.0.1", path: str = "/hook", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def wait(self, number: int = 1) -> list[Received]:
        """Wait until there are `number` requests, and return them."""
        wait_until(lambda: len(self.received) >= number)
        return self.received


def wait_until(is_true: Callable[[], Any], *, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@contextmanager
def receiver(tls: ssl.SSLContext | None = None, **options: Any) -> Iterator[Receiver]:
    found = Receiver(**options)

    class Handler(BaseHTTPRequestHandler):
        def setup(self) -> None:
            found.connections += 1
            super().setup()

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            found.received.append(Received(self.path, headers, body))
            time.sleep(found.stall_s)
            self.send_response(found.statuses.pop(0) if found.statuses else 204)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(found.content)

        def do_CONNECT(self) -> None:
            found.received.append(Received(self.path, {}, b""))
            self.send_error(502)

        do_GET = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    found.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
