"""`mergesearch users`, `teams` and `tokens`, which work on the database of a server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.auth.tokens import digest_of, new_token
from service.errors import Conflict
from service.server import _protection, serve
from service.store import Store
from service.store.accounts import AccountStore, Actor
from service.types import Scope
from tests.service.api.accounts import OPERATOR, Company
from tests.service.api.harness import ApiServer, stored_study
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


def test_limits_of_a_team_are_changed(terminal: Terminal, tmp_path: Path, accounts: AccountStore) -> None:
    """Options that are left out keep their values, none lifts a quota, and each change has an audit entry."""
    on = ("--data", tmp_path)
    terminal.run("teams", "add", "red", *on)
    changed = ("--weight", 2, "--max-running", 2, "--max-served", 9, "--gpu-hours", 500, "--artifact-bytes", "2GiB")
    assert terminal.run("teams", "limit", "red", *changed, *on)[0] == 0
    document = json.loads(terminal.run("teams", "limit", "red", "--gpu-hours", "none", *on, "--json")[1])
    assert document["limits"] == {
        "weight": 2.0,
        "max_running": 2,
        "max_replicas": None,
        "max_served": 9,
        "gpu_hours": None,
        "artifact_bytes": 2**31,
        "export_bytes": None,
        "requests_per_minute": None,
    }
    listed = terminal.run("teams", "list", *on)[1]
    assert "weight 2, max_running 2" in " ".join(listed.split())
    entries = accounts.audit(target="team red")
    assert [entry.action for entry in entries] == ["team.add", "team.limit", "team.limit"]
    code, _, err = terminal.run("teams", "limit", "red", *on)
    assert (code, "nothing to change" in err) == (2, True)
    code, _, err = terminal.run("teams", "limit", "blue", "--weight", 2, *on)
    assert (code, err) == (2, "mergesearch: team 'blue': there is no such team\n")


@pytest.mark.parametrize("option", [("--weight", 0), ("--weight", "none"), ("--max-running", 0), ("--gpu-hours", "x")])
def test_impossible_limits_are_refused(option: tuple[str, object], terminal: Terminal, tmp_path: Path) -> None:
    """Numbers that are not above 0 are refused, and a weight is always a number."""
    code, _, err = terminal.run("teams", "limit", "red", *option, "--data", tmp_path)
    assert (code, f"argument {option[0]}" in err) == (2, True)


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
    for token in (tokens[0], tokens[1]):  # the earlier one, and one that an administrator revokes
        if token is tokens[1]:
            accounts.revoke_token(accounts.tokens()[1].id, actor=OPERATOR)
        file.write_text(token.secret)
        code, _, err = terminal.run(*command)
        assert (code, f"the token {token.prefix}... is revoked, and stays so" in err) == (0, True)
        assert (accounts.find_token(tokens[1].digest) is not None) == (token is tokens[0])
    accounts.add_user("bob", is_admin=False, actor=OPERATOR)
    code, _, err = terminal.run("users", "add", "bob", "--if-absent", "--token-file", file, "--data", tmp_path)
    assert (code, "is one of user 'admin'; give another one" in err) == (2, True)
    file.write_text("short")
    code, _, err = terminal.run(*command)
    assert code == 2
    assert err.startswith(f"mergesearch: --token-file {file}: not a token")


def test_a_deployment_closes_logins_as_its_users(terminal: Terminal, tmp_path: Path, accounts: AccountStore) -> None:
    """Users whom an earlier version left open are closed, once; an administrator who has logged in still may."""
    on = ("--admin", "--if-absent", "--data", tmp_path)
    for name in ("admin", "monitoring"):  # as earlier versions added them
        terminal.run("users", "add", name, *on)
    for name, rule in (("admin", "known"), ("monitoring", "never"), ("new", "known")):
        for _ in range(2):
            assert terminal.run("users", "add", name, *on, "--login", rule)[::2] == (0, "")
        with pytest.raises(Conflict, match=f"user '{name}': nobody can log in .* add {name} --if-absent --login first"):
            accounts.bind_identity(name, "https://login.example.org 1", actor=OPERATOR)
    assert [entry.action for entry in accounts.audit()] == ["user.add"] * 2 + ["user.bind"] * 2 + ["user.add"]
    code, _, err = terminal.run("users", "unbind", "monitoring", "--data", tmp_path)
    assert (code, "nobody can log in as this user" in err) == (2, True)
    for name, rule, remains in (("admin", "known", True), ("monitoring", "never", False)):
        assert terminal.run("users", "add", name, *on, "--login", "first")[::2] == (0, "")
        accounts.bind_identity(name, "https://login.example.org 1", actor=OPERATOR)
        code, _, err = terminal.run("users", "add", name, *on, "--login", rule)
        lost = "the identity 'https://login.example.org 1' of the identity provider had logged in as this user"
        assert (code, lost in err) == (0, not remains)
        assert (accounts.user(name).identity == "https://login.example.org 1") is remains


def test_login_stores_a_token_that_works(terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`login` checks the token and stores it; commands then send it, until `logout`."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("MERGESEARCH_TOKEN", raising=False)
    file = tmp_path / "token"
    (tmp_path / "data").mkdir()
    with ApiServer(tmp_path / "data") as server:
        at = ("--server", server.url)
        file.write_text(new_token().secret)
        code, _, err = terminal.run("login", *at, "--token-file", file)
        assert (code, "the server has no accounts" in err) == (2, True)
        company = Company.on(server)
        study = company.own(stored_study(server.store))
        time.sleep(0.6)
        code, _, err = terminal.run("studies", *at)
        assert (code, "`mergesearch login`" in err) == (2, True)
        code, _, err = terminal.run("login", *at, "--token-file", file)
        assert (code, "the token is not valid" in err) == (2, True)
        code, _, err = terminal.run("login", *at)  # standard input is no terminal: nothing is asked
        assert (code, "token: is missing; set MERGESEARCH_TOKEN" in err) == (2, True)
        file.write_text(company.tokens["owner", Scope.SUBMIT] + "\n")
        code, out, err = terminal.run("login", *at, "--token-file", file)
        assert (code, err) == (0, "")
        assert out.startswith(f"{server.url}: logged in as owner; the token is in {tmp_path}")
        assert study.name in terminal.run("studies", *at)[1]
        code, out, _ = terminal.run("share", study.id, "all", *at)
        assert (code, out) == (0, f"study {study.name}: {study.id}, team red, shared: all\n")
        monkeypatch.setenv("MERGESEARCH_TOKEN", company.tokens["stranger", Scope.SUBMIT])
        code, _, err = terminal.run("cancel", study.id, *at)
        assert (code, "only its owner and administrators may change it" in err) == (2, True)
        monkeypatch.delenv("MERGESEARCH_TOKEN")
        assert terminal.run("logout", *at)[1] == f"{server.url}: the token was removed from this machine\n"
        assert terminal.run("studies", *at)[0] == 2


def test_the_server_is_not_open_by_accident(tmp_path: Path) -> None:
    """On an address that others reach, the server starts without a user only with `--no-accounts`."""
    for host in ("0.0.0.0", "::"):
        with pytest.raises(Conflict, match=rf"--host {host}: others can reach this address, .* has no user; add an"):
            serve(tmp_path, host=host, port=0)
    store = Store(f"sqlite:///{tmp_path / 'mergesearch.db'}")
    assert "every user of this machine may do everything" in _protection(store, "127.0.0.1", has_accounts=True)
    assert "every user of this machine may do everything" in _protection(store, "localhost", has_accounts=True)
    assert "(--no-accounts): everybody" in _protection(store, "0.0.0.0", has_accounts=False)
    AccountStore(store).add_user("ann", is_admin=True, actor=Actor(None, "test"))
    for host in ("0.0.0.0", "127.0.0.1"):
        assert _protection(store, host, has_accounts=True).startswith("requests need a token")
    store.close()


def test_an_identity_provider_needs_accounts(
    terminal: Terminal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Options of a login that contradict others end the server, and no message has the client secret."""
    monkeypatch.setenv("MERGESEARCH_OIDC_CLIENT_SECRET", "s3cr3t")
    login = ("--oidc-issuer", "https://login.example.org", "--oidc-client-id", "m")
    for options, message in (
        ((*login, "--no-accounts"), "--oidc-issuer https://login.example.org: has no effect with --no-accounts"),
        (("--oidc-create-users",), "--oidc-create-users: has no effect without --oidc-issuer"),
        ((*login, "--oidc-team", "g=red:owner"), "argument --oidc-team: 'g=red:owner' is not GROUP=TEAM:ROLE"),
    ):
        code, out, err = terminal.run("serve", "--data", tmp_path, "--port", 0, *options)
        assert (code, message in err, "s3cr3t" in out + err) == (2, True, False)


def test_the_database_must_be_named(terminal: Terminal, tmp_path: Path) -> None:
    code, _, err = terminal.run("users", "list")
    assert (code, "give the server's --data or --database, or set MERGESEARCH_DATABASE" in err) == (2, True)
    code, _, err = terminal.run("users", "list", "--data", tmp_path / "missing")
    assert (code, "is not a directory" in err) == (2, True)
    assert terminal.run("users", "list", "--database", f"sqlite:///{tmp_path}/new.db")[0] == 0
    code, _, err = terminal.run("users", "add", "Ann", "--admin", "--data", tmp_path)
    assert (code, "'Ann' is not a name" in err) == (2, True)
    assert os.listdir(tmp_path) == ["new.db"]
