"""A collector of OpenTelemetry's traces (OTLP over HTTP) on this machine, for tests."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

__all__ = ["OtlpReceiver", "ReceivedSpan", "otlp_receiver"]


@dataclass(frozen=True, eq=False)
class ReceivedSpan:
    """A received span: ids in hex, attributes of itself and of its process, and the spans that it links to."""

    name: str
    trace: str
    id: str
    parent: str
    attributes: Mapping[str, Any]
    process: Mapping[str, Any]
    links: tuple[str, ...]
    is_error: bool
    reason: str
    seconds: float


class OtlpReceiver:
    """A collector at `url` with the received spans and the headers of the requests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.headers: list[Mapping[str, str]] = []
        self._spans: list[ReceivedSpan] = []
        self._lock = threading.Lock()

    @property
    def spans(self) -> list[ReceivedSpan]:
        with self._lock:
            return list(self._spans)

    def named(self, name: str) -> list[ReceivedSpan]:
        return [span for span in self.spans if span.name == name]

    def parent_of(self, span: ReceivedSpan) -> ReceivedSpan:
        """The parent of a span, by id and trace; AssertionError if it was not received."""
        (found,) = (other for other in self.spans if (other.trace, other.id) == (span.trace, span.parent))
        return found

    def parents(self, span: ReceivedSpan, number: int) -> list[ReceivedSpan]:
        """Up to `number` nearest ancestors of a span; fewer if one was not received."""
        by_id = {other.id: other for other in self.spans}
        found: list[ReceivedSpan] = []
        while len(found) < number and (parent := by_id.get((found[-1] if found else span).parent)) is not None:
            found.append(parent)
        return found

    def linked_by(self, span: ReceivedSpan) -> ReceivedSpan:
        """The span to which a span links, in another trace."""
        (link,) = span.links
        (found,) = (other for other in self.spans if other.id == link)
        return found

    def wait(self, is_there: Callable[[], Any], *, timeout_s: float = 30.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_there():
            assert time.monotonic() < deadline, sorted({span.name for span in self.spans})
            time.sleep(0.05)

    def receive(self, body: bytes, headers: Mapping[str, str]) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        found = [
            ReceivedSpan(
                span.name,
                span.trace_id.hex(),
                span.span_id.hex(),
                span.parent_span_id.hex(),
                _attributes(span.attributes),
                _attributes(of_process.resource.attributes),
                tuple(link.span_id.hex() for link in span.links),
                span.status.code == 2,
                span.status.message,
                (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9,
            )
            for of_process in request.resource_spans
            for scope in of_process.scope_spans
            for span in scope.spans
        ]
        with self._lock:
            self._spans += found
            self.headers.append(headers)


def _attributes(pairs: Any) -> dict[str, Any]:
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            assert self.path == "/v1/traces"
            receiver.receive(body, {name.lower(): value for name, value in self.headers.items()})
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver = OtlpReceiver(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield receiver
        finally:
            server.shutdown()
            thread.join()
