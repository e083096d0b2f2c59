"""Options of `mergesearch serve` about notifications: hosts of webhooks, mail server, reports of long waits."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from service.errors import Conflict

__all__ = [
    "VARIABLE",
    "WAITING_S",
    "MailSettings",
    "NotificationSettings",
    "address_problem",
    "notification_settings",
]

# The variable with the password at the mail server.
VARIABLE = "MERGESEARCH_SMTP_PASSWORD"

# Seconds after which users are notified of a job that waits.
WAITING_S = 1800.0

LOOPBACK = ("localhost", "127.0.0.1", "::1")
PORTS = {"smtp": 587, "smtps": 465}

_ADDRESS = re.compile(r"[A-Za-z0-9.!#$%&'*+/=?^_`{|}~-]{1,64}@[A-Za-z0-9-]{1,63}(\.[A-Za-z0-9-]{1,63})*")
_HOST = re.compile(r"[a-z0-9._-]{1,253}|[0-9a-f:.]{2,45}")


@dataclass(frozen=True)
class MailSettings:
    """The mail server that sends mails to users, and the sender's address.

    `is_tls` says whether the connection is encrypted from its beginning; otherwise STARTTLS is required if
    `requires_tls` is True. `user` and `password` are None for a server that needs no login.
    """

    host: str
    port: int
    sender: str
    is_tls: bool = False
    requires_tls: bool = True
    user: str | None = None
    password: str | None = field(default=None, repr=False)


@dataclass(frozen=True)
class NotificationSettings:
    """Settings of the webhooks and mails by which a server tells users about their jobs.

    - `allowed_hosts`: hosts that webhooks may reach even if the host has a private address or the URL is http, which is
      refused for all other hosts
    - `public_url`: URL under which users reach the server; None if it is not known
    - `mail`: the mail server; None if no mails are sent
    - `waiting_s`: seconds that a job must wait for one unchanged reason before a notification is sent
    """

    allowed_hosts: frozenset[str] = frozenset()
    public_url: str | None = None
    mail: MailSettings | None = None
    waiting_s: float = WAITING_S


def notification_settings(
    *,
    allowed_hosts: Iterable[str],
    public_url: str | None,
    smtp_url: str | None,
    mail_from: str | None,
    password_file: Path | None,
    allows_plain: bool,
    waiting_minutes: float | None,
    environment: MutableMapping[str, str],
) -> NotificationSettings:
    """Make the settings of notifications from the options of `mergesearch serve`.

    Args:
        allowed_hosts: Hosts that webhooks may reach even if the host has a private address or the URL is http.
        public_url: URL under which users reach the server; None if it is not known.
        smtp_url: URL of the mail server; None sends no mails.
        mail_from: Address of the sender of mails.
        password_file: File with the password at the mail server; None if the password is in a variable of
            `environment`.
        allows_plain: Whether mails and the password may be sent without TLS, also to another machine.
        waiting_minutes: Minutes after which users are notified of a job that waits; None uses the default.
        environment: Environment variables. The variable with the password is removed, so that programs that this
            process starts do not get the password.

    Raises:
        Conflict: Options are wrong or do not fit together.
    """
    password = environment.pop(VARIABLE, "").strip() or None
    hosts = frozenset(host.lower() for host in allowed_hosts)
    for host in hosts:
        if not _HOST.fullmatch(host):
            raise Conflict(
                f"--webhook-allow {host!r:.200}: is not a host; give a name or an address, such as ci.internal"
            )
    others = {"--mail-from": mail_from, "--smtp-password-file": password_file, "--smtp-plaintext": allows_plain}
    mail = None
    if smtp_url is not None:
        mail = _mail(smtp_url, mail_from, password_file, password, allows_plain=allows_plain)
    elif given := [option for option, value in others.items() if value]:
        raise Conflict(f"{given[0]}: has no effect without --smtp-url URL; give the mail server too")
    waiting_s = WAITING_S if waiting_minutes is None else 60 * waiting_minutes
    return NotificationSettings(hosts, public_url, mail, waiting_s)


def address_problem(address: str) -> str | None:
    """Reason why a text is not an e-mail address that mails can be sent to; None if it is such an address."""
    if len(address) <= 254 and _ADDRESS.fullmatch(address):
        return None
    return f"{address!r:.120} is not an e-mail address; give one such as ann@example.org, in ASCII"


def _mail(
    url: str, sender: str | None, password_file: Path | None, password: str | None, *, allows_plain: bool
) -> MailSettings:
    try:
        parts = urlsplit(url)
        port, host = parts.port or PORTS.get(parts.scheme), parts.hostname
    except ValueError:
        port = host = None
    if port is None or not host or parts.path.strip("/") or parts.query or parts.fragment:
        shown = re.sub(r"//[^@/]*@", "//...@", url)
        raise Conflict(
            f"--smtp-url {shown!r:.200}: is not a mail server; give smtp://USER@HOST:PORT or smtps://USER@HOST"
        )
    if parts.password is not None:
        raise Conflict(
            f"--smtp-url: has a password, which every user of this machine can read; set {VARIABLE}, or give "
            "--smtp-password-file FILE"
        )
    if sender is None:
        raise Conflict("--mail-from: is missing; give the address that mails are sent from")
    if problem := address_problem(sender):
        raise Conflict(f"--mail-from {problem}")
    user = unquote(parts.username) if parts.username else None
    if user is not None and password_file is not None:
        password = _password_in(password_file)
    if user is not None and password is None:
        raise Conflict(
            f"--smtp-url: names the user {user!r:.80}, whose password is missing; set {VARIABLE}, or give a file"
        )
    is_tls = parts.scheme == "smtps"
    requires_tls = not is_tls and host not in LOOPBACK and not allows_plain
    return MailSettings(host, port, sender, is_tls, requires_tls, user, password if user is not None else None)


def _password_in(file: Path) -> str:
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Conflict(f"--smtp-password-file {file}: cannot be read: {error}") from error
    if not password:
        raise Conflict(f"--smtp-password-file {file}: is empty; write the password to it")
    return password
