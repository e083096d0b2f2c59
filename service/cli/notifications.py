"""Commands `webhooks` and `mail`, which send requests to a server."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from service.cli.terminal import console, print_json
from service.errors import NotFound

if TYPE_CHECKING:
    from service.client import Client
    from service.schemas.api import DeliveryDocument, MailDocument

__all__ = [
    "add_webhook",
    "list_deliveries",
    "list_webhooks",
    "remove_mail",
    "remove_webhook",
    "send_test",
    "set_mail",
    "show_mail",
]

# Seconds that the outcome of a test is waited for, and between two looks at it.
TEST_S, POLL_S = 60.0, 0.3


def list_webhooks(options: argparse.Namespace) -> int:
    with _client(options) as client:
        webhooks = client.webhooks()
    if options.json:
        print_json(webhooks)
        return 0
    rows = [
        [
            webhook["id"][:8],
            webhook["url"],
            ", ".join(webhook["events"]),
            f"team {webhook['team']}" if webhook["team"] else webhook["covers"],
            webhook["owner"] or "",
            f"disabled: {webhook['disabled_reason']}" if webhook["disabled_at"] else "",
        ]
        for webhook in webhooks
    ]
    return _print_table(("webhook", "url", "events", "jobs", "owner", "state"), rows)


def add_webhook(options: argparse.Namespace) -> int:
    with _client(options) as client:
        webhook = client.add_webhook(options.url, events=options.events, covers=options.covers, team=options.team)
    if options.json:
        print_json(webhook)
    else:
        print(webhook["secret"])
        text = f"webhook {webhook['id'][:8]}; this is the only time that the secret is shown"
        print(text, file=sys.stderr)
    return 0


def remove_webhook(options: argparse.Namespace) -> int:
    with _client(options) as client:
        webhook = _found(client, options.webhook)
        client.remove_webhook(webhook)
    print_json({"deleted": webhook}) if options.json else print(f"removed: webhook {webhook[:8]}")
    return 0


def send_test(options: argparse.Namespace) -> int:
    """Let the server send a test message to the webhook that the command line names, and print the outcome.

    `options` are the parsed command line. Returns the exit code: 0 if the message arrived, else 1.
    """
    with _client(options) as client:
        webhook = _found(client, options.webhook)
        sent = client.send_test(webhook)
        deadline = time.monotonic() + TEST_S
        while True:
            found = next((each for each in client.deliveries(webhook, limit=100) if each["id"] == sent["id"]), sent)
            if found["state"] != "WAITING" or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
    if options.json:
        print_json(found)
    else:
        print(f"webhook {webhook[:8]}: {_outcome(found)}")
    return 0 if found["state"] == "DELIVERED" else 1


def list_deliveries(options: argparse.Namespace) -> int:
    with _client(options) as client:
        deliveries = client.deliveries(_found(client, options.webhook))
    if options.json:
        print_json(deliveries)
        return 0
    rows = [
        [each["created_at"], each["event"], (each["job"] or "")[:8], str(each["attempts"]), _outcome(each)]
        for each in deliveries
    ]
    return _print_table(("time", "event", "job", "tries", "outcome"), rows)


def show_mail(options: argparse.Namespace) -> int:
    with _client(options) as client:
        return _print_mail(options, client.mail(user=options.user))


def set_mail(options: argparse.Namespace) -> int:
    with _client(options) as client:
        return _print_mail(options, client.set_mail(options.address, events=options.events, user=options.user))


def remove_mail(options: argparse.Namespace) -> int:
    with _client(options) as client:
        return _print_mail(options, client.set_mail(None, user=options.user))


def _client(options: argparse.Namespace) -> AbstractContextManager[Client]:
    from service.cli.remote import server_client

    return server_client(options.server)


def _print_mail(options: argparse.Namespace, mail: MailDocument) -> int:
    if options.json:
        print_json(mail)
        return 0
    state = f"; disabled: {mail['disabled_reason']}" if mail["disabled_at"] else ""
    sent = f"{mail['address']}: {', '.join(mail['events'])}{state}" if mail["address"] else "no mails are sent"
    print(f"{mail['user']}: {sent}")
    return 0


def _found(client: Client, reference: str) -> str:
    """Find the id of the webhook whose id is `reference` or begins with it.

    Raises NotFound if no webhook has such an id, or if several webhooks have.
    """
    found = [webhook["id"] for webhook in client.webhooks() if webhook["id"].startswith(reference)]
    if len(found) != 1:
        number = "no webhook has it" if not found else f"{len(found)} webhooks have it"
        raise NotFound(f"webhook {reference!r:.80}: give the id of one webhook, or the beginning of it; {number}")
    return found[0]


def _outcome(delivery: DeliveryDocument) -> str:
    if delivery["state"] == "DELIVERED":
        status = f" (status {delivery['status']})" if delivery["status"] else ""
        return f"delivered{status}"
    again = f"; next try {delivery['next_at']}" if delivery["next_at"] and delivery["attempts"] else ""
    return f"{delivery['state'].lower()}{': ' if delivery['error'] else ''}{delivery['error'] or ''}{again}"


def _print_table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> int:
    from rich.markup import escape
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(cell) for cell in row))
    console().print(table)
    return 0
