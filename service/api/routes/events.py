"""The events of a study, as a stream or as a list."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from service.api.dependencies import MAX_ID, Context, Study
from service.api.presenters import event_document
from service.api.problems import Json, refusals
from service.schemas.api import EventsDocument

__all__ = ["router"]

router = APIRouter(tags=["events"])

MAX_EVENTS = 10_000
EVENT_STREAM = "text/event-stream"
# The schema of one frame of a stream, in the form of OpenAPI 3.2.
FRAME = {
    "type": "object",
    "properties": {
        "id": {"type": "string", "pattern": "^[0-9]+$"},
        "event": {"type": "string"},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [
                    {"$ref": "#/components/schemas/EventDocument"},
                    {"$ref": "#/components/schemas/ProgressDocument"},
                    {"$ref": "#/components/schemas/EndDocument"},
                ]
            },
        },
        "retry": {"type": "integer"},
    },
}


@router.get(
    "/studies/{study_id:segment}/events",
    response_model=None,
    responses={
        200: {
            "model": EventsDocument,
            "description": (
                "A stream of server-sent events: `id` and `event` are the id and kind of an EventDocument, `data` is "
                "that document. In between there are `progress` frames (a ProgressDocument), and one `end` frame when "
                "the study has ended, both without an id. With `Accept: application/json`, a list of the events so far."
            ),
            "content": {EVENT_STREAM: {"itemSchema": FRAME}},
        },
        **refusals(404, 422),
    },
)
async def watch_events(
    request: Request,
    study: Study,
    services: Context,
    after: Annotated[int, Query(description="Only events with a larger id.", ge=0, le=MAX_ID)] = 0,
    limit: Annotated[int, Query(description="Maximum number of events in a list.", ge=1, le=MAX_EVENTS)] = MAX_EVENTS,
    last_event_id: Annotated[
        int | None,
        Header(alias="Last-Event-ID", description="As `after`, and takes precedence over it.", ge=0, le=MAX_ID),
    ] = None,
) -> Response:
    """The study's past events and, in a stream, new ones until the study has ended."""
    cursor = after if last_event_id is None else last_event_id
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and EVENT_STREAM not in accepted:
        events = await run_in_threadpool(services.store.events, study.id, after=cursor, limit=limit)
        return Json(EventsDocument(events=[event_document(event) for event in events]))
    # Proxies must pass frames on without buffering.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(services.hub.watch(study.id, after=cursor), media_type=EVENT_STREAM, headers=headers)
