"""Secrets of browser sessions: the value of the session's cookie, and the CSRF token derived from it."""

from __future__ import annotations

import hmac
import secrets

__all__ = ["COOKIE", "IDLE_S", "LIFETIME_S", "csrf_token_of", "is_csrf_token", "new_session_secret"]

# Name of the cookie of a session. Its value has 256 random bits; the database has the sha256.
COOKIE = "mergesearch_session"

# The beginning of every value, by which scanners of logs recognize leaked ones.
MARK = "mss_"
NUM_BYTES = 32

# Seconds after which a session ends, and without a request.
LIFETIME_S = 12 * 3600.0
IDLE_S = 2 * 3600.0


def new_session_secret() -> str:
    """Make a random value for the cookie of a new browser session, by which the server recognises the session."""
    return MARK + secrets.token_urlsafe(NUM_BYTES)


def csrf_token_of(secret: str) -> str:
    """The CSRF token of the browser session whose cookie has the value `secret`.

    The token is a keyed hash of `secret`, from which `secret` cannot be computed.
    """
    return hmac.new(secret.encode("utf-8", "surrogateescape"), b"mergesearch csrf token", "sha256").hexdigest()


def is_csrf_token(text: str, *, secret: str) -> bool:
    """Whether `text` is the CSRF token of the browser session whose cookie has the value `secret`.

    The texts are compared in constant time.
    """
    return hmac.compare_digest(text.encode("utf-8", "surrogateescape"), csrf_token_of(secret).encode())
