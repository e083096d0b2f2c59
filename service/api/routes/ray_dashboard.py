"""Read-only routes of Ray's dashboard: its page, its files and its data."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from starlette.responses import RedirectResponse, Response

from service.api.dependencies import Context
from service.api.permissions import reads_dashboard
from service.api.problems import Json, Refusal, refusals
from service.api.ray_dashboard.page import ANSWERS, is_named, policy
from service.api.ray_dashboard.paths import Treatment, treatment

__all__ = ["router"]

router = APIRouter(tags=["operations"])

READERS = [reads_dashboard()]
DashboardPath = Annotated[str, PathParameter(description="Path of Ray's dashboard; empty for its page.")]
ANSWERED: dict[int | str, dict[str, Any]] = {
    200: {"description": "Ray's answer, without what may be secret.", "content": {"*/*": {}}},
    **refusals(401, 403, 404, 422, 429, 502, 503),
}


@router.get("/ray", dependencies=READERS, include_in_schema=False)
async def without_slash() -> Response:
    """Redirect from `/ray` to `/ray/`, because the links of the dashboard's page are relative to that path."""
    return RedirectResponse("ray/")


@router.get("/ray/{path:path}", dependencies=READERS, response_model=None, responses=ANSWERED)
async def get_ray_dashboard(request: Request, services: Context, path: DashboardPath) -> Response:
    """Ray's dashboard; only administrators may see it, or with --open-dashboard every user.

    Only requests that the dashboard's page sends to show something are forwarded (403 for others). Values of
    environment variables and arguments of commands are replaced by `<redacted>`.
    """
    return await _forwarded(request, services, f"/{path}")


@router.head("/ray/{path:path}", dependencies=READERS, response_model=None, responses=ANSWERED)
async def head_ray_dashboard(request: Request, services: Context, path: DashboardPath) -> Response:
    """Return the status and the headers of a GET request for the same path, without the body."""
    return await _forwarded(request, services, f"/{path}")


async def _forwarded(request: Request, services: Context, path: str) -> Response:
    if (own := ANSWERS.get(path)) is not None:
        return Json(own)
    is_page = treatment(path) is Treatment.PAGE
    if is_page and not is_named(request.headers["host"]):
        raise Refusal(403, f"Host {request.headers['host']!r:.100}: open the dashboard under a name, such as localhost")
    response = await services.dashboard.forward(request.method, path, request.query_params.multi_items())
    if is_page:
        response.headers["Content-Security-Policy"] = policy(services.dashboard.roots(request.headers["host"]))
    return response
