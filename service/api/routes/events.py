"""Routes of the events of one job and of all jobs, as streams of server-sent events or as JSON lists."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import StringConstraints
from starlette.responses import Response, StreamingResponse

from service.api.dependencies import MAX_ID, MAX_NUMBER, Context, Services, given
from service.api.job_feed import STATE_KINDS
from service.api.permissions import Renewal, Right, Sender, check_right, needs_throughout
from service.api.presenters import event_document, job_event_document
from service.api.problems import Json, TooManyRequests, Unauthorized, refusals
from service.api.protocols import Principal
from service.jobs.base import JobKind
from service.schemas.api import (
    EventsDocument,
    JobEventDocument,
    JobEventsDocument,
    JobProgressDocument,
    JobReferenceDocument,
    StreamStartDocument,
)
from service.store import Store
from service.types import JobRecord, Scope

__all__ = ["STREAMED", "add_events_route", "router"]

router = APIRouter(tags=["events"])

# Open streams of events that a user may have at a server, and seconds after which a refused one is asked for again.
MAX_STREAMS, RETRY_AFTER_S = 1000, 5.0

Watcher = Annotated[Callable[[], Awaitable[Principal | None]], needs_throughout(Scope.READ)]

MAX_EVENTS = 10_000
# Documents in the stream of all jobs.
STREAMED = (JobEventDocument, JobProgressDocument, JobReferenceDocument, StreamStartDocument)
EVENT_STREAM = "text/event-stream"
KINDS = Query(alias="kind", description="In a list, only events of these kinds.", max_length=50)
ORDER = Query(description="Order of a list: that of time, or the newest first.")
OFFSET = Query(description="Number of events to leave out at the beginning of a list.", ge=0, le=MAX_NUMBER)


@dataclass(frozen=True)
class _Page:
    """Selection of a job's events for a list: kinds (None for all), order, and the number of events to skip."""

    kinds: Sequence[str] | None
    newest_first: bool
    offset: int


def _frame(*documents: str) -> dict[str, Any]:
    """JSON Schema of one server-sent event of a stream, in the form of OpenAPI 3.2.

    `documents` are the names of the schemas of the JSON documents that the events have as data.
    """
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
    page: _Page,
    sender: Principal,
    may_go_on: Callable[[], Awaitable[bool]],
) -> Response:
    """Respond with a job's events as a JSON list or, by default, as a stream that ends when the job ends.

    The response is a list if the request's header Accept asks for JSON. Only events with ids above `after` are sent; if
    `last_event_id` is not None, it is used instead of `after`. A list has at most `limit` events. `may_go_on` is called
    repeatedly to check whether the sender of the request may still read the job; the stream also ends when it returns
    False. `page` has further choices for a list: the kinds of events, their order, and the number of events to skip.
    `sender` sent the request.
    """
    cursor = after if last_event_id is None else last_event_id
    if _wants_list(request):
        return Json(await run_in_threadpool(_listed, services.store, job_id, after=cursor, limit=limit, page=page))
    return _stream(services, sender, _while_allowed(services.hub.watch(job_id, after=cursor), may_go_on))


def _wants_list(request: Request) -> bool:
    accepted = request.headers.get("accept", "")
    return "application/json" in accepted and EVENT_STREAM not in accepted


def _stream(services: Services, sender: Principal, frames: AsyncGenerator[bytes, None]) -> Response:
    """Respond with the encoded events `frames` as a stream.

    Raises TooManyRequests if the user who sent the request has too many open streams. Senders without an account are
    not counted, since all users may have one address.
    """
    user = None if sender.account is None else sender.account.user
    if user is not None:
        if services.hub.num_streams(user) >= MAX_STREAMS:
            message = f"{user}: has {MAX_STREAMS} open streams of events; close some, or follow all jobs in one stream"
            raise TooManyRequests(f"{message} (GET /v1/events)", RETRY_AFTER_S)
        frames = services.hub.counted(frames, user)
    # Proxies must pass frames on without buffering.
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(frames, media_type=EVENT_STREAM, headers=headers)


def _listed(store: Store, job_id: str, *, after: int, limit: int, page: _Page) -> EventsDocument:
    total = store.num_events(job_id, after=after, kinds=page.kinds)
    events = store.events(
        job_id, after=after, limit=limit, kinds=page.kinds, newest_first=page.newest_first, offset=page.offset
    )
    return EventsDocument(events=[event_document(event) for event in events], total=total)


async def _while_allowed(
    frames: AsyncGenerator[bytes, None], may_go_on: Callable[[], Awaitable[bool]]
) -> AsyncGenerator[bytes, None]:
    """Yield the encoded events `frames` of a stream; before each event, call `may_go_on`, and stop if it returns False.

    `may_go_on` checks whether the sender of the request may still read the job.
    """
    async with aclosing(frames):
        async for frame in frames:
            if not await may_go_on():
                return
            yield frame


def add_events_route(router: APIRouter, kind: JobKind, path: str) -> None:
    """Add to `router` the route at `path` that sends the events of a job of this `kind`, as a stream or a list."""
    found, progress = given(kind), kind.documents()[1].__name__

    async def watch(
        request: Request,
        services: Context,
        sender: Sender,
        renewal: Renewal,
        record: JobRecord = found,
        after: Annotated[int, Query(description="Only events with a larger id.", ge=0, le=MAX_ID)] = 0,
        limit: Annotated[
            int, Query(description="Maximum number of events in a list.", ge=1, le=MAX_EVENTS)
        ] = MAX_EVENTS,
        kinds: Annotated[list[Annotated[str, StringConstraints(pattern=r"^[a-z_]{1,50}$")]] | None, KINDS] = None,
        order: Annotated[Literal["oldest", "newest"], ORDER] = "oldest",
        offset: Annotated[int, OFFSET] = 0,
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
            """Whether the token or session is still valid and its user may still read the job."""
            present = await renewal()
            job = services.hub.job(record.id) or record
            return present is not None and check_right(present, job, Right.READ, noun=kind.noun)

        return await _watch(
            request,
            services,
            record.id,
            after=after,
            limit=limit,
            last_event_id=last_event_id,
            page=_Page(kinds, order == "newest", offset),
            sender=sender,
            may_go_on=may_go_on,
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
                    "the events so far, with their number (`total`)."
                ),
                "content": {EVENT_STREAM: {"itemSchema": _frame("EventDocument", progress, "EndDocument")}},
            },
            **refusals(404, 422),
        },
    )


@router.get(
    "/events",
    response_model=None,
    responses={
        200: {
            "model": JobEventsDocument,
            "description": (
                "A stream of server-sent events. The first frame is `start`, with the id after which events follow. "
                "Then `event` is the kind of a JobEventDocument, `data` is that document, and `id` is the id from "
                "which a client can resume. Frames without an id are `progress` (a JobProgressDocument), and `added` "
                "and `removed` (a JobReferenceDocument). With `Accept: application/json`, a list of events."
            ),
            "content": {EVENT_STREAM: {"itemSchema": _frame(*(document.__name__ for document in STREAMED))}},
        },
        **refusals(422),
    },
)
async def watch_jobs(
    request: Request,
    services: Context,
    requester: Sender,
    renewal: Watcher,
    after: Annotated[
        int | None,
        Query(description="Only events with a larger id; by default new ones, or all in a list.", ge=0, le=MAX_ID),
    ] = None,
    limit: Annotated[int, Query(description="Maximum number of events in a list.", ge=1, le=MAX_EVENTS)] = MAX_EVENTS,
    last_event_id: Annotated[
        int | None,
        Header(
            alias="Last-Event-ID", description="The same as `after`, over which it takes precedence.", ge=0, le=MAX_ID
        ),
    ] = None,
) -> Response:
    """Stream the state changes and progress of all jobs that the sender of the request may read, without end.

    If a job is deleted, or the sender may no longer read it, the stream sends an event `removed` for the job, and no
    further events of the job. A client that reconnects may get events of the last seconds again.
    """
    cursor = after if last_event_id is None else last_event_id
    if not _wants_list(request):
        return _stream(services, requester, services.hub.watch_all(after=cursor, renewal=renewal))
    sender = await renewal()
    if sender is None:
        raise Unauthorized("the token or session is no longer valid")

    def read() -> JobEventsDocument:
        found = services.store.job_events(after=cursor or 0, kinds=STATE_KINDS, reader=sender.account, limit=limit)
        return {"events": [job_event_document(record) for record in found]}

    return Json(await run_in_threadpool(read))
