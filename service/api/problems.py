"""Error responses as problem details (RFC 9457); this is the only module that maps errors to HTTP status codes."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from search_spaces.errors import InvalidPreference, InvalidStudy, Problem
from service.errors import Conflict, InvalidQuery, LoginRefused, NotFound, StaleAttempt
from service.jobs.serving.errors import openai_error
from service.jobs.serving.kind import OPENAI
from service.schemas.api import FieldProblem, ProblemDocument

__all__ = [
    "PROBLEM_JSON",
    "InvalidRequest",
    "Json",
    "Refusal",
    "TooManyRequests",
    "Unauthorized",
    "Unavailable",
    "install_handlers",
    "problem_response",
    "refusals",
]

logger = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"

# Seconds that a client should wait before it retries.
RETRY_AFTER_S = 5
MAX_SHOWN = 60


class Refusal(Exception):
    """Raised if a request is refused; `status` is the HTTP status of the response, `detail` is the reason.

    `problems` lists the reasons if there are several.
    """

    def __init__(self, status: int, detail: str, problems: tuple[Problem, ...] = ()) -> None:
        super().__init__(status, detail, problems)
        self.status = status
        self.detail = detail
        self.problems = problems


class InvalidRequest(Exception):
    """Raised if a request is invalid; `problems` lists every problem. The response has status 422."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


class Unauthorized(Exception):
    """Raised if a request has neither a valid token nor a valid session. The response has status 401."""


class TooManyRequests(Exception):
    """Raised if a sender sends too many requests. The response has status 429 and says to wait `wait_s` seconds."""

    def __init__(self, detail: str, wait_s: float) -> None:
        super().__init__(detail, wait_s)
        self.detail = detail
        self.wait_s = wait_s


class Unavailable(Exception):
    """Raised if a part of the service that a request needs is temporarily unavailable. The response has status 503.

    `code` is the word by which clients of OpenAI's API recognise the error.
    """

    def __init__(self, detail: str, code: str | None = None) -> None:
        super().__init__(detail, code)
        self.detail = detail
        self.code = code

    def __str__(self) -> str:
        return self.detail


class Json(JSONResponse):
    """JSON response in ASCII; all other characters are escaped.

    Such a response can quote invalid Unicode from a request, such as lone surrogates, which UTF-8 cannot encode.
    """

    def render(self, content: Any) -> bytes:
        return self.encode(content)

    @staticmethod
    def encode(content: Any) -> bytes:
        """JSON text of `content`, in ASCII. Raises ValueError if `content` has NaN or infinite numbers."""
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class _ProblemJson(Json):
    media_type = PROBLEM_JSON


def problem_response(
    status: int, detail: str, *, problems: Iterable[Problem] = (), headers: Mapping[str, str] | None = None
) -> Response:
    document: ProblemDocument = {
        "type": "about:blank",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
    }
    fields: list[FieldProblem] = [{"field": problem.field, "message": problem.message} for problem in problems]
    if fields:
        document["problems"] = fields
    return _ProblemJson(document, status_code=status, headers=dict(headers or {}))


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAPI descriptions of a route's error responses with the HTTP statuses `statuses`."""
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"description": HTTPStatus(status).phrase, "content": content}
        if status in (HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.TOO_MANY_REQUESTS):
            header = {"description": "Seconds to wait before a retry.", "schema": {"type": "integer"}}
            described[status]["headers"] = {"Retry-After": header}
    return described


def install_handlers(app: FastAPI) -> None:
    """Make `app` turn every error raised in a route or in FastAPI into a response with problem details (RFC 9457)."""

    async def invalid_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidStudy | InvalidRequest)
        return _invalid(error.problems)

    async def invalid_preference(_: Request, error: Exception) -> Response:
        return _invalid((Problem("prefer", str(error).removeprefix("preference: ")),))

    async def invalid_query(_: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidQuery)
        return _invalid((Problem(error.parameter, error.reason),))

    async def invalid_parameters(_: Request, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        problems = tuple(_problem_of(details) for details in error.errors())
        if all(details["loc"][0] == "path" for details in error.errors()):
            return problem_response(404, "; ".join(map(str, problems)))
        return _invalid(problems)

    async def refused(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            allowed = _allowed_methods(app, request)
            detail = f"{request.method} is not allowed here; use {', '.join(allowed)}"
            return problem_response(405, detail, headers={"Allow": ", ".join(allowed)})
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"{request.url.path!r:.200}: no such route; /docs lists the routes"
        return problem_response(error.status_code, detail, headers=error.headers)

    def respond_with(status: int) -> Any:
        async def handler(_: Request, error: Exception) -> Response:
            return problem_response(status, str(error))

        return handler

    async def refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return problem_response(error.status, error.detail, problems=error.problems)

    async def unauthorized(_: Request, error: Exception) -> Response:
        return problem_response(401, str(error), headers={"WWW-Authenticate": 'Bearer realm="mergesearch"'})

    async def too_many(_: Request, error: Exception) -> Response:
        assert isinstance(error, TooManyRequests)
        return problem_response(429, error.detail, headers={"Retry-After": str(math.ceil(error.wait_s))})

    async def unavailable(_: Request, error: Exception) -> Response:
        return problem_response(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)})

    async def database_error(_: Request, error: Exception) -> Response:
        detail = app.state.services.store.problem()
        if detail is None:
            logger.error("the database does not respond", exc_info=error)
            detail = "the server's database does not respond; the server's log says why"
        return problem_response(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def internal_error(_: Request, error: Exception) -> Response:
        # The server closes the connection after an exception, so a client must not send its next request over it.
        return problem_response(500, "internal error; the server's log says why", headers={"Connection": "close"})

    handlers: dict[type[Exception], Any] = {
        InvalidStudy: invalid_request,
        InvalidRequest: invalid_request,
        InvalidPreference: invalid_preference,
        InvalidQuery: invalid_query,
        RequestValidationError: invalid_parameters,
        HTTPException: refused,
        Refusal: refusal,
        NotFound: respond_with(404),
        Conflict: respond_with(409),
        StaleAttempt: respond_with(409),
        LoginRefused: respond_with(403),
        Unauthorized: unauthorized,
        TooManyRequests: too_many,
        Unavailable: unavailable,
        ConnectionError: unavailable,
        SQLAlchemyError: database_error,
        Exception: internal_error,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, _with_openai_error(handler))


def _with_openai_error(handler: Any) -> Any:
    """Wrap an exception handler so that its responses on OpenAI-compatible routes have OpenAI's field `error` too.

    OpenAI's clients read this field. `handler` makes a problem document for any route. On other routes, the document is
    sent unchanged.
    """

    async def handled(request: Request, error: Exception) -> Response:
        response: Response = await handler(request, error)
        if f"/{OPENAI}/" not in request.url.path:
            return response
        document = json.loads(bytes(response.body))
        fields = [problem["field"] for problem in document.get("problems", ())]
        code = error.code if isinstance(error, Unavailable) else None
        given = openai_error(response.status_code, document["detail"], param=fields[0] if fields else None, code=code)
        headers = {name: value for name, value in response.headers.items() if name != "content-length"}
        return _ProblemJson({**document, **given}, status_code=response.status_code, headers=headers)

    return handled


def _invalid(problems: tuple[Problem, ...]) -> Response:
    detail = str(problems[0]) if len(problems) == 1 else f"the request has {len(problems)} problems"
    return problem_response(422, detail, problems=problems)


def _problem_of(details: Mapping[str, Any]) -> Problem:
    place = ".".join(str(part) for part in details["loc"][1:])
    if details["type"] == "missing":
        return Problem(place, "is missing")
    shown = json.dumps(details["input"], default=str)
    shown = shown if len(shown) <= MAX_SHOWN else f"{shown[:MAX_SHOWN]}..."
    message = details["msg"]
    return Problem(place, f"{shown} is not accepted; {message[:1].lower()}{message[1:]}")


def _allowed_methods(app: FastAPI, request: Request) -> list[str]:
    methods: set[str] = set()
    for route in app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return sorted(methods)
