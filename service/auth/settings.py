"""Settings of the identity provider (OpenID Connect) with which users log in, from options of `mergesearch serve`."""

from __future__ import annotations

import re
from collections.abc import Iterable, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from service.errors import Conflict
from service.types import Role

__all__ = ["DEFAULT_SCOPES", "VARIABLE", "GroupRole", "OidcSettings", "is_protected", "oidc_settings", "public_address"]

# The variable with the client secret.
VARIABLE = "MERGESEARCH_OIDC_CLIENT_SECRET"

DEFAULT_SCOPES = "openid profile email"

LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class GroupRole:
    """Rule that gives all members of a group of the identity provider a role in a team of this server."""

    group: str
    team: str
    role: Role

    @classmethod
    def parse(cls, text: str) -> GroupRole:
        """Parse a text of the form GROUP=TEAM:ROLE: the rule that the members of a group have a role in a team.

        Raises ValueError if the text has another form.
        """
        group, _, place = text.rpartition("=")
        team, _, role = place.rpartition(":")
        if not re.fullmatch(r"[a-z0-9][a-z0-9._@+-]{0,63}", team) or not group or role not in list(Role):
            raise ValueError(
                f"{text!r:.120} is not GROUP=TEAM:ROLE; TEAM is the name of a team, ROLE is {', '.join(Role)}, as in "
                "search-users=red:member"
            )
        return cls(group, team, Role(role))


@dataclass(frozen=True)
class OidcSettings:
    """Settings of an identity provider (OpenID Connect), and the rights of its users on this server.

    - `issuer`: the provider's issuer identifier, a URL
    - `client_id`, `client_secret`: id and secret that this server got when it was registered at the provider
    - `scopes`: the OAuth scopes that a login requests, separated by spaces
    - `user_claim`: the claim that names the user; None for `preferred_username` or, without it, a verified `email`
    - `groups_claim`: the claim that lists the user's groups; None if logins change no memberships of teams
    - `teams`: the roles in teams that the members of groups get
    - `creates_users`: whether a user who logs in for the first time is added to the server
    - `public_url`: the URL under which browsers reach the server; None if the server takes the URL from each request
    """

    issuer: str
    client_id: str
    client_secret: str = field(repr=False)
    scopes: str = DEFAULT_SCOPES
    user_claim: str | None = None
    groups_claim: str | None = None
    teams: tuple[GroupRole, ...] = ()
    creates_users: bool = False
    public_url: str | None = None


def oidc_settings(
    *,
    issuer: str | None,
    client_id: str | None,
    secret_file: Path | None,
    scopes: str | None,
    user_claim: str | None,
    groups_claim: str | None,
    teams: Iterable[GroupRole],
    creates_users: bool,
    public_url: str | None,
    environment: MutableMapping[str, str],
) -> OidcSettings | None:
    """Make the settings of the identity provider from the options of `mergesearch serve`.

    Returns None if `issuer` is None: the server then has no identity provider.

    Args:
        issuer: The provider's issuer identifier, a URL.
        client_id: Id that this server got when it was registered at the provider.
        secret_file: File with the client secret; None if the secret is in a variable of `environment`.
        scopes: OAuth scopes that a login requests, separated by spaces; None for the default.
        user_claim: Claim of the ID token that names the user; None for `preferred_username` or a verified `email`.
        groups_claim: Claim that lists the user's groups; None if logins change no memberships of teams.
        teams: Roles in teams that the members of groups get.
        creates_users: Whether a user who logs in for the first time is added to the server.
        public_url: URL under which browsers reach the server; None if the server takes the URL from each request.
        environment: Environment variables. The variable with the client secret is removed, so that programs that this
            process starts do not get the secret.

    Raises:
        Conflict: Options are wrong or do not fit together.
    """
    teams = tuple(teams)
    others = {
        "--oidc-client-id": client_id,
        "--oidc-client-secret-file": secret_file,
        "--oidc-scopes": scopes,
        "--oidc-user-claim": user_claim,
        "--oidc-groups-claim": groups_claim,
        "--oidc-team": teams,
        "--oidc-create-users": creates_users,
    }
    secret = environment.pop(VARIABLE, "").strip()
    if issuer is None:
        if given := [option for option, value in others.items() if value]:
            raise Conflict(f"{given[0]}: has no effect without --oidc-issuer URL; give the provider's issuer too")
        return None
    if problem := _issuer_problem(issuer):
        raise Conflict(f"--oidc-issuer {problem}")
    if not client_id:
        raise Conflict("--oidc-client-id: is missing; give the id that the provider gave to this server")
    if secret_file is not None:
        secret = _secret_in(secret_file)
    if not secret:
        raise Conflict(
            f"client secret of --oidc-client-id {client_id}: is missing; set {VARIABLE}, or give "
            "--oidc-client-secret-file FILE"
        )
    scopes = DEFAULT_SCOPES if scopes is None else " ".join(scopes.split())
    if "openid" not in scopes.split():
        raise Conflict(f"--oidc-scopes {scopes!r}: does not have the scope openid; give for example {DEFAULT_SCOPES!r}")
    if bool(teams) != (groups_claim is not None):
        given_one, missing = ("--oidc-team", "--oidc-groups-claim CLAIM")
        if not teams:
            given_one, missing = "--oidc-groups-claim", "--oidc-team GROUP=TEAM:ROLE"
        raise Conflict(f"{given_one}: has no effect without {missing}; give both")
    return OidcSettings(
        issuer=issuer,
        client_id=client_id,
        client_secret=secret,
        scopes=scopes,
        user_claim=user_claim,
        groups_claim=groups_claim,
        teams=teams,
        creates_users=creates_users,
        public_url=public_url,
    )


def is_protected(url: str) -> bool:
    """Whether data sent to `url` are protected from other users of the network.

    The result is True for an HTTPS URL, and for an HTTP URL of this machine.
    """
    try:
        parts = urlsplit(url)
        return parts.hostname is not None and (
            parts.scheme == "https" or (parts.scheme == "http" and parts.hostname in LOOPBACK)
        )
    except ValueError:
        return False


def _parts(url: str) -> SplitResult | None:
    """Split an HTTP or HTTPS URL into its parts.

    Returns None if `url` is another text, or has a user, a query or a fragment.
    """
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("https", "http") and parts.hostname is not None and parts.username is None
    except ValueError:
        return None
    return parts if is_url and not parts.query and not parts.fragment else None


def _issuer_problem(url: str) -> str | None:
    if _parts(url) is None:
        return f"{url!r:.200}: is not the URL of a provider; give one such as https://login.example.org/realms/main"
    if not is_protected(url):
        return f"{url!r:.200}: is not https, so that others on the network could read secrets; give an https URL"
    return None


def public_address(url: str | None) -> str | None:
    """Value of the option --public-url without a slash at its end; None if the option is not given.

    Raises Conflict if the value is not the URL of a server.
    """
    if url is None:
        return None
    parts = _parts(url)
    if parts is not None and re.fullmatch(r"(/[A-Za-z0-9_.~-]+)*/?", parts.path):
        return url.rstrip("/")
    raise Conflict(
        f"--public-url {url!r:.200}: is not the URL of a server; give one such as https://search.example.org/mergesearch"
    )


def _secret_in(file: Path) -> str:
    try:
        secret = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise Conflict(f"--oidc-client-secret-file {file}: cannot be read: {error}") from error
    if not secret:
        raise Conflict(f"--oidc-client-secret-file {file}: is empty; write the client secret to it")
    return secret
