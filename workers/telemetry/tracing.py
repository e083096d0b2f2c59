"""Traces of OpenTelemetry, from a request to the scoring of samples, if the environment names an OTLP endpoint.

OpenTelemetry's own variables configure traces: `OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_SERVICE_NAME`,
`OTEL_TRACES_SAMPLER`. Without an endpoint, OpenTelemetry is not imported, and spans are not recorded. Processes send
the identifiers of a span and its trace to each other as text, in the form of the header `traceparent` (W3C Trace
Context).

Attributes of spans are identifiers, numbers and sizes. They never contain prompts, completions, file names or messages.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from opentelemetry import trace
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

__all__ = [
    "NOTHING",
    "Attributes",
    "Span",
    "begin",
    "current",
    "describe",
    "is_on",
    "record",
    "span",
    "start_tracing",
    "stop_tracing",
    "trace_ids",
    "under",
]

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

NAME = "mergesearch"

# Seconds for which the end of a process waits until its last spans are sent.
LAST_SPANS_S = 3.0

Attributes: TypeAlias = Mapping[str, str | int | float | bool | None]
"""Attributes of a span by their names; those with the value None are left out."""

Kind: TypeAlias = Literal["internal", "server", "client"]

_provider: TracerProvider | None = None  # None: this process makes no spans


def start_tracing(process: str) -> None:
    """Begin to export this process's trace spans, if the environment variables of OpenTelemetry name an endpoint.

    `process` is the kind of this process, such as "driver" or "replica", and becomes an attribute of all spans. Logs a
    warning, and makes no spans, if OpenTelemetry is not installed.
    """
    global _provider
    if _provider is not None or not _is_wanted(os.environ):
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        from workers.telemetry.span_ids import SecretIds
    except ImportError as error:
        log.warning("no traces, although an OTLP endpoint is set: %s; install mergesearch[otel]", error)
        return
    attributes = {"service.version": version(NAME), "mergesearch.process": process}
    if "OTEL_SERVICE_NAME" not in os.environ and "service.name=" not in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = NAME
    _provider = TracerProvider(resource=Resource.create(attributes), id_generator=SecretIds())
    _provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))


def stop_tracing() -> None:
    """Send the trace spans that were not sent yet, and make no more spans.

    The function waits at most LAST_SPANS_S seconds for a collector that does not answer.
    """
    global _provider
    if _provider is not None:
        sending = threading.Thread(target=_provider.shutdown, name="last spans", daemon=True)
        _provider = None
        sending.start()
        sending.join(LAST_SPANS_S)


def is_on() -> bool:
    """Whether this process records trace spans."""
    return _provider is not None


class Span:
    """A trace span that this process records; if tracing is off, an object with the same methods and no effect."""

    def __init__(self, made: trace.Span | None) -> None:
        self._made = made

    @property
    def traceparent(self) -> str | None:
        """Identifier of this span and its trace, as in the W3C header `traceparent`; None if the span is not recorded.

        Other processes need the identifier to make spans below this span.
        """
        return None if self._made is None else _traceparent(self._made)

    def rename(self, name: str) -> None:
        if self._made is not None:
            self._made.update_name(name)

    def describe(self, attributes: Attributes) -> None:
        if self._made is not None:
            self._made.set_attributes(_given(attributes))

    def fail(self, reason: str) -> None:
        """Mark the trace span as failed; `reason` is a word such as the class of an error."""
        if self._made is not None:
            from opentelemetry.trace import Status, StatusCode

            self._made.set_status(Status(StatusCode.ERROR, reason))

    def end(self) -> None:
        """End the trace span now; later calls do nothing."""
        if self._made is not None and self._made.is_recording():
            self._made.end()


# A span that is not made.
NOTHING = Span(None)


def begin(
    name: str,
    attributes: Attributes,
    *,
    parent: str | None = None,
    links: Sequence[str | None] = (),
    kind: Kind = "internal",
    is_root: bool = False,
    start_ns: int | None = None,
) -> Span:
    """Begin a trace span and return it; the caller must end it.

    `name`, `attributes` and `kind` are properties of the span, as in OpenTelemetry. `parent` and `links` identify other
    spans, each as in the W3C header `traceparent`. `parent` is the parent of the new span; None is the current span.
    With `is_root`, the new span has no parent and begins a trace. `links` are related spans in other traces. `start_ns`
    is the time at which the span begins, in nanoseconds since the epoch; None is now.
    """
    if _provider is None:
        return NOTHING
    from opentelemetry import trace
    from opentelemetry.context import Context

    places = [trace.get_current_span(_context(link)).get_span_context() for link in links if link is not None]
    made = _provider.get_tracer(NAME).start_span(
        name,
        context=Context() if is_root else None if parent is None else _context(parent),
        kind=trace.SpanKind[kind.upper()],
        attributes=_given(attributes),
        links=[trace.Link(place) for place in places if place.is_valid],
        start_time=start_ns,
        record_exception=False,
    )
    return Span(made)


@contextmanager
def span(name: str, attributes: Attributes, *, parent: str | None = None, kind: Kind = "internal") -> Iterator[Span]:
    """Context manager of a new trace span, which ends with the context.

    `name`, `attributes` and `kind` are properties of the span, as in OpenTelemetry. Spans that begin in the context are
    children of this span, unless they name another parent. `parent` is the parent of this span, in the form of the
    header `traceparent`; None is the current span. An exception marks the span as failed. The span then has the class
    of the exception, but not its message.
    """
    if _provider is None:
        yield NOTHING
        return
    from opentelemetry import trace

    made = begin(name, attributes, parent=parent, kind=kind)
    assert made._made is not None
    try:
        with trace.use_span(made._made, record_exception=False, set_status_on_exception=False):
            yield made
    except BaseException as error:
        made.fail(type(error).__name__)
        raise
    finally:
        made.end()


def record(name: str, attributes: Attributes, *, parent: str | None, start_ns: int, seconds: float) -> Span:
    """Make a trace span of work that is over.

    `name` and `attributes` are the span's name and attributes. `parent` identifies the parent span, as in the W3C
    header `traceparent`; None is the current span. `start_ns` is the time at which the work began, in nanoseconds since
    the epoch, and `seconds` is how long it took.
    """
    made = begin(name, attributes, parent=parent, start_ns=start_ns)
    if made._made is not None:
        made._made.end(start_ns + round(seconds * 1e9))
    return made


@contextmanager
def under(parent: str | None) -> Iterator[None]:
    """Context manager that makes an existing trace span, such as a span of another process, the current span.

    `parent` identifies the span, in the form of the header `traceparent`. None changes nothing.
    """
    if _provider is None or parent is None:
        yield
        return
    from opentelemetry import context

    token = context.attach(_context(parent))
    try:
        yield
    finally:
        context.detach(token)


def current() -> str | None:
    """Identifier of the current span and its trace, as in the W3C header `traceparent`; None if there is no span."""
    if _provider is None:
        return None
    from opentelemetry import trace

    found = trace.get_current_span()
    return _traceparent(found) if found.get_span_context().is_valid else None


def describe(attributes: Attributes) -> None:
    """Add attributes to the current trace span, if this process has begun it and it has not ended."""
    if _provider is not None:
        from opentelemetry import trace

        trace.get_current_span().set_attributes(_given(attributes))


def trace_ids() -> dict[str, str]:
    """Ids of the current trace and span, under the keys `trace` and `span`; empty if there is no current span."""
    if (place := current()) is None:
        return {}
    _, trace_id, span_id, _ = place.split("-")
    return {"trace": trace_id, "span": span_id}


def _is_wanted(environment: Mapping[str, str]) -> bool:
    is_off = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    return not is_off and environment.get("OTEL_TRACES_EXPORTER") != "none" and any(map(environment.get, ENDPOINTS))


def _given(attributes: Attributes) -> dict[str, str | int | float | bool]:
    return {name: value for name, value in attributes.items() if value is not None}


def _context(place: str | None) -> Context:
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({} if place is None else {"traceparent": place}, context=Context())


def _traceparent(made: trace.Span) -> str:
    place = made.get_span_context()
    return f"00-{place.trace_id:032x}-{place.span_id:016x}-{place.trace_flags:02x}"
