"""Route of a job's events, as a stream of server-sent events or as a JSON list."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Annotated, Any

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from service.api.dependencies import MAX_ID, Context, Services, given
from service.api.permissions import Renewal, Right, check_right
from service.api.presenters import event_document
from service.api.problems import Json, refusals
from service.jobs.base import JobKind
from service.schemas.api import EventsDocument
from service.types import JobRecord

__all__ = ["add_events_route"]

MAX_EVENTS = 10_000
EVENT_STREAM = "text/event-stream"


def _frame(progress: str) -> dict[str, Any]:
    """JSON Schema of one server-sent event of a job's event stream, in the form of OpenAPI 3.2.

    `progress` is the name of the schema of progress documents, which differs between the kinds of job.
    """
    documents = ("EventDocument", progress, "EndDocument")
    return {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[0-9]+$"},
            "event": {"type": "string"},
            "data": {
                "type": "string",
                "contentMediaType": "application/json",
                "contentSchema": {"anyOf": [{"$ref": f"#/components/schemas/{name}"} for name in documents]},
            },
            "retry": {"type": "integer"},
        },
    }


async def _watch(
    request: Request,
    services: Services,
    job_id: str,
    *,
    after: int,
    limit: int,
    last_event_id: int | None,
    may_go_on: Callable[[], Awaitable[bool]],
) -> Response:
    """Respond with a job's events as a JSON list or, by default, as a stream that ends when the job ends.

    The response is a list if the request's header Accept asks for JSON. Only events with ids above `after` are sent, or
    above `last_event_id` if it is given. A list has at most `limit` events. A stream ends when `may_go_on` says that
    the sender lost the right to read the job.
    """
    cursor = after if last_event_id is None else last_event_id
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and EVENT_STREAM not in accepted:
        events = await run_in_threadpool(services.store.events, job_id, after=cursor, limit=limit)
        return Json(EventsDocument(events=[event_document(event) for event in events]))
    # Proxies must pass frames on without buffering.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    frames = _while_allowed(services.hub.watch(job_id, after=cursor), may_go_on)
    return StreamingResponse(frames, media_type=EVENT_STREAM, headers=headers)


async def _while_allowed(
    frames: AsyncGenerator[bytes, None], may_go_on: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[bytes, None]:
    """Yield the frames of an event stream until `may_go_on`, which is called before each frame, returns False."""
    async with aclosing(frames):
        async for frame in frames:
            if not await may_go_on():
                return
            yield frame


def add_events_route(router: APIRouter, kind: JobKind, path: str) -> None:
    """Add the route at `path` that sends the events of a job of this `kind`."""
    found, progress = given(kind), kind.documents()[1].__name__

    async def watch(
        request: Request,
        services: Context,
        renewal: Renewal,
        record: JobRecord = found,
        after: Annotated[int, Query(description="Only events with a larger id.", ge=0, le=MAX_ID)] = 0,
        limit: Annotated[
            int, Query(description="Maximum number of events in a list.", ge=1, le=MAX_EVENTS)
        ] = MAX_EVENTS,
        last_event_id: Annotated[
            int | None,
            Header(
                alias="Last-Event-ID",
                description="The same as `after`, over which it takes precedence.",
                ge=0,
                le=MAX_ID,
            ),
        ] = None,
    ) -> Response:
        async def may_go_on() -> bool:
            """Whether the token is still valid and its user may still read the job."""
            sender = await renewal()
            job = services.hub.job(record.id) or record
            return sender is not None and check_right(sender, job, Right.READ, noun=kind.noun)

        return await _watch(
            request, services, record.id, after=after, limit=limit, last_event_id=last_event_id, may_go_on=may_go_on
        )

    router.add_api_route(
        path,
        watch,
        tags=["events"],
        operation_id=f"watch_{kind.name}",
        description=f"The {kind.noun}'s past events and, in a stream, new ones until the {kind.noun} has ended.",
        response_model=None,
        responses={
            200: {
                "model": EventsDocument,
                "description": (
                    "A stream of server-sent events: `id` and `event` are the id and kind of an EventDocument, `data` "
                    f"is that document. In between there are `progress` frames (a {progress}), and one `end` frame "
                    f"when the {kind.noun} has ended, both without an id. With `Accept: application/json`, a list of "
                    "the events so far."
                ),
                "content": {EVENT_STREAM: {"itemSchema": _frame(progress)}},
            },
            **refusals(404, 422),
        },
    )
