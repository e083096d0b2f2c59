"""Routes that only served studies have: serve a trial, and complete prompts in the form of OpenAI's API.

The driver of a served study completes the prompts. These routes check the rights of each request's sender, and pass
requests on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import httpx
from fastapi import APIRouter, Request
from fastapi import Path as PathParameter
from fastapi.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from service.api.dependencies import ID_PATTERN, Context, Services, TrialNumber, UsedStudy, found_job
from service.api.job_documents import shown_job
from service.api.permissions import Right, Rule, Sender, declares, sender_with
from service.api.problems import Json, Refusal, Unavailable, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, body_of, read_body, read_object, sent_as_json
from service.api.serving import check_serving, usable_served
from service.disk import DRAINED
from service.errors import Conflict
from service.jobs.search.kind import SEARCH
from service.jobs.serving.disconnection import while_connected
from service.jobs.serving.kind import OPENAI, SERVING
from service.jobs.serving.openai import DIGEST_HEADER, ChatBody, TextBody
from service.jobs.serving.request import ServingOptions, ServingRequest, accepted_for
from service.schemas.api import ChatCompletionDocument, ModelListDocument, ServedTrialDocument, TextCompletionDocument
from service.store.documents import ENDPOINT
from service.threads import Work, in_thread
from service.types import JobRecord, Scope
from workers.telemetry import tracing

__all__ = ["router"]

router = APIRouter(tags=["served"])

# Seconds for a connection to a driver, and for the next bytes of its answer.
CONNECT_S, ANSWER_S = 5.0, 900.0

# Code of OpenAI's errors for requests that no driver answers.
NO_ENGINE = "no_engine"

PLACE = f"/served/{{served_id:segment}}/{OPENAI}"
EVENTS: dict[str, Any] = {"text/event-stream": {}}  # with `stream`: an event for each part


def _served(
    services: Context,
    sender: Annotated[Principal, sender_with(Scope.SUBMIT)],
    served_id: Annotated[str, PathParameter(description="The `id` of the served study.", pattern=ID_PATTERN)],
) -> JobRecord:
    """Find the served study with the id `served_id`, and check that the sender of the request may use it.

    The sender must also have the right to use the study whose trials are served.
    """
    job = found_job(services, sender, served_id, SERVING, Right.USE)
    try:
        found_job(services, sender, job.document["study"], SEARCH, Right.USE)
    except Refusal as error:
        raise Refusal(error.status, f"served study {served_id!r}: {error.detail}") from error
    return job


Served = Annotated[JobRecord, declares(Rule(Scope.SUBMIT, Right.USE), _served)]


@router.post(
    "/studies/{study_id:segment}/trials/{number:segment}:serve",
    status_code=202,
    response_model=None,
    responses={
        200: {"model": ServedTrialDocument, "description": "The study is served already."},
        202: {"model": ServedTrialDocument, "description": "The study will be served."},
        **refusals(404, 409, 413, 415, 422, 503),
    },
    openapi_extra=body_of(ServingOptions, required=False),
)
async def serve_trial(
    request: Request, study: UsedStudy, number: TrialNumber, services: Context, sender: Sender
) -> Response:
    """Serve the merge of a trial, so that prompts can be completed with it at the link `openai` of the answer.

    All trials of the study are served together. Requests choose this trial by the name that the answer gives as
    `model`. A trial may be served as soon as it exists. Serving ends when no request has come for `idle_minutes`, or
    when the served study is cancelled.

    If the study is served already, by a served study that the sender of the request may use, this one is returned and
    no other is created. A paused one is returned only if the sender may resume it. A served study has the team and
    sharing of its study.
    """
    has_body = request.headers.get("content-type") is not None or request.headers.get("content-length", "0") != "0"
    options = await read_object(request, ServingOptions) if has_body else ServingOptions()
    await run_in_threadpool(services.store.trial, study.id, number)  # raises NotFound
    if await run_in_threadpool(services.store.is_drained):
        raise Unavailable(f"{DRAINED}; serve the trial then")
    job, is_new = await in_thread(Work.WRITE, _serving_of, services, sender, study, options, tracing.current())
    if is_new:
        services.cluster.wake()
    document = shown_job(services, sender, job)
    return Json({**document, "model": str(number)}, status_code=202 if is_new else 200)


@router.get(
    f"{PLACE}/models",
    response_model=None,
    responses={200: {"model": ModelListDocument}, **refusals(400, 404, 410, 503)},
)
async def list_models(request: Request, served: Served, services: Context) -> Response:
    """List the trials of a served study by their names in requests, as OpenAI's API lists models."""
    return await _forwarded(request, services, served, "models")


@router.post(
    f"{PLACE}/completions",
    response_model=None,
    responses={200: {"model": TextCompletionDocument, "content": EVENTS}, **refusals(400, 404, 410, 413, 415, 503)},
    openapi_extra=body_of(TextBody),
)
async def complete_text(request: Request, served: Served, services: Context) -> Response:
    """Complete a text with the merge that `model` names, as OpenAI's API does."""
    return await _forwarded(request, services, served, "completions")


@router.post(
    f"{PLACE}/chat/completions",
    response_model=None,
    responses={200: {"model": ChatCompletionDocument, "content": EVENTS}, **refusals(400, 404, 410, 413, 415, 503)},
    openapi_extra=body_of(ChatBody),
)
async def complete_chat(request: Request, served: Served, services: Context) -> Response:
    """Answer the messages of a chat with the merge that `model` names, as OpenAI's API does.

    The model's chat template renders the messages. If the model has no chat template, the request is refused (400);
    complete a text instead.
    """
    return await _forwarded(request, services, served, "chat/completions")


def _serving_of(
    services: Services, sender: Principal, study: JobRecord, options: ServingOptions, traceparent: str | None
) -> tuple[JobRecord, bool]:
    """Find an unfinished job that serves a study and that the sender of the request may use, or create one.

    Returns the job, and whether it is new.

    `traceparent` is the place of the request in its trace; None if the request is not traced.

    Raises Conflict if the job lacks an option that the sender wants, or if the team serves too many studies. Raises
    Refusal (403) if the team has used up its quota of GPU-hours.
    """
    with services.store.admission():
        study = services.store.job(study.id)  # its sharing may have changed before
        if (found := usable_served(services, sender, study)) is not None:
            if options.shares_engines and not found.document["shares_engines"]:
                raise Conflict(f"{found.name} is served without shares_engines; cancel it, and serve the trial again")
            return found, False
        owner = None if sender.account is None else sender.account.user
        accepted = accepted_for(study, ServingRequest(study=study.id, **options.model_dump()), sender.account)
        check_serving(services, sender, study)
        job = services.store.create_job(
            kind=SERVING.name,
            name=accepted.name,
            document=accepted.document,
            accepted=accepted.stored_facts(),
            owner=owner,
            team=study.team,
            sharing=study.sharing,
            traceparent=traceparent,
        )
        after = {"kind": job.kind, "name": job.name, "study": study.id, "shares_engines": options.shares_engines}
        services.accounts.record(sender.actor, "job.create", f"job {job.id}", after=after)
        return job, True


async def _forwarded(request: Request, services: Services, served: JobRecord, path: str) -> Response:
    """Send a request to the driver of a served study, and pass its answer on while it arrives.

    The driver is the process that completes prompts, and `path` is the path of the request at its HTTP application. The
    request to the driver is cancelled when the client closes the connection. A driver stores its address, which is used
    only while this driver works on the job, because another program may listen there later. Raises Refusal if serving
    has ended, and Unavailable if no driver answers.
    """
    if request.method == "POST":
        sent_as_json(request.headers, accepted=JSON_TYPES)
    content = await read_body(request)
    if served.state.is_finished:
        raise Refusal(410, f"{served.name}: serving has ended ({served.reason}); serve a trial of the study again")
    endpoint = await run_in_threadpool(_endpoint, services, served)
    if endpoint is None:
        waits_for = _waiting_for(services, served)
        raise Unavailable(f"{served.name}: is not served now; it waits for {waits_for}", NO_ENGINE)
    client = httpx.AsyncClient(timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S), trust_env=False, verify=False)
    is_passed_on = False
    try:
        upstream = client.build_request(
            request.method,
            f"{endpoint['url']}/{path}",
            content=content,
            headers={"Authorization": f"Bearer {endpoint['secret']}", "Content-Type": "application/json"},
        )
        answer = await while_connected(request, client.send(upstream, stream=True))
        if answer.status_code == 401:
            await answer.aclose()
            raise Unavailable(f"{served.name}: another program has the address of its driver", NO_ENGINE)
        is_passed_on = True
    except httpx.HTTPError as error:
        message = f"{served.name}: its driver does not answer ({type(error).__name__})"
        raise Unavailable(f"{message}; it waits for {_waiting_for(services, served)}", NO_ENGINE) from error
    finally:
        if not is_passed_on:
            await client.aclose()
    passed = ("content-type", "retry-after", DIGEST_HEADER)
    headers = {name: answer.headers[name] for name in passed if name in answer.headers}
    headers["Cache-Control"] = "no-store"
    return StreamingResponse(_passed_on(client, answer), status_code=answer.status_code, headers=headers)


def _endpoint(services: Services, served: JobRecord) -> Mapping[str, Any] | None:
    """Read the address and the secret of the process (driver) that serves a study now; None if no driver does."""
    endpoint: Mapping[str, Any] | None = services.store.document(served.id, ENDPOINT)
    is_live = not served.is_paused and served.has_driver(now=services.store.now())
    return endpoint if is_live and endpoint is not None and endpoint.get("attempt") == served.attempt else None


def _waiting_for(services: Services, served: JobRecord) -> str:
    return services.cluster.waiting_for(served) or "its driver"


async def _passed_on(client: httpx.AsyncClient, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            yield chunk
    except httpx.HTTPError:
        return  # the driver has ended; the client sees an incomplete answer
    finally:
        await client.aclose()
