"""Routes for operators of the server: liveness, readiness, metrics."""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import APIRouter
from sqlalchemy.exc import SQLAlchemyError
from starlette.responses import PlainTextResponse, Response

# pydantic reads typing's own TypedDict only from Python 3.12 on.
from typing_extensions import TypedDict

from service.api.dependencies import Context
from service.api.metrics import Scrape, Stored, prometheus_text
from service.api.permissions import open_to_all, reads_metrics
from service.api.problems import Json, Unavailable, refusals

__all__ = ["router"]

logger = logging.getLogger(__name__)

router = APIRouter(tags=["operations"])


class HealthDocument(TypedDict):
    status: Literal["alive"]


class ReadinessDocument(TypedDict):
    status: Literal["ready"]


OPEN = [open_to_all()]
READINESS: dict[int | str, dict[str, Any]] = {200: {"model": ReadinessDocument}, **refusals(503)}


@router.get("/healthz", dependencies=OPEN, response_model=None, responses={200: {"model": HealthDocument}})
async def healthz() -> Response:
    """Report that the server's process is alive."""
    return Json(HealthDocument(status="alive"))


@router.get("/readyz", dependencies=OPEN, response_model=None, responses=READINESS)
def readyz(services: Context) -> Response:
    """Report whether the database responds and jobs can make progress.

    The server accepts new jobs even if jobs cannot make progress yet. A server that its operator has drained, so that
    it can be stopped for maintenance, accepts no jobs.
    """
    services.store.last_event_id("")
    if reason := services.cluster.not_ready():
        raise Unavailable(reason)
    return Json(ReadinessDocument(status="ready"))


@router.get(
    "/metrics",
    dependencies=[reads_metrics()],
    response_model=None,
    responses={
        200: {"description": "Prometheus' text format.", "content": {"text/plain": {}}},
        **refusals(401, 403, 429, 503),
    },
)
def metrics(services: Context) -> Response:
    """Metrics for Prometheus: jobs and their progress, requests, the database and the disk.

    The metrics name the jobs of all teams. Therefore a server with accounts sends them to its administrators only,
    unless it was started with --open-metrics. While the database does not answer, the metrics of jobs are left out.
    """
    try:
        stored = Stored.read(services.store)
    except SQLAlchemyError:
        logger.exception("metrics: the database does not respond")
        stored = None
    scrape = Scrape(
        stored, services.cluster.not_ready(), services.cluster.queue(), services.requests, services.data_dir
    )
    return PlainTextResponse(prometheus_text(scrape), media_type="text/plain; version=0.0.4")
