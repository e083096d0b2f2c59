"""Spans of a process: the exported spans, their content, and no cost if nobody asked for them."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.otlp_receiver import OtlpReceiver, otlp_receiver
from workers.telemetry import tracing
from workers.telemetry.environment import passed_on
from workers.telemetry.logs import JsonLines

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith("OTEL_"):
            monkeypatch.delenv(name)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """A collector, whose address is in the environment."""
    with otlp_receiver() as found:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", found.url)
        yield found
        tracing.stop_tracing()


def test_spans_are_children_of_their_contexts(receiver: OtlpReceiver) -> None:
    """A span continues the trace of its parent in another process; spans within are its children."""
    tracing.start_tracing("tests")
    with tracing.span("outer", {"mergesearch.job": "j", "mergesearch.trial": None}, parent=PARENT) as outer:
        with tracing.span("inner", {}) as inner:
            assert tracing.current() == inner.traceparent
        assert tracing.current() == outer.traceparent
    with tracing.under(outer.traceparent):
        tracing.begin("later", {}).end()
        tracing.begin("other", {}, links=[tracing.current(), None], is_root=True).end()
    assert tracing.current() is None
    tracing.stop_tracing()
    spans = {span.name: span for span in receiver.spans}
    assert (spans["outer"].trace, spans["outer"].parent) == tuple(PARENT.split("-")[1:3])
    assert spans["outer"].attributes == {"mergesearch.job": "j"}
    assert [receiver.parent_of(spans[name]).name for name in ("inner", "later")] == ["outer", "outer"]
    assert (spans["other"].parent, receiver.linked_by(spans["other"]).name) == ("", "outer")
    assert spans["other"].trace != spans["outer"].trace
    process = spans["outer"].process
    assert (process["service.name"], process["mergesearch.process"]) == ("mergesearch", "tests")


def test_ids_do_not_depend_on_seeds(receiver: OtlpReceiver) -> None:
    """Libraries seed Python's generator of random numbers: ids must not repeat, and spans must not draw from it."""
    tracing.start_tracing("tests")
    ids = set()
    for _ in range(2):
        random.seed(0)
        with tracing.span("one", {}) as span:
            assert span.traceparent is not None
            ids |= {*span.traceparent.split("-")[1:3]}
        assert random.getrandbits(64) == random.Random(0).getrandbits(64)
    assert len(ids) == 4


def test_a_failed_span_has_no_message(receiver: OtlpReceiver) -> None:
    """Messages of errors may quote what models were asked: a span has the error's class alone."""
    tracing.start_tracing("tests")
    with pytest.raises(ValueError, match="s3cr3t"), tracing.span("fails", {}):
        raise ValueError("s3cr3t")
    tracing.stop_tracing()
    (span,) = receiver.spans
    assert (span.is_error, span.reason) == (True, "ValueError")
    assert "s3cr3t" not in repr(span)


def test_a_span_of_the_past_has_its_seconds(receiver: OtlpReceiver) -> None:
    tracing.start_tracing("tests")
    tracing.record("swap", {}, parent=PARENT, start_ns=10**18, seconds=2.5)
    tracing.stop_tracing()
    assert receiver.spans[0].seconds == 2.5


def test_standard_variables_configure_traces(receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME, the resource's attributes, headers and the sampler are those of the environment."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=test")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "api-key=s3cr3t")
    tracing.start_tracing("tests")
    tracing.begin("one", {}).end()
    tracing.stop_tracing()
    process = receiver.spans[0].process
    assert (process["service.name"], process["deployment.environment"]) == ("search", "test")
    assert receiver.headers[0]["api-key"] == "s3cr3t"
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracing.start_tracing("tests")
    with tracing.span("two", {}) as span:
        span.fail("nothing")
    tracing.stop_tracing()
    assert [span.name for span in receiver.spans] == ["one"]


def test_a_silent_collector_keeps_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process ends although its collector accepts connections and answers nothing."""
    monkeypatch.setattr(tracing, "LAST_SPANS_S", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{silent.getsockname()[1]}")
        tracing.start_tracing("tests")
        tracing.begin("one", {}).end()
        started = time.monotonic()
        tracing.stop_tracing()
        assert time.monotonic() - started < 0.5 + 2


# Without an endpoint, and with one but switched off.
SWITCHED_OFF: tuple[dict[str, str], ...] = (
    {},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"},
    {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"},
)


@pytest.mark.slow
def test_nothing_is_imported_without_an_endpoint() -> None:
    """Without an endpoint, or switched off, spans are nothing, and no module of OpenTelemetry is loaded."""
    program = f"""
import os, sys
import service.api.app, service.cluster.reconciler, service.server
from workers.telemetry import tracing
known = {{name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}}
for environment in {SWITCHED_OFF!r}:
    os.environ.clear()
    os.environ.update(known | environment)
    tracing.start_tracing("tests")
    with tracing.span("a", {{}}) as span, tracing.under(span.traceparent):
        tracing.describe({{"a": 1}})
        tracing.record("b", {{}}, parent=None, start_ns=0, seconds=1.0)
        tracing.begin("c", {{}}).end()
    print(span.traceparent, tracing.current(), tracing.trace_ids(), tracing.is_on())
    print(*(name for name in sys.modules if name.partition(".")[0] == "opentelemetry"))
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **SWITCHED_OFF[-1]},
        check=True,
    )
    assert done.stdout == "None None {} False\n\n" * len(SWITCHED_OFF)


def test_a_missing_extra_is_a_warning(receiver: OtlpReceiver) -> None:
    """Where OpenTelemetry is not installed, an endpoint leads to a message and to no spans."""
    program = """
import sys
sys.modules["opentelemetry.exporter.otlp"] = None
from workers.telemetry import logs, tracing
logs.log_to_stderr()
tracing.start_tracing("tests")
with tracing.span("a", {}):
    pass
print(tracing.is_on())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, env=dict(os.environ), check=True
    )
    assert done.stdout == "False\n"
    assert "no traces, although an OTLP endpoint is set" in done.stderr
    assert done.stderr.endswith("install mergesearch[otel]\n")


def test_log_lines_name_their_span(receiver: OtlpReceiver) -> None:
    """JSON lines have the ids of the trace and the span in which they were written."""
    tracing.start_tracing("tests")
    record = logging.LogRecord("a", logging.INFO, "", 0, "told", None, None)
    with tracing.span("one", {}, parent=PARENT) as span:
        line = json.loads(JsonLines().format(record))
    assert span.traceparent == f"00-{line['trace']}-{line['span']}-01"
    assert "trace" not in json.loads(JsonLines().format(record))


def test_secrets_are_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that Ray's dashboard would show have no headers and no passwords."""
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "api-key=s3cr3t")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:s3cr3t@127.0.0.1:4318")
    monkeypatch.setenv("MERGESEARCH_LOG_FORMAT", "json")
    assert passed_on() == {"OTEL_SERVICE_NAME": "search", "MERGESEARCH_LOG_FORMAT": "json"}
