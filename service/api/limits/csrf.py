"""Protection against cross-site request forgery, for requests that the cookie of a browser's session authenticates.

A browser sends the cookie of a session with requests of any page. So a request that changes something needs the
session's CSRF token in a header, which pages of other servers cannot know, and must come from a page of this server.
"""

from __future__ import annotations

from collections.abc import Mapping

from service.auth.sessions import is_csrf_token

__all__ = ["CSRF_HEADER", "csrf_problem", "foreign_problem"]

CSRF_HEADER = "X-CSRF-Token"

# Methods that change nothing.
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))

# Values of Sec-Fetch-Site for requests of a page of this server, and for requests that the user made directly.
OWN_SITES = ("same-origin", "none")


def foreign_problem(method: str, headers: Mapping[str, str]) -> str | None:
    """Reason why a browser's request is refused because another server's page sent it; None if it is accepted.

    Requests that only read (GET, HEAD, OPTIONS) are accepted.
    """
    site = headers.get("sec-fetch-site", "none")
    if method in SAFE_METHODS or site in OWN_SITES:
        return None
    return f"Sec-Fetch-Site {site!r:.40}: pages of other servers may not use the session of this one"


def csrf_problem(method: str, headers: Mapping[str, str], *, secret: str) -> str | None:
    """Reason why a request with a session's cookie is refused as a possible forgery; None if the request is accepted.

    `method` and `headers` are the request's HTTP method and headers. Requests that only read (GET, HEAD, OPTIONS) are
    accepted. Any other request must not come from a page of another server, and must have the session's CSRF token in a
    header. `secret` is the value of the session's cookie.
    """
    if method in SAFE_METHODS:
        return None
    if problem := foreign_problem(method, headers):
        return problem
    token = headers.get(CSRF_HEADER.lower())
    if token is None:
        return f"{CSRF_HEADER}: is missing; a session changes something only with the `csrf_token` of GET /v1/session"
    if not is_csrf_token(token, secret=secret):
        return f"{CSRF_HEADER}: is not that of this session; send the `csrf_token` of GET /v1/session"
    return None
