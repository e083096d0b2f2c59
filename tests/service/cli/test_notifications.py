"""The commands `webhooks` and `mail`, and the options of `serve` for notifications."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from standardwebhooks import Webhook

from service.cli.remote import SERVER_VARIABLE
from service.client.credentials import TOKEN_VARIABLE
from service.types import Scope
from tests.service.api.accounts import Company
from tests.service.api.harness import ApiServer
from tests.service.api.test_notifications import SETTINGS
from tests.service.cli.terminals import ServerTerminal, Terminal
from tests.service.notifications.receiver import receiver

pytestmark = pytest.mark.slow  # each starts an HTTP server


def test_a_webhook_is_added_tested_and_removed(terminal: ServerTerminal) -> None:
    """The secret is printed alone on standard output; the outcome of a test is the exit code."""
    server = ("--server", terminal.site.url)
    with receiver(statuses=[500]) as target:
        code, out, err = terminal.run(
            "webhooks", "add", target.url(), "--event", "failed", "--event", "waiting", *server
        )
        assert (code, "this is the only time that the secret is shown" in err) == (0, True)
        hook = next(iter(re.findall(r"webhook ([0-9a-f]{8});", err)))
        code, shown, _ = terminal.run("webhooks", "test", hook, *server)
        assert (code, shown) == (1, f"webhook {hook}: failed: status 500\n")
        assert terminal.shown("webhooks", "test", hook) == f"webhook {hook}: delivered (status 204)\n"
        Webhook(out.strip()).verify(target.received[1].body, target.received[1].headers)
        listed = terminal.shown("webhooks", "list")
        assert all(part in listed for part in (hook, "failed, waiting", "all"))
        deliveries = terminal.shown("webhooks", "deliveries", hook)
        assert all(part in deliveries for part in ("test", "delivered (status 204)", "failed: status 500"))
        assert terminal.document("webhooks", "deliveries", hook)[0]["event"] == "test"
        assert terminal.shown("webhooks", "remove", hook) == f"removed: webhook {hook}\n"
        assert "no webhook has it" in terminal.refused("webhooks", "test", hook)
        assert "is not https" in terminal.refused("webhooks", "add", "http://example.org/")


def test_an_address_is_set_and_removed(
    terminal: ServerTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user sets the address, sees it, and removes it; a server without accounts has no users to mail to."""
    assert "mail: the server has no accounts" in terminal.refused("mail", "show")
    with ApiServer(tmp_path, notifications=SETTINGS) as server:
        company = Company.on(server)
        monkeypatch.setenv(SERVER_VARIABLE, server.url)
        monkeypatch.setenv(TOKEN_VARIABLE, company.tokens["owner", Scope.SUBMIT])

        def shown(*command: str) -> str:
            code, out, err = Terminal.run(terminal, *command)
            assert code == 0, err
            return out

        assert shown("mail", "show") == "owner: no mails are sent\n"
        assert shown("mail", "set", "o@example.org", "--event", "failed") == "owner: o@example.org: failed\n"
        assert json.loads(shown("mail", "show", "--json"))["address"] == "o@example.org"
        assert shown("mail", "remove") == "owner: no mails are sent\n"


def test_options_that_do_not_fit_end_the_server(
    terminal: ServerTerminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong options about notifications end the server with the reason, and no message has the password."""
    monkeypatch.setenv("MERGESEARCH_SMTP_PASSWORD", "planted")
    for options, message in (
        (("--webhook-allow", "http://ci/"), "--webhook-allow 'http://ci/': is not a host; give a name or an address"),
        (("--mail-from", "a@example.org"), "--mail-from: has no effect without --smtp-url URL"),
        (("--smtp-url", "smtp://mail.example.org"), "--mail-from: is missing"),
        (("--notify-waiting", "0"), "'0' is not a number of minutes; give one above 0, such as 30"),
        (("--public-url", "search.example.org"), "--public-url 'search.example.org': is not the URL of a server"),
    ):
        code, out, err = terminal.run("serve", "--data", tmp_path / "data", "--port", 0, *options)
        assert (code, message in err, "planted" in out + err) == (2, True, False), err
