"""Environment variables that make drivers and replicas write logs and traces in the same way as their server.

Ray's dashboard shows the variables of a job. Variables that may have secrets, such as the headers of requests to a
collector, are not passed on; operators set them where they start Ray.
"""

from __future__ import annotations

import os

from workers.telemetry import logs

__all__ = ["passed_on"]


def passed_on() -> dict[str, str]:
    """Environment variables of this process that configure logs and traces, for the Ray processes that it starts.

    They let those processes log and trace in the same way. Variables that may hold secrets are left out.
    """
    return {name: value for name, value in os.environ.items() if name == logs.VARIABLE or _is_open(name, value)}


def _is_open(name: str, value: str) -> bool:
    """Whether the environment variable `name` configures OpenTelemetry and its `value` has no secret.

    Variables with headers, and values with "@" (URLs with a password), may be secret.
    """
    return name.startswith("OTEL_") and "HEADERS" not in name and "@" not in value
