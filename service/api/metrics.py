"""Metrics for Prometheus: requests by route, jobs by state."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.types import JobRecord, JobState

__all__ = ["CountRequests", "RequestCounter", "prometheus_text"]

METHODS = frozenset(("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"))


class RequestCounter:
    """Thread-safe counter of requests by HTTP method, route and status.

    Requests are counted by their route's template, such as `/v1/studies/{study_id}`, and not by their path, because
    the number of paths has no limit.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self._lock = threading.Lock()

    def add(self, method: str, route: str, status: int) -> None:
        with self._lock:
            self._counts[method if method in METHODS else "other", route, status] += 1

    def items(self) -> list[tuple[tuple[str, str, int], int]]:
        with self._lock:
            return sorted(self._counts.items())


class CountRequests:
    """ASGI middleware that adds each request to a RequestCounter when its response begins."""

    def __init__(self, app: ASGIApp, counter: RequestCounter) -> None:
        self._app = app
        self._counter = counter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path_format", "none")
                self._counter.add(scope["method"], route, message["status"])
            await send(message)

        await self._app(scope, receive, counted if scope["type"] == "http" else send)


def prometheus_text(jobs: Iterable[JobRecord], counter: RequestCounter, *, is_ready: bool) -> str:
    """Number of jobs in each state, readiness, and numbers of requests, in Prometheus' text format, version 0.0.4.

    `is_ready` says whether jobs can make progress.
    """
    states = Counter(job.state for job in jobs)
    lines = [
        "# HELP mergesearch_studies Jobs by state.",
        "# TYPE mergesearch_studies gauge",
        *(f'mergesearch_studies{{state="{state.value}"}} {states[state]}' for state in JobState),
        "# HELP mergesearch_ready Whether jobs can make progress.",
        "# TYPE mergesearch_ready gauge",
        f"mergesearch_ready {int(is_ready)}",
        "# HELP mergesearch_http_requests_total Requests answered.",
        "# TYPE mergesearch_http_requests_total counter",
    ]
    for (method, route, status), count in counter.items():
        lines.append(f'mergesearch_http_requests_total{{method="{method}",route="{route}",status="{status}"}} {count}')
    return "\n".join(lines) + "\n"
