"""Client methods about webhooks and e-mail addresses, as generators that yield requests and return results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import quote

from service.client.job_flows import me
from service.client.requests import Call, Flow, delete_of, document_of
from service.errors import Conflict

if TYPE_CHECKING:
    from service.schemas.api import DeliveryDocument, MailDocument, NewWebhookDocument, WebhookDocument

__all__ = ["add_webhook", "deliveries", "mail", "remove_webhook", "send_test", "set_mail", "webhooks"]

WEBHOOKS = "/v1/webhooks"
JSON = {"Content-Type": "application/json"}


def webhooks() -> Flow[list[WebhookDocument]]:
    """List your webhooks, or all webhooks for administrators of the server.

    Returns:
        The server's documents of the webhooks, without their secrets.

    Examples:
        >>> [webhook["url"] for webhook in client.webhooks()]
    """
    return cast("list[WebhookDocument]", (yield from document_of(Call("GET", WEBHOOKS)))["webhooks"])


def add_webhook(
    url: str, *, events: Sequence[str] | None = None, covers: str | None = None, team: str | None = None
) -> Flow[NewWebhookDocument]:
    """Add a webhook: a URL that the server requests when jobs change.

    The request is not repeated after a lost connection, because repeating it could add a second webhook.

    Args:
        url: The URL, with https.
        events: Changes that are sent: "complete", "failed", "waiting", "paused", "cancelled"; None means "complete",
            "failed" and "waiting".
        covers: Whose jobs the webhook covers: "own", "team" or "all"; None means the jobs of `team` if it is given,
            else your own jobs.
        team: Team whose jobs are covered, which you administer.

    Returns:
        The server's document of the webhook. Its key "secret" has the secret with which requests are signed; the secret
        is not shown again.

    Raises:
        RequestRefused: The server refused the webhook; the error has every problem.

    Examples:
        >>> client.add_webhook("https://ci.example.org/mergesearch", events=["failed"])["secret"]
    """
    options: dict[str, Any] = {"events": None if events is None else list(events), "covers": covers, "team": team}
    body = {"url": url, **{name: value for name, value in options.items() if value is not None}}
    call = Call("POST", WEBHOOKS, {}, JSON, json.dumps(body).encode())
    return cast("NewWebhookDocument", (yield from document_of(call, repeats=False)))


def remove_webhook(webhook: str) -> Flow[None]:
    """Remove a webhook.

    Args:
        webhook: Id of the webhook.

    Raises:
        RequestRefused: There is no such webhook (status 404).

    Examples:
        >>> client.remove_webhook("5f0c...")
    """
    yield from delete_of(Call("DELETE", _path(webhook)))


def send_test(webhook: str) -> Flow[DeliveryDocument]:
    """Let the server send a test message to a webhook. The method `deliveries` returns the outcome.

    Args:
        webhook: Id of the webhook.

    Returns:
        The server's document of the delivery.

    Raises:
        RequestRefused: There is no such webhook (status 404).

    Examples:
        >>> client.send_test("5f0c...")["id"]
    """
    return cast("DeliveryDocument", (yield from document_of(Call("POST", f"{_path(webhook)}:test"))))


def deliveries(webhook: str, *, limit: int = 20) -> Flow[list[DeliveryDocument]]:
    """List the last deliveries to a webhook, newest first.

    Args:
        webhook: Id of the webhook.
        limit: Maximum number of deliveries, at most 100.

    Returns:
        The server's documents of the deliveries.

    Raises:
        RequestRefused: There is no such webhook (status 404).

    Examples:
        >>> client.deliveries("5f0c...")[0]["state"]
    """
    document = yield from document_of(Call("GET", f"{_path(webhook)}/deliveries", {"limit": str(limit)}))
    return cast("list[DeliveryDocument]", document["deliveries"])


def mail(*, user: str | None = None) -> Flow[MailDocument]:
    """Return the e-mail address of a user, and which changes of the user's jobs are sent to it.

    Args:
        user: Name of the user; None is you.

    Returns:
        The server's document; its key "address" is None if no mails are sent.

    Raises:
        Conflict: The server has no accounts.
        RequestRefused: There is no such user, or `user` is another user and you are no administrator (status 404).

    Examples:
        >>> client.mail()["address"]
    """
    return cast("MailDocument", (yield from document_of(Call("GET", (yield from _mail_path(user))))))


def set_mail(
    address: str | None, *, events: Sequence[str] | None = None, user: str | None = None
) -> Flow[MailDocument]:
    """Set or remove the e-mail address of a user, to which changes of the user's jobs are sent.

    Args:
        address: The address; None removes it.
        events: Changes that are sent, such as "failed"; the values and the default are those of `add_webhook`.
        user: Name of the user; None is you.

    Returns:
        The server's document of the address.

    Raises:
        Conflict: The server has no accounts.
        RequestRefused: The address is not accepted (status 422), or the server sends no mails (409).

    Examples:
        >>> client.set_mail("ann@example.org", events=["complete", "failed"])
    """
    path = yield from _mail_path(user)
    if address is None:
        return cast("MailDocument", (yield from document_of(Call("DELETE", path))))
    body = {"address": address, **({} if events is None else {"events": list(events)})}
    return cast("MailDocument", (yield from document_of(Call("PUT", path, {}, JSON, json.dumps(body).encode()))))


def _mail_path(user: str | None) -> Flow[str]:
    if user is None:
        sender = (yield from me())["user"]
        if sender is None:
            raise Conflict("mail: the server has no accounts, and mails are sent to users; add a webhook instead")
        user = sender["name"]
    return f"/v1/users/{quote(user, safe='')}/mail"


def _path(webhook: str) -> str:
    return f"{WEBHOOKS}/{quote(webhook, safe='')}"
