"""Mails to a real mail server: with and without TLS and login, refusals, outages, and odd names of jobs."""

from __future__ import annotations

import json
import socket
import ssl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes
from email.message import EmailMessage
from email.policy import default
from pathlib import Path
from typing import Any

import pytest
import trustme
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import AuthResult, Envelope, LoginPassword

from service.notifications.mail import send_mail
from service.notifications.settings import MailSettings, NotificationSettings
from service.notifications.webhooks import Outcome
from service.types import DeliveryState, JobState, NoticeKind
from tests.service.notifications.office import ACTOR, Office
from tests.service.notifications.receiver import wait_until

PASSWORD = "planted-password"
BODY = json.dumps(
    {
        "type": "job.failed",
        "timestamp": "2026-11-28T08:00:00.000Z",
        "data": {
            "id": "5" * 32,
            "kind": "search",
            "name": "math-code",
            "state": "FAILED",
            "reason": "no engine started",
            "waiting_for": None,
            "url": "https://search.example.org/v1/studies/5",
        },
    }
)


@dataclass
class MailServer:
    """A mail server with its received mails. `refusal`, if set, is its answer to each recipient."""

    port: int = 0
    envelopes: list[Envelope] = field(default_factory=list)
    logins: list[tuple[bytes, bytes]] = field(default_factory=list)
    encrypted: list[bool] = field(default_factory=list)
    refusal: str | None = None

    @property
    def messages(self) -> list[EmailMessage]:
        contents: list[Any] = [envelope.content for envelope in self.envelopes]
        return [message_from_bytes(content, policy=default) for content in contents]

    # The hooks of aiosmtpd have these names.

    async def handle_RCPT(self, server: Any, session: Any, envelope: Any, address: str, options: Any) -> str:  # noqa: N802
        if self.refusal is not None:
            return self.refusal
        envelope.rcpt_tos.append(address)
        return "250 OK"

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802
        self.encrypted.append(server.transport.get_extra_info("ssl_object") is not None)
        self.envelopes.append(envelope)
        return "250 OK"

    def authenticate(self, server: Any, session: Any, envelope: Any, mechanism: str, login: Any) -> AuthResult:
        assert isinstance(login, LoginPassword)
        self.logins.append((login.login, login.password))
        return AuthResult(success=login.password == PASSWORD.encode(), handled=False)


@contextmanager
def mail_server(**options: Any) -> Iterator[MailServer]:
    found = MailServer()
    if options.get("auth_required"):
        options["authenticator"] = found.authenticate
    with socket.create_server(("127.0.0.1", 0)) as probe:
        found.port = probe.getsockname()[1]
    controller = Controller(found, hostname="127.0.0.1", port=found.port, **options)
    controller.start()
    try:
        yield found
    finally:
        controller.stop()


def settings(server: MailServer, **changes: Any) -> MailSettings:
    return MailSettings("localhost", server.port, "search@example.org", **{"requires_tls": False, **changes})


def sent(server: MailServer, body: str = BODY, *, to: str = "ann@example.org", **changes: Any) -> Outcome:
    return send_mail(settings(server, **changes), to=to, message_id="d" * 32, body=body)


@pytest.fixture
def tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ssl.SSLContext:
    """Certificate for localhost by an authority that this process trusts."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp_path / "authority.pem"))
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    return context


def test_a_mail_has_what_happened() -> None:
    """A mail has the job, its state and reason, and headers by which receivers know that a program sent it."""
    with mail_server() as server:
        assert sent(server) == Outcome()
        assert sent(server) == Outcome()
        (message, again) = server.messages
        assert server.envelopes[0].mail_from == "search@example.org"
        assert server.envelopes[0].rcpt_tos == ["ann@example.org"]
    headers = {"From": "search@example.org", "To": "ann@example.org", "Subject": "math-code has failed"}
    assert {name: message[name] for name in headers} == headers
    assert message["Message-ID"] == again["Message-ID"] == f"<{'d' * 32}@example.org>"
    assert message["Auto-Submitted"] == "auto-generated"
    assert message["Date"]
    assert message.get_content().splitlines() == [
        "math-code (search) has failed.",
        "",
        "State: FAILED",
        "Reason: no engine started",
        "Time: 2026-11-28T08:00:00.000Z",
        "Job: https://search.example.org/v1/studies/5",
        f"Id: {'5' * 32}",
    ]


@pytest.mark.parametrize(
    "name", ["a\r\nBcc: all@example.org", "a\nBcc: all@example.org\n\nbody", "a\x00\u2028Bcc: x", "ü" * 300]
)
def test_no_name_adds_a_header(name: str) -> None:
    """Line ends in a job's name or reason become spaces: no header and no receiver is added."""
    document = json.loads(BODY)
    document["data"] |= {"name": name, "reason": f"{name}\r\n.\r\nMAIL FROM:<x>"}
    with mail_server() as server:
        assert sent(server, json.dumps(document)) == Outcome()
        (message,) = server.messages
        assert server.envelopes[0].rcpt_tos == ["ann@example.org"]
    assert message["Bcc"] is None
    assert len(message["Subject"]) <= 150
    assert set(message.keys()) <= {
        "From", "To", "Subject", "Date", "Message-ID", "Auto-Submitted", "Content-Type", "Content-Transfer-Encoding",
        "MIME-Version", "X-Peer", "X-MailFrom", "X-RcptTo",
    }  # fmt: skip


def test_an_address_with_a_line_end_is_not_used() -> None:
    """An address that was stored in spite of the checks is not sent to."""
    with mail_server() as server:
        outcome = sent(server, to="ann@example.org\r\nRCPT TO:<all@example.org>")
        assert (outcome.is_final, "is not an e-mail address" in (outcome.error or "")) == (True, True)
        assert server.envelopes == []


def test_starttls_protects_mail_and_login(tls: ssl.SSLContext) -> None:
    """With STARTTLS, the mail and the password are sent encrypted, to the server whose certificate is valid."""
    with mail_server(tls_context=tls, require_starttls=True, auth_required=True) as server:
        login: dict[str, Any] = {"requires_tls": True, "user": "bot", "password": PASSWORD}
        assert sent(server, **login) == Outcome()
        assert (server.encrypted, server.logins) == ([True], [(b"bot", PASSWORD.encode())])
        wrong = sent(server, **{**login, "password": "planted-wrong"})
        assert "the mail server answers 535" in (wrong.error or "")
        assert "planted" not in (wrong.error or "")


def test_without_starttls_nothing_is_sent() -> None:
    """Where TLS is required, a server that does not offer it gets neither mail nor password."""
    with mail_server(auth_required=True, auth_require_tls=False) as server:
        outcome = sent(server, requires_tls=True, user="bot", password=PASSWORD)
        assert "STARTTLS extension not supported" in (outcome.error or "")
        assert (server.envelopes, server.logins) == ([], [])


def test_unknown_certificates_are_refused(tls: ssl.SSLContext, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server with a certificate of an unknown authority gets neither mail nor password."""
    monkeypatch.delenv("SSL_CERT_FILE")
    with mail_server(tls_context=tls) as server:
        outcome = sent(server, requires_tls=True)
        assert "CERTIFICATE_VERIFY_FAILED" in (outcome.error or "")
        assert server.envelopes == []


def test_smtps_is_encrypted_from_the_beginning(tls: ssl.SSLContext) -> None:
    """With smtps, the whole conversation is encrypted."""
    with mail_server(ssl_context=tls) as server:
        assert sent(server, is_tls=True) == Outcome()
        assert server.encrypted == [True]


def test_a_refused_address_is_not_tried_again() -> None:
    """A receiver that is refused for good ends the tries; one that is refused for now does not."""
    with mail_server() as server:
        for refusal, is_final in (("550 no such user", True), ("450 try later", False)):
            server.refusal = refusal
            outcome = sent(server)
            assert (outcome.error, outcome.is_final) == (f"the mail server refuses the address: {refusal}", is_final)


def test_mails_are_sent_once_for_each_change(office: Office) -> None:
    """A user's address receives the chosen changes of the user's own jobs, also after the mail server was away."""
    office.staff()
    with mail_server() as server:
        server.refusal = "451 busy"
        office.notifications.set_mail("ann", "ann@example.org", events=[NoticeKind.COMPLETE], actor=ACTOR)
        office.start(NotificationSettings(mail=settings(server)))
        for owner in ("ann", "max"):
            writer = office.job(name=f"of-{owner}", owner=owner, team="red")
            writer.set_state(JobState.PAUSED)
            writer.set_state(JobState.COMPLETE)
        address = office.notifications.mail("ann")
        assert address is not None
        wait_until(lambda: any(each.error for each in office.deliveries(address)))
        server.refusal = None
        wait_until(lambda: [each.state for each in office.deliveries(address)] == [DeliveryState.DELIVERED])
        time.sleep(0.3)
        assert [message["Subject"] for message in server.messages] == ["of-ann is complete"]


def test_without_a_mail_server_a_mail_waits(office: Office) -> None:
    """A mail that a server without a mail server finds is tried again, as one with other options may follow."""
    office.staff()
    office.notifications.set_mail("ann", "ann@example.org", events=[NoticeKind.COMPLETE], actor=ACTOR)
    office.start()
    office.job(owner="ann").set_state(JobState.COMPLETE)
    address = office.notifications.mail("ann")
    assert address is not None
    wait_until(
        lambda: [each.error for each in office.deliveries(address)] == ["the server has no mail server (--smtp-url)"]
    )
