"""What happens in a study, as it happens or as a list."""

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
# One frame of a stream, as OpenAPI describes them from 3.2 on.
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
                "A stream of server-sent events, whose `id` and `event` are an EventDocument's id and kind and whose "
                "`data` is that document; between them `progress` frames (a ProgressDocument) and at the end of the "
                "study one `end` frame, both without an id. With `Accept: application/json` the events so far."
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
    limit: Annotated[int, Query(description="At most so many, of a list.", ge=1, le=MAX_EVENTS)] = MAX_EVENTS,
    last_event_id: Annotated[
        int | None,
        Header(alias="Last-Event-ID", description="As `after`, and goes before it.", ge=0, le=MAX_ID),
    ] = None,
) -> Response:
    """Everything that happened in the study and, in a stream, what happens until it has ended."""
    cursor = after if last_event_id is None else last_event_id
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and EVENT_STREAM not in accepted:
        events = await run_in_threadpool(services.store.events, study.id, after=cursor, limit=limit)
        return Json(EventsDocument(events=[event_document(event) for event in events]))
    # No proxy may wait for more before it passes on what there is.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(services.hub.watch(study.id, after=cursor), media_type=EVENT_STREAM, headers=headers)
