"""URLs of databases: accepted ones, messages without passwords, and the place of a server's URL."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
import uvicorn

from service.cli.main import main
from service.disk import DATABASE
from service.errors import Conflict, DatabaseUnavailable, InUse
from service.server import alone, serve
from service.store import Store
from service.store.database_url import (
    URL_FILE,
    VARIABLE,
    database_url,
    has_password,
    known_url,
    named_url,
    parse_url,
    remember,
    shown,
)
from tests.postgresql import PASSWORD, PostgreSQL
from workers.file_access import FileAccess

SECRET = "s3cr3t"


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


@pytest.mark.parametrize("scheme", ["postgresql", "postgres", "postgresql+psycopg"])
def test_schemes_of_postgresql_mean_psycopg(scheme: str) -> None:
    """All three schemes of PostgreSQL are opened with psycopg 3."""
    url = parse_url(f"{scheme}://user@host:5433/searches")
    assert (url.drivername, url.host, url.port, url.database) == ("postgresql+psycopg", "host", 5433, "searches")


def test_a_file_of_sqlite_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drivers have another working directory: a relative file is the server's."""
    monkeypatch.chdir(tmp_path)
    assert parse_url("sqlite:///a.db").database == str(tmp_path / "a.db")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"user:{SECRET}", "what was given is not a URL; give sqlite:///FILE or postgresql://"),
        (f"mysql://user:{SECRET}@host/db", "'mysql' is not supported; give sqlite:///FILE or postgresql://"),
        (f"postgresql+asyncpg://user:{SECRET}@host/db", r"'postgresql\+asyncpg' is not supported"),
        (f"postgresql://user:x@{SECRET}@host/db", "the URL has more than one @; write the characters"),
        (f"postgresql://user:x@{SECRET}/y@host/db", "the URL has more than one @; write the characters"),
        (f"postgresql://user:{SECRET}@host", r"postgresql://user:\*\*\*@host: names no database"),
        (f"postgresql://host?password={SECRET}", r"password=hidden: names no database"),
        ("sqlite://file.db", "a file has three slashes"),
        ("sqlite://", "names no file, and other processes could not read memory"),
        ("sqlite:///:memory:", "names no file"),
    ],
)
def test_other_urls_are_refused_without_their_secret(text: str, message: str) -> None:
    """A refusal states what would be accepted, and shows no password."""
    with pytest.raises(Conflict, match=message) as refused:
        parse_url(text)
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value.__cause__)


def test_a_url_is_shown_without_its_secrets() -> None:
    """Neither a password nor a secret parameter is shown, and both are known to be there."""
    url = parse_url(f"postgresql://user:{SECRET}@host/db?sslpassword={SECRET}&sslmode=require")
    assert shown(url) == "postgresql://user:***@host/db?sslmode=require&sslpassword=hidden"
    assert has_password(url)
    assert has_password(parse_url(f"postgresql://user@host/db?password={SECRET}"))
    assert not has_password(parse_url("postgresql://user@host/db"))


def test_the_option_then_the_variable_then_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A database is the given one, else the variable's, else that of the last server, else a file."""
    assert database_url(tmp_path).database == str(tmp_path / DATABASE)
    remember(tmp_path, parse_url("postgresql://u@host/last"))
    assert database_url(tmp_path).database == "last"
    monkeypatch.setenv(VARIABLE, "postgresql://u@host/variable")
    assert database_url(tmp_path).database == "variable"
    assert database_url(tmp_path, "postgresql://u@host/option").database == "option"


def test_a_remembered_url_is_for_its_user_alone(tmp_path: Path) -> None:
    """The file with the URL has the password, is readable by its user alone, and no study may read it."""
    url = parse_url(f"postgresql://user:{SECRET}@host/db")
    remember(tmp_path, url)
    file = tmp_path / URL_FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert database_url(tmp_path) == url
    access = FileAccess((str(tmp_path),))
    assert access.refusal(tmp_path / "other") is None
    assert "may hold the password of the server's database" in (access.refusal(file) or "")
    link = tmp_path / "task.jsonl"
    link.symlink_to(file)
    assert access.refusal(link) is not None
    remember(tmp_path, parse_url(f"sqlite:///{tmp_path / DATABASE}"))
    assert not file.exists()


@pytest.mark.parametrize("is_own_ray", [True, False])
def test_a_server_stores_no_password_where_ray_has_the_variable(
    is_own_ray: bool, postgresql: PostgreSQL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A URL of the variable is stored for the server's own Ray alone; else commands miss the variable by name."""
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setenv(VARIABLE, url := postgresql.migrated())
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if not is_own_ray:
        monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:1")
    data = tmp_path / "data"
    for _ in range(2):
        serve(data, port=0)
    secrets = [str(parse_url(url).password).encode(), url.partition("@")[0].rpartition(":")[2].encode()]  # quoted
    contents = {file.name: file.read_bytes() for file in data.rglob("*") if file.is_file()}
    stored = [name for name, content in contents.items() if any(secret in content for secret in secrets)]
    assert stored == ([URL_FILE] if is_own_ray else [])
    assert database_url(data) == parse_url(url)
    monkeypatch.delenv(VARIABLE)
    if is_own_ray:
        assert database_url(data) == parse_url(url)
        postgresql.drop(url)
        return
    missing = rf"database\.url: the server takes its database, postgresql:.*, from {VARIABLE}; set this variable"
    for look_up in (database_url, known_url, lambda directory: named_url(str(directory))):
        with pytest.raises(Conflict, match=missing):
            look_up(data)
    assert main(["clean", "--data", str(data), "--keep", "jobs=1d", "--dry-run"]) != 0
    with alone(data, parse_url(url)):
        with alone(data, parse_url(url)):
            pass
        with pytest.raises(InUse, match="a server with another database, postgresql:"):
            alone(data, parse_url("postgresql:///x")).__enter__()
    postgresql.drop(url)


def test_a_command_makes_no_database(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Commands for a server refuse a directory without a database, and name the variable."""
    for command in (["drain"], ["clean", "--keep", "jobs=1d"]):
        assert main([*command, "--data", str(tmp_path)]) != 0
        assert f"is not there; give the server's own data directory, or set {VARIABLE}" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.db"))


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    """The message for an unreachable server names its host and port."""
    with pytest.raises(DatabaseUnavailable, match=r"@127\.0\.0\.1:1/db: does not answer: .*port 1 failed") as gone:
        Store(f"postgresql://user:{SECRET}@127.0.0.1:1/db")
    assert SECRET not in str(gone.value)


def test_refusals_of_a_server_say_what_it_refused(postgresql: PostgreSQL) -> None:
    """An unknown database and a wrong password are refused with the server's reason, without the password."""
    url = sa.make_url(postgresql.url("nowhere"))
    with pytest.raises(Conflict, match=r'/nowhere.*: cannot be used: .*database "nowhere" does not exist') as refused:
        Store(url)
    assert PASSWORD not in str(refused.value)
    wrong = sa.make_url(postgresql.url("postgres")).set(password=SECRET)
    with pytest.raises(Conflict, match=r"cannot be used: .*password authentication failed for user") as refused:
        Store(wrong)
    assert SECRET not in str(refused.value)


def test_a_missing_driver_is_named_with_its_command(tmp_path: Path) -> None:
    """Without psycopg, the message has the command that installs it."""
    program = (
        "import sys; sys.modules['psycopg'] = None\n"
        "from service.store import Store\n"
        f"Store('postgresql://user:{SECRET}@host/db')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert "the Python package psycopg is not installed here; install it with: pip install 'mergesearch[postgres]'" in (
        done.stderr
    )
    assert SECRET not in done.stderr.rpartition("service.errors")[2]
