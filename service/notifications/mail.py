"""Sends a mail about a job to a user."""

from __future__ import annotations

import json
import smtplib
import ssl
from email.message import EmailMessage
from email.policy import SMTP
from email.utils import formatdate
from typing import Any

from service.notifications.settings import MailSettings, address_problem
from service.notifications.webhooks import Outcome

__all__ = ["message_of", "send_mail"]

# Seconds for each step of the conversation with the mail server.
STEP_S = 20.0

MAX_SUBJECT, MAX_ERROR = 150, 300

# The words after a job's name in the subject.
HAPPENED = {
    "job.complete": "is complete",
    "job.failed": "has failed",
    "job.waiting": "waits",
    "job.paused": "is paused",
    "job.cancelled": "was cancelled",
}


def send_mail(settings: MailSettings, *, to: str, message_id: str, body: str) -> Outcome:
    """Try once to send the notification `body`, a JSON document, as a mail to the address `to`.

    The header Message-ID has `message_id`, which is the same at each try. The result says whether the mail server has
    accepted the mail. If not, the result contains the reason, and says whether further tries are useless because the
    mail server refuses the address for good.
    """
    if (problem := address_problem(to)) is not None:
        return Outcome(error=problem, is_final=True)
    message = message_of(json.loads(body), sender=settings.sender, to=to, message_id=message_id)
    try:
        with _connected(settings) as server:
            server.send_message(message, from_addr=settings.sender, to_addrs=[to])
    except smtplib.SMTPRecipientsRefused as error:
        code, reason = error.recipients[to]
        return Outcome(
            error=_shown(f"the mail server refuses the address: {code} {_text(reason)}"), is_final=code >= 500
        )
    except smtplib.SMTPResponseException as error:  # the text may quote what was sent, but not the password
        return Outcome(error=_shown(f"the mail server answers {error.smtp_code} {_text(error.smtp_error)}"))
    except (smtplib.SMTPException, OSError) as error:
        return Outcome(error=_shown(f"the mail server cannot be used: {error}"))
    return Outcome()


def message_of(document: dict[str, Any], *, sender: str, to: str, message_id: str) -> EmailMessage:
    """Make the mail that tells the user at the address `to` about the notification `document`.

    `sender` is the address in the header From. Names and reasons of jobs cannot add headers, because line ends are
    removed from them.
    """
    data = document["data"]
    message = EmailMessage(policy=SMTP)
    message["From"] = sender
    message["To"] = to
    message["Subject"] = _line(f"{data['name']} {HAPPENED[document['type']]}", MAX_SUBJECT)
    message["Date"] = formatdate()
    message["Message-ID"] = f"<{message_id}@{sender.rpartition('@')[2]}>"
    message["Auto-Submitted"] = "auto-generated"
    lines = [f"{_line(data['name'])} ({data['kind']}) {HAPPENED[document['type']]}.", ""]
    given = {
        "State": data["state"],
        "Reason": data["reason"],
        "Waits for": data["waiting_for"],
        "Time": document["timestamp"],
    }
    lines += [f"{name}: {_line(str(value))}" for name, value in given.items() if value]
    message.set_content("\n".join([*lines, f"Job: {data['url']}", f"Id: {data['id']}", ""]))
    return message


def _connected(settings: MailSettings) -> smtplib.SMTP:
    tls = ssl.create_default_context()
    if settings.is_tls:
        server: smtplib.SMTP = smtplib.SMTP_SSL(settings.host, settings.port, timeout=STEP_S, context=tls)
    else:
        server = smtplib.SMTP(settings.host, settings.port, timeout=STEP_S)
    try:
        server.ehlo()
        if settings.requires_tls:
            server.starttls(context=tls)  # raises if the server does not offer it
            server.ehlo()
        if settings.user is not None:
            server.login(settings.user, settings.password or "")
    except BaseException:
        server.close()
        raise
    return server


def _line(text: str, limit: int = 2000) -> str:
    """The text on one line, without control characters, of at most `limit` characters."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:limit]


def _text(reason: bytes | str) -> str:
    return reason.decode("utf-8", "replace") if isinstance(reason, bytes) else reason


def _shown(text: str) -> str:
    return _line(text, MAX_ERROR)
