"""A span for each HTTP request, which continues the trace of the request's header `traceparent`."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.request_counter import is_event_stream
from workers.telemetry import tracing

__all__ = ["TraceRequests"]

# Requests of probes and of Prometheus, every few seconds.
UNTRACED = ("/healthz", "/readyz", "/metrics")


class TraceRequests:
    """ASGI middleware that makes a span for each request. The span of an event stream ends when the stream begins."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].endswith(UNTRACED):
            await self._app(scope, receive, send)
            return
        method, parent = scope["method"], Headers(scope=scope).get("traceparent")
        with tracing.span(method, {"http.request.method": method}, parent=parent, kind="server") as span:

            async def described(message: Message) -> None:
                if message["type"] == "http.response.start":
                    route = getattr(scope.get("route"), "path_format", None)
                    span.rename(f"{method} {route}" if route else method)
                    span.describe({"http.route": route, "http.response.status_code": message["status"]})
                    if message["status"] >= 500:
                        span.fail(str(message["status"]))
                    if is_event_stream(message):
                        span.end()
                await send(message)

            await self._app(scope, receive, described)
