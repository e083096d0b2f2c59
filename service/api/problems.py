"""Every refusal as problem details (RFC 9457), and the one place where errors become HTTP status codes."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from sqlalchemy.exc import SQLAlchemyError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import Match

from search_spaces.errors import InvalidStudy, Problem
from service.errors import Conflict, NotFound, StaleAttempt
from service.schemas.api import FieldProblem, ProblemDocument

__all__ = [
    "PROBLEM_JSON",
    "InvalidRequest",
    "Json",
    "Refusal",
    "Unavailable",
    "install_handlers",
    "problem_response",
    "refusals",
]

logger = logging.getLogger(__name__)

PROBLEM_JSON = "application/problem+json"

# Seconds after which it is worth asking again.
RETRY_AFTER_S = 5
MAX_SHOWN = 60


class Refusal(Exception):
    """The request cannot be served: an HTTP status and why."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(status, detail)
        self.status = status
        self.detail = detail


class InvalidRequest(Exception):
    """Something in the request is not accepted; `problems` lists everything."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__(problems)
        self.problems = problems


class Unavailable(Exception):
    """What the request needs is not there at present; the message says what."""


class Json(JSONResponse):
    """JSON in ASCII: text that is no valid Unicode (lone surrogates of a request shown back) passes too."""

    def render(self, content: Any) -> bytes:
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
    """How a route's refusals are described in the OpenAPI document."""
    content = {PROBLEM_JSON: {"schema": {"$ref": "#/components/schemas/ProblemDocument"}}}
    described: dict[int | str, dict[str, Any]] = {}
    for status in statuses:
        described[status] = {"description": HTTPStatus(status).phrase, "content": content}
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            header = {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}
            described[status]["headers"] = {"Retry-After": header}
    return described


def install_handlers(app: FastAPI) -> None:
    """Turn every error of a route or of the framework into a response."""

    async def invalid_request(_: Request, error: Exception) -> Response:
        assert isinstance(error, InvalidStudy | InvalidRequest)
        return _invalid(error.problems)

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
            detail = f"{request.method} is not possible here; use {', '.join(allowed)}"
            return problem_response(405, detail, headers={"Allow": ", ".join(allowed)})
        detail = str(error.detail)
        if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
            detail = f"{request.url.path!r:.200}: there is nothing here; /docs lists what there is"
        return problem_response(error.status_code, detail, headers=error.headers)

    def answer(status: int) -> Any:
        async def handler(_: Request, error: Exception) -> Response:
            return problem_response(status, str(error))

        return handler

    async def refusal(_: Request, error: Exception) -> Response:
        assert isinstance(error, Refusal)
        return problem_response(error.status, error.detail)

    async def away(_: Request, error: Exception) -> Response:
        return problem_response(503, str(error), headers={"Retry-After": str(RETRY_AFTER_S)})

    async def database(_: Request, error: Exception) -> Response:
        logger.error("the database does not answer", exc_info=error)
        detail = "the server's database does not answer; its log says why"
        return problem_response(503, detail, headers={"Retry-After": str(RETRY_AFTER_S)})

    async def bug(_: Request, error: Exception) -> Response:
        return problem_response(500, "the server failed at this request; its log says why")

    handlers: dict[type[Exception], Any] = {
        InvalidStudy: invalid_request,
        InvalidRequest: invalid_request,
        RequestValidationError: invalid_parameters,
        HTTPException: refused,
        Refusal: refusal,
        NotFound: answer(404),
        Conflict: answer(409),
        StaleAttempt: answer(409),
        Unavailable: away,
        ConnectionError: away,
        SQLAlchemyError: database,
        Exception: bug,
    }
    for kind, handler in handlers.items():
        app.add_exception_handler(kind, handler)


def _invalid(problems: tuple[Problem, ...]) -> Response:
    detail = str(problems[0]) if len(problems) == 1 else f"{len(problems)} things are wrong with the request"
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
