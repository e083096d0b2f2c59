"""Routes that jobs of every kind have: create, list, show, edit, steer, delete, document, events, log."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from typing import Annotated, Any, Literal, TypeAlias

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from search_spaces.errors import Problem
from service.api.dependencies import REASON, Context, Reader, Services, Submitter, given
from service.api.permissions import Right, Sender
from service.api.presenters import job_document
from service.api.problems import InvalidRequest, Json, Refusal, Unavailable, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, YAML_TYPES, body_of, read_body, read_object, sent_as_json
from service.api.routes.events import add_events_route
from service.disk import DRAINED
from service.errors import Conflict, StaleAttempt
from service.jobs.base import JobKind
from service.jobs.edit import LABELS, JobEdit, differences
from service.jobs.registry import KINDS, kind_of
from service.retention.cleaning import clean_up
from service.schemas.api import DeletedDocument, SharingName, list_document
from service.store.accounts import NAME_PATTERN
from service.types import RESUMED_BY_REQUEST, EventKind, JobRecord, JobState, Role, Sharing, Steering

__all__ = ["routers"]

IdempotencyKey = Annotated[
    str | None,
    Header(
        alias="Idempotency-Key",
        description="A later request with the same key and body returns the job that the first one created.",
        pattern="^[!-~]{1,255}$",
    ),
]


class SharedJob(BaseModel):
    """Body of the request that shares a job.

    Without `team`, the job stays in its team. With `team` null, it leaves its team.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    sharing: SharingName
    team: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None


TEAM = Query(description="The team of the job; needed by a sender who may submit for several teams.", max_length=64)
SHARING = Query(description="Who may read the job besides its owner and administrators; by default its team.")
IF_MATCH = Header(alias="If-Match", description="The `ETag` of the job as it was read, or *.", max_length=100)
ETAG = {"ETag": {"description": "Version of what users may edit.", "schema": {"type": "string"}}}
StateFilter = Literal["CREATED", "RUNNING", "STOPPED", "PAUSED", "COMPLETE", "FAILED", "CANCELLED"]


def routers() -> Sequence[APIRouter]:
    """FastAPI routers of the jobs, one for each kind of job."""
    return [_router(kind) for kind in KINDS.values()]


def _router(kind: JobKind) -> APIRouter:
    router = APIRouter(prefix=f"/{kind.collection}", tags=[kind.collection])
    one = f"/{{{kind.resource}_id:segment}}"
    _add_collection(router, kind)
    _add_one(router, kind, one)
    add_events_route(router, kind, f"{one}/events")
    _add_verbs(router, kind, one)
    return router


# -- the routes --------------------------------------------------------------------------------------------------------


def _add_collection(router: APIRouter, kind: JobKind) -> None:
    noun, (model, _) = kind.noun, kind.documents()

    async def create(
        request: Request,
        services: Context,
        sender: Submitter,
        idempotency_key: IdempotencyKey = None,
        team: Annotated[str | None, TEAM] = None,
        sharing: Annotated[Sharing | None, SHARING] = None,
    ) -> Response:
        place = _place(sender, team, sharing)
        record, is_new = await _created(request, services, sender, kind=kind, key=idempotency_key, place=place)
        document = await run_in_threadpool(_document, services, record, kind)
        if not is_new:
            return Json(document)
        return Json(document, status_code=201, headers={"Location": kind.path_of(record.id)})

    # Defaults instead of annotations: FastAPI cannot evaluate annotations that name local variables.
    in_state = Query(None, description=f"Only {kind.plural} in this state.")
    of_name = Query(None, description=f"Only {kind.plural} with this name.")

    def list_all(
        services: Context, sender: Reader, state: StateFilter | None = in_state, name: str | None = of_name
    ) -> Response:
        wanted = None if state is None else JobState(state)
        jobs = services.store.jobs(kind.name, state=wanted, name=name, reader=sender.account)
        return Json({kind.collection: _documents(services, jobs, kind)})

    location = {"Location": {"description": f"The address of the {noun}.", "schema": {"type": "string"}}}
    router.add_api_route(
        "",
        create,
        methods=["POST"],
        name=f"create_{kind.resource}",
        description=f"Create a {noun} if it passes every check that needs no engine; it starts as soon as possible.",
        status_code=201,
        response_model=None,
        responses={
            200: {"model": model, "description": f"The {noun} that an earlier request with the same key created."},
            201: {"model": model, "description": f"The {noun} was created.", "headers": location},
            **refusals(409, 413, 415, 422, 503),
        },
        openapi_extra=_body(kind),
    )
    router.add_api_route(
        "",
        list_all,
        name=f"list_{kind.collection}",
        description=f"Every {noun} that the sender may read, oldest first.",
        response_model=None,
        responses={200: {"model": list_document(kind.collection, model)}, **refusals(422)},
    )


def _body(kind: JobKind) -> dict[str, Any]:
    """OpenAPI description of the request body that creates a job of this `kind`.

    Only the JSON body is described by a schema. A YAML body has the same keys.
    """
    example = {} if kind.example is None else {"example": kind.example}
    json_schema = {"$ref": f"#/components/schemas/{kind.schema_name}"}
    schemas = dict.fromkeys(JSON_TYPES, json_schema) | {media: {"type": "object"} for media in YAML_TYPES}
    return {
        "requestBody": {
            "required": True,
            "description": f"A {kind.document_noun}. Its paths must be absolute: the server reads them.",
            "content": {media: {"schema": schema, **example} for media, schema in schemas.items()},
        }
    }


def _add_one(router: APIRouter, kind: JobKind, one: str) -> None:
    noun, (model, _), found = kind.noun, kind.documents(), given(kind)
    changed = given(kind, Right.CHANGE)

    def get(services: Context, record: JobRecord = found) -> Response:
        return _shown(services, record, kind)

    async def edit(
        request: Request,
        services: Context,
        sender: Sender,
        record: JobRecord = changed,
        if_match: Annotated[str | None, IF_MATCH] = None,
    ) -> Response:
        body = await read_object(request, kind.edit())
        edited = await run_in_threadpool(_edit, services, sender, kind, record, body, if_match)
        services.cluster.wake()
        return await run_in_threadpool(_shown, services, edited, kind)

    def get_submitted(record: JobRecord = found) -> Response:
        return Json(record.document)

    def get_log(services: Context, record: JobRecord = found) -> Response:
        return PlainTextResponse(services.cluster.log(record).encode("utf-8", "replace"))

    async def delete(services: Context, sender: Sender, record: JobRecord = changed) -> Response:
        await services.exports.delete_job(record.id, noun=noun)
        await run_in_threadpool(clean_up, services.store, services.artifacts, services.data_dir, record.id)
        await run_in_threadpool(_record, services, sender, "job.delete", record, None)
        return Json(DeletedDocument(deleted=record.id))

    router.add_api_route(
        one,
        get,
        name=f"get_{kind.resource}",
        description=f"A {noun}: its state, its progress, and links to its results.",
        response_model=None,
        responses={200: {"model": model, "headers": ETAG}, **refusals(404)},
    )
    router.add_api_route(
        one,
        edit,
        methods=["PATCH"],
        operation_id=f"edit_{kind.name}",
        description=(
            f"Edit a {noun}. `If-Match` has the `ETag` of the {noun} as it was read, so that no other edit is lost. "
            "Options of the document take effect when the driver has stored the samples that are being scored: "
            "another driver then continues with them."
        ),
        response_model=None,
        responses={200: {"model": model, "headers": ETAG}, **refusals(404, 409, 412, 413, 415, 422, 428)},
        openapi_extra=body_of(kind.edit()),
    )
    schema = {"$ref": f"#/components/schemas/{kind.schema_name}"}
    router.add_api_route(
        f"{one}/{kind.document_link}",
        get_submitted,
        name=f"get_{kind.document_noun.replace(' ', '_')}",
        description=(
            f"The {kind.document_noun} with every default filled in; submitting it again creates an equal {noun}."
        ),
        response_model=None,
        responses={
            200: {"description": f"The {kind.document_noun}.", "content": {"application/json": {"schema": schema}}},
            **refusals(404),
        },
    )
    router.add_api_route(
        f"{one}/log",
        get_log,
        operation_id=f"get_{kind.name}_log",
        description=f"The output of the {noun}'s drivers.",
        response_model=None,
        responses={200: {"description": "The log.", "content": {"text/plain": {}}}, **refusals(404, 503)},
    )

    async def share(request: Request, services: Context, sender: Sender, record: JobRecord = changed) -> Response:
        body = await read_object(request, SharedJob)
        team = body.team if "team" in body.model_fields_set else record.team
        _check_team(sender, record, team)
        shared = await run_in_threadpool(
            services.accounts.share, record.id, actor=sender.actor, sharing=Sharing(body.sharing), team=team
        )
        return Json(await run_in_threadpool(_document, services, shared, kind))

    router.add_api_route(
        f"{one}/sharing",
        share,
        methods=["PUT"],
        operation_id=f"share_{kind.name}",
        description=(
            f"Change who may read the {noun} besides its owner and administrators and, with `team`, the team that it "
            "belongs to."
        ),
        response_model=None,
        responses={200: {"model": model}, **refusals(404, 413, 415, 422)},
        openapi_extra=body_of(SharedJob),
    )
    router.add_api_route(
        one,
        delete,
        methods=["DELETE"],
        operation_id=f"delete_{kind.name}",
        description=f"Delete an ended {noun} with its results and files; an unfinished one must be cancelled first.",
        response_model=None,
        responses={200: {"model": DeletedDocument}, **refusals(404, 409)},
    )


def _add_verbs(router: APIRouter, kind: JobKind, one: str) -> None:
    (model, _), found = kind.documents(), given(kind, Right.CHANGE)

    def changing(verb: str, action: Verb) -> Callable[..., Response]:
        def change(
            services: Context,
            sender: Sender,
            record: JobRecord = found,
            reason: Annotated[str | None, REASON] = None,
        ) -> Response:
            user = None if sender.account is None else sender.account.user
            changed = action(services, record.id, Steering(verb, user, reason))
            _record(services, sender, f"job.{verb}", record, changed)
            services.cluster.wake()
            return Json(_document(services, changed, kind), status_code=202)

        return change

    for verb, action in VERBS.items():
        if verb == "stop" and not kind.has_search:
            continue
        router.add_api_route(
            f"{one}:{verb}",
            changing(verb, action),
            methods=["POST"],
            operation_id=f"{verb}_{kind.name}",
            description=cleandoc(action.__doc__ or ""),
            status_code=202,
            response_model=None,
            responses={
                202: {"model": model, "description": "Done, now or by an earlier request."},
                **refusals(404, 409, 422),
            },
        )


# -- the work of the routes --------------------------------------------------------------------------------------------


def _documents(services: Services, jobs: Sequence[JobRecord], kind: JobKind) -> list[dict[str, Any]]:
    views = kind.view(jobs, services.store, services.artifacts) if jobs else ()
    return [job_document(job, kind, view, cluster=services.cluster) for job, view in zip(jobs, views, strict=True)]


def _document(services: Services, job: JobRecord, kind: JobKind) -> dict[str, Any]:
    (document,) = _documents(services, [job], kind)
    return document


def _shown(services: Services, job: JobRecord, kind: JobKind) -> Response:
    headers = {"ETag": _tag(job), "Cache-Control": "no-store"}  # the tag is that of edits, not of the progress
    return Json(_document(services, job, kind), headers=headers)


def _tag(job: JobRecord) -> str:
    return f'"{job.version}"'


def _edit(
    services: Services, sender: Principal, kind: JobKind, job: JobRecord, body: JobEdit, if_match: str | None
) -> JobRecord:
    """Edit a job as the request's `body` says, and return the job. An edit that changes nothing is not stored.

    `if_match` is the request's header If-Match, which names the version of the job that the sender has read. Raises
    Refusal with one of these statuses:

    - 428: the header is missing
    - 412: the job was edited after the sender had read it
    - 403: the priority is above 0 and the sender is no administrator
    """
    if if_match is None:
        raise Refusal(
            428, f"the header If-Match is missing; send the ETag of the {kind.noun} as you read it: {_tag(job)}"
        )
    known = {part.strip() for part in if_match.split(",")}
    if not known & {_tag(job), "*"}:
        raise Refusal(
            412, f"the {kind.noun} was edited meanwhile: it has the ETag {_tag(job)}; read it and edit it again"
        )
    account = sender.account
    if "priority" in body.model_fields_set and body.priority > 0 and account is not None and not account.is_admin:
        raise Refusal(403, f"priority: {body.priority} is above 0, which only an administrator of the server may give")
    given = {name: getattr(body, name) for name in LABELS if name in body.model_fields_set}
    before = {"description": job.description, "tags": list(job.tags), "notes": job.notes, "priority": job.priority}
    labels = {name: value for name, value in given.items() if value != {**before, "name": job.name}[name]}
    edited = dict(kind.edited(job, body, services.store))
    options = list(differences(job.document, edited))
    if "name" in labels:
        edited["name"] = labels["name"]
    changed = [*differences({**before, "name": job.name}, {**before, "name": job.name, **labels}), *options]
    if not changed:
        return job
    changes = {name: [old, new] for name, old, new in changed}
    steering = Steering("edit", None if account is None else account.user, changes=changes)
    document = edited if options or "name" in labels else None
    stored = services.store.edit_job(job, labels, document=document, restarts=bool(options), steering=steering)
    if stored is None:
        raise Refusal(412, f"the {kind.noun} was edited at this moment; read it and edit it again")
    was, is_now = ({name: values[place] for name, values in changes.items()} for place in (0, 1))
    services.accounts.record(sender.actor, "job.edit", f"job {job.id}", before=was, after=is_now)
    return stored


async def _created(
    request: Request, services: Services, sender: Principal, *, kind: JobKind, key: str | None, place: _Place
) -> tuple[JobRecord, bool]:
    """Store the job of this `kind` that the request's body describes, if it passes every check.

    `key` is the request's idempotency key, and `place` the team and the sharing of the job. Returns the job, and
    whether the job is new. The job is not new if an earlier request with the same key created it.

    Raises:
        Refusal, InvalidStudy: The body is not accepted.
        Unavailable: The body cannot be checked at the moment.
        Conflict: The key was sent before with another body.
    """
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    digest = hashlib.sha256(content).hexdigest()
    key = _own_key(sender, key)
    async with services.key_locks.setdefault(key, asyncio.Lock()) if key is not None else nullcontext():
        found = record = await run_in_threadpool(services.store.job_of_key, key) if key is not None else None
        if record is None and await run_in_threadpool(services.store.is_drained):
            raise Unavailable(f"{DRAINED}; send the {kind.noun} again then")
        if record is None:
            accepted = await services.preflight.accept(
                content, is_json=is_json, kind=kind, client=sender.name, reader=sender.account
            )
            create = partial(
                services.store.create_job,
                kind=kind.name,
                name=accepted.name,
                document=accepted.document,
                accepted=accepted.stored_facts(),
                idempotency_key=key,
                request_digest=digest,
                owner=None if sender.account is None else sender.account.user,
                team=place.team,
                sharing=place.sharing,
                keeps=services.artifacts.kept_names(kind.models(accepted)),
            )
            record = await run_in_threadpool(services.quota.admit, accepted.artifact_bytes, create)
    if record.request_digest != digest or record.kind != kind.name:
        raise Conflict(
            f"Idempotency-Key {key!r} was sent before with another body, which created "
            f"{kind_of(record.kind).noun} {record.id}; use another key for another {kind.noun}"
        )
    if found is None:
        await run_in_threadpool(_record, services, sender, "job.create", None, record)
        services.cluster.wake()
    return record, found is None


@dataclass(frozen=True)
class _Place:
    """The team of a new job, and who may read it."""

    team: str | None
    sharing: Sharing


def _place(sender: Principal, team: str | None, sharing: Sharing | None) -> _Place:
    """Find the team of a new job: the given `team`, or the only team for which the sender may submit jobs.

    Raises InvalidRequest if the sender may submit jobs for several teams and names none, or may not submit jobs for
    `team`. `sharing` None means that the team may read the job.
    """
    account = sender.account
    if account is None:
        if team is not None:
            raise InvalidRequest((Problem("team", f"{team!r:.80} is not accepted; the server has no accounts"),))
        return _Place(None, sharing or Sharing.TEAM)
    teams = sorted(name for name, role in account.roles.items() if role is not Role.VIEWER)
    if team is None and len(teams) > 1:
        raise InvalidRequest((Problem("team", f"is missing; name one of your teams: {', '.join(teams)}"),))
    if team is not None and team not in teams:
        known = f"you are a member of {', '.join(teams)}" if teams else "you are a member of no team"
        raise InvalidRequest((Problem("team", f"{team!r:.80} is not accepted; {known}"),))
    chosen = team or (teams[0] if teams else None)
    return _Place(chosen, sharing or Sharing.TEAM)


def _check_team(sender: Principal, job: JobRecord, team: str | None) -> None:
    """Raise InvalidRequest if the sender may not move a job to `team`: only members may, and administrators."""
    account = sender.account
    if account is None or account.is_admin or team in (None, job.team):
        return
    if account.roles.get(team or "") not in (Role.MEMBER, Role.ADMIN):
        message = f"{team!r:.80} is not accepted; only a member of a team can move a job to it"
        raise InvalidRequest((Problem("team", message),))


def _own_key(sender: Principal, key: str | None) -> str | None:
    """Idempotency key in the form in which it is stored, so that equal keys of two users do not collide.

    At a server with accounts, the stored key is the user's name, a space and a hash of `key`. A client cannot send a
    key with a space, so no key that a client sends equals a stored one.
    """
    if key is None or sender.account is None:
        return key
    return f"user {sender.account.user} {hashlib.sha256(key.encode()).hexdigest()}"


def _record(
    services: Services, sender: Principal, action: str, before: JobRecord | None, after: JobRecord | None
) -> None:
    """Add a change of a job to the audit log.

    `action` is the kind of change. `before` and `after` are the job before and after the change; `before` is None for a
    new job, `after` for a deleted one.
    """
    job = before or after
    assert job is not None
    documents = (
        None if each is None else {"kind": each.kind, "name": each.name, "state": each.state.value}
        for each in (before, after)
    )
    was, is_now = documents
    services.accounts.record(sender.actor, action, f"job {job.id}", before=was, after=is_now)


def _cancel(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Cancel a job permanently, and end its driver now. The results so far are kept.

    A job that is already CANCELLED is not changed. Raises Conflict (409) if the job is COMPLETE or FAILED.
    """
    while True:
        record = services.store.job(job_id)
        if record.state is JobState.CANCELLED:
            return record
        _check_unfinished(record, "cancelled")
        try:
            # From here on the job's driver cannot write to the store; what it stored before is kept.
            writer = services.store.open_attempt(job_id, because="it was cancelled")
            if not services.store.job(job_id).state.is_finished:
                writer.add_event(EventKind.STEERED, steering.payload)
                writer.set_state(JobState.CANCELLED, steering.describe("cancelled"))
        except StaleAttempt:  # another driver, or another request, was faster
            continue


def _pause(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Pause a job until it is resumed. Its driver ends as soon as the samples that are being scored are stored.

    The job is PAUSED when its driver has ended. A fine-tuning continues from its last checkpoint. A job that is asked
    to pause already is not changed. Raises Conflict (409) if the job has ended.
    """
    record = services.store.pause(job_id, steering=steering)
    _check_unfinished(record, "paused")
    return record


def _stop(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Stop the search of a study early. Running evaluations finish; held-out data and benchmarks are scored as always.

    Trials that are not being evaluated are pruned. A search that was stopped already is not changed. Raises Conflict
    (409) if the study has ended.
    """
    record = services.store.stop_search(job_id, steering=steering)
    _check_unfinished(record, "stopped")
    return record


def _resume(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Let a failed or paused job continue, or let a waiting job try again now.

    The job continues from its stored results or its last checkpoint. Stored samples are not scored again, unless the
    engine that scored them failed a check afterwards. A COMPLETE study with such samples can be resumed too. A job that
    is running or about to start is not changed. Raises Conflict (409) if the job is CANCELLED, or COMPLETE without such
    samples.
    """
    record = services.store.resume(job_id, reason=RESUMED_BY_REQUEST, steering=steering)
    if record.state in (JobState.COMPLETE, JobState.CANCELLED):
        kind = kind_of(record.kind)
        raise Conflict(
            f"{kind.noun} {job_id} is {record.state.value}; only a {kind.noun} {kind.resumable} can be resumed; to run "
            "it again, submit it again"
        )
    return record


def _check_unfinished(record: JobRecord, done: str) -> None:
    """Raise Conflict if a job has ended; `done` is the word for what was asked, such as "paused"."""
    if record.state.is_finished:
        noun = kind_of(record.kind).noun
        raise Conflict(
            f"{noun} {record.id} is already {record.state.value}; only a {noun} that has not ended can be {done}"
        )


Verb: TypeAlias = Callable[[Services, str, Steering], JobRecord]
VERBS: Mapping[str, Verb] = {"pause": _pause, "resume": _resume, "stop": _stop, "cancel": _cancel}
