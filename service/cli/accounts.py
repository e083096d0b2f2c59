"""Commands `users`, `teams` and `tokens`, which change the server's database directly, and the command `login`.

Every system user who can open the database may use the first three commands. They create the first administrator, and
replace lost tokens.
"""

from __future__ import annotations

import argparse
import getpass
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from service.auth.tokens import given_token, new_token
from service.cli.terminal import console, print_json
from service.client import Client
from service.client.credentials import TOKEN_VARIABLE, forget_token, store_token
from service.client.transport import address
from service.errors import Conflict, NotFound
from service.types import NO_IDENTITY, LoginRule, Role, Scope, TeamLimits

if TYPE_CHECKING:
    from service.auth.tokens import NewToken
    from service.store.accounts import AccountStore, Actor
    from service.types import TeamRecord, TokenRecord, UserRecord

__all__ = [
    "NO_LIMIT",
    "add_team",
    "add_user",
    "change_user",
    "create_token",
    "limit_team",
    "list_teams",
    "list_tokens",
    "list_users",
    "login",
    "logout",
    "remove_team",
    "revoke_token",
    "set_role",
]

DAY_S = 86_400.0

# The value of a quota that is lifted.
NO_LIMIT = "none"

# Name of the token that a deployment gives to its first administrator; another one replaces it.
DEPLOYED = "deployment"


def list_users(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, _):
        return _print_users(options, accounts.users())


def add_user(options: argparse.Namespace) -> int:
    token = None
    if options.token_file is not None:
        try:
            token = given_token(options.token_file.read_text().strip())
        except ValueError as error:
            raise Conflict(f"--token-file {options.token_file}: {error}") from error
    with _accounts(options) as (accounts, actor):
        if options.if_absent and any(user.name == options.name for user in accounts.users()):
            user = accounts.user(options.name)
            if options.login is not None:
                user = _with_login(accounts, user, LoginRule(options.login), actor)
        else:
            login = LoginRule(options.login or LoginRule.FIRST)
            user = accounts.add_user(options.name, is_admin=options.admin, actor=actor, login=login)
        if token is not None:
            _deploy(accounts, user, token, options.token_scope, actor)
        return _print_users(options, [user], one=True)


def _with_login(accounts: AccountStore, user: UserRecord, rule: LoginRule, actor: Actor) -> UserRecord:
    """Set which identity of the identity provider can log in as an existing user, and return the user.

    If this ends the logins of an identity, a message on standard error names the identity.
    """
    changed = accounts.set_login(user.name, rule, actor=actor)
    if changed.identity == NO_IDENTITY and user.identity not in (None, NO_IDENTITY):
        print(
            f"mergesearch: user {user.name!r}: the identity {user.identity!r} of the identity provider had logged in "
            "as this user, and cannot any more; look into the audit log and `mergesearch tokens list` for what it did",
            file=sys.stderr,
        )
    return changed


def _deploy(accounts: AccountStore, user: UserRecord, token: NewToken, scope: str, actor: Actor) -> None:
    """Store `token`, which an operator has made for a deployment, as a token of the user `user`.

    The token comes, for example, from a Kubernetes secret. Earlier tokens of the deployment are revoked. If `token`
    itself is stored already, it is not changed. If an administrator has revoked it, nothing is changed, and the
    deployment starts without it. `scope` is the name of the token's scope, which says for which requests the token can
    be used. `accounts` is the account store, and `actor` is who makes the change, for the audit log. Raises Conflict if
    `token` is a token of another user.
    """
    known = accounts.known_token(token.digest)
    if known is not None and known.user != user.name:
        raise Conflict(f"--token-file: the token {token.prefix}... is one of user {known.user!r}; give another one")
    if known is not None and known.revoked_at is not None:
        print(
            f"mergesearch: --token-file: the token {token.prefix}... is revoked, and stays so; if the deployment needs "
            "one, write another one to the file",
            file=sys.stderr,
        )
        return
    for other in accounts.tokens(user.name):
        is_this = known is not None and other.id == known.id
        if other.name == DEPLOYED and other.revoked_at is None and not is_this:
            accounts.revoke_token(other.id, actor=actor)
    if known is None:
        accounts.add_token(
            user.name,
            name=DEPLOYED,
            digest=token.digest,
            prefix=token.prefix,
            scope=Scope(scope),
            lifetime_s=None,
            actor=actor,
        )


def change_user(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, actor):
        user = accounts.change_user(
            options.name, is_admin=options.is_admin, is_disabled=options.is_disabled, actor=actor
        )
        return _print_users(options, [user], one=True)


def unbind_user(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, actor):
        return _print_users(options, [accounts.unbind_identity(options.name, actor=actor)], one=True)


def list_teams(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, _):
        return _print_teams(options, accounts.teams())


def add_team(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, actor):
        return _print_teams(options, [accounts.add_team(options.team, actor=actor)], one=True)


def remove_team(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, actor):
        accounts.remove_team(options.team, actor=actor)
    print_json({"removed": options.team}) if options.json else print(f"removed: team {options.team}")
    return 0


def set_role(options: argparse.Namespace) -> int:
    role = None if options.role == "none" else Role(options.role)
    with _accounts(options) as (accounts, actor):
        return _print_teams(options, [accounts.set_role(options.team, options.user, role, actor=actor)], one=True)


def limit_team(options: argparse.Namespace) -> int:
    given = {part.name: getattr(options, part.name) for part in fields(TeamLimits)}
    changes = {name: None if value == NO_LIMIT else value for name, value in given.items() if value is not None}
    if not changes:
        raise Conflict(
            "nothing to change: give at least one of the options that `mergesearch teams limit --help` lists"
        )
    with _accounts(options) as (accounts, actor):
        return _print_teams(options, [accounts.set_limits(options.team, changes, actor=actor)], one=True)


def list_tokens(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, _):
        if options.user is not None:
            accounts.user(options.user)
        return _print_tokens(options, accounts.tokens(options.user))


def create_token(options: argparse.Namespace) -> int:
    token = new_token()
    with _accounts(options) as (accounts, actor):
        record = accounts.add_token(
            options.user,
            name=options.name,
            digest=token.digest,
            prefix=token.prefix,
            scope=Scope(options.scope),
            lifetime_s=None if options.expires is None else options.expires * DAY_S,
            actor=actor,
        )
    if options.json:
        print_json({**asdict(record), "token": token.secret})
    else:
        print(token.secret)
        print("this is the only time that the token is shown", file=sys.stderr)
    return 0


def revoke_token(options: argparse.Namespace) -> int:
    with _accounts(options) as (accounts, actor):
        found = [
            token for token in accounts.tokens() if token.id.startswith(options.token) or token.prefix == options.token
        ]
        if len(found) != 1:
            kind = "no token has it" if not found else f"{len(found)} tokens have it"
            raise NotFound(f"token {options.token!r:.80}: give the id or the prefix of one token; {kind}")
        return _print_tokens(options, [accounts.revoke_token(found[0].id, actor=actor)], one=True)


def login(options: argparse.Namespace) -> int:
    from service.cli.remote import server_url

    url = server_url(options.server)
    if options.token_file is not None:
        token = _first_line(options.token_file)
    elif (given := os.environ.get(TOKEN_VARIABLE)) or not sys.stdin.isatty():  # a program is never asked
        token = given or ""
    else:
        token = getpass.getpass(f"token for {url}: ").strip()
    if not token:
        raise Conflict(f"token: is missing; set {TOKEN_VARIABLE}, or give --token-file FILE, where - is standard input")
    with Client(url, token=token) as client:
        user = client.me()["user"]
        if user is None:
            raise Conflict(f"{client.url}: the server has no accounts, so that no token is needed")
        file = store_token(client.url, token)
    if options.json:
        print_json({"server": client.url, "user": user["name"], "file": str(file)})
    else:
        print(f"{client.url}: logged in as {user['name']}; the token is in {file}")
    return 0


def logout(options: argparse.Namespace) -> int:
    from service.cli.remote import server_url

    url = address(server_url(options.server))
    was_there = forget_token(url)
    if options.json:
        print_json({"server": url, "removed": was_there})
    else:
        print(f"{url}: {'the token was removed from this machine' if was_there else 'there was no token'}")
    return 0


# -- helpers -----------------------------------------------------------------------------------------------------------


def _first_line(file: Path) -> str:
    """First line of `file` without spaces around it; if `file` is `-`, the first line of standard input."""
    if str(file) == "-":
        return sys.stdin.readline().strip()
    return file.read_text().partition("\n")[0].strip()


@contextmanager
def _accounts(options: argparse.Namespace) -> Iterator[tuple[AccountStore, Actor]]:
    """Context for a command that reads or changes accounts; it yields the account store and the actor.

    The store is in the database that the command-line `options` name. The actor is the text by which the audit log
    names the originator of a change: here the user and the machine of the command. The database is created if it does
    not exist, since the first administrator is added before the server's first start.
    """
    from service.store import Store
    from service.store.accounts import AccountStore, Actor
    from service.store.database_url import VARIABLE, database_url, parse_url

    url = options.database or os.environ.get(VARIABLE)
    if options.data is not None:
        if not options.data.is_dir():
            raise NotFound(f"--data {options.data}: is not a directory; give the data directory of the server")
        address = database_url(options.data.resolve(), options.database)
    elif url:
        address = parse_url(url)
    else:
        raise Conflict(f"database: none is named; give the server's --data or --database, or set {VARIABLE}")
    store = Store(address)
    try:
        yield AccountStore(store), Actor(None, f"command of {getpass.getuser()} on {socket.gethostname()}")
    finally:
        store.close()


def _print_users(options: argparse.Namespace, users: Sequence[UserRecord], *, one: bool = False) -> int:
    rows = [
        [user.name, "disabled" if user.is_disabled else "administrator" if user.is_admin else "", _roles(user.roles)]
        for user in users
    ]
    return _print(options, [asdict(user) for user in users], ("user", "rights", "teams"), rows, one=one)


def _print_teams(options: argparse.Namespace, teams: Sequence[TeamRecord], *, one: bool = False) -> int:
    rows = [[team.name, _roles(team.members), _limits(team.limits)] for team in teams]
    return _print(options, [asdict(team) for team in teams], ("team", "members", "limits"), rows, one=one)


def _print_tokens(options: argparse.Namespace, tokens: Sequence[TokenRecord], *, one: bool = False) -> int:
    now = time.time()
    rows = [
        [token.prefix, token.user, token.name, token.scope.value, _state(token, now), _day(token.last_used_at)]
        for token in tokens
    ]
    columns = ("token", "user", "name", "scope", "state", "last used")
    return _print(options, [asdict(token) for token in tokens], columns, rows, one=one)


def _print(
    options: argparse.Namespace,
    documents: list[dict[str, Any]],
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    one: bool,
) -> int:
    """Print records as a table or, with the option --json, as JSON; return the exit code 0.

    `options` are the parsed command line. `documents` are the records for JSON. `columns` has the header of the table,
    and `rows` has its cells. If `one` is True, there is a single record, and the JSON is this record instead of a list.
    """
    if options.json:
        print_json(documents[0] if one else documents)
        return 0
    from rich.table import Table

    table = Table(*columns, box=None, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console().print(table)
    return 0


def _roles(roles: Any) -> str:
    return ", ".join(f"{name} ({role})" for name, role in sorted(roles.items()))


def _limits(limits: TeamLimits) -> str:
    """Text of a team's weight and quotas, such as "weight 2, max_running 2"; quotas that are not set are left out."""
    return ", ".join(f"{name} {value:g}" for name, value in asdict(limits).items() if value is not None)


def _state(token: TokenRecord, now: float) -> str:
    if token.revoked_at is not None:
        return "revoked"
    if token.expires_at is None:
        return "valid"
    return f"{'valid until' if token.is_valid(now=now) else 'expired'} {_day(token.expires_at)}"


def _day(at: float | None) -> str:
    return "never" if at is None else time.strftime("%Y-%m-%d", time.gmtime(at))
