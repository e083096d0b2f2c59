"""The identity provider as the options of `serve` describe it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.auth.settings import (
    DEFAULT_SCOPES,
    VARIABLE,
    GroupRole,
    OidcSettings,
    is_protected,
    oidc_settings,
    public_address,
)
from service.errors import Conflict
from service.types import Role

NOTHING: dict[str, Any] = {
    "issuer": None,
    "client_id": None,
    "secret_file": None,
    "scopes": None,
    "user_claim": None,
    "groups_claim": None,
    "teams": (),
    "creates_users": False,
    "public_url": None,
}
ISSUER = "https://login.example.org/realms/main"
WHOLE = {**NOTHING, "issuer": ISSUER, "client_id": "m"}


def test_the_secret_is_taken_from_the_environment() -> None:
    """The client secret is in no text of the settings, and other programs do not inherit it."""
    environment = {VARIABLE: " s3cr3t\n", "HOME": "/"}
    found = oidc_settings(**WHOLE, environment=environment)
    assert found == OidcSettings(ISSUER, "m", "s3cr3t", DEFAULT_SCOPES)
    assert environment == {"HOME": "/"}
    assert "s3cr3t" not in repr(found)
    assert oidc_settings(**NOTHING, environment={VARIABLE: "s3cr3t"}) is None


def test_the_secret_may_be_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-file\n")
    found = oidc_settings(**{**WHOLE, "secret_file": file}, environment={VARIABLE: "other"})
    assert found is not None
    assert found.client_secret == "from-file"
    file.write_text("\n")
    with pytest.raises(Conflict, match=r"--oidc-client-secret-file .*secret: is empty"):
        oidc_settings(**{**WHOLE, "secret_file": file}, environment={})
    with pytest.raises(Conflict, match=r"--oidc-client-secret-file .*none: cannot be read"):
        oidc_settings(**{**WHOLE, "secret_file": tmp_path / "none"}, environment={})


TEAM = GroupRole("g", "red", Role.VIEWER)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"issuer": None}, "--oidc-client-id: has no effect without --oidc-issuer"),
        ({"issuer": None, "client_id": None, "creates_users": True}, "--oidc-create-users: has no effect without"),
        ({"issuer": "login.example.org"}, "--oidc-issuer 'login.example.org': is not the URL of a provider"),
        ({"issuer": "https://u:p@login.example.org"}, "is not the URL of a provider"),
        ({"issuer": "http://login.example.org"}, "--oidc-issuer 'http://login.example.org': is not https"),
        ({"client_id": ""}, "--oidc-client-id: is missing"),
        ({"scopes": "profile email"}, "--oidc-scopes 'profile email': does not have the scope openid"),
        ({"groups_claim": "groups"}, "--oidc-groups-claim: has no effect without --oidc-team GROUP=TEAM:ROLE"),
        ({"teams": (TEAM,)}, "--oidc-team: has no effect without --oidc-groups-claim CLAIM"),
    ],
)
def test_options_that_do_not_fit_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Conflict) as refused:
        oidc_settings(**{**WHOLE, **changes}, environment={VARIABLE: "s3cr3t"})
    assert message in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_the_secret_must_be_given() -> None:
    with pytest.raises(Conflict, match=rf"client secret of --oidc-client-id m: is missing; set {VARIABLE}"):
        oidc_settings(**WHOLE, environment={})


def test_roles_of_groups_are_read() -> None:
    """A group may have any characters; the last = separates it from the team."""
    assert GroupRole.parse("cn=search,dc=x=red:admin") == GroupRole("cn=search,dc=x", "red", Role.ADMIN)
    for text in ("g", "g=red", "=red:member", "g=red:owner", "g=Red:member", "g=:member"):
        with pytest.raises(ValueError, match="is not GROUP=TEAM:ROLE"):
            GroupRole.parse(text)


def test_only_this_machine_needs_no_https() -> None:
    for url in ("https://x.example.org", "http://localhost:1/a", "http://127.0.0.1", "http://[::1]:2"):
        assert is_protected(url)
    for url in (
        "http://x.example.org",
        "http://localhost.example.org",
        "ftp://localhost",
        "",
        "https://",
        "http://[::1",
    ):
        assert not is_protected(url)


def test_the_public_url_is_that_of_a_server() -> None:
    """The public URL has no slash at its end; a text that is no URL of a server is refused."""
    assert public_address(None) is None
    assert public_address("https://search.example.org/merges/") == "https://search.example.org/merges"
    for url in ("search.example.org", "https://search.example.org/?a"):
        with pytest.raises(Conflict, match=r"--public-url '.*': is not the URL of a server; give one such as"):
            public_address(url)
