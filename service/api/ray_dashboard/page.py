"""The page of Ray's dashboard: its security policy, and the answers that it gets from this server instead of Ray.

The page runs in the origin of this server, with the user's cookie. The policy lets the page's scripts load and request
only URLs below the dashboard's path, so that the scripts cannot read or change jobs of this server.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["ANSWERS", "is_named", "policy"]

# HOST or HOST:PORT; an address of IPv6 cannot be written in a policy.
_AUTHORITY = re.compile(r"[A-Za-z0-9.-]+(?::[0-9]+)?")


def _reply(message: str, *, result: bool = True, **data: Any) -> Mapping[str, Any]:
    return {"result": result, "msg": message, "data": data}


# The page must not ask for Ray's token, show frames of Grafana, or offer to profile processes.
ANSWERS: Mapping[str, Mapping[str, Any]] = {
    "/api/authentication_mode": {"authentication_mode": "disabled"},
    "/api/grafana_health": _reply("Grafana disabled", grafanaHost="DISABLED"),
    "/api/prometheus_health": _reply("Prometheus disabled", result=False),
    "/api/profiling_enabled": _reply("", profilingEnabled=False, profilingDefaults={}),
    "/api/v0/runtime_env_redaction": _reply("", redactionEnabled=True),
}


def is_named(authority: str) -> bool:
    """Whether `authority`, the value of the header Host, is a name or an IPv4 address, with or without a port.

    The security policy of the dashboard's page cannot contain an IPv6 address.
    """
    return _AUTHORITY.fullmatch(authority) is not None


def policy(roots: Sequence[str]) -> str:
    """Value of the header Content-Security-Policy for the page of Ray's dashboard.

    The page may load files and data only from addresses that begin with one of `roots`. Each root is HOST/PATH/ or a
    URL, with a slash at its end. The page may not open other pages, contain frames, or be shown in a frame. It may let
    the user download files, such as logs.
    """
    below = " ".join(roots)
    return "; ".join(
        (
            "default-src 'none'",
            f"script-src {below}",
            f"style-src {below} 'unsafe-inline'",
            f"img-src {below} data:",
            f"font-src {below} data:",
            f"connect-src {below}",
            "worker-src 'none'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            # Its own origin stays, as the page needs its cookie and its storage.
            "sandbox allow-scripts allow-same-origin allow-downloads",
        )
    )
