"""Counts and times requests by HTTP method, route and status, for the server's metrics."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import Counter
from itertools import accumulate

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["BOUNDS_S", "CountRequests", "Histogram", "RequestCounter", "is_event_stream"]

METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))

# Upper bounds of the buckets of latencies, in seconds; a preflight may take a minute.
BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

# Responses that do not end by themselves.
STREAM = b"text/event-stream"


class Histogram:
    """Numbers of observed values by bucket, and the sum of the values. `bounds` are the buckets' upper bounds."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def cumulative(self) -> tuple[int, ...]:
        """Number of values at or below each bound; the last number counts all values."""
        return tuple(accumulate(self._counts))

    def copy(self) -> Histogram:
        made = Histogram(self.bounds)
        made.sum, made._counts = self.sum, list(self._counts)
        return made


class RequestCounter:
    """Thread-safe counts and latencies of requests by HTTP method, route and status, and number of open event streams.

    Requests are counted by their route's template, such as `/v1/studies/{study_id}`, and not by their path, because
    the number of paths has no limit.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._latencies: dict[tuple[str, str, str], Histogram] = {}
        self._num_streams = 0
        self._lock = threading.Lock()

    def add(self, method: str, route: str, status: int, latency_s: float | None) -> None:
        """Count a request to a route, by its method and the HTTP status of the response, and count its latency.

        `latency_s` is the seconds until the response began; None for an event stream, which has no latency.
        """
        method = method if method in METHODS else "other"
        with self._lock:
            self._counts[method, route, status] += 1
            if latency_s is not None:
                key = (method, route, f"{status // 100}xx")
                self._latencies.setdefault(key, Histogram(BOUNDS_S)).observe(latency_s)

    def stream(self, change: int) -> None:
        """Count an event stream that begins (`change` 1) or ends (-1)."""
        with self._lock:
            self._num_streams += change

    def items(self) -> list[tuple[tuple[str, str, int], int]]:
        with self._lock:
            return sorted(self._counts.items())

    def latencies(self) -> list[tuple[tuple[str, str, str], Histogram]]:
        """Histograms of latencies, each with the method, route and class of status (such as "2xx") of its requests."""
        with self._lock:
            return [(key, histogram.copy()) for key, histogram in sorted(self._latencies.items())]

    @property
    def num_streams(self) -> int:
        """Number of open event streams."""
        return self._num_streams


class CountRequests:
    """ASGI middleware that adds each request to a RequestCounter when its response begins.

    The latency of a request is the time until its response begins: the time that a client takes to receive the
    response, such as a model, does not count. A request that raises an unexpected error is counted with the status 500.
    A request whose client has closed the connection is not counted.
    """

    def __init__(self, app: ASGIApp, counter: RequestCounter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        has_begun = is_stream = False

        async def counted(message: Message) -> None:
            nonlocal has_begun, is_stream
            if message["type"] == "http.response.start":
                has_begun, is_stream = True, is_event_stream(message)
                self._counter.stream(+is_stream)
                latency_s = None if is_stream else time.perf_counter() - started
                self._counter.add(scope["method"], _route(scope), message["status"], latency_s)
            await send(message)

        try:
            await self._app(scope, receive, counted)
        except Exception as error:
            if not has_begun and not isinstance(error, ClientDisconnect):
                self._counter.add(scope["method"], _route(scope), 500, time.perf_counter() - started)
            raise
        finally:
            self._counter.stream(-is_stream)


def _route(scope: Scope) -> str:
    return getattr(scope.get("route"), "path_format", "none")


def is_event_stream(message: Message) -> bool:
    """Whether `message`, the first ASGI message of a response, belongs to the response of an event stream."""
    return any(name.lower() == b"content-type" and value.startswith(STREAM) for name, value in message["headers"])
