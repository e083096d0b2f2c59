"""Routes of webhooks and of users' e-mail addresses, to which notifications of jobs are sent."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from search_spaces.errors import Problem
from service.api.dependencies import ID_PATTERN, Context, Reader, Services, Submitter
from service.api.permissions import Right, Rule, Sender, check_admin, declares, sender_with
from service.api.presenters import delivery_document, mail_document, webhook_document
from service.api.problems import InvalidRequest, Json, Refusal, refusals
from service.api.protocols import Principal
from service.api.requests import body_of, read_object
from service.errors import Conflict, NotFound
from service.notifications.documents import notification_for_test
from service.notifications.reachable import MAX_URL, url_problem
from service.notifications.settings import address_problem
from service.notifications.signatures import new_webhook_secret
from service.schemas.api import (
    DeletedDocument,
    DeliveriesDocument,
    DeliveryDocument,
    MailDocument,
    NewWebhookDocument,
    NoticeName,
    WebhooksDocument,
)
from service.store.accounts import NAME_PATTERN
from service.threads import Work, in_thread, in_threads_of
from service.types import Coverage, NoticeKind, Role, Scope, SubscriptionRecord, UserRecord

__all__ = ["router"]

router = APIRouter(tags=["notifications"])

MAX_DELIVERIES = 100

DEFAULT_EVENTS: list[NoticeName] = ["complete", "failed", "waiting"]

Events = Annotated[list[NoticeName], Field(min_length=1, max_length=10, description="Changes of jobs that are sent.")]
WebhookId = Annotated[str, Path(description="The `id` of the webhook.", pattern=ID_PATTERN)]
UserName = Annotated[str, Path(description="The name of the user.", pattern=NAME_PATTERN)]


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class NewWebhook(_Body):
    url: Annotated[
        str,
        Field(
            min_length=1,
            max_length=MAX_URL,
            examples=["https://ci.example.org/mergesearch"],
            description="An https URL with a public address, unless the operator allows its host.",
        ),
    ]
    events: Events = DEFAULT_EVENTS
    covers: Annotated[
        Literal["own", "team", "all"] | None,
        Field(description="Your jobs (default), those of a team that you administer, or all (administrators)."),
    ] = None
    team: Annotated[str, Field(pattern=NAME_PATTERN)] | None = None


class Mail(_Body):
    address: Annotated[str, Field(min_length=1, max_length=254, examples=["ann@example.org"])]
    events: Events = DEFAULT_EVENTS


# -- webhooks ----------------------------------------------------------------------------------------------------------


@router.get("/webhooks", response_model=None, responses={200: {"model": WebhooksDocument}})
def list_webhooks(services: Context, sender: Reader) -> Response:
    """List the sender's webhooks, without their secrets. Administrators of the server get the webhooks of all users."""
    account = sender.account
    own = None if account is None or account.is_admin else account.user
    found = services.notifications.webhooks(own)
    return Json(WebhooksDocument(webhooks=[webhook_document(webhook) for webhook in found]))


@router.post(
    "/webhooks",
    status_code=201,
    response_model=None,
    responses={
        201: {"model": NewWebhookDocument, "description": "The webhook; no later response has its secret."},
        **refusals(404, 409, 413, 415, 422),
    },
    openapi_extra=body_of(NewWebhook),
)
async def add_webhook(request: Request, services: Context, sender: Submitter) -> Response:
    """Add a webhook: a URL that the server requests when jobs change.

    A user adds webhooks for their own jobs, an administrator of a team adds them for the team's jobs, and an
    administrator of the server adds them for all jobs. Without accounts, a webhook is for all jobs. Requests are signed
    with the secret in the response.
    """
    body = await read_object(request, NewWebhook)
    covers, team = _coverage(sender, body)
    if problem := url_problem(body.url, allowed=services.notifier.settings.allowed_hosts):
        raise InvalidRequest((Problem("url", problem),))
    secret = new_webhook_secret()
    webhook = await in_thread(
        Work.WRITE,
        services.notifications.add_webhook,
        body.url,
        secret=secret,
        events=[NoticeKind(event) for event in body.events],
        owner=None if sender.account is None else sender.account.user,
        covers=covers,
        team=team,
        actor=sender.actor,
    )
    document: NewWebhookDocument = {**webhook_document(webhook), "secret": secret}
    return Json(document, status_code=201)


def _coverage(sender: Principal, body: NewWebhook) -> tuple[Coverage, str | None]:
    """Determine the jobs that a new webhook covers and, if these are the jobs of one team, the team.

    `body` is the request for the webhook. The team is None unless the webhook covers the jobs of one team. Raises
    InvalidRequest if the fields of the request do not fit together, and Refusal if the sender of the request may not
    have a webhook for these jobs.
    """
    account = sender.account
    if account is None:
        if body.covers not in (None, "all"):
            message = f"{body.covers!r} is not accepted: the server has no accounts; webhooks are for all jobs"
            raise InvalidRequest((Problem("covers", message),))
        if body.team is not None:
            raise InvalidRequest((Problem("team", "is not accepted: the server has no accounts"),))
        return Coverage.ALL, None
    covers = Coverage(body.covers or (Coverage.OWN if body.team is None else Coverage.TEAM))
    if (covers is Coverage.TEAM) != (body.team is not None):
        message = "is missing" if body.team is None else f"is not accepted with covers={covers.value!r}; leave one out"
        raise InvalidRequest((Problem("team", message),))
    if covers is Coverage.ALL:
        check_admin(sender)
    if covers is Coverage.TEAM and not account.is_admin:
        role = account.roles.get(body.team or "")
        if role is None:
            raise Refusal(404, f"team {body.team!r}: there is no such team")
        if role is not Role.ADMIN:
            raise Refusal(403, f"team {body.team!r}: only its administrators may have webhooks for its jobs")
    return covers, body.team


def _own_webhook(services: Services, sender: Principal, webhook_id: str) -> SubscriptionRecord:
    """Read a webhook, after checking that it is the sender's, or that the sender administers the server.

    Raises Refusal with status 404 if neither is the case.
    """
    try:
        record = services.notifications.webhook(webhook_id)
    except NotFound:
        record = None
    account = sender.account
    if record is None or not (account is None or account.is_admin or account.user == record.owner):
        raise Refusal(404, f"webhook {webhook_id!r}: there is no such webhook")
    return record


def _read_webhook(
    webhook_id: WebhookId, services: Context, sender: Annotated[Principal, sender_with(Scope.READ)]
) -> SubscriptionRecord:
    return _own_webhook(services, sender, webhook_id)


def _changed_webhook(
    webhook_id: WebhookId, services: Context, sender: Annotated[Principal, sender_with(Scope.SUBMIT)]
) -> SubscriptionRecord:
    return _own_webhook(services, sender, webhook_id)


ReadWebhook = Annotated[SubscriptionRecord, declares(Rule(Scope.READ, Right.OWN), _read_webhook)]
ChangedWebhook = Annotated[SubscriptionRecord, declares(Rule(Scope.SUBMIT, Right.OWN), _changed_webhook)]


@router.delete(
    "/webhooks/{webhook_id:segment}", response_model=None, responses={200: {"model": DeletedDocument}, **refusals(404)}
)
@in_threads_of(Work.WRITE)
def remove_webhook(webhook: ChangedWebhook, services: Context, sender: Sender) -> Response:
    """Remove a webhook of the user who sends the request or, for administrators of the server, of another user.

    Messages that wait to be sent to it are dropped.
    """
    services.notifications.remove_webhook(webhook.id, actor=sender.actor)
    return Json(DeletedDocument(deleted=webhook.id))


@router.post(
    "/webhooks/{webhook_id:segment}:test",
    status_code=202,
    response_model=None,
    responses={202: {"model": DeliveryDocument, "description": "The test is being sent."}, **refusals(404)},
)
@in_threads_of(Work.WRITE)
def test_webhook(webhook: ChangedWebhook, services: Context) -> Response:
    """Send a test message to a webhook, once. The list of deliveries shows the outcome.

    A webhook is disabled when no messages have arrived for days; if this message arrives, it is enabled again.
    """
    delivery = services.notifications.add_test(webhook.id, notification_for_test)
    services.notifier.wake()
    return Json(delivery_document(delivery), status_code=202)


@router.get(
    "/webhooks/{webhook_id:segment}/deliveries",
    response_model=None,
    responses={200: {"model": DeliveriesDocument}, **refusals(404, 422)},
)
def list_deliveries(
    webhook: ReadWebhook,
    services: Context,
    limit: Annotated[int, Query(description="Maximum number of deliveries.", ge=1, le=MAX_DELIVERIES)] = 20,
) -> Response:
    """List the last deliveries to a webhook, newest first, with their outcomes. Deliveries are kept for seven days."""
    found = services.notifications.deliveries(webhook.id, limit=limit)
    return Json(DeliveriesDocument(deliveries=[delivery_document(delivery) for delivery in found]))


# -- e-mail ------------------------------------------------------------------------------------------------------------


def _own_user(services: Services, sender: Principal, user: str) -> UserRecord:
    """Read a user, after checking that this user is the sender, or that the sender administers the server.

    Raises Refusal with status 404 if neither is the case, or if the server has no accounts.
    """
    account = sender.account
    if account is not None and (account.is_admin or account.user == user):
        return services.accounts.user(user)
    raise Refusal(404, f"user {user!r}: there is no such user")


def _read_user(user: UserName, services: Context, sender: Annotated[Principal, sender_with(Scope.READ)]) -> UserRecord:
    return _own_user(services, sender, user)


def _changed_user(
    user: UserName, services: Context, sender: Annotated[Principal, sender_with(Scope.SUBMIT)]
) -> UserRecord:
    return _own_user(services, sender, user)


ReadUser = Annotated[UserRecord, declares(Rule(Scope.READ, Right.OWN), _read_user)]
ChangedUser = Annotated[UserRecord, declares(Rule(Scope.SUBMIT, Right.OWN), _changed_user)]


@router.get(
    "/users/{user:segment}/mail", response_model=None, responses={200: {"model": MailDocument}, **refusals(404)}
)
def get_mail(user: ReadUser, services: Context) -> Response:
    """Show the e-mail address of the user who sends the request or, for administrators, of another user."""
    return Json(mail_document(user.name, services.notifications.mail(user.name)))


@router.put(
    "/users/{user:segment}/mail",
    response_model=None,
    responses={200: {"model": MailDocument}, **refusals(404, 409, 413, 415, 422)},
    openapi_extra=body_of(Mail),
)
async def set_mail(request: Request, user: ChangedUser, services: Context, sender: Sender) -> Response:
    """Set the e-mail address of a user, and which changes of the user's jobs are sent to it.

    Users may do this for themselves, and administrators of the server for all users. If the server has no mail server,
    the request is refused (409).
    """
    body = await read_object(request, Mail)
    if problem := address_problem(body.address):
        raise InvalidRequest((Problem("address", problem),))
    if services.notifier.settings.mail is None:
        raise Conflict("mail: the server sends no mails; its operator can name a mail server (--smtp-url)")
    return await in_thread(
        Work.WRITE, _set_mail, services, sender, user.name, body.address, [NoticeKind(event) for event in body.events]
    )


@router.delete(
    "/users/{user:segment}/mail", response_model=None, responses={200: {"model": MailDocument}, **refusals(404)}
)
@in_threads_of(Work.WRITE)
def remove_mail(user: ChangedUser, services: Context, sender: Sender) -> Response:
    """Remove the e-mail address of a user, so that no mails are sent to it."""
    return _set_mail(services, sender, user.name, None, [])


def _set_mail(
    services: Services, sender: Principal, user: str, address: str | None, events: list[NoticeKind]
) -> Response:
    found = services.notifications.set_mail(user, address, events=events, actor=sender.actor)
    return Json(mail_document(user, found))
