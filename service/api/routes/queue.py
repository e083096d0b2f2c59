"""Routes of the queue: the jobs that run and wait, and the move of a waiting job by an administrator."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from service.api.dependencies import ID_PATTERN, Context, Reader, Services
from service.api.permissions import needs
from service.api.presenters import queue_document
from service.api.problems import Json, Refusal, refusals
from service.api.protocols import Principal
from service.api.requests import body_of, read_object
from service.errors import NotFound
from service.schemas.api import QueueDocument
from service.threads import Work, in_thread
from service.types import JobRecord, Scope, Steering

__all__ = ["router"]

router = APIRouter(tags=["queue"])

Admin = Annotated[Principal, needs(Scope.SUBMIT, is_for_admins=True)]


class Move(BaseModel):
    """Body of the request that moves a job before another job, or to the front if there is no `before`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: Annotated[str, Field(pattern=ID_PATTERN)]
    before: Annotated[str, Field(pattern=ID_PATTERN)] | None = None
    reason: Annotated[str, Field(min_length=1, max_length=500, pattern=r"^[^\r\n]*$")] | None = None


@router.get("/queue", response_model=None, responses={200: {"model": QueueDocument}})
def get_queue(services: Context, sender: Reader) -> Response:
    """Show the running jobs, and the waiting jobs in the order in which they start.

    A job that the sender of the request may not read appears as an entry without details.
    """
    return Json(_document(services, sender))


@router.post(
    "/queue:move",
    response_model=None,
    responses={200: {"model": QueueDocument}, **refusals(404, 409, 413, 415, 422)},
    openapi_extra=body_of(Move),
)
async def move_job(request: Request, services: Context, sender: Admin) -> Response:
    """Move a waiting job to the front of the jobs of its priority, or before another waiting job.

    The move holds until the job starts. Only administrators of the server may do this. The request is refused (409) if
    one of the two jobs does not wait, or if their priorities differ.
    """
    body = await read_object(request, Move)
    await in_thread(Work.WRITE, _move, services, sender, body)
    services.cluster.wake()
    return Json(await run_in_threadpool(_document, services, sender))


def _move(services: Services, sender: Principal, body: Move) -> None:
    job = _waiting(services, body.job)
    if body.before is not None:
        other = _waiting(services, body.before)
        if other.id == job.id:
            raise Refusal(409, f"job {job.id}: cannot be moved before itself")
        if other.priority != job.priority:
            raise Refusal(
                409,
                f"job {job.id}: has the priority {job.priority}, and the other job {other.priority}; only jobs of "
                "equal priority are moved, so give it that priority first",
            )
    user = None if sender.account is None else sender.account.user
    steering = Steering("move", user, body.reason)
    services.accounts.move_job(job.id, body.before, actor=sender.actor, steering=steering)


def _waiting(services: Services, job_id: str) -> JobRecord:
    """Read the job `job_id`, after checking that it waits in the queue to be started.

    Raises Refusal: 404 if there is no such job, 409 if it runs, is paused or has ended.
    """
    try:
        job = services.store.job(job_id)
    except NotFound as error:
        raise Refusal(404, f"job {job_id!r}: there is no such job") from error
    if job.state.is_finished or job.is_paused or job.id in services.cluster.queue().running:
        raise Refusal(409, f"job {job_id}: does not wait for a place; only a job that waits is moved")
    return job


def _document(services: Services, sender: Principal) -> QueueDocument:
    jobs = services.store.unfinished_jobs()
    return queue_document(jobs, cluster=services.cluster, reader=sender.account)
