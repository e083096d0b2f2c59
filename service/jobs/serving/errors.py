"""Errors in the form of OpenAI's API, as a field of problem documents (RFC 9457)."""

from __future__ import annotations

from typing import Any

__all__ = ["openai_error"]


def openai_error(status: int, message: str, *, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """Make the document that tells a client of OpenAI's API about an error, in its field `error`.

    `status` is the HTTP status, `param` is the name of the request's field that is wrong, and `code` is a fixed word by
    which programs recognise the error.
    """
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
