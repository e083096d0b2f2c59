"""`mergesearch users`, `teams` and `tokens`, which work on the database of a server."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.auth.tokens import digest_of, new_token
from service.store import Store
from service.store.accounts import AccountStore
from service.types import Scope
from tests.service.cli.terminals import Terminal


@pytest.fixture
def terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.delenv("MERGESEARCH_DATABASE", raising=False)
    return Terminal(capsys)


@pytest.fixture
def accounts(tmp_path: Path) -> Iterator[AccountStore]:
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    yield AccountStore(store)
    store.close()


def test_the_first_administrator_and_a_team(terminal: Terminal, tmp_path: Path, accounts: AccountStore) -> None:
    """An operator makes an administrator, a user and a team, and sees them in lists."""
    on = ("--data", tmp_path)
    code, _, err = terminal.run("users", "add", "bob", *on)
    assert (code, "the first user must be an administrator" in err) == (2, True)
    assert terminal.run("users", "add", "ann", "--admin", *on)[0] == 0
    assert terminal.run("users", "add", "bob", *on)[0] == 0
    assert terminal.run("teams", "add", "red", *on)[0] == 0
    assert terminal.run("teams", "set", "red", "bob", "member", *on)[0] == 0
    users = terminal.run("users", "list", *on)[1].splitlines()
    assert [line.split() for line in users[1:]] == [["ann", "administrator"], ["bob", "red", "(member)"]]
    (team,) = json.loads(terminal.run("teams", "list", *on, "--json")[1])
    assert (team["name"], team["members"]) == ("red", {"bob": "member"})
    code, _, err = terminal.run("users", "demote", "ann", *on)
    assert (code, "is the last administrator" in err) == (2, True)
    assert terminal.run("teams", "set", "red", "bob", "none", *on)[0] == 0
    assert terminal.run("teams", "remove", "red", *on)[0] == 0
    assert terminal.run("users", "disable", "bob", *on)[0] == 0
    assert [user.is_disabled for user in accounts.users()] == [False, True]
    assert {entry.user for entry in accounts.audit()} == {None}
    assert all(entry.origin.startswith("command of ") for entry in accounts.audit())


def test_a_token_is_printed_once(terminal: Terminal, tmp_path: Path, accounts: AccountStore) -> None:
    """A new token is the whole standard output; lists show its beginning, and it can be revoked by that."""
    on = ("--data", tmp_path)
    terminal.run("users", "add", "ann", "--admin", *on)
    code, out, err = terminal.run("tokens", "create", "--user", "ann", "--scope", "admin", "--expires", 30, *on)
    token = out.strip()
    assert (code, err) == (0, "this is the only time that the token is shown\n")
    found = accounts.find_token(digest_of(token))
    assert found is not None
    record = found[0]
    assert record.scope is Scope.ADMIN
    assert record.expires_at == pytest.approx(record.created_at + 30 * 86400)
    listed = terminal.run("tokens", "list", *on)[1]
    assert token[:10] in listed
    assert token not in listed + terminal.run("tokens", "list", "--user", "ann", "--json", *on)[1]
    assert "never" in listed
    assert terminal.run("tokens", "revoke", token[:10], *on)[0] == 0
    assert accounts.find_token(digest_of(token)) is None
    code, _, err = terminal.run("tokens", "revoke", "none", *on)
    assert (code, err) == (2, "mergesearch: token 'none': give the id or the prefix of one token; no token has it\n")


def test_a_deployment_gives_its_administrator(terminal: Terminal, tmp_path: Path, accounts: AccountStore) -> None:
    """A deployment's command may run at every start; another token replaces that of the last start."""
    file, tokens = tmp_path / "token", [new_token(), new_token()]
    command = ("users", "add", "admin", "--admin", "--if-absent", "--token-file", file, "--data", tmp_path)
    for token in (tokens[0], tokens[0], tokens[1], tokens[1]):
        file.write_text(f"{token.secret}\n")
        code, out, err = terminal.run(*command)
        assert (code, err) == (0, "")
        assert token.secret not in out
        assert accounts.find_token(token.digest) is not None
    assert accounts.find_token(tokens[0].digest) is None
    assert len(accounts.tokens()) == 2
    file.write_text("short")
    code, _, err = terminal.run(*command)
    assert code == 2
    assert err.startswith(f"mergesearch: --token-file {file}: not a token")


def test_the_database_must_be_named(terminal: Terminal, tmp_path: Path) -> None:
    code, _, err = terminal.run("users", "list")
    assert (code, "give the server's --data or --database, or set MERGESEARCH_DATABASE" in err) == (2, True)
    code, _, err = terminal.run("users", "list", "--data", tmp_path / "missing")
    assert (code, "is not a directory" in err) == (2, True)
    assert terminal.run("users", "list", "--database", f"sqlite:///{tmp_path}/new.db")[0] == 0
    code, _, err = terminal.run("users", "add", "Ann", "--admin", "--data", tmp_path)
    assert (code, "'Ann' is not a name" in err) == (2, True)
    assert os.listdir(tmp_path) == ["new.db"]
