"""Ids of spans and traces, from the operating system's random numbers.

OpenTelemetry's own ids come from Python's global generator of random numbers. Libraries seed this generator, so spans
of several processes would get the same ids. Drawing ids would also change the random numbers of other code. The module
needs the package's extra `otel`.
"""

from __future__ import annotations

import secrets

from opentelemetry.sdk.trace.id_generator import IdGenerator

__all__ = ["SecretIds"]


class SecretIds(IdGenerator):
    """Generator of random ids, independent of seeds. An id is never 0, because 0 means that there is no id."""

    def generate_span_id(self) -> int:
        return secrets.randbits(64) or 1

    def generate_trace_id(self) -> int:
        return secrets.randbits(128) or 1

    def is_trace_id_random(self) -> bool:
        return True
