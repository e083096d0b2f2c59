"""Routes of jobs of every kind: to create, list, show, edit, steer (such as pause) and delete jobs; events and logs."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc
from typing import Annotated, Any, Literal, TypeAlias
from urllib.parse import urlencode

from fastapi import APIRouter, Header, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from search_spaces.errors import Problem
from service.api.dependencies import MAX_NUMBER, REASON, Context, Reader, Services, Submitter, given
from service.api.job_documents import shown_job, shown_jobs
from service.api.permissions import Right, Sender
from service.api.prefix import below_root
from service.api.problems import InvalidRequest, Json, Refusal, Unavailable, refusals
from service.api.protocols import Principal
from service.api.requests import JSON_TYPES, YAML_TYPES, body_of, read_body, read_object, sent_as_json
from service.api.routes.events import add_events_route
from service.api.serving import check_move, check_resume, check_serving, served_jobs, usable_served
from service.disk import DRAINED
from service.errors import Conflict, NotFound, StaleAttempt
from service.jobs.base import Accepted, JobKind
from service.jobs.edit import LABELS, JobEdit, differences
from service.jobs.registry import KINDS, kind_of
from service.retention.cleaning import clean_up
from service.schemas.api import DeletedDocument, SharingName, list_document
from service.store.accounts import NAME_PATTERN
from service.threads import Work, in_thread, in_threads_of
from service.types import RESUMED_BY_REQUEST, EventKind, JobRecord, JobState, Role, Sharing, Steering
from workers.telemetry import tracing

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
    """Body of the request that changes a job's team and its readers (`sharing`).

    Without the key `team`, the job stays in its team. With `team` null, the job belongs to no team; only an
    administrator of the server may take a job out of its team in this way.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    sharing: SharingName
    team: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None


TEAM = Query(description="The team of the job; needed by a sender who may submit for several teams.", max_length=64)
SHARING = Query(description="Who may read the job besides its owner and administrators; by default its team.")
IF_MATCH = Header(alias="If-Match", description="The `ETag` of the job as it was read, or *.", max_length=100)
ETAG = {"ETag": {"description": "Version of what users may edit.", "schema": {"type": "string"}}}
TEXT = Query(description="Text that the name, the description or the owner has, or the id begins with.", max_length=200)
SORT = Query(description="What to sort by, then by age; with `-`, the largest is first.")
OFFSET = Query(description="Number of jobs to leave out at the beginning.", ge=0, le=MAX_NUMBER)
MAX_PAGE = 1000
JobSort = Literal["created", "-created", "name", "-name", "state", "-state", "owner", "-owner", "priority", "-priority"]
StateFilter = Literal["CREATED", "RUNNING", "STOPPED", "PAUSED", "COMPLETE", "FAILED", "CANCELLED"]


def routers() -> Sequence[APIRouter]:
    """FastAPI routers with the routes that every job has: one router for each kind of job, such as studies."""
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
        place = _place(sender, team, sharing) if kind.study_of is None else _Asked(team, sharing)
        record, is_new = await _created(request, services, sender, kind=kind, key=idempotency_key, place=place)
        document = await run_in_threadpool(_document, services, sender, record)
        if not is_new:
            return Json(document)
        return Json(document, status_code=201, headers={"Location": kind.path_of(record.id)})

    # Defaults instead of annotations: FastAPI cannot evaluate annotations that name local variables.
    in_state = Query(None, description=f"Only {kind.plural} in this state.")
    of_name = Query(None, description=f"Only {kind.plural} with this name.")
    maximum = Query(None, description=f"Maximum number of {kind.plural}; by default all.", ge=1, le=MAX_PAGE)

    def list_all(
        services: Context,
        sender: Reader,
        state: StateFilter | None = in_state,
        name: str | None = of_name,
        q: Annotated[str | None, TEXT] = None,
        sort: Annotated[JobSort, SORT] = "created",
        offset: Annotated[int, OFFSET] = 0,
        limit: int | None = maximum,
    ) -> Response:
        wanted = None if state is None else JobState(state)
        found, total = services.store.job_page(
            kind.name,
            state=wanted,
            name=name,
            text=q,
            reader=sender.account,
            sort=sort,
            offset=offset,
            limit=limit,
        )
        stop = offset + len(found)
        given = {"state": state, "name": name, "q": q, "sort": sort, "limit": limit, "offset": stop}
        query = urlencode({key: value for key, value in given.items() if value is not None}, errors="replace")
        more = below_root(f"{kind.path}?{query}") if found and stop < total else None
        return Json({kind.collection: shown_jobs(services, sender, found, kind), "total": total, "next": more})

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
        description=f"The {kind.plural} that the sender may read, by default all of them, oldest first.",
        response_model=None,
        responses={200: {"model": list_document(kind.collection, model)}, **refusals(422)},
    )


def _body(kind: JobKind) -> dict[str, Any]:
    """OpenAPI description of the body of the request that submits a job of this `kind`, as JSON or YAML.

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

    def get(services: Context, sender: Sender, record: JobRecord = found) -> Response:
        return _shown(services, sender, record, kind)

    async def edit(
        request: Request,
        services: Context,
        sender: Sender,
        record: JobRecord = changed,
        if_match: Annotated[str | None, IF_MATCH] = None,
        reason: Annotated[str | None, REASON] = None,
    ) -> Response:
        body = await read_object(request, kind.edit())
        edited = await in_thread(Work.WRITE, _edit, services, sender, kind, record, body, if_match, reason)
        services.cluster.wake()
        return await run_in_threadpool(_shown, services, sender, edited, kind)

    def get_submitted(record: JobRecord = found) -> Response:
        return Json(record.document)

    @in_threads_of(Work.RAY)
    def get_log(services: Context, record: JobRecord = found) -> Response:
        return PlainTextResponse(services.cluster.log(record).encode("utf-8", "replace"))

    async def delete(services: Context, sender: Sender, record: JobRecord = changed) -> Response:
        note = partial(_record, services, sender, "job.delete", record, None)
        await services.exports.delete_job(record.id, noun=noun, note=note)
        await in_thread(Work.WRITE, clean_up, services.store, services.artifacts, services.data_dir, record.id)
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
        change = partial(_share, services, sender, kind, record, _Place(team, Sharing(body.sharing)))
        if team is None or team == record.team:
            shared = await in_thread(Work.WRITE, change)
        else:
            measured = await in_thread(Work.WRITE, services.team_bytes.measure, team, with_job=record.id)

            def check() -> None:
                services.team_bytes.check_move(record, team, measured)
                check_move(services, sender, record, team)

            shared = await in_thread(Work.WRITE, services.quota.admit, 0, change, check=check)
        return Json(await run_in_threadpool(_document, services, sender, shared))

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

    def changing(verb: str, action: Verb) -> Callable[..., Awaitable[Response]]:
        @in_threads_of(Work.WRITE)
        def change(
            services: Context,
            sender: Sender,
            record: JobRecord = found,
            reason: Annotated[str | None, REASON] = None,
        ) -> Response:
            user = None if sender.account is None else sender.account.user
            with services.store.admission() if verb == "resume" else services.store.unit_of_work():
                if verb == "resume":
                    check_resume(services, sender, record)
                changed = action(services, record.id, Steering(verb, user, reason))
                _record(services, sender, f"job.{verb}", record, changed)
            services.cluster.wake()
            return Json(_document(services, sender, changed), status_code=202)

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


def _document(services: Services, sender: Principal, job: JobRecord) -> dict[str, Any]:
    # Read before the job, so that a client which follows the events after this id misses no change of the document.
    last_event_id = services.store.last_event_id(job.id)
    document = shown_job(services, sender, services.store.job(job.id))
    return {**document, "last_event_id": last_event_id}


def _shown(services: Services, sender: Principal, job: JobRecord, kind: JobKind) -> Response:
    document = _document(services, sender, job)
    # The tag changes with every edit of the job, not with its progress.
    return Json(document, headers={"ETag": _tag(document["version"]), "Cache-Control": "no-store"})


def _tag(version: int) -> str:
    return f'"{version}"'


def _edit(
    services: Services,
    sender: Principal,
    kind: JobKind,
    job: JobRecord,
    body: JobEdit,
    if_match: str | None,
    reason: str | None,
) -> JobRecord:
    """Edit a job as the request's `body` says, and return the job. An edit that changes nothing is not stored.

    `kind` is the job's kind, which says what can be edited. `if_match` is the request's header If-Match, which names
    the version of the job that the sender of the request has read. `reason` is the sender's reason, which is
    recorded with the event of the edit; None states no reason. Raises Refusal with one of these statuses:

    - 428: the header is missing
    - 412: the job was edited after the sender had read it
    - 403: the priority is above 0 and the sender does not administer the server
    """
    if if_match is None:
        raise Refusal(
            428, f"the header If-Match is missing; send the ETag of the {kind.noun} as you read it: {_tag(job.version)}"
        )
    known = {part.strip().removeprefix("W/") for part in if_match.split(",")}  # proxies that compress make tags weak
    if not known & {_tag(job.version), "*"}:
        raise Refusal(
            412, f"the {kind.noun} was edited meanwhile: it has the ETag {_tag(job.version)}; read it and edit it again"
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
    steering = Steering("edit", None if account is None else account.user, reason, changes)
    document = edited if options or "name" in labels else None
    was, is_now = ({name: values[place] for name, values in changes.items()} for place in (0, 1))
    with services.store.unit_of_work():
        stored = services.steering.edit_job(job, labels, document=document, restarts=bool(options), steering=steering)
        if stored is None:
            raise Refusal(412, f"the {kind.noun} was edited at this moment; read it and edit it again")
        services.accounts.record(sender.actor, "job.edit", f"job {job.id}", before=was, after=is_now)
    return stored


async def _created(
    request: Request, services: Services, sender: Principal, *, kind: JobKind, key: str | None, place: _Place | _Asked
) -> tuple[JobRecord, bool]:
    """Store the job of this `kind` that the request's body describes, if it passes every check.

    `key` is the request's idempotency key, or None. `place` has the job's team and its sharing (who may read it). A job
    that serves a study takes both from the study; for such a job, `place` is an `_Asked` with what the request states,
    which must agree with the study's. Returns the job, and whether the job is new. The job is not new if an earlier
    request with the same key created it.

    Raises:
        Refusal, InvalidStudy: The body is not accepted.
        Unavailable: The body cannot be checked at the moment.
        Conflict: The key was sent before with another body, or the study is served already.
    """
    is_json = sent_as_json(request.headers, accepted=(*JSON_TYPES, *YAML_TYPES))
    content = await read_body(request)
    digest = hashlib.sha256(content).hexdigest()
    key = _own_key(sender, key)
    async with services.key_locks.setdefault(key, asyncio.Lock()) if key is not None else nullcontext():
        known = await run_in_threadpool(services.store.job_of_key, key) if key is not None else None
        if known is not None:
            record, is_new = known, False
        elif await run_in_threadpool(services.store.is_drained):
            raise Unavailable(f"{DRAINED}; send the {kind.noun} again then")
        else:
            with tracing.span("check", {"mergesearch.kind": kind.name}):
                accepted = await services.preflight.accept(
                    content, is_json=is_json, kind=kind, client=sender.name, reader=sender.account
                )
            request_key = _RequestKey(key, digest)
            record, is_new = await in_thread(
                Work.WRITE, _admitted, services, sender, kind, accepted, place, request_key
            )
    if record.request_digest != digest or record.kind != kind.name:
        raise Conflict(
            f"Idempotency-Key {key!r} was sent before with another body, which created "
            f"{kind_of(record.kind).noun} {record.id}; use another key for another {kind.noun}"
        )
    if is_new:
        tracing.describe({"mergesearch.job": record.id, "mergesearch.name": record.name})
        services.cluster.wake()
    return record, is_new


@dataclass(frozen=True)
class _RequestKey:
    """Idempotency key of a request (None if the request has none), and the hash of the request's body."""

    key: str | None
    digest: str


def _admitted(
    services: Services,
    sender: Principal,
    kind: JobKind,
    accepted: Accepted,
    place: _Place | _Asked,
    request: _RequestKey,
) -> tuple[JobRecord, bool]:
    """Store a job that has passed its checks, if it fits into the quotas, with its entry in the audit log.

    Returns the job, and whether the job is new. The job is not new if another server has stored it for the same
    idempotency key.
    """
    measured = services.quota.measure(accepted.artifact_bytes)  # files, while no other request waits
    with services.store.admission():
        if request.key is not None and (known := services.store.job_of_key(request.key)) is not None:
            return known, False
        if isinstance(place, _Asked):
            found = _place_of_study(services, sender, kind, accepted, place)
        else:
            found = place
            _check_membership(services, sender, place.team)

        def create() -> JobRecord:
            return services.store.create_job(
                kind=kind.name,
                name=accepted.name,
                document=accepted.document,
                accepted=accepted.stored_facts(),
                idempotency_key=request.key,
                request_digest=request.digest,
                owner=None if sender.account is None else sender.account.user,
                team=found.team,
                sharing=found.sharing,
                traceparent=tracing.current(),
                keeps=services.artifacts.kept_names(kind.models(accepted)),
            )

        check = partial(services.team_bytes.check_artifacts, found.team, accepted.artifact_bytes)
        record = services.quota.admit(accepted.artifact_bytes, create, check=check, measured=measured)
        _record(services, sender, "job.create", None, record)
        return record, True


@dataclass(frozen=True)
class _Place:
    """Ownership of a new job: its team (None for no team), and who else may read it."""

    team: str | None
    sharing: Sharing


@dataclass(frozen=True)
class _Asked:
    """Team and sharing (who may read the job) as a request states them for a job that serves a study.

    A field is None if the request does not state it.
    """

    team: str | None
    sharing: Sharing | None


def _check_membership(services: Services, sender: Principal, team: str | None) -> None:
    """Raise InvalidRequest if the sender of a request may not submit jobs for `team` any more.

    The checks of a job may take minutes, in which a user may have been disabled, or a team removed. Call this function
    in the unit of work that stores the job (`Store.admission`).
    """
    if sender.account is None:
        return
    user = services.accounts.user(sender.account.user)
    if user.is_disabled or (team is not None and user.roles.get(team) not in (Role.MEMBER, Role.ADMIN)):
        message = "is not accepted any more: you were disabled or removed from the team while the job was checked"
        raise InvalidRequest((Problem("team", f"{team or 'none'!r:.80} {message}"),))


def _place_of_study(services: Services, sender: Principal, kind: JobKind, accepted: Accepted, asked: _Asked) -> _Place:
    """Find the team and sharing of a new job that serves a study, and check that the job may be created.

    A job that serves a study has the team and sharing of the study. `accepted` is the checked job, and `asked` has the
    team and sharing that the request asks for. Raises InvalidRequest if the requested team or sharing differs from the
    study's. Raises Conflict or Refusal if the study is served already, or may not be served now.
    """
    assert kind.study_of is not None
    try:
        study = services.store.job(kind.study_of(accepted.document))
    except NotFound as error:  # it was deleted after the checks
        raise InvalidRequest((Problem("study", str(error)),)) from error
    place = _Place(study.team, study.sharing)
    _check_place(kind, place, team=asked.team or place.team, sharing=asked.sharing or place.sharing)
    if (job := usable_served(services, sender, study)) is not None:
        raise Conflict(f"study {study.name} is served already, by {job.name} ({job.id}); use it, or cancel it")
    check_serving(services, sender, study)
    return place


def _check_place(kind: JobKind, place: _Place, *, team: str | None, sharing: Sharing) -> None:
    """Raise InvalidRequest if the team or sharing of a job that serves a study differs from the study's.

    `place` has the study's team and sharing; `team` and `sharing` are those of the job that serves the study. `kind` is
    this job's kind, which the error message names.
    """
    fields = (("team", team, place.team), ("sharing", sharing.value, place.sharing.value))
    rule = f"a {kind.noun} has the team and sharing of its study"
    problems = [
        Problem(name, f"{given!r:.80} is not accepted; {rule}, here {known!r}")
        for name, given, known in fields
        if given != known
    ]
    if problems:
        raise InvalidRequest(tuple(problems))


def _share(services: Services, sender: Principal, kind: JobKind, job: JobRecord, place: _Place) -> JobRecord:
    """Change the team of a job and who may read it, and return the job.

    If the job is a study, the jobs that serve it are changed in the same way. `place` has the new team and says who may
    read the job. Raises InvalidRequest if the job itself serves a study, and `place` differs from the study's team and
    sharing.
    """
    if kind.study_of is not None:
        with suppress(NotFound):  # the study was deleted
            study = services.store.job(kind.study_of(job.document))
            _check_place(kind, _Place(study.team, study.sharing), team=place.team, sharing=place.sharing)
    with services.store.admission():  # or a job that serves the study could be created without this change
        for each in (job, *served_jobs(services.store, job.id)):
            services.accounts.share(each.id, actor=sender.actor, sharing=place.sharing, team=place.team)
        return services.store.job(job.id)


def _place(sender: Principal, team: str | None, sharing: Sharing | None) -> _Place:
    """Find the team of a new job, and who may read the job.

    The team is the given `team` or, if it is None, the only team for which the sender of the request may submit jobs.
    `sharing` says who may read the job; None means its team. Raises InvalidRequest if the sender may submit jobs for
    several teams and names no team, may not submit jobs for `team`, or is a viewer in all of the sender's teams.
    """
    account = sender.account
    if account is None:
        if team is not None:
            raise InvalidRequest((Problem("team", f"{team!r:.80} is not accepted; the server has no accounts"),))
        return _Place(None, sharing or Sharing.TEAM)
    teams = sorted(name for name, role in account.roles.items() if role is not Role.VIEWER)
    if team is None and account.roles and not teams and not account.is_admin:  # a job without a team has no quotas
        viewed = ", ".join(sorted(account.roles))
        message = f"is missing; you are only a viewer of {viewed}, and members and administrators of a team submit jobs"
        raise InvalidRequest((Problem("team", message),))
    if team is None and len(teams) > 1:
        raise InvalidRequest((Problem("team", f"is missing; name one of your teams: {', '.join(teams)}"),))
    if team is not None and team not in teams:
        known = f"you are a member of {', '.join(teams)}" if teams else "you are a member of no team"
        raise InvalidRequest((Problem("team", f"{team!r:.80} is not accepted; {known}"),))
    chosen = team or (teams[0] if teams else None)
    return _Place(chosen, sharing or Sharing.TEAM)


def _check_team(sender: Principal, job: JobRecord, team: str | None) -> None:
    """Raise InvalidRequest if the sender of the request may not move a job to `team`.

    Members of `team` and administrators of the server may move the job. Jobs without a team have no quotas. Therefore
    only administrators of the server may take a job out of its team without moving it to another one (`team` is None).
    """
    account = sender.account
    if account is None or account.is_admin or team == job.team:
        return
    if team is None:
        message = "null is not accepted; only an administrator of the server can take a job out of its team"
        raise InvalidRequest((Problem("team", message),))
    if account.roles.get(team) not in (Role.MEMBER, Role.ADMIN):
        message = f"{team!r:.80} is not accepted; only a member of a team can move a job to it"
        raise InvalidRequest((Problem("team", message),))


def _own_key(sender: Principal, key: str | None) -> str | None:
    """Convert a client's idempotency key to the stored form, so that equal keys of two users do not collide.

    `key` is the key that the client sent. At a server with accounts, the stored key consists of the word "user", the
    user's name and a hash of `key`, separated by spaces. A client cannot send a key with a space, so it cannot send a
    stored key. At a server without accounts, `key` is stored unchanged.
    """
    if key is None or sender.account is None:
        return key
    return f"user {sender.account.user} {hashlib.sha256(key.encode()).hexdigest()}"


def _record(
    services: Services, sender: Principal, action: str, before: JobRecord | None, after: JobRecord | None
) -> None:
    """Add a change of a job to the audit log.

    `action` names the change, such as "job.cancel". `before` is the job before the change; None for a new job. `after`
    is the job after the change; None for a deleted job.
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
    """Cancel a job permanently, and end its driver (the process that works on it) now. The results so far are kept.

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
    """Pause a job until it is resumed.

    The job's driver (the process that works on it) first stores the samples that are being scored, and then ends. The
    job is PAUSED when its driver has ended. A fine-tuning that is resumed continues from its last checkpoint. If the
    job was asked to pause before, nothing changes. Raises Conflict (409) if the job has ended.
    """
    record = services.steering.pause(job_id, steering=steering)
    _check_unfinished(record, "paused")
    return record


def _stop(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Stop the search of a study early. Running evaluations finish; held-out data and benchmarks are scored as always.

    Unfinished trials that are not being evaluated at this moment are pruned. A search that was stopped already is not
    changed. Raises Conflict (409) if the study has ended.
    """
    record = services.steering.stop_search(job_id, steering=steering)
    _check_unfinished(record, "stopped")
    return record


def _resume(services: Services, job_id: str, steering: Steering) -> JobRecord:
    """Let a failed or paused job continue, or let a waiting job try again now.

    The job continues from its stored results or its last checkpoint. Samples that are stored are not scored again,
    unless they are void: the engine that scored them failed a check afterwards. A COMPLETE study that has void samples
    can be resumed too. A job that is running or about to start is not changed. Raises Conflict (409) if the job is
    CANCELLED, or is COMPLETE and has no void samples.
    """
    record = services.steering.resume(job_id, reason=RESUMED_BY_REQUEST, steering=steering)
    if record.state in (JobState.COMPLETE, JobState.CANCELLED):
        kind = kind_of(record.kind)
        raise Conflict(
            f"{kind.noun} {job_id} is {record.state.value}; only a {kind.noun} {kind.resumable} can be resumed; to run "
            "it again, submit it again"
        )
    return record


def _check_unfinished(record: JobRecord, done: str) -> None:
    """Raise Conflict if a job has ended.

    `done` is the participle of the action that was refused, such as "paused", for the error message.
    """
    if record.state.is_finished:
        noun = kind_of(record.kind).noun
        raise Conflict(
            f"{noun} {record.id} is already {record.state.value}; only a {noun} that has not ended can be {done}"
        )


Verb: TypeAlias = Callable[[Services, str, Steering], JobRecord]
VERBS: Mapping[str, Verb] = {"pause": _pause, "resume": _resume, "stop": _stop, "cancel": _cancel}
