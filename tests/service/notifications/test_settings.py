"""The options of `serve` for notifications."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.errors import Conflict
from service.notifications.settings import VARIABLE, MailSettings, NotificationSettings, notification_settings

NOTHING: dict[str, Any] = {
    "allowed_hosts": (),
    "public_url": None,
    "smtp_url": None,
    "mail_from": None,
    "password_file": None,
    "allows_plain": False,
    "waiting_minutes": None,
}
MAIL = {**NOTHING, "smtp_url": "smtp://bot%40example.org@mail.example.org", "mail_from": "search@example.org"}


def mail(environment: dict[str, str] | None = None, **changes: Any) -> MailSettings:
    found = notification_settings(
        **{**MAIL, **changes}, environment={VARIABLE: "s"} if environment is None else environment
    )
    assert found.mail is not None
    return found.mail


def test_nothing_is_allowed_by_default() -> None:
    """Without options, webhooks reach public addresses only, no mails are sent, and a wait of 30 minutes is sent."""
    assert notification_settings(**NOTHING, environment={}) == NotificationSettings()
    assert NotificationSettings().waiting_s == 1800
    found = notification_settings(
        **{**NOTHING, "allowed_hosts": ["CI.internal"], "waiting_minutes": 1.5}, environment={}
    )
    assert (found.allowed_hosts, found.waiting_s) == (frozenset({"ci.internal"}), 90)


def test_the_password_is_taken_from_the_environment(tmp_path: Path) -> None:
    """The password is in no text of the settings, other programs do not inherit it, and a file precedes it."""
    environment = {VARIABLE: " s3cr3t\n", "HOME": "/"}
    found = mail(environment)
    expected = MailSettings("mail.example.org", 587, "search@example.org", user="bot@example.org", password="s3cr3t")
    assert found == expected
    assert environment == {"HOME": "/"}
    assert "s3cr3t" not in repr(found)
    file = tmp_path / "password"
    file.write_text("from-file\n")
    assert mail(password_file=file).password == "from-file"


def test_tls_is_required_beyond_this_machine() -> None:
    """STARTTLS is required unless the server is on this machine or the operator says otherwise."""
    assert mail().requires_tls
    assert not mail(allows_plain=True).requires_tls
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert not mail(smtp_url=f"smtp://{host}:2525").requires_tls
    secured = mail(smtp_url="smtps://mail.example.org")
    assert (secured.is_tls, secured.requires_tls, secured.port, secured.user) == (True, False, 465, None)
    assert mail(smtp_url="smtp://mail.example.org:25").port == 25


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"smtp_url": None}, "--mail-from: has no effect without --smtp-url URL; give the mail server too"),
        ({"smtp_url": None, "mail_from": None, "allows_plain": True}, "--smtp-plaintext: has no effect without"),
        ({"smtp_url": "mail.example.org"}, "--smtp-url 'mail.example.org': is not a mail server; give smtp://"),
        ({"smtp_url": "https://mail.example.org"}, "is not a mail server"),
        ({"smtp_url": "smtp://mail.example.org:0x1"}, "is not a mail server"),
        ({"smtp_url": "smtp://mail.example.org/path"}, "is not a mail server"),
        ({"smtp_url": "smtp://u:planted@mail.example.org"}, "--smtp-url: has a password, which every user of this"),
        ({"smtp_url": "smtp://u:planted@mail.example.org/?x"}, "--smtp-url 'smtp://...@mail.example.org/?x': is not"),
        ({"mail_from": None}, "--mail-from: is missing; give the address that mails are sent from"),
        ({"mail_from": "a@b\r\nBcc: c@d"}, r"--mail-from 'a@b\r\nBcc: c@d' is not an e-mail address"),
        ({"password_file": Path("/none")}, "--smtp-password-file /none: cannot be read"),
        ({"allowed_hosts": ["ci:8000"]}, "--webhook-allow 'ci:8000': is not a host"),
        ({"allowed_hosts": ["*"]}, "--webhook-allow '*': is not a host"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    """A wrong option is refused with its name and what is accepted, and without the password."""
    with pytest.raises(Conflict) as refused:
        mail({VARIABLE: "planted"}, **changes)
    assert message in str(refused.value)
    assert "planted" not in str(refused.value)


def test_a_user_without_a_password_is_refused() -> None:
    """A mail server with a user needs the password."""
    with pytest.raises(
        Conflict, match=r"names the user 'bot@example.org', whose password is missing; set MERGESEARCH_SMTP"
    ):
        mail({})
