"""The address of Ray's dashboard, and the headers that requests of this server to the dashboard need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["RayDashboard"]


@dataclass(frozen=True)
class RayDashboard:
    """Dashboard of the Ray cluster that the server uses.

    `url` is its address without a slash at the end. `headers` authenticate the server's requests: they have Ray's
    token, if Ray asks for one. The headers must not be shown or sent to anyone else.
    """

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    @classmethod
    def at(cls, url: str) -> RayDashboard:
        """Describe the Ray dashboard at `url`, with the access token that Ray's own clients would send to it."""
        from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

        return cls(url.rstrip("/"), dict(get_auth_headers_if_auth_enabled({})))
