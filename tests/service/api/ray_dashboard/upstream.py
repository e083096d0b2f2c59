"""A dashboard over HTTP that gives the answers of a test, and records its requests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service.cluster.dashboard import RayDashboard
from tests.service.http_server import HttpServer

TOKEN = "token-of-ray-4711"

PAGE = """<!doctype html><html><head><script defer="defer" src="./static/js/main.js"></script>
<link href="./static/css/main.css" rel="stylesheet"></head><body><div id="root">empty</div></body></html>"""


@dataclass
class Upstream:
    """The dashboard. `answers` has by path a JSON document or a function of the request; other paths give 404."""

    answers: dict[str, Any] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    url: str = ""

    @property
    def dashboard(self) -> RayDashboard:
        return RayDashboard(self.url, {"authorization": f"Bearer {TOKEN}"})

    async def answer(self, request: Request) -> Response:
        self.requests.append(request)
        found = self.answers.get(request.url.path)
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            return Response("Forbidden: Invalid authentication token", status_code=403)
        if found is None:
            return Response("no such thing, says /srv/ray/secret.py", status_code=404)
        response = found(request) if callable(found) else JSONResponse(found)
        assert isinstance(response, Response)
        response.set_cookie("ray-authentication-token", TOKEN)
        response.headers["X-Of-Ray"] = TOKEN
        return response

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self.answer, methods=["GET", "HEAD", "POST", "PUT", "DELETE"])])


@contextmanager
def upstream(answers: Mapping[str, Any]) -> Iterator[Upstream]:
    """Context with a dashboard that gives `answers`."""
    found = Upstream(dict(answers))
    with HttpServer(found.app) as server:
        found.url = server.url
        yield found
